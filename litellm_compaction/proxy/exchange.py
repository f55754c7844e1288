"""One client request while it is under way: what was asked, read once for all phases, and what has been done for it.

In process memory only: request metadata would be read by other loggers (promise P9). And never under a name that a
client can choose, as it can LiteLLM's call id: LiteLLM makes one logging object for each request and hands it to every
hook on every route, with retries and fallbacks; an exchange belongs to that object, and ends with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, NamedTuple

from litellm_compaction.concurrency import Bounded
from litellm_compaction.config import Settings
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import Message, Request, cleaned, system_prefix_length
from litellm_compaction.core.portable import Unfolded
from litellm_compaction.core.transcripts import is_client_summary
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
from litellm_compaction.errors import BadWish, CompactionError
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.client import (
    NONE,
    Wish,
    is_off_for_owner,
    metadata_of,
    sent_body,
    tenant_of,
    told_headers,
    wish_of,
)
from litellm_compaction.proxy.litellm_inside.application import keeps_responses
from litellm_compaction.proxy.standards.orders import NO_ORDERS, Orders, Told

# LiteLLM's logging object of the request that a task serves: it is taken away before a failure is told.
_served: ContextVar[weakref.ref[object] | None] = ContextVar("litellm_compaction_served", default=None)
# Far more than a proxy in front of one machine has under way; a bound for requests whose end is never told.
_MOST = 1024
_HEADER = "x-litellm-compaction"
# Of an answer beside a conversation, and of the message that asks for it: no title, no list of suggestions is longer.
_MOST_ANSWER_TOKENS, _MOST_CHARS = 512, 4000
# Of a conversation's end, by which a copy of it is known; a copy of one message may be anybody's.
_END, _LEAST_COPIED = 32, 2
_MOST_TENANTS, _MOST_CONVERSATIONS = 4096, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A request as the client sent it: read once, by every phase; so it has as many fields as clients have words."""

    received: Request
    original: Request  # Without the notices that it carried back; the same object if there were none.
    group: str  # The model name that it is filed under in the store.
    tenant: str = ""
    client_text: Callable[[], str] = str  # Gives every text that the client sent, in whatever field.
    is_chat: bool = False  # The client speaks chat completions, and so reads the stream that we see.
    opted_out: bool = False
    wish: Wish = NONE
    bad_wish: CompactionError | None = None  # Why its wish could not be read, or another field is not served.
    is_client_summary: bool = False  # The client summarizes its conversation itself, or asks for something beside it.
    is_beside: bool = False  # Its conversation goes on as if it had not asked.
    orders: Orders = NO_ORDERS
    cleared_calls: int = 0  # Of old tool results, by its order; `original` is without them.
    cleared_tokens: int = 0
    token_ids: int | None = None  # The number of them in a text completion that consists of them.
    bases: tuple[Compaction, ...] = ()  # The record that `original` begins with, as `core.portable.Unfolded` has it.

    @property
    def is_unread(self) -> bool:
        """Its prompt is none that can be counted."""
        return not self.original.messages and self.token_ids is None


def client_request(
    body: Mapping[str, Any],
    group: str,
    orders: Orders | None,
    settings: Settings,
    conversations: Conversations,
    *,
    is_bridged: bool,
    is_chat: bool,
) -> ClientRequest | None:
    """Reads a body with LiteLLM's metadata, filed under `group`; None without a conversation.

    `orders` are None if its protocol was not read; `is_bridged` if LiteLLM makes a chat of a text completion.
    """
    received, token_ids = wire.decode(body), None
    if received is None and "prompt" in body:
        received, token_ids = wire.decode_text(body, is_bridged=is_bridged)
        # Any other is for the transport, and the server, to judge.
        received = received or Request(messages=())
    if received is None:
        return None
    metadata = metadata_of(body)
    unfolded, bases = Unfolded(received.messages) if orders is None else orders.unfolded(received.messages)
    messages = tuple(map(cleaned, unfolded))
    is_same = unfolded is received.messages and all(map(is_, messages, unfolded))
    original = received if is_same else replace(received, messages=messages)
    wish, bad_wish = _wish(body, metadata, is_read=orders is not None)
    tenant, is_summary, is_beside = tenant_of(metadata), False, False
    if settings.mode == "guard":
        is_summary, is_beside = _form(body, original, tenant, conversations)
    return ClientRequest(
        received=received,
        original=original,
        group=group,
        tenant=tenant,
        client_text=wire.client_texts(body),
        is_chat=is_chat,
        opted_out=(settings.allow_opt_out and wish.off) or is_off_for_owner(metadata),
        wish=wish,
        bad_wish=bad_wish,
        is_client_summary=is_summary,
        is_beside=is_beside,
        orders=orders or NO_ORDERS,
        token_ids=token_ids,
        bases=bases,
    )


