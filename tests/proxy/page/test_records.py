"""The routes of one record: its owner sees text, administrators numbers, and nobody else a difference."""

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
from litellm_compaction.proxy.page.view import SCRIPT
from litellm_compaction.stores import Covered, Originals, digest
from litellm_compaction.stores.rows import MemoryRows
from tests.builders import parsed, user
from tests.proxy.page.test_view import HOSTILE, _Reader
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

    def __init__(self, *, has_originals: bool = True, admins_see_text: bool = False) -> None:
        self.store = MemoryStore(ttl_s=100, max_bytes=1_000_000)
        self.originals = Originals(MemoryRows(ttl_s=100, max_bytes=1_000_000), ttl_s=100, secret=lambda: SECRET)
        self.has_originals = has_originals
        app = FastAPI()
        originals = self.originals if has_originals else None
        routes = RecordRoutes(self.store, originals, _visitor, admins_see_text=admins_see_text)
        app.add_api_route(f"{RECORDS_PATH}/{{record}}", routes.show)
        app.add_api_route(f"{RECORDS_PATH}/{{record}}/undo", routes.undo, methods=["POST"])
        app.add_api_route(f"{RECORDS_PATH}/{{record}}/redo", routes.redo, methods=["POST"])
        app.add_api_route(f"{RECORDS_PATH}/{{record}}/pin", routes.pin, methods=["POST"])
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy.example")

    async def fill(self) -> None:
        await self.store.put("scope", KNOWN)
        await self.store.name("one", "scope", KNOWN)
        await self.store.add_event(9e9, event_to_json(CompactionEvent(**EVENT)))
        if self.has_originals:
            await kept(self.originals, COVERED)

    async def get(self, key: str, record: str = RECORD, **headers: str) -> httpx.Response:
        return await self.client.get(
            f"{RECORDS_PATH}/{record}", headers={"authorization": f"Bearer {key}", **headers}, follow_redirects=False
        )

    async def post(self, key: str, record: str = RECORD, **headers: str) -> httpx.Response:
        known = {"authorization": f"Bearer {key}", **headers}
        return await self.client.post(f"{RECORDS_PATH}/{record}/undo", headers=known, follow_redirects=False)

    async def redo(self, key: str, focus: str, **headers: str) -> httpx.Response:
        known = {"authorization": f"Bearer {key}", **headers}
        path = f"{RECORDS_PATH}/{RECORD}/redo"
        return await self.client.post(path, data={"focus": focus}, headers=known, follow_redirects=False)

    async def pin(self, key: str, number: str, do: str = "pin", **headers: str) -> httpx.Response:
        known = {"authorization": f"Bearer {key}", **headers}
        path, data = f"{RECORDS_PATH}/{RECORD}/pin", {"number": number, "do": do}
        return await self.client.post(path, data=data, headers=known, follow_redirects=False)


@pytest.fixture
async def routes() -> Routes:
    made = Routes()
    await made.fill()
    return made


async def test_its_owner_sees_before_and_after(routes: Routes) -> None:
    """All messages, what became of each, the record's text, and the digest of the receipt."""
    found = (await routes.get("one")).json()
    assert [message["text"] for message in found["before"]] == [f"walrus {at}" for at in range(5)]
    fates = [message["fate"] for message in found["after"]]
    assert fates == ["in the record", "verbatim", *["in the record"] * 3]
    assert found["after"][1]["text"] == "walrus 1"
    assert "The summary." in found["record"]
    assert (found["digest"], found["why_incomplete"]) == (digest(KNOWN), "")
    assert [event["tokens_before"] for event in found["events"]] == [7000]
    assert "tenant" not in found["events"][0]


async def test_without_originals_the_record_is_shown_alone() -> None:
    """With the reason."""
    routes = Routes(has_originals=False)
    await routes.fill()
    found = (await routes.get("one")).json()
    assert (found["before"], found["after"]) == ([], [])
    assert "The summary." in found["record"]
    assert "keep_originals" in found["why_incomplete"]
    page = await routes.get("one", **BROWSER)
    assert "keep_originals" in page.text


