"""Rung 2: a summary of the covered messages by a pruning model, inside that model's own window.

Called by the engine. Append mode: the conversation goes as it was sent, with the instruction behind it, and the
server's prefix cache holds nearly all of it. Reformat mode: the messages are rendered as text and shrunk, tool output
first, until one prompt holds them; where even that is not enough, the parts are summarized one after the other and
merged (map-reduce). One job has one time limit and costs one unit of the request's call budget, however many parts it
has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from litellm_compaction.core.judging import Judgement, Unfolding, judged
from litellm_compaction.core.messages import JsonValue, Message, user_message, visible_text, with_text
from litellm_compaction.core.prompts import (
    is_refusal,
    merge_prompt,
    read_summary,
    said_in_json,
    summary_prompt,
    transcript_parts,
)
from litellm_compaction.core.strategies import STRATEGIES, Strategy
from litellm_compaction.errors import SummaryFailed

_T = TypeVar("_T")
IsEnough: TypeAlias = Callable[[str], bool]
# Words for a token bound: 0.6 words a token leaves room in every language we measured.
_WORDS_PER_TOKEN = 0.6
_MAX_PARTS = 6
# To look through so much takes ten milliseconds.
_OFF_LOOP_CHARS = 50_000
_OVERRUN_RATIO = 1.25
# Headings of a merge prompt that a plain one does not have, rounded up.
_PART_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryAnswer:
    """What the pruning model said; `calls_tool` where it called a tool, with or without words."""

    text: str
    reasoning: str = ""
    finish_reason: str = "stop"
    calls_tool: bool = False


class Ask(Protocol):
    """One call of the pruning model: messages in, its answer out.

    `tools` and `tool_choice` go with the messages of the conversation itself (append mode), as its client sent them;
    None is no choice. `is_enough` is told each piece of the answer's text where that comes in pieces, and says when
    the rest is not wanted: the answer is then ended, as one that is too long. Raises `SummaryFailed` for every failure
    of the call; cancellation passes through.
    """

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[JsonValue] = (),
        tool_choice: JsonValue = None,
        is_enough: IsEnough | None = None,
    ) -> Awaitable[SummaryAnswer]: ...


def ending_in(switch: str, ask: Ask) -> Ask:
    """`ask`, with a word for the model itself behind each prompt; "" for none."""
    if not switch:
        return ask

    def asking(
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[JsonValue] = (),
        tool_choice: JsonValue = None,
        is_enough: IsEnough | None = None,
    ) -> Awaitable[SummaryAnswer]:
        last = with_text(messages[-1], f"{messages[-1].text} {switch}")
        return ask(
            (*messages[:-1], last), max_tokens=max_tokens, tools=tools, tool_choice=tool_choice, is_enough=is_enough
        )

    return asking


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryJob:
    """What is to be summarized.

    Attributes:
        messages: the part of the conversation that the summary will stand for, oldest first.
        earlier: the record so far that the new one integrates, "" for none.
        request: the request being worked on, for orientation; already short.
        summary_tokens: bound on the summary.
        prompt_limit_tokens: the largest prompt that the pruning model's window takes beside summary and thinking.
        round_number: of the compaction that is made, from 1.
        thinking_tokens: what the model may think beside the summary; 0 for one that answers at once.
        strategy: what to write.
        focus: the topic that a client wants kept in more detail; "" for none.
        is_brief: whether the instruction has to leave a small window to what it is about.
    """

    messages: Sequence[Message]
    earlier: str
    request: str
    summary_tokens: int
    prompt_limit_tokens: int
    round_number: int = 1
    thinking_tokens: int = 0
    strategy: Strategy = STRATEGIES["summary"]
    focus: str = ""
    is_brief: bool = False

    @property
    def source(self) -> tuple[str, ...]:
        """The texts that the summary is made of, with the arguments of calls."""
        return (self.earlier, self.request, self.focus, *map(visible_text, self.messages))

    @property
    def instruction(self) -> str:
        """The strategy's, with its numbers."""
        words = max(int(self.summary_tokens * _WORDS_PER_TOKEN), 40)
        return self.strategy.instruction(words=words, round_number=self.round_number, is_brief=self.is_brief)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """A conversation as a server holds it in its cache: what append mode sends again, unchanged.

    Attributes:
        messages: with the instruction behind them.
        tools: as the client sent them.
        tool_choice: likewise.
        tokens: of the part that the summary will stand for.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonValue, ...]
    tool_choice: JsonValue
    tokens: int


async def answer_to(prompt: str, ask: Ask, *, max_tokens: int, timeout_s: float) -> str:
    """A pruning model's answer to one question, without its reasoning and fences; never "".

    Args:
        prompt: all that it gets.
        ask: calls it.
        max_tokens: bound on the answer.
        timeout_s: limit for the whole job, a second call behind an answer of nothing but thinking included.

    Raises:
        SummaryFailed: one of timeout, error, empty, reasoning_only.
    """
    text, _ = await _within_s(_asked(ask, (user_message(prompt),), max_tokens=max_tokens), timeout_s)
    if not text:
        raise SummaryFailed("empty")
    return text


async def summarize_appended(
    job: SummaryJob, upstream: Upstream, ask: Ask, count: Callable[[str], int], *, timeout_s: float
) -> str:
    """The summary that the served model gives behind the very conversation that it holds (append mode).

    Args:
        job: what to summarize; its own messages are not sent.
        upstream: what is sent.
        ask: calls the served model.
        count: tokens of a text, for that model.
        timeout_s: limit for the job, a second call behind an answer of nothing but thinking included.

    Raises:
        SummaryFailed: as `summarize`, and `tool_call` where the model called a tool instead.
    """
    one = _Caller(ask, count, job)
    asking = one.call(
        upstream.messages, source_tokens=upstream.tokens, tools=upstream.tools, tool_choice=upstream.tool_choice
    )
    return await _within_s(asking, timeout_s)


async def summarize(job: SummaryJob, ask: Ask, count: Callable[[str], int], *, timeout_s: float) -> str:
    """The summary, stripped and within its bound (reformat mode).

    Args:
        job: what to summarize.
        ask: calls the pruning model.
        count: tokens of a text, for the pruning model.
        timeout_s: limit for the whole job: all parts, and what merges them.

    Raises:
        SummaryFailed: no call gave a usable summary; `reason` is one of timeout, error, empty, refusal, echo,
            loop, dialogue, script, language, invented, reasoning_only, longer, small_window.
    """
    return await _within_s(_summarize(job, _Caller(ask, count, job)), timeout_s)


async def _summarize(job: SummaryJob, one: _Caller) -> str:
    count = one.count
    room = job.prompt_limit_tokens - count(_prompt(job, job.earlier, ""))
    if room < 200:
        raise SummaryFailed("small_window", f"{job.prompt_limit_tokens} tokens for the summariser's prompt")
    # Partial records are worth their calls only where one prompt holds two of them for the merge.
    mergeable = room >= 2 * _OVERRUN_RATIO * job.summary_tokens + _PART_TOKENS
    max_parts = _MAX_PARTS if mergeable else 1
    parts = await asyncio.to_thread(transcript_parts, job.messages, room_tokens=room, max_parts=max_parts, count=count)
    if len(parts) == 1:
        source_tokens = count(parts[0]) + count(job.earlier)
        return await one.text(_prompt(job, job.earlier, parts[0]), source_tokens=source_tokens)
    earlier = job.earlier
    written: list[str] = []
    for part in parts:
        written.append(await one.text(_prompt(job, earlier, part), source_tokens=room))
        earlier = ""
    while len(written) > 1:
        written = await _merged(written, one)
    return written[0]


def _prompt(job: SummaryJob, earlier: str, transcript: str) -> str:
    return summary_prompt(
        instruction=job.instruction, earlier=earlier, request=job.request, transcript=transcript, focus=job.focus
    )


async def _merged(parts: Sequence[str], one: _Caller) -> list[str]:
    """One reduce step: neighbours are merged as many at a time as one prompt holds, at least two."""
    job, merged, group = one.job, list[str](), list[str]()
    for part in parts:
        longer = merge_prompt(instruction=job.instruction, parts=[*group, part], focus=job.focus)
        if len(group) >= 2 and one.count(longer) > job.prompt_limit_tokens:
            merged.append(
                await one.text(
                    merge_prompt(instruction=job.instruction, parts=group, focus=job.focus), source_tokens=None
                )
            )
            group = []
        group.append(part)
    if len(group) == 1 and merged:
        return [*merged, group[0]]
    return [
        *merged,
        await one.text(merge_prompt(instruction=job.instruction, parts=group, focus=job.focus), source_tokens=None),
    ]


@dataclass(frozen=True, slots=True)
class _Caller:
    """One model call with the checks that every answer has to pass."""

    ask: Ask
    count: Callable[[str], int]
    job: SummaryJob

    async def text(self, prompt: str, *, source_tokens: int | None) -> str:
        """The answer to a prompt of one message."""
        return await self.call((user_message(prompt),), source_tokens=source_tokens)

    async def call(
        self,
        messages: Sequence[Message],
        *,
        source_tokens: int | None,
        tools: Sequence[JsonValue] = (),
        tool_choice: JsonValue = None,
    ) -> str:
        """The text of an answer that may be used, shorter than its source where that is known."""
        limit_tokens = self.job.summary_tokens
        room_tokens = limit_tokens + self.job.thinking_tokens
        text, answer = await _asked(
            self.ask,
            messages,
            max_tokens=room_tokens,
            tools=tools,
            tool_choice=tool_choice,
            instruction=self.job.instruction,
        )
        if answer.calls_tool:
            raise SummaryFailed("tool_call")
        text = said_in_json(text)
        if not text:
            raise SummaryFailed("empty")
        if is_refusal(text):
            raise SummaryFailed("refusal")
        if answer.finish_reason == "length" and "\n" in text:
            text = text[: text.rindex("\n")].rstrip()
        text = _within(text, limit_tokens, self.count)
        text, fault = await self._judged(text, messages)
        if fault:
            raise SummaryFailed(fault)
        if source_tokens is not None and self.count(text) >= source_tokens:
            raise SummaryFailed("longer")
        return text

    async def _judged(self, text: str, shown: Sequence[Message]) -> Judgement:
        """The summary as it may be used, held against all that its writer was shown."""
        texts = self.job.messages if len(shown) == 1 else shown
        if sum(len(message.text) for message in texts) <= _OFF_LOOP_CHARS:
            return self._judged_now(text, shown)
        return await asyncio.to_thread(self._judged_now, text, shown)

    def _judged_now(self, text: str, shown: Sequence[Message]) -> Judgement:
        job = self.job
        # Behind the conversation itself (append mode) its writer has seen more than what the summary stands for.
        source = job.source if len(shown) == 1 else (job.request, job.focus, *map(visible_text, shown))
        return judged(text, instruction=job.instruction, source=source)


async def _asked(
    ask: Ask,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    tools: Sequence[JsonValue] = (),
    tool_choice: JsonValue = None,
    instruction: str = "",
) -> tuple[str, SummaryAnswer]:
    """The words of an answer, without its reasoning and fences, and the answer; "" where it has nothing else.

    A summary that was asked for by an instruction is ended as soon as the rest of it cannot be used.
    """

    def answered(max_tokens: int) -> Awaitable[SummaryAnswer]:
        is_enough = Unfolding(instruction=instruction, max_tokens=max_tokens).is_enough if instruction else None
        return ask(messages, max_tokens=max_tokens, tools=tools, tool_choice=tool_choice, is_enough=is_enough)

    answer = await answered(max_tokens)
    text = read_summary(answer.text)
    if text or answer.calls_tool or not (answer.reasoning or answer.text):
        return text, answer
    # Only thinking came back: one retry with room for both. The bound that it may break is the server's, which then
    # ends the answer as too long.
    answer = await answered(2 * max_tokens)
    text = read_summary(answer.text)
    if not text and not answer.calls_tool:
        raise SummaryFailed("reasoning_only")
    return text, answer


async def _within_s(asking: Awaitable[_T], timeout_s: float) -> _T:
    try:
        return await asyncio.wait_for(asking, timeout_s)
    except (TimeoutError, asyncio.TimeoutError):
        raise SummaryFailed("timeout", f"no summary within {timeout_s:g} s") from None


def _within(text: str, limit_tokens: int, count: Callable[[str], int]) -> str:
    """`text` without its last lines, where it is well over its bound: a server may count otherwise than we do."""
    bound = limit_tokens * _OVERRUN_RATIO
    while count(text) > bound:
        cut = text.rfind("\n", 0, len(text) * 9 // 10)
        text = text[: cut if cut > 0 else len(text) * 9 // 10].rstrip()
    return text
