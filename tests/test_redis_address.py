"""Addresses of Redis: what is allowed, what is refused and how, and that no secret is ever shown."""

from __future__ import annotations

import contextlib
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.config import settings_from
from litellm_compaction.errors import ConfigError
from litellm_compaction.redis_address import Node, RedisAddress, is_redis, parse, store_url


def test_a_server() -> None:
    """Host alone; all parts; IPv6; Valkey's name for the same."""
    bare = parse("redis://cache")
    assert (bare.kind, bare.nodes, bare.db, bare.username, bare.password) == (
        "server",
        (Node("cache", 6379),),
        0,
        None,
        None,
    )
    full = parse("rediss://us%40er:p%2Fw%3F%23@cache:7000/3?prefix=team-a&ssl_ca_certs=/ca.pem&ssl_cert_reqs=none")
    assert (full.username, full.password, full.db, full.is_tls) == ("us@er", "p/w?#", 3, True)
    assert dict(full.tls) == {"ssl_ca_certs": "/ca.pem", "ssl_cert_reqs": "none"}
    assert full.prefix == "team-a"
    assert parse("redis://[::1]:7000/1").nodes == (Node("::1", 7000),)
    assert parse("redis://[::1]").nodes == (Node("::1", 6379),)
    assert parse("valkey://cache") == bare
    assert parse("redis://:secret@cache").password == "secret"


def test_sentinels_and_clusters() -> None:
    """Several hosts, each with its own usual port; the master's name."""
    found = parse("redis+sentinel://u:p@a,b:26380/2?service=mymaster&sentinel_password=s")
    assert (found.kind, found.nodes, found.service, found.db) == (
        "sentinel",
        (Node("a", 26379), Node("b", 26380)),
        "mymaster",
        2,
    )
    assert (found.password, found.sentinel_password) == ("p", "s")
    cluster = parse("valkeys+cluster://a,b:7001")
    assert (cluster.kind, cluster.nodes, cluster.is_tls) == ("cluster", (Node("a", 6379), Node("b", 7001)), True)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://", "a host is missing"),
        ("redis://a,b", "several hosts"),
        ("redis://a:port", "a port is not a number"),
        ("redis://a:70000", "a port is not a number"),
        ("redis://u:p/w@a", "%2F"),
        ("redis://u:p#w@a", "%23"),
        ("redis://u:p@w@a", "%40"),
        ("redis://a/zero", "number of the database"),
        ("redis+cluster://a/1", "database 0 only"),
        ("redis+sentinel://a", r"\?service=mymaster"),
        ("redis://a?db=1", "unknown option db: allowed: prefix"),
        ("redis://a?ssl_ca_certs=/x", "needs rediss://"),
        ("rediss://a?ssl_cert_reqs=maybe", "required, none"),
        ("redis://a?prefix={x}", "prefix: allowed"),
        ("redis+ssh://a", "allowed: redis://"),
    ],
)
def test_a_bad_address_says_what_to_change(url: str, said: str) -> None:
    """One sentence with what is allowed."""
    with pytest.raises(ValueError, match=said):
        parse(url)


@given(st.text(min_size=1), st.text(min_size=6), st.sampled_from(["", "+sentinel", "+cluster"]))
def test_credentials_come_through_and_are_never_shown(username: str, password: str, kind: str) -> None:
    """Any characters, quoted; neither text nor representation holds them."""
    username, password = username.encode(errors="replace").decode(), f"#{password.encode(errors='replace').decode()}"
    service = "service=m" if kind == "+sentinel" else ""
    found = parse(f"redis{kind}://{quote(username, safe='')}:{quote(password, safe='')}@host?{service}")
    assert (found.username, found.password) == (username, password)
    assert password not in str(found) + repr(found)


@given(st.text(), st.sampled_from(["redis://u:hunter2{}@@h", "redis:/u:hunter2@{}", "redis://h?password=hunter2{}"]))
def test_a_bad_store_shows_no_password(junk: str, broken: str) -> None:
    """However the URL is broken: the settings' error, which stands in the log, has nothing behind the scheme."""
    with contextlib.suppress(ConfigError):
        settings_from({"store": broken.format(junk)})
        return
    with pytest.raises(ConfigError) as raised:
        settings_from({"store": broken.format(junk)})
    assert "hunter2" not in str(raised.value)


def test_a_password_that_looks_like_something_else_is_one() -> None:
    """What a sign is called in another form of Unicode is nothing to an address, and no error says it."""
    assert parse("redis://:p\u2100w[d@h:6379/0").password == "p\u2100w[d"


def test_what_is_shown_can_be_read_back() -> None:
    """All but the credentials."""
    for url in ("redis://h:6379/0", "rediss+sentinel://a:1,[::1]:2/3?service=m", "redis+cluster://a:1"):
        assert str(parse(url)) == url
    assert is_redis("redis")
    assert is_redis("VALKEYS+CLUSTER://a")
    assert not is_redis("sqlite://")


PLAIN = {"host": "cache", "port": 6380, "password": "p#"}


