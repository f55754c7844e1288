"""A client keeps its conversation's compaction itself, and sends it back in place of the history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from litellm_compaction.core.messages import Message, Request
from litellm_compaction.core.portable import Portable, portable, unfolded
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.errors import DoesNotFit
from tests.builders import JsonDict, agent_run, assistant, broken_promises, chat, parsed, system, user
from tests.engine.bench import Bench, sent

WINDOW = 8192
RULE = "Never touch /srv/prod-4711, whatever happens."
LONG = [system(), user(f"Port the parser. {RULE}"), *chat(60, words=60)[2:]]


async def kept(bench: Bench, raw: list[JsonDict], **settings: object) -> Portable:
    prepared = await bench.guard(raw, WINDOW, now=True, **settings)
    return portable(parsed(raw), prepared.compaction)


def folded(found: Portable, *later: JsonDict) -> tuple[Message, ...]:
    return unfolded(parsed([system(), user("#"), *later]), found, "#")


async def guarded(bench: Bench, messages: tuple[Message, ...], found: Portable, **changes: object) -> PreparedRequest:
    context = replace(bench.context(WINDOW), portable=found.base, **changes)  # type: ignore[arg-type]
    return await bench.compactor.guard(Request(messages=messages), context)


@pytest.mark.parametrize("raw", [LONG, agent_run(30, words=200)])
async def test_it_stands_for_the_history_without_a_store(raw: list[JsonDict]) -> None:
    """The same bytes as with the history, and no model is asked: here, in another process, with an empty store."""
    bench = Bench()
    found = await kept(bench, raw)
    with_history = await bench.guard([*raw, assistant("Done."), user("Go on.")], WINDOW)
    asked = len(bench.ask.prompts)
    messages = folded(found, assistant("Done."), user("Go on."))
    for other in (bench, Bench()):
        prepared = await guarded(other, messages, found)
        assert [each.raw for each in prepared.messages or messages] == [
            each.raw for each in with_history.messages or ()
        ]
        assert len(other.ask.prompts) == (asked if other is bench else 0)


async def test_it_is_outgrown_like_any_other() -> None:
    """The next round goes on from it: its summary, and word for word what it held of the person's words."""
    found = await kept(Bench(), LONG)
    messages = folded(found, *chat(60, words=60)[2:])
    bench = Bench()
    prepared = await guarded(bench, messages, found)
    assert prepared.action == "compacted"
    assert prepared.round == 2
    assert prepared.messages is not None
    assert broken_promises(messages, prepared.messages) == []
    record = prepared.messages[1].text
    assert RULE in record
    # Read as a summary to go on from, or frozen; never as somebody's words.
    assert record.count("Half of it is done.") >= 1
    assert "- ## Session" not in record
    assert record.count("<session_record") <= 1
    again = portable(messages, prepared.compaction)
    last = await guarded(Bench(), folded(again, assistant("Ok."), user("Bye.")), again)
    assert last.action == "reused"


async def test_without_the_record_it_is_a_conversation_like_others() -> None:
    """A list that does not begin with it gets nothing of it."""
    found = await kept(Bench(), LONG)
    raw = [system(), user("Hello.")]
    assert (await guarded(Bench(), parsed(raw), found)).messages is None


async def test_a_lower_trigger_is_the_clients() -> None:
    """Of the whole prompt, system and tools included; one above our own changes nothing."""
    raw = chat(12, words=60)
    tokens = (await Bench().guard(raw, WINDOW)).count.tokens
    for threshold, action in ((tokens - 100, "compacted"), (tokens + 100, "none"), (10**9, "none"), (1, "compacted")):
        prepared = await guarded(Bench(), parsed(raw), Portable(base=None, kept=()), threshold_tokens=threshold)
        assert prepared.action == action, threshold


async def test_a_conversation_that_may_not_change_is_refused_or_sent_as_it_is() -> None:
    """Above the trigger, too, as long as it fits."""
    free = Portable(base=None, kept=())
    raw = chat(27, words=100)
    assert (await Bench().guard(raw, WINDOW)).action == "compacted"
    assert (await guarded(Bench(), parsed(raw), free, may_change=False)).messages is None
    with pytest.raises(DoesNotFit):
        await guarded(Bench(), parsed(LONG), free, may_change=False)
    assert sent(raw, await guarded(Bench(), parsed(chat(3)), free, may_change=False))
