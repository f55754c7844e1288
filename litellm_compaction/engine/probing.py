"""The server's own count, asked for before doubt decides: before a request is compacted, refused, or its answer cut
short only because our count may be wrong (promise P1).

Asked by the compactor. Exact at no cost where the server has a tokenizer to ask, as LM Studio, llama.cpp and vLLM; else
by an answer of one token to the very prompt, which the real request then finds in the server's cache. What is told
stays with the counter, so that the next turns of a conversation need no question.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from litellm_compaction.concurrency import Bounded, Flights
from litellm_compaction.core.budget import Budget
from litellm_compaction.core.cut_points import latest_cut, protected_indices
from litellm_compaction.core.messages import Message, Request, system_prefix_length, user_message, with_text
from litellm_compaction.core.stretches import without_data
from litellm_compaction.engine.admission import Reservation
from litellm_compaction.engine.cache_reports import CacheReports
from litellm_compaction.engine.context import MeasuredRequest, PreparedRequest
from litellm_compaction.engine.feedback import UsageFeedback, truncation
from litellm_compaction.engine.measure import RequestMeasurer
from litellm_compaction.engine.threads import off_loop
from litellm_compaction.errors import Overloaded
from litellm_compaction.tokens.count import holding, least_tokens
from litellm_compaction.tokens.counter import Count, TokenCounter
from litellm_compaction.windows.windows import Windows

logger = logging.getLogger("litellm_compaction")

# A sample takes at most this share of the window, even if it counts as high as it can: it must never be cut.
_SAMPLE_WINDOW_RATIO = 0.8
_LEAST_SAMPLE_TOKENS = 200
# Of the window: smaller texts leave little in doubt.
_LEAST_PART_RATIO = 0.05
_MOST_PARTS, _MOST_PIECES = 4, 64
# What a number before a text adds to it at most.
_OTHER_TOKENS = 16
# What the server has counted is as sure as this.
_SURE_RATIO = 0.03
# Some servers report no usage for an answer of one token.
_RECOUNT_ANSWER_TOKENS = 16
# With less doubt than this share of the window, or than the least margin, a question gains nothing.
_LEAST_DOUBT_RATIO = 0.03
_LEAST_DOUBT_TOKENS = 64
# A processor reads 30 tokens a second and more, a graphics card thousands.
_LIMIT_S, _LIMIT_S_PER_TOKEN = 10.0, 0.04
# A server that has not answered a question is not asked again so soon: its next requests would wait for nothing.
_SILENCE_S = 60.0
_MAX_TARGETS = 4096


class Prober:
    """Asks servers what they count; a few times for a client request at most.

    Args:
        windows: know which servers have a tokenizer to ask.
        counter: believes what is told.
        feedback: keep it.
        measurer: count what is asked about.
        reports: is told what goes to a server.
        room: makes the place of a question beside the others that share a context.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        windows: Windows,
        counter: TokenCounter,
        feedback: UsageFeedback,
        measurer: RequestMeasurer,
        reports: CacheReports,
        room: Callable[[MeasuredRequest], Reservation],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._windows = windows
        self._counter = counter
        self._feedback = feedback
        self._measurer = measurer
        self._reports = reports
        self._room = room
        self._clock = clock
        self._questions: Flights[bool] = Flights()
        self._silent_until_s: Bounded[str, float] = Bounded(_MAX_TARGETS)
        self._confirmed = 0

    async def settled(self, work: MeasuredRequest) -> MeasuredRequest:
        """`work` by the server's own count where that decides: it has to be compacted, or its answer is cut short.

        Otherwise, and where nobody answers, `work` as it is.
        """
        if not _decides(work.budget.own, work.count, work.case.asked_tokens):
            is_told = self._is_worth_a_call(work) and await self._has_told(work, work.request, work.count, is_free=True)
            return await self._measurer.again(work) if is_told else work
        if await self._has_told(work, work.request, work.count):
            return await self._measurer.again(work)
        beginning = _beginning_of(work)
        if beginning is not None:
            if not await self._has_told(work, beginning, await self._measurer.count_request(work, beginning)):
                return work
            work = await self._measurer.again(work)
            if not _decides(work.budget.own, work.count, work.case.asked_tokens):
                return work
        count = await self._narrowed(work, work.request, work.count)
        is_told = await self._has_told(work, work.request, count)
        return await self._measurer.again(work) if is_told else work

    def _is_worth_a_call(self, work: MeasuredRequest) -> bool:
        """Whether LM Studio is asked although nothing is in doubt: it reads no prompt for its answer.

        Before a compaction, and at the first contact with a model that a stand-in counts.
        """
        count = work.count
        if self._windows.instance(work.case.target) is None or _is_exactly_told(count):
            return False
        is_new = count.anchor is None and not (count.exact or count.calibrated)
        return is_new or work.budget.own.triggers(count.tokens)

    async def with_floor(self, work: MeasuredRequest, *, is_needed: bool = False) -> MeasuredRequest | None:
        """`work` by the server's own count of what no compaction can shrink, where that may make it fit; else None.

        Args:
            work: the request.
            is_needed: it fits by the estimate, but what was made of it does not.
        """
        budget = work.budget
        messages = work.conversation.messages
        if work.floor_count is not None:
            return None
        if not _certain(budget).fits(await off_loop(messages, lambda: _least_floor(work))):
            return None
        if budget.fits(budget.floor_tokens) and not is_needed:
            return None
        request = await off_loop(messages, lambda: _floor(work))
        count = await self._narrowed(work, request, await self._measurer.count_request(work, request))
        if await self._has_told(work, request, count):
            count = await self._measurer.count_request(work, request)
        elif (excess_tokens := _most_tokens(count) - work.window.tokens) > 0:
            count = await self._without_excess(work, request, count, excess_tokens)
            if _most_tokens(count) <= work.window.tokens and await self._has_told(work, request, count):
                count = await self._measurer.count_request(work, request)
        return self._measurer.with_floor(await self._measurer.again(work), count)

    async def _without_excess(self, work: MeasuredRequest, request: Request, count: Count, excess_tokens: int) -> Count:
        """The count of a request that may be longer than the window, by the server's number for most of it.

        Without the end of its largest text it is not, and shows what the template makes of it: some leave out system
        messages, what is said beside calls, or calls and results altogether.
        """
        shorter = _shortened(work, request, excess_tokens)
        if shorter is None:
            return count
        counted = await self._measurer.count_request(work, shorter)
        bounded = replace(counted, tokens=min(_most_tokens(counted), work.window.tokens) - 1, error_ratio=0.0)
        if not await self._has_told(work, shorter, bounded):
            return count
        return holding(count, [await self._measurer.count_request(work, shorter)])

    async def _narrowed(self, work: MeasuredRequest, request: Request, count: Count) -> Count:
        """The count of a request that might not fit, by what the server says of its tools and largest texts.

        Those are the same in all of a conversation, and asked for once. Whatever is not told stays an estimate.
        """
        known: list[Count] = []
        narrowed = count
        for part in _parts(work, request):
            if _most_tokens(narrowed) <= work.window.tokens:
                break
            counted = await self._measurer.count_request(work, part)
            if counted.error_ratio > _SURE_RATIO:
                if not await self._has_told(work, part, counted):
                    continue
                counted = await self._measurer.count_request(work, part)
            if counted.error_ratio > _SURE_RATIO:
                continue
            known.append(counted)
            narrowed = holding(count, known)
        return narrowed

    async def has_recounted(self, work: MeasuredRequest, guarded: PreparedRequest) -> bool:
        """Whether the server has counted what a compaction made: where doubt would drop it, or the operator wants it.

        What is wanted (`count: probe`) costs one of the request's summary calls (promise P5) and an answer of 16
        tokens. Whatever goes wrong leaves the estimate.
        """
        if guarded.messages is None:
            return False
        request = replace(work.request, messages=guarded.messages)
        if _decides(guarded.budget, guarded.count, work.case.asked_tokens):
            return await self._has_told(work, request, guarded.count)
        attempts = work.case.attempts
        if guarded.action != "compacted" or work.case.settings.count != "probe" or work.case.measure is None:
            return False
        if not attempts.may_recount or attempts.summary_calls_left < 1 or not guarded.budget.fits(guarded.count.tokens):
            return False
        attempts.may_recount = False
        attempts.summary_calls_left -= 1
        self._reports.asking(work.case.target)
        prompt_tokens = await work.case.measure(request, answer_tokens=_RECOUNT_ANSWER_TOKENS)
        if prompt_tokens is None or truncation(guarded, prompt_tokens, 1, self._counter):
            return False
        self._feedback.learn(work.case.target.key, work.case.label, guarded.count, prompt_tokens)
        return True

    async def _has_told(self, work: MeasuredRequest, request: Request, count: Count, *, is_free: bool = False) -> bool:
        """Whether the server has said what it counts for exactly this, so that it is counted anew.

        One question for all who ask the same at the same time; with `is_free` none that has it read the prompt.
        """
        key = (work.case.target.key, count.fingerprint or id(request), is_free)
        return await self._questions.join(key, lambda: self._ask(work, request, count, is_free=is_free))

    async def _ask(self, work: MeasuredRequest, request: Request, count: Count, *, is_free: bool) -> bool:
        target = work.case.target
        told, count = await self._told_for_nothing(work, request, count)
        is_confirmed = told is not None
        # Never longer than the window, however wrong our count is: a server may cut it without a word.
        most_tokens = _most_tokens(count)
        if told is None and not is_free and most_tokens <= work.window.tokens:
            told = await self._answered(work, request, most_tokens)
        if told is None:
            return False
        if not self._counter.take_over_exact(target.key, count, told, is_confirmed=is_confirmed):
            is_confirmed = await self._is_whole(work, request, told, most_tokens)
            if not is_confirmed or not self._counter.take_over_exact(target.key, count, told, is_confirmed=True):
                return False
        if not work.case.is_supposed:
            self._feedback.keep(target.key)
        return True

    async def _told_for_nothing(
        self, work: MeasuredRequest, request: Request, count: Count
    ) -> tuple[int | None, Count]:
        """What the server's tokenizer says of a request, None where there is none to ask; and what learns from it.

        LM Studio's protocol says nothing of images: an answer tells all. Reasoning is counted on top as the template
        shows it, and nothing is learned of it.
        """
        target = work.case.target
        if not target.is_lmstudio:
            return await self._windows.tokens_of(target, request), count
        reasons = any(message.reasoning for message in request.messages)
        if work.case.measure is None or count.media_tokens or (reasons and not count.rendered):
            return None, count
        beside_tokens = count.allowance_tokens if reasons else count.extras_tokens
        told = await self._windows.tokens_of(target, request, 0 if beside_tokens else count.fingerprint)
        if told is None or not beside_tokens:
            return told, count
        return told + round(beside_tokens), replace(count, extras_tokens=beside_tokens)

    async def _is_whole(self, work: MeasuredRequest, request: Request, told: int, most_tokens: int) -> bool:
        """Whether a number far below ours is of all of a prompt: a template may leave out calls and their results.

        A server that leaves out what it had in its cache says more where the user's word begins in another way.
        """
        first = next((index for index, message in enumerate(request.messages) if message.role == "user"), None)
        if first is None or most_tokens + _OTHER_TOKENS > work.window.tokens:
            return False
        self._confirmed += 1
        messages = list(request.messages)
        messages[first] = with_text(messages[first], f"{self._confirmed} {messages[first].text}")
        other = replace(request, messages=tuple(messages))
        again = await self._answered(work, other, most_tokens + _OTHER_TOKENS)
        return again is not None and told <= again <= told + _OTHER_TOKENS

    async def _answered(self, work: MeasuredRequest, request: Request, most_tokens: int) -> int | None:
        """What the server reports for an answer of one token; None where it may not be asked, or says nothing."""
        case, key = work.case, work.case.target.key
        silent_until_s = self._silent_until_s.get(key, 0.0)
        if case.measure is None or case.attempts.questions_left < 1 or self._clock() < silent_until_s:
            return None
        case.attempts.questions_left -= 1
        room = self._room(work)
        try:
            # A request that holds room already asks in it: it would wait for itself.
            if not case.attempts.seats:
                await room.take_for_question(work.window, most_tokens)
            self._reports.asking(case.target)
            limit_s = min(_LIMIT_S + _LIMIT_S_PER_TOKEN * most_tokens, case.settings.summary_timeout_s)
            told = await asyncio.wait_for(case.measure(request), limit_s)
        except (asyncio.TimeoutError, Overloaded):
            told = None
        finally:
            room.leave()
        if told is None:
            logger.debug("question model=%s unanswered", case.label)
            self._silent_until_s[key] = self._clock() + _SILENCE_S
        return told


