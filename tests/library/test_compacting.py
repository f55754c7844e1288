"""Messages in, messages out: what is kept, what is summarized, over many rounds."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction import (
    CompactionResult,
    Compactor,
    DoesNotFit,
    SummaryFailed,
    compact,
    count_tokens,
    generate_summary,
    safe_compact,
    select_messages,
)
from litellm_compaction.core.prompts import FRAME_BEGIN, FRAME_END
from litellm_compaction.core.strategies import STRATEGIES
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
from tests.integration.bench import edit_plan
from tests.library.scripted import SUMMARY, FakeCompletion, completion, config

TASK = "The task: port the parser to Rust, never touch /etc/passwd."


def carrier(messages: Sequence[JsonDict]) -> str:
    """The text of the first user message."""
    content = next(message["content"] for message in messages if message["role"] == "user")
    return content if isinstance(content, str) else content[0]["text"]


async def test_the_old_part_becomes_one_record() -> None:
    """System, the record in the first user message, the last ten as they came; fewer tokens, counted as sent."""
    raw = chat(20)
    completions = FakeCompletion()
    done = await compact(raw, config(), completions)
    assert done.compacted
    assert (done.reason, done.round, done.error) == ("", 1, None)
    assert done.summary == SUMMARY
    assert done.messages[0] == raw[0]
    assert done.messages[-10:] == raw[-10:]
    assert done.summarized_messages == len(raw) - 1 - 10
    text = carrier(done.messages)
    assert text.startswith(f"## Session Summary (round 1)\n{FRAME_BEGIN}\n")
    assert text.index(SUMMARY) < text.index("Question 0.") < text.index(FRAME_END)
    assert done.tokens_before == await count_tokens(raw, model="qwen/qwen3-8b")
    assert done.tokens_after == await count_tokens(done.messages, model="qwen/qwen3-8b") < done.tokens_before / 2


async def test_no_secret_of_a_summary_is_written_down() -> None:
    """What is written into the conversation is read by later requests, and may be stored by the caller."""
    raw = chat(20)
    raw[1]["content"] += " DB_PASSWORD=hunter2"
    done = await compact(raw, config(), FakeCompletion([f"{SUMMARY}\nThe login uses DB_PASSWORD=hunter2."]))
    assert done.compacted
    assert "DB_PASSWORD=[secret removed]" in carrier(done.messages)
    assert "hunter2" not in carrier(done.messages)


@pytest.mark.parametrize("bad", [[{"content": "no role"}], ["text"], [None]])
async def test_messages_that_are_none(bad: list[Any]) -> None:
    """An error that says which one; `safe_compact` hands them back."""
    with pytest.raises(ValueError, match=r"^messages\[0\]: "):
        await compact(bad, config(), FakeCompletion())
    done = await safe_compact(bad, config(), FakeCompletion())
    assert done.messages == bad
    assert isinstance(done.error, ValueError)


@pytest.mark.parametrize("guarded", [compact, safe_compact])
async def test_cancellation_passes_through(guarded: Any) -> None:
    """An agent that is stopped stops."""
    started = asyncio.Event()

    async def hang(**_: Any) -> Any:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(guarded(chat(20), config(), hang))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_slow_summariser_is_given_up() -> None:
    """After the time limit of the configuration."""

    async def hang(**_: Any) -> Any:
        await asyncio.Event().wait()

    with pytest.raises(SummaryFailed, match="timeout"):
        await compact(chat(20), config(timeout_s=0.01), hang)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([], "empty"),
        ([system()], "all_recent"),
        (chat(5), "all_recent"),
        ([user("a " * 500), *chat(5)[1:]], "all_recent"),
        ([user("hi"), assistant("hello"), *chat(6)[1:]], "too_short"),
        # One tool round of eleven messages is recent as a whole.
        ([user("x " * 500), calls(*"abcdefghij"), *(result(each, "ok") for each in "abcdefghij")], "nothing_new"),
    ],
)
async def test_nothing_to_do(raw: list[JsonDict], reason: str) -> None:
    """The same messages, the reason, and nobody is asked."""
    completions = FakeCompletion()
    done = await compact(raw, config(), completions)
    assert (done.messages, done.compacted, done.reason, done.round) == (raw, False, reason, 0)
    assert done.tokens_after == done.tokens_before
    assert completions.asked == []


async def test_a_compaction_that_gains_nothing_is_not_used() -> None:
    """P5: what saves less than a tenth leaves the conversation as it was."""
    raw = [user("word " * 200), assistant("ok"), user("pasted " * 3000), *chat(5)[2:]]
    completions = FakeCompletion()
    done = await compact(raw, config(keep_recent_messages=9), completions)
    assert (done.compacted, done.reason, done.messages) == (False, "no_gain", raw)
    assert completions.asked == []
    raw = [user("word " * 500), assistant("ok"), user("pasted " * 1000), *chat(5)[2:]]
    done = await compact(raw, config(keep_recent_messages=9), FakeCompletion(["long " * 330]))
    assert (done.compacted, done.reason, done.messages) == (False, "no_gain", raw)


def plan_or_summary(prompt: str) -> str:
    """What a good model answers, whichever it is asked for."""
    return edit_plan(prompt, SUMMARY) or SUMMARY


@given(st.sampled_from([*STRATEGIES]), raw_conversations(max_turns=14, repeats=20), st.integers(0, 12))
def test_the_promises_hold(strategy: str, raw: list[JsonDict], keep: int) -> None:
    """Input untouched, P2 and P3 kept, the tail identical, system bytes equal, and a second call changes nothing."""
    before = copy.deepcopy(raw)
    settled = config(keep_recent_messages=keep, context_window_tokens=32_768, strategy=strategy)
    done = asyncio.run(compact(raw, settled, FakeCompletion([plan_or_summary])))
    assert raw == before
    if not done.compacted:
        assert done.messages == raw
        return
    assert done.tokens_after < done.tokens_before
    shape = [problem for problem in broken_promises(parsed(raw), parsed(done.messages)) if problem != "null content"]
    assert shape == []
    systems = [json.dumps(message) for message in raw if message["role"] in ("system", "developer")]
    assert [json.dumps(each) for each in done.messages if each["role"] in ("system", "developer")] == systems
    if done.strategy == "prune":
        # Older ones may stand before the recent messages; one that opens the tail carries the record.
        assert done.messages[len(done.messages) - max(keep - 1, 0) :] == raw[len(raw) - max(keep - 1, 0) :]
        return
    kept = len(done.messages) - len(systems) - 1
    assert done.messages[len(done.messages) - kept :] == raw[len(raw) - kept :]
    # A user message that opens the tail carries the record.
    assert kept >= keep - 1 or strategy == "handoff"
    completions = FakeCompletion()
    again = asyncio.run(compact(done.messages, settled, completions))
    assert (again.messages, again.compacted, completions.asked) == (done.messages, False, [])
    assert again.round in (0, 1)


@given(st.sampled_from([*STRATEGIES]), st.data(), st.integers(0, 6))
def test_the_promises_hold_over_rounds(strategy: str, data: st.DataObject, keep: int) -> None:
    """A conversation that grows and is compacted again and again has one record, and its round counts every one."""
    raw = data.draw(raw_conversations(max_turns=8, repeats=15))
    settled = config(keep_recent_messages=keep, context_window_tokens=32_768, strategy=strategy)
    made = 0
    for _ in range(4):
        before = copy.deepcopy(raw)
        done = asyncio.run(compact(raw, settled, FakeCompletion([plan_or_summary])))
        assert raw == before
        if done.compacted:
            made += 1
            assert done.round == made
            problems = broken_promises(parsed(raw), parsed(done.messages))
            assert [problem for problem in problems if problem != "null content"] == []
            assert sum("## Session Summary (round" in str(message["content"]) for message in done.messages) == 1
            assert str(done.messages).count("Last request from user was: ") <= (strategy == "handoff")
        drawn = data.draw(raw_conversations(max_turns=4, repeats=15))
        more = [message for message in drawn if message["role"] not in ("system", "developer")]
        between = [] if done.messages[-1]["role"] == "assistant" else [assistant("ok")]
        raw = [*done.messages, *between, *more]


async def test_a_summary_alone() -> None:
    """`generate_summary` gives the text without a frame."""
    completions = FakeCompletion()
    made = await generate_summary(chat(5), config(), completions, earlier="EARLIER", request="NOW", round_number=7)
    assert made == SUMMARY
    assert all(word in completions.prompts[0] for word in ("EARLIER", "NOW", "round 7", "Question 0."))
    with pytest.raises(ValueError, match=r"messages\[0\]"):
        await generate_summary([{}], config(), completions)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_result_says_which_messages_it_stands_for(strategy: str) -> None:
    """All that is not sent any more, an earlier record included; none of what stays word for word."""
    old = system("## Session Summary (round 4)\nThe lexer is ported.")
    raw = [system(), old, *chat(10)[1:], system("Metric units."), *chat(30)[21:]]
    unique = [{**message, "content": f"{message['content']} No. {at}."} for at, message in enumerate(raw)]
    done = await compact(unique, config(strategy=strategy), FakeCompletion([plan_or_summary]))
    assert done.compacted
    assert len(done.replaced) == done.summarized_messages + 1
    assert done.replaced == tuple(sorted(set(done.replaced)))
    sent = [str(message["content"]) for message in done.messages]
    staying = [at for at, message in enumerate(unique) if any(each.endswith(message["content"]) for each in sent)]
    if strategy != "prune":
        assert sorted([*staying, *done.replaced]) == list(range(len(unique)))
    assert not {*staying} & {*done.replaced}
    again = await compact(done.messages, config(strategy=strategy), FakeCompletion())
    assert again.compacted or again.replaced == ()


@pytest.mark.parametrize(("messages", "reason"), [(7, "all_recent"), (8, "")])
async def test_one_message_more_than_is_kept_is_nothing_to_compact(messages: int, reason: str) -> None:
    """The system message and the recent ones are all there is; one more, and there is something to do."""
    big = [user("word " * 2000), assistant("word " * 2000)]
    raw = [system(), *big, *([user("And?"), assistant("So.")] * 3)][:messages]
    done = await compact(raw, config(keep_recent_messages=6), FakeCompletion())
    assert (done.reason, done.compacted) == (reason, not reason)


@pytest.mark.parametrize("strategy", ["summary", "prune", "handoff"])
async def test_a_topic_reaches_the_summariser(strategy: str) -> None:
    """As data, whatever the strategy; too long a text is no topic."""
    completions = FakeCompletion()
    await compact(chat(30), config(strategy=strategy), completions, focus="the <|im_start|> schema")
    assert "the < |im_start|> schema" in str(completions.asked[0])
    assert (await safe_compact(chat(30), config(), completions, focus="x" * 501)).reason == "error"


async def test_a_compactor_never_raises() -> None:
    """An agent goes on with what it has, and can see why."""
    bad: list[Any] = [{"content": "no role"}]
    failed = await Compactor(config(), FakeCompletion())(bad)
    assert (failed.reason, failed.round, failed.tokens_before, failed.tokens_after) == ("error", 0, 0, 0)
    compactor = Compactor(config(context_window_tokens=4096), FakeCompletion([ConnectionError("secret words")]))
    done = await compactor(chat(20))
    assert (done.strategy, done.reason, done.summary, type(done.error)) == ("truncate", "", "", SummaryFailed)
    assert "Question 0." in carrier(done.messages)
    assert "secret" not in repr(compactor)


def listing(seed: int, lines: int) -> str:
    """What a search gives: no line comes twice."""
    random = Random(seed)
    return "\n".join(f"src/{random.randrange(10**6):x}.py:{random.randrange(999)}: value" for _ in range(lines))


async def loop(compactor: Compactor, steps: int, lines: int, *, truth: str) -> list[tuple[CompactionResult, int]]:
    """An agent whose every step brings a result; what came of each step, and its prompt's tokens by the true model."""
    raw, found = [system(), user(TASK)], []
    for step in range(steps):
        done = await compactor(raw)
        found.append((done, await count_tokens(done.messages, model=truth)))
        raw = [*done.messages, calls(str(step)), result(str(step), listing(step, lines))]
    return found


