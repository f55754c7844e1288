"""One client request while it is under way: what was asked, read once for all phases, and what has been done for it.

Other loggers read request metadata, and a client can choose LiteLLM's call id (promise P9): so an exchange belongs to
the logging object that LiteLLM makes for each request and hands to every hook, and ends with it.
"""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, NamedTuple

from litellm_compaction import engine
from litellm_compaction.concurrency import Bounded, is_long, off_loop_if
from litellm_compaction.config import SAME_MODEL, Settings
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import Message, Request, cleaned, system_prefix_length
from litellm_compaction.core.transcripts import is_client_summary
from litellm_compaction.engine.records import receipt_of
from litellm_compaction.errors import BadWish, CompactionError
from litellm_compaction.proxy import client, litellm_inside, wire
from litellm_compaction.proxy.client import Body
from litellm_compaction.proxy.internal import Caller
from litellm_compaction.proxy.litellm_inside.application import is_allowed, keeps_responses
from litellm_compaction.proxy.routing import Deployment, DeploymentSelector, GuardedDeployment, is_listed_here
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
    """A request as the client sent it, read once: it has as many fields as clients have words."""

    received: Request
    # Without the notices that it carried back, the same object if there were none.
    original: Request
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
    cleared: Told = field(default_factory=Told)  # Old tool results, by its order; `original` is without them.
    bases: tuple[Compaction, ...] = ()  # The record that `original` begins with, as `core.portable.unfolded` has it.


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
        """Response headers for clients of guarded deployments, of what was sent or will be; None for others."""
        sent, needed = self.attempt.prepared, self.attempt.needed
        if sent is not None:
            numbers = (sent.tokens_before, sent.count.tokens, sent.window.tokens, sent.round)
        elif needed is not None:
            measured, step = needed.measured, needed.steps[0]
            numbers = (measured.tokens_before, step.predicted_tokens, measured.window.tokens, step.draft.round)
        else:
            return None
        fields = dict(zip(("tokens-before", "tokens-after", "window", "round"), numbers, strict=True))
        if sent is not None and sent.excerpts:
            fields |= {"excerpts": sent.excerpts, "excerpt-tokens": sent.excerpt_tokens}
        named = {f"{_HEADER}-{name}": str(value) for name, value in {**fields, **self._receipt()}.items()}
        return {_HEADER: self.attempt.action, **named}

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

    def ended(self, details: Mapping[str, Any]) -> None:
        """Notes how the answer ended, and the cost of restarts."""
        self.attempt.details = details

    def release_room(self) -> None:
        """Gives back its room; may be called again."""
        if self.room is not None:
            self.room.release()

    def sent(self, context: engine.RequestContext, prepared: engine.PreparedRequest) -> None:
        """Notes the prepared request."""
        attempt = self.attempt
        # What was foreseen may have been of another list: LiteLLM leaves out what a server does not read.
        is_first, attempt.context, attempt.prepared = attempt.prepared is None, context, prepared
        if is_first or prepared.action == "compacted" or attempt.action == "none":
            attempt.action = prepared.action


