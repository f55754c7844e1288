"""Asks pruning models for a summary or for what may go, each inside its own window.

Append mode sends the served conversation again with the instruction after it, so that a server's prefix cache holds
nearly all of it (LM Studio 0.3 and 0.4 keep the KV cache of a slot's last prompt, in both engines). It is tried first;
reformat mode sends the text in one message, shrunk, tool output first, until one prompt holds it; if even that is not
enough, part after part is integrated into the record so far. `core/pruning.py` checks choices against the original.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import anyio

from litellm_compaction.concurrency import Bounded, Rests, off_loop
from litellm_compaction.core.budget import Budget
from litellm_compaction.core.compaction import Compaction, apply, as_sent, shown_behind
from litellm_compaction.core.forms import excerpt, in_forms
from litellm_compaction.core.judging import judged
from litellm_compaction.core.messages import Message, Request, user_message, visible_text, with_every_result
from litellm_compaction.core.plan import Step
from litellm_compaction.core.prompts import (
    STRATEGIES,
    Strategy,
    appended,
    read_summary,
    summary_prompt,
    transcript_parts,
)
from litellm_compaction.core.pruning import offered, pruned, pruning_prompt, read_answer
from litellm_compaction.core.view import request_text
from litellm_compaction.engine.additions import Recaller
from litellm_compaction.engine.context import Ask, Effort, MeasuredRequest, PruningModel, SummaryAnswer
from litellm_compaction.engine.sharing.reservation import SUMMARY_EXTRA_TOKENS
from litellm_compaction.errors import ModelNotLoaded, SummaryFailed, WindowUnknown
from litellm_compaction.tokenizers.registry import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Windows

# So much a summariser is told of the request that is being worked on.
REQUEST_TOKENS = 200
# Words for a token bound: 0.6 words a token leaves room in every language we measured.
_WORDS_PER_TOKEN, _LEAST_WORDS = 0.6, 40
_MAX_PARTS, _OVERRUN_RATIO = 6, 1.25
_LEAST_MERGED_RATIO = 0.15
# Of an edit plan, which is ranges for the most part.
_PLAN_TOKENS = 512
# The heading of the record so far, rounded up; and the least room for what is to be summarized.
_HEADING_TOKENS, _LEAST_ROOM_TOKENS = 64, 200
# The chat template's own tokens around the summariser's one user message, rounded up.
_TEMPLATE_TOKENS = 32
# Below this the usual instruction, 450 tokens, takes a summary's room: restarts at 2,048 never got one.
_BRIEF_BELOW_TOKENS = 4096
# The model answered, but not with a record: reformatted, without tools and as quoted data, it may.
_WORTH_REFORMATTING = frozenset({"tool_call", "empty", "echo", "dialogue", "reasoning_only", "longer"})
# It had its time and gave nothing: after two in a row, or a late one, it is left alone, twice as long with each more.
_USELESS = frozenset({"echo", "loop", "dialogue", "script", "invented", "empty", "timeout"})
_FIRST_REST_S, _LONGEST_REST_S = 15.0, 120.0
_INVALID = "invalid"
_Found = TypeVar("_Found")
_Count = Callable[[str], int]
# One way of asking a model, which takes one call.
_Mode: TypeAlias = "Callable[[], Awaitable[_Found]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryJob:
    """A part of a conversation that a summary will stand for, and its bounds."""

    messages: Sequence[Message]  # Oldest first.
    earlier: str  # The record so far that the new one integrates, "" for none.
    request: str  # The one being worked on, for orientation; already short.
    summary_tokens: int
    prompt_limit_tokens: int = 0  # The largest prompt that the model's window takes besides summary and thinking.
    round_number: int = 1  # Of the compaction that is made.
    thinking_tokens: int = 0  # 0 for a model that answers at once.
    strategy: Strategy = STRATEGIES["summary"]
    focus: str = ""  # The topic that a client wants kept in more detail.
    is_brief: bool = False  # The instruction has to leave a small window to its subject.

    @property
    def source(self) -> tuple[str, ...]:
        """The texts that the summary is made of, with the arguments of calls."""
        return (self.earlier, self.request, self.focus, *map(visible_text, self.messages))

    @property
    def instruction(self) -> str:
        words = _words_for(self.summary_tokens)
        return self.strategy.instruction(words=words, round_number=self.round_number, is_brief=self.is_brief)

    def prompt(self, transcript: str, earlier: str) -> str:
        return summary_prompt(
            instruction=self.instruction, earlier=earlier, request=self.request, transcript=transcript, focus=self.focus
        )


async def within_s(asking: Awaitable[_Found], timeout_s: float) -> _Found:
    """Returns the result of one job with all its calls; a SummaryFailed, `timeout`, if it takes longer."""
    try:
        with anyio.fail_after(timeout_s):
            return await asking
    except TimeoutError:
        raise SummaryFailed("timeout", f"no summary within {timeout_s:g} s") from None


async def summarize(job: SummaryJob, ask: Ask, count: _Count) -> str:
    """Returns a summary of a job's messages, stripped and within its bound (reformat mode).

    `count` gives the tokens of a text for the pruning model, which `ask` calls. If no call gives a usable summary, a
    SummaryFailed says why: error, empty, echo, loop, dialogue, script, invented, reasoning_only, longer,
    small_window.
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
        own, most_tokens = replace(job, earlier=text), count(part) + count(text)
        text = await written(own, ask, count, _asking(job.prompt(part, text)), job.source, most_tokens)
    return text