@pytest.mark.parametrize(
    ("model", "said"), [("qwen/qwen3-8b", ""), ("nobody/knows-it", SUMMARY), ("qwen/qwen3-8b", "long " * 900)]
)
async def test_the_window_is_kept(model: str, said: str) -> None:
    """Results of three quarters of it, step after step, and a summariser that says nothing, little, or too much."""
    found = await loop(
        Compactor(config(model=model, context_window_tokens=4096), FakeCompletion([said])), 12, 210, truth=model
    )
    assert max(tokens for _, tokens in found) <= 4096
    assert sum(done.compacted for done, _ in found) == 10
    assert {done.strategy for done, _ in found if done.compacted} == ({"summary"} if said == SUMMARY else {"truncate"})
    assert TASK in carrier(found[-1][0].messages)


async def test_what_does_not_fit_is_named() -> None:
    """Two results that nobody has answered, each of three quarters of the window; nobody is asked for a summary."""
    raw = [*chat(2), user(TASK), calls("a", "b"), result("a", listing(1, 210)), result("b", listing(2, 210))]
    completions = FakeCompletion()
    with pytest.raises(DoesNotFit, match=r"4096 tokens.*result of tool \w+ 29\d\d tokens.*Shorten") as error:
        await compact(raw, config(context_window_tokens=4096), completions)
    assert error.value.needed_tokens > 6000
    done = await Compactor(config(context_window_tokens=4096), completions)(raw)
    assert (done.messages, done.reason, type(done.error)) == (raw, "error", DoesNotFit)
    assert completions.asked == []
    earlier = [user(f"## Session Summary (round 1)\n{listing(3, 60)}"), assistant("ok"), user("And then?")]
    raw = [*earlier, calls("a"), result("a", listing(1, 240))]
    with pytest.raises(DoesNotFit, match=r"earlier record and short messages 8\d\d tokens"):
        await compact(raw, config(context_window_tokens=4096), completions)


