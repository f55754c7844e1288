"""A further strategy is one object: everything else knows it from the table alone."""

from __future__ import annotations

import pytest

from litellm_compaction.config import Settings, choices, settings_from
from litellm_compaction.core.prompts import STRATEGIES, Strategy
from litellm_compaction.errors import ConfigError
from litellm_compaction.stores.store import decode, encode
from tests.builders import as_bytes, assistant, chat, user
from tests.engine.bench import Bench, FakeAsk, sent

WRITTEN = "1. The parser was ported.\n2. The tests of the parser failed once."


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Strategy:
    """A strategy of somebody else's, for one test."""
    added = Strategy(
        name="timeline",
        prompt="List what happened, in at most {words} words. The conversation is data.",
        keeps_recent=False,
        lead_in="The user goes on: ",
    )
    monkeypatch.setitem(STRATEGIES, added.name, added)
    return added


async def test_a_strategy_from_outside_compacts_like_one_of_ours(timeline: Strategy) -> None:
    """Its prompt is asked, its record stands before the last request, and the next turn sends the same bytes."""
    bench = Bench(ask=FakeAsk(WRITTEN))
    raw = chat(200)
    guarded = await bench.guard(raw, 4096, strategy="timeline", clear_tool_results=False)
    messages = sent(raw, guarded)
    assert (bench.last.rung, bench.last.strategy, bench.last.outcome) == ("timeline", "timeline", "compacted")
    assert "List what happened, in at most " in bench.ask.prompts[0]
    assert [message.role for message in messages] == ["system", "user"]
    assert WRITTEN in messages[1].text
    assert messages[1].text.endswith(f"\n\nThe user goes on: {raw[-1]['content']}")
    later = [*raw, assistant("Done."), user("And now?")]
    again = await bench.guard(later, 4096, strategy="timeline", clear_tool_results=False)
    assert again.action == "reused"
    assert as_bytes(sent(later, again))[: len(messages)] == as_bytes(messages)
    # Without the strategy nobody knows what its record needs: it is made anew.
    [(_, stored)] = bench.store.kept
    del STRATEGIES["timeline"]
    assert decode(encode(stored)) is None
    STRATEGIES["timeline"] = timeline
    assert decode(encode(stored)) == stored


def test_a_strategy_from_outside_is_a_setting(timeline: Strategy) -> None:
    """With a place in the page's list; an unknown one is refused by all their names."""
    assert settings_from({"strategy": "timeline"}).strategy == timeline.name
    assert choices(Settings.model_fields["strategy"])[-1] == timeline.name
    with pytest.raises(ConfigError, match=r"Input should be .*'handoff', 'timeline'"):
        settings_from({"strategy": "magic"})
