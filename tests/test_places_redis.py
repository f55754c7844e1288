"""Addresses of Redis: what is allowed, what is refused and how, and that no secret is ever shown."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import RedisCluster, SSLConnection

from litellm_compaction.config import settings_from
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.places import is_redis, parse_redis, store_url
from litellm_compaction.proxy.litellm_api import proxy_redis, redis_of
from litellm_compaction.stores import open_existing, open_store
from litellm_compaction.stores.redis import client_of
from tests.stores.compactions import compaction


def _options(client: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.connection_pool.connection_kwargs
    return found


def test_a_server() -> None:
    """Host alone; all parts, as redis-py's client reads them; IPv6; Valkey's name for the same."""
    bare = parse_redis("redis://cache")
    assert bare == ("redis://cache/0?", "redis://cache:6379/0", "compaction")
    full = parse_redis(
        "rediss://us%40er:p%2Fw%3F%23@cache:7000/3?prefix=team-a&ssl_ca_certs=/ca.pem&ssl_cert_reqs=none"
    )
    assert (full.place, full.prefix) == ("rediss://cache:7000/3", "team-a")
    pool = client_of(full.url).connection_pool
    said = {"username": "us@er", "password": "p/w?#", "host": "cache", "port": 7000, "db": 3}
    said |= {"ssl_ca_certs": "/ca.pem", "ssl_cert_reqs": "none"}
    assert pool.connection_kwargs.items() >= said.items()
    assert pool.connection_class is SSLConnection
    assert parse_redis("redis://[::1]:7000/1").place == "redis://[::1]:7000/1"
    assert parse_redis("valkey://cache") == bare
    assert _options(client_of(parse_redis("redis://:secret@cache").url))["password"] == "secret"
    assert is_redis("redis")
    assert is_redis("VALKEYS://a")
    assert is_redis("redis+cluster://a")
    assert not is_redis("sqlite://")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://", "redis://user:password@host"),
        ("redis://a,b", "sentinels and clusters are the proxy's own Redis"),
        ("redis://a:port", "redis://user:password@host"),
        ("redis://a:70000", "redis://user:password@host"),
        ("redis://u:p/w@a", "%2F"),
        ("redis://u:p#w@a", "%23"),
        ("redis://u:p[w@a", "%5B"),
        ("redis://a/zero", "number of the database"),
        ("redis+cluster://a/1", "allowed: redis://"),
        ("redis+sentinel://a", "allowed: redis://"),
        ("redis://a?db=1", "unknown option: allowed: prefix"),
        ("redis://a?ssl_ca_certs=/x", "needs rediss://"),
        ("rediss://a?ssl_cert_reqs=maybe", "required, none"),
        ("redis://a?prefix={x}", "prefix: allowed"),
        ("redis+ssh://a", "allowed: redis://"),
    ],
)
def test_a_bad_address_says_what_to_change(url: str, said: str) -> None:
    """One sentence with what is allowed."""
    with pytest.raises(ValueError, match=said):
        parse_redis(url)


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8"), min_size=6))
def test_credentials_come_through_and_are_never_shown(username: str, password: str) -> None:
    """Any characters, quoted; neither place nor representation holds them."""
    password = f"#{password}"
    found = parse_redis(f"redis://{quote(username, safe='')}:{quote(password, safe='')}@host")
    options = _options(client_of(found.url))
    assert (options["username"], options["password"]) == (username, password)
    assert password not in found.place + repr(found) + str(found)


@given(st.text(), st.sampled_from(["redis://u:hunter2{}@@h", "redis:/u:hunter2@{}", "redis://h?password=hunter2{}"]))
def test_a_bad_store_shows_no_password(junk: str, broken: str) -> None:
    """However the URL is broken: the settings' error, which stands in the log, has nothing behind the scheme."""
    with contextlib.suppress(ConfigError):
        settings_from({"store": broken.format(junk)})
        return
    with pytest.raises(ConfigError) as raised:
        settings_from({"store": broken.format(junk)})
    assert "hunter2" not in str(raised.value)


OWN = {"host": "cache", "port": 6380, "password": "p#"}


