"""What is remembered of a client's request while it is under way, under LiteLLM's call id.

In process memory only: request metadata would be read by other loggers (promise P9).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import Action, Attempts, Case, Guarded, Pending, Room
from litellm_compaction.proxy.failing_open import log_failed_open
from litellm_compaction.proxy.talks import Turn
from litellm_compaction.proxy.turns import Turns

# Far more than a proxy in front of one machine has under way; a bound for calls whose end we never see.
_MAX_CALLS = 1024


class Outlook(NamedTuple):
    """What is known of a request before its answer begins, in tokens; `after` is an upper bound where a compaction
    is still to be made.
    """

    before: int
    after: int
    window: int
    round: int


@dataclass(slots=True)
class Call:
    """One client request.

    Attributes:
        received: as the client sent it, for deployments that are left alone.
        original: the same without the notices that it carried back; the same object when there were none.
        group: the model name that it is filed under in the store.
        pin: the name or id under which the router finds the deployment that serves it.
        attempts: what it may still spend.
        is_chat: whether the client speaks chat completions, and so reads the stream that we see.
        rewritten: whether the list in LiteLLM's hands is no longer `received`.
        opted_out: whether the client asked not to be guarded, and may.
        asks_for_usage: whether a usage chunk belongs in the stream.
        is_structured: whether the answer is a document, where no notice may stand.
        is_told: whether the request before it told of a compaction, so that this one does not again.
        is_carried: whether the transport does all that happens while its answer is open.
        is_read: whether its answer has reached the loop that carries it.
        may_pause: whether its answer nears the limit, so that a compaction may silence it for a while.
        room: what it holds of a shared context where the hooks carry it, until it ends.
        case, guarded: of the newest deployment that it was sent to.
        outlook: for the response's headers, which are sent before the answer.
        action: the strongest thing done for it: compacted, then reused, then none.
        details: what restarts cost beside its usage; None without any.
        on_restarts: is told the group and the number of restarts of its answer.
        turns, turn: the plots' memory, and what it holds of this request; None without a page.
    """

    received: Request
    original: Request
    group: str
    attempts: Attempts
    pin: str = ""
    is_chat: bool = False
    rewritten: bool = False
    opted_out: bool = False
    asks_for_usage: bool = True
    is_structured: bool = False
    is_told: bool = False
    is_carried: bool = False
    is_read: bool = False
    may_pause: bool = False
    room: Room | None = None
    case: Case | None = None
    guarded: Guarded | None = None
    outlook: Outlook | None = None
    action: Action = "none"
    details: Mapping[str, Any] | None = None
    on_restarts: Callable[[str, int], None] | None = None
    turns: Turns | None = None
    turn: Turn | None = None

    @property
    def is_hooked(self) -> bool:
        """Whether LiteLLM's hooks carry its answer."""
        return self.is_chat and not self.is_carried and self.guarded is not None and self.case is not None

    def leave_room(self) -> None:
        """Gives back what it holds; again is no change."""
        if self.room is not None:
            self.room.leave()

    def will_be_compacted(self, pending: Pending) -> None:
        """Notes that a compaction is made while the answer is already open."""
        work = pending.work
        self.outlook = Outlook(
            before=work.tokens_before,
            after=pending.decision.predicted_tokens,
            window=work.window.tokens,
            round=pending.decision.round,
        )
        self.action = "compacted"
        self.may_pause = True

    def sent(self, case: Case, guarded: Guarded) -> None:
        """Notes what goes out."""
        self.case = case
        self.guarded = guarded
        self.outlook = Outlook(guarded.tokens_before, guarded.count.tokens, guarded.window.tokens, guarded.round)
        if guarded.action == "compacted" or self.action == "none":
            self.action = guarded.action
        if self.turns is None:
            return
        try:
            self.turn = self.turns.sent(self.turn, self.original.messages, case, guarded)
        except Exception as error:  # noqa: BLE001 - an answer is worth more than its place in a plot (P8)
            log_failed_open("turns", error)

    def answered(self, case: Case, guarded: Guarded, prompt_tokens: int, completion_tokens: int) -> None:
        """Notes what the server has counted."""
        if self.turns is not None:
            self.turns.answered(self.turn, case, guarded, prompt_tokens, completion_tokens)

    def restarted(self, details: Mapping[str, Any]) -> None:
        """Notes what restarts have cost."""
        self.details = details
        if self.on_restarts is not None:
            self.on_restarts(self.group, details["restarts"])


def headers(outlook: Outlook, action: Action) -> dict[str, str]:
    """What clients of guarded deployments are told about their request."""
    return {
        "x-litellm-compaction": action,
        "x-litellm-compaction-tokens-before": str(outlook.before),
        "x-litellm-compaction-tokens-after": str(outlook.after),
        "x-litellm-compaction-window": str(outlook.window),
        "x-litellm-compaction-round": str(outlook.round),
    }


class Calls:
    """The requests under way; the oldest is forgotten when there are too many.

    Args:
        on_restarts: is told the group and the number of restarts of each answer that had any.
        turns: the plots' memory.
    """

    def __init__(self, on_restarts: Callable[[str, int], None] | None = None, turns: Turns | None = None) -> None:
        self._on_restarts = on_restarts
        self._turns = turns
        self._calls: OrderedDict[str, Call] = OrderedDict()

    def open(self, call_id: str, call: Call) -> Call:
        """Remembers `call`."""
        call.on_restarts = self._on_restarts
        call.turns = self._turns
        self._calls[call_id] = call
        while len(self._calls) > _MAX_CALLS:
            self._calls.popitem(last=False)
        return call

    def get(self, call_id: str) -> Call | None:
        """The request under `call_id`, if we guard it."""
        return self._calls.get(call_id)

    def close(self, call_id: str) -> Call | None:
        """Forgets a request that has ended, and what it held."""
        call = self._calls.pop(call_id, None)
        if call is not None:
            call.leave_room()
        return call