async def written(
    job: SummaryJob, ask: Ask, count: _Count, request: Request, source: Sequence[str], most_tokens: int
) -> str:
    """Returns the summary that answers a request, within the bounds of a job; errors as `summarize`, and `tool_call`.

    It is checked by `source`, which is all that its writer is shown, and shorter than the `most_tokens` it replaces.
    """
    text, answer = await _asked(ask, request, job.summary_tokens + job.thinking_tokens)
    if answer.calls_tool or not text:
        raise SummaryFailed("tool_call" if answer.calls_tool else "empty")
    if answer.finish_reason == "length" and "\n" in text:
        text = text[: text.rindex("\n")].rstrip()
    # A server may count otherwise than we do: last lines go.
    while count(text) > job.summary_tokens * _OVERRUN_RATIO:
        cut = text.rfind("\n", 0, len(text) * 9 // 10)
        text = text[: cut if cut > 0 else len(text) * 9 // 10].rstrip()
    # Off the event loop: ten milliseconds for 50,000 characters of a source.
    text, fault = await asyncio.to_thread(judged, text, instruction=job.instruction, source=source)
    # A refusal, in whatever language, would take the place of all that the record so far says.
    is_too_short = count(text) < _LEAST_MERGED_RATIO * min(count(job.earlier), job.summary_tokens)
    if fault or is_too_short or count(text) >= most_tokens:
        raise SummaryFailed(fault or ("empty" if is_too_short else "longer"))
    return text


async def _asked(ask: Ask, request: Request, max_tokens: int) -> tuple[str, SummaryAnswer]:
    """The words of an answer, without its reasoning and fences, "" beside a call, and the answer.

    If only thinking comes back, it is asked once more with room for both.
    """
    for tokens in (max_tokens, 2 * max_tokens):
        answer = await ask(request.messages, max_tokens=tokens, tools=request.tools, tool_choice=request.tool_choice)
        text = read_summary(answer.text)
        if text or answer.calls_tool:
            return text, answer
        if not (answer.reasoning or answer.text):
            raise SummaryFailed("empty")
    raise SummaryFailed("reasoning_only")


def _asking(prompt: str) -> Request:
    return Request(messages=(user_message(prompt),))


def _words_for(tokens: int) -> int:
    """The words that a text is asked for whose bound is so many tokens."""
    return max(int(tokens * _WORDS_PER_TOKEN), _LEAST_WORDS)


class _Writer(NamedTuple):
    """A pruning model, the budget of its prompts, its room to think besides the answer, and its tokenizer."""

    model: PruningModel
    budget: Budget
    thinking_tokens: int
    count: _Count

    @property
    def limit_tokens(self) -> int:
        return self.budget.prompt_limit_tokens - _TEMPLATE_TOKENS


class SummaryClient:
    """Asks pruning models in their order; a model that fails leaves the turn to the next.

    Every call takes one from the request's budget (promise P5) and is added to the caller's `Effort`, whose `reason`
    then says why nothing came, or why the configured model was not the one that answered.
    """

    def __init__(
        self, windows: Windows, counter: TokenCounter, sources: Sources, recaller: Recaller, clock: Callable[[], float]
    ) -> None:
        self._windows, self._counter, self._sources = windows, counter, sources
        self._recaller, self._clock = recaller, clock
        # By tenant and model: one tenant's prompts must not take another one's summaries away.
        self._resting: Rests[tuple[str, str]] = Rests(_FIRST_REST_S, _LONGEST_REST_S, clock)
        self._useless: Bounded[tuple[str, str], bool] = Bounded()

    async def summary(self, measured: MeasuredRequest, step: Step, effort: Effort) -> str:
        """Returns the first usable summary of the messages that `step` covers, or ""."""
        job = await off_loop(measured.conversation.rest, lambda: _job(measured, step))
        if not job.messages and measured.count_text(job.earlier) <= job.summary_tokens:
            effort.reason = "nothing_new"
            return ""

        async def modes(writer: _Writer) -> list[_Mode[str]]:
            model, window_tokens = writer.model, min(measured.window.tokens, writer.budget.window_tokens)
            own = replace(
                job,
                prompt_limit_tokens=writer.limit_tokens,
                thinking_tokens=writer.thinking_tokens,
                is_brief=window_tokens < _BRIEF_BELOW_TOKENS,
            )
            appending = await self._appended(measured, step, own, writer) if model.is_same else None
            ways: list[_Mode[str]] = []
            if appending is not None:
                ways.append(partial(written, own, model.quiet_ask, writer.count, *appending))
            # A record written ahead must leave the conversation in the server's cache.
            if not (model.is_same and step.draft.state == "ready"):
                ways.append(partial(summarize, own, model.quiet_ask, writer.count))
            return ways

        return await self._first(measured, job.summary_tokens, effort, modes) or ""

    async def prune(self, measured: MeasuredRequest, step: Step, effort: Effort) -> Compaction | None:
        """Returns the pruning that the first answer gives, still without a ledger; None if that is no edit plan."""
        view = measured.conversation
        choices = offered(view.rest, step.draft)
        answer_tokens = step.summary_tokens + _PLAN_TOKENS

        async def modes(writer: _Writer) -> list[_Mode[Compaction]]:
            asking = partial(_question, measured, step, choices, writer, answer_tokens)
            prompt, most_tokens = await off_loop(view.messages, asking)
            if not prompt:
                raise SummaryFailed("small_window")

            async def chosen() -> Compaction:
                answer, _ = await _asked(writer.model.quiet_ask, _asking(prompt), most_tokens)
                return await off_loop(view.messages, partial(_chosen, measured, step, prompt, choices, answer))

            return [chosen]

        return await self._first(measured, answer_tokens, effort, modes)

    async def _first(
        self,
        measured: MeasuredRequest,
        answer_tokens: int,
        effort: Effort,
        modes: Callable[[_Writer], Awaitable[list[_Mode[_Found]]]],
    ) -> _Found | None:
        """Asks one model after the other, each by its modes and within one time limit, until one gives something."""
        context, attempts = measured.context, measured.context.attempts

        async def asked(model: PruningModel) -> _Found | None:
            # What comes after its own useless choice is asked for in any case.
            if effort.pruning_model != model.label and not self._resting.is_over((context.scope, model.label)):
                raise SummaryFailed("paused")
            writer = await self._writer(measured, model, answer_tokens)
            left = await modes(writer)
            while left:
                attempts.summary_calls_left -= 1
                effort.calls, effort.pruning_model = effort.calls + 1, model.label
                try:
                    return await left.pop(0)()
                except SummaryFailed as error:
                    if not (left and attempts.summary_calls_left > 0 and error.reason in _WORTH_REFORMATTING):
                        raise
            return None

        for model in context.pruning_models:
            started_s, key = self._clock(), (context.scope, model.label)
            try:
                if found := await within_s(asked(model), context.settings.summary_timeout_s):
                    self._resting.end(key)
                    self._useless.pop(key, None)
                    return found
            except SummaryFailed as error:
                if error.reason in _USELESS:
                    # What cost little may be chance: other conversations' records wait for the same model.
                    if error.reason == "timeout" or key in self._useless:
                        self._resting.begin(key)
                    self._useless[key] = True
                # That of the configured model, which is the first.
                effort.reason = effort.reason or error.reason
                if error.reason == _INVALID:
                    # A summary may be within its reach.
                    return None
            finally:
                effort.seconds += self._clock() - started_s
        return None

    async def _writer(self, measured: MeasuredRequest, model: PruningModel, answer_tokens: int) -> _Writer:
        """A model as it can be asked; a SummaryFailed says why it cannot.

        One that LM Studio would have to load is not: that may evict the model that is being served.
        """
        if measured.context.attempts.summary_calls_left <= 0:
            raise SummaryFailed("attempts")
        window, family, count = measured.window, measured.family, measured.count_text
        likely_ratio = measured.count.other_likely_ratio
        if not model.is_same:
            try:
                window = await self._windows.resolve(model.target)
            except (ModelNotLoaded, WindowUnknown) as error:
                raise SummaryFailed("pruning_model_not_ready") from error
            family = self._sources.family(model.target, window)
            # In the shape of every prompt for it; a list without messages is refused by many templates.
            likely_ratio = (await self._counter.count(model.target.key, family, _asking(""))).other_likely_ratio
            count = self._counter.text_counter(model.target.key, family, asker=measured.context.target.asker)
        # One that thinks has as much room for that as for its answer.
        thinking_tokens = answer_tokens if family.reasons else 0
        budget = Budget(
            rules=replace(measured.budget.rules, answer_min_tokens=answer_tokens + thinking_tokens),
            window_tokens=window.tokens,
            floor=lambda: 0,
            likely_ratio=likely_ratio,
        )
        return _Writer(model, budget, thinking_tokens, count)

    async def _appended(
        self, measured: MeasuredRequest, step: Step, job: SummaryJob, writer: _Writer
    ) -> tuple[Request, Sequence[str], int] | None:
        """The conversation to send again in append mode, its texts, and the tokens that its summary replaces.

        None if it does not fit, or shows not everything (lines for results, a gap after its summary) or nothing new.
        """
        base, view, target = step.base, measured.conversation, measured.context.target
        end = step.draft.covered_messages
        shows_all = base is None or (base.is_record and base.summarized_messages == base.covered_messages < end)
        # A forced call would be all that comes back, and the older `functions`, without a `type`, cannot be sent here.
        has_tools_only = all(isinstance(tool, Mapping) and "type" in tool for tool in measured.request.tools)
        if not (shows_all and has_tools_only and measured.request.tool_choice in (None, "auto", "none")):
            return None
        shown, sent = await off_loop(view.messages, lambda: self._in_append_mode(measured, step, job))
        tools = self._recaller.tools(measured) if base is not None else None
        # The client's other parameters are not sent here.
        request = replace(measured.request, messages=sent, tools=measured.request.tools if tools is None else tools)
        counted = await self._counter.count(target.key, measured.family, request, asker=target.asker)
        # Of a part nothing may be known but what the server makes of the whole conversation.
        tokens = max(counted.tokens, math.ceil(counted.own.tokens * measured.count.text.usual))
        if not replace(writer.budget, likely_ratio=counted.likely_ratio).fits(tokens):
            return None
        # Its writer sees more than the part that the summary replaces.
        texts = (job.request, job.focus, *map(visible_text, sent))
        return request, texts, sum(counted.sizes[view.prefix : len(shown)])

    def _in_append_mode(
        self, measured: MeasuredRequest, step: Step, job: SummaryJob
    ) -> tuple[Sequence[Message], tuple[Message, ...]]:
        """The covered conversation as the server was last sent it, and the same with the instruction after it."""
        view, base, end = measured.conversation, step.base, step.draft.covered_messages
        sent = apply(view.messages, base) if base else view.messages
        sent = sent[: len(sent) - (len(view.rest) - end)]
        if base is not None:
            sent = self._recaller.with_found(sent, measured, base.covered_messages, end)
        history = with_every_result(sent)
        asking = appended(history, instruction=job.instruction, has_record=bool(job.earlier), focus=job.focus)
        return history, asking


def _job(measured: MeasuredRequest, step: Step) -> SummaryJob:
    base, draft, conversation = step.base, step.draft, measured.conversation
    covered = conversation.rest[: draft.covered_messages]
    start = base.summarized_messages if base else 0
    # A round that stayed with the record is in no summary yet.
    stayed = [at for at in (base.pinned if base else ()) if at < start and covered[at].role != "user"]
    sent = [each for each in in_forms(covered, dict.fromkeys(draft.pinned, "whole")) if each is not None]
    shown = enumerate(shown_behind(sent, start, base.covered_part if base and base.start == start else None))
    fresh = [each for at, each in shown if (at >= start or at in stayed) and at not in draft.pinned]
    strategy = STRATEGIES[draft.level]
    return SummaryJob(
        messages=fresh,
        earlier=base.summary if base else "",
        request=excerpt(request_text(conversation.messages), REQUEST_TOKENS, measured.count_text),
        summary_tokens=step.summary_tokens,
        round_number=draft.round,
        strategy=strategy,
        focus=measured.context.focus,
    )


def _question(
    measured: MeasuredRequest, step: Step, choices: list[int], writer: _Writer, answer_tokens: int
) -> tuple[str, int]:
    """The question about the messages at `choices`, "" if it does not fit, and the bound on its answer."""
    conversation, draft, count = measured.conversation, step.draft, measured.count_text
    limit_tokens, room_tokens = writer.limit_tokens, answer_tokens + writer.thinking_tokens
    if writer.model.is_same:
        # The room reserved in a shared context for a summary has to do for this, too.
        limit_tokens = min(limit_tokens, measured.count.tokens + SUMMARY_EXTRA_TOKENS - room_tokens)
    shown = as_sent(conversation.rest, draft)
    messages = [message for at in choices if (message := shown[at]) is not None]
    prompt = pruning_prompt(
        prompt=STRATEGIES[draft.level].prompt,
        values={
            "words": _words_for(step.summary_tokens),
            "round": draft.round,
            "current_tokens": step.now_tokens,
            "target_tokens": step.predicted_tokens,
            "limit_tokens": measured.window.tokens,
        },
        request=excerpt(request_text(conversation.messages), REQUEST_TOKENS, count),
        earlier=draft.summary,
        focus=measured.context.focus,
        messages=messages,
        sizes=[count(message.text) + 4 for message in messages],
        limit_tokens=limit_tokens,
        count=writer.count,
    )
    spare_tokens = limit_tokens - writer.count(prompt)
    offered_tokens = sum(conversation.sizes[conversation.prefix + at] for at in choices)
    # All that is offered may be written once more, and a model that only thought is asked again with twice the room.
    return prompt, room_tokens + min(max(spare_tokens - room_tokens, 0) // 2, offered_tokens)


def _chosen(measured: MeasuredRequest, step: Step, prompt: str, choices: list[int], answer: str) -> Compaction:
    """The compaction that an answer stands for; a SummaryFailed if it is no answer, or changes nothing."""
    draft, rest = step.draft, measured.conversation.rest
    try:
        wishes = read_answer(answer, rest, choices, prompt=prompt)
    except ValueError:
        raise SummaryFailed(_INVALID) from None
    compaction = pruned(rest, draft, choices, wishes)
    # Words of a model, as any other summary.
    texts = [each.text for each in rest]
    said = judged(wishes.summary, instruction=STRATEGIES[draft.level].prompt, source=texts).text
    words = "\n\n".join(filter(None, (draft.summary, said)))
    if compaction == draft or (not words and set(choices) <= compaction.gone):
        raise SummaryFailed(_INVALID)
    # Notes are not merged: a summary, and as much of them.
    return replace(compaction, summary=excerpt(words, 2 * step.summary_tokens, measured.count_text))
