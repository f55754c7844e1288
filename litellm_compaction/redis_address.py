"""Where a Redis or Valkey is, as `store` says it: one server, a sentinel's master, or a cluster.

Values in, values out: the settings check an address with it, and `stores/redis_connection.py` connects to one. What is
shown of an address, in errors too, never holds a user name or a password.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

Kind: TypeAlias = Literal["server", "sentinel", "cluster"]

# The value of `store` that means the Redis which the proxy itself is configured with.
PROXYS_OWN = "redis"
DEFAULT_PREFIX = "compaction"
_PORTS: dict[Kind, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}
_KINDS: dict[str, Kind] = {"": "server", "+sentinel": "sentinel", "+cluster": "cluster"}
_SCHEMES = {
    f"{name}{secure}{suffix}": (kind, bool(secure))
    for name in ("redis", "valkey")
    for secure in ("", "s")
    for suffix, kind in _KINDS.items()
}
# What every kind of address takes behind `?`; the names of TLS are redis-py's, which operators know.
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
_SENTINEL_OPTIONS = ("service", "sentinel_username", "sentinel_password")
_CERT_REQS = ("required", "none")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.%]+\]")

EXAMPLES = (
    "redis://:password@host:6379/0, rediss://… (TLS), redis+sentinel://host1:26379,host2:26379/0?service=mymaster, "
    "redis+cluster://host1:6379,host2:6379, or redis (the proxy's own Redis)"
)


class Node(NamedTuple):
    """One server's place."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """What it takes to connect.

    Attributes:
        nodes: the server; the sentinels; those of a cluster that are asked for the others.
        service: the sentinels' name for the master; "" without sentinels.
        tls: redis-py's `ssl_…` options by name.
        prefix: what every key begins with.
    """

    kind: Kind = "server"
    nodes: tuple[Node, ...]
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    service: str = ""
    sentinel_username: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    is_tls: bool = False
    tls: tuple[tuple[str, str], ...] = ()
    prefix: str = DEFAULT_PREFIX

    def __str__(self) -> str:
        """As an operator writes it, without credentials."""
        scheme = ("rediss" if self.is_tls else "redis") + ("" if self.kind == "server" else f"+{self.kind}")
        nodes = ",".join(map(str, self.nodes))
        db = "" if self.kind == "cluster" else f"/{self.db}"
        return f"{scheme}://{nodes}{db}" + (f"?service={self.service}" if self.service else "")


def is_redis(store: str) -> bool:
    """Whether a value of `store` means a Redis, well written or not."""
    return store == PROXYS_OWN or store.partition("://")[0].lower() in _SCHEMES


def parse(url: str) -> RedisAddress:
    """The address that a URL names.

    Raises:
        ValueError: what is wrong and what is allowed, without anything of the URL that may be secret.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in _SCHEMES:
        raise ValueError(f"allowed: {EXAMPLES}")
    kind, is_tls = _SCHEMES[scheme.lower()]
    # Several nodes are no host of a URL's; the rest is.
    authority, path, query = _split(rest)
    credentials, at, places = authority.rpartition("@")
    username, password = _credentials(credentials) if at else (None, None)
    options = _options(query, kind, is_tls)
    service = options.get("service", "")
    if kind == "sentinel" and not service:
        raise ValueError("a sentinel's address needs the master's name: …?service=mymaster")
    nodes = tuple(_nodes(places, _PORTS[kind]))
    if kind == "server" and len(nodes) > 1:
        raise ValueError("several hosts: allowed with redis+sentinel:// and redis+cluster://")
    return RedisAddress(
        kind=kind,
        nodes=nodes,
        db=_db(path, kind),
        username=username,
        password=password,
        service=service,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        is_tls=is_tls,
        tls=tuple((name, options[name]) for name in _TLS_OPTIONS if name in options),
        prefix=options.get("prefix", DEFAULT_PREFIX),
    )


def _split(rest: str) -> tuple[str, str, str]:
    found = urlsplit(f"//{rest}")
    if found.fragment or "#" in rest:
        raise ValueError("a # in a user name or password is written %23")
    return found.netloc, found.path, found.query


def _credentials(text: str) -> tuple[str | None, str | None]:
    if any(mark in text for mark in "/?@"):
        raise ValueError("a / ? or @ in a user name or password is written %2F, %3F, %40")
    username, _, password = text.partition(":")
    return unquote(username) or None, unquote(password) or None


def _nodes(places: str, port: int) -> Iterator[Node]:
    for place in places.split(","):
        host, separator, number = place.rpartition(":")
        if not separator or number.endswith("]"):
            host, number = place, str(port)
        if not _HOST.fullmatch(host):
            raise ValueError("a host is missing or not valid: redis://host:6379/0")
        # Where a password holds an unescaped / or ?, a part of it stands here: it is not repeated.
        if not number.isascii() or not number.isdigit() or not 0 < int(number) < 65536:
            raise ValueError(
                "a port is not a number from 1 to 65535; a / ? # or @ in a password is written %2F %3F %23 %40"
            )
        yield Node(host.strip("[]"), int(number))


def _db(path: str, kind: Kind) -> int:
    number = path.strip("/")
    if not number:
        return 0
    if not (number.isascii() and number.isdigit()):
        raise ValueError("behind the host stands the number of the database: redis://host:6379/0")
    if kind == "cluster" and int(number):
        raise ValueError("a cluster has database 0 only")
    return int(number)


def _options(query: str, kind: Kind, is_tls: bool) -> Mapping[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    allowed = ["prefix", *(_TLS_OPTIONS if is_tls else ()), *(_SENTINEL_OPTIONS if kind == "sentinel" else ())]
    for name in options:
        if name not in allowed:
            more = "; ssl_… needs rediss://" if name in _TLS_OPTIONS else ""
            # The name of an option is shown only where it looks like one: it may be the end of a password.
            shown = f" {name}" if name.isidentifier() and len(name) <= 32 and name not in ("", query) else ""
            raise ValueError(f"unknown option{shown}: allowed: {', '.join(allowed)}{more}")
    if not _PREFIX.fullmatch(options.get("prefix", DEFAULT_PREFIX)):
        raise ValueError("prefix: allowed: 1 to 64 letters, digits, and _ . : -")
    if options.get("ssl_cert_reqs", "required") not in _CERT_REQS:
        raise ValueError(f"ssl_cert_reqs: allowed: {', '.join(_CERT_REQS)}")
    return options
