"""Rung 2: a summary of the covered messages by a pruning model, inside that model's own window.

Append mode: the conversation goes as it was sent, followed by the instruction, and the server's prefix cache holds
nearly all of it. Reformat mode: the messages are rendered as text and shrunk, tool output first, until one prompt holds
them; if even that is not enough, the parts are summarized one after the other and merged (map-reduce). One job has one
time limit and costs one unit of the request's call budget, however many parts it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from litellm_compaction.core.judging import judged
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
# Words for a token bound: 0.6 words a token leaves room in every language we measured.
_WORDS_PER_TOKEN = 0.6
_MAX_PARTS = 6
_OVERRUN_RATIO = 1.25
# Headings of a merge prompt that a plain one does not have, rounded up.
_PART_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryAnswer:
    """A pruning model's answer; `calls_tool` if it called a tool, with or without words."""

    text: str
    reasoning: str = ""
    finish_reason: str = "stop"
    calls_tool: bool = False


class Ask(Protocol):
    """One call of the pruning model; raises `SummaryFailed` for every failure, and lets cancellation pass.

    `tools` and `tool_choice` go with the messages of the conversation itself (append mode), as its client sent them;
    None is no choice.
    """

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[JsonValue] = (),
        tool_choice: JsonValue = None,
    ) -> Awaitable[SummaryAnswer]: ...


def ending_in(switch: str, ask: Ask) -> Ask:
    """`ask`, with a word for the model itself after each prompt; "" for none."""
    if not switch:
        return ask

    def asking(
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[JsonValue] = (),
        tool_choice: JsonValue = None,
    ) -> Awaitable[SummaryAnswer]:
        last = with_text(messages[-1], f"{messages[-1].text} {switch}")
        return ask((*messages[:-1], last), max_tokens=max_tokens, tools=tools, tool_choice=tool_choice)

    return asking


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryJob:
    """A part of a conversation, oldest message first, that a summary will stand for.

    Attributes:
        earlier: the record so far that the new one integrates, "" for none.
        request: the request being worked on, for orientation; already short.
        summary_tokens: bound on the summary.
        prompt_limit_tokens: the largest prompt that the pruning model's window takes besides summary and thinking.
        round_number: of the compaction that is made, from 1.
        thinking_tokens: bound on thinking besides the summary; 0 for a model that answers at once.
        focus: the topic that a client wants kept in more detail; "" for none.
        is_brief: the instruction has to leave a small window to its subject.
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
    """The whole input of a pruning model; in append mode a conversation as its server holds it in its cache.

    Attributes:
        messages: followed by the instruction.
        tools: as the client sent them.
        tool_choice: likewise.
        tokens: of the part that the summary replaces, and is shorter than; None for a merge.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonValue, ...] = ()
    tool_choice: JsonValue = None
    tokens: int | None = None


async def answer_to(prompt: str, ask: Ask, *, max_tokens: int, timeout_s: float) -> str:
    """A pruning model's answer to one question, without its reasoning and fences; never "".

    Args:
        prompt: its whole input.
        ask: calls it.
        max_tokens: bound on the answer.
        timeout_s: limit for the job, including a second call after an answer of nothing but thinking.

    Raises:
        SummaryFailed: one of timeout, error, empty, reasoning_only.
    """
    text, _ = await _within_s(_asked(ask, Upstream(messages=(user_message(prompt),)), max_tokens), timeout_s)
    if not text:
        raise SummaryFailed("empty")
    return text


async def summarize_appended(
    job: SummaryJob, upstream: Upstream, ask: Ask, count: Callable[[str], int], *, timeout_s: float
) -> str:
    """The summary that the served model writes at the end of the very conversation that it holds (append mode).

    Args:
        job: its own messages are not sent.
        upstream: the whole input.
        ask: calls the served model.
        count: tokens of a text, for that model.
        timeout_s: as in `answer_to`.

    Raises:
        SummaryFailed: as `summarize`, and `tool_call` if the model called a tool instead.
    """
    # Its writer has seen more than the part that the summary replaces.
    source = (job.request, job.focus, *map(visible_text, upstream.messages))
    return await _within_s(_written(job, ask, count, upstream, source), timeout_s)


