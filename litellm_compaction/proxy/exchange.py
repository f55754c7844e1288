"""One client request while it is under way: what was asked, and what has been done for it.

In process memory only: request metadata would be read by other loggers (promise P9). And never under a name that a
client can choose, as it can LiteLLM's call id: LiteLLM makes one logging object for each request and hands it to every
hook on every route, with retries and fallbacks; an exchange belongs to that object, and ends with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import Request, system_prefix_length
from litellm_compaction.engine import (
    Action,
    Attempts,
    CompactionNeeded,
    Foreseen,
    PreparedRequest,
    RequestContext,
    Reservation,
)
from litellm_compaction.engine.records import receipt_of
from litellm_compaction.errors import CompactionError
from litellm_compaction.proxy.client import NONE, Wish
from litellm_compaction.proxy.standards.orders import NO_ORDERS, Orders, Told

# LiteLLM's logging object of the request that a task serves: it is taken away before a failure is told.
_served: ContextVar[weakref.ref[object] | None] = ContextVar("litellm_compaction_served", default=None)
# Far more than a proxy in front of one machine has under way; a bound for requests whose end is never told.
_MOST = 1024
_DETAILS = "model_call_details"
_HEADER = "x-litellm-compaction"
OnRestarts: TypeAlias = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A request as the client sent it: read once, by every phase; so it has as many fields as clients have words.

    Attributes:
        original: as it was received, without the notices that it carried back; the same object if there were none.
        group: the model name that it is filed under in the store.
        client_text: gives every text that the client sent, in whatever field.
        is_chat: the client speaks chat completions, and so reads the stream that we see.
        bad_wish: why its wish could not be read, or another field is not served; None for neither.
        is_client_summary: the client summarizes its conversation itself, or asks for something beside it.
        is_beside: its conversation goes on as if it had not asked.
        cleared_calls, cleared_tokens: of old tool results, by its order; `original` is without them.
        token_ids: the number of them in a text completion that consists of them; None for any other request.
        bases: the record that `original` begins with, as `core.portable.Unfolded` has it.
    """

    received: Request
    original: Request
    group: str
    tenant: str = ""
    client_text: Callable[[], str] = str
    is_chat: bool = False
    opted_out: bool = False
    wish: Wish = NONE
    bad_wish: CompactionError | None = None
    is_client_summary: bool = False
    is_beside: bool = False
    orders: Orders = NO_ORDERS
    cleared_calls: int = 0
    cleared_tokens: int = 0
    token_ids: int | None = None
    bases: tuple[Compaction, ...] = ()

    @property
    def is_unread(self) -> bool:
        """Its prompt is none that can be counted."""
        return not self.original.messages and self.token_ids is None


@dataclass(slots=True)
class Attempt:
    """The state of a request at one deployment; a fallback to another deployment begins a new one.

    Attributes:
        context, prepared: as it was sent last.
        action: the strongest thing done for it: compacted, then reused, then none.
        is_open: its compaction is made after the headers have gone.
        details: of its usage: its end, and the cost of restarts.
        is_carried: the transport does all that happens while its answer is open.
        begins_silently: nothing is told before its answer begins, so that LiteLLM may keep the stream's opening.
    """

    deployment: str = ""
    context: RequestContext | None = None
    prepared: PreparedRequest | None = None
    action: Action = "none"
    headers: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False
    details: Mapping[str, Any] | None = None
    is_carried: bool = False
    begins_silently: bool = False


