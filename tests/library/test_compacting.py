"""Messages in, messages out: what is kept, what is summarized, over many rounds."""

from __future__ import annotations

import asyncio
import copy
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litellm_compaction import (
    CompactionResult,
    Compactor,
    DoesNotFit,
    Model,
    SummaryFailed,
    compact,
    generate_summary,
    safe_compact,
)
from litellm_compaction.core.messages import FRAME_BEGIN
from litellm_compaction.core.prompts import STRATEGIES
from tests.builders import (
    JsonDict,
    assistant,
    broken_promises,
    calls,
    chat,
    parsed,
    raw_conversations,
    result,
    system,
    user,
)
from tests.library.scripted import SUMMARY, FakeCompletion, config, counted, plan_or_summary

TASK = "The task: port the parser to Rust, never touch /etc/passwd."


async def test_the_old_part_becomes_one_record() -> None:
    """System, the record in the first user message, the last ten as they came; fewer tokens, as sent."""
    raw = [{**message, "id": f"m{at}"} for at, message in enumerate(chat(20))]
    model = FakeCompletion().model
    done = await compact(raw, "s", model, config(32_768))
    assert not any(words in repr((done, model)) for words in ("Port the parser", "Question"))
    event, sent = done.compaction_event, done.compacted_messages
    assert event is not None
    assert (event.round, event.summary_content, done.error) == (1, SUMMARY, None)
    assert done.replaced == tuple(range(1, 30))
    assert event.compacted_message_ids == tuple(f"m{at}" for at in done.replaced)
    assert (sent[0], sent[2:]) == (raw[0], raw[-10:])
    assert str(sent[1]["content"]).startswith(f"## Session Summary (round 1)\n{FRAME_BEGIN}\n")
    assert event.tokens_before == await counted(raw) > 1.4 * event.tokens_after
    assert abs(event.tokens_after - await counted(sent)) < 8


async def test_an_earlier_summary_is_integrated() -> None:
    """Anybody's, whoever wrote it; the round goes up, the model is shown it, and its message is one that went."""
    completions = FakeCompletion()
    raw = [system(), assistant("## Session Summary (round 4)\nThe lexer is ported."), *chat(20)[1:]]
    done = await compact(raw, "s", completions.model, config())
    assert done.compaction_event is not None
    assert done.compaction_event.round == 5
    assert "The lexer is ported." in completions.prompts[0]
    assert done.replaced[0] == 1
    assert str(done.compacted_messages).count("## Session Summary") == 1
    again = await compact(done.compacted_messages, "s", completions.model, config())
    assert (again.compacted_messages, again.compaction_event) == (done.compacted_messages, None)
    assert len(completions.asked) == 1


@pytest.mark.parametrize("raw", [[], [system()], [user("x " * 9999)], chat(5), [system(), *chat(6)[1:]]])
async def test_nothing_to_do(raw: list[JsonDict]) -> None:
    """The same messages, and nobody is asked."""
    completions = FakeCompletion()
    done = await compact(raw, "s", completions.model, config(131_072))
    assert (done.compacted_messages, done.compaction_event, completions.asked) == (raw, None, [])


@pytest.mark.parametrize("answer", [ConnectionError("secret words"), "", {}])
async def test_without_a_summary_it_stays_as_it_is_while_it_can(answer: Any) -> None:
    """Below the threshold the messages say more; above it the copied words stand alone."""
    completions = FakeCompletion(answer)
    done = await safe_compact(chat(20), "s", completions.model, config(131_072))
    assert (done.compacted_messages, done.compaction_event) == (chat(20), None)
    done = await safe_compact(chat(20), "s", completions.model, config(4096))
    assert done.compaction_event is not None
    assert done.compaction_event.summary_content == ""
    assert "Question 0." in str(done.compacted_messages[1]["content"])


async def test_messages_that_are_none(caplog: pytest.LogCaptureFixture) -> None:
    """An error that says which one; `safe_compact` and a `Compactor` hand them back."""
    bad: list[Any] = [user("x"), None]
    with pytest.raises(ValueError, match=r"^messages\[1\]: "):
        await compact(bad, "s", FakeCompletion().model, config())
    done = await safe_compact(bad, "s", FakeCompletion().model, config())
    assert (done.compacted_messages, type(done.error)) == (bad, ValueError)
    assert "library_compaction_failed error=ValueError" in caplog.text
    assert (await Compactor(FakeCompletion().model, config())(bad)).compacted_messages == bad


