"""Who is asked for a summary or a pruning, in which mode, and inside which limit.

Append mode sends the served conversation again with the instruction behind it, reformat mode its text in one message;
whichever costs the engine less work is tried first. LM Studio keeps the KV cache of a slot's last prompt (LM Studio
0.3 and 0.4: prefix reuse in both engines) and reports no cached tokens, so what was last sent for a conversation is
remembered here.

What a pruning model says is held against the original by `core/pruning.py`; an answer that cannot be used costs one
call, and the next level is a summary.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.budget import Budget
from litellm_compaction.core.clearing import edited, superseded_reads
from litellm_compaction.core.compaction import Compaction, apply, edited_part, shown_behind
from litellm_compaction.core.cut_points import request_text
from litellm_compaction.core.excerpts import excerpt
from litellm_compaction.core.messages import Message, Request, user_message
from litellm_compaction.core.plan import Prune, Summarize
from litellm_compaction.core.prompts import appended, is_refusal, unanswered_calls
from litellm_compaction.core.pruning import (
    decide,
    offered,
    plan_tokens,
    pruning_prompt,
    roomy_answer_tokens,
)
from litellm_compaction.core.strategies import Strategy, strategy_of
from litellm_compaction.engine.context import MeasuredRequest, PruningModel
from litellm_compaction.engine.reservation import SUMMARY_EXTRA_TOKENS
from litellm_compaction.engine.threads import off_loop
from litellm_compaction.errors import ModelNotLoaded, SummaryFailed, WindowUnknown, WindowUnread
from litellm_compaction.events import USELESS
from litellm_compaction.summarizer import SummaryJob, Upstream, answer_to, summarize, summarize_appended
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Windows

logger = logging.getLogger("litellm_compaction")

_MAX_ENTRIES = 4096
_REQUEST_TOKENS = 200
# The chat template's own tokens around the summariser's one user message, rounded up.
_TEMPLATE_TOKENS = 32
# A decoded token takes a local engine about as long as so many prefilled ones.
_DECODE_WEIGHT = 15
# So much of a text shows what a server's tokenizer makes of it.
_SAMPLE_CHARS = 100_000
# Our count of other scripts may be so many times too high; what is longer still is not counted to know that it is.
_FAR_TOO_MANY_RATIO = 4
# Below this the usual instruction, 450 tokens, takes a summary's room: restarts at 2,048 never got one (2026-11).
_BRIEF_BELOW_TOKENS = 4096
_USELESS_IN_A_ROW = 2
# Two useless summaries cost a person two waits; a model that was only busy, or reloaded, is soon asked again.
_PAUSE_S = 120.0
# The model answered, but not with a record: reformatted, without tools and as quoted data, it may.
_WORTH_REFORMATTING = frozenset({"tool_call", "empty", "refusal", "echo", "dialogue", "reasoning_only", "longer"})
_WORDS_PER_TOKEN = 0.6
# The model answered, but not with an edit plan: another one is not asked, a summary may be within its reach.
_ANSWERED = frozenset({"invalid", "refusal"})


class Sent(NamedTuple):
    """A prompt that was sent.

    Attributes:
        covered_hash: of the compaction that was applied, "" for none.
        messages: how many messages after the lead the conversation had.
    """

    covered_hash: str
    messages: int


class SentPrompts:
    """The newest prompts by conversation; used between two awaits only, so it needs no lock."""

    def __init__(self) -> None:
        self._entries: Bounded[tuple[str, str, str], Sent] = Bounded(_MAX_ENTRIES)

    def note(self, scope: str, target_key: str, hashes: Sequence[str], compaction: Compaction | None) -> None:
        """Remembers that a conversation was sent with `compaction` applied.

        Args:
            scope: who may know of it.
            target_key: the deployment.
            hashes: the conversation's chain, entry 0 for the empty one.
            compaction: None for the messages as they were.
        """
        key = (scope, target_key, hashes[-1])
        self._entries[key] = Sent(compaction.covered_hash if compaction else "", len(hashes) - 1)

    def last(self, scope: str, target_key: str, hashes: Sequence[str]) -> Sent | None:
        """The longest prompt of this conversation that was sent before; None where none is known."""
        for covered_hash in reversed(hashes[1:]):
            found = self._entries.get((scope, target_key, covered_hash))
            if found is not None:
                return found
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What came of asking; `text` is "" where nobody gave a usable summary, and `reason` says why in one word.

    `failure` is then the last error of a model that was asked.
    """

    text: str
    calls: int
    pruning_model: str
    reason: str
    failure: SummaryFailed | None = None


