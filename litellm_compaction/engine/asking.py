"""Asks servers for their own count if the two ends of an estimate decide otherwise (promise P1).

That is before a request is compacted, refused, or its answer cut short only because our count may be wrong. It costs
nothing if the server has a tokenizer to ask, as LM Studio, llama.cpp and vLLM; else an answer of one token to the very
prompt, which the real request then finds in the server's cache. The counter keeps the number.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from litellm_compaction.concurrency import Bounded, Flights, Rests, off_loop
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS, Budget
from litellm_compaction.core.cuts import common_level
from litellm_compaction.core.forms import without_data
from litellm_compaction.core.messages import Request, system_prefix_length, user_message, with_only_text
from litellm_compaction.engine.context import MeasuredRequest, PreparedRequest
from litellm_compaction.engine.measure import RequestMeasurer
from litellm_compaction.engine.replies import is_whole, surely_fits, window_tokens_now
from litellm_compaction.engine.sharing.admission import Admission
from litellm_compaction.engine.sharing.reservation import Reservation
from litellm_compaction.errors import Overloaded
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.windows.windows import Windows

logger = logging.getLogger("litellm_compaction")

# A question about the whole prompt needs so many about parts of it at most, each cut to fit in so many tries.
_MOST_PARTS, _MOST_CUTS = 2, 3
# Less more of a request says nothing new of the rest; sizes of parts are in proportion, which is a little off.
_WORTH_RATIO, _PART_RATIO = 1.1, 0.95
# A request is refused only if so little of the least that we expect is too long: lessons alone refuse nothing.
_HOPELESS_RATIO = 0.6
# With less doubt than this share of the window, or than the least margin, a question gains nothing.
_LEAST_DOUBT_RATIO = 0.03
# A processor reads 30 tokens a second and more, a graphics card thousands.
_LIMIT_S, _LIMIT_S_PER_TOKEN = 10.0, 0.04
# A server that has not answered a question is not asked again so soon: its next requests would wait for nothing.
_SILENCE_S = 60.0
_MAX_FORMS, _MAX_PARTS = 4096, 64
# A shorter part says too little of the rest.
_LEAST_TOKENS, _LEAST_SHARE = 200, 4

_IsOpen: TypeAlias = Callable[[Estimate], bool]
_Way: TypeAlias = Callable[[MeasuredRequest, Request, Estimate], Coroutine[Any, Any, bool]]


class Asker:
    """Asks servers what they count; a few times for a client request at most."""

    def __init__(
        self,
        *,
        windows: Windows,
        counter: TokenCounter,
        measurer: RequestMeasurer,
        admission: Admission,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._windows = windows
        self._counter = counter
        self._measurer = measurer
        self._admission = admission
        self._questions: Flights[bool] = Flights()
        self._silent: Rests[str] = Rests(_SILENCE_S, _SILENCE_S, clock)
        # By prompts of which only a part could be asked for: agents send them again and again.
        self._parts: Bounded[tuple[str, int], Estimate] = Bounded(_MAX_PARTS)
        self._rendered: Bounded[int, bool] = Bounded(_MAX_FORMS)

    async def settled(self, measured: MeasuredRequest) -> MeasuredRequest:
        """`measured` by the server's own count if that decides: it has to be compacted, or its answer is cut short.

        If it has to be compacted in any case, by one that costs nothing; otherwise, and if no server answers, as it is.
        """
        count, budget = measured.count, measured.budget
        is_open = partial(_decides, budget, measured.context.asked_tokens)
        if is_open(count):
            return self._measurer.by(measured, await self._told(measured, measured.request, count, is_open))
        return self._measurer.by(measured, await self.counted(measured) if budget.own.triggers(count.tokens) else count)

    async def counted(self, measured: MeasuredRequest) -> Estimate:
        """The count of a request, by the server's own if it can be asked; nothing is generated for it."""
        return await self._asked(measured, measured.request, measured.count, _always, self._told_freely)

    async def fitted(self, measured: MeasuredRequest) -> MeasuredRequest | None:
        """`measured` by the server's own count, if it would be sent as it came and may be cut for all that is known.

        None if it fits in any case, or the server does not say.
        """
        is_open = partial(_may_be_cut, measured.budget)
        if not is_open(measured.count):
            return None
        again = self._measurer.by(measured, await self._told(measured, measured.request, measured.count, is_open))
        return None if _may_be_cut(again.budget, again.count) else again

    async def with_floor(self, measured: MeasuredRequest) -> MeasuredRequest | None:
        """`measured` by the count of its floor as a request of its own; None if that is known.

        A refusal asks first: by the whole prompt's excess alone nothing is refused.
        """
        if measured.floor_count is not None:
            return None
        request = await off_loop(measured.conversation.messages, lambda: floor_of(measured))
        certain = _certain(measured.budget)
        count = await self._told(
            measured,
            request,
            await self._measurer.count_request(measured, request),
            # A protocol that no answer has confirmed refuses nothing.
            lambda count: not count.is_counted or not certain.fits(count.high),
        )
        return self._measurer.with_floor(await self._measurer.again(measured), count)

    async def has_recounted(self, measured: MeasuredRequest, prepared: PreparedRequest) -> bool:
        """Returns True if the server was asked for its count of what a compaction made."""
        if prepared.messages is None:
            return False
        request, budget, count = prepared.sent(measured.request), prepared.budget, prepared.count

        def is_open(count: Estimate) -> bool:
            return _may_be_cut(budget, count) or _decides(budget, measured.context.asked_tokens, count)

        if is_open(count):
            await self._told(measured, request, count, is_open)
            return True
        return await self._asked(measured, request, count, _always, self._told_freely) is not count

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

    async def _told(self, measured: MeasuredRequest, request: Request, count: Estimate, is_open: _IsOpen) -> Estimate:
        """The count of a request by the server; by its number for a part of it if all of it may be too long.

        A part that is certainly shorter than the window shows what the server makes of the text and what its template
        leaves out. Whatever is not told stays an estimate; nothing is asked that is no longer `is_open`.
        """
        key = (measured.context.target.key, count.fingerprint)
        part = self._parts.get(key)
        count = count.with_part(part) if part is not None else count
        for _ in range(_MOST_PARTS + 1):
            count = await self._asked(measured, request, count, is_open, self._told_freely, self._told_by_answer)
            # A part says how long a summary's prompt may be, as long as no number of the server is known.
            least_tokens = int(count.low * _HOPELESS_RATIO)
            is_hopeless = count.text.is_confirmed and not _certain(measured.budget).fits(least_tokens)
            if count.is_told or not is_open(count) or surely_fits(count, measured.window.tokens) or is_hopeless:
                return count
            part = await self._told_part(measured, request, count, part)
            if part is None:
                return count
            self._parts[key] = part
            count = (await self._measurer.count_request(measured, request)).with_part(part)
        return count

    async def _asked(
        self, measured: MeasuredRequest, request: Request, count: Estimate, is_open: _IsOpen, *ways: _Way
    ) -> Estimate:
        """The count of a request after it was asked for by each of `ways`, until the server has told it.

        As it is where a request may not ask: its server may still be writing the answer that goes on.
        """
        for way in ways:
            if measured.context.measure is None or count.is_told or not is_open(count):
                break
            # One question for all requests that ask the same at once: what they then decide is the same, too.
            key = (measured.context.target.key, count.fingerprint or id(request), way.__name__)
            if await self._questions.join(key, partial(way, measured, request, count)):
                count = await self._measurer.count_request(measured, request)
        return count

    async def _told_part(
        self, measured: MeasuredRequest, request: Request, count: Estimate, before: Estimate | None
    ) -> Estimate | None:
        """The server's count of the beginning of a request, or of all of it with its texts cut short, that surely fits.

        Of more than the part `before`, which it holds; None if there is no such part, or the server does not answer.
        """
        limit_tokens = int(_PART_RATIO * measured.window.tokens * count.tokens / max(count.high, 1))
        part = beginning_of(request, count, limit_tokens)
        is_priced = count.rates[1].is_confirmed or not count.own.images
        if part is not None and not (is_priced or any(message.other_parts for message in part.messages)):
            # It would say nothing of images whose price nobody knows.
            part = None
        for _ in range(_MOST_CUTS):
            part = part or await off_loop(request.messages, partial(cut, measured, request, count, limit_tokens))
            if part is None:
                return None
            counted = await self._measurer.count_request(measured, part)
            if before is not None:
                if counted.own.tokens < _WORTH_RATIO * before.own.tokens:
                    return None
                counted = counted.with_part(before)
            if surely_fits(counted, measured.window.tokens):
                counted = await self._asked(measured, part, counted, _always, self._told_freely, self._told_by_answer)
                return counted if counted.is_counted else None
            limit_tokens = int(_PART_RATIO * limit_tokens * measured.window.tokens / counted.high)
            part = None
        return None

    async def _told_freely(self, measured: MeasuredRequest, request: Request, count: Estimate) -> bool:
        """Returns True if the server's tokenizer has counted a request, and the counter has learned it.

        LM Studio's protocol says nothing of images, which cost what answers have taught, nor of reasoning and extras,
        which are added as the template shows them.
        """
        target, own, protocol = measured.context.target, count.own, self._counter.protocol
        reasons, price = any(message.reasoning for message in request.messages), count.rates[1]
        if target.is_lmstudio:
            is_sayable = (own.rendered or not reasons) and (price.is_confirmed or not own.images)
            told = count.told if count.is_counted else None
            # An answer to another prompt may have confirmed the protocol since.
            is_known = told is not None and told.doubt_tokens <= protocol.doubt_tokens(target.key, told.tokens)
            if is_known or not (count.fingerprint and is_sayable and protocol.is_believed(target.key)):
                return False
        tokens = await self._windows.tokens_of(target, request)
        if tokens is None or not target.is_lmstudio:
            return tokens is not None and self._counter.take_over(target.key, count, tokens)
        beside = own.amounts.media * price.usual + (own.optional_tokens if reasons or request.extras else 0.0)
        self._counter.take_protocols(target.key, count, tokens + round(beside), is_whole=not beside)
        return True

    async def _told_by_answer(self, measured: MeasuredRequest, request: Request, count: Estimate) -> bool:
        """Returns True if the counter has learned a request's number from an answer of one token."""
        context, key = measured.context, measured.context.target.key
        # Never longer than the window, however wrong our count is: a server may cut it without a word. The window may
        # have been read anew for an earlier question.
        window_tokens = min(measured.window.tokens, await window_tokens_now(self._windows, context.target, fresh=False))
        may_ask = context.attempts.questions_left > 0 and self._silent.is_over(key)
        if not may_ask or not surely_fits(count, window_tokens):
            return False
        context.attempts.questions_left -= 1
        told = await self._answer(measured, request, count.high)
        if told is None:
            logger.debug("question model=%s unanswered", context.label)
            self._silent.begin(key)
            return False
        if context.target.is_listed and self._counter.may_be_cut(count, told):
            # A model that was loaded anew with a smaller window cuts, and what is sent is then made for that.
            window_tokens = await window_tokens_now(self._windows, context.target)
        return is_whole(count, window_tokens, told) and self._counter.take_over(key, count, told)

    async def _answer(self, measured: MeasuredRequest, request: Request, most_tokens: int) -> int | None:
        """The server's count in an answer of one token; None if it tells none in time."""
        context = measured.context
        if context.measure is None:
            return None
        limit_s = min(_LIMIT_S + _LIMIT_S_PER_TOKEN * most_tokens, context.settings.summary_timeout_s)
        room = Reservation(self._admission, context)
        # A request that holds room already asks in it: it would wait for itself.
        has_room = self._admission.holds(context.attempts)
        held = contextlib.nullcontext() if has_room else room.for_summary(measured.window, most_tokens, extra_tokens=0)
        try:
            async with held:
                return await asyncio.wait_for(context.measure(request), limit_s)
        except (asyncio.TimeoutError, Overloaded):
            return None
        finally:
            room.release()


