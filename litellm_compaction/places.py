"""Finds the places of stored things: the folder of the user's files and their privacy, and the Redis of `store`."""

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
    """Closes a file to other users; an OSError says that it is missing, another's, or a link, which is left alone."""
    if os.name != "posix":
        return
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        os.fchmod(file.fileno(), 0o600)


def data_folder(environ: Mapping[str, str]) -> Path:
    """The folder for the user's files, which need not exist yet; a ConfigError says that there is no place for it."""
    if own := environ.get(FOLDER_VARIABLE, "").strip():
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
    below = ("Library", "Application Support") if sys.platform == "darwin" else (".local", "share")
    return home.joinpath(*below, _FOLDER_NAME)


# The value of `store` that means the Redis which the proxy itself is configured with.
PROXYS_OWN = "redis"
DEFAULT_PREFIX = "compaction"
ENVIRONMENT_PREFIX = "os.environ/"
_SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
# The names of TLS are redis-py's, which operators know.
_OPTIONS = ("prefix", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
FORMS = (
    "redis://user:password@host:6379/0, with the number of the database (a / ? # [ or @ in a user name or password is "
    "written %2F %3F %23 %5B %40), rediss://… (TLS), and behind ? a prefix= of 1 to 64 letters, digits and _ . : - and "
    f"with TLS {', '.join(_OPTIONS[1:])} (required, none); redis (the proxy's own, with sentinels or a cluster too)"
)


class RedisAddress(NamedTuple):
    """The means to connect: `url` as redis-py takes it, with credentials, `place` without; `prefix` of every key."""

    url: str
    place: str
    prefix: str

    def __repr__(self) -> str:
        return f"RedisAddress({self.place})"


def is_redis(store: str) -> bool:
    """Returns True if a value of `store` means a Redis, well written or not."""
    return store == PROXYS_OWN or (re.split(r"[+:]", store)[0].lower() in _SCHEMES and "://" in store)


def parse_redis(url: str) -> RedisAddress:
    """Checks a URL; a ValueError says which ones are allowed, and nothing of this one, which may hold a secret."""
    name, _, rest = url.partition("://")
    try:
        scheme = _SCHEMES[name.lower()]
        parts = urlsplit(f"{scheme}://{rest}")
        host, port = parts.hostname or "", 6379 if parts.port is None else parts.port
    except (KeyError, ValueError):
        # Python's words quote a possible password.
        raise ValueError(f"allowed: {FORMS}") from None
    db, options = parts.path.strip("/") or "0", dict(parse_qsl(parts.query, keep_blank_values=True))
    prefix = options.pop("prefix", DEFAULT_PREFIX)
    is_server = host and port and "," not in host and db.isascii() and db.isdigit() and not parts.fragment
    has_stray_at = "@" in parts.path + parts.query + (parts.username or "")
    are_options = options.keys() <= {*_OPTIONS} and (scheme == "rediss" or not options)
    is_checked = options.get("ssl_cert_reqs", "required") in ("required", "none")
    if not (is_server and are_options and is_checked and _PREFIX.fullmatch(prefix)) or has_stray_at:
        raise ValueError(f"allowed: {FORMS}")
    place = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/{db}"
    return RedisAddress(f"{scheme}://{parts.netloc}/{db}?{urlencode(options)}", place, prefix)
