"""The key of a request to the page: where it stands, and which requests may use the one that a browser knows."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.proxy.page import auth
from litellm_compaction.proxy.page.auth import is_own_request

# LiteLLM's own, while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def basic(password: str, name: str = "any") -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("Bearer sk-anna", "Bearer sk-anna"),
        (basic("sk-anna"), "Bearer sk-anna"),
        # Typed into the upper field of the box.
        (basic("", "sk-anna"), "Bearer sk-anna"),
        (basic("a:b:schlüssel"), "Bearer a:b:schlüssel"),
        ("Basic", "Basic"),
        ("Basic sk-anna", None),
        ("Basic " + base64.b64encode(b"\xff:\xff").decode(), None),
    ],
)
def test_a_browser_s_password_is_a_bearer_key(sent: str, shown: str | None) -> None:
    """LiteLLM would take the whole code of a password for a key; what is none at all is not shown to it."""
    assert auth._with_bearer({"authorization": sent, "x": "y"}) == {
        **({"authorization": shown} if shown else {}),
        "x": "y",
    }


def test_a_proxy_with_a_header_of_its_own_finds_the_key_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """`general_settings.litellm_key_header_name`: a browser has no other way to send it."""
    from litellm.proxy import proxy_server

    monkeypatch.setattr(proxy_server, "general_settings", {"litellm_key_header_name": "X-Own-Key"})
    found = auth._with_bearer({"authorization": basic("sk-anna")})
    assert found == {"authorization": "Bearer sk-anna", "x-own-key": "Bearer sk-anna"}


@given(st.text(st.characters()))
def test_no_other_text_is_an_error(text: str) -> None:
    """Whatever a client puts behind `Basic`."""
    auth._with_bearer({"authorization": f"Basic {text}"})


_BASIC = {"authorization": basic("sk-anna")}


@pytest.mark.parametrize(
    ("method", "headers", "expected"),
    [
        ("GET", _BASIC, True),
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, True),
        ("POST", {"sec-fetch-site": "same-origin", "sec-fetch-mode": "navigate", **_BASIC}, True),
        # A link on another port of this machine opens the page, but its script reads nothing and its form does nothing.
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"}, True),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "origin": "http://h:1"}, False),
        ("POST", {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate", "origin": "http://h:1"}, False),
        # Without Fetch Metadata: plain http in a local network.
        ("POST", {"origin": "http://box:4000", "host": "box:4000", **_BASIC}, True),
        ("POST", {"origin": "http://box:3000", "host": "box:4000"}, False),
        # Behind a proxy that ends TLS; and a page of the same name that came without.
        ("POST", {"origin": "https://box:4000", "host": "box:4000", **_BASIC}, True),
        ("POST https", {"origin": "https://box:4000", "host": "box:4000", **_BASIC}, True),
        ("POST https", {"origin": "http://box:4000", "host": "box:4000", **_BASIC}, False),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, False),
        ("POST", {"origin": "null", "host": "box:4000"}, False),
        # A script's own key, which no browser sends by itself; a browser's, from who knows where.
        ("POST", {"host": "box:4000", "authorization": "Bearer sk-anna"}, True),
        ("POST", {"host": "box:4000", **_BASIC}, False),
        ("POST", {"host": "box:4000", "authorization": "BASIC eDp5"}, False),
    ],
)
def test_a_browser_s_key_counts_for_the_page_itself_only(method: str, headers: dict[str, str], expected: bool) -> None:
    """Other ports are other origins, and a browser sends a password wherever another site sends it."""
    name, _, scheme = method.partition(" ")
    assert is_own_request(name, headers, scheme or "http") is expected
