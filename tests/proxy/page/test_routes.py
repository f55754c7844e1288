"""The routes over a store with one record and its originals: who reads and undoes what, and what fails.

Settings, deployments and events through LiteLLM: `tests/integration/test_page.py`; the page: `tests/processes`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request

from litellm_compaction.core.compaction import compaction_id
from litellm_compaction.errors import StoreError, WindowUnknown
from litellm_compaction.events import CompactionEvent, event_to_json
from litellm_compaction.proxy.page import routes as page_routes
from litellm_compaction.proxy.page.routes import Visitor, add_page, visitor_of
from litellm_compaction.proxy.report import DeploymentReport
from litellm_compaction.recall import NOT_KEPT, Lookup
from litellm_compaction.stores import Originals
from litellm_compaction.stores.rows import Row
from litellm_compaction.stores.sqlite import MemoryRows
from litellm_compaction.tokenizers.registry import Sources
from litellm_compaction.windows.windows import Target, Window
from tests.stores.compactions import compaction
from tests.stores.made import MemoryStore
from tests.stores.test_originals import SECRET, covered, kept, talk

# LiteLLM's own, while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

HOSTILE = "<script>alert(1)</script>\"' onmouseover=x \x00\ud800\u202e"
COVERED = covered(*talk(5, "walrus"), scope="scope", tenant="one")
KNOWN = replace(compaction(COVERED.hashes[-1], covered=5, text=f"The summary. {HOSTILE}"), window_tokens=100)
RECORD = compaction_id("scope", COVERED.hashes[-1])
ROLES = {"one": "internal_user", "two": "internal_user", "admin": "proxy_admin"}
EVENT: dict[str, Any] = {"phase": "pre_request", "model": HOSTILE, "window_tokens": 8192, "window_source": "operator"}
EVENT |= {"outcome": "compacted", "tokens_before": 7000, "tokens_after": 900, "tenant": "one", "compaction_id": RECORD}
ODD_IDS = (RECORD, "0" * 16, "x", "%00", RECORD[:15], RECORD.upper(), "a" * 5000, f"{RECORD}%20")
NOT_FOUND = json.dumps({"error": {"message": page_routes._NO_RECORD, "code": 404}})


class Rows(MemoryRows):
    """Rows that fail on demand."""

    error: Exception | None = None

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        if self.error is not None:
            raise self.error
        return await super().find(scope, keys)


class Routes:
    """The page in an application of its own; `one` owns its record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = MemoryStore(ttl_s=100, max_bytes=1_000_000)
        self.rows = Rows(ttl_s=100, max_bytes=1_000_000)
        self.originals = Originals(self.rows, secret=lambda: SECRET)
        self.configured = SimpleNamespace(admins_see_text=False)
        live = SimpleNamespace(configured=self.configured)
        app = FastAPI()
        monkeypatch.setitem(sys.modules, "litellm.proxy.proxy_server", SimpleNamespace(app=app))
        monkeypatch.setattr(page_routes, "visitor_of", self.visitor)
        around: Any = SimpleNamespace(
            store=self.store,
            originals=self.originals,
            live=live,
            compactor=SimpleNamespace(recaller=SimpleNamespace(lookup=Lookup(self.originals))),
        )
        add_page(around)
        # A configuration that is loaded anew.
        add_page(around)
        assert len([route for route in app.router.routes if "compaction" in getattr(route, "path", "")]) == 9
        assert app.openapi()["paths"] == {}
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy/compaction/")

    async def visitor(self, request: Request) -> Visitor:
        name = request.headers.get("authorization", "").removeprefix("Bearer ")
        return Visitor(role=ROLES[name], tenant=name, auth=None)

    async def get(self, key: str, path: str = f"records/{RECORD}") -> httpx.Response:
        return await self.client.get(path, headers={"authorization": f"Bearer {key}"})

    async def recall(self, key: str, **asked: object) -> httpx.Response:
        return await self.client.post("recall", json=asked, headers={"authorization": f"Bearer {key}"})

    async def undo(self, key: str, record: str = RECORD) -> httpx.Response:
        return await self.client.post(f"records/{record}/undo", headers={"authorization": f"Bearer {key}"})


@pytest.fixture
async def routes(monkeypatch: pytest.MonkeyPatch) -> Routes:
    made = Routes(monkeypatch)
    await made.store.put("scope", KNOWN)
    await made.store.name("one", "scope", KNOWN)
    await made.store.add_event(9e9, event_to_json(CompactionEvent(**EVENT)))
    await kept(made.originals, COVERED)
    return made


async def test_its_owner_reads_a_record_beside_its_messages(routes: Routes) -> None:
    """Everything as data: nothing of it can be more than text."""
    answer = await routes.get("one")
    assert (answer.headers["content-type"], answer.headers["cache-control"]) == ("application/json", "no-store")
    told = answer.json()
    assert (told["id"], told["is_own"]) == (RECORD, True)
    assert "The summary." in told["record"]
    assert HOSTILE in told["events"][0]["model"]
    first = told["messages"][0]
    assert set(first) == {"number", "role", "before", "fate", "after"}
    assert "walrus" in first["before"]
    assert "tenant" not in told["events"][0]


async def test_an_administrator_reads_what_the_operator_allows(routes: Routes) -> None:
    """Events alone, or records as well; and changes nothing."""
    assert (await routes.get("admin")).text == NOT_FOUND
    assert (await routes.get("admin", "events")).json()["events"][0]["tokens_after"] == 900
    routes.configured.admins_see_text = True
    told = (await routes.get("admin")).json()
    assert (told["is_own"], "walrus" in repr(told["messages"])) == (False, True)
    assert (await routes.undo("admin")).status_code == 404
    assert (await routes.get("two")).status_code == 404