class _Pauses:
    """Which models are not asked for a while, since two of their summaries in a row were rejected or came too late.

    Each such summary costs the person who waits a minute, and its conversation is no better off than with none. Whose
    conversation it was counts: what one tenant makes a model write must not take another one's summaries away.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._useless: Bounded[tuple[str, str], int] = Bounded(_MAX_ENTRIES)
        self._until_s: Bounded[tuple[str, str], float] = Bounded(_MAX_ENTRIES)

    def has(self, scope: str, model: PruningModel) -> bool:
        """Whether a model pauses now for a tenant."""
        return self._clock() < self._until_s.get((scope, model.target.key), -math.inf)

    def note(self, scope: str, model: PruningModel, *, is_useless: bool) -> None:
        """Takes note of what became of a tenant's summary: a good one ends a pause; after a pause there is one try."""
        key = (scope, model.target.key)
        if not is_useless:
            self._useless.pop(key, None)
            self._until_s.pop(key, None)
            return
        self._useless[key] = self._useless.get(key, 0) + 1
        if self._useless[key] >= _USELESS_IN_A_ROW:
            self._until_s[key] = self._clock() + _PAUSE_S
            # Once, until one is good again: not after each try that a pause leaves.
            logger.log(
                logging.WARNING if self._useless[key] == _USELESS_IN_A_ROW else logging.DEBUG,
                "summaries_rejected model=%s: two in a row said nothing or came too late; it is not asked for "
                "%d minutes, or until an answer is good. To end this, name another pruning_model, or set "
                "max_summary_calls: 0",
                model.label,
                _PAUSE_S // 60,
            )


class PromptLimit(NamedTuple):
    """The largest prompt for a pruning model, what it may think beside its answer, its tokenizer and its window."""

    tokens: int
    thinking_tokens: int
    count: Callable[[str], int]
    window_tokens: int