async def test_an_administrator_sees_numbers_alone(routes: Routes) -> None:
    """Of others' records: as JSON and on the page."""
    answer = await routes.get("admin")
    assert [event["tokens_after"] for event in answer.json()["events"]] == [900]
    page = await routes.get("admin", **BROWSER)
    assert page.status_code == 200
    for text in (answer.text, page.text):
        assert "walrus" not in text
        assert "The summary." not in text
    assert "900" in page.text


async def test_an_administrator_reads_what_the_operator_allows() -> None:
    """And changes nothing; another tenant still sees no difference to a forged id."""
    routes = Routes(admins_see_text=True)
    await routes.fill()
    found = (await routes.get("admin")).json()
    assert "The summary." in found["record"]
    assert "walrus" in repr(found["before"])
    page = (await routes.get("admin", **BROWSER)).text
    assert "walrus" in page
    assert "<form" not in page
    assert (await routes.post("admin")).status_code == 404
    assert (await routes.get("two")).status_code == 404


async def test_forged_and_foreign_ids_are_the_same(routes: Routes) -> None:
    """The same bytes, for any id that is not the visitor's own."""
    ids = (RECORD, "0" * 16, "x", "%00", RECORD[:15], RECORD.upper(), "a" * 5000, f"{RECORD}%20")
    for headers in ({}, BROWSER):
        answers = [await routes.get("two", each, **headers) for each in ids]
        assert {answer.status_code for answer in answers} == {404}
        assert len({answer.content for answer in answers}) == 1
    await routes.store.delete(scope="scope", covered_hash=KNOWN.covered_hash)
    assert (await routes.get("one")).status_code == 404


async def test_without_a_key_there_is_nothing(routes: Routes) -> None:
    """A program is refused; a browser is sent to the page, which asks for the key."""
    answer = await routes.get("nobody")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    sent = await routes.client.get(f"{RECORDS_PATH}/{RECORD}", headers=BROWSER, follow_redirects=False)
    assert (sent.status_code, sent.headers["location"]) == (303, "../")
    assert "walrus" not in answer.text + sent.text


async def test_the_page_is_html_and_nothing_else(routes: Routes) -> None:
    """Texts of conversations and models are escaped; the policy is the page's own."""
    page = await routes.get("one", **BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert page.headers["cache-control"] == "no-store"
    read = _Reader(page.text)
    assert [element for element, _ in read.elements].count("script") == 1
    assert f"<script>{SCRIPT}</script>" in page.text
    assert "walrus 4" in page.text
    assert "&lt;script&gt;" in page.text


class _Broken(MemoryRows):
    async def find(self, scope: str, keys: object) -> list[object]:  # type: ignore[override]
        raise RuntimeError("with the words of a conversation")


async def test_what_fails_is_told_without_words(routes: Routes, caplog: pytest.LogCaptureFixture) -> None:
    """In the answer as in the log."""
    routes.store.rows = _Broken(ttl_s=100, max_bytes=1000)
    answer = await routes.get("one")
    assert answer.status_code == 500
    assert "with the words" not in answer.text + caplog.text


async def test_its_owner_undoes_it(routes: Routes) -> None:
    """It is gone, and a mark keeps it from being made again; a second time it is not found."""
    assert (await routes.post("one")).json() == {"id": RECORD, "forgotten": 1}
    assert (await routes.get("one")).status_code == 404
    assert (await routes.post("one")).status_code == 404
    [mark] = await routes.store.find("scope", [KNOWN.covered_hash])
    assert mark.is_mark
    assert mark.ledger == mark.summary == ""


async def test_a_browser_goes_back_to_the_page(routes: Routes) -> None:
    """By the button, whose address is relative to the record's own."""
    page = await routes.get("one", **BROWSER)
    assert f'<form method="post" action="{RECORD}/undo">' in page.text
    done = await routes.post("one", **BROWSER)
    assert (done.status_code, done.headers["location"]) == (303, "../../?done=undone")


@pytest.mark.parametrize("key", ["two", "admin"])
async def test_nobody_else_undoes_it(routes: Routes, key: str) -> None:
    """Not an administrator either, who is told what a forged id is told; there is no button for one."""
    answers = [await routes.post(key, each) for each in (RECORD, "0" * 16, "x", "a" * 5000)]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.content for answer in answers}) == 1
    assert "<form" not in (await routes.get("admin", **BROWSER)).text
    assert (await routes.get("one")).status_code == 200


