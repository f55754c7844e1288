"""Asks pruning models for a summary or an edit plan, each inside its own window.

Append mode sends the served conversation again with the instruction after it, so that a server's prefix cache holds
nearly all of it (LM Studio 0.3 and 0.4 keep the KV cache of a slot's last prompt, in both engines). It is tried first;
reformat mode sends the text in one message. `core/pruning.py` checks edit plans against the original.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from litellm_compaction.concurrency import Bounded, off_loop
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS, Budget
from litellm_compaction.core.compaction import Compaction, apply, covered_as_sent, shown_behind
from litellm_compaction.core.excerpts import excerpt
from litellm_compaction.core.forms import Form, in_forms
from litellm_compaction.core.judging import judged
from litellm_compaction.core.messages import Message, Request, user_message
from litellm_compaction.core.prompts import appended
from litellm_compaction.core.pruning import offered, plan_tokens, pruned, pruning_prompt, read_answer
from litellm_compaction.core.steps import Step
from litellm_compaction.core.strategies import STRATEGIES
from litellm_compaction.core.view import request_text
from litellm_compaction.engine.context import Effort, MeasuredRequest, PruningModel
from litellm_compaction.engine.recalling import Recaller
from litellm_compaction.engine.sharing.reservation import SUMMARY_EXTRA_TOKENS
from litellm_compaction.errors import ModelNotLoaded, SummaryFailed, WindowUnknown, WindowUnread
from litellm_compaction.events import USELESS
from litellm_compaction.summarizer import SummaryJob, answer_to, summarize, summarize_appended, within_s, words_for
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Windows

logger = logging.getLogger("litellm_compaction")

# So much a summariser is told of the request that is being worked on.
REQUEST_TOKENS = 200
# The chat template's own tokens around the summariser's one user message, rounded up.
_TEMPLATE_TOKENS = 32
# So much of a text shows what a server's tokenizer makes of it.
_SAMPLE_CHARS = 100_000
# Below this the usual instruction, 450 tokens, takes a summary's room: restarts at 2,048 never got one.
_BRIEF_BELOW_TOKENS = 4096
# Two useless summaries cost a person two waits; a model that was only busy, or reloaded, is soon asked again.
_USELESS_IN_A_ROW, _PAUSE_S, _MAX_PAUSES = 2, 120.0, 4096
# The model answered, but not with a record: reformatted, without tools and as quoted data, it may.
_WORTH_REFORMATTING = frozenset({"tool_call", "empty", "refusal", "echo", "dialogue", "reasoning_only", "longer"})
_INVALID = "invalid"

_Found = TypeVar("_Found")


class _Limit(NamedTuple):
    """The largest prompt for a pruning model, its room to think besides the answer, its tokenizer and its window."""

    tokens: int
    thinking_tokens: int
    count: Callable[[str], int]
    window_tokens: int


class SummaryClient:
    """Asks pruning models in their order; a model that fails leaves the turn to the next.

    Every call takes one from the request's budget (promise P5) and is added to the caller's `Effort`, whose `reason`
    then says why nothing came, or why the configured model was not the one that answered.
    """

    def __init__(
        self,
        *,
        windows: Windows,
        counter: TokenCounter,
        sources: Sources,
        recaller: Recaller | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._windows = windows
        self._counter = counter
        self._sources = sources
        self._recaller = recaller
        self._clock = clock
        # By tenant and model, since one tenant's prompts must not take another one's summaries away: how many useless
        # summaries came in a row, and until when the model is not asked.
        self._useless: Bounded[tuple[str, str], tuple[int, float]] = Bounded(_MAX_PAUSES)

    async def summary(self, measured: MeasuredRequest, step: Step, effort: Effort) -> str:
        """Returns the first usable summary of the messages that `step` covers, or ""."""
        job = await off_loop(measured.conversation.rest, lambda: _job(measured, step))
        if not (job.messages or job.earlier):
            effort.reason = "nothing_new"
            return ""

        async def asked(model: PruningModel, limit: _Limit) -> str:
            bounded = replace(
                job,
                prompt_limit_tokens=limit.tokens,
                thinking_tokens=limit.thinking_tokens,
                is_brief=min(measured.window.tokens, limit.window_tokens) < _BRIEF_BELOW_TOKENS,
            )
            # A record written ahead must leave the conversation in the server's cache.
            is_ahead = step.draft.state == "ready" and model.is_same
            appended = await self._appended(measured, step, bounded) if model.is_same else None
            if appended is not None:
                try:
                    with self._call(measured, model, effort):
                        return await summarize_appended(bounded, model.quiet_ask, limit.count, *appended)
                except SummaryFailed as error:
                    has_calls = measured.context.attempts.summary_calls_left > 0
                    if is_ahead or not has_calls or error.reason not in _WORTH_REFORMATTING:
                        raise
            elif is_ahead:
                return ""
            with self._call(measured, model, effort):
                bounded = await self._bounded(measured, model, bounded, limit.count)
                return await summarize(bounded, model.quiet_ask, limit.count)

        return await self._first(measured, job.summary_tokens, effort, asked) or ""

    async def prune(self, measured: MeasuredRequest, step: Step, effort: Effort) -> Compaction | None:
        """Returns the pruning that the first answer gives, still without a ledger; None if that is no edit plan.

        Then another model is not asked, since a summary may be within its reach.
        """
        messages = measured.conversation.messages
        choices = offered(measured.conversation.rest, step.draft)
        answer_tokens = plan_tokens(step.summary_tokens, len(choices))

        async def asked(model: PruningModel, limit: _Limit) -> Compaction:
            asking = partial(_question, measured, step, choices, limit, answer_tokens, is_same=model.is_same)
            prompt, most_tokens = await off_loop(messages, asking)
            if not prompt:
                raise SummaryFailed("small_window")
            with self._call(measured, model, effort):
                answer = await answer_to(prompt, model.quiet_ask, max_tokens=most_tokens)
            compaction = await off_loop(messages, partial(_compaction, measured, step, prompt, choices, answer))
            if compaction is None:
                raise SummaryFailed(_INVALID)
            return compaction

        return await self._first(measured, answer_tokens, effort, asked)

    async def _first(
        self,
        measured: MeasuredRequest,
        answer_tokens: int,
        effort: Effort,
        asked: Callable[[PruningModel, _Limit], Awaitable[_Found]],
    ) -> _Found | None:
        """What the first model gives that gives anything; one time limit for all calls of a model."""
        context = measured.context
        for model in context.pruning_models:
            key = (context.scope, model.target.key)
            useless, paused_until_s = self._useless.get(key, (0, -math.inf))
            if self._clock() < paused_until_s:
                effort.reason = effort.reason or "paused"
                continue
            limit = await self._limit(measured, model, answer_tokens, effort)
            if limit is None:
                continue
            try:
                found = await within_s(asked(model, limit), context.settings.summary_timeout_s)
            except SummaryFailed as error:
                effort.reason = error.reason
                if error.reason == _INVALID:
                    return None
                if error.reason in USELESS:
                    self._note_useless(key, model.label, useless + 1)
                continue
            if found:
                self._useless.pop(key, None)
                return found
            effort.reason = ""
        return None

    def _note_useless(self, key: tuple[str, str], label: str, count: int) -> None:
        """Begins a pause after two in a row; after a pause there is one try."""
        is_over = count >= _USELESS_IN_A_ROW
        self._useless[key] = count, self._clock() + _PAUSE_S if is_over else -math.inf
        if count == _USELESS_IN_A_ROW:
            # Once, until one is good again: not after each try that a pause leaves.
            logger.warning(
                "summaries_rejected model=%s: two in a row said nothing or came too late; it is not asked for %d "
                "minutes, or until an answer is good. To end this, name another pruning_model",
                label,
                _PAUSE_S // 60,
            )

    @contextmanager
    def _call(self, measured: MeasuredRequest, model: PruningModel, effort: Effort) -> Iterator[None]:
        measured.context.attempts.summary_calls_left -= 1
        effort.calls, effort.pruning_model = effort.calls + 1, model.label
        started_s = self._clock()
        try:
            yield
        finally:
            effort.seconds += self._clock() - started_s

    async def _limit(
        self, measured: MeasuredRequest, model: PruningModel, answer_tokens: int, effort: Effort
    ) -> _Limit | None:
        """The bound on a prompt; None for a model that cannot be asked, with the reason in `effort`.

        One that LM Studio would have to load is not: that may evict the model that is being served.
        """
        if measured.context.attempts.summary_calls_left <= 0:
            effort.reason = effort.reason or "attempts"
            return None
        window, family, count = measured.window, measured.family, measured.count_text
        likely_ratio = measured.count.other_likely_ratio
        if not model.is_same:
            try:
                window = await self._windows.resolve(model.target)
            except ModelNotLoaded:
                effort.reason = "pruning_model_not_loaded"
                return None
            except WindowUnknown as error:
                is_unread = isinstance(error, WindowUnread)
                effort.reason = "pruning_model_unreachable" if is_unread else "pruning_model_no_window"
                return None
            family = self._sources.family(model.target, window)
            # In the shape of every prompt for it; a list without messages is refused by many templates.
            shape = Request(messages=(user_message(""),))
            likely_ratio = (await self._counter.count(model.target.key, family, shape)).other_likely_ratio
            count = self._counter.text_counter(model.target.key, family, asker=measured.context.target.asker)
        # One that thinks has as much room for that as for its answer.
        thinking_tokens = answer_tokens if family.reasons else 0
        budget = Budget(
            rules=replace(measured.budget.rules, answer_min_tokens=answer_tokens + thinking_tokens),
            window_tokens=window.tokens,
            floor_tokens=0,
            likely_ratio=likely_ratio,
        )
        return _Limit(budget.prompt_limit_tokens - _TEMPLATE_TOKENS, thinking_tokens, count, window.tokens)

    async def _bounded(
        self, measured: MeasuredRequest, model: PruningModel, job: SummaryJob, count: Callable[[str], int]
    ) -> SummaryJob:
        """`job` with a smaller limit if the server's tokenizer counts more tokens for its text than ours."""
        target = measured.context.target if model.is_same else model.target
        text = "\n".join((job.instruction, *job.source))[:_SAMPLE_CHARS]
        asked = Request(messages=(user_message(text),))
        told = await self._windows.tokens_of(target, asked) if self._counter.protocol.is_believed(target.key) else None
        # A text may be counted by another ratio than its lines, each of which is of another script.
        ours = await off_loop(job.messages, lambda: min(count(text), sum(map(count, text.splitlines()))))
        ours += _TEMPLATE_TOKENS
        if told is None or told <= ours:
            return job
        return replace(job, prompt_limit_tokens=job.prompt_limit_tokens * ours // told)

    async def _appended(self, measured: MeasuredRequest, step: Step, job: SummaryJob) -> tuple[Request, int] | None:
        """The conversation to send again in append mode, and the tokens that its summary replaces.

        None if it does not fit, or does not show everything: a record with lines in place of results, or with a gap
        after its last summary.
        """
        base, conversation, target = step.base, measured.conversation, measured.context.target
        shows_all = base is None or (base.is_record and base.summarized_messages == base.covered_messages)
        if not (shows_all and _may_answer_freely(measured.request)):
            return None
        kept, asked = await off_loop(conversation.messages, lambda: self._in_append_mode(measured, step, job))
        tools = self._recaller.tools(measured) if self._recaller is not None and base is not None else None
        # The client's other parameters are not sent here.
        request = replace(measured.request, messages=asked, tools=measured.request.tools if tools is None else tools)
        counted = await self._counter.count(target.key, measured.family, request, asker=target.asker)
        # The job's limit is for text by itself; of this prompt the server may have counted the beginning, or not.
        doubt_tokens = math.ceil(counted.tokens * max(counted.likely_ratio - measured.count.other_likely_ratio, 0.0))
        if counted.tokens + doubt_tokens > job.prompt_limit_tokens:
            return None
        is_believed = self._counter.protocol.is_believed(target.key)
        told = await self._windows.tokens_of(target, request) if is_believed else None
        if told is None:
            # By the upper end of its own count.
            most_tokens = max(counted.likely, counted.tokens + MARGIN_MIN_TOKENS)
            does_fit = most_tokens + job.summary_tokens + job.thinking_tokens <= measured.window.tokens
        else:
            media_tokens = math.ceil(counted.own.amounts.media * counted.rates[1].usual)
            does_fit = told + media_tokens <= job.prompt_limit_tokens
        if not does_fit:
            return None
        return request, sum(counted.sizes[conversation.prefix : len(kept)])

    def _in_append_mode(
        self, measured: MeasuredRequest, step: Step, job: SummaryJob
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """The covered conversation as the server was last sent it, and the same with the instruction after it."""
        messages, base, end = measured.conversation.messages, step.base, step.draft.covered_messages
        current = apply(messages, base) if base else messages
        sent = current[: len(current) - (len(messages) - measured.conversation.prefix - end)]
        if base is not None and self._recaller is not None:
            sent = self._recaller.with_found(sent, measured, base.covered_messages, end)
        prefix = job.strategy.history(sent)
        earlier: Literal["none", "stays", "goes"]
        earlier = "goes" if job.earlier else "none" if base is None else "stays"
        return tuple(prefix), appended(prefix, instruction=job.instruction, earlier=earlier, focus=job.focus)


def _may_answer_freely(request: Request) -> bool:
    """The client's `tool_choice` lets the model answer in words, and its tools can be sent as they came.

    The older `functions` have no `type`; a forced call would be all that comes back.
    """
    has_tools_only = all(isinstance(tool, Mapping) and "type" in tool for tool in request.tools)
    return has_tools_only and request.tool_choice in (None, "auto", "none")


def _job(measured: MeasuredRequest, step: Step) -> SummaryJob:
    base, pinned = step.base, step.draft.pinned
    covered = measured.conversation.rest[: step.draft.covered_messages]
    start = base.summarized_messages if base else 0
    strategy = STRATEGIES[step.draft.level]
    # A round that stayed with the record is in no summary yet.
    stayed = [at for at in (base.pinned if base else ()) if at < start and covered[at].role != "user"]
    forms = (Form(at, "whole") for at in pinned)
    sent = [message for message in in_forms(covered, forms) if message is not None]
    shown = [*shown_behind(sent, start, base.covered_part if base else None)]
    fresh = [each for at, each in enumerate(shown) if (at >= start or at in stayed) and at not in pinned]
    return SummaryJob(
        messages=strategy.history(fresh),
        earlier=base.summary if base and step.integrates else "",
        request=_request_of(measured),
        summary_tokens=step.summary_tokens,
        round_number=step.draft.round,
        strategy=strategy,
        focus=measured.context.focus,
    )


def _request_of(measured: MeasuredRequest) -> str:
    return excerpt(request_text(measured.conversation.messages), REQUEST_TOKENS, measured.count_text)


def _question(
    measured: MeasuredRequest, step: Step, choices: list[int], limit: _Limit, answer_tokens: int, *, is_same: bool
) -> tuple[str, int]:
    """The question about the messages at `choices`, positions after the prefix, and the bound on its answer.

    "" if it does not fit.
    """
    conversation, compaction, prefix = measured.conversation, step.draft, measured.conversation.prefix
    limit_tokens, room_tokens = limit.tokens, answer_tokens + limit.thinking_tokens
    if is_same:
        # The room reserved in a shared context for a summary has to do for this, too.
        limit_tokens = min(limit_tokens, measured.count.tokens + SUMMARY_EXTRA_TOKENS - room_tokens)
    shown = covered_as_sent(conversation.rest, compaction)
    shown_now = ((prefix + at, shown[at]) for at in choices)
    offered_now = [(at, message) for at, message in shown_now if message is not None]
    prompt = pruning_prompt(
        prompt=STRATEGIES[compaction.level].prompt,
        values={
            "words": words_for(step.summary_tokens),
            "round": compaction.round,
            "current_tokens": step.now_tokens,
            "target_tokens": step.predicted_tokens,
            "limit_tokens": measured.window.tokens,
        },
        request=_request_of(measured),
        earlier=compaction.omissions,
        focus=measured.context.focus,
        messages=[message for _, message in offered_now],
        sizes=[measured.count_text(message.text) + 4 for _, message in offered_now],
        limit_tokens=limit_tokens,
        count=limit.count,
    )
    spare_tokens = limit_tokens - limit.count(prompt)
    offered_tokens = sum(conversation.sizes[prefix + at] for at in choices)
    # All that is offered may be written once more, and a model that only thought is asked again with twice the room.
    return prompt, room_tokens + min(max(spare_tokens - room_tokens, 0) // 2, offered_tokens)


def _compaction(
    measured: MeasuredRequest, step: Step, prompt: str, choices: list[int], answer: str
) -> Compaction | None:
    """The compaction that the answer stands for; None if it is no answer, or changes nothing."""
    base = step.draft
    rest = measured.conversation.rest
    try:
        wishes = read_answer(answer, rest, choices, prompt=prompt)
    except ValueError:
        return None
    compaction = pruned(rest, base, choices, wishes)
    if compaction == base:
        return None
    # Words of a model, as any other summary.
    texts = [message.text for message in rest]
    summary = judged(wishes.summary, instruction=STRATEGIES[base.level].prompt, source=texts).text
    said = "\n\n".join(filter(None, (base.omissions, summary)))
    if not said and set(choices) <= compaction.gone:
        return None
    return replace(compaction, omissions=excerpt(said, step.summary_tokens, measured.count_text))
