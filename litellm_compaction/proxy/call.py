"""Remembers a client's request while it is under way, and reads the client's wish about its compaction.

In process memory only: request metadata would be read by other loggers (promise P9). And never under a name that a
client can choose: LiteLLM takes its call id from the header `x-litellm-call-id`, so that two tenants' requests with
one id were mixed up. LiteLLM makes one logging object for each request and hands it to every hook on every route, with
retries and fallbacks (tried out on 1.106.2 and 1.109.1, 2026-11-22): a remembered request belongs to that object.

A wish is read once for each request, from the body's `metadata` and, for clients that cannot send any, from headers.
Its words never reach a log or an error.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import JsonValue, Request, system_prefix_length
from litellm_compaction.core.prompts import one_line_topic
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
from litellm_compaction.proxy.standards.orders import NO_ORDERS, Orders
from litellm_compaction.proxy.wire import sections_of_owners

NOW_HEADER = "x-litellm-compaction-now"
FOCUS_HEADER = "x-litellm-compaction-focus"
PIN_HEADER = "x-litellm-compaction-pin"
_ALLOWED = '"off", or an object such as {"now": true, "focus": "the database schema", "pin": ["Never touch prod."]}'
# Bounds of a list in a header or a body; a sentence is shorter.
_MAX_PINS, _MAX_PIN_CHARS = 32, 1000
_YES, _NO = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off", ""})
# Far more than a proxy in front of one machine has under way; a bound for calls whose end is never told.
_MAX_CALLS = 1024
# Of the request that a task serves: LiteLLM takes its logging object away before it tells of a failure.
_served: ContextVar[weakref.ref[object] | None] = ContextVar("litellm_compaction_served", default=None)
_DETAILS = "model_call_details"


class Wish(NamedTuple):
    """`off` to be left alone, `now` to be compacted whatever the fill, with `focus` as a topic, or "".

    `pins` name messages that are to stay verbatim, by handle or words; None for no word about that.
    """

    off: bool = False
    now: bool = False
    focus: str = ""
    pins: tuple[str, ...] | None = None


NONE = Wish()


def wish_of(body: Mapping[str, Any], metadata: Mapping[str, Any]) -> Wish:
    """The wish of a request; `metadata` is LiteLLM's own, which holds the client's too.

    Raises:
        BadWish: its shape is unknown.
    """
    found = NONE
    for value in _sent(body, metadata):
        wish = _read(value)
        pins = wish.pins if found.pins is None else found.pins
        found = Wish(found.off or wish.off, found.now or wish.now, found.focus or wish.focus, pins)
    headers = _headers(body)
    now = _is_yes(headers.get(NOW_HEADER, ""))
    focus = _topic(_decoded(headers.get(FOCUS_HEADER, "")), FOCUS_HEADER)
    pins = found.pins
    if pins is None and PIN_HEADER in headers:
        pins = _pins([_decoded(headers[PIN_HEADER])], PIN_HEADER)
    found = Wish(found.off, found.now or now, found.focus or focus, pins)
    if found.focus and not found.now:
        raise BadWish(
            f'A focus is only used where the conversation is compacted now: add "now": true, or {NOW_HEADER}.'
        )
    return found


def is_off_for_owner(metadata: Mapping[str, Any]) -> bool:
    """Returns True if the operator has switched the guard off for the key, else for its team: `{"mode": "off"}`."""
    for section in sections_of_owners(metadata):
        mode = section.get("mode") if isinstance(section, Mapping) else section
        if mode is not None:
            return mode in ("off", False)
    return False


def _sent(body: Mapping[str, Any], metadata: Mapping[str, Any]) -> Iterator[object]:
    """The values of `compaction` in the client's metadata, at LiteLLM's places for it on the request's route."""
    holders = [metadata, body.get("metadata"), sent_body(body).get("metadata")]
    for holder in holders:
        if isinstance(holder, Mapping):
            yield holder.get("compaction")
            sent = holder.get("requester_metadata")
            yield sent.get("compaction") if isinstance(sent, Mapping) else None