@pytest.mark.parametrize(
    ("config", "environ", "said"),
    [
        ({}, {"REDIS_HOST": "cache"}, {"host": "cache"}),
        ({}, {"REDIS_URL": "redis://:p@cache:1/3", "REDIS_HOST": "other"}, {"host": "cache", "port": 1, "db": 3}),
        ({"general_settings": {"coordination_redis": OWN}}, {"REDIS_URL": "redis://x"}, OWN),
        (
            {"litellm_settings": {"cache": True, "cache_params": {"type": "redis", "host": "os.environ/H", "ttl": 3}}},
            {"H": "cache", "REDIS_PASSWORD": "p"},
            {"host": "cache", "password": "p"},
        ),
        ({"litellm_settings": {"cache": True}}, {"REDIS_HOST": "cache"}, {"host": "cache"}),
        (
            {"router_settings": {"redis_host": "cache", "redis_port": "os.environ/P", "redis_password": "p"}},
            {"P": "7"},
            {"host": "cache", "password": "p"},
        ),
        ({"general_settings": {"coordination_redis": OWN}, "router_settings": {"redis_host": "other"}}, {}, OWN),
    ],
)
def test_the_proxys_own_redis_is_found(
    config: dict[str, object], environ: dict[str, str], said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where LiteLLM looks, in its order; what a block does not say comes from the variables."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    async def options() -> dict[str, Any]:
        return _options(redis_of(config)())

    assert asyncio.run(options()).items() >= said.items()


def test_the_proxys_own_cluster_is_found() -> None:
    """LiteLLM makes the client."""
    nodes = [{"host": "a", "port": 1}]
    config = {"litellm_settings": {"cache": True, "cache_params": {"redis_startup_nodes": nodes}}}

    async def is_cluster() -> bool:
        return isinstance(redis_of(config)(), RedisCluster)

    assert asyncio.run(is_cluster())


@pytest.mark.parametrize(
    ("config", "environ"),
    [
        ({}, {}),
        ({"litellm_settings": {"cache": True, "cache_params": {"type": "s3"}}}, {}),
        ({"litellm_settings": {"cache_params": OWN}}, {}),
        ({}, {"REDIS_CLUSTER_NODES": "hunter2"}),
    ],
)
def test_what_means_no_redis_is_refused(
    config: dict[str, object], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to change, without a secret."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=r"no Redis of its own: set general_settings\.coordination_redis") as raised:
        redis_of(config)()
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("store", "environ", "said"),
    [
        ("os.environ/NOWHERE", {}, "the variable NOWHERE is not set"),
        ("os.environ/WRONG", {"WRONG": "redis://:hunter2@a?x"}, "unknown option"),
    ],
)
def test_a_variable_that_names_no_store_is_refused(store: str, environ: dict[str, str], said: str) -> None:
    """At the start, with what to change, without a secret."""
    with pytest.raises(ConfigError, match=said) as raised:
        settings_from({"store": store}).with_store(environ)
    assert "hunter2" not in str(raised.value)
    assert str(raised.value).startswith("callback_settings.litellm_compaction.store")


def test_a_variable_keeps_the_password_out_of_the_file() -> None:
    """As elsewhere in a configuration; any store."""
    assert store_url("os.environ/STORE", {"STORE": "redis://:p@h"}) == "redis://:p@h"
    assert store_url("sqlite://", {}) == "sqlite://"
    assert settings_from({"store": "os.environ/S"}).with_store({"S": "memory://"}).store == "memory://"
    assert "hunter2" not in repr(settings_from({"store": "redis://:hunter2@h"}))


@pytest.mark.parametrize("cache", [None, SimpleNamespace(), SimpleNamespace(init_async_client=lambda: "client")])
def test_the_running_proxys_own_redis_is_its_client(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked up with each call; where LiteLLM has none, or another version has no such client, an error says so."""
    monkeypatch.setitem(sys.modules, "litellm.proxy.proxy_server", SimpleNamespace(redis_usage_cache=cache))
    if hasattr(cache, "init_async_client"):
        assert proxy_redis() == "client"
        return
    with pytest.raises(StoreError, match="no Redis of its own"):
        proxy_redis()


async def test_a_proxy_without_a_redis_goes_on_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    """And uses the one that LiteLLM has later: its database is read after the configuration."""
    with pytest.raises(StoreError, match="there is no proxy"):
        open_existing("redis", ttl_s=1, max_bytes=1024)

    def none() -> Any:
        raise StoreError("no Redis of its own")

    store = open_store("redis", ttl_s=1000, max_bytes=1_000_000, redis=none)
    await store.put("team", compaction("h"))
    assert await store.find("team", ["h"]) == [compaction("h")]
    assert caplog.text.count("store_failed no Redis of its own") == 1
    await store.aclose()
