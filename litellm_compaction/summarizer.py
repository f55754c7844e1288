"""Rung 2: a summary of the covered messages by a pruning model, inside that model's own window.

Called by the engine. Reformat mode: the messages are rendered as text and shrunk, tool output first, until one
prompt holds them; where even that is not enough, the parts are summarized one after the other and merged
(map-reduce). One job costs one unit of the request's call budget, however many parts it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from litellm_compaction.core.messages import JsonValue, Message, user_message
from litellm_compaction.core.prompts import is_refusal, merge_prompt, read_summary, summary_prompt, transcript_parts
from litellm_compaction.errors import SummaryFailed

# Words for a token bound: 0.6 words a token leaves room in every language we measured.
_WORDS_PER_TOKEN = 0.6
_MAX_PARTS = 6
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
    None is no choice. Raises `SummaryFailed` for every failure of the call; cancellation passes through.
    """

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[JsonValue] = (),
        tool_choice: JsonValue = None,
    ) -> Awaitable[SummaryAnswer]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryJob:
    """What is to be summarized.

    Attributes:
        messages: the part of the conversation that the summary will stand for, oldest first.
        earlier: the record so far that the new one integrates, "" for none.
        request: the request being worked on, for orientation; already short.
        summary_tokens: bound on the summary.
        prompt_limit_tokens: the largest prompt that the pruning model's window takes beside the summary.
    """

    messages: Sequence[Message]
    earlier: str
    request: str
    summary_tokens: int
    prompt_limit_tokens: int


async def summarize(job: SummaryJob, ask: Ask, count: Callable[[str], int], *, timeout_s: float) -> str:
    """The summary, stripped and within its bound.

    Args:
        job: what to summarize.
        ask: calls the pruning model.
        count: tokens of a text, for the pruning model.
        timeout_s: limit for each call.

    Raises:
        SummaryFailed: no call gave a usable summary; `reason` is one of timeout, error, empty, refusal,
            reasoning_only, longer, no_room.
    """
    words = max(int(job.summary_tokens * _WORDS_PER_TOKEN), 40)
    bare = count(summary_prompt(earlier=job.earlier, request=job.request, transcript="", words=words))
    room = job.prompt_limit_tokens - bare
    if room < 200:
        raise SummaryFailed("no_room", f"{job.prompt_limit_tokens} tokens for the summariser's prompt")
    # Partial records are worth their calls only where one prompt holds two of them for the merge.
    mergeable = room >= 2 * _OVERRUN_RATIO * job.summary_tokens + _PART_TOKENS
    max_parts = _MAX_PARTS if mergeable else 1
    parts = await asyncio.to_thread(transcript_parts, job.messages, room_tokens=room, max_parts=max_parts, count=count)
    one = _Caller(ask, count, timeout_s, job.summary_tokens)
    if len(parts) == 1:
        prompt = summary_prompt(earlier=job.earlier, request=job.request, transcript=parts[0], words=words)
        return await one.call(prompt, source_tokens=count(parts[0]) + count(job.earlier))
    earlier = job.earlier
    written: list[str] = []
    for part in parts:
        prompt = summary_prompt(earlier=earlier, request=job.request, transcript=part, words=words)
        written.append(await one.call(prompt, source_tokens=room))
        earlier = ""
    while len(written) > 1:
        written = await _merged(written, one, words, job.prompt_limit_tokens, count)
    return written[0]


async def _merged(
    parts: Sequence[str], one: _Caller, words: int, prompt_limit_tokens: int, count: Callable[[str], int]
) -> list[str]:
    """One reduce step: neighbours are merged as many at a time as one prompt holds, at least two."""
    merged: list[str] = []
    group: list[str] = []
    for part in parts:
        if len(group) >= 2 and count(merge_prompt(parts=[*group, part], words=words)) > prompt_limit_tokens:
            merged.append(await one.call(merge_prompt(parts=group, words=words), source_tokens=None))
            group = []
        group.append(part)
    if len(group) == 1 and merged:
        return [*merged, group[0]]
    return [*merged, await one.call(merge_prompt(parts=group, words=words), source_tokens=None)]


@dataclass(frozen=True, slots=True)
class _Caller:
    """One model call with its time limit and the checks that every answer has to pass."""

    ask: Ask
    count: Callable[[str], int]
    timeout_s: float
    summary_tokens: int

    async def call(self, prompt: str, *, source_tokens: int | None) -> str:
        answer = await self._bounded(prompt, self.summary_tokens)
        text = read_summary(answer.text)
        if not text and (answer.reasoning or answer.text):
            # Only thinking came back: one retry with room for both. The bound that it may break is the server's,
            # which then ends the answer as too long.
            answer = await self._bounded(prompt, 2 * self.summary_tokens)
            text = read_summary(answer.text)
            if not text:
                raise SummaryFailed("reasoning_only")
        if not text:
            raise SummaryFailed("empty")
        if is_refusal(text):
            raise SummaryFailed("refusal")
        if answer.finish_reason == "length" and "\n" in text:
            text = text[: text.rindex("\n")].rstrip()
        text = _within(text, self.summary_tokens, self.count)
        if source_tokens is not None and self.count(text) >= source_tokens:
            raise SummaryFailed("longer")
        return text

    async def _bounded(self, prompt: str, max_tokens: int) -> SummaryAnswer:
        try:
            return await asyncio.wait_for(self.ask([user_message(prompt)], max_tokens=max_tokens), self.timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise SummaryFailed("timeout", f"no summary within {self.timeout_s:g} s") from None


def _within(text: str, limit_tokens: int, count: Callable[[str], int]) -> str:
    """`text` without its last lines, where it is well over its bound: a server may count otherwise than we do."""
    bound = limit_tokens * _OVERRUN_RATIO
    while count(text) > bound:
        cut = text.rfind("\n", 0, len(text) * 9 // 10)
        text = text[: cut if cut > 0 else len(text) * 9 // 10].rstrip()
    return text
