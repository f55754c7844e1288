"""Excerpts of the earlier conversation before a person's newest words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.core.messages import Message, Request
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.recall import BEGIN
from tests.builders import JsonDict, assistant, parsed, user
from tests.engine.bench import Bench, FakeAsk
from tests.engine.test_recalling import FACT, TOOL, noise
from tests.engine.test_recalling import LONG as _LONG

LONG = [*_LONG[:12], assistant(f"{noise(27)} and {FACT} and {noise(33)}"), *_LONG[13:], assistant("Well.")]
QUESTION = "And that bird?"


def _bench() -> Bench:
    return Bench(ask=FakeAsk(SummaryFailed("error")))


async def asked(
    raw: list[JsonDict], bench: Bench | None = None, *, tools: Sequence[JsonDict] = (), **changes: Any
) -> PreparedRequest:
    bench = bench or _bench()
    goes_on = changes.pop("goes_on", False)
    context = replace(bench.context(**{"keep_originals": "compacted", **changes}), goes_on=goes_on)
    return await bench.compactor.guard(Request(messages=parsed(raw), tools=tuple(tools)), context)


def last(prepared: PreparedRequest) -> Message:
    assert prepared.messages is not None
    return prepared.messages[-1]


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        ([*LONG, user(QUESTION)], {"recall": "off"}),
        ([*LONG, user(QUESTION)], {"recall": "tool"}),
        ([*LONG, user(QUESTION)], {"keep_originals": "off"}),
        ([*LONG, user(QUESTION)], {"tools": [TOOL]}),
        ([*LONG, user(QUESTION)], {"is_client_summary": True}),
        ([*LONG, user(QUESTION)], {"goes_on": True}),
        ([*LONG, user(QUESTION), assistant("It is")], {}),
        ([*LONG, user(f"<system-reminder>{QUESTION}</system-reminder>")], {}),
        ([*LONG, user("Go on with the parser, please.")], {}),
        ([*LONG, user(QUESTION), {"role": "tool", "tool_call_id": "c", "content": "A bird answers."}], {}),
    ],
)
async def test_others_get_none(raw: list[JsonDict], changes: dict[str, Any]) -> None:
    """Agents, machines' words, requests of ours or of a client's own, and what nothing was said about."""
    prepared = await asked(raw, **changes)
    assert prepared.action == "compacted"
    assert prepared.excerpts == 0
    assert not any(BEGIN in message.text for message in prepared.messages or ())


async def test_the_window_has_room_for_them() -> None:
    """They take a sixteenth of it at most, and never so much that the conversation would be compacted for them."""
    bench = _bench()
    raw = [*LONG, user(QUESTION)]
    first = await asked(raw, bench)
    assert 0 < first.excerpt_tokens <= first.window.tokens // 16
    room_tokens = first.budget.trigger_tokens - first.count.tokens + first.excerpt_tokens
    narrow = await asked([*LONG, user(QUESTION + " and" * (room_tokens - 150))], bench)
    room_tokens = narrow.budget.trigger_tokens - narrow.count.tokens + narrow.excerpt_tokens
    assert 0 < narrow.excerpt_tokens <= room_tokens < first.excerpt_tokens
    found: list[int] = []
    for words in range(0, 6000, 250):
        raw = [*LONG, user(QUESTION + " and" * words)]
        prepared = await asked(raw, bench)
        assert not prepared.excerpts or not prepared.budget.triggers(prepared.count.tokens)
        found.append(prepared.excerpt_tokens)
    assert found[0] > found[-1] == 0


async def test_nobody_elses_words_are_quoted() -> None:
    """Another tenant's conversation, the same but for the fact, does not get it."""
    bench = _bench()
    assert FACT in last(await asked([*LONG, user(QUESTION)], bench)).text
    others = [{**each, "content": str(each["content"]).replace(FACT, "")} for each in LONG]
    for scope in ("team", "others"):
        prepared = await asked([*others, user(QUESTION)], bench, scope=scope)
        assert prepared.action == "compacted"
        assert not any(FACT in message.text for message in prepared.messages or ())
