"""Learns from servers how they count, how large their windows are, and by which ways they go on with an answer.

A server is asked for its own count if the two ends of an estimate decide otherwise (promise P1): before a request is
compacted, refused, or its answer cut short only because our count may be wrong. It costs nothing if it has a tokenizer
to ask, as LM Studio, llama.cpp and vLLM; else an answer of one token to the very prompt, which the real request then
finds in its cache. Besides, its replies teach. All is kept in memory: after a restart its next answers show it again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias, get_args

import anyio

from litellm_compaction.concurrency import Bounded, Flights, Rests, Tasks, ended, off_loop
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS
from litellm_compaction.core.forms import common_level, without_data
from litellm_compaction.core.go_on import Way
from litellm_compaction.core.messages import Request, system_prefix_length, user_message, with_only_text
from litellm_compaction.engine.context import MeasuredRequest, PreparedRequest, RequestContext
from litellm_compaction.engine.measure import RequestMeasurer
from litellm_compaction.engine.records import Reporter
from litellm_compaction.engine.sharing.admission import Admission
from litellm_compaction.engine.sharing.reservation import Reservation
from litellm_compaction.errors import Overflow, Overloaded
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.windows.lmstudio import server_root
from litellm_compaction.windows.windows import Source, Target, Windows, goes_on_itself

logger = logging.getLogger("litellm_compaction")

# Parts of a prompt are made so often at most, until one surely fits.
_MOST_CUTS = 4
# Less more of a request says nothing new of the rest; sizes of parts are in proportion, which is a little off.
_WORTH_RATIO, _PART_RATIO = 1.1, 0.95
# A request is refused only if so little of the least that we expect is too long: lessons alone refuse nothing.
_HOPELESS_RATIO = 0.6
# A shorter part says too little of the rest.
_LEAST_TOKENS, _LEAST_SHARE = 200, 4
# With less doubt than this share of the window, or than the least margin, a question gains nothing.
_LEAST_DOUBT_RATIO = 0.03
# A processor reads 30 tokens a second and more, a graphics card thousands.
_LIMIT_S, _LIMIT_S_PER_TOKEN = 10.0, 0.04
# A server that has not answered a question is not asked again so soon: its next requests would wait for nothing.
_SILENCE_S = 60.0

# For events.
_FAR_BELOW = "prompt_far_below_count"
_FULL_WINDOW_RATIO = 0.98
# A known family that is so far off is worth a warning, of a prompt that is long enough to tell.
_WARN_RATIO, _LEAST_TOLD_TOKENS = 0.05, 200

# What a continuation teaches: it began with something new, or with what the server was shown; the answer began anew;
# the server does not take such a request. One over which it fails teaches nothing.
Outcome: TypeAlias = Literal["went_on", "began_anew", "refused"]
ALL_WAYS: tuple[Way, ...] = get_args(Way)
# For people.
_WAYS_IN_WORDS: Mapping[Way, str] = {
    "raw": "the model goes on inside its answer, by a prompt that is rendered here",
    "prefill": "the answer's end is the last message, which the server goes on with",
    "turn": "the model is asked to go on in the user's place",
}
# A server that was updated may do what it did not do before.
_REST_S = 24 * 3600.0

_IsOpen: TypeAlias = Callable[[Estimate], bool]


class Asker:
    """Asks servers what they count; a few times for a client request at most."""

    def __init__(
        self, measurer: RequestMeasurer, admission: Admission, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._measurer, self._windows, self._counter = measurer, measurer.windows, measurer.counter
        self._admission = admission
        self._questions: Flights[bool] = Flights()
        self._silent: Rests[str] = Rests(_SILENCE_S, _SILENCE_S, clock)
        # By prompts of which only a part could be asked for: agents send them again and again.
        self._parts: Bounded[tuple[str, int], Estimate] = Bounded(64)

    async def settled(self, measured: MeasuredRequest, *, is_sent: bool = False) -> MeasuredRequest:
        """`measured`, itself or by the server's own count, if that decides or, for what is compacted, costs nothing.

        With `is_sent` it goes out as it came unless it may be cut.
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
        count, is_open = prepared.count, partial(_is_open, measured, is_sent=True)
        return await self._told(measured, prepared.sent(measured.request), count, is_open) is not count

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
        told = self._told(measured, request, count, lambda each: not (each.is_counted and certain.fits(each.high)))
        count, own = await told, await self._measurer.count_request(measured, measured.request)
        return self._measurer.with_floor(self._measurer.by(measured, own), count)

    async def _told(self, measured: MeasuredRequest, request: Request, count: Estimate, is_open: _IsOpen) -> Estimate:
        """The count of a request by the server; by its number for a part that surely fits if all may be too long."""
        key, measurer = (measured.context.target.key + count.method, count.fingerprint), self._measurer
        certain, window_tokens = replace(measured.budget, likely_ratio=1.0), measured.window.tokens
        before = self._parts.get(key)
        count = await self._asked(measured, request, count.with_part(before), is_open)
        ratio, may_begin = _PART_RATIO * window_tokens / max(1, count.high), True
        for _ in range(_MOST_CUTS):
            # A part says how long a summary's prompt may be, as long as no number of the server is known.
            is_hopeless = count.text.is_confirmed and not certain.fits(int(count.low * _HOPELESS_RATIO))
            if count.is_told or not is_open(count) or count.surely_fits(window_tokens) or is_hopeless:
                break
            limit_tokens = int(ratio * count.tokens)
            part = beginning_of(request, count, limit_tokens) if may_begin else None
            part = part or await off_loop(request.messages, partial(cut, measured, request, count, limit_tokens))
            counted = await measurer.count_request(measured, part or request)
            if part is None or (before is not None and counted.own.tokens < _WORTH_RATIO * before.own.tokens):
                break
            counted = counted.with_part(before)
            if not counted.surely_fits(window_tokens):
                ratio, may_begin = ratio * _PART_RATIO * window_tokens / counted.high, False
                continue
            counted = await self._asked(measured, part, counted, lambda _: True)
            if not counted.is_counted:
                break
            self._parts[key] = before = counted
            count = (await measurer.count_request(measured, request)).with_part(before)
            count = await self._asked(measured, request, count, is_open)
            ratio, may_begin = _PART_RATIO * window_tokens / max(1, count.high), True
        return count

    async def _asked(self, measured: MeasuredRequest, request: Request, count: Estimate, is_open: _IsOpen) -> Estimate:
        """The count of a request after its server was asked: for nothing, and by an answer if the count `is_open`.

        As it is where a request may not ask: its server may still be writing the answer that goes on.
        """
        for way in (self._freely, self._by_answer):
            costs = way == self._by_answer
            if measured.context.measure is None or count.is_told or (costs and not is_open(count)):
                break
            # One question for all requests that ask the same at once: what they then decide is the same, too.
            key = (measured.context.target.key, count.fingerprint or id(request), costs)
            if await self._questions.join(key, partial(way, measured, request, count)):
                count = await self._measurer.count_request(measured, request)
        return count

    async def _freely(self, measured: MeasuredRequest, request: Request, count: Estimate) -> bool:
        """Returns True if the server's tokenizer has counted a request, and the counter has learned it."""
        target, counter = measured.context.target, self._counter
        if target.is_lmstudio and not counter.awaits_protocol(target.key, count, request):
            return False
        tokens = await self._windows.tokens_of(target, request)
        if tokens is None or not target.is_lmstudio:
            return tokens is not None and counter.learn(target.key, count, tokens, is_asked=True)
        counter.take_protocols(target.key, count, request, tokens)
        return True

    async def _by_answer(self, measured: MeasuredRequest, request: Request, count: Estimate) -> bool:
        """Returns True if the counter has learned a request's number from an answer of one token."""
        context, target = measured.context, measured.context.target
        # Never longer than the window of now, however wrong our count is: a server may cut it without a word.
        window_tokens = min(measured.window.tokens, await self._windows.tokens_now(target))
        may_ask = context.attempts.questions_left > 0 and self._silent.is_over(target.key)
        if context.measure is None or not (may_ask and count.surely_fits(window_tokens)):
            return False
        context.attempts.questions_left -= 1
        room, has_room = Reservation(self._admission, context), self._admission.holds(context.attempts)
        # A request that holds room already asks in it: it would wait for itself.
        held = contextlib.nullcontext() if has_room else room.for_summary(measured.window, count.high, extra_tokens=0)
        limit_s = min(_LIMIT_S + _LIMIT_S_PER_TOKEN * count.high, context.settings.summary_timeout_s)
        try:
            async with held:
                with anyio.fail_after(limit_s):
                    tokens = await context.measure(request)
        except (TimeoutError, Overloaded):
            tokens = None
        finally:
            room.release()
        if tokens is None:
            self._silent.begin(target.key)
            return False
        if target.place is not None and self._counter.may_be_cut(count, tokens):
            # A model that was loaded anew with a smaller window cuts, and what is sent is then made for that.
            window_tokens = await self._windows.tokens_now(target, fresh=True)
        return is_whole(count, window_tokens, tokens) and self._counter.learn(target.key, count, tokens, is_asked=True)


