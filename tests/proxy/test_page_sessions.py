"""Staying signed in: cookies that only this proxy can open, and forms that only its own page can send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.proxy.page.auth import LIFETIME_S, MAX_KEY_CHARS, Sessions, is_own_request

SECRET = "sk-a-master-key"


def test_a_cookie_holds_the_key_and_hides_it() -> None:
    """Another worker with the same master key opens it; nobody else, and not for ever."""
    cookie = Sessions(SECRET).seal("sk-anna", 1000.0)
    assert "anna" not in cookie
    assert Sessions(SECRET).open(cookie, 1000.0 + LIFETIME_S) == "sk-anna"
    assert Sessions(SECRET).open(cookie, 1001.0 + LIFETIME_S) is None
    assert Sessions("another").open(cookie, 1000.0) is None
    assert Sessions(None).open(cookie, 1000.0) is None
    assert len(Sessions(SECRET).seal("k" * MAX_KEY_CHARS)) < 4000


@given(st.text(st.characters()))
def test_no_other_text_is_a_cookie(text: str) -> None:
    """Nor an error."""
    assert Sessions(SECRET).open(text) is None


def test_a_form_s_token_belongs_to_its_cookie() -> None:
    """And says nothing about it."""
    sessions = Sessions(SECRET)
    token = sessions.form_token("cookie")
    assert sessions.is_form_token("cookie", token)
    assert Sessions(SECRET).is_form_token("cookie", token)
    assert not sessions.is_form_token("other", token)
    assert not Sessions("another").is_form_token("cookie", token)
    for wrong in ("", token[:-1], token + "0", "\ud800é"):
        assert not sessions.is_form_token("cookie", wrong)


@pytest.mark.parametrize(
    ("method", "headers", "expected"),
    [
        ("GET", {}, True),
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, True),
        ("POST", {"sec-fetch-site": "same-origin", "sec-fetch-mode": "navigate"}, True),
        # A link on another port of this machine opens the page, but its script reads nothing and its form does nothing.
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"}, True),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "origin": "http://h:1"}, False),
        ("POST", {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate", "origin": "http://h:1"}, False),
        ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, False),
        # Without Fetch Metadata: plain http in a local network.
        ("POST", {"origin": "http://box:4000", "host": "box:4000"}, True),
        ("POST", {"origin": "http://box:3000", "host": "box:4000"}, False),
        ("GET", {"origin": "http://evil", "host": "box:4000"}, False),
        ("POST", {"origin": "null", "host": "box:4000"}, False),
    ],
)
def test_a_cookie_counts_for_the_page_itself_only(method: str, headers: dict[str, str], expected: bool) -> None:
    """Other ports are the same site for SameSite, so that alone is not enough."""
    assert is_own_request(method, headers) is expected
