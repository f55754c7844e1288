"""Where things are: Redis, what is refused and how, and that no secret is ever shown."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import SSLConnection

from litellm_compaction.config import settings_from
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.places import is_redis, parse_redis
from litellm_compaction.proxy.litellm_inside import redis_of
from litellm_compaction.stores.redis import client_of


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
    "url",
    [
        *("redis://", "redis://a,b", "redis://a:70000", "redis://u:p/w@a", "redis://a/zero", "redis+cluster://a/1"),
        *("redis://a?db=1", "redis://a?ssl_ca_certs=/x", "rediss://a?ssl_cert_reqs=maybe", "redis://a?prefix={x}"),
    ],
)
def test_a_bad_address_is_told_what_is_allowed(url: str) -> None:
    """The form, how to quote a password, the options, and what to do about sentinels and clusters."""
    with pytest.raises(ValueError, match=r"allowed: redis://user:.*database .*%2F.*prefix=.*ssl_ca_certs.*sentinels"):
        parse_redis(url)


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8"), min_size=6))
def test_credentials_come_through_and_are_never_shown(username: str, password: str) -> None:
    """Any characters, quoted; neither place nor representation holds them."""
    password = f"#{password}"
    found = parse_redis(f"redis://{quote(username, safe='')}:{quote(password, safe='')}@host")
    options = _options(client_of(found.url))
    assert (options["username"], options["password"]) == (username, password)
    assert password not in found.place + repr(found) + str(found)


OWN = {"host": "cache", "port": 6380, "password": "p#"}


@pytest.mark.parametrize(
    ("config", "environ", "said"),
    [
        ({}, {"REDIS_HOST": "cache"}, {"host": "cache"}),
        ({}, {"REDIS_URL": "redis://:p@cache:1/3", "REDIS_HOST": "other"}, {"host": "cache", "port": 1, "db": 3}),
        ({"general_settings": {"coordination_redis": OWN}}, {"REDIS_URL": "redis://x"}, OWN),
        ({}, {}, None),
        ({"litellm_settings": {"cache_params": OWN}}, {}, None),
        ({}, {"REDIS_CLUSTER_NODES": "hunter2"}, None),
    ],
)
def test_the_proxys_own_redis_is_found(
    config: dict[str, object], environ: dict[str, str], said: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block before variables; where none is, with what to change and no secret."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    async def options() -> dict[str, Any]:
        return _options(redis_of(config)())

    if said is not None:
        assert asyncio.run(options()).items() >= said.items()
        return
    with pytest.raises(StoreError, match=r"no Redis of its own: set general_settings\.coordination_redis") as raised:
        asyncio.run(options())
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("store", "environ", "said"),
    [
        ("os.environ/NOWHERE", {}, "the variable NOWHERE is not set"),
        ("os.environ/WRONG", {"WRONG": "redis://:hunter2@a?x"}, "allowed: sqlite://|allowed: redis://"),
    ],
)
def test_a_variable_that_names_no_store_is_refused(store: str, environ: dict[str, str], said: str) -> None:
    """At the start, with what to change, without a secret."""
    with pytest.raises(ConfigError, match=said) as raised:
        settings_from({"store": store}).with_store(environ)
    assert "hunter2" not in str(raised.value)
    assert str(raised.value).startswith("callback_settings.litellm_compaction.store")


@given(st.text(), st.sampled_from(["redis://u:hunter2{}@@h", "redis:/u:hunter2@{}", "redis://h?password=hunter2{}"]))
def test_a_bad_store_shows_no_password(junk: str, broken: str) -> None:
    """However the URL is broken: the settings' error, which stands in the log, has nothing behind the scheme."""
    try:
        settings_from({"store": broken.format(junk)})
    except ConfigError as error:
        assert "hunter2" not in str(error)  # noqa: PT017 - both ends are fine here