async def test_a_servers_number_corrects_the_count_of_an_unknown_model() -> None:
    """Else every step of a third of the window looks like one too many."""
    truth = "qwen/qwen3-8b"

    async def complete(*, messages: list[JsonDict], **_: Any) -> JsonDict:
        told = await count_tokens(messages, model=truth)
        return {**completion(SUMMARY), "usage": {"prompt_tokens": told}}

    compactor = Compactor(config(model="nobody/learns", context_window_tokens=8192), complete)
    found = await loop(compactor, 14, 190, truth=truth)
    assert sum(done.compacted for done, _ in found) <= 7
    assert max(tokens for _, tokens in found) <= 8192


def test_an_earlier_summary_is_found() -> None:
    """With its round, and not among what is to be summarized."""
    chosen = select_messages([system(), user("## Session Summary (round 2)\nA."), *chat(20)[1:]], config())
    assert (chosen.round, chosen.earlier_summary) == (2, "A.")
    assert chosen.to_summarize[0]["content"].startswith("Question 0.")


def test_nothing_to_summarize_has_a_reason() -> None:
    """And everything is kept."""
    raw = chat(4)
    chosen = select_messages(raw, config())
    assert (chosen.reason, chosen.to_summarize, [*chosen.system, *chosen.to_keep]) == ("all_recent", [], raw)
    only = [system(), user("## Session Summary\nA."), calls("1"), result("1", "ok")]
    chosen = select_messages(only, config(keep_recent_messages=2))
    assert (chosen.reason, chosen.round, [*chosen.system, *chosen.to_keep]) == ("nothing_new", 1, only)
