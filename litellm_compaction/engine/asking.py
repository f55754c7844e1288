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
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS
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

# A question about the whole prompt needs so many about parts of it at most.
_MOST_PARTS = 2
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
_MAX_PARTS = 64
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
        self._windows, self._counter, self._measurer, self._admission = windows, counter, measurer, admission
        # What is asked in which order: what costs nothing first.
        self._ways: tuple[_Way, ...] = (self._freely, self._by_answer)
        self._questions: Flights[bool] = Flights()
        self._silent: Rests[str] = Rests(_SILENCE_S, _SILENCE_S, clock)
        # By prompts of which only a part could be asked for: agents send them again and again.
        self._parts: Bounded[tuple[str, int], Estimate] = Bounded(_MAX_PARTS)

    async def settled(self, measured: MeasuredRequest, *, is_sent: bool = False) -> MeasuredRequest:
        """`measured` by the server's own count, if that decides about it or, where it is compacted, costs nothing.

        Itself if nothing else is known of it then. With `is_sent` it goes out as it came unless it may be cut.
        """
        count, is_open = measured.count, partial(_is_open, measured, is_sent=is_sent)
        if is_open(count) or measured.budget.own.triggers(count.tokens):
            count = await self._told(measured, measured.request, count, is_open)
        return self._measurer.by(measured, count)

    async def counted(self, measured: MeasuredRequest) -> Estimate:
        """The count of a request, by the server's own if it can be asked; nothing is generated for it."""
        return await self._told(measured, measured.request, measured.count, lambda _: False)

    async def has_recounted(self, measured: MeasuredRequest, prepared: PreparedRequest) -> bool:
        """Returns True if the server was asked for its count of what a compaction made."""
        if prepared.messages is None:
            return False
        is_open = partial(_is_open, measured, is_sent=True)
        return (
            await self._told(measured, prepared.sent(measured.request), prepared.count, is_open) is not prepared.count
        )

    async def with_floor(self, measured: MeasuredRequest) -> MeasuredRequest | None:
        """`measured` by the count of its floor as a request of its own; None if that is known.

        A refusal asks first: by the whole prompt's excess alone nothing is refused.
        """
        if measured.floor_count is not None:
            return None
        request = await off_loop(measured.conversation.messages, lambda: floor_of(measured))
        count = await self._measurer.count_request(measured, request)
        certain = replace(measured.budget, likely_ratio=1.0)
        # A protocol that no answer has confirmed refuses nothing.
        count = await self._told(
            measured, request, count, lambda count: not (count.is_counted and certain.fits(count.high))
        )
        measured = self._measurer.by(measured, await self._measurer.count_request(measured, measured.request))
        return self._measurer.with_floor(measured, count)

    async def _told(self, measured: MeasuredRequest, request: Request, count: Estimate, is_open: _IsOpen) -> Estimate:
        """The count of a request by the server; by its number for a part of it if all of it may be too long.

        A part that is certainly shorter than the window shows what the server makes of the text and what its template
        leaves out. Whatever is not told stays an estimate; what is not `is_open` is asked for nothing only.
        """
        if not is_open(count):
            return await self._asked(measured, request, count, lambda _: True, *self._ways[:1])
        key = (measured.context.target.key, count.fingerprint)
        part = self._parts.get(key)
        count = count.with_part(part) if part is not None else count
        certain = replace(measured.budget, likely_ratio=1.0)
        for _ in range(_MOST_PARTS + 1):
            count = await self._asked(measured, request, count, is_open, *self._ways)
            # A part says how long a summary's prompt may be, as long as no number of the server is known.
            is_hopeless = count.text.is_confirmed and not certain.fits(int(count.low * _HOPELESS_RATIO))
            if count.is_told or not is_open(count) or surely_fits(count, measured.window.tokens) or is_hopeless:
                break
            part = await self._told_part(measured, request, count, part)
            if part is None:
                break
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
        window_tokens = measured.window.tokens
        limit_tokens = int(_PART_RATIO * window_tokens * count.tokens / max(count.high, 1))
        part = beginning_of(request, count, limit_tokens)
        for _ in range(3):
            part = part or await off_loop(request.messages, partial(cut, measured, request, count, limit_tokens))
            if part is None:
                return None
            counted = await self._measurer.count_request(measured, part)
            if before is not None:
                if counted.own.tokens < _WORTH_RATIO * before.own.tokens:
                    return None
                counted = counted.with_part(before)
            if surely_fits(counted, window_tokens):
                counted = await self._asked(measured, part, counted, lambda _: True, *self._ways)
                return counted if counted.is_counted else None
            limit_tokens, part = int(_PART_RATIO * limit_tokens * window_tokens / counted.high), None
        return None

    async def _freely(self, measured: MeasuredRequest, request: Request, count: Estimate) -> bool:
        """Returns True if the server's tokenizer has counted a request, and the counter has learned it."""
        target, counter = measured.context.target, self._counter
        if target.is_lmstudio and not counter.awaits_protocol(target.key, count, request):
            return False
        tokens = await self._windows.tokens_of(target, request)
        if tokens is None or not target.is_lmstudio:
            return tokens is not None and counter.take_over(target.key, count, tokens)
        counter.take_protocols(target.key, count, request, tokens)
        return True

    async def _by_answer(self, measured: MeasuredRequest, request: Request, count: Estimate) -> bool:
        """Returns True if the counter has learned a request's number from an answer of one token."""
        context, target = measured.context, measured.context.target
        # Never longer than the window, however wrong our count is: a server may cut it without a word. The window may
        # have been read anew for an earlier question.
        window_tokens = min(measured.window.tokens, await window_tokens_now(self._windows, target, fresh=False))
        may_ask = context.attempts.questions_left > 0 and self._silent.is_over(target.key)
        if context.measure is None or not (may_ask and surely_fits(count, window_tokens)):
            return False
        context.attempts.questions_left -= 1
        told, room = None, Reservation(self._admission, context)
        # A request that holds room already asks in it: it would wait for itself.
        has_room = self._admission.holds(context.attempts)
        held = contextlib.nullcontext() if has_room else room.for_summary(measured.window, count.high, extra_tokens=0)
        limit_s = min(_LIMIT_S + _LIMIT_S_PER_TOKEN * count.high, context.settings.summary_timeout_s)
        with contextlib.suppress(asyncio.TimeoutError, Overloaded), contextlib.ExitStack() as left:
            left.callback(room.release)
            async with held:
                told = await asyncio.wait_for(context.measure(request), limit_s)
        if told is None:
            logger.debug("question model=%s unanswered", context.label)
            self._silent.begin(target.key)
            return False
        if target.is_listed and self._counter.may_be_cut(count, told):
            # A model that was loaded anew with a smaller window cuts, and what is sent is then made for that.
            window_tokens = await window_tokens_now(self._windows, target)
        return is_whole(count, window_tokens, told) and self._counter.take_over(target.key, count, told)


