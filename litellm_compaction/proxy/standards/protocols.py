"""OpenAI's Responses and Anthropic's Messages: a client's words about its context, and the same words in its answer.

OpenAI's: compaction items and triggers (openai-python: `response_compact_params.py`, `compacted_response.py`; Codex:
`compact_remote_v2.rs`, which wants exactly one compaction item and `response.completed` behind it). Anthropic's:
context edits and compaction blocks (anthropic-sdk-python, `types/beta`: `beta_clear_*`, `beta_compaction_*`), in two
generations: the edit `compact_20260112`, and `compaction: {type: summarize}`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, Field, StrictBool, StrictStr, TypeAdapter, ValidationError

from litellm_compaction.core.forms import ClearOrder
from litellm_compaction.core.portable import Portable
from litellm_compaction.errors import BadItem, NotServed
from litellm_compaction.proxy.standards.orders import Orders, Told, record_of

_Json: TypeAlias = dict[str, Any]
# Reads the text of a compaction that a client has kept, which stands at the named place: `Items.opened` of a tenant.
Opened: TypeAlias = Callable[[object, str], Awaitable[Portable]]
# Orders, and the fields of the body as LiteLLM may have them, None for one that goes.
Read: TypeAlias = tuple[Orders, _Json]
_Shape = TypeVar("_Shape")

TRIGGER = {"type": "compaction_trigger"}
_ITEMS = ("compaction", "compaction_summary")
# By LiteLLM's names of calls: fields that it drops, which stand for messages.
_DROPPED = {"anthropic_messages": ("compaction",), "aresponses": ("conversation", "previous_response_id")}
_LOST = "is not served for this model: it would be left out in silence. Send the whole conversation."
# LiteLLM makes a WebSocket's requests itself and shows them to no plug-in, and would leave the item out.
_UNREAD = "is a compaction item, which is not followed over a WebSocket, nor by a model that is guarded only in part"
_Positive = Annotated[int, Field(strict=True, ge=1)]


class Responses:
    """OpenAI's: one object for the events of each answer, which it numbers anew."""

    at_once = frozenset({"response.created", "response.in_progress", "response.queued", "response.failed"})
    at_end = frozenset({"response.completed", "response.incomplete"})
    index = "output_index"

    def __init__(self) -> None:
        self._numbers = itertools.count()

    async def read_orders(self, body: Mapping[str, Any], opened: Opened) -> Read:
        """A BadItem says that an item or a field is not as the protocol has it."""
        changed: _Json = {key: None for key in ("context_management", "truncation") if body.get(key) is not None}
        thresholds = _checked(_THRESHOLDS, body.get("context_management") or [], "context_management", "[{}]")
        items = body.get("input")
        kinds = [_kind(item) for item in items] if isinstance(items, list) else []
        items, compacts_only = messages_of(items), TRIGGER["type"] in kinds
        if compacts_only:
            if (at := kinds.index(TRIGGER["type"])) != len(items) - 1:
                raise BadItem(f"input[{at}]", "is a compaction_trigger, which has to be the last item")
            if not at:
                raise BadItem("input", "has nothing to compact: the compaction_trigger is its only item")
            changed["input"] = items = items[:-1]
        newest = max((at for at, kind in enumerate(kinds) if kind in _ITEMS), default=None)
        portable: Portable | None = None
        if newest is not None:
            portable = await opened(items[newest].get("encrypted_content"), f"input[{newest}].encrypted_content")
            stays = ("system", "developer", *(["user"] if portable.spares_requests else []))
            before = [item for item in items[:newest] if _kind(item) == "message" and item.get("role") in stays]
            changed["input"] = [*before, *messages_of(record_of(portable)), *items[newest + 1 :]]
        orders = Orders(
            portable=portable,
            compacts_only=compacts_only,
            wants_item=bool(thresholds),
            spares_requests=compacts_only,
            threshold_tokens=thresholds[0].compact_threshold or 0 if thresholds else 0,
            may_change=body.get("truncation") != "disabled" or compacts_only,
        )
        return orders, changed

    def events(self, frame: object) -> Iterable[object]:
        """Returns the events of a frame of LiteLLM's, as dictionaries; as they came where they cannot be read."""
        if isinstance(frame, BaseModel):
            fields = json.loads(frame.model_dump_json(exclude_none=True, exclude_unset=True))
            if str(fields.get("type", "")).startswith("response."):
                return [fields]
        return [frame]

    def frame(self, event: _Json) -> str:
        """Returns an event as LiteLLM sends it on."""
        return json.dumps({**event, "sequence_number": next(self._numbers)}, ensure_ascii=False)

    def part(self, told: Told) -> list[_Json]:
        """Returns the events of the part that says it, at place 0; none if there is none."""
        return [
            {"type": f"response.output_item.{each}", "output_index": 0, "item": item}
            for item in _items(told)
            for each in ("added", "done")
        ]

    def ended(self, event: _Json, told: Told) -> _Json:
        """Returns an event of the end with what is to be said there."""
        response = event["response"]
        kind = "response.completed" if told.is_alone else event["type"]
        return {**event, "type": kind, "response": {**response, **_told_fields(told, response.get("output"))}}

    def answered(self, response: Any, told: Told) -> Any:
        """Returns a whole answer with the compaction item first; LiteLLM's own object is not changed."""
        if not isinstance(response, BaseModel) or not (told.text or told.is_alone):
            return None
        fields, usage = _told_fields(told, getattr(response, "output", None)), getattr(response, "usage", None)
        if "usage" in fields and usage is not None:
            fields["usage"] = type(usage)(**fields["usage"])
        return response.model_copy(update=fields)


