"""Rung 2: one summary call or several, each inside the pruning model's window, and every way in which it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import Request
from litellm_compaction.core.prompts import appended
from litellm_compaction.engine.ask import SummaryJob, summarize, within_s, written
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.errors import SummaryFailed
from tests.builders import JsonDict, agent_run, assistant, count, parsed, prose, user
from tests.engine.bench import FakeAsk
from tests.virtual_time import in_virtual_time

GOOD = "### Original task\nPort the parser.\n### Current state\nHalf done."
CHAT = [user("Port the parser. " * 40), assistant("I begin. " * 80)]


def job(
    raw: Sequence[JsonDict] = CHAT,
    *,
    earlier: str = "",
    request: str = "",
    summary_tokens: int = 200,
    prompt_limit_tokens: int = 4000,
) -> SummaryJob:
    return SummaryJob(
        messages=parsed(raw),
        earlier=earlier,
        request=request,
        summary_tokens=summary_tokens,
        prompt_limit_tokens=prompt_limit_tokens,
    )


async def run(ask: FakeAsk, made: SummaryJob | None = None, *, timeout_s: float = 30.0) -> str:
    return await within_s(summarize(made or job(), ask, count), timeout_s)


async def failure(ask: FakeAsk, made: SummaryJob) -> str:
    with pytest.raises(SummaryFailed) as raised:
        await run(ask, made)
    return raised.value.reason


async def test_one_call_where_one_prompt_holds_everything() -> None:
    """Transcript, request and record so far in one message; the answer is bounded by the summary's tokens."""
    ask = FakeAsk(GOOD)
    made = job(earlier="EARLIER RECORD", request="THE NEWEST REQUEST")
    assert await run(ask, made) == GOOD
    assert ask.max_tokens == [200]
    for expected in ("EARLIER RECORD", "THE NEWEST REQUEST", "USER:\nPort the parser.", "at most 120 words"):
        assert expected in ask.prompts[0]


@pytest.mark.parametrize(
    "wrapped",
    [
        f"\n{GOOD}\n",
        f"```markdown\n{GOOD}\n```",
        f"<think>hm</think>\n{GOOD}",
        f"hm</think>\n```\n{GOOD}\n```",
    ],
)
async def test_wrapping_is_taken_off(wrapped: str) -> None:
    """Fences, thinking and white space."""
    assert await run(FakeAsk(wrapped)) == GOOD


@pytest.mark.parametrize(
    ("answers", "reason", "calls"),
    [
        ([""], "empty", 1),
        (["<think>let me think"], "reasoning_only", 2),
        (["Es tut mir leid, aber dabei kann ich nicht helfen."], "empty", 1),
        ([SummaryFailed("error", "503")], "error", 1),
        ([prose("word", 400)], "longer", 1),
    ],
)
async def test_what_is_no_summary_fails_by_name(answers: list[Any], reason: str, calls: int) -> None:
    """One word says why, nothing is tried again but thinking only, and no refusal takes the place of a record."""
    short = [user("Port the parser. " * 10), assistant("I begin. " * 20)]
    ask = FakeAsk(*answers)
    assert await failure(ask, job(short, earlier=prose("record", 80))) == reason
    assert len(ask.prompts) == calls


async def test_an_answer_cut_by_the_server_loses_its_broken_line() -> None:
    """finish_reason `length`: the last line is not whole."""
    answer = SummaryAnswer(text=f"{GOOD}\nThe port is 80", finish_reason="length")
    assert await run(FakeAsk(answer)) == GOOD


@in_virtual_time
async def test_a_silent_model_is_given_up() -> None:
    """After the time limit the call is cancelled, and the failure is a timeout; a client that leaves ends it, too."""
    ask = FakeAsk(GOOD, gate=asyncio.Event())
    with pytest.raises(SummaryFailed, match=r"timeout: no summary within 30 s"):
        await run(ask)
    assert ask.cancelled
    ask = FakeAsk(GOOD, gate=asyncio.Event())
    task = asyncio.create_task(run(ask))
    await ask.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ask.cancelled


@given(
    limit=st.integers(500, 9000),
    summary_tokens=st.integers(64, 800),
    hostile=st.sampled_from(["", "</s>", "[INST]", "<|im_start|>"]),
)
async def test_every_prompt_fits_the_pruning_model(limit: int, summary_tokens: int, hostile: str) -> None:
    """P1 holds for our own calls, whatever grows when it is broken: there is a failure, not a longer prompt."""
    ask = FakeAsk(prose("the record", 2400))
    said = [*agent_run(20, words=300), user(hostile * 2000)]
    made = job(said, request="REQUEST", summary_tokens=summary_tokens, prompt_limit_tokens=limit)
    try:
        await run(ask, made)
    except SummaryFailed as error:
        assert error.reason in ("small_window", "longer")  # noqa: PT017 - both ends are fine here
    assert all(count(prompt) <= limit for prompt in ask.prompts)


def held(*raw: JsonDict) -> Request:
    messages = appended(parsed(raw), instruction=job().instruction)
    return Request(messages=messages, tools=({"type": "function"},), tool_choice="auto")


async def test_a_tool_call_is_discarded() -> None:
    """With or without words beside it: a model that goes on working has not summarized."""
    for text in ("", "Let me look at the file first."):
        ask = FakeAsk(SummaryAnswer(text=text, calls_tool=True, finish_reason="tool_calls"))
        with pytest.raises(SummaryFailed) as raised:
            await written(job(), ask, count, held(*CHAT), (), 1000)
        assert raised.value.reason == "tool_call"
        assert len(ask.prompts) == 1


async def test_thinking_alone_is_asked_again_with_room_for_both() -> None:
    """The text comes from the second answer."""
    ask = FakeAsk(SummaryAnswer(text="", reasoning="Let me think."), GOOD)
    assert await written(job(), ask, count, held(*CHAT), (), 1000) == GOOD
    assert ask.max_tokens == [200, 400]
