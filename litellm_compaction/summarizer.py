"""A summary by a pruning model, inside that model's own window.

Append mode: the conversation goes as it was sent, followed by the instruction, and the server's prefix cache holds
nearly all of it. Reformat mode: the messages are rendered as text and shrunk, tool output first, until one prompt holds
them; if even that is not enough, part after part is integrated into the record so far. The caller sets one time limit
(`within_s`) and counts one job, however many parts it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from litellm_compaction.core.judging import judged
from litellm_compaction.core.messages import Message, Request, user_message, visible_text, with_text
from litellm_compaction.core.prompts import is_refusal, read_summary, said_in_json, summary_prompt, transcript_parts
from litellm_compaction.core.strategies import STRATEGIES, Strategy
from litellm_compaction.errors import SummaryFailed

_T = TypeVar("_T")
# Words for a token bound: 0.6 words a token leaves room in every language we measured.
_WORDS_PER_TOKEN = 0.6
_MAX_PARTS = 6
_OVERRUN_RATIO = 1.25
# The heading of the record so far, rounded up; and the least room for what is to be summarized.
_HEADING_TOKENS, _LEAST_ROOM_TOKENS = 64, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryAnswer:
    """A pruning model's answer; `calls_tool` if it called a tool, with or without words."""

    text: str
    reasoning: str = ""
    finish_reason: str = "stop"
    calls_tool: bool = False


# One call of a pruning model with messages, `max_tokens=`, and `tools=` and `tool_choice=` of the client's if these are
# the conversation's own (append mode); raises `SummaryFailed` for every failure, and lets cancellation pass.
Ask: TypeAlias = Callable[..., Awaitable[SummaryAnswer]]


def ending_in(switch: str, ask: Ask) -> Ask:
    """Returns `ask` with a word for the model itself after each prompt; "" for none."""

    def asking(messages: Sequence[Message], **options: Any) -> Awaitable[SummaryAnswer]:
        return ask((*messages[:-1], with_text(messages[-1], f"{messages[-1].text} {switch}")), **options)

    return asking if switch else ask


def words_for(tokens: int) -> int:
    """Returns the words that a text is asked for whose bound is so many tokens."""
    return max(int(tokens * _WORDS_PER_TOKEN), 40)


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
    prompt_limit_tokens: int = 0
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
        words = words_for(self.summary_tokens)
        return self.strategy.instruction(words=words, round_number=self.round_number, is_brief=self.is_brief)

    def prompt(self, transcript: str, earlier: str) -> str:
        return summary_prompt(
            instruction=self.instruction, earlier=earlier, request=self.request, transcript=transcript, focus=self.focus
        )


async def within_s(asking: Awaitable[_T], timeout_s: float) -> _T:
    """Returns the result of one job with all its calls.

    Raises:
        SummaryFailed: `timeout`.
    """
    try:
        return await asyncio.wait_for(asking, timeout_s)
    except (TimeoutError, asyncio.TimeoutError):
        raise SummaryFailed("timeout", f"no summary within {timeout_s:g} s") from None


async def answer_to(prompt: str, ask: Ask, *, max_tokens: int) -> str:
    """Returns a pruning model's answer to one question, without its reasoning and fences; never "".

    Raises:
        SummaryFailed: one of error, empty, reasoning_only.
    """
    text, _ = await _asked(ask, _asking(prompt), max_tokens)
    if not text:
        raise SummaryFailed("empty")
    return text