class Exchanges:
    """The requests under way, each as long as LiteLLM's logging object of it lives."""

    def __init__(self) -> None:
        self._own: weakref.WeakKeyDictionary[object, Exchange] = weakref.WeakKeyDictionary()
        # Known before the request is: of the body that the client sent.
        self._orders: weakref.WeakKeyDictionary[object, Orders] = weakref.WeakKeyDictionary()
        self._conversations = Conversations()

    async def of(self, body: Body, group: str, settings: Settings, *, is_chat: bool = False) -> Exchange | None:
        """The request under way in a hook's `body`, filed under `group`; read anew if its messages are others by now.

        None for one without a conversation.
        """
        current, prompt = self.get(body), body.get("prompt")
        long = is_long(body.get("messages"), body.get("tools"), prompt, [prompt])
        # LiteLLM also makes calls of its own on a request's behalf, and other callbacks change messages.
        if current is not None and current.client.tenant != client.tenant_of(client.metadata_of(body)):
            current = None
        if current is not None:
            received, is_chat = current.client.received, current.client.is_chat
            # A text completion has none.
            if not body.get("messages") or await off_loop_if(long, lambda: wire.is_same_request(body, received)):
                return current
        if (asked := await off_loop_if(long, lambda: self._read(body, group, settings, is_chat))) is None:
            self.close(body)
            return None
        attempts = engine.Attempts(summary_calls_left=settings.constants.max_summary_calls)
        return self.open(body, Exchange(asked, attempts if current is None else current.attempts))

    def _read(self, body: Body, group: str, settings: Settings, is_chat: bool) -> ClientRequest | None:
        if (received := wire.decode(body) or wire.decode_text(body)) is None:
            return None
        metadata, orders = client.metadata_of(body), self.orders(body)
        unfolded, bases = (received.messages, ()) if orders is None else orders.unfolded(received.messages)
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
        asked = ClientRequest(
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
            bases=bases,
        )
        return self._conversations.placed(asked, body) if settings.mode == "guard" else asked

    def note_orders(self, body: Body, orders: Orders) -> bool:
        """Notes what a client's protocol says of its context; returns False if LiteLLM has no object to note it by."""
        if (owner := _owner(body)) is not None:
            self._orders[owner] = orders
        return owner is not None

    def orders(self, body: Body) -> Orders | None:
        """Returns what was noted of a request; None for one whose protocol was not read."""
        return self._orders.get(_owner(body) or self)

    def serve(self, body: Body) -> None:
        """Notes the request that the running task, and every task that it begins, serves."""
        owner = _owner(body)
        _served.set(None if owner is None else weakref.ref(owner))

    def open(self, body: Body, exchange: Exchange) -> Exchange:
        """Remembers `exchange` as the request of a hook's `body`."""
        if (owner := _owner(body)) is not None:
            self._own[owner] = exchange
            # LiteLLM may call the deployment with an object of its own (generateContent).
            self._own.setdefault(_asker({}) or owner, exchange)
        while len(self._own) > _MOST:
            # An exchange can hold its owner: LiteLLM's metadata has the calls that failed.
            self._own.pop(next(self._own.keys()), None)
        return exchange

    def get(self, body: Body) -> Exchange | None:
        """The request of a hook's `body`, if it is guarded."""
        return self._own.get(_asker(body) or self)

    def close(self, body: Body) -> Exchange | None:
        """Forgets a request that has ended, and its holds."""
        exchange = self._own.pop(_asker(body) or self, None)
        if exchange is not None:
            exchange.release_room()
        return exchange


def _owner(body: Body) -> object | None:
    """LiteLLM's logging object; never anything that JSON, and so a client, could have put in its place."""
    owner: object = body.get("litellm_logging_obj")
    return owner if hasattr(owner, "model_call_details") else None


def _asker(body: Body) -> object | None:
    reference = _served.get()
    return _owner(body) or (reference() if reference is not None else None)


async def context_of(
    router: Any, guards: DeploymentSelector, guard: GuardedDeployment, exchange: Exchange, body: Body
) -> engine.RequestContext:
    """A request's surroundings for the engine; a CompactionError if what it asks for cannot be followed."""
    asked, is_through = exchange.client, guard.carrier == "transport"
    if asked.bad_wish is not None and guard.does_guard:
        raise asked.bad_wish
    asked_tokens = wire.asked_output_tokens(body)
    carries_calls = wire.can_be_continued(body) and (is_through or (asked.is_chat and bool(body.get("stream"))))
    settings, deployment, metadata = guard.settings, guard.deployment, client.metadata_of(body)
    exchange.pin = _pin(router, deployment) or asked.group
    caller = Caller(router, exchange.pin, metadata, settings.summary_timeout_s, asked.group)
    # A text completion is never compacted, unless LiteLLM makes a chat of it, which is carried like any other.
    is_text = "prompt" in body and not body.get("messages")
    is_chat = not is_text or (is_through and deployment.is_bridged)
    # One of several processes of a proxy: uvicorn starts those as children of multiprocessing's.
    is_worker, is_in_memory = multiprocessing.parent_process() is not None, settings.store.startswith("memory:")
    may_be_ahead = deployment.target.is_listed and not asked.is_client_summary and not (is_worker and is_in_memory)
    return engine.RequestContext(
        label=asked.group,
        target=replace(deployment.target, asker=asked.tenant),
        settings=settings,
        scope=_scope(metadata, asked.group, settings),
        tenant=asked.tenant,
        pruning_models=await pruning_models_of(guards, deployment, settings, caller),
        warm_up=replace(caller, timeout_s=settings.constants.warm_up_timeout_s).load,
        attempts=exchange.attempts,
        asked_tokens=asked_tokens,
        measure=caller.measure,
        may_write_ahead=caller.may_write_ahead if may_be_ahead else None,
        has_siblings=is_worker or not settings.store.startswith(("sqlite:", "memory:")),
        now=asked.orders.compacts_only or (asked.wish.now and not asked.is_client_summary),
        focus="" if asked.is_client_summary else asked.wish.focus or asked.orders.focus,
        pins=asked.wish.pins,
        is_client_summary=asked.is_client_summary,
        is_beside=asked.is_beside,
        portable=asked.bases,
        threshold_tokens=asked.orders.threshold_tokens,
        may_change=asked.orders.may_change and is_chat,
        carries_calls=carries_calls,
    )