def _read(value: object) -> Wish:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        # OpenAI's own metadata holds strings only.
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadWish(f"metadata.compaction is not valid JSON; allowed: {_ALLOWED}.") from None
    if value is None or value is True or value == "on":
        return NONE
    if value in ("off", False):
        return Wish(off=True)
    if not isinstance(value, Mapping):
        raise BadWish(f"metadata.compaction is of type {type(value).__name__}; allowed: {_ALLOWED}.")
    unknown = [str(key)[:40] for key in value if key not in ("now", "focus", "pin")]
    if unknown:
        raise BadWish(
            f"metadata.compaction has unknown keys: {', '.join(map(repr, unknown[:5]))}; allowed: {_ALLOWED}."
        )
    for key, kind, allowed in (
        ("now", bool, "true or false"),
        ("focus", str, "a text"),
        ("pin", list, "a list of texts"),
    ):
        found = value.get(key)
        if found is not None and not isinstance(found, kind):
            raise BadWish(f"metadata.compaction.{key} is of type {type(found).__name__}; allowed: {allowed}.")
    focus = _topic(value.get("focus") or "", "metadata.compaction.focus")
    pins = value.get("pin")
    return Wish(
        now=bool(value.get("now")), focus=focus, pins=None if pins is None else _pins(pins, "metadata.compaction.pin")
    )


def _pins(values: Sequence[object], place: str) -> tuple[str, ...]:
    pins = [value.strip() for value in values if isinstance(value, str) and 0 < len(value.strip()) <= _MAX_PIN_CHARS]
    if len(pins) < len(values) or len(pins) > _MAX_PINS:
        raise BadWish(
            f"{place} has a list that is not allowed; allowed: at most {_MAX_PINS} texts of 1 to {_MAX_PIN_CHARS} "
            "characters, each with words of a message of the user's, or its handle."
        )
    return tuple(pins)


def _topic(text: str, place: str) -> str:
    try:
        return one_line_topic(text)
    except ValueError as error:
        raise BadWish(f"{place} has {error}.") from None


def _is_yes(value: object) -> bool:
    said = str(value).strip().lower()
    if said not in _YES | _NO:
        raise BadWish(f"{NOW_HEADER} is neither true nor false; allowed: true, false.")
    return said in _YES


def _decoded(value: object) -> str:
    """A header's text: servers read its bytes as Latin-1, clients write UTF-8."""
    try:
        return str(value).encode("latin-1").decode("utf-8")
    except UnicodeError:
        return str(value)