def _wish(
    body: Mapping[str, Any], metadata: Mapping[str, Any], *, is_read: bool
) -> tuple[Wish, CompactionError | None]:
    """The client's wish; and why it could not be read, or another field of the body is not served."""
    route = str(metadata.get("user_api_key_request_route") or "")
    try:
        wish = wish_of(body, metadata)
    except BadWish as error:
        # Told only if it is guarded: a deployment that is just observed answers as ever.
        return NONE, error
    return wish, wire.not_served(sent_body(body), route, keeps_responses=keeps_responses, is_read=is_read)


def _form(body: Mapping[str, Any], request: Request, tenant: str, conversations: Conversations) -> tuple[bool, bool]:
    """Tells if the client summarizes its conversation itself or asks for something beside it; and if it is the latter.

    A summary of its own is beside the conversation as well, if its answer is short.
    """
    has_tools, is_bounded = bool(request.tools), _is_little(wire.asked_output_tokens(body))
    if is_client_summary(request.messages, told_headers(body), has_tools=has_tools):
        return True, is_bounded
    is_beside = conversations.is_beside(tenant, request.messages, has_tools=has_tools, is_bounded=is_bounded)
    return is_beside, is_beside


@dataclass(slots=True)
class Attempt:
    """The state of a request at one deployment; a fallback to another deployment begins a new one."""

    deployment: str = ""
    needed: CompactionNeeded | None = None  # A compaction that is made after the headers have gone.
    context: RequestContext | None = None
    prepared: PreparedRequest | None = None  # As it was sent last.
    action: Action = "none"  # The strongest thing done for it: compacted, then reused, then none.
    details: Mapping[str, Any] | None = None  # Of its usage: its end, and the cost of restarts.
    is_carried: bool = False  # The transport does all that happens while its answer is open.
    # Nothing is told before its answer begins, so that LiteLLM may keep the stream's opening.
    begins_silently: bool = False

    @property
    def numbers(self) -> dict[str, int]:
        """Tokens and round of what was sent, or will be: an upper bound stands for the tokens after a compaction."""
        if (sent := self.prepared) is not None:
            numbers = (sent.tokens_before, sent.count.tokens, sent.window.tokens, sent.round)
        elif self.needed is not None:
            measured, step = self.needed.measured, self.needed.steps[0]
            numbers = (measured.tokens_before, step.predicted_tokens, measured.window.tokens, step.draft.round)
        else:
            return {}
        named = dict(zip(("tokens-before", "tokens-after", "window", "round"), numbers, strict=True))
        quoted = {"excerpts": sent.excerpts, "excerpt-tokens": sent.excerpt_tokens} if sent and sent.excerpts else {}
        return {**named, **quoted}


@dataclass(slots=True)
class Exchange:
    """A client's request and the work done for it. The loop that carries its answer tells it how that goes."""

    client: ClientRequest
    attempts: Attempts  # That it may still spend.
    pin: str = ""  # By which the router finds the deployment that it was measured for last.
    may_pause: bool = False  # Its answer nears the limit, so that a compaction may silence it for a while.
    alone: Told | None = None  # The whole answer, if no model is asked.
    refusal: CompactionError | None = None
    foreseen: Foreseen | None = None  # The outcome before its deployment was chosen, until it is.
    room: Reservation | None = None  # Its hold on a shared context if the hooks carry it, until it ends.
    attempt: Attempt = field(default_factory=Attempt)

    @property
    def is_hooked(self) -> bool:
        """LiteLLM's hooks carry its answer."""
        sent = self.attempt
        return self.client.is_chat and not sent.is_carried and sent.prepared is not None and sent.context is not None

    @property
    def headers(self) -> dict[str, str] | None:
        """Response headers for clients of guarded deployments; None for others."""
        fields = {**self.attempt.numbers, **self._receipt()}
        named = {f"{_HEADER}-{name}": str(value) for name, value in fields.items()}
        return {_HEADER: self.attempt.action, **named} if fields else None

    @property
    def late_receipt(self) -> dict[str, str]:
        """The receipt of a record that was applied after the headers had gone; {} for none."""
        needed, prepared = self.attempt.needed, self.attempt.prepared
        is_late = needed is not None or (prepared is not None and prepared.continuation.way is not None)
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

    def refused(self, error: CompactionError) -> None:
        self.refusal = error

    def release_room(self) -> None:
        """Gives back its room; may be called again."""
        if self.room is not None:
            self.room.release()

    def will_be_compacted(self, needed: CompactionNeeded) -> None:
        """Notes that a compaction is made while the answer is already open."""
        self.attempt.needed, self.attempt.prepared = needed, None
        self.attempt.action = "compacted"
        self.may_pause = True

    def sent(self, context: RequestContext, prepared: PreparedRequest) -> None:
        """Notes the prepared request."""
        attempt = self.attempt
        # What was foreseen may have been of another list: LiteLLM leaves out what a server does not read.
        is_first, attempt.context, attempt.prepared = attempt.prepared is None, context, prepared
        if is_first or prepared.action == "compacted" or attempt.action == "none":
            attempt.action = prepared.action

    def ended(self, details: Mapping[str, Any]) -> None:
        """Notes how the answer ended, and the cost of restarts."""
        self.attempt.details = details