def _always(_count: Estimate) -> bool:
    return True


def _certain(budget: Budget) -> Budget:
    """The budget if the count were exact."""
    return replace(budget, likely_ratio=1.0, own_likely_ratio=None)


def _may_be_cut(budget: Budget, count: Estimate) -> bool:
    """A prompt that fits by our count may be longer than the window: the server has not counted it."""
    if count.is_counted or not budget.own.fits(count.tokens):
        return False
    return count.high + budget.rules.answer_min_tokens > budget.window_tokens


def _decides(budget: Budget, asked_tokens: int | None, count: Estimate) -> bool:
    """The two ends of a count decide otherwise about a prompt, by more than a question is worth."""
    budget, certain = budget.own, _certain(budget)
    worth_tokens = max(MARGIN_MIN_TOKENS, _LEAST_DOUBT_RATIO * budget.window_tokens)
    if count.is_counted:
        return False
    if not count.text.is_confirmed and count.high > budget.window_tokens // 2:
        # Its answer would be cut short by doubt alone, and a summary be sent that the server may count twice.
        return True
    if count.high - count.low < worth_tokens:
        # Doubt so small compacts a little early; it must not refuse.
        return not budget.fits(count.tokens) and certain.fits(count.low)
    if budget.triggers(count.tokens):
        return not certain.triggers(count.low)
    if asked_tokens is None or asked_tokens < 0 or asked_tokens > certain.max_output_tokens(count.low, None):
        # Doubt does not cut short a wish that the window cannot grant in any case.
        asked_tokens = budget.output_buffer_tokens(count.tokens)
    best_tokens = certain.max_output_tokens(count.low, asked_tokens)
    return best_tokens - certain.max_output_tokens(count.high, asked_tokens) > worth_tokens