async def summarize(job: SummaryJob, ask: Ask, count: Callable[[str], int], *, timeout_s: float) -> str:
    """The summary, stripped and within its bound (reformat mode).

    Args:
        job: its messages are summarized.
        ask: calls the pruning model.
        count: tokens of a text, for the pruning model.
        timeout_s: limit for the whole job: all parts, and their merges.

    Raises:
        SummaryFailed: no call gave a usable summary; `reason` is one of timeout, error, empty, refusal, echo,
            loop, dialogue, script, language, invented, reasoning_only, longer, small_window.
    """
    return await _within_s(_summarize(job, ask, count), timeout_s)


async def _summarize(job: SummaryJob, ask: Ask, count: Callable[[str], int]) -> str:
    def prompt(earlier: str, transcript: str) -> str:
        return summary_prompt(
            instruction=job.instruction, earlier=earlier, request=job.request, transcript=transcript, focus=job.focus
        )

    def merging(parts: Sequence[str]) -> str:
        return merge_prompt(instruction=job.instruction, parts=parts, focus=job.focus)

    async def text(asked: str, source_tokens: int | None) -> str:
        sent = Upstream(messages=(user_message(asked),), tokens=source_tokens)
        return await _written(job, ask, count, sent, job.source)

    room = job.prompt_limit_tokens - count(prompt(job.earlier, ""))
    if room < 200:
        raise SummaryFailed("small_window", f"{job.prompt_limit_tokens} tokens for the summariser's prompt")
    # Partial records are worth their calls only if one prompt holds two of them for the merge.
    mergeable = room >= 2 * _OVERRUN_RATIO * job.summary_tokens + _PART_TOKENS
    max_parts = _MAX_PARTS if mergeable else 1
    parts = await asyncio.to_thread(transcript_parts, job.messages, room_tokens=room, max_parts=max_parts, count=count)
    if len(parts) == 1:
        return await text(prompt(job.earlier, parts[0]), count(parts[0]) + count(job.earlier))
    written = [await text(prompt("" if at else job.earlier, part), room) for at, part in enumerate(parts)]
    while len(written) > 1:
        # Neighbours are merged as many at a time as one prompt holds, at least two.
        groups: list[list[str]] = [[]]
        for part in written:
            if len(groups[-1]) >= 2 and count(merging([*groups[-1], part])) > job.prompt_limit_tokens:
                groups.append([])
            groups[-1].append(part)
        written = [group[0] if len(group) == 1 else await text(merging(group), None) for group in groups]
    return written[0]


async def _written(
    job: SummaryJob, ask: Ask, count: Callable[[str], int], upstream: Upstream, source: Sequence[str]
) -> str:
    """The text of an answer that may be used, checked against all that its writer was shown."""
    text, answer = await _asked(ask, upstream, job.summary_tokens + job.thinking_tokens)
    if answer.calls_tool:
        raise SummaryFailed("tool_call")
    text = said_in_json(text)
    if not text:
        raise SummaryFailed("empty")
    if is_refusal(text):
        raise SummaryFailed("refusal")
    if answer.finish_reason == "length" and "\n" in text:
        text = text[: text.rindex("\n")].rstrip()
    text = _within(text, job.summary_tokens, count)
    # Off the event loop: ten milliseconds for 50,000 characters of a source.
    text, fault = await asyncio.to_thread(judged, text, instruction=job.instruction, source=source)
    if fault:
        raise SummaryFailed(fault)
    if upstream.tokens is not None and count(text) >= upstream.tokens:
        raise SummaryFailed("longer")
    return text


async def _asked(ask: Ask, upstream: Upstream, max_tokens: int) -> tuple[str, SummaryAnswer]:
    """The words of an answer, without its reasoning and fences, "" if it has nothing else, and the answer."""

    def answered(max_tokens: int) -> Awaitable[SummaryAnswer]:
        return ask(
            upstream.messages,
            max_tokens=max_tokens,
            tools=upstream.tools,
            tool_choice=upstream.tool_choice,
        )

    answer = await answered(max_tokens)
    text = read_summary(answer.text)
    if text or answer.calls_tool or not (answer.reasoning or answer.text):
        return text, answer
    # Only thinking came back: one retry with room for both. Past the server's own bound, the answer ends as too long.
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
    """`text` without its last lines if it is well over its bound: a server may count otherwise than we do."""
    bound = limit_tokens * _OVERRUN_RATIO
    while count(text) > bound:
        cut = text.rfind("\n", 0, len(text) * 9 // 10)
        text = text[: cut if cut > 0 else len(text) * 9 // 10].rstrip()
    return text