@dataclass(slots=True)
class Exchange:
    """A client's request and the work done for it. The loop that carries its answer tells it how that goes.

    Attributes:
        attempts: the number that it may still spend.
        pin: the name or id under which the router finds the deployment that it was measured for last.
        may_pause: its answer nears the limit, so that a compaction may silence it for a while.
        alone: the whole answer, if no model is asked; None otherwise.
        foreseen: the outcome before its deployment was chosen, until it is.
        room: its hold on a shared context if the hooks carry it, until it ends.
    """

    client: ClientRequest
    attempts: Attempts
    pin: str = ""
    may_pause: bool = False
    alone: Told | None = None
    refusal: CompactionError | None = None
    foreseen: Foreseen | None = None
    room: Reservation | None = None
    attempt: Attempt = field(default_factory=Attempt)
    on_restarts: OnRestarts | None = None

    @property
    def is_hooked(self) -> bool:
        """LiteLLM's hooks carry its answer."""
        sent = self.attempt
        return self.client.is_chat and not sent.is_carried and sent.prepared is not None and sent.context is not None

    @property
    def headers(self) -> dict[str, str] | None:
        """Response headers for clients of guarded deployments; None for others."""
        if not self.attempt.headers:
            return None
        receipt = {f"{_HEADER}-{name}": value for name, value in self._receipt().items()}
        return {_HEADER: self.attempt.action, **self.attempt.headers, **receipt}

    @property
    def late_receipt(self) -> dict[str, str]:
        """The receipt of a record that was applied after the headers had gone; {} for none."""
        prepared = self.attempt.prepared
        is_late = self.attempt.is_open or (prepared is not None and prepared.way is not None)
        return self._receipt() if is_late else {}

    def _receipt(self) -> dict[str, str]:
        context, prepared = self.attempt.context, self.attempt.prepared
        if context is None or prepared is None or prepared.compaction is None:
            return {}
        prefix = system_prefix_length(self.client.original.messages)
        return receipt_of(context.scope, prepared.compaction, prefix)._asdict()

    def begins_attempt(self, deployment: str) -> None:
        """Forgets the attempts at other deployments; work for this one still holds."""
        self.release_room()
        self.refusal = None
        if self.attempt.deployment not in ("", deployment):
            self.attempt, self.may_pause = Attempt(), False
        self.attempt.deployment = deployment

    def take_foreseen(self) -> Foreseen | None:
        """For the first attempt only: a later one may come minutes after."""
        foreseen, self.foreseen = self.foreseen, None
        return foreseen

    def refused(self, error: CompactionError) -> None:
        self.refusal = error

    def release_room(self) -> None:
        """Gives back its room; may be called again."""
        if self.room is not None:
            self.room.release()

    def will_be_compacted(self, needed: CompactionNeeded) -> None:
        """Notes that a compaction is made while the answer is already open."""
        measured, step = needed.measured, needed.steps[0]
        # An upper bound stands for the tokens after it.
        self._tells(measured.tokens_before, step.predicted_tokens, measured.window.tokens, step.draft.round)
        self.attempt.action = "compacted"
        self.attempt.is_open = self.may_pause = True

    def sent(self, context: RequestContext, prepared: PreparedRequest) -> None:
        """Notes the prepared request."""
        attempt = self.attempt
        # What was foreseen may have been of another list: LiteLLM leaves out what a server does not read.
        is_first, attempt.context, attempt.prepared = attempt.prepared is None, context, prepared
        self._tells(prepared.tokens_before, prepared.count.tokens, prepared.window.tokens, prepared.round)
        if prepared.excerpts:
            quoted = {"excerpts": prepared.excerpts, "excerpt-tokens": prepared.excerpt_tokens}
            attempt.headers = {**attempt.headers, **_in_headers(quoted)}
        if is_first or prepared.action == "compacted" or attempt.action == "none":
            attempt.action = prepared.action

    def _tells(self, before_tokens: int, after_tokens: int, window_tokens: int, round_: int) -> None:
        told = {"tokens-before": before_tokens, "tokens-after": after_tokens, "window": window_tokens, "round": round_}
        self.attempt.headers = _in_headers(told)

    def ended(self, details: Mapping[str, Any]) -> None:
        """Notes how the answer ended, and the cost of restarts."""
        self.attempt.details = details
        if self.on_restarts is not None and details["restarts"]:
            self.on_restarts(self.client.group, details["restarts"])


def _in_headers(numbers: Mapping[str, int]) -> dict[str, str]:
    return {f"{_HEADER}-{name}": str(number) for name, number in numbers.items()}


class Exchanges:
    """The requests under way, each as long as LiteLLM's logging object of it lives."""

    def __init__(self, on_restarts: OnRestarts | None = None) -> None:
        self._on_restarts = on_restarts
        self._own: weakref.WeakKeyDictionary[object, Exchange] = weakref.WeakKeyDictionary()
        # Known before the request is: of the body that the client sent.
        self._orders: weakref.WeakKeyDictionary[object, Orders] = weakref.WeakKeyDictionary()

    def note_orders(self, body: Mapping[str, Any], orders: Orders) -> bool:
        """Notes what a client's protocol says of its context; returns False if LiteLLM has no object to note it by."""
        if (owner := _owner(body)) is None:
            return False
        self._orders[owner] = orders
        return True

    def orders(self, body: Mapping[str, Any]) -> Orders | None:
        """Returns what was noted of a request; None for one whose protocol was not read."""
        return self._orders.get(_owner(body) or self)

    def serve(self, body: Mapping[str, Any]) -> None:
        """Notes the request that the running task, and every task that it begins, serves."""
        owner = _owner(body)
        _served.set(None if owner is None else weakref.ref(owner))

    def open(self, body: Mapping[str, Any], exchange: Exchange) -> Exchange:
        """Remembers `exchange` as the request of a hook's `body`."""
        exchange.on_restarts = self._on_restarts
        if (owner := _owner(body)) is None:
            return exchange
        self._own[owner] = exchange
        while len(self._own) > _MOST:
            # An exchange can hold its owner: LiteLLM's metadata has the calls that failed.
            self._own.pop(next(self._own.keys()), None)
        if (served := _asker({})) is not None:
            # LiteLLM may call the deployment with an object of its own (generateContent).
            self._own.setdefault(served, exchange)
        return exchange

    def get(self, body: Mapping[str, Any]) -> Exchange | None:
        """The request of a hook's `body`, if it is guarded."""
        return self._own.get(_asker(body) or self)

    def refusal(self) -> CompactionError | None:
        """The last refusal of the request that the running task serves; None without any."""
        exchange = self.get({})
        return exchange.refusal if exchange is not None else None

    def logged(self, details: Mapping[str, Any]) -> Exchange | None:
        """The request that LiteLLM logs, by the details that its logging object holds."""
        owned = list(self._own.items())
        return next((exchange for owner, exchange in owned if getattr(owner, _DETAILS, None) is details), None)

    def close(self, body: Mapping[str, Any]) -> Exchange | None:
        """Forgets a request that has ended, and its holds."""
        exchange = self._own.pop(_asker(body) or self, None)
        if exchange is not None:
            exchange.release_room()
        return exchange


def _owner(body: Mapping[str, Any]) -> object | None:
    """LiteLLM's logging object; never anything that JSON, and so a client, could have put in its place."""
    found: object = body.get("litellm_logging_obj")
    return found if hasattr(found, _DETAILS) else None


def _asker(body: Mapping[str, Any]) -> object | None:
    reference = _served.get()
    return _owner(body) or (reference() if reference is not None else None)