class Exchanges:
    """The requests under way, each as long as LiteLLM's logging object of it lives."""

    def __init__(self) -> None:
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

    def close(self, body: Mapping[str, Any]) -> Exchange | None:
        """Forgets a request that has ended, and its holds."""
        exchange = self._own.pop(_asker(body) or self, None)
        if exchange is not None:
            exchange.release_room()
        return exchange


def _owner(body: Mapping[str, Any]) -> object | None:
    """LiteLLM's logging object; never anything that JSON, and so a client, could have put in its place."""
    owner: object = body.get("litellm_logging_obj")
    return owner if hasattr(owner, "model_call_details") else None


def _asker(body: Mapping[str, Any]) -> object | None:
    reference = _served.get()
    return _owner(body) or (reference() if reference is not None else None)


# ------------------------------------------------------------------ a request beside a conversation


class _Seen(NamedTuple):
    """A conversation's newest request; `end` are its last messages, oldest first, as hashes of role and text."""

    length: int
    first: int
    end: tuple[int, ...]
    has_tools: bool
    is_bounded: bool


class Conversations:
    """The newest conversations of each tenant, without their texts, by which requests beside them are told by form.

    Such a request (a title, tags, suggestions) is one short message over a copy of the conversation's end, without
    tools, and its answer is bounded where the conversation's own requests are not, or it has none of their tools. In
    doubt a request is an ordinary one. No summary is made for one beside, and nothing is kept of it.
    """

    def __init__(self) -> None:
        self._seen: Bounded[str, tuple[_Seen, ...]] = Bounded(_MOST_TENANTS)

    def is_beside(self, tenant: str, messages: Sequence[Message], *, has_tools: bool, is_bounded: bool) -> bool:
        """Returns True for a request beside a conversation of its tenant's; takes note of any other."""
        if not messages:
            return False
        hashes = tuple(hash((message.role, message.text, message.calls)) for message in messages)
        own = _Seen(len(messages), hashes[0], hashes[-_END:], has_tools, is_bounded)
        known = self._seen.get(tenant, ())
        if not has_tools and any(_is_beside(messages, hashes, each, is_bounded=is_bounded) for each in known):
            return True
        others = (each for each in known if each.end[-1] not in hashes or each.first != own.first)
        self._seen[tenant] = (own, *others)[:_MOST_CONVERSATIONS]
        return False


def _is_little(asked_tokens: int | None) -> bool:
    return asked_tokens is not None and 0 < asked_tokens <= _MOST_ANSWER_TOKENS


def _is_beside(messages: Sequence[Message], hashes: tuple[int, ...], seen: _Seen, *, is_bounded: bool) -> bool:
    says_little = is_bounded and not seen.is_bounded
    for added, start, end in ((messages[-1], 0, len(messages) - 1), (messages[0], 1, len(messages))):
        # The answer that the conversation's next turn will have.
        has_answer = end > start and messages[end - 1].role == "assistant" and not messages[end - 1].calls
        copy = hashes[start : end - has_answer]
        copied = min(len(copy), len(seen.end))
        is_copy = copied > 0 and copied + has_answer >= _LEAST_COPIED and copy[-copied:] == seen.end[-copied:]
        is_whole = is_copy and len(copy) == seen.length and copy[0] == seen.first
        is_short = (added.is_system or added.role == "user") and len(added.text) <= _MOST_CHARS
        is_copy = is_copy and (start == 0 or hashes[0] != seen.first)
        if is_copy and is_short and (says_little or (seen.has_tools and not is_whole)):
            return True
    return False