def _most_tokens(count: Count) -> int:
    """What a prompt takes at most, with an answer of one token."""
    return int(count.tokens * (1 + count.error_ratio)) + 1


def _is_exactly_told(count: Count) -> bool:
    """Whether the server was asked for the very prompt."""
    anchor = count.anchor
    return anchor is not None and anchor.is_sure and anchor.raw_tokens == count.raw_tokens


def _certain(budget: Budget) -> Budget:
    """The budget if the count were exact."""
    return replace(budget, error_ratio=0.0, own_error_ratio=None)


def _decides(budget: Budget, count: Count, asked_tokens: int | None) -> bool:
    """Whether the exact number of a prompt may change what is done with it, by more than a question is worth."""
    least = int(least_tokens(count))
    window = budget.window_tokens
    worth_tokens = max(_LEAST_DOUBT_TOKENS, _LEAST_DOUBT_RATIO * window)
    if count.tokens * (1 + count.error_ratio) - least < worth_tokens:
        # Doubt so small compacts a little early; it must not refuse.
        return not budget.fits(count.tokens) and _certain(budget).fits(least)
    if budget.triggers(count.tokens):
        return not _certain(budget).triggers(least)
    if asked_tokens is None or asked_tokens < 0 or asked_tokens > _certain(budget).max_output_tokens(least, None):
        # What the window cannot give in any case is no wish that doubt cuts short.
        asked_tokens = budget.output_buffer_tokens(count.tokens)
    best_tokens = _certain(budget).max_output_tokens(least, asked_tokens)
    return best_tokens - budget.max_output_tokens(count.tokens, asked_tokens) > worth_tokens