def sent_body(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request's body as the client sent it, as far as LiteLLM keeps it."""
    request = body.get("proxy_server_request")
    original = request.get("body") if isinstance(request, Mapping) else None
    return original if isinstance(original, Mapping) else {}


def told_headers(body: Mapping[str, Any]) -> dict[str, str]:
    """A request's headers by their names in lower case, with the body's `client_metadata`, Codex's place for them."""
    metadata = sent_body(body).get("client_metadata")
    found = {**(metadata if isinstance(metadata, Mapping) else {}), **_headers(body)}
    return {str(name).lower(): value for name, value in found.items() if isinstance(value, str)}


def _headers(body: Mapping[str, Any]) -> Mapping[str, Any]:
    request = body.get("proxy_server_request")
    headers = request.get("headers") if isinstance(request, Mapping) else None
    return {str(name).lower(): value for name, value in headers.items()} if isinstance(headers, Mapping) else {}


class Outlook(NamedTuple):
    """A request before its answer begins, in tokens; `after` is an upper bound of a compaction still to be made.

    `excerpts` are quotations in it, and not known of such a compaction.
    """

    before: int
    after: int
    window: int
    round: int
    excerpts: int = 0
    excerpt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A request as the client sent it.

    Attributes:
        received: as it came, for deployments that are left alone.
        original: the same without the notices that it carried back; the same object if there were none.
        group: the model name that it is filed under in the store.
        tenant: fingerprint of the client.
        client_text: gives every text that the client sent, in whatever field.
        is_chat: the client speaks chat completions, and so reads the stream that we see.
        opted_out: the client asked to be left alone, and may.
        bad_wish: why its wish could not be read, or another field is not served; None for neither.
        is_client_summary: the client summarizes its conversation itself, or asks for something beside it.
        is_beside: its conversation goes on as if it had not asked.
        asks_for_usage: a usage chunk belongs in the stream.
        is_structured: the answer is a document, in which no notice may stand.
        orders: about its conversation's context, in its protocol's words.
        cleared_calls, cleared_tokens: of old tool results, by its order; `original` is without them.
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
    asks_for_usage: bool = True
    is_structured: bool = False
    orders: Orders = NO_ORDERS
    cleared_calls: int = 0
    cleared_tokens: int = 0
    bases: tuple[Compaction, ...] = ()


@dataclass(slots=True)
class Attempt:
    """The state of a request at one deployment; a fallback to another deployment begins a new one.

    Attributes:
        deployment: its id, "" before one is chosen.
        context, prepared: as it was sent last.
        outlook: for the response's headers, which are sent before the answer.
        action: the strongest thing done for it: compacted, then reused, then none.
        is_open: its compaction is made after the headers have gone.
        details: of its usage: its end, and the cost of restarts.
        is_carried: the transport does all that happens while its answer is open.
        may_pause: its answer nears the limit, so that a compaction may silence it for a while.
        begins_silently: nothing is told before its answer begins, so that LiteLLM may keep the stream's opening.
    """

    deployment: str = ""
    context: RequestContext | None = None
    prepared: PreparedRequest | None = None
    outlook: Outlook | None = None
    action: Action = "none"
    is_open: bool = False
    details: Mapping[str, Any] | None = None
    is_carried: bool = False
    may_pause: bool = False
    begins_silently: bool = False


@dataclass(slots=True)
class Call:
    """A client's request and the work done for it.

    Attributes:
        attempts: the number that it may still spend.
        in_hand: the list that LiteLLM has had since we let go of it; another one is another conversation.
        pins: the name or id under which the router finds each deployment, by the deployment's id.
        rewritten: the list in LiteLLM's hands is no longer `client.received`.
        is_told: the request before it told of a compaction, so that this one does not again.
        is_read: its answer has reached the loop that carries it.
        is_alone: its compaction is the answer.
        refusal: our last one; None without any.
        foreseen: the outcome before its deployment was chosen, until it is.
        room: its hold on a shared context if the hooks carry it, until it ends.
        attempt: at the deployment that it went to last.
        on_restarts: is told the group and the number of restarts of its answer if it had any.
    """

    client: ClientRequest
    attempts: Attempts
    in_hand: list[Any] = field(default_factory=list)
    pins: dict[str, str] = field(default_factory=dict)
    rewritten: bool = False
    is_told: bool = False
    is_read: bool = False
    is_alone: bool = False
    refusal: CompactionError | None = None
    foreseen: Foreseen | None = None
    room: Reservation | None = None
    attempt: Attempt = field(default_factory=Attempt)
    on_restarts: Callable[[str, int], None] | None = None

    @property
    def may_pause(self) -> bool:
        return self.attempt.may_pause

    @may_pause.setter
    def may_pause(self, may_pause: bool) -> None:
        self.attempt.may_pause = may_pause

    @property
    def is_hooked(self) -> bool:
        """LiteLLM's hooks carry its answer."""
        sent = self.attempt
        return self.client.is_chat and not sent.is_carried and sent.prepared is not None and sent.context is not None

    @property
    def headers(self) -> dict[str, str] | None:
        """Response headers for clients of guarded deployments; None for others."""
        outlook = self.attempt.outlook
        if outlook is None:
            return None
        return {
            "x-litellm-compaction": self.attempt.action,
            "x-litellm-compaction-tokens-before": str(outlook.before),
            "x-litellm-compaction-tokens-after": str(outlook.after),
            "x-litellm-compaction-window": str(outlook.window),
            "x-litellm-compaction-round": str(outlook.round),
            **{f"x-litellm-compaction-{name}": value for name, value in self._receipt().items()},
            **(
                {
                    "x-litellm-compaction-excerpts": str(outlook.excerpts),
                    "x-litellm-compaction-excerpt-tokens": str(outlook.excerpt_tokens),
                }
                if outlook.excerpts
                else {}
            ),
        }

    @property
    def late_receipt(self) -> dict[str, str]:
        """The receipt of a record that was applied after the headers had gone; {} for none."""
        attempt = self.attempt
        is_late = attempt.is_open or (attempt.prepared is not None and attempt.prepared.way is not None)
        return self._receipt() if is_late else {}

    def _receipt(self) -> dict[str, str]:
        context, prepared = self.attempt.context, self.attempt.prepared
        if context is None or prepared is None or prepared.compaction is None:
            return {}
        prefix = system_prefix_length(self.client.original.messages)
        return receipt_of(context.scope, prepared.compaction, prefix)._asdict()

    def leaves(self, messages: object) -> None:
        """Notes the list that LiteLLM has from now on; a copy, so that a change made in place is seen, too."""
        self.in_hand = _copied(messages)

    def is_of(
        self, tenant: str, messages: object, tools: object = None, extras: Mapping[str, JsonValue] | None = None
    ) -> bool:
        """True if a call to a deployment is this request: of the same tenant, with the same messages, tools and extras.

        LiteLLM also makes calls of its own on a request's behalf, with other messages, and other callbacks change them:
        the body that leaves is guarded.
        """
        if self.client.tenant != tenant:
            return False
        received = (self.in_hand, list(self.client.received.tools), self.client.received.extras)
        try:
            return received == (messages or [], tools or [], extras or {})
        except RecursionError:
            # JSON may be nested too deep to compare, and was copied since: looked at anew.
            return False

    def begins_attempt(self, deployment: str) -> None:
        """Forgets the attempts at other deployments; work for this one still holds."""
        self.release_room()
        self.refusal = None
        if self.attempt.deployment not in ("", deployment):
            self.attempt = Attempt()
        self.attempt.deployment = deployment

    def refused(self, error: CompactionError) -> None:
        self.refusal = error

    def release_room(self) -> None:
        """Gives back its room; may be called again."""
        if self.room is not None:
            self.room.release()

    def will_be_compacted(self, needed: CompactionNeeded) -> None:
        """Notes that a compaction is made while the answer is already open."""
        measured = needed.measured
        self.attempt.outlook = Outlook(
            before=measured.tokens_before,
            after=needed.levels[0].predicted_tokens,
            window=measured.window.tokens,
            round=needed.levels[0].round,
        )
        self.attempt.action = "compacted"
        self.attempt.is_open = True
        self.may_pause = True

    def sent(self, context: RequestContext, prepared: PreparedRequest) -> None:
        """Notes the prepared request."""
        attempt = self.attempt
        # What was foreseen may have been of another list: LiteLLM leaves out what a server does not read.
        is_first, attempt.context, attempt.prepared = attempt.prepared is None, context, prepared
        attempt.outlook = Outlook(
            before=prepared.tokens_before,
            after=prepared.count.tokens,
            window=prepared.window.tokens,
            round=prepared.round,
            excerpts=prepared.excerpts,
            excerpt_tokens=prepared.excerpt_tokens,
        )
        if is_first or prepared.action == "compacted" or attempt.action == "none":
            attempt.action = prepared.action

    def ended(self, details: Mapping[str, Any]) -> None:
        """Notes how the answer ended, and the cost of restarts."""
        self.attempt.details = details
        if self.on_restarts is not None and details["restarts"]:
            self.on_restarts(self.client.group, details["restarts"])


class Calls:
    """The requests under way, each as long as LiteLLM's logging object of it lives; too many push the oldest out.

    Args:
        on_restarts: is told the group and the number of restarts of each answer that had any.
    """

    def __init__(self, on_restarts: Callable[[str, int], None] | None = None) -> None:
        self._on_restarts = on_restarts
        self._calls: Bounded[int, tuple[weakref.ref[object], Call]] = Bounded(_MAX_CALLS)
        # By the object of the client's request, if LiteLLM calls the deployment with one of its own
        # (generateContent; 1.106.2).
        self._inner: Bounded[int, tuple[weakref.ref[object], Call]] = Bounded(_MAX_CALLS)
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
        owner = _owner(body)
        return None if owner is None else self._orders.get(owner)

    def serve(self, body: Mapping[str, Any]) -> None:
        """Notes the request that the running task, and every task that it begins, serves."""
        owner = _owner(body)
        _served.set(None if owner is None else weakref.ref(owner))

    def open(self, body: Mapping[str, Any], call: Call) -> Call:
        """Remembers `call` as the request of a hook's `body`."""
        call.on_restarts = self._on_restarts
        owner = _owner(body)
        if owner is None:
            return call
        key = id(owner)

        def forget(reference: weakref.ref[object]) -> None:
            # The address may be another object's by now.
            if key in self._calls and self._calls[key][0] is reference:
                self._calls.pop(key)[1].release_room()

        if (old := self._calls.pop(key, None)) is not None:
            old[1].release_room()
        self._calls[key] = (weakref.ref(owner, forget), call)
        if (served := _served_owner()) is not None and served is not owner:
            self._inner[id(served)] = (weakref.ref(served), call)
        return call

    def get(self, body: Mapping[str, Any]) -> Call | None:
        """The request of a hook's `body`, if it is guarded."""
        owner = _owner(body) or _served_owner()
        _, call = self._calls.get(id(owner), (None, None))
        return call

    def begun(self, body: Mapping[str, Any]) -> Call | None:
        """The request of a hook's `body`, or the one that LiteLLM has made of it, which no other hook may touch."""
        owner = _owner(body) or _served_owner()
        for calls in (self._calls, self._inner):
            found = calls.get(id(owner))
            if found is not None and found[0]() is owner:
                return found[1]
        return None

    def refusal(self) -> CompactionError | None:
        """The last refusal of the request that the running task serves; None without any."""
        call = self.begun({})
        return call.refusal if call is not None else None

    def logged(self, details: Mapping[str, Any]) -> Call | None:
        """The request that LiteLLM logs, by the details that its logging object holds."""
        for reference, call in self._calls.values():
            if getattr(reference(), _DETAILS, None) is details:
                return call
        return None

    def close(self, body: Mapping[str, Any]) -> Call | None:
        """Forgets a request that has ended, and its holds."""
        owner = _owner(body) or _served_owner()
        _, call = self._calls.pop(id(owner), (None, None))
        reference, inner = self._inner.pop(id(owner), (None, None))
        if call is None and reference is not None and reference() is owner:
            call = inner
        if call is not None:
            call.release_room()
        return call


def _owner(body: Mapping[str, Any]) -> object | None:
    """LiteLLM's logging object; never anything that JSON, and so a client, could have put in its place."""
    found: object = body.get("litellm_logging_obj")
    return found if hasattr(found, _DETAILS) else None


def _served_owner() -> object | None:
    reference = _served.get()
    return reference() if reference is not None else None


def _copied(messages: object) -> list[Any]:
    """A list of messages that does not change with them; their texts are shared, and compared by identity first."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return []
    return [dict(message) if isinstance(message, Mapping) else message for message in messages]
