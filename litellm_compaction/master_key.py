"""The proxy's master key, the environment's or one that is made once and kept in a file, and keys derived from it.

LiteLLM refuses to start without one. All workers encrypt with it what they keep, and what clients keep for them.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.places import FOLDER_VARIABLE, data_folder, make_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_VARIABLE = "LITELLM_MASTER_KEY"
_FILE_NAME = "master_key"
# No JSON and no digest begins so.
_LOCKED, _NONCE_BYTES = b"\x01", 12


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterKey:
    """The key, and the file that holds it; `created` by this call, it must be shown now."""

    key: str = field(repr=False)
    path: Path | None = None
    created: bool = False


class Box:
    """Encrypts with a key of its own: readers of a store learn nothing of it, and writers forge nothing.

    AES-256-GCM. What was locked under one scope and key, or for one purpose, is nothing under
    another. `secret` gives the master key, which is known only after the configuration; None if there is none.
    """

    def __init__(self, secret: Callable[[], str | None], purpose: bytes) -> None:
        self._secret = secret
        self._purpose = b"litellm_compaction page " + purpose

    @property
    def has_key(self) -> bool:
        return bool(self._secret())

    def locked(self, body: bytes, scope: str, key: str) -> bytes:
        """Returns `body`, encrypted; a StoreError says that there is no master key."""
        nonce = os.urandom(_NONCE_BYTES)
        return _LOCKED + nonce + self._cipher().encrypt(nonce, body, f"{scope}\n{key}".encode("utf-8", "surrogatepass"))

    def opened(self, body: bytes, scope: str, key: str) -> bytes | None:
        """Returns what was locked; None if it was not, or with another master key, scope or key, or was changed."""
        from cryptography.exceptions import InvalidTag

        nonce, text = body[1 : 1 + _NONCE_BYTES], body[1 + _NONCE_BYTES :]
        if not (is_locked(body) and self.has_key):
            return None
        try:
            return self._cipher().decrypt(nonce, text, f"{scope}\n{key}".encode("utf-8", "surrogatepass"))
        except (InvalidTag, ValueError):
            return None

    def _cipher(self) -> AESGCM:
        # Here: it takes 40 ms to import, and most commands do without.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._key())

    def _key(self) -> bytes:
        if not (secret := self._secret()):
            raise StoreError("what is kept is encrypted with the proxy's master key, and there is none")
        return hashlib.blake2b(self._purpose, key=stretched(secret), digest_size=32).digest()


def is_locked(body: bytes) -> bool:
    return body.startswith(_LOCKED)


@functools.lru_cache(maxsize=4)
def stretched(secret: str) -> bytes:
    """A key from a short secret, so that nobody tries millions of secrets a second: scrypt, 16 MiB and some 50 ms."""
    # Without a salt of its own: all workers have to come to the same.
    return hashlib.scrypt(secret.encode(), salt=b"litellm_compaction page", n=2**14, r=8, p=1, dklen=32)


def ensure_master_key(environ: MutableMapping[str, str]) -> MasterKey:
    """The proxy's master key: `LITELLM_MASTER_KEY` if set, else the one in the data folder, made if missing.

    Processes that start together all get the same key, and `environ` holds it then, for LiteLLM to read. A ConfigError
    says that the folder or file cannot be used.
    """
    if given := environ.get(KEY_VARIABLE, "").strip():
        return MasterKey(key=given)
    path = data_folder(environ) / _FILE_NAME
    try:
        created = not path.exists() and _create(path, f"sk-{secrets.token_urlsafe(32)}")
        key = _read(path)
    except OSError as exc:
        raise ConfigError(
            f"The master key's file {path} cannot be used ({exc}). Set {KEY_VARIABLE} to a key of your own, "
            f"or {FOLDER_VARIABLE} to a folder that can be written."
        ) from exc
    environ[KEY_VARIABLE] = key
    return MasterKey(key=key, path=path, created=created)


def known_master_key(environ: Mapping[str, str]) -> str | None:
    """The key that `ensure_master_key` would give, without making one; None if there is none."""
    if not environ.get(KEY_VARIABLE, "").strip() and not (data_folder(environ) / _FILE_NAME).exists():
        return None
    return ensure_master_key(dict(environ)).key


def _read(path: Path) -> str:
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        make_private(path)
    key = path.read_text(encoding="utf-8", errors="replace").strip()
    if not key.startswith("sk-") or not key.isprintable() or len(key) < 20:
        raise ConfigError(
            f"{path} does not hold a master key (one line, beginning with sk-). "
            "Delete it, and the next start makes one."
        )
    return key


def _create(path: Path, key: str) -> bool:
    """Writes the key; returns False if another process was faster."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # mkstemp creates with mode 0600. The link makes the whole file appear at once, and fails if there is one.
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{key}\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError:
            # File systems without hard links; two first starts in the same instant are then not told apart.
            Path(draft).replace(path)
        return True
    finally:
        Path(draft).unlink(missing_ok=True)
