"""Addresses of Redis: what is allowed, what is refused and how, and that no secret is ever shown."""

from __future__ import annotations

import contextlib
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.config import settings_from
from litellm_compaction.errors import ConfigError
from litellm_compaction.redis_address import Node, is_redis, parse


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


def test_what_is_shown_can_be_read_back() -> None:
    """All but the credentials."""
    for url in ("redis://h:6379/0", "rediss+sentinel://a:1,[::1]:2/3?service=m", "redis+cluster://a:1"):
        assert str(parse(url)) == url
    assert is_redis("redis")
    assert is_redis("VALKEYS+CLUSTER://a")
    assert not is_redis("sqlite://")
