"""The object for an agent loop."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction import (
    Compactor,
    SummaryFailed,
    compact,
    count_tokens,
)
from tests.builders import assistant, chat, prose, user
from tests.library.scripted import FakeCompletion, config


async def test_a_compactor_acts_above_the_trigger_alone() -> None:
    """Below it the messages come back and no model is asked; tools count; above it the result is that of `compact`."""
    completions = FakeCompletion()
    raw = chat(20)
    tokens = await count_tokens(raw, model="qwen/qwen3-8b")
    settled = config(context_window_tokens=tokens, trigger_ratio=1.0)
    compactor = Compactor(settled, completions)
    done = await compactor(raw)
    assert (done.messages, done.compacted, done.reason) == (raw, False, "below_trigger")
    assert done.tokens_before == done.tokens_after == tokens
    assert completions.asked == []
    tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    done = await compactor(raw, tools=tools)
    assert (done.compacted, len(completions.asked)) == (True, 1)
    assert done == await compact(raw, settled, FakeCompletion(), tools=tools)


@pytest.mark.parametrize(("summary_tokens", "is_used"), [(700, True), (900, False)])
async def test_a_summary_that_saves_next_to_nothing_is_not_used(summary_tokens: int, is_used: bool) -> None:
    """Less than a tenth: the conversation stays as it was."""
    raw = [user("word " * 300), assistant("ok " * 1000), user("Go on."), *chat(5)[2:]]
    settled = config(keep_recent_messages=9, summary_max_tokens=1000)
    done = await compact(raw, settled, FakeCompletion([prose("summary", summary_tokens)]))
    assert (done.reason, done.messages != raw) == ("" if is_used else "no_gain", is_used)


async def test_a_compactor_never_raises() -> None:
    """An agent goes on with what it has, and can see why."""
    bad: list[Any] = [{"content": "no role"}]
    failed = await Compactor(config(), FakeCompletion())(bad)
    assert (failed.reason, failed.round, failed.tokens_before, failed.tokens_after) == ("error", 0, 0, 0)
    compactor = Compactor(config(context_window_tokens=4096), FakeCompletion([ConnectionError("secret words")]))
    done = await compactor(chat(20))
    assert (done.messages, done.reason, type(done.error)) == (chat(20), "error", SummaryFailed)
    assert "secret" not in repr(compactor)
