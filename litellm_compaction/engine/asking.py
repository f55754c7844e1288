"""Asks servers for their own count if the two ends of an estimate decide otherwise (promise P1).

That is before a request is compacted, refused, or its answer cut short only because our count may be wrong. It costs
nothing if the server has a tokenizer to ask, as LM Studio, llama.cpp and vLLM; else an answer of one token to the very
prompt, which the real request then finds in the server's cache. The counter keeps the number.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from litellm_compaction.concurrency import Bounded, Flights, Rests, off_loop
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS, Budget
from litellm_compaction.core.messages import Request, with_text
from litellm_compaction.engine.context import MeasuredRequest, PreparedRequest
from litellm_compaction.engine.measure import RequestMeasurer
from litellm_compaction.engine.parts import beginning_of, cut, floor_of
from litellm_compaction.engine.replies import is_whole, surely_fits
from litellm_compaction.engine.sharing.admission import Admission
from litellm_compaction.engine.sharing.reservation import Reservation
from litellm_compaction.errors import CompactionError, Overloaded
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
# A number far below the least is asked for again, in a prompt that begins otherwise: some servers leave out the part
# that they had in their cache. A number before a text adds this at most.
_FAR_BELOW_RATIO, _OTHER_TOKENS = 0.5, 16
# With less doubt than this share of the window, or than the least margin, a question gains nothing.
_LEAST_DOUBT_RATIO = 0.03
# A processor reads 30 tokens a second and more, a graphics card thousands.
_LIMIT_S, _LIMIT_S_PER_TOKEN = 10.0, 0.04
# A server that has not answered a question is not asked again so soon: its next requests would wait for nothing.
_SILENCE_S = 60.0
_MAX_FORMS, _MAX_PARTS = 4096, 64


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
        self._others = 0
        # By prompts of which only a part could be asked for: agents send them again and again.
        self._parts: Bounded[tuple[str, int], Estimate] = Bounded(_MAX_PARTS)
        self._rendered: Bounded[int, bool] = Bounded(_MAX_FORMS)

    async def settled(self, measured: MeasuredRequest) -> MeasuredRequest:
        """`measured` by the server's own count if that decides: it has to be compacted, or its answer is cut short.

        Otherwise, and if no server answers, `measured` as it is.
        """

        def is_open(count: Estimate) -> bool:
            return _decides(measured.budget, count, measured.context.asked_tokens)

        if is_open(measured.count):
            return await self._measured_again(measured, is_open)
        if not measured.budget.own.triggers(measured.count.tokens):
            return measured
        is_told = await self._is_told_freely(measured, measured.request, measured.count)
        return await self._measurer.again(measured) if is_told else measured

    async def counted(self, measured: MeasuredRequest) -> Estimate:
        """The count of a request, by the server's own if it can be asked; nothing is generated for it."""
        if not measured.count.is_told:
            await self._has_told(measured, measured.request, measured.count, is_free=True)
        return await self._measurer.count_request(measured, measured.request)

    async def fitted(self, measured: MeasuredRequest) -> MeasuredRequest | None:
        """`measured` by the server's own count, if it would be sent as it came and may be cut for all that is known.

        None if it fits in any case, or the server does not say.
        """
        if not _may_be_cut(measured.budget, measured.count):
            return None
        again = await self._measured_again(measured, partial(_may_be_cut, measured.budget))
        return None if _may_be_cut(again.budget, again.count) else again

    async def with_floor(self, measured: MeasuredRequest) -> MeasuredRequest | None:
        """`measured` by the count of its floor as a request of its own; None if that is known.

        A refusal asks first: by the whole prompt's excess alone nothing is refused.
        """
        if measured.floor_count is not None:
            return None
        request = await off_loop(measured.conversation.messages, lambda: floor_of(measured))
        count = await self._measurer.count_request(measured, request)
        certain = _certain(measured.budget)

        def is_open(count: Estimate) -> bool:
            # A protocol that no answer has confirmed refuses nothing.
            return not count.is_counted or not certain.fits(count.high)

        count = await self._told(measured, request, count, is_open)
        return self._measurer.with_floor(await self._measurer.again(measured), count)

    async def has_recounted(self, measured: MeasuredRequest, prepared: PreparedRequest) -> bool:
        """Returns True if the server was asked for its count of what a compaction made, because that was in doubt."""
        if prepared.messages is None:
            return False
        request, budget, count = prepared.sent(measured.request), prepared.budget, prepared.count
        # If the floor had to be asked about, there is nothing smaller to send.
        is_last = (
            measured.floor_count is not None and not budget.fits(count.tokens) and _certain(budget).fits(count.low)
        )

        def is_open(count: Estimate) -> bool:
            return _may_be_cut(budget, count) or _decides(budget, count, measured.context.asked_tokens)

        if not (is_last or is_open(count)):
            return await self._is_told_freely(measured, request, count)
        await self._told(measured, request, count, (lambda _: True) if is_last else is_open)
        return True

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

    async def _is_told_freely(self, measured: MeasuredRequest, request: Request, count: Estimate) -> bool:
        """LM Studio reads no prompt for its answer, so that a compaction and its result are counted by it."""
        if self._windows.instance(measured.context.target) is None or count.is_counted:
            return False
        return await self._has_told(measured, request, count, is_free=True)

    async def _measured_again(self, measured: MeasuredRequest, is_open: Callable[[Estimate], bool]) -> MeasuredRequest:
        count = await self._told(measured, measured.request, measured.count, is_open)
        again = await self._measurer.again(measured)
        return self._measurer.by(again, count) if count.high < again.count.high else again

    async def _told(
        self, measured: MeasuredRequest, request: Request, count: Estimate, is_open: Callable[[Estimate], bool]
    ) -> Estimate:
        """The count of a request by the server; by its number for a part of it if all of it may be too long.

        A part that is certainly shorter than the window shows what the server makes of the text and what its template
        leaves out. Whatever is not told stays an estimate; nothing is asked that is no longer `is_open`.
        """
        key = (measured.context.target.key, count.fingerprint)
        part = self._parts.get(key)
        count = count if part is None else count.with_part(part)
        for _ in range(_MOST_PARTS + 1):
            if count.is_told or ((part is not None or count.is_counted) and not is_open(count)):
                return count
            if await self._has_told(measured, request, count):
                count = await self._measurer.count_request(measured, request)
                continue
            # A part says how long a summary's prompt may be, as long as no number of the server is known.
            least_tokens = int(count.low * _HOPELESS_RATIO)
            is_hopeless = count.text.is_confirmed and not _certain(measured.budget).fits(least_tokens)
            if surely_fits(count, measured.window.tokens) or is_hopeless:
                return count
            part = await self._told_part(measured, request, count, part)
            if part is None:
                return count
            self._parts[key] = part
            count = (await self._measurer.count_request(measured, request)).with_part(part)
        return count

    async def _told_part(
        self, measured: MeasuredRequest, request: Request, count: Estimate, before: Estimate | None
    ) -> Estimate | None:
        """The server's count of the beginning of a request, or of all of it with its texts cut short, that surely fits.

        Of more than the part `before`, which it holds; None if there is no such part, or the server does not answer.
        """
        limit_tokens = int(_PART_RATIO * measured.window.tokens * count.tokens / max(count.high, 1))
        part = beginning_of(request, count, limit_tokens)
        for _ in range(_MOST_CUTS):
            part = part or await off_loop(request.messages, partial(cut, measured, request, count, limit_tokens))
            if part is None:
                return None
            counted = await self._measurer.count_request(measured, part)
            if before is not None:
                if counted.own.tokens < _WORTH_RATIO * before.own.tokens:
                    return None
                counted = counted.with_part(before)
            if counted.is_told:
                return counted
            if surely_fits(counted, measured.window.tokens):
                # By an answer, after a protocol that none has confirmed.
                while not counted.is_told and await self._has_told(measured, part, counted):
                    counted = await self._measurer.count_request(measured, part)
                return counted if counted.is_counted else None
            limit_tokens = int(_PART_RATIO * limit_tokens * measured.window.tokens / counted.high)
            part = None
        return None

    async def _has_told(
        self, measured: MeasuredRequest, request: Request, count: Estimate, *, is_free: bool = False
    ) -> bool:
        """Returns True if the server has said what it counts for exactly this, so that it is counted anew.

        One question for all requests that ask the same at once; with `is_free` none that has it read the prompt.
        """
        key = (measured.context.target.key, count.fingerprint or id(request), is_free)
        return await self._questions.join(key, lambda: self._ask(measured, request, count, is_free=is_free))

    async def _ask(self, measured: MeasuredRequest, request: Request, count: Estimate, *, is_free: bool) -> bool:
        """As `_has_told`, which joins those who ask the same."""
        if await self._told_for_nothing(measured, request, count):
            return True
        # Never longer than the window, however wrong our count is: a server may cut it without a word.
        if is_free or not surely_fits(count, await self._window_tokens(measured)):
            return False
        told = await self._answered(measured, request, count.high)
        if told is None or await self._is_cut(measured, count, told):
            return False
        if told < _FAR_BELOW_RATIO * count.low:
            told = await self._confirmed(measured, request, count, told)
        return told is not None and self._counter.take_over(measured.context.target.key, count, told)

    async def _told_for_nothing(self, measured: MeasuredRequest, request: Request, count: Estimate) -> bool:
        """Returns True if the server's tokenizer has counted a request, and the counter has learned it.

        LM Studio's protocol says nothing of images, which cost what answers have taught, nor of reasoning and extras,
        which are added as the template shows them.
        """
        target, own = measured.context.target, count.own
        if not target.is_lmstudio:
            tokens = await self._windows.tokens_of(target, request)
            return tokens is not None and self._counter.take_over(target.key, count, tokens)
        reasons = any(message.reasoning for message in request.messages)
        price = self._counter.known.price(target.key)
        is_sayable = (own.rendered or not reasons) and (price.is_confirmed or not own.images)
        is_asked = measured.context.measure is not None and self._counter.protocol.is_believed(target.key)
        told, protocol = count.told, self._counter.protocol
        # An answer to another prompt may have confirmed the protocol since.
        is_known = count.is_counted and told and told.doubt_tokens <= protocol.doubt_tokens(target.key, told.tokens)
        if is_known or not count.fingerprint or not (is_sayable and is_asked):
            return False
        tokens = await self._windows.tokens_of(target, request)
        if tokens is None:
            return False
        beside = own.amounts.media * price.usual + (own.optional_tokens if reasons or request.extras else 0.0)
        self._counter.take_protocols(target.key, count, tokens + round(beside), is_whole=not beside)
        return True

    async def _window_tokens(self, measured: MeasuredRequest) -> int:
        """Of the window, or of a smaller one that was read meanwhile, because a question had been cut to it."""
        try:
            return min(measured.window.tokens, (await self._windows.resolve(measured.context.target)).tokens)
        except CompactionError:
            return measured.window.tokens

    async def _is_cut(self, measured: MeasuredRequest, count: Estimate, told: int) -> bool:
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

    async def _confirmed(self, measured: MeasuredRequest, request: Request, count: Estimate, told: int) -> int | None:
        """A number far below ours, or the one without what the server had in its cache; None if it does not say."""
        self._others += 1
        first, *rest = request.messages
        other = replace(request, messages=(with_text(first, f"{self._others} {first.text}"), *rest))
        again = await self._answered(measured, other, count.high + _OTHER_TOKENS)
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
    return replace(budget, likely_ratio=1.0, own_likely_ratio=None)


def _may_be_cut(budget: Budget, count: Estimate) -> bool:
    """A prompt that fits by our count may be longer than the window: the server has not counted it."""
    if count.is_counted or not budget.own.fits(count.tokens):
        return False
    return count.high + budget.rules.answer_min_tokens > budget.window_tokens


def _decides(budget: Budget, count: Estimate, asked_tokens: int | None) -> bool:
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
