"""The routes by which a key looks up what its conversations lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import httpx
import pytest
from fastapi import FastAPI, Request

from litellm_compaction.errors import StoreError
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.recall import MESSAGES_PATH, RECALL_PATH, RecallRoutes, hide_queries
from litellm_compaction.recall import NOT_KEPT, Lookup
from litellm_compaction.stores import Originals
from litellm_compaction.stores.rows import MemoryRows, Row
from tests.recall.test_lookup import BIRD, FISH
from tests.stores.test_originals import SECRET, covered, kept

# LiteLLM's own, while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

KEYS = {"Bearer one": "one", "Bearer two": "two"}


async def _visitor(request: Request) -> Visitor | None:
    tenant = KEYS.get(request.headers.get("authorization", ""))
    # Whoever sees all numbers sees no text of others.
    return None if tenant is None else Visitor(role="proxy_admin", tenant=tenant, auth=None)


async def _client(originals: Originals | None = None) -> httpx.AsyncClient:
    if originals is None:
        originals = Originals(MemoryRows(ttl_s=100, max_bytes=1_000_000), ttl_s=100, secret=lambda: SECRET)
        one, two = covered(*FISH, scope="a", tenant="one"), covered(*BIRD, scope="b", tenant="two")
        await kept(originals, one, two)
    app, routes = FastAPI(), RecallRoutes(Lookup(originals), _visitor)
    app.add_api_route(RECALL_PATH, routes.search)
    app.add_api_route(f"{MESSAGES_PATH}/{{handle:path}}", routes.message)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy.example")


def _as(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


async def test_a_key_finds_its_own() -> None:
    """By words; and the whole message by the handle of a hit."""
    async with await _client() as client:
        found = (await client.get(RECALL_PATH, params={"q": "whale", "limit": "1"}, headers=_as("one"))).json()
        [hit] = found["hits"]
        assert (hit["role"], hit["turn"], found["words"]) == ("assistant", 1, ["whale"])
        message = await client.get(f"{MESSAGES_PATH}/{hit['handle']}", headers=_as("one"))
        assert message.json()["parts"] == [{"role": "assistant", "call": "", "text": FISH[1]["content"]}]
        assert message.headers["cache-control"] == "no-store"


async def test_forged_and_foreign_handles_are_the_same() -> None:
    """The same bytes, whatever the handle is; and no word of another key's is found."""
    async with await _client() as client:
        found = (await client.get(RECALL_PATH, params={"q": "whale"}, headers=_as("one"))).json()
        foreign = found["hits"][0]["handle"]
        handles = (foreign, "0" * 12, "x", "..%2f..", "%00", foreign[:6], "a" * 5000)
        answers = [await client.get(f"{MESSAGES_PATH}/{each}", headers=_as("two")) for each in handles]
        assert {answer.status_code for answer in answers} == {404}
        assert {answer.text for answer in answers} == {json.dumps({"error": {"message": NOT_KEPT, "code": 404}})}
        other = (await client.get(RECALL_PATH, params={"q": "whale shark"}, headers=_as("two"))).json()
        assert (other["hits"], other["words"]) == ([], ["whale", "shark"])
        assert other["note"] == "Nothing was found in what is still kept of the earlier conversation for: whale, shark"


@pytest.mark.parametrize("path", [RECALL_PATH, f"{MESSAGES_PATH}/abc"])
async def test_without_a_key_there_is_nothing(path: str) -> None:
    """As for the page."""
    async with await _client() as client:
        answer = await client.get(path, params={"q": "whale"}, headers=_as("nobody"))
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "whale" not in answer.text


@pytest.mark.parametrize("params", [{}, {"q": ""}, {"q": " \n"}])
async def test_an_empty_query_is_told_so(params: dict[str, str]) -> None:
    """With what a query may be."""
    async with await _client() as client:
        answer = await client.get(RECALL_PATH, params=params, headers=_as("one"))
        assert answer.status_code == 400
        assert "q is empty" in answer.json()["error"]["message"]


@pytest.mark.parametrize("limit", ["0", "51", "-1", "x", "", "0000000010000000", "\u0665"])
async def test_a_limit_is_a_small_number(limit: str) -> None:
    async with await _client() as client:
        answer = await client.get(RECALL_PATH, params={"q": "whale", "limit": limit}, headers=_as("one"))
        assert answer.json()["error"]["message"] == "limit is a number from 1 to 50"


@pytest.mark.parametrize("query", ["x" * 401, "x" * 60_000, "whale " * 10_000])
async def test_a_query_that_is_too_long_is_told_so(query: str) -> None:
    """With its length and what to change, and without its words."""
    async with await _client() as client:
        answer = await client.get(RECALL_PATH, params={"q": query}, headers=_as("one"))
    assert answer.status_code == 400
    message = f"The query has {len(query):,} characters, and at most 400 are searched: "
    assert answer.json()["error"]["message"] == message + "ask with a few words, an id or a handle."


class _Broken(MemoryRows):
    async def find(self, scope: str, keys: object) -> list[object]:  # type: ignore[override]
        raise RuntimeError("with the words of a conversation")


async def test_what_fails_is_told_without_words(caplog: pytest.LogCaptureFixture) -> None:
    """Neither query nor text is in answer or log."""
    originals = Originals(_Broken(ttl_s=100, max_bytes=1000), ttl_s=100, secret=lambda: SECRET)
    async with await _client(originals) as client:
        answer = await client.get(RECALL_PATH, params={"q": "rhinoceros"}, headers=_as("one"))
    assert answer.status_code == 500
    assert "rhinoceros" not in answer.text + caplog.text
    assert "with the words" not in answer.text


def test_the_access_log_has_no_query(caplog: pytest.LogCaptureFixture) -> None:
    """Of these routes; others keep theirs."""
    hide_queries()
    hide_queries()
    log = logging.getLogger("uvicorn.access")
    with caplog.at_level(logging.INFO, logger="uvicorn.access"):
        for path in ("/root/compaction/recall?q=secret", "/compaction/recall?q=secret", "/v1/models?team=x"):
            log.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", path, "1.1", 200)
        log.info("started")
    paths = [record.getMessage().split()[3] for record in caplog.records[:3]]
    assert paths == ["/root/compaction/recall", "/compaction/recall", "/v1/models?team=x"]
    assert caplog.records[3].getMessage() == "started"


async def test_originals_that_cannot_be_read_are_a_503(caplog: pytest.LogCaptureFixture) -> None:
    """Not the proxy's fault, and no request that went on unguarded."""

    class Broken(MemoryRows):
        async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
            raise StoreError("the disk is gone")

    broken = Originals(Broken(ttl_s=100, max_bytes=1_000_000), ttl_s=100, secret=lambda: SECRET)
    async with await _client(broken) as client:
        for path in (f"{RECALL_PATH}?q=whale", f"{MESSAGES_PATH}/abc"):
            answer = await client.get(path, headers=_as("one"))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, 503)
    assert caplog.messages == ["recall_unread the disk is gone"] * 2
