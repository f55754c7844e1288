"""Asks pruning models for a summary or an edit plan, each inside its own window.

Append mode sends the served conversation again with the instruction after it, so that a server's prefix cache holds
nearly all of it (LM Studio 0.3 and 0.4 keep the KV cache of a slot's last prompt, in both engines). It is tried first;
reformat mode sends the text in one message. `core/pruning.py` checks edit plans against the original.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from litellm_compaction.concurrency import Bounded, Rests, off_loop
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS, Budget
from litellm_compaction.core.compaction import Compaction, apply, covered_as_sent, shown_behind
from litellm_compaction.core.excerpts import excerpt
from litellm_compaction.core.forms import Form, in_forms, superseded_reads
from litellm_compaction.core.judging import judged
from litellm_compaction.core.messages import Message, Request, user_message
from litellm_compaction.core.prompts import appended, is_refusal
from litellm_compaction.core.pruning import decide, offered, plan_tokens, pruning_prompt, roomy_answer_tokens
from litellm_compaction.core.rounds import unanswered_calls
from litellm_compaction.core.steps import Step
from litellm_compaction.core.strategies import STRATEGIES
from litellm_compaction.core.view import request_text
from litellm_compaction.engine.context import Effort, MeasuredRequest, PruningModel
from litellm_compaction.engine.recalling import Recaller
from litellm_compaction.engine.sharing.reservation import SUMMARY_EXTRA_TOKENS
from litellm_compaction.errors import ModelNotLoaded, SummaryFailed, WindowUnknown, WindowUnread
from litellm_compaction.events import USELESS
from litellm_compaction.summarizer import SummaryJob, Upstream, answer_to, summarize, summarize_appended
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Windows

logger = logging.getLogger("litellm_compaction")

_MAX_ENTRIES = 4096
# So much a summariser is told of the request that is being worked on.
REQUEST_TOKENS = 200
# The chat template's own tokens around the summariser's one user message, rounded up.
_TEMPLATE_TOKENS = 32
# So much of a text shows what a server's tokenizer makes of it.
_SAMPLE_CHARS = 100_000
# Our count of other scripts may be so many times too high; what is longer still is not counted to know that it is.
_FAR_TOO_MANY_RATIO = 4
# Below this the usual instruction, 450 tokens, takes a summary's room: restarts at 2,048 never got one.
_BRIEF_BELOW_TOKENS = 4096
_USELESS_IN_A_ROW = 2
# Two useless summaries cost a person two waits; a model that was only busy, or reloaded, is soon asked again.
_PAUSE_S = 120.0
# The model answered, but not with a record: reformatted, without tools and as quoted data, it may.
_WORTH_REFORMATTING = frozenset({"tool_call", "empty", "refusal", "echo", "dialogue", "reasoning_only", "longer"})
_WORDS_PER_TOKEN = 0.6
# The model answered, but not with an edit plan: another one is not asked, a summary may be within its reach.
_ANSWERED = frozenset({"invalid", "refusal"})


class _Pauses:
    """Models that are not asked for a while, since two of their summaries in a row were rejected or came too late.

    Kept for each tenant: one tenant's prompts must not take another one's summaries away.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._useless: Bounded[tuple[str, str], int] = Bounded(_MAX_ENTRIES)
        self._rests: Rests[tuple[str, str]] = Rests(_PAUSE_S, _PAUSE_S, clock)

    def has(self, scope: str, model: PruningModel) -> bool:
        return not self._rests.is_over((scope, model.target.key))

    def note(self, scope: str, model: PruningModel, *, is_useless: bool) -> None:
        """A good summary ends a pause; after a pause there is one try."""
        key = (scope, model.target.key)
        if not is_useless:
            self._useless.pop(key, None)
            self._rests.end(key)
            return
        self._useless[key] = self._useless.get(key, 0) + 1
        if self._useless[key] >= _USELESS_IN_A_ROW:
            self._rests.begin(key)
            # Once, until one is good again: not after each try that a pause leaves.
            logger.log(
                logging.WARNING if self._useless[key] == _USELESS_IN_A_ROW else logging.DEBUG,
                "summaries_rejected model=%s: two in a row said nothing or came too late; it is not asked for "
                "%d minutes, or until an answer is good. To end this, name another pruning_model",
                model.label,
                _PAUSE_S // 60,
            )


