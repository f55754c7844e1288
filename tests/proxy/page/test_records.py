"""The routes of one record: its owner sees text, administrators numbers, and nobody else a difference.

What its owner can do with it: `tests/integration/test_records.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from litellm_compaction.core.compaction import compaction_id
from litellm_compaction.core.messages import chain
from litellm_compaction.errors import StoreError
from litellm_compaction.events import CompactionEvent, event_to_json
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.records import RECORDS_PATH, RecordRoutes
from litellm_compaction.stores import Covered, Originals
from litellm_compaction.stores.rows import MemoryRows
from tests.builders import parsed, user
from tests.proxy.page.test_view import HOSTILE, Reader
from tests.stores.compactions import compaction
from tests.stores.made import MemoryStore
from tests.stores.test_originals import SECRET, covered, kept, talk

# LiteLLM's own, while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

COVERED = covered(*talk(5, "walrus"), scope="scope", tenant="one")
KNOWN = replace(compaction(COVERED.hashes[-1], covered=5, text=f"The summary. {HOSTILE}"), window_tokens=100)
RECORD = compaction_id("scope", COVERED.hashes[-1])
VISITORS = {
    "one": Visitor(role="internal_user", tenant="one", auth=None),
    "two": Visitor(role="internal_user", tenant="two", auth=None),
    "admin": Visitor(role="proxy_admin", tenant="root", auth=None),
}
EVENT: dict[str, Any] = {"phase": "pre_request", "model": HOSTILE, "window_tokens": 8192, "window_source": "operator"}
EVENT |= {"outcome": "compacted", "tokens_before": 7000, "tokens_after": 900, "tenant": "one", "compaction_id": RECORD}
BROWSER = {"accept": "text/html,application/xhtml+xml"}


async def _visitor(request: Request) -> Visitor | None:
    return VISITORS.get(request.headers.get("authorization", "").removeprefix("Bearer "))


class Routes:
    """The routes over a store with one record, whose owner is `one`."""

    def __init__(self, *, admins_see_text: bool = False) -> None:
        self.store = MemoryStore(ttl_s=100, max_bytes=1_000_000)
        self.originals = Originals(MemoryRows(ttl_s=100, max_bytes=1_000_000), ttl_s=100, secret=lambda: SECRET)
        app = FastAPI()
        routes = RecordRoutes(self.store, self.originals, _visitor, admins_see_text=admins_see_text)
        app.add_api_route(f"{RECORDS_PATH}/{{record}}", routes.show)
        for name in ("undo", "redo", "pin"):
            app.add_api_route(f"{RECORDS_PATH}/{{record}}/{name}", getattr(routes, name), methods=["POST"])
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy.example")

    async def fill(self, known: Any = KNOWN, originals: Covered = COVERED) -> None:
        await self.store.put("scope", known)
        await self.store.name("one", "scope", known)
        await self.store.add_event(9e9, event_to_json(CompactionEvent(**EVENT)))
        await kept(self.originals, originals)

    async def get(self, key: str, record: str = RECORD, **headers: str) -> httpx.Response:
        return await self.client.get(
            f"{RECORDS_PATH}/{record}", headers={"authorization": f"Bearer {key}", **headers}, follow_redirects=False
        )

    async def post(self, key: str, action: str = "undo", record: str = RECORD, **data: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return await self.client.post(f"{RECORDS_PATH}/{record}/{action}", data=data, headers=headers)


@pytest.fixture
async def routes() -> Routes:
    made = Routes()
    await made.fill()
    return made


async def test_an_administrator_reads_what_the_operator_allows(routes: Routes) -> None:
    """Numbers alone, or text as well; and changes nothing."""
    for headers in ({}, BROWSER):
        shown = (await routes.get("admin", **headers)).text
        assert ("900" in shown, "walrus" in shown, "The summary." in shown) == (True, False, False)
    allowed = Routes(admins_see_text=True)
    await allowed.fill()
    for headers in ({}, BROWSER):
        shown = (await allowed.get("admin", **headers)).text
        assert ("walrus" in shown, "The summary." in shown, "<form" in shown) == (True, True, False)
    assert (await allowed.post("admin")).status_code == 404
    assert (await allowed.get("two")).status_code == 404


async def test_forged_and_foreign_ids_are_the_same(routes: Routes) -> None:
    """The same bytes, for any id that is not the visitor's own, whatever is asked; nothing is changed."""
    ids = (RECORD, "0" * 16, "x", "%00", RECORD[:15], RECORD.upper(), "a" * 5000, f"{RECORD}%20")
    for headers in ({}, BROWSER):
        answers = [await routes.get("two", each, **headers) for each in ids]
        assert {answer.status_code for answer in answers} == {404}
        assert len({answer.content for answer in answers}) == 1
    for key in ("two", "admin"):
        asked = {"undo": {}, "redo": {"focus": "the port"}, "pin": {"number": "1", "do": "pin"}}
        changes = [await routes.post(key, action, each, **data) for action, data in asked.items() for each in ids]
        assert {answer.status_code for answer in changes} == {404}
        assert len({answer.content for answer in changes}) == 1
    assert (await routes.get("one")).status_code == 200
    await routes.store.delete(scope="scope", covered_hash=KNOWN.covered_hash)
    assert (await routes.get("one")).status_code == 404


