"""One client request while it is under way: what was asked, read once for all phases, and what has been done for it.

In process memory only: request metadata would be read by other loggers (promise P9). And never under a name that a
client can choose, as it can LiteLLM's call id: LiteLLM makes one logging object for each request and hands it to every
hook on every route, with retries and fallbacks; an exchange belongs to that object, and ends with it.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from typing import Any, NamedTuple

from litellm_compaction import engine
from litellm_compaction.concurrency import Bounded, is_long, off_loop_if
from litellm_compaction.config import SAME_MODEL, Settings
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import Message, Request, cleaned, system_prefix_length
from litellm_compaction.core.portable import Unfolded
from litellm_compaction.core.transcripts import is_client_summary
from litellm_compaction.engine.records import receipt_of
from litellm_compaction.errors import BadWish, CompactionError
from litellm_compaction.proxy import client, litellm_inside, wire
from litellm_compaction.proxy.internal import Caller, may_write_ahead
from litellm_compaction.proxy.litellm_inside.application import keeps_responses, may_use
from litellm_compaction.proxy.routing import (
    Deployment,
    DeploymentSelector,
    GuardedDeployment,
    is_bridged,
    is_listed_here,
)
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
    wish: client.Wish = client.NONE
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
    body: Mapping[str, Any], group: str, orders: Orders | None, settings: Settings, *, is_bridged: bool, is_chat: bool
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
    metadata = client.metadata_of(body)
    unfolded, bases = Unfolded(received.messages) if orders is None else orders.unfolded(received.messages)
    messages = tuple(map(cleaned, unfolded))
    is_same = unfolded is received.messages and all(map(is_, messages, unfolded))
    wish, route = client.NONE, str(metadata.get("user_api_key_request_route") or "")
    bad_wish: CompactionError | None
    bad_wish = wire.not_served(client.sent_body(body), route, keeps=keeps_responses, is_read=orders is not None)
    try:
        wish = client.wish_of(body, metadata)
    except BadWish as error:
        # Told only if it is guarded: a deployment that is just observed answers as ever.
        bad_wish = error
    return ClientRequest(
        received=received,
        original=received if is_same else replace(received, messages=messages),
        group=group,
        tenant=client.tenant_of(metadata),
        client_text=wire.client_texts(body),
        is_chat=is_chat,
        opted_out=(settings.allow_opt_out and wish.off) or client.is_off_for_owner(metadata),
        wish=wish,
        bad_wish=bad_wish,
        orders=orders or NO_ORDERS,
        token_ids=token_ids,
        bases=bases,
    )


@dataclass(slots=True)
class Attempt:
    """The state of a request at one deployment; a fallback to another deployment begins a new one."""

    deployment: str = ""
    needed: engine.CompactionNeeded | None = None  # A compaction that is made after the headers have gone.
    context: engine.RequestContext | None = None
    prepared: engine.PreparedRequest | None = None  # As it was sent last.
    action: engine.Action = "none"  # The strongest thing done for it: compacted, then reused, then none.
    details: Mapping[str, Any] | None = None  # Of its usage: its end, and the cost of restarts.
    is_carried: bool = False  # The transport does all that happens while its answer is open.
    # Nothing is told before its answer begins, so that LiteLLM may keep the stream's opening.
    begins_silently: bool = False

    @property
    def numbers(self) -> dict[str, int]:
        """Tokens and round of what was sent, or will be: an upper bound stands for the tokens after a compaction."""
        quoted = {}
        if (sent := self.prepared) is not None:
            numbers = (sent.tokens_before, sent.count.tokens, sent.window.tokens, sent.round)
            quoted = {"excerpts": sent.excerpts, "excerpt-tokens": sent.excerpt_tokens} if sent.excerpts else {}
        elif self.needed is not None:
            measured, step = self.needed.measured, self.needed.steps[0]
            numbers = (measured.tokens_before, step.predicted_tokens, measured.window.tokens, step.draft.round)
        else:
            return {}
        return dict(zip(("tokens-before", "tokens-after", "window", "round"), numbers, strict=True)) | quoted


@dataclass(slots=True)
class Exchange:
    """A client's request and the work done for it. The loop that carries its answer tells it how that goes."""

    client: ClientRequest
    attempts: engine.Attempts  # That it may still spend.
    pin: str = ""  # By which the router finds the deployment that it was measured for last.
    may_pause: bool = False  # Its answer nears the limit, so that a compaction may silence it for a while.
    alone: Told | None = None  # The whole answer, if no model is asked.
    refusal: CompactionError | None = None
    foreseen: engine.Decided | None = None  # The outcome before its deployment was chosen, until it is.
    room: engine.Reservation | None = None  # Its hold on a shared context if the hooks carry it, until it ends.
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

    def will_be_compacted(self, needed: engine.CompactionNeeded) -> None:
        """Notes that a compaction is made while the answer is already open."""
        self.attempt.needed, self.attempt.prepared = needed, None
        self.attempt.action = "compacted"
        self.may_pause = True

    def sent(self, context: engine.RequestContext, prepared: engine.PreparedRequest) -> None:
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
        self._conversations = Conversations()

    async def read(
        self, body: Mapping[str, Any], group: str, settings: Settings, *, is_bridged: bool, is_chat: bool
    ) -> Exchange | None:
        """A request as `client_request` reads it, before anything is done for it."""
        orders, prompt = self.orders(body), body.get("prompt")

        def read() -> ClientRequest | None:
            asked = client_request(body, group, orders, settings, is_bridged=is_bridged, is_chat=is_chat)
            return self._conversations.placed(asked, body) if asked and settings.mode == "guard" else asked

        asked = await off_loop_if(is_long(body.get("messages"), body.get("tools"), prompt, [prompt]), read)
        attempts = engine.Attempts(summary_calls_left=settings.constants.max_summary_calls)
        return Exchange(asked, attempts) if asked is not None else None

    def note_orders(self, body: Mapping[str, Any], orders: Orders) -> bool:
        """Notes what a client's protocol says of its context; returns False if LiteLLM has no object to note it by."""
        if (owner := _owner(body)) is not None:
            self._orders[owner] = orders
        return owner is not None

    def orders(self, body: Mapping[str, Any]) -> Orders | None:
        """Returns what was noted of a request; None for one whose protocol was not read."""
        return self._orders.get(_owner(body) or self)

    def serve(self, body: Mapping[str, Any]) -> None:
        """Notes the request that the running task, and every task that it begins, serves."""
        owner = _owner(body)
        _served.set(None if owner is None else weakref.ref(owner))

    def open(self, body: Mapping[str, Any], exchange: Exchange) -> Exchange:
        """Remembers `exchange` as the request of a hook's `body`."""
        if (owner := _owner(body)) is not None:
            self._own[owner] = exchange
            # LiteLLM may call the deployment with an object of its own (generateContent).
            self._own.setdefault(_asker({}) or owner, exchange)
        while len(self._own) > _MOST:
            # An exchange can hold its owner: LiteLLM's metadata has the calls that failed.
            self._own.pop(next(self._own.keys()), None)
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