class _Threshold(BaseModel):
    type: Literal["compaction"]
    compact_threshold: _Positive | None = None


_THRESHOLDS = TypeAdapter(Annotated[list[_Threshold], Field(max_length=1)])


def _kind(item: object) -> object:
    return item.get("type", "message") if isinstance(item, Mapping) else None


def not_served(body: Mapping[str, Any], kind: str, *, keeps: Callable[[], bool]) -> NotServed | None:
    """The first that LiteLLM would drop of a call of a `kind` with its client's orders taken out, on its way to a chat.

    Not the response before, if LiteLLM `keeps` responses.
    """
    dropped = [field for field in _DROPPED.get(kind, ()) if body.get(field) is not None]
    for at, item in enumerate(items if isinstance(items := body.get("input"), list) else ()):
        if _kind(item) in (TRIGGER["type"], *_ITEMS):
            return BadItem(f"input[{at}]", _UNREAD)
        # One that only names another, which OpenAI's server has stored; its type may be left out.
        if isinstance(item, Mapping) and "id" in item and item.keys() <= {"type", "id"}:
            dropped += [f"input[{at}]"] if item.get("type") in (None, "item_reference") else []
    for field in dropped:
        if field != "previous_response_id" or not keeps():
            return NotServed(f"`{field}` {_LOST}", field)
    return None


def messages_of(given: object) -> list[Any]:
    """Returns the items of a request's `input`, which may be a text alone."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given) if isinstance(given, list) else []


def _items(told: Told) -> list[_Json]:
    if not told.text:
        return []
    # An id that says nothing else, and is the same for the same text.
    digest = hashlib.blake2b(told.text.encode(), digest_size=16).hexdigest()
    return [{"type": "compaction", "id": f"cmp_{digest}", "encrypted_content": told.text}]


def _told_fields(told: Told, output: Any) -> _Json:
    """The fields of a response in which it is said."""
    if not told.is_alone:
        return {"output": [*_items(told), *(output or [])]}
    usage = {
        "input_tokens": told.read_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": told.written_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": told.read_tokens + told.written_tokens,
    }
    return {"output": _items(told), "status": "completed", "incomplete_details": None, "usage": usage}


def compacted_response(body: Mapping[str, Any], answer: Mapping[str, Any]) -> _Json:
    """The body of `POST /v1/responses/compact`: the user's messages of `body`, and the item that `answer` has."""
    own = [item for item in messages_of(body.get("input")) if _kind(item) == "message" and item.get("role") == "user"]
    # In parts, as `messages_of` has them.
    parts = [messages_of(item["content"])[0] if isinstance(item.get("content"), str) else {} for item in own]
    said = [{"status": "completed", "type": "message", **item, **part} for item, part in zip(own, parts, strict=True)]
    return {
        "id": answer.get("id"),
        "object": "response.compaction",
        "created_at": int(answer.get("created_at") or 0),
        "output": [*said, *(answer.get("output") or [])],
        "usage": answer.get("usage"),
    }