async def summarize(job: SummaryJob, ask: Ask, count: Callable[[str], int]) -> str:
    """Returns a summary, stripped and within its bound (reformat mode).

    Args:
        job: its messages are summarized.
        ask: calls the pruning model.
        count: tokens of a text, for the pruning model.

    Raises:
        SummaryFailed: no call gave a usable summary; `reason` is one of error, empty, refusal, echo, loop, dialogue,
            script, invented, reasoning_only, longer, small_window.
    """
    room_tokens = job.prompt_limit_tokens - count(job.prompt("", job.earlier))
    # Beside a record so far as long as it may become.
    later_tokens = job.prompt_limit_tokens - count(job.prompt("", "")) - _HEADING_TOKENS
    later_tokens = min(later_tokens - int(_OVERRUN_RATIO * job.summary_tokens), room_tokens)
    if room_tokens < _LEAST_ROOM_TOKENS:
        raise SummaryFailed("small_window", f"{job.prompt_limit_tokens} tokens for the summariser's prompt")
    max_parts = _MAX_PARTS if later_tokens >= _LEAST_ROOM_TOKENS else 1
    divided = partial(transcript_parts, job.messages, max_parts=max_parts, count=count)
    parts = await asyncio.to_thread(divided, room_tokens=room_tokens)
    if len(parts) > 1:
        parts = await asyncio.to_thread(divided, room_tokens=later_tokens)
    text = job.earlier
    for part in parts:
        if count(job.prompt("", text)) + later_tokens > job.prompt_limit_tokens:
            # Its control tokens have been broken, which makes it longer.
            raise SummaryFailed("small_window", "the record so far leaves no room")
        asked = _asking(job.prompt(part, text))
        text = await _written(job, ask, count, asked, job.source, count(part) + count(text))
    return text


async def summarize_appended(
    job: SummaryJob, ask: Ask, count: Callable[[str], int], appended: Request, replaced_tokens: int
) -> str:
    """The summary that the served model writes at the end of the very conversation that it holds (append mode).

    Args:
        job: its own messages are not sent.
        ask: calls the served model.
        count: as in `summarize`.
        appended: the conversation with the instruction after it.
        replaced_tokens: of the part that the summary replaces, and is shorter than.

    Raises:
        SummaryFailed: as `summarize`, and `tool_call` if the model called a tool instead.
    """
    # Its writer has seen more than the part that the summary replaces.
    source = (job.request, job.focus, *map(visible_text, appended.messages))
    return await _written(job, ask, count, appended, source, replaced_tokens)


def _asking(prompt: str) -> Request:
    return Request(messages=(user_message(prompt),))


async def _written(
    job: SummaryJob, ask: Ask, count: Callable[[str], int], request: Request, source: Sequence[str], most_tokens: int
) -> str:
    """The text of an answer that may be used, checked against all that its writer was shown."""
    text, answer = await _asked(ask, request, job.summary_tokens + job.thinking_tokens)
    text = said_in_json(text)
    fault = "tool_call" if answer.calls_tool else "refusal" if is_refusal(text) else "" if text else "empty"
    if fault:
        raise SummaryFailed(fault)
    if answer.finish_reason == "length" and "\n" in text:
        text = text[: text.rindex("\n")].rstrip()
    text = _within(text, job.summary_tokens, count)
    # Off the event loop: ten milliseconds for 50,000 characters of a source.
    text, fault = await asyncio.to_thread(judged, text, instruction=job.instruction, source=source)
    if fault or count(text) >= most_tokens:
        raise SummaryFailed(fault or "longer")
    return text


async def _asked(ask: Ask, request: Request, max_tokens: int) -> tuple[str, SummaryAnswer]:
    """The words of an answer, without its reasoning and fences, "" if it has nothing else, and the answer.

    If only thinking comes back, it is asked once more with room for both; past the server's own bound that ends as too
    long.
    """
    for tokens in (max_tokens, 2 * max_tokens):
        answer = await ask(request.messages, max_tokens=tokens, tools=request.tools, tool_choice=request.tool_choice)
        text = read_summary(answer.text)
        if text or answer.calls_tool or not (answer.reasoning or answer.text):
            return text, answer
    raise SummaryFailed("reasoning_only")


def _within(text: str, limit_tokens: int, count: Callable[[str], int]) -> str:
    """`text` without its last lines if it is well over its bound: a server may count otherwise than we do."""
    bound = limit_tokens * _OVERRUN_RATIO
    while count(text) > bound:
        cut = text.rfind("\n", 0, len(text) * 9 // 10)
        text = text[: cut if cut > 0 else len(text) * 9 // 10].rstrip()
    return text
