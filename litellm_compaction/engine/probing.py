"""Asks servers for their own count before doubt decides (promise P1).

That is before a request is compacted, refused, or its answer cut short only because our count may be wrong. Exact at no
cost if the server has a tokenizer to ask, as LM Studio, llama.cpp and vLLM; else by an answer of one token to the very
prompt, which the real request then finds in the server's cache. The counter keeps the number.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from litellm_compaction.concurrency import Bounded, Flights, Rests, off_loop
from litellm_compaction.core.budget import Budget
from litellm_compaction.core.excerpts import common_level
from litellm_compaction.core.messages import (
    Request,
    system_prefix_length,
    user_message,
    with_only_text,
    with_text,
)
from litellm_compaction.core.stretches import without_data
from litellm_compaction.engine.context import MeasuredRequest, PreparedRequest
from litellm_compaction.engine.learning.usage import UsageFeedback, is_whole, surely_fits
from litellm_compaction.engine.measure import RequestMeasurer
from litellm_compaction.engine.sharing.pool import Admission
from litellm_compaction.engine.sharing.reservation import Reservation
from litellm_compaction.errors import CompactionError, Overloaded
from litellm_compaction.tokens.count import holding, least_tokens, most_tokens
from litellm_compaction.tokens.counter import Count, TokenCounter
from litellm_compaction.windows.windows import Windows

logger = logging.getLogger("litellm_compaction")

# Texts that are cut short are counted one by one, which is a little off.
_PART_RATIO, _LEAST_SAMPLE_TOKENS = 0.95, 200
# Each part that is asked for narrows what the whole may take.
_MOST_ROUNDS, _MOST_CUTS = 6, 4
# The server's count is at least this share of ours: for any text, whatever was learned, and for the rest of a prompt
# that it has counted in part, which may be images (the matrix of tests/integration/test_replay.py).
_LEAST_RATIO, _LEAST_REST_RATIO = 0.45, 0.7
# What a number before a text adds to it at most.
_OTHER_TOKENS = 16
# Some servers report no usage for an answer of one token.
# With less doubt than this share of the window, or than the least margin, a question gains nothing.
_LEAST_DOUBT_RATIO = 0.03
_LEAST_DOUBT_TOKENS = 64
# A server that counts 2.6 times as many tokens as its model's vocabulary cuts no less of a prompt (foreign matrix).
_CERTAIN_RATIO = 0.3
# A processor reads 30 tokens a second and more, a graphics card thousands.
_LIMIT_S, _LIMIT_S_PER_TOKEN = 10.0, 0.04
# A server that has not answered a question is not asked again so soon: its next requests would wait for nothing.
_SILENCE_S = 60.0
_MAX_TARGETS, _MAX_NARROWED = 4096, 64


class Prober:
    """Asks servers what they count; a few times for a client request at most."""

    def __init__(
        self,
        *,
        windows: Windows,
        counter: TokenCounter,
        feedback: UsageFeedback,
        measurer: RequestMeasurer,
        admission: Admission,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._windows = windows
        self._counter = counter
        self._feedback = feedback
        self._measurer = measurer
        self._admission = admission
        self._questions: Flights[bool] = Flights()
        self._silent: Rests[str] = Rests(_SILENCE_S, _SILENCE_S, clock)
        # Prompts of which only a part could be asked for, as they were counted then: agents send them again and again.
        self._narrowed: Bounded[tuple[str, int], Count] = Bounded(_MAX_NARROWED)
        self._confirmed = 0
        self._rendered: Bounded[int, bool] = Bounded(_MAX_TARGETS)

    async def settled(self, measured: MeasuredRequest) -> MeasuredRequest:
        """`measured` by the server's own count if that decides: it has to be compacted, or its answer is cut short.

        Otherwise, and if no server answers, `measured` as it is.
        """
        if not _decides(measured.budget.own, measured.count, measured.context.asked_tokens):
            is_told = self._is_worth_a_call(measured) and await self._has_told(
                measured, measured.request, measured.count, is_free=True
            )
            return await self._measurer.again(measured) if is_told else measured
        await self._told(measured, measured.request, measured.count)
        return await self._measurer.again(measured)

    async def counted(self, measured: MeasuredRequest) -> Count:
        """The count of a request, by LM Studio's own if it can be asked; nothing is generated for it."""
        if measured.count.is_told or self._windows.instance(measured.context.target) is None:
            return measured.count
        await self._has_told(measured, measured.request, measured.count, is_free=True)
        return await self._measurer.count_request(measured, measured.request)

    def _is_worth_a_call(self, measured: MeasuredRequest) -> bool:
        """LM Studio is asked although nothing is in doubt: it reads no prompt for its answer.

        Before a compaction, at the first contact with a model that a stand-in counts, and of images.
        """
        count, target = measured.count, measured.context.target
        is_told = count.is_told and count.anchor is not None and count.anchor.is_sure
        if self._windows.instance(target) is None or is_told:
            return False
        # Of a known model only if a window could cut it.
        is_certain = count.exact and count.tokens <= _CERTAIN_RATIO * measured.window.tokens
        is_new = count.anchor is None and not (count.calibrated or is_certain)
        return count.images > 0 or is_new or measured.budget.own.triggers(count.tokens)

    async def fitted(self, measured: MeasuredRequest) -> MeasuredRequest | None:
        """`measured` by the server's own count, if it would be sent as it came and may be cut for all that is known.

        None if it fits in any case, or the server does not say.
        """
        if not _may_be_cut(measured.budget.own, measured.count):
            return None
        await self._told(measured, measured.request, measured.count)
        again = await self._measurer.again(measured)
        return None if _may_be_cut(again.budget.own, again.count) else again

    async def with_floor(self, measured: MeasuredRequest) -> MeasuredRequest | None:
        """`measured` by the count of its floor as a request of its own; None if that is known.

        The server's own if it can be asked, else by its counts of such text: never by the whole prompt's excess.
        """
        if measured.floor_count is not None:
            return None
        request = await off_loop(measured.conversation.messages, lambda: _floor(measured))
        count = await self._measurer.count_request(measured, request)
        count = await self._told(measured, request, count, is_floor=True)
        return self._measurer.with_floor(await self._measurer.again(measured), count)

    async def _told(
        self, measured: MeasuredRequest, request: Request, count: Count, *, is_floor: bool = False
    ) -> Count:
        """The count of a request by the server; by its number for a part of it if all of it may be too long.

        A part that is certainly shorter than the window shows what the server makes of the text and what its template
        leaves out. Whatever is not told stays an estimate. Of a floor, few large messages, the texts are cut short;
        else the part is the beginning.
        """
        key = (measured.context.target.key, count.fingerprint)
        if key in self._narrowed:
            return self._narrowed[key]
        known: list[Count] = []
        for _ in range(_MOST_ROUNDS):
            if count.is_told or await self._has_told(measured, request, count):
                return await self._measurer.count_request(measured, request)
            hopeful_tokens = _hopeful_tokens(count, known)
            if surely_fits(count, measured.window.tokens) or not _certain(measured.budget).fits(hopeful_tokens):
                break
            part = None if is_floor else _beginning_of(measured, request, count)
            is_new = part is not None and not (await self._measurer.count_request(measured, part)).is_told
            if not is_new and (is_floor or not known):
                is_floor = True
                part = await self._shortened(measured, request, count, known)
            if part is None:
                break
            # The part before is in this one.
            counted = holding(await self._measurer.count_request(measured, part), known)
            if not counted.is_told and not await self._has_told(measured, part, counted):
                break
            told = await self._measurer.count_request(measured, part)
            if known and told.raw_tokens <= known[0].raw_tokens:
                break
            known = [told]
            count = holding(await self._measurer.count_request(measured, request), known)
        else:
            # What the last part has narrowed may be asked for as a whole now.
            if await self._has_told(measured, request, count):
                return await self._measurer.count_request(measured, request)
        if known and count.fingerprint:
            self._narrowed[key] = count
        return count

    async def _shortened(
        self, measured: MeasuredRequest, request: Request, count: Count, known: Sequence[Count]
    ) -> Request | None:
        """The most of a request that certainly fits, with `known` parts in it; None if nothing of it does."""
        limit_tokens = _limit_tokens(measured, count)
        for _ in range(_MOST_CUTS):
            part = await off_loop(request.messages, partial(_cut, measured, request, count, limit_tokens))
            if part is None:
                return None
            counted = holding(await self._measurer.count_request(measured, part), known)
            if surely_fits(counted, measured.window.tokens):
                return part
            # Without the beginning that the server has counted there is more doubt.
            limit_tokens = int(_PART_RATIO * limit_tokens * measured.window.tokens / most_tokens(counted))
        return None

    async def has_recounted(self, measured: MeasuredRequest, prepared: PreparedRequest) -> bool:
        """Returns True if the server has counted what a compaction made: in doubt, or free of charge.

        Whatever goes wrong leaves the estimate.
        """
        if prepared.messages is None:
            return False
        request = prepared.sent(measured.request)
        budget, count = prepared.budget, prepared.count
        # If the floor had to be asked about, there is nothing smaller to send.
        is_last = measured.floor_count is not None and not budget.fits(count.tokens)
        is_refused_by_doubt = is_last and _certain(budget).fits(int(least_tokens(count)))
        if is_refused_by_doubt or _may_be_cut(budget, count) or _decides(budget, count, measured.context.asked_tokens):
            await self._told(measured, request, count)
            return True
        if self._windows.instance(measured.context.target) is not None and prepared.count.anchor is None:
            # LM Studio reads no prompt for its answer, and nothing that begins so has been answered yet.
            return await self._has_told(measured, request, prepared.count, is_free=True)
        return False

    async def does_render(self, measured: MeasuredRequest, prepared: PreparedRequest) -> bool:
        """Returns False if LM Studio's template refuses what a compaction leaves, though not what the client has sent.

        Each form is asked about once: a template raises for roles and calls, and their order.
        """
        target, messages = measured.context.target, prepared.messages or ()
        roles = tuple((message.role, bool(message.calls), bool(message.call_id)) for message in messages)
        form = hash((target.key, roles))
        if form not in self._rendered:
            made, came = prepared.sent(measured.request), measured.request
            is_refused = await self._windows.rendered(target, made) is None
            self._rendered[form] = not is_refused or await self._windows.rendered(target, came) is None
        return self._rendered[form]

    async def _has_told(
        self, measured: MeasuredRequest, request: Request, count: Count, *, is_free: bool = False
    ) -> bool:
        """Returns True if the server has said what it counts for exactly this, so that it is counted anew.

        One question for all requests that ask the same at once; with `is_free` none that has it read the prompt.
        """
        key = (measured.context.target.key, count.fingerprint or id(request), is_free)
        return await self._questions.join(key, lambda: self._ask(measured, request, count, is_free=is_free))

    async def _ask(self, measured: MeasuredRequest, request: Request, count: Count, *, is_free: bool) -> bool:
        target, ours = measured.context.target, count
        told, count = await self._told_for_nothing(measured, request, ours)
        if told is not None and self._needs_an_answer(measured, ours, told):
            await self._compare(measured, request, ours)
            told, count = await self._told_for_nothing(measured, request, ours)
        is_confirmed = told is not None
        # Never longer than the window, however wrong our count is: a server may cut it without a word.
        most = most_tokens(count)
        if told is None and not is_free and surely_fits(count, measured.window.tokens):
            told = await self._answered(measured, request, most)
            if told is not None and await self._is_cut(measured, count, told):
                return False
        if told is None:
            return False
        if not self._counter.take_over_exact(target.key, count, told, is_confirmed=is_confirmed):
            told = await self._confirmed_tokens(measured, request, told, most)
            if told is None or not self._counter.take_over_exact(target.key, count, told, is_confirmed=True):
                return False
        self._feedback.keep(target.key)
        return True

    async def _is_cut(self, measured: MeasuredRequest, count: Count, told: int) -> bool:
        """An answer's number is low and the window, read again, smaller: a model that was loaded anew cuts.

        What is sent is then made for the window that was read.
        """
        if not is_whole(count, measured.window.tokens, told):
            return True
        if not measured.context.target.is_listed or not self._counter.may_be_cut(count, told):
            return False
        try:
            return (await self._windows.resolve(measured.context.target, fresh=True)).tokens < measured.window.tokens
        except CompactionError:
            return True

    async def _told_for_nothing(
        self, measured: MeasuredRequest, request: Request, count: Count
    ) -> tuple[int | None, Count]:
        """A request's count by the server's tokenizer, None without one to ask; and the count that learns from it.

        LM Studio's protocol says nothing of images, which cost what answers have taught. Reasoning is counted on top as
        the template shows it. Nothing is learned of either.
        """
        target = measured.context.target
        if not target.is_lmstudio:
            return await self._windows.tokens_of(target, request), count
        reasons = any(message.reasoning for message in request.messages)
        is_sayable = measured.context.measure is not None and (count.rendered or not reasons)
        tokens = None
        if is_sayable and self._counter.told.is_believed(target.key):
            tokens = await self._windows.tokens_of(target, request)
        if tokens is None:
            return None, count
        beside_tokens = round(count.allowance_tokens - count.media_tokens if reasons else count.extras_tokens)
        told = self._counter.told.take(target.key, measured.context.label, count, tokens, beside_tokens)
        return told, count if told is None else replace(count, extras_tokens=beside_tokens + count.media_tokens)

    def _needs_an_answer(self, measured: MeasuredRequest, count: Count, told: int) -> bool:
        """Only an unconfirmed number of LM Studio's protocol, higher than ours, refuses a request."""
        certain, key = _certain(measured.budget), measured.context.target.key
        is_higher = told > count.tokens and certain.fits(int(least_tokens(count))) and not certain.fits(told)
        return is_higher and self._counter.told.is_unconfirmed(key, count)

    async def _compare(self, measured: MeasuredRequest, request: Request, count: Count) -> None:
        """Holds a count by LM Studio's protocol against an answer: to as much of a request as certainly fits.

        Reasoning and extras are left out: templates render them or not.
        """
        messages = tuple(with_only_text(each, each.text) if each.reasoning else each for each in request.messages)
        part = await self._shortened(measured, replace(request, messages=messages, extras={}), count, ())
        if part is None:
            return
        counted = await self._measurer.count_request(measured, part)
        expected, _ = await self._told_for_nothing(measured, part, counted)
        if expected is None or expected + _OTHER_TOKENS > measured.window.tokens:
            return
        if (told := await self._answered(measured, part, most_tokens(counted))) is not None:
            self._counter.take_over_exact(measured.context.target.key, counted, told)

    async def _confirmed_tokens(self, measured: MeasuredRequest, request: Request, told: int, most: int) -> int | None:
        """A number far below ours, or the one without what the server had in its cache; None if it does not say.

        A template may leave out calls and their results. A server that leaves out what it had in its cache says more if
        the prompt begins in another way.
        """
        if most + _OTHER_TOKENS > measured.window.tokens:
            return None
        self._confirmed += 1
        first, *rest = request.messages
        other = replace(request, messages=(with_text(first, f"{self._confirmed} {first.text}"), *rest))
        again = await self._answered(measured, other, most + _OTHER_TOKENS)
        if again is None or again < told:
            return None
        return told if again <= told + _OTHER_TOKENS else again

    async def _answered(self, measured: MeasuredRequest, request: Request, most_tokens: int) -> int | None:
        """The server's count in an answer of one token; None if it may not be asked, or tells none."""
        context, key = measured.context, measured.context.target.key
        if context.measure is None or context.attempts.questions_left < 1 or not self._silent.is_over(key):
            return None
        context.attempts.questions_left -= 1
        room = Reservation(self._admission, context)
        try:
            # A request that holds room already asks in it: it would wait for itself.
            if not context.attempts.seats:
                await room.acquire_for_question(measured.window, most_tokens)
            limit_s = min(_LIMIT_S + _LIMIT_S_PER_TOKEN * most_tokens, context.settings.summary_timeout_s)
            told = await asyncio.wait_for(context.measure(request), limit_s)
        except (asyncio.TimeoutError, Overloaded):
            told = None
        finally:
            room.release()
        if told is None:
            logger.debug("question model=%s unanswered", context.label)
            self._silent.begin(key)
        return told