def _least_floor(work: MeasuredRequest) -> int:
    """What the floor takes at least; tools that are only estimated may take nothing.

    Nor may system messages before another end than the user's word, in a template that nobody knows.
    """
    count, conversation = work.count, work.conversation
    ratio = min(1.0, least_tokens(count) / max(1, count.tokens))
    certain = replace(count, anchor=None)
    ratio = min(ratio, least_tokens(certain) / max(1, count.tokens))
    lead_tokens = count.lead_tokens if count.role != "user" else 0
    return int(ratio * (conversation.floor_tokens - lead_tokens))


def _floor(work: MeasuredRequest) -> Request:
    """What no compaction can shrink, as a request of its own."""
    messages = work.request.messages
    cut = latest_cut(messages)
    kept = tuple(
        without_data(messages[index]) if index < cut else messages[index]
        for index in sorted(protected_indices(messages))
    )
    lead = system_prefix_length(kept)
    if len(kept) == lead or kept[lead].role != "user":
        # Templates want the user's word first; so does what a compaction makes.
        kept = (*kept[:lead], user_message("."), *kept[lead:])
    return replace(work.request, messages=kept)


def _parts(work: MeasuredRequest, request: Request) -> list[Request]:
    """The tools and the largest texts of a request, in pieces that certainly fit, each as a request of its own.

    With a system message where the request has one: without it some templates add one of 500 tokens and more.
    """
    lead = tuple(
        with_text(message, ".") for message in request.messages[: min(1, system_prefix_length(request.messages))]
    )
    limit_tokens = int(_SAMPLE_WINDOW_RATIO * work.window.tokens / (1 + work.budget.error_ratio))
    least_tokens = int(_LEAST_PART_RATIO * work.window.tokens)
    texts = {text for message in request.messages for text in _texts(message)}
    pieces: list[tuple[int, str]] = []
    for text in texts:
        rest = text
        while rest and len(pieces) < _MOST_PIECES and work.count_text(rest) >= least_tokens:
            piece = _beginning(rest, limit_tokens, work)
            if not piece:
                break
            pieces.append((work.count_text(piece), piece))
            rest = rest[len(piece) :]
    largest = sorted(pieces, key=lambda piece: -piece[0])[:_MOST_PARTS]
    parts = [Request(messages=(*lead, user_message(piece))) for _, piece in largest]
    if request.tools:
        parts.insert(0, replace(request, messages=(*lead, user_message("."))))
    return parts