def floor_of(measured: MeasuredRequest) -> Request:
    """The messages that no compaction can shrink, as a request of their own."""
    messages = measured.request.messages
    latest_cut = measured.conversation.latest_cut
    kept = tuple(
        without_data(messages[index]) if index < latest_cut else messages[index]
        for index in sorted(measured.conversation.protected)
    )
    prefix = system_prefix_length(kept)
    if len(kept) == prefix or kept[prefix].role != "user":
        # Templates want the user's word first; so does what a compaction makes.
        kept = (*kept[:prefix], user_message("."), *kept[prefix:])
    return replace(measured.request, messages=kept)


def beginning_of(request: Request, count: Estimate, limit_tokens: int) -> Request | None:
    """The longest beginning within a limit that is a valid request; None if that is too short to say much.

    The real request then finds it in the server's cache.
    """
    messages = request.messages
    # Before another end than the person's word some templates leave the system message out.
    ends = ("user",) if messages[-1].role == "user" else ("user", "tool")
    tokens, end, end_tokens = count.overhead_tokens + count.tools_tokens, 0, 0
    for index, size in enumerate(count.sizes):
        tokens += size
        if tokens > limit_tokens:
            break
        following = messages[index + 1].role if index + 1 < len(messages) else ""
        if messages[index].role in ends and following != "tool":
            end, end_tokens = index + 1, tokens
    if end in (0, len(messages)) or end_tokens < max(_LEAST_TOKENS, limit_tokens // _LEAST_SHARE):
        return None
    return replace(request, messages=messages[:end])


def cut(measured: MeasuredRequest, request: Request, count: Estimate, limit_tokens: int) -> Request | None:
    """A request of so many tokens, its texts cut to one common length; None if that leaves little of them."""
    if request.extras and count.own.optional_tokens > limit_tokens // 2:
        return replace(request, extras={})
    texts = ["".join((message.text, *(call.arguments for call in message.calls))) for message in request.messages]
    texts_tokens = list(map(measured.count_text, texts))
    room_tokens = sum(texts_tokens) - (count.tokens - limit_tokens)
    level_tokens = common_level(texts_tokens, [1] * len(texts_tokens), room_tokens)
    if level_tokens < MARGIN_MIN_TOKENS:
        return None
    return replace(
        request,
        messages=tuple(
            message if tokens <= level_tokens else with_only_text(message, _beginning(text, level_tokens, measured))
            for message, text, tokens in zip(request.messages, texts, texts_tokens, strict=True)
        ),
    )


def _beginning(text: str, limit_tokens: int, measured: MeasuredRequest) -> str:
    while text and (tokens := measured.count_text(text)) > limit_tokens:
        text = text[: min(len(text) * max(limit_tokens, 0) // tokens, len(text) - 1)]
    return text
