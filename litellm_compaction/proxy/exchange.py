"""One client request while it is under way: what was asked, read once for all phases, and what has been done for it.

Other loggers read request metadata, and a client can choose LiteLLM's call id (promise P9): so an exchange is noted in
the logging object that LiteLLM makes for each request and hands to every hook, and ends with it.
"""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
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
from litellm_compaction.proxy.routing import Deployment, DeploymentSelector, is_listed_here
from litellm_compaction.proxy.standards.orders import Orders, Told

_HEADER = "x-litellm-compaction"
# Of an answer beside a conversation, and of the message that asks for it: no title, no list of suggestions is longer.
_MOST_ANSWER_TOKENS, _MOST_CHARS = 512, 4000
# Of a conversation's end, by which a copy of it is known; a copy of one message may be anybody's.
_END, _LEAST_COPIED, _MOST_REMEMBERED = 32, 2, 16_384
NO_ORDERS = Orders()


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A client's request, read once, and the work done for it. The loop that carries its answer tells how that goes."""

    received: Request  # As it came; the first fields are the client's words.
    # Without the notices that it carried back, the same object if there were none.
    original: Request
    group: str  # The model name that it is filed under in the store.
    tenant: str
    is_chat: bool  # The client speaks chat completions, and so reads the stream that we see.
    opted_out: bool
    wish: client.Wish
    bad_wish: BadWish | None  # Why its wish could not be read.
    is_client_summary: bool  # The client summarizes its conversation itself, or asks for something beside it.
    is_beside: bool  # Its conversation goes on as if it had not asked.
    orders: Orders
    bases: tuple[Compaction, ...]  # The record that `original` begins with, as `core.portable.unfolded` has it.
    attempts: engine.Attempts  # That it may still spend.
    deployment: Deployment | None = None  # The last one that it was sent to.
    # The outcome before its deployment was chosen, until it is; then of one that the transport carries.
    decided: engine.Decided | None = None
    prepared: engine.PreparedRequest | None = None  # As it was sent last.
    action: engine.Action = "none"  # The strongest thing done for it: compacted, then reused, then none.
    details: Mapping[str, Any] | None = None  # Of its usage: its end, and the cost of restarts.
    # Nothing is told before its answer begins, so that LiteLLM may keep the stream's opening.
    begins_silently: bool = False
    may_pause: bool = False  # Its answer nears the limit, so that a compaction may silence it for a while.
    told: Told = field(default_factory=Told)  # By its answer, of its context and what was cleared from `original`.
    refusal: CompactionError | None = None
    room: engine.Reservation | None = None  # Its hold on a shared context if the hooks carry it, until it ends.

    @property
    def is_hooked(self) -> bool:
        """LiteLLM's hooks carry its answer: the transport has a room of its own."""
        return self.is_chat and None not in (self.room, self.prepared, self.deployment)

    @property
    def headers(self) -> dict[str, str] | None:
        """Response headers for clients of guarded deployments, of what was sent or will be; None for others."""
        sent, decided = self.prepared, self.decided
        if sent is not None:
            numbers = (sent.tokens_before, sent.count.tokens, sent.window.tokens, sent.round)
        elif isinstance(decided, engine.CompactionNeeded):
            measured, step = decided.measured, decided.steps[0]
            numbers = (measured.tokens_before, step.predicted_tokens, measured.window.tokens, step.draft.round)
        else:
            return None
        fields = dict(zip(("tokens-before", "tokens-after", "window", "round"), numbers, strict=True))
        if sent is not None and sent.excerpts:
            fields |= {"excerpts": sent.excerpts, "excerpt-tokens": sent.excerpt_tokens}
        named = {f"{_HEADER}-{name}": str(value) for name, value in {**fields, **self._receipt()}.items()}
        return {_HEADER: self.action, **named}

    @property
    def late_receipt(self) -> dict[str, str]:
        """The receipt of a record that was applied after the headers had gone; {} for none."""
        goes_on = self.prepared is not None and self.prepared.continuation.way is not None
        return self._receipt() if goes_on or isinstance(self.decided, engine.CompactionNeeded) else {}

    def _receipt(self) -> dict[str, str]:
        prepared = self.prepared
        if prepared is None or prepared.compaction is None:
            return {}
        prefix, measured = system_prefix_length(self.original.messages), prepared.measured
        return receipt_of(measured.context.scope, prepared.compaction, prefix, len(measured.request.left_out))._asdict()

    def begins_attempt(self, deployment: Deployment) -> None:
        """Forgets the attempts at other deployments; work for this one still holds."""
        self.release_room()
        self.refusal, before, self.deployment = None, self.deployment, deployment
        if before is not None:
            # Minutes may have passed.
            self.decided = None
        if before is not None and before.id != deployment.id:
            self.prepared, self.action, self.details, self.may_pause = None, "none", None, False

    def release_room(self) -> None:
        """Gives back its room; may be called again."""
        if self.room is not None:
            self.room.release()
            self.room = None

    def sent(self, prepared: engine.PreparedRequest) -> None:
        """Notes the prepared request."""
        # What was foreseen may have been of another list: LiteLLM leaves out what a server does not read.
        is_first, self.prepared = self.prepared is None, prepared
        if is_first or prepared.action == "compacted" or self.action == "none":
            self.action = prepared.action


