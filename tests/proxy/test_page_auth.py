"""The key of a request to the page: where it stands, and which requests may use the one that a browser knows."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.proxy.page import auth, routes
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
        (basic("sk-anna").replace("Basic", "basic"), "Bearer sk-anna"),
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
        ("GET", {}, True),
        ("GET", _BASIC, True),
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, True),
        ("POST", {"sec-fetch-site": "same-origin", "sec-fetch-mode": "navigate", **_BASIC}, True),
        # A link on another port of this machine opens the page, but its script reads nothing and its form does nothing.
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"}, True),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "origin": "http://h:1"}, False),
        ("POST", {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate", "origin": "http://h:1"}, False),
        ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, False),
        # Without Fetch Metadata: plain http in a local network.
        ("POST", {"origin": "http://box:4000", "host": "box:4000", **_BASIC}, True),
        ("POST", {"origin": "http://box:3000", "host": "box:4000"}, False),
        ("GET", {"origin": "http://evil", "host": "box:4000"}, False),
        ("POST", {"origin": "http://proxy.example", "host": "x"}, False),
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
    assert is_own_request(method, headers) is expected


async def _ask(monkeypatch: pytest.MonkeyPatch, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    """The answer to somebody whose key LiteLLM refuses."""

    async def nobody(request: object) -> None:
        return None

    monkeypatch.setattr(routes, "visitor_of", nobody)
    app = FastAPI()
    served = routes._Page(None)  # type: ignore[arg-type] # nothing is looked at for a stranger
    for each in ("/compaction", "/compaction/"):
        app.add_api_route(each, served.answer, methods=["GET", "POST"])
    form: Mapping[str, str] | None = {"do": "save"} if method == "POST" else None
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy.example") as client:
        return await client.request(method, path, headers=headers, data=form)


async def test_the_password_is_asked_for_below_the_page_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for at /compaction a browser would send it to every route of the proxy, some of which take it for a key."""
    sent = await _ask(monkeypatch, "/compaction")
    assert (sent.status_code, sent.headers["location"]) == (303, "compaction/")
    assert "www-authenticate" not in sent.headers
    for method in ("GET", "POST"):
        asked = await _ask(monkeypatch, "/compaction/", method)
        assert asked.status_code == 401
        assert asked.headers["www-authenticate"] == 'Basic realm="key as password", charset="UTF-8"'
        assert asked.headers["cache-control"] == "no-store"
        assert "needs a key of this LiteLLM proxy" in asked.text


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_script_with_a_wrong_key_is_told_so(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the address that it asked."""
    refused = await _ask(monkeypatch, "/compaction", method, authorization="Bearer sk-wrong")
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
