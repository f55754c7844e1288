"""Judges the end of an upstream answer: the next step, and its lessons about the window and about the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from litellm_compaction.core.go_on import Way
from litellm_compaction.engine import Compactor, Outcome, RequestContext, Reservation
from litellm_compaction.errors import Overflow, overflow_from_text
from litellm_compaction.events import AnswerOutcome
from litellm_compaction.proxy.refusals import log_failure

if TYPE_CHECKING:
    from litellm_compaction.proxy.answer.relay import Relay

UNNAMED = Overflow(None, None)
# A prompt this close to the window explains an answer that breaks off without a word; if the server has counted it.
NEAR_FULL_RATIO, FULL_RATIO = 0.80, 0.98
# After so many stops for others something is wrong: a compaction has to help.
MAX_CUTS = 24
# An overflow without a number at less than this share of the window is not of this answer alone.
_FAR_BELOW_RATIO = 0.5
# Ways in which a server goes on itself, and which some refuse.
_OWN_WAYS: tuple[Way, ...] = ("raw", "prefill")

# How a stream ended: by itself; at the window's end; with nothing but thoughts, more than it was given; at its share of
# the window, or before it, for others that need the room, or where a doubt alone bounded it; by an error that means a
# full window, or by another one.
End: TypeAlias = Literal["done", "limit", "overthought", "spent", "called_back", "overflow", "failed"]
# Since others need the room, or where a doubt alone bounded it.
GIVES_WAY: frozenset[End | None] = frozenset({"spent", "called_back"})
# By us: the stream could still go on.
STOPPED: frozenset[End | None] = frozenset({"limit", "called_back", "overthought"})
Step: TypeAlias = Literal["deliver", "used_up", "look_up", "fail", "other_way", "harder", "anew", "calls", "go_on"]
Restart: TypeAlias = Literal["resumed", "relaxed", "compacted", "pressed"]


class Ended(NamedTuple):
    """The end of one leg, as far as the next step depends on it.

    Attributes:
        is_way_refused: the server refuses a continuation by this way, and another one is left.
        has_whole_calls: of several tool calls only the last was cut.
        only_recalls: the answer ended with calls of our own tool, and no other.
        is_used_up: the client has got as many tokens as it asked for.
        is_stuck: going on would repeat a call that the client has begun to receive.
        is_full: the window, and not a share of it, has ended it.
    """

    end: End | None
    is_way_refused: bool = False
    is_delivered: bool = True
    has_whole_calls: bool = False
    only_recalls: bool = False
    is_used_up: bool = False
    is_stuck: bool = False
    is_thoughts: bool = False
    is_full: bool = False


@dataclass(slots=True, kw_only=True)
class State:
    """The marks that an answer's legs so far leave for the next one.

    Attributes:
        ways: in which the server may be made to go on, and `refused`, those of the others that it does not know.
        restarts_left: compactions that may carry it on.
        was_doubted: it has ended at a bound that was made for doubt, and is told only of bounds without.
        has_retried: it was compacted harder after an overflow.
        cuts: stops for others, or at its share of a context.
        is_resumed: the last leg goes on without a compaction.
        is_closing: its thoughts were ended, since the window or their budget was spent.
        has_gained: its last compaction has made room.
        is_joined: it is made of more than one upstream answer.
    """

    ways: frozenset[Way]
    refused: tuple[Way, ...] = ()
    restarts_left: int
    was_doubted: bool = False
    has_retried: bool = False
    may_look_up: bool = True
    cuts: int = 0
    is_resumed: bool = False
    is_closing: bool = False
    has_gained: bool = True
    is_joined: bool = False
    outcome: AnswerOutcome = "completed"

    @property
    def is_last(self) -> bool:
        """No compaction may carry the answer on any more."""
        return self.restarts_left <= 0 or not self.has_gained


def next_leg(ended: Ended, state: State) -> Step:
    """Returns the next step after a leg: its answer is delivered, asked for once more, or goes on.

    `harder` compacts more, since the client has seen nothing of an overflow; `anew` repeats the request; `calls` hands
    over the calls that are whole; `look_up` answers the model's call of our tool; `go_on` plans a continuation; what is
    `used_up` would have ended by the client's own limit, too.
    """
    looks_up = ended.only_recalls and state.may_look_up
    if ended.is_way_refused:
        return "other_way"
    if ended.end == "failed":
        return "fail"
    if ended.end == "done" and not looks_up:
        return "deliver"
    if not ended.is_delivered and ended.end == "overflow":
        return "fail" if state.has_retried else "harder"
    if not ended.is_delivered and ended.end in GIVES_WAY:
        return "anew"
    if ended.end != "done" and ended.has_whole_calls:
        return "calls"
    if ended.is_used_up:
        return "used_up"
    return "look_up" if ended.end == "done" else "go_on"


def restart_of(ended: Ended, state: State) -> Restart | None:
    """Returns how an answer goes on behind a stop, or would if it were stopped now; None if it must not.

    `resumed`, as it is, since only others needed the room; `relaxed`, where its thoughts end at their budget, and not
    at the window; else `compacted`, or `pressed`, as the window is full. More room for thoughts is no answer: they are
    closed, once.
    """
    if ended.is_stuck:
        return None
    if ended.end in GIVES_WAY and state.cuts < MAX_CUTS:
        return "resumed"
    if state.is_last or (state.is_closing and ended.is_thoughts):
        return None
    if ended.end == "overthought":
        return "relaxed"
    return "pressed" if ended.is_full else "compacted"


def judged(text: str, client_text: Callable[[], str], *, used_tokens: float, window_tokens: int) -> Overflow | None:
    """An overflow in an error text, with the numbers that are credible; None if the text tells of none.

    A client must not teach a window to others: its own words, quoted by the server, are none of the server's; and no
    server runs over a limit far above the `used_tokens` that prompt and answer have at most.
    """
    if overflow_from_text(text) is None:
        return None
    overflow = overflow_from_text(text, client_text())
    if overflow is None:
        # Quoted, or the client's agent is at work on such messages: then only a window that is nearly full tells.
        return UNNAMED if used_tokens >= NEAR_FULL_RATIO * window_tokens else None
    named = overflow.window_tokens
    is_far_off = named is not None and named < window_tokens and used_tokens < NEAR_FULL_RATIO * named
    return UNNAMED if is_far_off else overflow


class Lessons:
    """What the legs of one answer teach."""

    def __init__(self, compactor: Compactor, context: RequestContext, room: Reservation) -> None:
        self._compactor = compactor
        self._context = context
        self._room = room

    def is_overflow_of_all(self, relay: Relay, state: State, *, is_delivered: bool) -> bool:
        """A context that several answers fill was full, and not this answer's window; notes that.

        LM Studio and llama.cpp then end all of them, with words that name no number. Far below the window that proves a
        shared context even if the server lists none (four answers of 150 tokens over 4,096).
        """
        is_others = relay.end == "overflow" and relay.overflow == UNNAMED and not relay.looks_full(NEAR_FULL_RATIO)
        if not is_others or state.cuts >= MAX_CUTS // 2:
            return False
        window = relay.prepared.window
        others = self._room.beside(window)
        if self._room.is_shared(window):
            return others > 0
        is_far_below = is_delivered and relay.filled_tokens < _FAR_BELOW_RATIO * window.tokens
        if others == 0 and not is_far_below:
            return False
        self._compactor.learn_shared(self._context, max(others + 1, window.slots))
        return True

    def learn(self, relay: Relay, state: State) -> None:
        """Notes what a leg shows of the window, of our count, and of the ways in which its server goes on.

        Refused ways count only after another one has worked: a server that refuses every way says nothing about ways.
        """
        try:
            self._learn(relay, state)
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            # The client has its answer; a lesson that is lost must not take it away again.
            log_failure("learn", error)

    def _learn(self, relay: Relay, state: State) -> None:
        context, prepared, replies = self._context, relay.prepared, self._compactor.replies
        if relay.end == "overflow":
            replies.learn_overflow(context, prepared, relay.overflow or UNNAMED)
        if relay.usage is not None:
            replies.learn(context, prepared, **relay.usage._asdict())
        outcomes: dict[Way, Outcome] = {}
        if relay.has_begun:
            outcomes = dict.fromkeys(state.refused, "refused")
            state.refused = ()
        if prepared.continuation.way in _OWN_WAYS and (outcome := relay.outcome()) is not None:
            outcomes[prepared.continuation.way] = outcome
        for way, outcome in outcomes.items():
            self._compactor.known_ways.learn(context.target, context.label, way, outcome)