async def test_forged_and_foreign_ids_are_the_same(routes: Routes) -> None:
    """The same bytes, for any id or handle that is not the visitor's own, whatever is asked; nothing is changed."""
    [hit] = (await routes.recall("one", query="walrus", limit=1)).json()["hits"]
    message = (await routes.recall("one", handle=hit["handle"])).json()
    assert "walrus" in message["parts"][0]["text"]
    answers = [await routes.get("two", f"records/{each}") for each in ODD_IDS]
    messages = [await routes.recall("two", handle=each) for each in (hit["handle"], hit["handle"][:6], *ODD_IDS)]
    assert {(answer.status_code, answer.json()["error"]["message"]) for answer in messages} == {(404, NOT_KEPT)}
    answers += [await routes.undo(key, each) for key in ("two", "admin") for each in ODD_IDS]
    assert {(answer.status_code, answer.text) for answer in answers} == {(404, NOT_FOUND)}
    for key in ("two", "admin"):
        none = (await routes.recall(key, query="walrus shark")).json()
        assert (none["hits"], none["words"]) == ([], ["walrus", "shark"])
    assert (await routes.get("one")).status_code == 200
    assert (await routes.undo("one")).json() == {"id": RECORD, "forgotten": 1}
    assert (await routes.get("one")).text == NOT_FOUND


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "query is empty"),
        ({"query": " \n"}, "query is empty"),
        ({"query": ["whale"]}, "query is empty"),
        *(
            ({"query": "whale", "limit": limit}, "limit is a number from 1 to 50")
            for limit in (0, 51, -1, "", "\u0665", True, [5])
        ),
    ],
)
async def test_a_search_that_cannot_be_made_is_refused(routes: Routes, params: dict[str, object], says: str) -> None:
    """With what it may be, and without its words."""
    answer = await routes.recall("one", **params)
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("error", "status", "logged"),
    [(RuntimeError("words of a conversation"), 500, "failed_open"), (StoreError("no disk"), 503, "page_store_failed")],
)
async def test_what_fails_is_told_without_words(
    routes: Routes, error: Exception, status: int, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a query nor a text is in an answer or a log; a store that cannot be read is not the proxy's fault."""
    routes.rows.error = error
    for asked in ({"query": "rhinoceros"}, {"handle": "abc"}):
        answer = await routes.recall("one", **asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
        assert not {"rhinoceros", "words of a"} & {word for word in ("rhinoceros", "words of a") if word in answer.text}
    assert logged in caplog.text
    assert "rhinoceros" not in caplog.text
    assert "words of a" not in caplog.text


@pytest.mark.parametrize("shown", ["Basic eDpzay1hZG1pbg==", "BASIC sk-admin", "basic "])
async def test_a_browsers_own_password_is_no_key(shown: str) -> None:
    """Another site could make the browser send it."""
    headers = [(b"authorization", shown.encode()), (b"cookie", b"token=sk-admin")]
    request = Request({"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": headers})
    with pytest.raises(HTTPException, match="401"):
        await visitor_of(request)


def test_why_nobody_knows_a_window_is_not_everybodys_business() -> None:
    """The error names the server; only who sees all is told."""
    target = Target(key="1|m", model="m", api_base="http://10.0.0.7/v1", api_key=None, context_length=None)
    report = DeploymentReport(
        target=target, carrier="hooks", absence=WindowUnknown("m", tried="GET http://10.0.0.7/v1: no")
    )
    assert "10.0.0.7" in report.facts(shows_places=True)["window"]
    facts = report.facts(shows_places=False)
    assert (facts["window"].endswith("Tried: its server: no."), "10.0.0.7" in repr(facts)) == (True, False)
    written = Sources("/home/ann/tokenizer.json").source(target, "")
    report = replace(report, window=Window(tokens=8192, source="operator", instance_id=""), source=written)
    assert ["/home/ann" in repr(report.facts(shows_places=each)) for each in (True, False)] == [True, False]


def event(outcome: str, when_s: float, record: str, continues: str = "", tenant: str = "one") -> CompactionEvent:
    made = {"outcome": outcome, "when_s": when_s, "compaction_id": record, "continues_id": continues, "tenant": tenant}
    return CompactionEvent(**{**EVENT, **made})


async def test_others_events_are_not_shown(routes: Routes) -> None:
    """The newest first; damaged ones are passed over."""
    for each in (
        event("compacted", 1, "a"),
        event("prepared", 2, "b", "a"),
        event("compacted", 3, "x", tenant="two"),
        event("reused", 4, "b"),
        event("reused", 5, "x", tenant="two"),
        event("refused", 6, ""),
    ):
        await routes.store.add_event(9e9 + each.when_s, event_to_json(each))
    await routes.store.add_event(9.1e9, "{damaged")
    shown = {key: (await routes.get(key, "events?limit=1000")).json()["events"] for key in ROLES}
    times = {key: [each["when_s"] for each in shown[key]] for key in shown}
    assert times == {"one": [6, 4, 2, 1, 0], "two": [5, 3], "admin": [6, 5, 4, 3, 2, 1, 0]}
    assert "tenant" not in repr(shown)
    for _ in range(200):
        await routes.store.add_event(9e9, event_to_json(event("reused", 7, "a")))
    assert len((await routes.get("one", "events")).json()["events"]) == 200
    assert (await routes.get("one", "events?limit=1001")).status_code == 400