class PromptLimit(NamedTuple):
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
        self._recaller = recaller
        self._pauses = _Pauses(clock)
        self._windows = windows
        self._counter = counter
        self._sources = sources
        self._clock = clock

    async def summary(self, measured: MeasuredRequest, step: Step, effort: Effort) -> str:
        """The first usable summary of the messages that `step` covers, or ""."""
        job = await off_loop(measured.conversation.rest, lambda: _job(measured, step))
        return await self.written(measured, job, effort, step)

    async def written(
        self, measured: MeasuredRequest, job: SummaryJob, effort: Effort, step: Step | None = None
    ) -> str:
        """Returns the first usable summary of a job, or "".

        The bounds of the models' windows are filled in here. Without the `step` that the job comes of, the
        conversation itself is not sent (append mode).
        """
        context = measured.context
        if not (job.messages or job.earlier):
            effort.reason = "nothing_new"
            return ""
        for model in context.pruning_models:
            if self._pauses.has(context.scope, model):
                effort.reason = effort.reason or "paused"
                continue
            limit = await self._limit(measured, model, job.summary_tokens, effort)
            if limit is None:
                continue
            job = replace(
                job,
                prompt_limit_tokens=limit.tokens,
                thinking_tokens=limit.thinking_tokens,
                is_brief=min(measured.window.tokens, limit.window_tokens) < _BRIEF_BELOW_TOKENS,
            )
            # One limit for both modes: time that append mode has used the other one has not.
            until_s = asyncio.get_running_loop().time() + context.settings.summary_timeout_s
            failure = ""
            for upstream in await self._modes(measured, step, model, job):
                if context.attempts.summary_calls_left <= 0:
                    break
                try:
                    with self._call(measured, model, effort):
                        timeout_s = until_s - asyncio.get_running_loop().time()
                        text = await self._asked(measured, model, job, limit.count, upstream, timeout_s)
                except SummaryFailed as error:
                    # Its traceback would hold the frames, and with them the conversation.
                    failure, effort.failure = error.reason, error.with_traceback(None)
                    if failure not in _WORTH_REFORMATTING:
                        break
                else:
                    self._pauses.note(context.scope, model, is_useless=False)
                    return text
            effort.reason = failure
            if failure in USELESS:
                self._pauses.note(context.scope, model, is_useless=True)
        return ""

    async def prune(self, measured: MeasuredRequest, step: Step, effort: Effort) -> Compaction | None:
        """Returns the pruning that the first usable answer gives, still without a ledger."""
        messages = measured.conversation.messages
        choices = offered(measured.conversation.rest, step.draft)
        answer_tokens = step.summary_tokens + plan_tokens(len(choices))
        for model in measured.context.pruning_models:
            limit = await self._limit(measured, model, answer_tokens, effort)
            if limit is None:
                continue
            asking = partial(_question, measured, step, choices, limit, answer_tokens, is_same=model.is_same)
            question = await off_loop(messages, asking)
            if question is None:
                effort.reason = "small_window"
                continue
            try:
                with self._call(measured, model, effort):
                    answer = await answer_to(
                        question.prompt,
                        model.quiet_ask,
                        max_tokens=question.answer_tokens,
                        timeout_s=measured.context.settings.summary_timeout_s,
                    )
                compaction = await off_loop(messages, partial(_compaction, measured, step, question, choices, answer))
                if compaction is not None:
                    return compaction
                effort.reason = "refusal" if is_refusal(answer) else "invalid"
            except SummaryFailed as error:
                effort.reason = error.reason
            if effort.reason in _ANSWERED:
                break
        return None

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
    ) -> PromptLimit | None:
        """As `prompt_limit`; None for a model that cannot be asked, with the reason in `effort`."""
        if measured.context.attempts.summary_calls_left <= 0:
            effort.reason = effort.reason or "attempts"
            return None
        try:
            return await self.prompt_limit(measured, model, answer_tokens)
        except ModelNotLoaded:
            effort.reason = "pruning_model_not_loaded"
        except WindowUnknown as error:
            is_unread = isinstance(error, WindowUnread)
            effort.reason = "pruning_model_unreachable" if is_unread else "pruning_model_no_window"
        return None

    async def _asked(
        self,
        measured: MeasuredRequest,
        model: PruningModel,
        job: SummaryJob,
        count: Callable[[str], int],
        upstream: Upstream | None,
        timeout_s: float,
    ) -> str:
        if upstream is not None:
            return await summarize_appended(job, upstream, model.quiet_ask, count, timeout_s=timeout_s)
        bounded = await self._bounded(measured.context.target if model.is_same else model.target, job, count)
        return await summarize(bounded, model.quiet_ask, count, timeout_s=timeout_s)

    async def _bounded(self, target: Target, job: SummaryJob, count: Callable[[str], int]) -> SummaryJob:
        """`job` with a smaller limit if the server's tokenizer counts more tokens for its text than ours."""
        text = "\n".join((job.instruction, *job.source))[:_SAMPLE_CHARS]
        asked = Request(messages=(user_message(text),))
        told = await self._windows.tokens_of(target, asked) if self._counter.protocol.is_believed(target.key) else None
        # A text may be counted by another ratio than its lines, each of which is of another script.
        ours = await off_loop(job.messages, lambda: min(count(text), sum(map(count, text.splitlines()))))
        ours += _TEMPLATE_TOKENS
        if told is None or told <= ours:
            return job
        return replace(job, prompt_limit_tokens=job.prompt_limit_tokens * ours // told)

    async def _modes(
        self, measured: MeasuredRequest, step: Step | None, model: PruningModel, job: SummaryJob
    ) -> Sequence[Upstream | None]:
        """Returns what to send, append mode first; None is reformat mode.

        A record written ahead must leave the conversation in the server's cache: with the same model append mode does.
        """
        upstream = await self._upstream(measured, step, job) if model.is_same and step is not None else None
        if step is not None and step.draft.ahead and model.is_same:
            return () if upstream is None else (upstream,)
        return (None,) if upstream is None else (upstream, None)

    async def _upstream(self, measured: MeasuredRequest, step: Step, job: SummaryJob) -> Upstream | None:
        """Returns the conversation to send again in append mode; None if it does not fit, or does not show everything.

        A record without stubs, and without a gap after its last summary, shows all that has to be summarized.
        """
        base, conversation = step.base, measured.conversation
        if base is not None and (not base.is_record or base.summarized_messages != base.covered_messages):
            return None
        if not _may_answer_freely(measured.request):
            return None
        messages, prefix = conversation.messages, conversation.prefix
        cut = prefix + step.draft.covered_messages
        begin = base.start if base else 0
        if conversation.span_tokens(begin, step.draft.covered_messages) > _FAR_TOO_MANY_RATIO * job.prompt_limit_tokens:
            return None
        kept, asked = await off_loop(messages, lambda: self._in_append_mode(measured, base, cut, job))
        tools = self._recaller.tools(measured) if self._recaller is not None and base is not None else None
        target, request = measured.context.target, replace(measured.request, messages=asked)
        request = request if tools is None else replace(request, tools=tools)
        counted = await self._counter.count(target.key, measured.family, request, asker=target.asker)
        # The job's limit is for text by itself; of this prompt the server may have counted the beginning, or not.
        doubt_tokens = math.ceil(counted.tokens * max(counted.likely_ratio - measured.count.other_likely_ratio, 0.0))
        is_believed = self._counter.protocol.is_believed(target.key)
        told = await self._windows.tokens_of(target, request) if is_believed else None
        media_tokens = math.ceil(counted.own.amounts.media * self._counter.known.price(target.key).usual)
        if max(counted.tokens + doubt_tokens, (told or 0) + media_tokens) > job.prompt_limit_tokens:
            return None
        answer_tokens = job.summary_tokens + job.thinking_tokens
        most_tokens = max(counted.likely, counted.tokens + MARGIN_MIN_TOKENS)
        if told is None and most_tokens + answer_tokens > measured.window.tokens:
            # By the upper end of its own count.
            return None
        # The client's other parameters are not sent here.
        return Upstream(
            messages=asked,
            tools=request.tools,
            tool_choice=measured.request.tool_choice,
            tokens=sum(counted.sizes[prefix : len(kept)]),
        )

    def _in_append_mode(
        self, measured: MeasuredRequest, base: Compaction | None, cut: int, job: SummaryJob
    ) -> tuple[Sequence[Message], tuple[Message, ...]]:
        """The conversation up to `cut` as the server was last sent it, and the same with the instruction after it."""
        messages = measured.conversation.messages
        current = apply(messages, base) if base else messages
        sent = current[: len(current) - (len(messages) - cut)]
        if base is not None and self._recaller is not None:
            end = cut - measured.conversation.prefix
            sent = self._recaller.with_found(sent, measured, base.covered_messages, end)
        prefix = job.strategy.history(sent)
        earlier: Literal["none", "stays", "goes"]
        earlier = "goes" if job.earlier else "none" if base is None else "stays"
        return prefix, appended(prefix, instruction=job.instruction, earlier=earlier, focus=job.focus)

    async def prompt_limit(self, measured: MeasuredRequest, model: PruningModel, answer_tokens: int) -> PromptLimit:
        """The largest prompt for a pruning model; one that thinks has as much room for that as for its answer.

        Raises:
            ModelNotLoaded: LM Studio would have to load it, which may evict the model that is being served.
            WindowUnknown: its window is unknown.
        """
        window_tokens, likely_ratio, count_text = (
            measured.window.tokens,
            measured.count.other_likely_ratio,
            measured.count_text,
        )
        family = measured.family
        if not model.is_same:
            window = await self._windows.resolve(model.target)
            family = self._sources.family(model.target, window)
            window_tokens = window.tokens
            # In the shape of every prompt for it; a list without messages is refused by many templates.
            shape = Request(messages=(user_message(""),))
            likely_ratio = (await self._counter.count(model.target.key, family, shape)).other_likely_ratio
            count_text = self._counter.text_counter(model.target.key, family, asker=measured.context.target.asker)
        thinking_tokens = answer_tokens if family.reasons else 0
        budget = Budget(
            rules=replace(measured.budget.rules, answer_min_tokens=answer_tokens + thinking_tokens),
            window_tokens=window_tokens,
            floor_tokens=0,
            likely_ratio=likely_ratio,
        )
        limit_tokens = budget.prompt_limit_tokens - _TEMPLATE_TOKENS
        return PromptLimit(limit_tokens, thinking_tokens, count_text, window_tokens)


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
    # Of repeated reads the newest says all: the room is better spent on the rest.
    forms = (*(Form(at, "line") for at in superseded_reads(covered)), *(Form(at, "whole") for at in pinned))
    sent = [message for message in in_forms(covered, forms) if message is not None]
    shown = [*shown_behind(sent, start, base.covered_part if base else None)]
    fresh = [each for at, each in enumerate(shown) if (at >= start or at in stayed) and at not in pinned]
    return SummaryJob(
        messages=strategy.history(fresh),
        earlier=base.summary if base and step.integrates else "",
        request=excerpt(request_text(measured.conversation.messages), REQUEST_TOKENS, measured.count_text),
        summary_tokens=step.summary_tokens,
        prompt_limit_tokens=0,
        round_number=step.draft.round,
        strategy=strategy,
        focus=measured.context.focus,
    )


class _Question(NamedTuple):
    prompt: str
    answer_tokens: int


def _question(
    measured: MeasuredRequest,
    step: Step,
    choices: list[int],
    limit: PromptLimit,
    answer_tokens: int,
    *,
    is_same: bool,
) -> _Question | None:
    """The question to a model about the messages at `choices`, positions after the prefix; None if it does not fit."""
    conversation, compaction = measured.conversation, step.draft
    limit_tokens, room_tokens = limit.tokens, answer_tokens + limit.thinking_tokens
    if is_same:
        # The room reserved in a shared context for a summary has to do for this, too.
        limit_tokens = min(limit_tokens, measured.count.tokens + SUMMARY_EXTRA_TOKENS - room_tokens)
    prefix = conversation.prefix
    shown = covered_as_sent(conversation.rest, compaction)
    unanswered = unanswered_calls(conversation.messages)
    shown_now = ((prefix + at, shown[at]) for at in choices)
    offered_now = [(at, message) for at, message in shown_now if message is not None]
    prompt = pruning_prompt(
        prompt=STRATEGIES[step.draft.level].prompt,
        values={
            "words": max(int(step.summary_tokens * _WORDS_PER_TOKEN), 40),
            "round": step.draft.round,
            "current_tokens": step.now_tokens,
            "target_tokens": step.predicted_tokens,
            "limit_tokens": measured.window.tokens,
        },
        request=excerpt(request_text(conversation.messages), REQUEST_TOKENS, measured.count_text),
        earlier=compaction.omissions,
        focus=measured.context.focus,
        messages=[message for _, message in offered_now],
        sizes=[
            min(conversation.sizes[at], measured.count_text(message.text) + 4) if message.text else 4
            for at, message in offered_now
        ],
        unanswered=[[call.name for call in unanswered.get(at, ())] for at, _ in offered_now],
        limit_tokens=limit_tokens,
        count=limit.count,
    )
    if not prompt:
        return None
    most_tokens = roomy_answer_tokens(
        room_tokens,
        spare_tokens=limit_tokens - limit.count(prompt),
        offered_tokens=sum(conversation.sizes[prefix + at] for at in choices),
    )
    return _Question(prompt, most_tokens)


def _compaction(
    measured: MeasuredRequest, step: Step, question: _Question, choices: list[int], answer: str
) -> Compaction | None:
    """The compaction that the answer stands for; None if it is no answer, or changes nothing."""
    base = step.draft
    decided = decide(answer, measured.conversation.rest, base, choices, prompt=question.prompt)
    if decided is None:
        return None
    compaction, summary = decided
    texts = [message.text for message in measured.conversation.rest]
    # Words of a model, as any other summary.
    summary = judged(summary, instruction=STRATEGIES[step.draft.level].prompt, source=texts).text
    said = "\n\n".join(filter(None, (base.omissions, summary)))
    if not said and set(choices) <= compaction.gone:
        return None
    return replace(compaction, omissions=excerpt(said, step.summary_tokens, measured.count_text))
