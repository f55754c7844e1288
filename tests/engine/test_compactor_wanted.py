"""A client wants its conversation compacted now, whatever the fill, perhaps with a topic that is kept in detail."""

from __future__ import annotations

from typing import Any

from litellm_compaction.engine import PreparedRequest
from litellm_compaction.errors import SummaryFailed
from tests.builders import JsonDict, chat
from tests.engine.bench import Bench, FakeAsk

WINDOW = 32_768
# Far below any trigger: some 2,900 tokens of 32,768.
SMALL = chat(20, words=60)


async def wanted(bench: Bench, raw: list[JsonDict], *, focus: str = "", **settings: Any) -> PreparedRequest:
    return await bench.guard(raw, WINDOW, now=True, focus=focus, **settings)


async def test_what_fits_stays_as_it_is_where_no_model_gives_a_summary() -> None:
    """A record without a summary says less than the conversation, which nobody had to cut."""
    bench = Bench(ask=FakeAsk(SummaryFailed("error")))
    prepared = await wanted(bench, SMALL, focus="ports")
    assert (prepared.action, prepared.messages) == ("none", None)
    assert bench.store.kept == []
    assert bench.outcomes == ["fallback"]


async def test_a_second_wish_covers_what_came_since() -> None:
    """The record of the first would still do for the window, and is not what its client asks for."""
    bench = Bench()
    first = await wanted(bench, SMALL)
    again = await wanted(bench, chat(34, words=60))
    assert (first.action, again.action, again.round) == ("compacted", "compacted", 2)
    assert again.count.tokens < first.tokens_before