def _is_open(measured: MeasuredRequest, count: Estimate, *, is_sent: bool) -> bool:
    """Returns True if the two ends of a count decide otherwise about a prompt, by more than a question is worth.

    What triggers a compaction is sent all the same if it `is_sent`.
    """
    budget = replace(measured.budget, likely_ratio=count.likely_ratio, own_likely_ratio=None)
    certain, window_tokens = replace(budget, likely_ratio=1.0), budget.window_tokens
    fits, triggers = budget.fits(count.tokens), budget.triggers(count.tokens)
    if count.is_counted:
        return False
    if fits and (is_sent or not triggers) and count.high + budget.rules.answer_min_tokens > window_tokens:
        # It fits by our count, and may be longer than the window.
        return True
    if not count.text.is_confirmed and count.high > window_tokens // 2:
        # Its answer would be cut short by doubt alone, and a summary be sent that the server may count twice.
        return True
    worth_tokens = max(MARGIN_MIN_TOKENS, _LEAST_DOUBT_RATIO * window_tokens)
    if count.high - count.low < worth_tokens:
        # Doubt so small compacts a little early; it must not refuse.
        return not fits and certain.fits(count.low)
    if triggers:
        return not certain.triggers(count.low)
    asked_tokens = measured.context.asked_tokens
    if asked_tokens is None or not 0 <= asked_tokens <= certain.max_output_tokens(count.low, None):
        # Doubt does not cut short a wish that the window cannot grant in any case.
        asked_tokens = budget.output_buffer_tokens(count.tokens)
    best_tokens = certain.max_output_tokens(count.low, asked_tokens)
    return best_tokens - certain.max_output_tokens(count.high, asked_tokens) > worth_tokens


def floor_of(measured: MeasuredRequest) -> Request:
    """The messages that no compaction can shrink, as a request of their own."""
    messages, view = measured.request.messages, measured.conversation
    kept = [messages[at] if at >= view.latest_cut else without_data(messages[at]) for at in sorted(view.protected)]
    prefix = system_prefix_length(kept)
    if len(kept) == prefix or kept[prefix].role != "user":
        # Templates want the user's word first; so does what a compaction makes.
        kept.insert(prefix, user_message("."))
    return replace(measured.request, messages=tuple(kept))


def beginning_of(request: Request, count: Estimate, limit_tokens: int) -> Request | None:
    """The longest beginning within a limit that is a valid request; None if that is too short to say much.

    The real request then finds it in the server's cache. It says nothing of images whose price nobody knows.
    """
    messages = request.messages
    # Before another end than the person's word some templates leave the system message out.
    ends = ("user",) if messages[-1].role == "user" else ("user", "tool")
    tokens, end, end_tokens = count.overhead_tokens + count.tools_tokens, 0, 0
    for index, size in enumerate(count.sizes[:-1]):
        tokens += size
        if tokens <= limit_tokens and messages[index].role in ends and messages[index + 1].role != "tool":
            end, end_tokens = index + 1, tokens
    is_short = end_tokens < max(_LEAST_TOKENS, limit_tokens // _LEAST_SHARE)
    has_price = count.rates[1].is_confirmed or not count.own.images or any(each.other_parts for each in messages[:end])
    return None if is_short or not has_price else replace(request, messages=messages[:end])


def cut(measured: MeasuredRequest, request: Request, count: Estimate, limit_tokens: int) -> Request | None:
    """A request of about so many tokens, its texts cut to one common length; None if that leaves little of them."""
    if request.extras and count.own.optional_tokens > limit_tokens // 2:
        return replace(request, extras={})
    texts = ["".join((message.text, *(call.arguments for call in message.calls))) for message in request.messages]
    sizes = list(map(measured.count_text, texts))
    level = common_level(sizes, [1] * len(sizes), sum(sizes) - count.tokens + limit_tokens)
    messages = (
        message if size <= level else with_only_text(message, text[: len(text) * level // size])
        for message, text, size in zip(request.messages, texts, sizes, strict=True)
    )
    return replace(request, messages=tuple(messages)) if level >= MARGIN_MIN_TOKENS else None
