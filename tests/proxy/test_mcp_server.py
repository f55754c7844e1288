"""The three tools, asked by the SDK's own client in the same process."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from mcp.client import Client

from litellm_compaction.core.compaction import compaction_id
from litellm_compaction.errors import StoreError
from litellm_compaction.events import CompactionEvent, event_to_json
from litellm_compaction.proxy.mcp_server import RecallScope, recall_server
from litellm_compaction.recall import NOT_KEPT, Lookup
from litellm_compaction.stores import Covered, Originals
from litellm_compaction.stores.rows import MemoryRows
from tests.builders import user
from tests.recall.test_lookup import BIRD, FISH
from tests.stores.made import MemoryStore
from tests.stores.test_originals import SECRET, covered, kept

ONE, TWO = covered(*FISH, scope="a", tenant="one"), covered(*BIRD, scope="b", tenant="two")


class Bench:
    def __init__(self) -> None:
        self.store = MemoryStore(ttl_s=1000, max_bytes=1_000_000, clock=lambda: 0.0)
        rows = MemoryRows(ttl_s=1000, max_bytes=10_000_000)
        self.originals = Originals(rows, ttl_s=1000, secret=lambda: SECRET)
        self.lookup = Lookup(self.originals)
        self.failures: list[Exception] = []

    async def keep(self, *conversations: Covered) -> None:
        await kept(self.originals, *conversations)

    async def tell(self, event: CompactionEvent) -> None:
        await self.store.add_event(event.when_s, event_to_json(event))

    async def ask(self, tool: str, tenant: str = "one", **given: object) -> tuple[str, bool]:
        return await self.ask_raw(tool, given, tenant)

    async def ask_raw(self, tool: str, given: Mapping[str, object], tenant: str = "one") -> tuple[str, bool]:
        shown = RecallScope(
            lookup=self.lookup, store=self.store, tenant=tenant, shows=lambda event: event.tenant == tenant
        )
        async with Client(recall_server(shown, self._failed)) as client:
            answer = await client.call_tool(tool, dict(given))
        [content] = answer.content
        assert content.type == "text"
        return content.text, answer.is_error

    def _failed(self, error: Exception) -> str:
        self.failures.append(error)
        return "failed"


@pytest.fixture
async def bench() -> Bench:
    found = Bench()
    await found.keep(ONE, TWO)
    return found


async def test_tenants_get_nothing_of_each_other(bench: Bench) -> None:
    """Neither by words nor by handle nor in the list."""
    for scope, tenant, each in (("a", "one", ONE), ("b", "two", TWO)):
        await bench.tell(compacted(scope, tenant, each))
    assert await bench.ask("search_history", "two", query="whale") == (
        "Nothing was found in what is still kept of the earlier conversation for: whale",
        False,
    )
    for tenant, each in (("one", ONE), ("two", TWO)):
        [row] = json.loads((await bench.ask("describe_compactions", tenant))[0])["compactions"]
        assert (row["first_handle"], row["last_handle"]) == (each.hashes[1][:12], each.hashes[2][:12])


@pytest.mark.parametrize("handle", [ONE.hashes[1][:12], ONE.hashes[1], "0" * 12, "", "x" * 100_000, "\x00", 7, ["a"]])
async def test_forged_and_foreign_handles_are_the_same(bench: Bench, handle: object) -> None:
    """Not found, in the same words."""
    assert await bench.ask("get_message", "two", handle=handle) == (NOT_KEPT, True)


async def test_a_query_that_is_too_long_is_told_so(bench: Bench) -> None:
    """As an error with what to change, which the model reads."""
    answer = await bench.ask("search_history", query="whale " * 20_000)
    assert answer == (
        "The query has 120,000 characters, and at most 400 are searched: ask with a few words, an id or a handle.",
        True,
    )
    assert not bench.failures


@pytest.mark.parametrize("given", [{}, {"query": ""}, {"query": " \n"}, {"query": 7}, {"query": None}])
async def test_an_empty_query_is_told_so(bench: Bench, given: Mapping[str, object]) -> None:
    """With what a query may be."""
    answer, failed = await bench.ask_raw("search_history", given)
    assert failed
    assert answer.startswith("query is empty: give words")


@pytest.mark.parametrize("limit", [0, 21, -1, "5", 1.5, True, None])
async def test_a_limit_is_a_small_number(bench: Bench, limit: object) -> None:
    assert await bench.ask("search_history", query="whale", limit=limit) == (
        "limit is a whole number from 1 to 20.",
        True,
    )


async def test_a_long_message_is_cut_in_the_middle(bench: Bench) -> None:
    """A client would show a model all of it."""
    long = covered(user("begins " + "walrus " * 20_000 + "ends"), scope="c", tenant="one")
    await bench.keep(long)
    whole, failed = await bench.ask("get_message", handle=long.hashes[1][:12])
    assert not failed
    assert 35_000 < len(whole) < 41_000
    assert "tokens left out" in whole
    assert "begins" in whole
    assert whole.endswith("ends")


async def test_what_fails_and_what_is_no_tool_is_an_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK, which would log it, sees no error."""
    assert await bench.ask("walrus") == ("no such tool", True)

    async def broken(tenant: str) -> list[tuple[str, str]]:
        raise StoreError("with the words of a conversation")

    monkeypatch.setattr(bench.originals, "names", broken)
    assert await bench.ask("search_history", query="rhinoceros") == ("failed", True)
    assert [type(error) for error in bench.failures] == [StoreError]
    assert "rhinoceros" not in caplog.text
    assert "words of" not in caplog.text


def compacted(scope: str, tenant: str, each: Covered) -> CompactionEvent:
    return CompactionEvent(
        outcome="compacted",
        phase="pre_request",
        model="small",
        window_tokens=1000,
        window_source="simulator",
        tokens_before=900,
        tokens_after=300,
        covered_messages=len(each.messages),
        round=1,
        rung="summary",
        compaction_id=compaction_id(scope, each.hashes[-1]),
        tenant=tenant,
    )