class Messages:
    """Anthropic's, with the same face as `Responses`; LiteLLM has one or more events in each piece of bytes."""

    at_once = frozenset({"message_start", "ping", "error"})
    at_end = frozenset({"message_delta", "message_stop"})
    index = "index"

    async def read_orders(self, body: Mapping[str, Any], opened: Opened) -> Read:
        messages, config = body.get("messages"), body.get("compaction")
        changed: _Json = {key: None for key in ("context_management", "compaction") if body.get(key) is not None}
        management = _checked(_MANAGEMENT, body.get("context_management") or {}, "context_management", ".{}")
        edits = {type(edit): edit for edit in management.edits}
        if len(edits) < len(management.edits):
            raise BadItem("context_management.edits", "has two edits of one type")
        summarize = None if config is None else _checked(_SUMMARIZE, config, "compaction", ".{}")
        if summarize is not None and edits:
            raise BadItem("compaction", "cannot be combined with context_management")
        clear, compact = edits.get(_ClearTools), edits.get(_Compact)
        portable = None
        if isinstance(messages, list):
            portable, left = await _portable(messages, opened)
            if summarize is not None and len(left) <= (portable is not None):
                raise BadItem("messages", "has nothing to summarize")
            if left != messages:
                changed["messages"] = left
        orders = Orders(
            portable=portable,
            compacts_only=summarize is not None,
            wants_item=compact is not None,
            pauses=isinstance(compact, _Compact) and compact.pause_after_compaction,
            threshold_tokens=compact.trigger.value if isinstance(compact, _Compact) else 0,
            clear=clear.order() if isinstance(clear, _ClearTools) else None,
            tells_edits=bool(edits),
            focus=" ".join(getattr(summarize or compact, "instructions", "").split())[:500],
        )
        return orders, changed

    def events(self, frame: object) -> Iterable[object]:
        if not isinstance(frame, (bytes, bytearray)):
            return [frame]
        return [_event(part) for part in bytes(frame).split(b"\n\n") if part.strip()]

    def frame(self, event: _Json) -> bytes:
        return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()

    def part(self, told: Told) -> list[_Json]:
        if not told.text:
            return []
        block = _block(told)
        delta = {"type": "compaction_delta", **{name: block[name] for name in ("content", "encrypted_content")}}
        begun = {**block, "content": "", "encrypted_content": None}
        return [
            {"type": "content_block_start", "index": 0, "content_block": begun},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
        ]

    def ended(self, event: _Json, told: Told) -> _Json:
        if event["type"] == "message_stop":
            return event
        delta, fields = _end(told)
        return {**event, "delta": {**(event.get("delta") or {}), **delta}, **fields}

    def answered(self, message: Any, told: Told) -> Any:
        if not isinstance(message, dict):
            return None
        blocks = [_block(told)] if told.text else []
        own = [] if told.is_alone else list(message.get("content") or [])
        stop, fields = _end(told)
        return {**message, "content": [*blocks, *own], **stop, **fields}


class _Amount(BaseModel):
    value: Annotated[int, Field(strict=True, ge=0)]


class _Trigger(BaseModel):
    type: Literal["input_tokens", "tool_uses"]
    value: _Positive


class _TokensTrigger(_Trigger):
    type: Literal["input_tokens"]