# ------------------------------------------------------------------ what the engine is given for a request


async def context_of(
    router: Any, guards: DeploymentSelector, guard: GuardedDeployment, exchange: Exchange, body: Mapping[str, Any]
) -> engine.RequestContext:
    """A request's surroundings for the engine; notes in `exchange` how the deployment is reached."""
    deployment, settings, asked = guard.deployment, guard.settings, exchange.client
    metadata, is_through = client.metadata_of(body), guard.carrier == "transport"
    exchange.pin = _pin(router, deployment) or asked.group
    caller = Caller(router, exchange.pin, metadata, settings.summary_timeout_s, asked.group, is_same=True)
    same = engine.PruningModel(label=asked.group, target=deployment.target, ask=caller.ask, is_same=True)
    # A text completion is never compacted, unless LiteLLM makes a chat of it, which is carried like any other.
    is_text = "prompt" in body and not body.get("messages")
    is_chat = not is_text or (is_through and is_bridged(deployment.provider))
    # One of several processes of a proxy: uvicorn starts those as children of multiprocessing's.
    is_worker, is_in_memory = multiprocessing.parent_process() is not None, settings.store.startswith("memory:")
    may_be_ahead = deployment.target.is_listed and not asked.is_client_summary and not (is_worker and is_in_memory)
    return engine.RequestContext(
        label=asked.group,
        target=replace(deployment.target, asker=asked.tenant),
        settings=settings,
        scope=_scope(metadata, asked.group, settings),
        tenant=asked.tenant,
        pruning_models=(*await _other_pruning_model(router, guards, settings, metadata), same),
        warm_up=replace(caller, timeout_s=settings.constants.warm_up_timeout_s).load,
        attempts=exchange.attempts,
        asked_tokens=wire.asked_output_tokens(body),
        measure=caller.measure,
        may_write_ahead=partial(may_write_ahead, metadata) if may_be_ahead else None,
        has_siblings=is_worker or not settings.store.startswith(("sqlite:", "memory:")),
        now=asked.orders.compacts_only or (asked.wish.now and not asked.is_client_summary),
        focus="" if asked.is_client_summary else asked.wish.focus or asked.orders.focus,
        pins=asked.wish.pins,
        is_client_summary=asked.is_client_summary,
        is_beside=asked.is_beside,
        portable=asked.bases,
        threshold_tokens=asked.orders.threshold_tokens,
        may_change=asked.orders.may_change and is_chat,
        carries_calls=wire.can_be_continued(body) and (is_through or (asked.is_chat and bool(body.get("stream")))),
    )