async def pruning_models_of(
    guards: DeploymentSelector, deployment: Deployment, settings: Settings, caller: Caller
) -> tuple[engine.PruningModel, ...]:
    """The configured model, if it is another one that the key may use, and the one that the client asked."""
    same = engine.PruningModel(label=caller.group, target=deployment.target, ask=caller.ask, is_same=True)
    if (name := settings.pruning_model) == SAME_MODEL or not await is_allowed(caller.router, name, caller.parent):
        return (same,)
    target, ask = await guards.pruning_target(caller.router, name), replace(caller, model=name, group=name).ask
    return (same,) if target is None else (engine.PruningModel(label=name, target=target, ask=ask, is_same=False), same)


def _pin(router: Any, deployment: Deployment) -> str:
    """The name by which the router reaches this very deployment: not the id of one of a wildcard's, or listed here."""
    # The id would reach the model `*`, and one that we have listed may be gone when its answer goes on.
    own = litellm_inside.deployment(router, deployment.id)
    is_passing = own is None or "*" in str(own.litellm_params.model) or is_listed_here(deployment.id)
    return deployment.group if is_passing else deployment.id


def _scope(metadata: Mapping[str, Any], group: str, settings: Settings) -> str:
    """Stored compactions are shared by one tenant, model group and settings."""
    shape = (settings.strategy, settings.pruning_model, settings.target_ratio, settings.keep_recent_messages)
    # Text that was written down with its secrets is not read again once they are to be left out.
    whole = (*shape, settings.constants.summary_max_tokens, settings.redact_patterns)
    return client.fingerprint(repr((client.identity_of(metadata), group, whole)))


class _Seen(NamedTuple):
    """A conversation's newest request: its first message and its last ones, as hashes of role and text."""

    first: int
    end: tuple[int, ...]
    has_tools: bool
    is_bounded: bool

    def has_beside(self, asking: int, copy: tuple[int, ...], *, is_bounded: bool) -> bool:
        """True for a message `asking` over a copy of the end, which may have the answer that comes next."""
        ends = (each[-_END:] for each in (copy, copy[:-1]) if each)
        is_copy = asking != self.first and any(each == self.end[-len(each) :] for each in ends)
        return is_copy and (is_bounded > self.is_bounded or (self.has_tools and copy[0] != self.first))


class Conversations:
    """The newest conversations of each tenant, without their texts, by which requests beside them are told by form.

    Such a request (a title, tags) is one short message over a copy of the conversation's end, without tools, whose
    answer alone is bounded, or which alone has none of the tools. In doubt a request is an ordinary one.
    """

    def __init__(self) -> None:
        self._seen: Bounded[str, tuple[_Seen, ...]] = Bounded(_MOST_TENANTS)

    def placed(self, asked: ClientRequest, body: Body) -> ClientRequest:
        """Notes of a request that it asks for a summary of its client's own, or for something beside a conversation."""
        messages, has_tools = asked.original.messages, bool(asked.original.tools)
        is_bounded = 0 < (wire.asked_output_tokens(body) or 0) <= _MOST_ANSWER_TOKENS
        if is_client_summary(messages, client.told_headers(body), has_tools=has_tools):
            return replace(asked, is_client_summary=True, is_beside=is_bounded)
        is_beside = self.is_beside(asked.tenant, messages, has_tools=has_tools, is_bounded=is_bounded)
        return replace(asked, is_client_summary=is_beside, is_beside=is_beside)

    def is_beside(self, tenant: str, messages: Sequence[Message], *, has_tools: bool, is_bounded: bool) -> bool:
        """Returns True for a request beside a conversation of its tenant's; takes note of any other."""
        hashes = tuple(hash((message.role, message.text, message.calls)) for message in messages)
        seen = self._seen.get(tenant, ())
        for at, copy in ((-1, hashes[:-1]), (0, hashes[1:])):
            asking, is_over = messages[at], [each.has_beside(hashes[at], copy, is_bounded=is_bounded) for each in seen]
            is_short = (asking.is_system or asking.role == "user") and len(asking.text) <= _MOST_CHARS
            if any(is_over) and is_short and not has_tools and len(copy) >= _LEAST_COPIED:
                return True
        own = _Seen(hashes[0], hashes[-_END:], has_tools, is_bounded)
        others = (each for each in seen if each.end[-1] not in hashes or each.first != own.first)
        self._seen[tenant] = (own, *others)[:_MOST_CONVERSATIONS]
        return False