async def test_a_store_that_cannot_forget_says_so(routes: Routes, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, and no success."""

    async def fail(*_: object) -> None:
        raise StoreError("the store is down")

    monkeypatch.setattr(routes.store, "put", fail)
    answer = await routes.post("one")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the store is down")


async def test_its_owner_has_it_made_anew(routes: Routes) -> None:
    """With a topic in one line; strangers get the 404 of a forged id."""
    assert (await routes.redo("two", "the port")).status_code == 404
    done = await routes.redo("one", " the\nport\x00 ", **BROWSER)
    assert (done.status_code, done.headers["location"]) == (303, "../../?done=redone")
    [mark] = await routes.store.find("scope", [KNOWN.covered_hash])
    assert (mark.focus, mark.is_mark, mark.undone_messages) == ("the port", True, 0)


@pytest.mark.parametrize(
    ("focus", "says"), [("", "focus is empty"), (" \n", "focus is empty"), ("x" * 501, "at most 500")]
)
async def test_a_focus_is_a_short_line(routes: Routes, focus: str, says: str) -> None:
    """Otherwise nothing is forgotten."""
    answer = await routes.redo("one", focus)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert (await routes.get("one")).status_code == 200


async def test_its_owner_pins_a_message_of_the_users(routes: Routes) -> None:
    """And takes the pin away; the page has a button for each, and says which are pinned."""
    assert (await routes.pin("one", "3")).json() == {"id": RECORD, "number": 3, "pinned": True}
    pinned = [message["number"] for message in (await routes.get("one")).json()["before"] if message["pinned"]]
    assert pinned == [3]
    page = await routes.get("one", **BROWSER)
    assert (page.text.count(f'action="{RECORD}/pin"'), page.text.count("Unpin message")) == (3, 1)
    done = await routes.pin("one", "3", "unpin", **BROWSER)
    assert (done.status_code, done.headers["location"]) == (303, f"../{RECORD}")
    assert not [message for message in (await routes.get("one")).json()["before"] if message["pinned"]]


@pytest.mark.parametrize(
    ("number", "says"),
    [("2", "Message 2 cannot"), ("6", "Message 6 cannot"), ("x", "number is missing"), ("", "number is missing")],
)
async def test_only_the_users_messages_can_be_pinned(routes: Routes, number: str, says: str) -> None:
    """Those that the record covers."""
    answer = await routes.pin("one", number)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


async def test_a_tenth_of_the_window_can_be_pinned(routes: Routes) -> None:
    """By an estimate; then a line with the numbers."""
    long = replace(COVERED, messages=[*COVERED.messages[:4], *parsed([user("word " * 40)])])
    kept_long = Covered(scope="scope", tenant="one", messages=long.messages, hashes=chain(long.messages))
    known = replace(KNOWN, covered_hash=kept_long.hashes[-1])
    await routes.store.put("scope", known)
    await routes.store.name("one", "scope", known)
    await kept(routes.originals, kept_long)
    path = f"{RECORDS_PATH}/{compaction_id('scope', known.covered_hash)}/pin"
    headers = {"authorization": "Bearer one"}
    answer = await routes.client.post(path, data={"number": "5"}, headers=headers)
    assert (answer.status_code, "about 50 tokens; at most 10" in answer.text) == (400, True)
    assert (await routes.client.post(path, data={"number": "1"}, headers=headers)).status_code == 200


@pytest.mark.parametrize("key", ["two", "admin"])
async def test_nobody_else_pins(routes: Routes, key: str) -> None:
    """The 404 of a forged id."""
    assert (await routes.pin(key, "3")).status_code == 404


async def test_without_originals_nothing_can_be_pinned_here() -> None:
    routes = Routes(has_originals=False)
    await routes.fill()
    answer = await routes.pin("one", "1")
    assert (answer.status_code, "while originals of all are kept" in answer.text) == (400, True)