@dataclass(eq=False)
class Note:
    """All that a request's hooks hand on to the next."""

    orders: Orders | None = None  # Of a client's protocol; None if that was not read.
    exchange: Exchange | None = None
    refusal: CompactionError | None = None  # Of a request without an exchange.

    def __deepcopy__(self, memo: object) -> Note:
        """A copy of LiteLLM's object, as its router makes for fallbacks, serves the same request."""
        return self

    def close(self) -> Exchange | None:
        """Forgets a request that has ended, and its holds."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.release_room()
        return exchange


_NOTE = "litellm_compaction_note"
# Of the request that a task serves: LiteLLM takes its logging object away before a failure is told.
_served: ContextVar[weakref.ref[Note] | None] = ContextVar("litellm_compaction_served", default=None)


def note_of(body: Body) -> Note:
    """The note in a hook's LiteLLM object, which no JSON, and so no client, can have put there; else in its task.

    Without either it is a new one, which nobody finds again.
    """
    owner, reference = body.get("litellm_logging_obj"), _served.get()
    if hasattr(owner, "model_call_details"):
        note: Note = vars(owner).setdefault(_NOTE, Note())
        return note
    return (reference() if reference is not None else None) or Note()


def serve(body: Body) -> None:
    """Notes the request that the running task, and every task that it begins, serves."""
    _served.set(weakref.ref(note_of(body)))


def opened(body: Body, exchange: Exchange) -> Exchange:
    """Remembers `exchange` as the request of a hook's `body`."""
    # LiteLLM may call the deployment with an object of its own (generateContent).
    served = note_of({})
    served.exchange = served.exchange or exchange
    note_of(body).exchange = exchange
    return exchange


class _Seen(NamedTuple):
    """A conversation's newest request: its first message and its last ones, as hashes of role and text."""

    first: int
    end: tuple[int, ...]
    has_tools: bool
    is_bounded: bool