class SummaryClient:
    """Asks pruning models.

    Args:
        windows: which context length a pruning model has.
        counter: tokens of its prompts.
        sources: by which vocabulary and template it is counted.
        sent: what the served model's cache may hold.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        windows: Windows,
        counter: TokenCounter,
        sources: Sources,
        sent: SentPrompts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pauses = _Pauses(clock)
        self._windows = windows
        self._counter = counter
        self._sources = sources
        self._sent = sent

    async def summary(
        self, work: MeasuredRequest, decision: Summarize, covered: Sequence[Message], pinned: tuple[int, ...]
    ) -> Summary:
        """The first usable summary of `covered`, the messages after the lead that `decision` covers.

        Every call takes one from the request's budget (promise P5); a model that fails leaves the turn to the next.
        """
        job = await off_loop(covered, lambda: _job(work, decision, covered, pinned))
        return await self.written(work, job, decision)

    async def written(self, work: MeasuredRequest, job: SummaryJob, decision: Summarize | None = None) -> Summary:
        """The first usable summary of a job.

        Args:
            work: on whose behalf.
            job: what to summarize; the bounds of the models' windows are filled in here.
            decision: what the job comes of; without it the conversation itself is not sent (append mode).
        """
        attempts = work.case.attempts
        calls, asked, reason = 0, "", ""
        failed: SummaryFailed | None = None
        if not (job.messages or job.earlier):
            return Summary(text="", calls=0, pruning_model="", reason="nothing_new")
        for model in work.case.pruning_models:
            if self._pauses.has(work.case.scope, model):
                reason = reason or "paused"
                continue
            try:
                limit = await self.prompt_limit(work, model, job.summary_tokens)
            except (ModelNotLoaded, WindowUnknown) as error:
                reason = why_unusable(error)
                continue
            count = limit.count
            job = replace(
                job,
                prompt_limit_tokens=limit.tokens,
                thinking_tokens=limit.thinking_tokens,
                is_brief=min(work.window.tokens, limit.window_tokens) < _BRIEF_BELOW_TOKENS,
            )
            failure = ""
            # One limit for both modes: what append mode has used up the other one has not.
            until_s = asyncio.get_running_loop().time() + work.case.settings.summary_timeout_s
            for upstream in await self._modes(work, decision, model, job):
                if attempts.summary_calls_left <= 0:
                    failure = failure or reason or "attempts"
                    break
                attempts.summary_calls_left -= 1
                calls, asked = calls + 1, model.label
                timeout_s = until_s - asyncio.get_running_loop().time()
                try:
                    if upstream is None:
                        target = work.case.target if model.is_same else model.target
                        bounded = await self._bounded(target, job, count)
                        text = await summarize(bounded, model.quiet_ask, count, timeout_s=timeout_s)
                    else:
                        text = await summarize_appended(job, upstream, model.quiet_ask, count, timeout_s=timeout_s)
                except SummaryFailed as error:
                    # Its traceback would hold the frames, and with them the conversation.
                    failure, failed = error.reason, error.with_traceback(None)
                    if failure not in _WORTH_REFORMATTING:
                        break
                else:
                    self._pauses.note(work.case.scope, model, is_useless=False)
                    # A reason that is still there says why the configured model was not the one that answered.
                    return Summary(text=text, calls=calls, pruning_model=asked, reason=reason)
            reason = failure
            if failure in USELESS:
                self._pauses.note(work.case.scope, model, is_useless=True)
            if attempts.summary_calls_left <= 0:
                break
        return Summary(text="", calls=calls, pruning_model=asked, reason=reason, failure=failed)

    async def _bounded(self, target: Target, job: SummaryJob, count: Callable[[str], int]) -> SummaryJob:
        """`job` with a smaller limit if the server's tokenizer counts more tokens for its text than ours.

        Args:
            target: that is asked for the summary.
            job: bounded by our count.
            count: ours.
        """
        text = "\n".join((job.instruction, *job.source))[:_SAMPLE_CHARS]
        asked = Request(messages=(user_message(text),))
        told = await self._windows.tokens_of(target, asked) if self._counter.told.is_believed(target.key) else None
        # A text may be counted by another ratio than its lines, each of which is of another script.
        ours = await off_loop(job.messages, lambda: min(count(text), sum(map(count, text.splitlines()))))
        ours += _TEMPLATE_TOKENS
        if told is None or told <= ours:
            return job
        return replace(job, prompt_limit_tokens=job.prompt_limit_tokens * ours // told)

    async def _modes(
        self, work: MeasuredRequest, decision: Summarize | None, model: PruningModel, job: SummaryJob
    ) -> Sequence[Upstream | None]:
        """What to send, cheapest mode first; None is reformat mode.

        What is written ahead must leave the conversation in the server's cache: with the same model append mode does.
        """
        upstream = await self._upstream(work, decision, job) if model.is_same and decision is not None else None
        if decision is not None and decision.ahead and model.is_same:
            return () if upstream is None else (upstream,)
        return (None,) if upstream is None else (upstream, None)

    async def _upstream(self, work: MeasuredRequest, decision: Summarize, job: SummaryJob) -> Upstream | None:
        """The conversation to send again in append mode; None where it cannot be, or reformat mode is less work."""
        base, conversation = decision.base, work.conversation
        if not _shows_everything(base) or not _may_answer_freely(work.request):
            return None
        messages, lead = conversation.messages, conversation.prefix
        cut = lead + decision.covered_messages
        begin = lead + (base.replaced_messages if base else 0)
        if sum(conversation.sizes[begin:cut]) > _FAR_TOO_MANY_RATIO * job.prompt_limit_tokens:
            return None
        prefix, asked = await off_loop(messages, lambda: _in_append_mode(messages, base, cut, job))
        target, request = work.case.target, replace(work.request, messages=asked)
        counted = await self._counter.count(target.key, work.family, request, asker=target.asker)
        # The job's limit is for text by itself; of this prompt the server may have counted the beginning, or not.
        doubt_tokens = math.ceil(counted.tokens * max(counted.error_ratio - work.count.text_error_ratio, 0.0))
        told = await self._windows.tokens_of(target, request) if self._counter.told.is_believed(target.key) else None
        media_tokens = math.ceil(counted.media_tokens * counted.media_factor)
        if max(counted.tokens + doubt_tokens, (told or 0) + media_tokens) > job.prompt_limit_tokens:
            return None
        lead_tokens = conversation.prefix_tokens
        new_tokens = counted.tokens - self._cached_tokens(work, base, cut, sum(counted.sizes[: len(prefix)]))
        text_tokens = await off_loop(
            job.messages,
            lambda: sum(work.count_text(message.text) for message in job.messages) + work.count_text(job.earlier),
        )
        parts = math.ceil(text_tokens / job.prompt_limit_tokens)
        decoded = decision.summary_tokens * _DECODE_WEIGHT
        # A prompt of another shape takes the slot: system message and tools will have to be read again.
        reformatted = lead_tokens + text_tokens + work.count_text(job.instruction) + decoded * (2 * parts - 1)
        if new_tokens + decoded > reformatted:
            return None
        return Upstream(
            messages=asked,
            tools=work.request.tools,
            tool_choice=work.request.tool_choice,
            tokens=sum(counted.sizes[lead : len(prefix)]),
            # What else the client's answers are asked with is not sent here.
        )

    def _cached_tokens(self, work: MeasuredRequest, base: Compaction | None, cut: int, prefix_tokens: int) -> int:
        """How much of the conversation up to `cut` the server holds, by what was last sent of it."""
        conversation = work.conversation
        sent = self._sent.last(work.case.scope, work.case.target.key, conversation.hashes)
        if sent is None:
            return 0
        lead = conversation.prefix
        if sent.covered_hash != (base.covered_hash if base else ""):
            return 0 if work.rereads else conversation.prefix_tokens
        return conversation.fixed_tokens + prefix_tokens - sum(conversation.sizes[lead + sent.messages : cut])

    async def prompt_limit(self, work: MeasuredRequest, model: PruningModel, answer_tokens: int) -> PromptLimit:
        """The largest prompt for a pruning model; one that thinks has as much room for that as for its answer.

        Raises:
            ModelNotLoaded: LM Studio would have to load it, which may evict the model that is being served.
            WindowUnknown: its window is unknown.
        """
        window_tokens, error_ratio, count_text = work.window.tokens, work.count.text_error_ratio, work.count_text
        family = work.family
        if not model.is_same:
            window = await self._windows.resolve(model.target)
            family = await self._sources.family(model.target, window)
            window_tokens = window.tokens
            # In the shape of every prompt for it; a list without messages is refused by many templates.
            shape = Request(messages=(user_message(""),))
            error_ratio = (await self._counter.count(model.target.key, family, shape)).error_ratio
            count_text = self._counter.text_counter(model.target.key, family, asker=work.case.target.asker)
        thinking_tokens = answer_tokens if family.reasons else 0
        budget = Budget(
            rules=replace(work.budget.rules, answer_min_tokens=answer_tokens + thinking_tokens),
            window_tokens=window_tokens,
            floor_tokens=0,
            error_ratio=error_ratio,
        )
        limit_tokens = budget.prompt_limit_tokens - _TEMPLATE_TOKENS
        return PromptLimit(limit_tokens, thinking_tokens, count_text, window_tokens)


def why_unusable(error: ModelNotLoaded | WindowUnknown) -> str:
    """Why a pruning model cannot be asked, as one word for events."""
    if isinstance(error, ModelNotLoaded):
        return "pruning_model_not_loaded"
    return "pruning_model_unreachable" if isinstance(error, WindowUnread) else "pruning_model_no_window"


def _shows_everything(base: Compaction | None) -> bool:
    """Whether what was sent shows all that has to be summarized: no stubs, and no gap behind the last summary."""
    return base is None or (base.edited_from is None and base.summarized_messages == base.covered_messages)


def _in_append_mode(
    messages: Sequence[Message], base: Compaction | None, cut: int, job: SummaryJob
) -> tuple[Sequence[Message], tuple[Message, ...]]:
    """The conversation up to `cut` as the server was last sent it, and the same with the instruction behind it."""
    current = apply(messages, base) if base else messages
    prefix = job.strategy.history(current[: len(current) - (len(messages) - cut)])
    earlier: Literal["none", "stays", "goes"]
    earlier = "goes" if job.earlier else "none" if base is None else "stays"
    return prefix, appended(prefix, instruction=job.instruction, earlier=earlier, focus=job.focus)


def _may_answer_freely(request: Request) -> bool:
    """Whether the client's `tool_choice` lets the model answer in words, and its tools can be sent as they came.

    The older `functions` have no `type`; a forced call would be all that comes back.
    """
    has_tools_only = all(isinstance(tool, Mapping) and "type" in tool for tool in request.tools)
    return has_tools_only and request.tool_choice in (None, "auto", "none")


def _job(work: MeasuredRequest, decision: Summarize, covered: Sequence[Message], pinned: tuple[int, ...]) -> SummaryJob:
    base = decision.base
    start = base.summarized_messages if base else 0
    settings = work.case.settings
    strategy = strategy_of(decision.strategy, settings.own_prompt(decision.strategy))
    # A round that stayed with the record is in no summary yet.
    stayed = [at for at in (base.pinned if base else ()) if at < start and covered[at].role != "user"]
    # Of repeated reads the newest says all: the room is better spent on the rest.
    shown = edited(covered, superseded_reads(covered), untouched=pinned)
    shown = [*shown_behind(shown, start, base.begun if base else None)]
    return summary_job(
        [each for at, each in enumerate(shown) if (at >= start or at in stayed) and at not in pinned],
        work,
        earlier=base.summary if base and decision.integrates else "",
        request=request_text(work.conversation.messages),
        summary_tokens=decision.summary_tokens,
        round_number=decision.round,
        strategy=strategy,
    )


def summary_job(
    messages: Sequence[Message],
    work: MeasuredRequest,
    *,
    earlier: str,
    request: str,
    summary_tokens: int,
    round_number: int,
    strategy: Strategy,
) -> SummaryJob:
    """A job, still without the bounds of a model's window.

    Args:
        messages: what the summary will stand for.
        work: on whose behalf.
        earlier: the summary so far that the new one integrates, "" for none.
        request: the request being worked on, of any length, "" for none.
        summary_tokens: bound on the summary.
        round_number: of the compaction that is made, from 1.
        strategy: what to write.
    """
    return SummaryJob(
        messages=strategy.history(messages),
        earlier=earlier,
        request=excerpt(request, _REQUEST_TOKENS, work.count_text),
        summary_tokens=summary_tokens,
        prompt_limit_tokens=0,
        round_number=round_number,
        strategy=strategy,
        focus=work.case.focus,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What came of asking; without a `compaction`, `reason` says why in one word."""

    compaction: Compaction | None
    calls: int
    pruning_model: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What a model is asked; `choices` are positions after the lead, numbered from 1."""

    prompt: str
    choices: list[int]
    answer_tokens: int


class Pruner:
    """Asks pruning models for edit plans; `summary_client` knows how large a prompt each of them takes."""

    def __init__(self, summary_client: SummaryClient) -> None:
        self._summary_client = summary_client

    async def prune(self, work: MeasuredRequest, decision: Prune) -> Pruned:
        """The pruning that the first usable answer gives, still without a ledger.

        Every call takes one from the request's budget (promise P5); a model that fails leaves the turn to the next.
        """
        attempts = work.case.attempts
        calls, asked, reason = 0, "", ""
        for model in work.case.pruning_models:
            if attempts.summary_calls_left <= 0:
                reason = reason or "attempts"
                break
            question = await self._question(work, decision, model)
            if isinstance(question, str):
                reason = question
                continue
            attempts.summary_calls_left -= 1
            calls, asked = calls + 1, model.label
            try:
                compaction = await _answered(work, decision, model, question)
            except SummaryFailed as error:
                reason = error.reason
                if reason in _ANSWERED:
                    break
            else:
                return Pruned(compaction=compaction, calls=calls, pruning_model=asked, reason=reason)
        return Pruned(compaction=None, calls=calls, pruning_model=asked, reason=reason)

    async def _question(self, work: MeasuredRequest, decision: Prune, model: PruningModel) -> _Question | str:
        """What to ask a model, or the reason why it cannot be asked."""
        choices = _choices(work, decision)
        answer_tokens = decision.summary_tokens + plan_tokens(len(choices))
        try:
            limit = await self._summary_client.prompt_limit(work, model, answer_tokens)
        except (ModelNotLoaded, WindowUnknown) as error:
            return why_unusable(error)
        limit_tokens, room_tokens = limit.tokens, answer_tokens + limit.thinking_tokens
        if model.is_same:
            # What is reserved of a shared context for a summary has to do for this, too.
            limit_tokens = min(limit_tokens, work.count.tokens + SUMMARY_EXTRA_TOKENS - room_tokens)

        def ask() -> _Question | None:
            prompt = _prompt(work, decision, choices, limit_tokens, limit.count)
            if not prompt:
                return None
            lead = work.conversation.prefix
            most_tokens = roomy_answer_tokens(
                room_tokens,
                spare_tokens=limit_tokens - limit.count(prompt),
                offered_tokens=sum(work.conversation.sizes[lead + at] for at in choices),
            )
            return _Question(prompt=prompt, choices=choices, answer_tokens=most_tokens)

        return await off_loop(work.conversation.messages, ask) or "small_window"


async def _answered(work: MeasuredRequest, decision: Prune, model: PruningModel, question: _Question) -> Compaction:
    """What a model's answer makes of the conversation.

    Raises:
        SummaryFailed: it gave none, or none that can be used.
    """
    timeout_s = work.case.settings.summary_timeout_s
    answer = await answer_to(question.prompt, model.quiet_ask, max_tokens=question.answer_tokens, timeout_s=timeout_s)
    compaction = await off_loop(work.conversation.messages, lambda: _compaction(work, decision, question, answer))
    if compaction is None:
        raise SummaryFailed("refusal" if is_refusal(answer) else "invalid")
    return compaction


def _choices(work: MeasuredRequest, decision: Prune) -> list[int]:
    return offered(work.conversation.rest, decision.compaction)


def _prompt(
    work: MeasuredRequest, decision: Prune, choices: list[int], limit_tokens: int, count: Callable[[str], int]
) -> str:
    conversation, compaction = work.conversation, decision.compaction
    lead = conversation.prefix
    shown = edited_part(conversation.rest, compaction)
    unanswered = unanswered_calls(conversation.messages)
    offered_now = [(at, shown[at - compaction.replaced_messages]) for at in choices]
    return pruning_prompt(
        prompt=strategy_of(decision.strategy, work.case.settings.own_prompt(decision.strategy)).prompt,
        values={
            "words": max(int(decision.summary_tokens * _WORDS_PER_TOKEN), 40),
            "round": decision.round,
            "current_tokens": decision.now_tokens,
            "target_tokens": decision.predicted_tokens,
            "limit_tokens": work.window.tokens,
        },
        request=excerpt(request_text(conversation.messages), _REQUEST_TOKENS, work.count_text),
        earlier=compaction.omissions,
        focus=work.case.focus,
        messages=[message for _, message in offered_now if message is not None],
        sizes=[
            min(conversation.sizes[lead + at], work.count_text(message.text) + 4) if message.text else 4
            for at, message in offered_now
            if message is not None
        ],
        unanswered=[
            [call.name for call in unanswered.get(lead + at, ())] for at, message in offered_now if message is not None
        ],
        limit_tokens=limit_tokens,
        count=count,
    )


def _compaction(work: MeasuredRequest, decision: Prune, question: _Question, answer: str) -> Compaction | None:
    """What the answer makes of the conversation; None where it is no answer, or changes nothing."""
    base = decision.compaction
    decided = decide(answer, work.conversation.rest, base, question.choices, prompt=question.prompt)
    if decided is None:
        return None
    compaction, summary = decided
    said = "\n\n".join(filter(None, (base.omissions, summary)))
    most_tokens = decision.summary_tokens + decision.carried_tokens
    return replace(compaction, omissions=excerpt(said, most_tokens, work.count_text))
