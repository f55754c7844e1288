"""Where a Redis or Valkey is, as `store` says it or the proxy's own configuration: a server, sentinels, or a cluster.

Values in, values out: the settings check an address with it, and `stores/redis_connection.py` connects to one. What is
shown of an address, in errors too, never holds a user name or a password.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode

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
ENVIRONMENT_PREFIX = "os.environ/"
# LiteLLM's words for where a Redis is, in its blocks and behind REDIS_ in variables.
_TARGETS = ("url", "host", "startup_nodes", "sentinel_nodes")
_IDENTITIES = ("gcp_service_account", "azure_redis_ad_token", "aws_iam_auth", "credential_provider")
_PROXY_NAMES = (
    *_TARGETS,
    *("cluster_nodes", "port", "db", "username", "password", "service_name", "sentinel_password", "ssl"),
    *_TLS_OPTIONS,
    *_IDENTITIES,
)
_REDIS_CACHES = ("redis", "redis-semantic")
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
        return f"{self._scheme}://{self._place}" + (f"?service={self.service}" if self.service else "")

    @property
    def url(self) -> str:
        """What `parse` makes this of; it holds the credentials."""
        credentials = ":".join(quote(part or "", safe="") for part in (self.username, self.password))
        before = "" if credentials == ":" else f"{credentials}@"
        names = ("service", "sentinel_username", "sentinel_password")
        options = [(name, value) for name in names if (value := getattr(self, name))]
        options += [*self.tls, *([] if self.prefix == DEFAULT_PREFIX else [("prefix", self.prefix)])]
        return f"{self._scheme}://{before}{self._place}" + (f"?{urlencode(options)}" if options else "")

    @property
    def _scheme(self) -> str:
        return ("rediss" if self.is_tls else "redis") + ("" if self.kind == "server" else f"+{self.kind}")

    @property
    def _place(self) -> str:
        return ",".join(map(str, self.nodes)) + ("" if self.kind == "cluster" else f"/{self.db}")


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


def store_url(store: str, config: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """What a value of `store` means beside the proxy's configuration: itself, but for two words.

    `os.environ/NAME` is the variable's value, as elsewhere in the file; `redis` the Redis that the proxy's workers
    coordinate themselves by.

    Args:
        config: the whole file, as a mapping.

    Raises:
        ValueError: the variable is not set, or no such Redis is configured.
    """
    if store.startswith(ENVIRONMENT_PREFIX):
        name = store.removeprefix(ENVIRONMENT_PREFIX)
        if not (store := environ.get(name, "")):
            raise ValueError(f"the variable {name} is not set")
    return _proxys_own(config, environ).url if store == PROXYS_OWN else store


def _proxys_own(config: Mapping[str, object], environ: Mapping[str, str]) -> RedisAddress:
    """The Redis of `general_settings.coordination_redis`, of the cache, of the router, or of `REDIS_…` variables.

    In LiteLLM's order (proxy_server.py and _redis.py, 1.106.2 and 1.109.1): what a block does not say, variables do.
    """
    said = {name: environ[f"REDIS_{name.upper()}"] for name in _PROXY_NAMES if environ.get(f"REDIS_{name.upper()}")}
    if "cluster_nodes" in said:
        said["startup_nodes"] = said["cluster_nodes"]
    for block in _proxy_blocks(config):
        own = {name: _resolved(value, environ) for name, value in block.items() if value is not None}
        if any(own.get(name) for name in ("host", "startup_nodes", "sentinel_nodes")) and not own.get("url"):
            said.pop("url", None)
        if any((said | own).get(name) for name in _TARGETS):
            return _of_proxy(said | own)
    if any(said.get(name) for name in _TARGETS):
        return _of_proxy(said)
    raise ValueError(
        "the proxy has no Redis of its own: set general_settings.coordination_redis, litellm_settings.cache_params, "
        "or REDIS_HOST and REDIS_PORT; or name one here: redis://host:6379/0"
    )


def _proxy_blocks(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    general, litellm, router = (
        found if isinstance(found := config.get(name), Mapping) else {}
        for name in ("general_settings", "litellm_settings", "router_settings")
    )
    if isinstance(block := general.get("coordination_redis"), Mapping):
        yield block
    cache = litellm.get("cache_params") or {}
    if litellm.get("cache") is True and isinstance(cache, Mapping) and cache.get("type", "redis") in _REDIS_CACHES:
        yield {("startup_nodes" if name == "redis_startup_nodes" else name): value for name, value in cache.items()}
    more = router.get("cache_kwargs")
    named = {name.removeprefix("redis_"): value for name, value in router.items() if name.startswith("redis_")}
    if named:
        yield {**named, **(more if isinstance(more, Mapping) else {})}


def _resolved(value: object, environ: Mapping[str, str]) -> object:
    is_variable = isinstance(value, str) and value.startswith(ENVIRONMENT_PREFIX)
    return environ.get(str(value).removeprefix(ENVIRONMENT_PREFIX)) if is_variable else value


def _of_proxy(said: Mapping[str, object]) -> RedisAddress:
    """The address that LiteLLM's words for one mean."""
    if any(_is_true(said.get(name)) for name in _IDENTITIES):
        raise ValueError("the proxy signs in to its Redis by a cloud identity, which is not supported here: name one")
    is_cluster, is_sentinel = bool(said.get("startup_nodes")), bool(said.get("sentinel_nodes"))
    if said.get("url") and not is_cluster and not is_sentinel:
        return parse(str(said["url"]))
    is_tls = _is_true(said.get("ssl"))
    nodes = _listed(said.get("startup_nodes") or said.get("sentinel_nodes"))
    if not nodes:
        nodes = (f"{said['host']}:{said.get('port') or _PORTS['server']}",)
    options = {"service": said.get("service_name"), "sentinel_password": said.get("sentinel_password")}
    asked = {name: str(value) for name, value in options.items() if value and is_sentinel}
    if is_tls:
        asked |= {name: str(said[name]).lower().removeprefix("cert_") for name in _TLS_OPTIONS[-1:] if said.get(name)}
        asked |= {name: str(said[name]) for name in _TLS_OPTIONS[:-1] if said.get(name)}
    credentials = ":".join(quote(str(said.get(name) or ""), safe="") for name in ("username", "password"))
    suffix = "+cluster" if is_cluster else "+sentinel" if is_sentinel else ""
    db = "" if is_cluster else f"/{said.get('db') or 0}"
    return parse(f"redis{'s' if is_tls else ''}{suffix}://{credentials}@{','.join(nodes)}{db}?{urlencode(asked)}")