class Exchanges:
    """Reads the requests that come, each once, and tells those beside a conversation (a title, tags) by their form.

    Such a one is one short message over a copy of a newest request's end, without tools, whose answer alone is bounded,
    or which alone has none of the tools. In doubt a request is an ordinary one. No texts are kept.
    """

    def __init__(self) -> None:
        # By tenant and last message.
        self._seen: Bounded[tuple[str, int], _Seen] = Bounded(_MOST_REMEMBERED)

    async def of(self, body: Body, group: str, settings: Settings, *, is_chat: bool = False) -> Exchange | None:
        """The request under way in a hook's `body`, filed under `group`; read anew if its messages are others by now.

        None for one without a conversation.
        """
        current, prompt = note_of(body).exchange, body.get("prompt")
        long = is_long(body.get("messages"), body.get("tools"), prompt, [prompt])
        # LiteLLM also makes calls of its own on a request's behalf, and other callbacks change messages.
        if current is not None and current.tenant != client.tenant_of(client.metadata_of(body)):
            current = None
        if current is not None:
            received, is_chat = current.received, current.is_chat
            # A text completion has none.
            if not body.get("messages") or await off_loop_if(long, lambda: wire.is_same_request(body, received)):
                return current
        if (exchange := await off_loop_if(long, lambda: self._read(body, group, settings, is_chat))) is None:
            note_of(body).close()
            return None
        exchange.attempts = exchange.attempts if current is None else current.attempts
        return opened(body, exchange)

    def _read(self, body: Body, group: str, settings: Settings, is_chat: bool) -> Exchange | None:
        if (received := wire.decode(body) or wire.decode_text(body)) is None:
            return None
        metadata, orders = client.metadata_of(body), note_of(body).orders
        unfolded, bases = (received.messages, ()) if orders is None else orders.unfolded(received.messages)
        messages = tuple(map(cleaned, unfolded))
        wish, bad_wish = client.NONE, None
        try:
            wish = client.wish_of(body, metadata)
        except BadWish as error:
            # Told only if it is guarded: a deployment that is just observed answers as ever.
            bad_wish = error
        tenant, has_tools = client.tenant_of(metadata), bool(received.tools)
        is_beside = is_bounded = 0 < (wire.asked_output_tokens(body) or 0) <= _MOST_ANSWER_TOKENS
        is_summary = is_client_summary(messages, client.told_headers(body), has_tools=has_tools)
        if not is_summary:
            is_beside = self.is_beside(tenant, messages, has_tools=has_tools, is_bounded=is_bounded)
        return Exchange(
            received=received,
            original=received if messages == received.messages else replace(received, messages=messages),
            group=group,
            tenant=tenant,
            is_chat=is_chat,
            opted_out=client.opts_out(wish, metadata, is_allowed=settings.allow_opt_out),
            wish=wish,
            bad_wish=bad_wish,
            is_client_summary=is_summary or is_beside,
            is_beside=is_beside,
            orders=orders or NO_ORDERS,
            bases=bases,
            attempts=engine.Attempts(summary_calls_left=settings.constants.max_summary_calls),
        )

    def is_beside(self, tenant: str, messages: Sequence[Message], *, has_tools: bool, is_bounded: bool) -> bool:
        """Returns True for a request beside a conversation of its tenant's; takes note of any other."""
        hashes = tuple(hash((message.role, message.text, message.calls)) for message in messages)
        for at, copied in ((-1, hashes[:-1]), (0, hashes[1:])):
            asking = messages[at]
            is_short = (asking.is_system or asking.role == "user") and len(asking.text) <= _MOST_CHARS
            # It may have the answer that came next.
            for copy in (copied, copied[:-1]) if is_short and not has_tools and len(copied) >= _LEAST_COPIED else ():
                seen = self._seen.get((tenant, copy[-1]))
                if seen is None or seen.first == hashes[at] or seen.end[-len(copy) :] != copy[-_END:]:
                    continue
                if is_bounded > seen.is_bounded or (seen.has_tools and copy[0] != seen.first):
                    return True
        self._seen[tenant, hashes[-1]] = _Seen(hashes[0], hashes[-_END:], has_tools, is_bounded)
        return False


