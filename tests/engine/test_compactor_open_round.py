"""Promise P2 as agents test it: results that no assistant message follows reach the model, whatever stands behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings

from litellm_compaction.core.messages import Message
from litellm_compaction.core.stretches import is_text_result
from litellm_compaction.errors import DoesNotFit
from tests.builders import (
    ADDITIONS,
    JsonDict,
    agent_conversations,
    agent_run,
    as_sent,
    assistant,
    open_tail,
    parsed,
    system,
    user,
)
from tests.engine.bench import SUMMARY, Bench, FakeAsk

STRATEGIES = ["summary", "prune", "handoff"]
WINDOW = 4096
HISTORY = [*agent_run(12), assistant("The parser is ported. " * 10)]
DROP_ALL = json.dumps({"drop": ["1-99"], "summary": "The parser was ported."})


async def sent(raw: Sequence[JsonDict], strategy: str, *, clear: bool) -> Sequence[Message]:
    """What reaches the model; the pruning model gives away all that it is offered."""
    bench = Bench(ask=FakeAsk(DROP_ALL if strategy == "prune" else SUMMARY))
    prepared = await bench.guard(raw, WINDOW, strategy=strategy, clear_tool_results=clear)
    return parsed(raw) if prepared.messages is None else prepared.messages


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=settings().max_examples // 2)
@given(agent_conversations(max_rounds=2))
@example([user("Task 0: plain words"), system(ADDITIONS[0])])
def test_unread_results_are_sent_byte_for_byte(strategy: str, clear: bool, raw: list[JsonDict]) -> None:
    """By every strategy and level, with user and system messages anywhere behind the results."""
    raw = [*HISTORY, *raw[raw[0]["role"] == "system" :]]
    try:
        messages = asyncio.run(sent(raw, strategy, clear=clear))
    except DoesNotFit:
        return
    tail = open_tail(parsed(raw))
    for now, was in zip(messages[len(messages) - len(tail) :], tail, strict=True):
        # A result as text is data that a client attached, and gives way before a refusal.
        assert is_text_result(was) or json.dumps(as_sent(now)) == json.dumps(as_sent(was))
    # A system message stays one where it still fits.
    roles = {"user", raw[-1]["role"]}
    assert any(message.role in roles and raw[-1]["content"] in message.text for message in messages) or tail
