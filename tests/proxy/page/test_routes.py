"""Who asks for the page without a key is asked for one, there and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import pytest
from fastapi import FastAPI

from litellm_compaction.proxy.page import routes
from litellm_compaction.proxy.page.auth import Visitor

# LiteLLM's own, while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


async def _ask(
    monkeypatch: pytest.MonkeyPatch, path: str, method: str = "GET", visitor: Visitor | None = None, **headers: str
) -> httpx.Response:
    """The answer to a visitor; None is somebody whose key LiteLLM refuses."""

    async def known(request: object) -> Visitor | None:
        return visitor

    monkeypatch.setattr(routes, "visitor_of", known)
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


async def test_who_only_reads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything of the form is looked at."""
    for role in ("proxy_admin_viewer", "internal_user", ""):
        refused = await _ask(monkeypatch, "/compaction/", "POST", Visitor(role=role, tenant="anna", auth=None))
        assert refused.status_code == 403
        assert "Only proxy administrators" in refused.text