def _shortened(work: MeasuredRequest, request: Request, excess_tokens: int) -> Request | None:
    """The request with so much less in its largest text that it certainly is shorter by `excess_tokens`; or None."""
    messages = request.messages
    largest = max(range(len(messages)), key=lambda index: len(messages[index].text))
    text = messages[largest].text
    text_tokens = work.count_text(text)
    # Of what is left out, our own count may be twice the server's.
    kept_tokens = text_tokens - 2 * excess_tokens - _LEAST_DOUBT_TOKENS
    if kept_tokens <= 0:
        return None
    kept = with_text(messages[largest], _beginning(text, kept_tokens, work))
    return replace(request, messages=(*messages[:largest], kept, *messages[largest + 1 :]))


def _texts(message: Message) -> tuple[str, ...]:
    return (message.text, *(call.arguments for call in message.calls))


def _beginning_of(work: MeasuredRequest) -> Request | None:
    """The longest beginning that is a valid request and certainly fits; None where that is too short to say much."""
    messages, count = work.request.messages, work.count
    most_tokens = (work.window.tokens - 1) / (1 + work.budget.error_ratio)
    tokens = count.overhead_tokens + count.tools_tokens
    found = 0
    for index, size in enumerate(count.sizes):
        tokens += size
        if tokens > most_tokens:
            break
        following = messages[index + 1].role if index + 1 < len(messages) else ""
        if messages[index].role in ("user", "tool") and following != "tool":
            found, found_tokens = index + 1, tokens
    if not found or found == len(messages) or found_tokens < max(_LEAST_SAMPLE_TOKENS, most_tokens // 4):
        return None
    return replace(work.request, messages=messages[:found])


def _beginning(text: str, limit_tokens: int, work: MeasuredRequest) -> str:
    while text and (tokens := work.count_text(text)) > limit_tokens:
        text = text[: min(len(text) * max(limit_tokens, 0) // tokens, len(text) - 1)]
    return text
