"""What the library makes of five conversations, a line a conversation: where a change of any number of it is felt."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from litellm_compaction import (
    CompactionConfig,
    CompactionResult,
    Compactor,
    Model,
    estimate_messages_tokens,
    generate_summary,
    safe_compact,
    select_messages_to_compact,
    should_compact,
)
from litellm_compaction.core.prompts import STRATEGIES
from tests.goldens.tellers import TELLS, Teller, recorded
from tests.library.scripted import SUMMARY, FakeCompletion, plan_or_summary

_FILE = Path(__file__).parent / "recorded.txt"


@pytest.mark.parametrize("name", sorted(TELLS))
async def test_what_is_made_is_as_recorded(name: str) -> None:
    """By settings of any kind, for a model that is known or not: if it is wanted, and if it is due."""
    lines = [await _line(name, Teller(f"{name} {number}")) for number in range(4)]
    assert lines == recorded(_FILE, name, lines)


async def _line(name: str, teller: Teller) -> str:
    luck = teller.luck
    raw = [*itertools.islice(TELLS[name](teller), luck.randint(20, 60))]
    settings = CompactionConfig(
        model_context_limit=luck.randint(3_000, 20_000),
        system_reserve=luck.randint(0, 2_000),
        threshold_percent=luck.choice([0.2, 0.5, 0.8]),
        recent_messages_to_keep=luck.choice([0, 5, 10]),
        strategy=luck.choice([*STRATEGIES]),
    )
    completions = FakeCompletion(luck.choice([plan_or_summary, SUMMARY, ""]))
    model = Model(luck.choice(["qwen/qwen3-8b", "nobody/knows-it"]), completions)
    due, chosen = should_compact(raw, settings), select_messages_to_compact(raw)
    line = f"{estimate_messages_tokens(raw)} of {settings.threshold_tokens}{' due' * due}"
    line += f", {len(chosen.messages_to_compact)} of {len(raw)}"
    for compacting in (Compactor(model, settings)(raw), safe_compact(raw, "s", model, settings)):
        line += f"; {_made(await compacting)}, asked for {_asked(completions)}"
    alone = FakeCompletion()
    await generate_summary(raw, SUMMARY, "task", 2, alone.model, window_tokens=luck.choice([1_500, 4_000]))
    return f"{line}; alone {[len(prompt) for prompt in alone.prompts]}"


def _made(done: CompactionResult) -> str:
    event, replaced = done.compaction_event, done.replaced
    if event is None:
        return f"nothing {type(done.error).__name__}" if done.error else "nothing"
    spans = f"{replaced[0]}-{replaced[-1]} ({len(replaced)})"
    return f"{event.tokens_before} > {event.tokens_after} in {len(done.compacted_messages)}, replaced {spans}"


def _asked(completions: FakeCompletion) -> list[int]:
    """The tokens for each summary, which are forgotten then."""
    tokens = [call["max_tokens"] for call in completions.asked]
    completions.asked.clear()
    return tokens