async def test_its_page_escapes_what_was_said(routes: Routes) -> None:
    """Texts of conversations and models are text; the policy is the page's own."""
    page = await routes.get("one", **BROWSER)
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert (page.headers["content-type"], page.headers["cache-control"]) == ("text/html; charset=utf-8", "no-store")
    assert [element for element, _ in Reader(page.text).elements].count("script") == 1
    assert "walrus 4" in page.text
    assert "&lt;script&gt;" in page.text


class Broken(MemoryRows):
    async def find(self, scope: str, keys: object) -> list[object]:  # type: ignore[override]
        raise RuntimeError("with the words of a conversation")


async def test_what_fails_is_told_without_words(
    routes: Routes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the answer as in the log; a store that cannot forget is no success."""

    async def fail(*_: object) -> None:
        raise StoreError("the store is down")

    monkeypatch.setattr(routes.store, "put", fail)
    answer = await routes.post("one")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the store is down")
    routes.store.rows = Broken(ttl_s=100, max_bytes=1000)
    answer = await routes.get("one")
    assert answer.status_code == 500
    assert "with the words" not in answer.text + caplog.text


@pytest.mark.parametrize(
    ("action", "data", "says"),
    [
        ("redo", {"focus": " \n"}, "focus is empty"),
        ("redo", {"focus": "x" * 501}, "at most 500"),
        ("pin", {"number": "2", "do": "pin"}, "Message 2 cannot"),
        ("pin", {"number": "6", "do": "pin"}, "Message 6 cannot"),
        ("pin", {"number": "x", "do": "pin"}, "number is missing"),
    ],
)
async def test_what_cannot_be_done_is_refused(routes: Routes, action: str, data: dict[str, str], says: str) -> None:
    """With what is allowed: a topic is one short line, and only messages of the user's can be pinned."""
    answer = await routes.post("one", action, **data)
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (400, True)
    assert (await routes.get("one")).status_code == 200


async def test_a_tenth_of_the_window_can_be_pinned(routes: Routes) -> None:
    """By an estimate; then a line with the numbers."""
    messages = [*COVERED.messages[:4], *parsed([user("word " * 40)])]
    long = Covered(scope="scope", tenant="one", messages=messages, hashes=chain(messages))
    known = replace(KNOWN, covered_hash=long.hashes[-1])
    await routes.fill(known, long)
    record = compaction_id("scope", known.covered_hash)
    answer = await routes.post("one", "pin", record, number="5", do="pin")
    assert (answer.status_code, "about 50 tokens; at most 10" in answer.text) == (400, True)
    assert (await routes.post("one", "pin", record, number="1", do="pin")).status_code == 200