class _ClearTools(BaseModel):
    """The defaults here and below are Anthropic's own."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: _Trigger = _Trigger(type="input_tokens", value=100_000)
    keep: _Amount = _Amount(value=3)
    clear_at_least: _Amount = _Amount(value=0)
    exclude_tools: frozenset[StrictStr] = frozenset()
    clear_tool_inputs: StrictBool | frozenset[StrictStr] = False

    def order(self) -> ClearOrder:
        return ClearOrder(
            above_tokens=self.trigger.value if self.trigger.type == "input_tokens" else 0,
            above_calls=self.trigger.value if self.trigger.type == "tool_uses" else 0,
            keep=self.keep.value,
            at_least_tokens=self.clear_at_least.value,
            excluded=self.exclude_tools,
            inputs=self.clear_tool_inputs,
        )


class _ClearThinking(BaseModel):
    """Is followed by doing nothing: chat templates leave out old thoughts by themselves."""

    type: Literal["clear_thinking_20251015"]


class _Compact(BaseModel):
    type: Literal["compact_20260112"]
    trigger: _TokensTrigger = _TokensTrigger(type="input_tokens", value=150_000)
    pause_after_compaction: bool = False
    instructions: StrictStr = ""


class _Management(BaseModel):
    edits: list[Annotated[_ClearTools | _ClearThinking | _Compact, Field(discriminator="type")]] = []


class _Summarize(BaseModel):
    type: Literal["summarize"]
    instructions: StrictStr = ""


_MANAGEMENT, _SUMMARIZE = TypeAdapter(_Management), TypeAdapter(_Summarize)


async def _portable(messages: list[Any], opened: Opened) -> tuple[Portable | None, list[Any]]:
    """The newest block's compaction, and the messages from that on."""
    at = max((at for at, message in enumerate(messages) if _without_block(message) != [message]), default=None)
    if at is None:
        return None, messages
    *_, (index, block) = (each for each in enumerate(_blocks(messages[at])) if each[1].get("type") == "compaction")
    field, text = f"messages.{at}.content.{index}", block.get("encrypted_content")
    if index:
        raise BadItem(field, "is a compaction block, which has to be the first block of its message, and the only one")
    if block.get("content") is None and text is None:
        # A compaction that failed is none.
        return None, [rest for message in messages for rest in _without_block(message)]
    portable = await opened(text, f"{field}.encrypted_content")
    record = record_of(portable)
    if block.get("content") not in (None, record):
        raise BadItem(f"{field}.content", "is not what was sent")
    return portable, [{"role": "user", "content": record}, *_without_block(messages[at]), *messages[at + 1 :]]


def _without_block(message: Any) -> list[Any]:
    blocks = _blocks(message)
    rest = [block for block in blocks if block.get("type") != "compaction"]
    return [message] if len(rest) == len(blocks) else [{**message, "content": rest}] if rest else []


def _blocks(message: object) -> list[_Json]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _event(part: bytes) -> object:
    """An event as a dictionary; as it came if it cannot be read, such as a comment."""
    try:
        event = json.loads(part.partition(b"data:")[2])
    except ValueError:
        event = None
    return event if isinstance(event, dict) and "type" in event else part + b"\n\n"


def _block(told: Told) -> _Json:
    return {
        "type": "compaction",
        "content": told.record,
        "encrypted_content": told.text,
        "signature": told.text[:64],
        "tool_changes": None,
    }


def _end(told: Told) -> tuple[_Json, _Json]:
    """The reason to stop, and the fields beside it: edits, and without a model the usage, of a count alone."""
    counts = {"cleared_tool_uses": told.cleared_calls, "cleared_input_tokens": told.cleared_tokens}
    edits = [{"type": "clear_tool_uses_20250919", **counts}] if told.cleared_calls else []
    fields: _Json = {"context_management": {"applied_edits": edits}}
    if told.is_alone:
        fields["usage"] = {"input_tokens": 0 if told.text else told.read_tokens, "output_tokens": 0}
    return {"stop_reason": "compaction"} if told.is_alone and told.text else {}, fields


def _checked(shape: TypeAdapter[_Shape], value: object, field: str, place: str) -> _Shape:
    """Returns a field of a request as its protocol has it, or raises a BadItem, which writes an index like `place`."""
    try:
        return shape.validate_python(_without_nulls(value))
    except RecursionError:
        raise BadItem(field, "is not as the protocol has it") from None
    except ValidationError as error:
        problem: Any = error.errors()[0]
        names = [place.format(each) if isinstance(each, int) else f".{each}" for each in problem["loc"]]
        where = "".join([field, *names])
        if problem["type"] == "union_tag_invalid":
            raise BadItem(f"{where}.type", "is none of the known edits") from None
        # Without the name of a class of ours.
        why = problem["msg"].partition(" or instance of ")[0]
        raise BadItem(where, f"is not as the protocol has it ({why})") from None


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