def _listed(nodes: object) -> tuple[str, ...]:
    """host:port of `[{"host": …, "port": …}]` or `[["host", port]]`, or of its JSON."""
    try:
        found = json.loads(nodes) if isinstance(nodes, str) else nodes
        if not isinstance(found, list):
            return ()
        pairs = [(node["host"], node["port"]) if isinstance(node, Mapping) else node for node in found]
        return tuple(f"{host}:{port}" for host, port in pairs)
    except (ValueError, TypeError, KeyError):
        raise ValueError("the proxy's list of Redis nodes cannot be read") from None


def _is_true(value: object) -> bool:
    return value.lower() in ("true", "1", "yes") if isinstance(value, str) and len(value) < 5 else bool(value)


def _split(rest: str) -> tuple[str, str, str]:
    """Authority, path and query (RFC 3986, 3).

    `urlsplit` takes no bracket inside a list of hosts (CPython since CVE-2025-0938), and quotes passwords in errors.
    """
    if "#" in rest:
        raise ValueError("a # in a user name or password is written %23")
    before, _, query = rest.partition("?")
    authority, slash, path = before.partition("/")
    if "@" in path + query:
        raise ValueError("a / ? or @ in a user name or password is written %2F, %3F, %40")
    return authority, slash + path, query


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
