"""Finds the places of stored things: the folder of the user's files and their privacy, and the Redis of `store`.

The text that is shown of a Redis' URL, in errors too, never holds a user name or a password.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from litellm_compaction.errors import ConfigError

FOLDER_VARIABLE = "LITELLM_COMPACTION_HOME"
_FOLDER_NAME = "litellm_compaction"


def make_private(path: Path) -> None:
    """Closes a file to other users; one that has become a link is left alone, since its target is another's choice.

    Raises:
        OSError: it is missing, a link, or another user's.
    """
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def data_folder(environ: Mapping[str, str]) -> Path:
    """The folder for the user's files; it need not exist yet.

    `LITELLM_COMPACTION_HOME`, else the platform's place for application data: `XDG_DATA_HOME` or `~/.local/share`,
    `~/Library/Application Support` on macOS, `%LOCALAPPDATA%` on Windows.

    Raises:
        ConfigError: the user has no home folder.
    """
    own = environ.get(FOLDER_VARIABLE, "").strip()
    if own:
        return Path(own).expanduser().absolute()
    if sys.platform == "win32" and environ.get("LOCALAPPDATA"):
        return Path(environ["LOCALAPPDATA"]) / _FOLDER_NAME
    # XDG Base Directory Specification 0.8: relative paths must be ignored.
    shared = environ.get("XDG_DATA_HOME", "")
    if shared and Path(shared).is_absolute():
        return Path(shared) / _FOLDER_NAME
    try:
        home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    except RuntimeError as exc:
        raise ConfigError(f"There is no home folder. Set {FOLDER_VARIABLE} to a folder that can be written.") from exc
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / _FOLDER_NAME
    return home / ".local" / "share" / _FOLDER_NAME


# The value of `store` that means the Redis which the proxy itself is configured with.
PROXYS_OWN = "redis"
DEFAULT_PREFIX = "compaction"
ENVIRONMENT_PREFIX = "os.environ/"
EXAMPLES = "redis://:password@host:6379/0, rediss://… (TLS), redis (the proxy's own, with sentinels or a cluster too)"
_SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
# The names of TLS are redis-py's, which operators know.
_OPTIONS = ("prefix", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_FORM = "redis://user:password@host:6379/0; a / ? # [ or @ in a user name or password is written %2F %3F %23 %5B %40"


class RedisAddress(NamedTuple):
    """The means to connect.

    Attributes:
        url: as redis-py's `from_url` takes it; it holds the credentials.
        place: for people, without credentials.
        prefix: of every key.
    """

    url: str
    place: str
    prefix: str

    def __repr__(self) -> str:
        return f"RedisAddress({self.place})"


def is_redis(store: str) -> bool:
    """Returns True if a value of `store` means a Redis, well written or not."""
    return store == PROXYS_OWN or (re.split(r"[+:]", store)[0].lower() in _SCHEMES and "://" in store)


def parse_redis(url: str) -> RedisAddress:
    """Checks a URL.

    Raises:
        ValueError: without anything of the URL that may be secret.
    """
    name, _, rest = url.partition("://")
    if (scheme := _SCHEMES.get(name.lower())) is None:
        raise ValueError(f"allowed: {EXAMPLES}")
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        host, port = parts.hostname or "", 6379 if parts.port is None else parts.port
    except ValueError:
        # Python's words quote a possible password.
        raise ValueError(f"allowed: {_FORM}") from None
    db = parts.path.strip("/") or "0"
    has_stray_at = "@" in parts.path + parts.query + (parts.username or "")
    if not host or not port or "," in host or parts.fragment or has_stray_at:
        raise ValueError(f"allowed: {_FORM}; sentinels and clusters are the proxy's own Redis, `store: redis`")
    if not (db.isascii() and db.isdigit()):
        raise ValueError("after the host stands the number of the database: redis://host:6379/0")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if any(option not in _OPTIONS or (option.startswith("ssl_") and scheme != "rediss") for option in options):
        # An option's name may be the end of a password.
        raise ValueError(f"unknown option: allowed: {', '.join(_OPTIONS)}; ssl_… needs rediss://")
    prefix = options.pop("prefix", DEFAULT_PREFIX)
    if not _PREFIX.fullmatch(prefix):
        raise ValueError("prefix: allowed: 1 to 64 letters, digits, and _ . : -")
    if options.get("ssl_cert_reqs", "required") not in ("required", "none"):
        raise ValueError("ssl_cert_reqs: allowed: required, none")
    place = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/{db}"
    return RedisAddress(f"{scheme}://{parts.netloc}/{db}?{urlencode(options)}", place, prefix)