@pytest.mark.parametrize(
    ("config", "environ", "url"),
    [
        ({}, {"REDIS_HOST": "cache"}, "redis://cache:6379/0"),
        (
            {},
            {"REDIS_HOST": "cache", "REDIS_PORT": "1", "REDIS_PASSWORD": "p", "REDIS_SSL": "True", "REDIS_DB": "2"},
            "rediss://:p@cache:1/2",
        ),
        ({}, {"REDIS_URL": "redis://:p@cache:1/3", "REDIS_HOST": "other"}, "redis://:p@cache:1/3"),
        ({"general_settings": {"coordination_redis": PLAIN}}, {"REDIS_URL": "redis://x"}, "redis://:p%23@cache:6380/0"),
        ({"general_settings": {"coordination_redis": {"url": "redis://a"}}}, {"REDIS_HOST": "x"}, "redis://a:6379/0"),
        (
            {"litellm_settings": {"cache": True, "cache_params": {"type": "redis", "host": "os.environ/H", "ttl": 3}}},
            {"H": "cache", "REDIS_PASSWORD": "p"},
            "redis://:p@cache:6379/0",
        ),
        ({"litellm_settings": {"cache": True}}, {"REDIS_HOST": "cache"}, "redis://cache:6379/0"),
        (
            {"router_settings": {"redis_host": "cache", "redis_port": "os.environ/P", "redis_password": "p"}},
            {"P": "7"},
            "redis://:p@cache:7/0",
        ),
        (
            {"general_settings": {"coordination_redis": PLAIN}, "router_settings": {"redis_host": "other"}},
            {},
            "redis://:p%23@cache:6380/0",
        ),
        (
            {"litellm_settings": {"cache": True, "cache_params": {"redis_startup_nodes": [{"host": "a", "port": 1}]}}},
            {},
            "redis+cluster://a:1",
        ),
        ({}, {"REDIS_CLUSTER_NODES": '[{"host": "a", "port": "7001"}]'}, "redis+cluster://a:7001"),
        (
            {},
            {"REDIS_SENTINEL_NODES": '[["a", 1], ["b", 2]]', "REDIS_SERVICE_NAME": "m", "REDIS_SENTINEL_PASSWORD": "s"},
            "redis+sentinel://a:1,b:2/0?service=m&sentinel_password=s",
        ),
        (
            {"general_settings": {"coordination_redis": {**PLAIN, "ssl": True, "ssl_cert_reqs": "CERT_NONE"}}},
            {},
            "rediss://:p%23@cache:6380/0?ssl_cert_reqs=none",
        ),
    ],
)
def test_the_proxys_own_redis_is_found(config: dict[str, object], environ: dict[str, str], url: str) -> None:
    """Where LiteLLM looks, in its order; what a block does not say comes from the variables."""
    assert store_url("redis", config, environ) == parse(url).url
    assert settings_from({"store": "redis"}).with_store(config, environ).store == parse(url).url


@pytest.mark.parametrize(
    ("store", "config", "environ", "said"),
    [
        ("redis", {}, {}, "the proxy has no Redis of its own: set general_settings.coordination_redis"),
        ("redis", {"litellm_settings": {"cache": True, "cache_params": {"type": "s3"}}}, {}, "no Redis of its own"),
        ("redis", {"litellm_settings": {"cache_params": PLAIN}}, {}, "no Redis of its own"),
        ("redis", {}, {"REDIS_HOST": "h", "REDIS_AWS_IAM_AUTH": "true"}, "cloud identity"),
        ("redis", {}, {"REDIS_CLUSTER_NODES": "hunter2"}, "nodes cannot be read"),
        ("redis", {}, {"REDIS_URL": "unix:///hunter2"}, "allowed: redis://"),
        ("os.environ/NOWHERE", {}, {}, "the variable NOWHERE is not set"),
        ("os.environ/WRONG", {}, {"WRONG": "redis://:hunter2@a?x"}, "unknown option"),
    ],
)
def test_what_means_no_redis_is_refused(
    store: str, config: dict[str, object], environ: dict[str, str], said: str
) -> None:
    """At the start, with what to change, without a secret."""
    with pytest.raises(ConfigError, match=said) as raised:
        settings_from({"store": store}).with_store(config, environ)
    assert "hunter2" not in str(raised.value)
    assert str(raised.value).startswith("callback_settings.litellm_compaction.store")


def test_a_variable_keeps_the_password_out_of_the_file() -> None:
    """As elsewhere in a configuration; any store."""
    assert store_url("os.environ/STORE", {}, {"STORE": "redis://:p@h"}) == "redis://:p@h"
    assert store_url("sqlite://", {}, {}) == "sqlite://"
    assert settings_from({"store": "os.environ/S"}).with_store({}, {"S": "memory://"}).store == "memory://"
    assert "hunter2" not in repr(settings_from({"store": "redis://:hunter2@h"}))


@given(
    st.builds(
        RedisAddress,
        kind=st.sampled_from(["server", "cluster"]),
        nodes=st.just((Node("a", 1),)),
        username=st.none() | st.text(st.characters(codec="utf-8"), min_size=1),
        password=st.none() | st.text(st.characters(codec="utf-8"), min_size=1),
        is_tls=st.booleans(),
        prefix=st.sampled_from(["compaction", "a:b"]),
    )
)
def test_an_address_comes_back_from_its_url(address: RedisAddress) -> None:
    """With everything that it holds."""
    assert parse(address.url) == address
