"""The legs that an answer is made of: what a server is asked for, how that ended, and what follows. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from litellm_compaction.core.go_on import Way
from litellm_compaction.engine import ContinuationPlan, PreparedRequest
from litellm_compaction.errors import Overflow, overflow_from_text
from litellm_compaction.events import AnswerOutcome
from litellm_compaction.proxy import wire
from litellm_compaction.windows.windows import server_of

if TYPE_CHECKING:
    from litellm_compaction.proxy.answer.relay import Relay

UNNAMED = Overflow(None, None)
# A prompt this close to the window explains an answer that breaks off without a word; if the server has counted it.
NEAR_FULL_RATIO, FULL_RATIO = 0.80, 0.98
# After so many stops for others something is wrong: a compaction has to help.
MAX_CUTS = 24
# From here on nothing is sent that could not be taken back: text ends at a word, tool calls are complete.
_DANGER_RATIO, _DANGER_OUTPUT_RATIO = 0.80, 0.60

# How a stream ended: by itself; at the window's end; with nothing but thoughts, more than it was given; at its share of
# the window, or before it, for others that need the room, or where a doubt alone bounded it; by an error that means a
# full window, or by another one.
End: TypeAlias = Literal["done", "limit", "overthought", "spent", "called_back", "overflow", "failed"]
GIVES_WAY: frozenset[End | None] = frozenset({"spent", "called_back"})
# How an answer goes on behind a stop: as it is, since only others needed the room; with a compaction only if it needs
# one, where its thoughts end at their budget; compacted, or pressed, as the window is full.
Restart: TypeAlias = Literal["resumed", "relaxed", "compacted", "pressed"]
RESTARTS: tuple[Restart, ...] = get_args(Restart)
# `harder` compacts more, since the client has seen nothing of an overflow; `anew` repeats the request; `calls` hands
# over the calls that are whole; `look_up` answers the model's call of our tool; what is `used_up` would have ended by
# the client's own limit, too; `close` ends what cannot go on.
Step: TypeAlias = (
    Literal["deliver", "used_up", "look_up", "fail", "other_way", "harder", "anew", "calls", "close"] | Restart
)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One request to a server, and the most that its answer may have."""

    prepared: PreparedRequest
    max_tokens: int  # Bound on the answer, of which the server is told.
    asked_tokens: int | None = None  # The rest of the client's own limit; None without one.
    thoughts_tokens: float = math.inf  # The most of nothing but thoughts.
    goes_on: bool = False  # The answer has begun, and goes on in `prepared.continuation.way`.
    is_share: bool = False  # The bound is only a part of the window, because of others.
    is_doubted: bool = False  # It is less than the window leaves by our count, since nothing has confirmed that.
    passed: int = 0  # The answer goes on as it comes, with so many choices; 0 for one that is read here.

    @cached_property
    def danger_tokens(self) -> float:
        """Generated tokens from which on the window may end soon; our count of them may be off by a quarter."""
        left_tokens = _DANGER_RATIO * self.prepared.window.tokens - self.prepared.count.tokens
        return left_tokens if self.is_clients_limit else min(left_tokens, _DANGER_OUTPUT_RATIO * self.max_tokens)

    @property
    def is_clients_limit(self) -> bool:
        """The bound is the client's own limit: an answer that reaches it has ended."""
        return self.asked_tokens is not None and self.max_tokens >= self.asked_tokens

    def changes(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a client's `body` that its request has in another form: its bound, its messages, its tools."""
        changed = wire.with_output_limit(body, self.max_tokens)
        if self.prepared.messages is not None:
            changed["messages"] = wire.encode(self.prepared.messages, like=body.get("messages") or [])
        if self.prepared.tools is not None:
            changed["tools"] = list(self.prepared.tools)
        return changed

    @property
    def is_document(self) -> bool:
        """A format may shape the answer, but none that has begun: llama.cpp and vLLM would begin a new document."""
        return not self.goes_on or self.prepared.continuation.closing is not None

    @property
    def has_another_way(self) -> bool:
        """The server may not know the way in which it is to go on, so that there is another one."""
        way, closing = self.prepared.continuation.way, self.prepared.continuation.closing
        return self.goes_on and way is not None and (way != "turn" or bool(closing))

    @property
    def fields(self) -> Mapping[str, Any]:
        """Those of a body that make its server go on with the last message (vLLM), and think no more."""
        server = server_of(self.prepared.window.source)
        way, closing = self.prepared.continuation.way, self.prepared.continuation.closing
        needs_word = way == "prefill" and server is not None and server.continues_when_told
        own = {**(wire.GOES_ON if needs_word else {}), **(closing or {})}
        return own if self.goes_on else {}


@dataclass(slots=True, kw_only=True)
class State:
    """The marks that an answer's legs so far leave for the next one: each thing that is done once, or so often."""

    ways: frozenset[Way]  # In which the server may be made to go on.
    refused: tuple[Way, ...] = ()  # Of the others those that it does not know.
    restarts_left: int  # Compactions that may carry it on.
    was_doubted: bool = False  # It has ended at a bound that was made for doubt, and is told only of bounds without.
    has_retried: bool = False  # It was compacted harder after an overflow.
    may_look_up: bool = True
    cuts: int = 0  # Stops for others, or at its share of a context.
    is_resumed: bool = False  # The last leg goes on without a compaction.
    is_closing: bool = False  # Its thoughts were ended, since the window or their budget was spent.
    has_gained: bool = True  # Its last compaction has made room.
    is_joined: bool = False  # It is not one upstream answer, as that came.
    plan: ContinuationPlan | None = None  # By which one that is stopped goes on.
    outcome: AnswerOutcome = "completed"

    @property
    def is_last(self) -> bool:
        """No compaction may carry the answer on any more."""
        return self.restarts_left <= 0 or not self.has_gained


def next_leg(relay: Relay, state: State, *, is_used_up: bool, is_thoughts: bool) -> Step:
    """Returns the next step after a leg, or after one that would be stopped now.

    The client has as many tokens as it asked for if the answer `is_used_up`; nothing but thoughts if it `is_thoughts`.
    """
    end, calls, is_delivered = relay.end, relay.calls, relay.one.is_delivered
    if end == "failed":
        # This way is refused, and another one is left.
        return "other_way" if relay.leg.has_another_way and not relay.has_begun else "fail"
    if end == "done" and not (state.may_look_up and relay.recalls and not calls.of("clients")):
        return "deliver"
    if not is_delivered and end == "overflow":
        return "fail" if state.has_retried else "harder"
    if not is_delivered and end in GIVES_WAY:
        return "anew"
    if end != "done" and calls.has_begun and calls.held:
        return "calls"
    if is_used_up:
        return "used_up"
    if end == "done":
        return "look_up"
    if calls.has_begun:
        # It would repeat a call of which the client has a part.
        return "close"
    if end in GIVES_WAY and state.cuts < MAX_CUTS:
        return "resumed"
    # More room for thoughts is no answer: they are closed, once.
    if state.is_last or (state.is_closing and is_thoughts):
        return "close"
    if end == "overthought":
        return "relaxed"
    return "pressed" if relay.is_full else "compacted"


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