async def context_of(
    router: Any, guards: DeploymentSelector, deployment: Deployment, request: Exchange, body: Body
) -> engine.RequestContext:
    """A request's surroundings for the engine; a CompactionError if what it asks for cannot be followed."""
    is_through = deployment.carrier == "transport"
    if request.bad_wish is not None and deployment.does_guard:
        raise request.bad_wish
    carries_calls = wire.can_be_continued(body) and (is_through or (request.is_chat and bool(body.get("stream"))))
    settings, metadata = deployment.settings, client.metadata_of(body)
    pin = partial(pin_of, router, deployment, request.group)
    caller = Caller(router, pin, metadata, settings.summary_timeout_s, request.group)
    # A text completion is never compacted, unless LiteLLM makes a chat of it (main.py, `text_completion`), which is
    # carried like any other.
    is_text = "prompt" in body and not body.get("messages")
    is_chat = not is_text or (is_through and deployment.provider != "openai")
    # One of several processes of a proxy: uvicorn starts those as children of multiprocessing's.
    is_worker, is_in_memory = multiprocessing.parent_process() is not None, settings.store.startswith("memory:")
    place = deployment.target.place
    may_be_ahead = place is not None and not request.is_client_summary and not (is_worker and is_in_memory)
    return engine.RequestContext(
        label=request.group,
        target=replace(deployment.target, asker=request.tenant),
        settings=settings,
        scope=_scope(request, settings),
        tenant=request.tenant,
        pruning_models=await pruning_models_of(guards, deployment, settings, caller),
        warm_up=replace(caller, timeout_s=settings.constants.warm_up_timeout_s).load,
        attempts=request.attempts,
        asked_tokens=wire.asked_output_tokens(body),
        measure=caller.measure,
        may_write_ahead=caller.may_write_ahead if may_be_ahead else None,
        has_siblings=is_worker or not settings.store.startswith(("sqlite:", "memory:")),
        now=request.orders.compacts_only or (request.wish.now and not request.is_client_summary),
        focus="" if request.is_client_summary else request.wish.focus or request.orders.focus,
        pins=None if request.wish.pin is None else tuple(request.wish.pin),
        is_client_summary=request.is_client_summary,
        is_beside=request.is_beside,
        portable=request.bases,
        threshold_tokens=request.orders.threshold_tokens,
        may_change=request.orders.may_change and is_chat,
        carries_calls=carries_calls,
    )


async def pruning_models_of(
    guards: DeploymentSelector, deployment: Deployment, settings: Settings, caller: Caller
) -> tuple[engine.PruningModel, ...]:
    """The configured model, if it is another one that the key may use, and the one that the client asked."""
    same = engine.PruningModel(label=caller.group, target=deployment.target, ask=caller.ask, is_same=True)
    name = settings.pruning_model
    if name == SAME_MODEL or not await litellm_inside.is_allowed(caller.router, name, caller.parent):
        return (same,)
    target, ask = await guards.pruning_target(caller.router, name), replace(caller, model=lambda: name, group=name).ask
    return (same,) if target is None else (engine.PruningModel(label=name, target=target, ask=ask, is_same=False), same)


def pin_of(router: Any, deployment: Deployment, group: str) -> str:
    """The name by which the router reaches this very deployment: not the id of one of a wildcard's, or listed here.

    `group` is the request's, for a deployment of which none is known.
    """
    # The id would reach the model `*`, and one that we have listed may be gone when its answer goes on.
    params = client.mapping(litellm_inside.deployment(router, deployment.id).get("litellm_params"))
    is_passing = "*" in str(params.get("model", "*")) or is_listed_here(deployment.id)
    return deployment.group or group if is_passing else deployment.id


def _scope(request: Exchange, settings: Settings) -> str:
    """Stored compactions are shared by one tenant, model group and settings."""
    shape = (settings.strategy, settings.pruning_model, settings.target_ratio, settings.keep_recent_messages)
    # Text that was written down with its secrets is not read again once they are to be left out.
    whole = (*shape, settings.constants.summary_max_tokens, settings.redact_patterns)
    return client.fingerprint(repr((request.tenant, request.group, whole)))