def _is_open(measured: MeasuredRequest, count: Estimate, *, is_sent: bool) -> bool:
    """Returns True if the two ends of a count decide otherwise about a prompt, by more than a question is worth.

    What triggers a compaction is sent all the same if it `is_sent`.
    """
    if count.is_counted:
        return False
    budget = replace(measured.budget, likely_ratio=count.likely_ratio, own_likely_ratio=None)
    certain, window_tokens = replace(budget, likely_ratio=1.0), budget.window_tokens
    fits, triggers = budget.fits(count.tokens), budget.triggers(count.tokens)
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
    floor = [messages[at] if at >= view.latest_cut else without_data(messages[at]) for at in sorted(view.protected)]
    prefix = system_prefix_length(floor)
    if len(floor) == prefix or floor[prefix].role != "user":
        # Templates want the user's word first; so does what a compaction makes.
        floor.insert(prefix, user_message("."))
    return replace(measured.request, messages=tuple(floor))


def beginning_of(request: Request, count: Estimate, limit_tokens: int) -> Request | None:
    """The longest beginning within a limit that is a valid request, which the server has in its cache from then on.

    None if it is too short to say much: it says nothing of images whose price nobody knows.
    """
    messages = request.messages
    # Before another end than the person's word some templates leave the system message out.
    ends = ("user",) if messages[-1].role == "user" else ("user", "tool")
    tokens, end, end_tokens = count.overhead_tokens + count.tools_tokens, 0, 0
    for index, size in enumerate(count.sizes[:-1]):
        tokens += size
        if tokens <= limit_tokens and messages[index].role in ends and messages[index + 1].role != "tool":
            end, end_tokens = index + 1, tokens
    has_price = count.rates[1].is_confirmed or not count.own.images or any(each.other_parts for each in messages[:end])
    is_short = end_tokens < max(_LEAST_TOKENS, limit_tokens // _LEAST_SHARE)
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


class ReplyReader:
    """Learns from the usage and the overflows of servers' replies, and alarms if a prompt was cut."""

    def __init__(self, *, windows: Windows, counter: TokenCounter, reporter: Reporter) -> None:
        self._windows, self._counter, self._reporter = windows, counter, reporter
        self._asking = Tasks()
        self._warned: Bounded[str, bool] = Bounded()

    def learn(
        self, context: RequestContext, prepared: PreparedRequest, *, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Trains the counter by the tokens that a server reported for exactly what was sent, or raises the alarm."""
        count, target, window_tokens = prepared.count, context.target, prepared.window.tokens
        reason = _is_full(window_tokens, prompt_tokens, completion_tokens)
        if not reason and self._counter.is_suspicious(count, prompt_tokens):
            reason = _FAR_BELOW
            if self._counter.learn(target.key, count, prompt_tokens):
                # That is how it counts: another of its numbers says so, too.
                return
        elif not reason and not is_whole(count, window_tokens, prompt_tokens):
            # A prompt that may have been cut teaches nothing.
            return
        if reason:
            self._windows.invalidate(target)
        if target.place is not None and (reason or self._counter.may_be_cut(count, prompt_tokens)):
            self._asking.begin(self._learn_if_whole(context, prepared, prompt_tokens, completion_tokens, reason))
        elif reason:
            self._reporter.alarmed(context, prepared, prompt_tokens, reason)
        else:
            self._learned(context, count, prompt_tokens)

    async def aclose(self) -> None:
        await ended(self._asking)

    def learn_overflow(self, context: RequestContext, prepared: PreparedRequest | None, overflow: Overflow) -> None:
        """Takes note of an overflow error for `prepared`, None if that is not certain: what the error names is true."""
        self._windows.invalidate(context.target)
        if overflow.window_tokens is not None:
            self._windows.learn(context.target, overflow.window_tokens)
        if overflow.prompt_tokens and prepared is not None:
            # In the middle of an answer the number has what was generated in it, which is no prompt's.
            count = replace(prepared.count, told=None)
            self._counter.known.note(context.target.key, count, overflow.prompt_tokens)

    def _learned(self, context: RequestContext, count: Estimate, prompt_tokens: int) -> None:
        """Has the counter learn, and warns once of a known family that does not fit."""
        key, expected = context.target.key, max(1.0, count.own.tokens)
        is_learned = self._counter.learn(key, count, prompt_tokens, label=context.label)
        is_off = count.own.exact and expected > _LEAST_TOLD_TOKENS and abs(prompt_tokens / expected - 1) > _WARN_RATIO
        if (is_off or not is_learned) and prompt_tokens > 0 and key not in self._warned:
            self._warned[key] = True
            then = "counts follow the server from now on" if is_learned else "counts do not follow it"
            said = "count_deviation model=%s expected=%d reported=%d tokens; %s"
            logger.warning(said, context.label, expected, prompt_tokens, then)

    async def _learn_if_whole(
        self, context: RequestContext, prepared: PreparedRequest, tokens: int, completion_tokens: int, reason: str
    ) -> None:
        """Learns a number far below ours if the window, read again, still holds what was sent; else raises the alarm.

        What fits by our count, which is the higher one, was not cut: its template may leave tools out. A model that was
        loaded anew with a smaller window cuts the prompt, and answers as if nothing had happened.
        """
        window_tokens = await self._windows.tokens_now(context.target, fresh=True)
        if prepared.count.tokens > window_tokens or _is_full(window_tokens, tokens, completion_tokens):
            self._reporter.alarmed(context, prepared, tokens, reason or _FAR_BELOW)
        elif is_whole(prepared.count, window_tokens, tokens):
            self._counter.learn(context.target.key, prepared.count, tokens, is_asked=True)


def is_whole(count: Estimate, window_tokens: int, prompt_tokens: int) -> bool:
    """Returns True if a server's number is certainly of all the prompt: one that may have been cut teaches nothing."""
    return count.surely_fits(window_tokens) and prompt_tokens < _FULL_WINDOW_RATIO * window_tokens


def _is_full(window_tokens: int, prompt_tokens: int, completion_tokens: int) -> str:
    """Returns one word for a prompt that a window cannot have held with its answer; "" if it can."""
    if prompt_tokens > window_tokens:
        return "prompt_above_window"
    is_at_its_end = not completion_tokens and prompt_tokens >= _FULL_WINDOW_RATIO * window_tokens
    return "empty_at_full_window" if is_at_its_end else ""


class KnownWays:
    """Knows by which ways each server goes on with an answer: by its kind, and by how it has done so far."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._gone_on: Bounded[tuple[str, str, Way], bool] = Bounded()
        self._failed: Rests[tuple[str, str, Way]] = Rests(_REST_S, _REST_S, wall_clock)

    def ways(self, target: Target, source: Source) -> tuple[Way, ...]:
        """Returns the ways that are worth a try, best first; the last one always is."""
        goes_on = goes_on_itself(target, source)
        own = (way for way in ALL_WAYS[:-1] if goes_on and self._failed.is_over(_key(target, way)))
        return (*own, ALL_WAYS[-1])

    def has_gone_on(self, target: Target, way: Way) -> bool:
        return self._gone_on.get(_key(target, way), False)

    def in_words(self, target: Target, source: Source, possible: Collection[Way]) -> str:
        """The best way of those that are `possible`, for people; "" for none."""
        return next((f"{way}: {_WAYS_IN_WORDS[way]}" for way in self.ways(target, source) if way in possible), "")

    def learn(self, target: Target, label: str, way: Way, outcome: Outcome) -> None:
        """Takes note of an outcome; a repeat that the model meant outweighs no success. `label` is for logs."""
        key, had_gone_on = _key(target, way), self.has_gone_on(target, way)
        self._gone_on[key] = outcome == "went_on"
        if outcome == "went_on":
            self._failed.end(key)
        elif (outcome == "refused" or not had_gone_on) and self._failed.begin(key):
            logger.warning("going_on model=%s way=%s outcome=%s; the next way is used", label, way, outcome)


def _key(target: Target, way: Way) -> tuple[str, str, Way]:
    """The same for all deployments that lead to one model of one server."""
    return server_root(target.api_base) if target.api_base else target.key, target.model, way