def _certain(budget: Budget) -> Budget:
    """The budget if the count were exact."""
    return replace(budget, error_ratio=0.0, own_error_ratio=None)


def _may_be_cut(budget: Budget, count: Count) -> bool:
    """A prompt that fits by our count may be longer than the window: nothing has confirmed it."""
    return budget.fits(count.tokens) and most_tokens(count) + budget.rules.answer_min_tokens > budget.window_tokens


def _decides(budget: Budget, count: Count, asked_tokens: int | None) -> bool:
    """The exact number of a prompt may change what is done with it, by more than a question is worth."""
    least, most = int(least_tokens(count)), most_tokens(count)
    certain, window = _certain(budget), budget.window_tokens
    worth_tokens = max(_LEAST_DOUBT_TOKENS, _LEAST_DOUBT_RATIO * window)
    if most - least < worth_tokens:
        # Doubt so small compacts a little early; it must not refuse.
        return not budget.fits(count.tokens) and certain.fits(least)
    if budget.triggers(count.tokens):
        return not certain.triggers(least)
    if asked_tokens is None or asked_tokens < 0 or asked_tokens > certain.max_output_tokens(least, None):
        # Doubt does not cut short a wish that the window cannot grant in any case.
        asked_tokens = budget.output_buffer_tokens(count.tokens)
    best_tokens = certain.max_output_tokens(least, asked_tokens)
    return best_tokens - budget.max_output_tokens(count.tokens, asked_tokens) > worth_tokens