async def test_cancellation_passes_through() -> None:
    """An agent that is stopped stops."""
    started = asyncio.Event()

    async def hang(**_: Any) -> Any:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(safe_compact(chat(20), "s", Model("qwen/qwen3-8b", hang), config()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@settings(max_examples=30)
@given(st.sampled_from([*STRATEGIES]), st.data(), st.integers(0, 12))
def test_the_promises_hold_over_rounds(strategy: str, data: st.DataObject, keep: int) -> None:
    """Input untouched; P2 and P3 kept; one record, whose round counts every one; what went is not there any more."""
    raw = data.draw(raw_conversations(max_turns=8, repeats=15))
    settled = config(32_768, recent_messages_to_keep=keep, strategy=strategy)
    made = 0
    for _ in range(3):
        before = copy.deepcopy(raw)
        done = asyncio.run(compact(raw, "s", FakeCompletion(plan_or_summary).model, settled))
        sent = [*map(dict, done.compacted_messages)]
        assert raw == before
        if done.compaction_event is None:
            assert sent == raw
        else:
            made += 1
            assert done.compaction_event.round == made
            problems = broken_promises(parsed(raw), parsed(sent))
            assert [problem for problem in problems if problem != "null content"] == []
            assert str(sent).count("## Session Summary (round") == 1
            if strategy == "summary":
                # Users' messages that stay travel with the record.
                staying = [each for at, each in enumerate(raw) if at not in done.replaced and each["role"] != "user"]
                assert [each for each in sent if each["role"] != "user"] == staying
        drawn = data.draw(raw_conversations(max_turns=4, repeats=15))
        more = [message for message in drawn if message["role"] not in ("system", "developer")]
        raw = [*sent, *([] if sent[-1]["role"] == "assistant" else [assistant("ok")]), *more]


async def test_a_summary_alone() -> None:
    """Under its heading; the model is shown what it integrates, the task, and the round."""
    completions = FakeCompletion()
    made = await generate_summary(chat(5), "EARLIER", "NOW", 7, completions.model)
    assert made == f"### Session Summary (Compaction Round 7)\n\n{SUMMARY}"
    assert all(word in completions.prompts[0] for word in ("EARLIER", "NOW", "round 7", "Question 0."))
    assert (completions.asked[0]["max_tokens"], completions.asked[0]["temperature"]) == (800, 0.3)
    with pytest.raises(SummaryFailed, match="ConnectionError"):
        await generate_summary(chat(5), "", "", 1, FakeCompletion(ConnectionError("secret")).model)


def listing(seed: int, lines: int) -> str:
    """What a search gives: no line comes twice."""
    random = Random(seed)
    return "\n".join(f"src/{random.randrange(10**6):x}.py:{random.randrange(999)}: value" for _ in range(lines))


async def loop(compactor: Compactor, steps: int, lines: int, *, is_whole: bool = False) -> list[CompactionResult]:
    """An agent whose every step brings a result; it goes on with what came back, or with its whole history."""
    raw: list[Any] = [system(), user(TASK)]
    found = []
    for step in range(steps):
        found.append(await compactor(raw))
        raw = [
            *(raw if is_whole else found[-1].compacted_messages),
            calls(str(step)),
            result(str(step), listing(step, lines)),
        ]
    return found


@pytest.mark.parametrize(
    ("name", "said", "window_tokens", "lines", "most"),
    [
        ("qwen/qwen3-8b", SUMMARY, 4096, 190, 12),
        ("qwen/qwen3-8b", "", 4096, 190, 12),
        ("qwen/qwen3-8b", "long " * 900, 4096, 190, 12),
        ("qwen/qwen3-8b", SUMMARY, 8192, 190, 6),
        ("nobody/knows-it", SUMMARY, 4096, 90, 6),
        ("nobody/knows-it", "", 8192, 190, 6),
    ],
)
async def test_the_window_is_kept(name: str, said: str, window_tokens: int, lines: int, most: int) -> None:
    """Step after step, by the true model; a summariser that says nothing, little, or too much, and never its usage."""
    found = await loop(Compactor(Model(name, FakeCompletion(said)), config(window_tokens)), 14, lines)
    assert [each.error for each in found] == [None] * 14
    assert max([await counted(each.compacted_messages) for each in found]) <= window_tokens
    made = [each.compaction_event for each in found if each.compaction_event]
    assert 0 < len(made) <= most
    assert [event.round for event in made] == [*range(1, len(made) + 1)]
    assert TASK in str(found[-1].compacted_messages)


async def test_a_whole_history_gets_the_same_compaction_again() -> None:
    completions = FakeCompletion()
    found = await loop(Compactor(completions.model, config(8192)), 14, 100, is_whole=True)
    assert [each.error for each in found] == [None] * 14
    assert max([await counted(each.compacted_messages) for each in found]) <= 8192
    assert 0 < len(completions.asked) <= 6


async def test_what_does_not_fit_is_named() -> None:
    """Two results that nobody has answered, each of three quarters of the window; nobody is asked for a summary."""
    raw = [*chat(2), user(TASK), calls("a", "b"), result("a", listing(1, 210)), result("b", listing(2, 210))]
    completions = FakeCompletion()
    with pytest.raises(DoesNotFit, match=r"4096 tokens.*result of tool \w+ 29\d\d tokens") as error:
        await compact(raw, "s", completions.model, config(4096))
    assert error.value.needed_tokens > 6000
    done = await Compactor(completions.model, config(4096))(raw)
    assert (done.compacted_messages, type(done.error), completions.asked) == (raw, DoesNotFit, [])


@pytest.mark.parametrize(("name", "most"), [("qwen/qwen3-8b", 3754), ("nobody/knows-it", 3992)])
async def test_the_longest_message_that_fits(name: str, most: int) -> None:
    """For an unknown model a sixth of the window stays free: its tokens may be more than are counted."""
    compactor = Compactor(Model(name, FakeCompletion()), config(4096))
    errors = [(await compactor([user("word " * words)])).error for words in (most, most + 1)]
    assert [type(error) for error in errors] == [type(None), DoesNotFit]