async def _other_pruning_model(
    router: Any, guards: DeploymentSelector, settings: Settings, metadata: Mapping[str, Any]
) -> Sequence[engine.PruningModel]:
    if (name := settings.pruning_model) == SAME_MODEL:
        return ()
    target, why = await guards.pruning_target(router, name), "is not a model of this proxy"
    if target is not None and not may_use(router, name, metadata):
        target, why = None, "is not allowed for some keys"
    if target is None:
        guards.warn_once(f"{name} {why}", "pruning_model=%s %s; the same model is used there", name, why)
        return ()
    caller = Caller(router, name, metadata, settings.summary_timeout_s, name)
    return (engine.PruningModel(label=name, target=target, ask=caller.ask, is_same=False),)


def _pin(router: Any, deployment: Deployment) -> str:
    """The name under which the router reaches this very deployment and model.

    A wildcard deployment's id would reach the model `*`: LiteLLM fills in the name only if it routes by name. One that
    we have listed for a wildcard may be gone when its answer goes on.
    """
    own = litellm_inside.deployment(router, deployment.id)
    is_passing = own is None or "*" in str(own.litellm_params.model) or is_listed_here(deployment.id)
    return deployment.group if is_passing else deployment.id


def _scope(metadata: Mapping[str, Any], group: str, settings: Settings) -> str:
    """Stored compactions are shared by one tenant, model group and settings."""
    shape = (settings.strategy, settings.pruning_model, settings.target_ratio, settings.keep_recent_messages)
    # Text that was written down with its secrets is not read again once they are to be left out.
    whole = (*shape, settings.constants.summary_max_tokens, settings.redact_patterns)
    return hashlib.blake2b(repr((client.identity_of(metadata), group, whole)).encode(), digest_size=16).hexdigest()


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

    def placed(self, asked: ClientRequest, body: Mapping[str, Any]) -> ClientRequest:
        """Notes of a request that it asks for a summary of its client's own, or for something beside a conversation.

        A summary is beside the conversation as well, if its answer is short.
        """
        messages, has_tools = asked.original.messages, bool(asked.original.tools)
        is_bounded = 0 < (wire.asked_output_tokens(body) or 0) <= _MOST_ANSWER_TOKENS
        if is_client_summary(messages, client.told_headers(body), has_tools=has_tools):
            return replace(asked, is_client_summary=True, is_beside=is_bounded)
        is_beside = self.is_beside(asked.tenant, messages, has_tools=has_tools, is_bounded=is_bounded)
        return replace(asked, is_client_summary=is_beside, is_beside=is_beside)

    def is_beside(self, tenant: str, messages: Sequence[Message], *, has_tools: bool, is_bounded: bool) -> bool:
        """Returns True for a request beside a conversation of its tenant's; takes note of any other."""
        if not messages:
            return False
        hashes = tuple(hash((message.role, message.text, message.calls)) for message in messages)
        own = _Seen(len(messages), hashes[0], hashes[-_END:], has_tools, is_bounded)
        seen = self._seen.get(tenant, ())
        if not has_tools and any(_is_beside(messages, hashes, each, is_bounded=is_bounded) for each in seen):
            return True
        others = (each for each in seen if each.end[-1] not in hashes or each.first != own.first)
        self._seen[tenant] = (own, *others)[:_MOST_CONVERSATIONS]
        return False


def _is_beside(messages: Sequence[Message], hashes: tuple[int, ...], seen: _Seen, *, is_bounded: bool) -> bool:
    """The message that asks stands behind the copy, or before it."""
    for added, start, end in ((messages[-1], 0, len(messages) - 1), (messages[0], 1, len(messages))):
        # The answer that the conversation's next turn will have.
        has_answer = end > start and messages[end - 1].role == "assistant" and not messages[end - 1].calls
        copy = hashes[start : end - has_answer]
        copied = min(len(copy), len(seen.end))
        is_copy = copied > 0 and copied + has_answer >= _LEAST_COPIED and copy[-copied:] == seen.end[-copied:]
        is_whole = is_copy and len(copy) == seen.length and copy[0] == seen.first
        differs = is_bounded > seen.is_bounded or (seen.has_tools and not is_whole)
        is_short = (added.is_system or added.role == "user") and len(added.text) <= _MOST_CHARS
        if is_copy and differs and is_short and (start == 0 or hashes[0] != seen.first):
            return True
    return False