def _hopeful_tokens(count: Count, known: Sequence[Count]) -> int:
    """The least tokens of a prompt; lessons alone refuse nothing.

    `known` is the server's count of its largest part; empty if nothing of it is known.
    """
    for part in known:
        return int(part.tokens * (1 + _LEAST_REST_RATIO * max(0.0, count.raw_tokens / part.raw_tokens - 1)))
    return int(count.tokens * _LEAST_RATIO)


def _floor(measured: MeasuredRequest) -> Request:
    messages = measured.request.messages
    cut = measured.conversation.latest_cut
    kept = tuple(
        without_data(messages[index]) if index < cut else messages[index]
        for index in sorted(measured.conversation.protected)
    )
    prefix = system_prefix_length(kept)
    if len(kept) == prefix or kept[prefix].role != "user":
        # Templates want the user's word first; so does what a compaction makes.
        kept = (*kept[:prefix], user_message("."), *kept[prefix:])
    return replace(measured.request, messages=kept)


def _beginning_of(measured: MeasuredRequest, request: Request, count: Count) -> Request | None:
    """The longest beginning that is a valid request and certainly fits; None if that is too short to say much.

    The real request then finds it in the server's cache.
    """
    messages, limit_tokens = request.messages, _limit_tokens(measured, count)
    tokens, found, found_tokens = count.overhead_tokens + count.tools_tokens, 0, 0
    for index, size in enumerate(count.sizes):
        tokens += size
        if tokens > limit_tokens:
            break
        following = messages[index + 1].role if index + 1 < len(messages) else ""
        if messages[index].role in ("user", "tool") and following != "tool":
            found, found_tokens = index + 1, tokens
    if found in (0, len(messages)) or found_tokens < max(_LEAST_SAMPLE_TOKENS, limit_tokens // 4):
        return None
    return replace(request, messages=messages[:found])


def _cut(measured: MeasuredRequest, request: Request, count: Count, limit_tokens: int) -> Request | None:
    """A request of so many tokens, its texts cut to one common length; None if that leaves little of them."""
    if request.extras and count.extras_tokens > limit_tokens // 2:
        return replace(request, extras={})
    texts = ["".join((message.text, *(call.arguments for call in message.calls))) for message in request.messages]
    texts_tokens = list(map(measured.count_text, texts))
    room_tokens = sum(texts_tokens) - (count.tokens - limit_tokens)
    level_tokens = common_level(texts_tokens, [1] * len(texts_tokens), room_tokens)
    if level_tokens < _LEAST_DOUBT_TOKENS:
        return None
    return replace(
        request,
        messages=tuple(
            message if tokens <= level_tokens else with_only_text(message, _beginning(text, level_tokens, measured))
            for message, text, tokens in zip(request.messages, texts, texts_tokens, strict=True)
        ),
    )


def _limit_tokens(measured: MeasuredRequest, count: Count) -> int:
    """The tokens by our count with which a part of a request is certainly shorter than the window."""
    return int(_PART_RATIO * measured.window.tokens * count.tokens / most_tokens(count))


def _beginning(text: str, limit_tokens: int, measured: MeasuredRequest) -> str:
    while text and (tokens := measured.count_text(text)) > limit_tokens:
        text = text[: min(len(text) * max(limit_tokens, 0) // tokens, len(text) - 1)]
    return text
