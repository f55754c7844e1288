"""Anthropic's Messages: context edits and compaction blocks in a request, and in the stream or body of its answer.

Source: anthropic-sdk-python (`types/beta`: `beta_clear_*`, `beta_compaction_*`), and Anthropic's "Context editing" and
"Compaction". Two generations: the edit `compact_20260112`, and `compaction: {type: summarize}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field, StrictBool, StrictStr

from litellm_compaction.core.forms import ClearOrder
from litellm_compaction.core.portable import Portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.orders import Opened, Orders, Told, checked

_Fields: TypeAlias = Mapping[str, Any]
# Anthropic's own defaults.
_CLEAR_TOKENS, _COMPACT_TOKENS, _KEPT_CALLS = 100_000, 150_000, 3
_NOTHING_LEFT_OUT = "The conversation is kept whole."


class _Amount(BaseModel):
    value: Annotated[int, Field(strict=True, ge=0)]


class _Trigger(BaseModel):
    type: Literal["input_tokens", "tool_uses"]
    value: Annotated[int, Field(strict=True, ge=1)]


class _TokensTrigger(_Trigger):
    type: Literal["input_tokens"]


class _ClearTools(BaseModel):
    type: Literal["clear_tool_uses_20250919"]
    trigger: _Trigger | None = None
    keep: _Amount | None = None
    clear_at_least: _Amount | None = None
    exclude_tools: list[StrictStr] | None = None
    clear_tool_inputs: StrictBool | list[StrictStr] | None = None


class _ClearThinking(BaseModel):
    """Is followed by doing nothing: chat templates leave out old thoughts by themselves."""

    type: Literal["clear_thinking_20251015"]


class _Compact(BaseModel):
    type: Literal["compact_20260112"]
    trigger: _TokensTrigger | None = None
    pause_after_compaction: bool | None = None
    instructions: StrictStr | None = None


class _Management(BaseModel):
    edits: list[Annotated[_ClearTools | _ClearThinking | _Compact, Field(discriminator="type")]] | None = None


class _Compaction(BaseModel):
    type: Literal["summarize"]
    instructions: StrictStr | None = None


async def read_orders(body: _Fields, opened: Opened) -> tuple[Orders, dict[str, Any]]:
    """Returns a request's orders, and the fields of its body as LiteLLM may have them; None for one that goes.

    Raises:
        BadItem: a block or a field is not as the protocol has it.
    """
    messages, management, config = (body.get(key) for key in ("messages", "context_management", "compaction"))
    changed: dict[str, Any] = {key: None for key in ("context_management", "compaction") if body.get(key) is not None}
    edits = checked(_Management, management or {}, "context_management", ".{}").edits or []
    if len({edit.type for edit in edits}) < len(edits):
        raise BadItem("context_management.edits", "has two edits of one type")
    summarize = None if config is None else checked(_Compaction, config, "compaction", ".{}")
    if summarize is not None and edits:
        raise BadItem("compaction", "cannot be combined with context_management")
    compact = next((edit for edit in edits if isinstance(edit, _Compact)), None)
    portable, placeholder, kept = None, "", messages
    if isinstance(messages, list):
        portable, placeholder, kept = await _portable(messages, opened)
        if summarize is not None:
            _check_turn(kept, has_block=portable is not None)
        if kept != messages:
            changed["messages"] = kept
    asked = summarize or compact
    orders = Orders(
        portable=portable,
        placeholder=placeholder,
        compacts_only=summarize is not None,
        wants_item=compact is not None,
        pauses=compact is not None and bool(compact.pause_after_compaction),
        threshold_tokens=0 if compact is None else compact.trigger.value if compact.trigger else _COMPACT_TOKENS,
        clear=next((_clear_order(edit) for edit in edits if isinstance(edit, _ClearTools)), None),
        tells_edits=bool(edits),
        focus=" ".join((asked.instructions or "").split())[:500] if asked is not None else "",
    )
    return orders, changed


def _clear_order(edit: _ClearTools) -> ClearOrder:
    trigger = edit.trigger or _Trigger(type="input_tokens", value=_CLEAR_TOKENS)
    inputs = edit.clear_tool_inputs or False
    return ClearOrder(
        above_tokens=trigger.value if trigger.type == "input_tokens" else 0,
        above_calls=trigger.value if trigger.type == "tool_uses" else 0,
        keep=edit.keep.value if edit.keep is not None else _KEPT_CALLS,
        at_least_tokens=edit.clear_at_least.value if edit.clear_at_least is not None else 0,
        excluded=frozenset(edit.exclude_tools or ()),
        inputs=inputs if isinstance(inputs, bool) else frozenset(inputs),
    )


async def _portable(messages: list[Any], opened: Opened) -> tuple[Portable | None, str, list[Any]]:
    """The newest block's compaction, its placeholder, and the messages from that on."""
    places = [
        (at, index)
        for at, message in enumerate(messages)
        for index, block in enumerate(_blocks(message))
        if block.get("type") == "compaction"
    ]
    if not places:
        return None, "", messages
    at, index = places[-1]
    block, field = _blocks(messages[at])[index], f"messages.{at}.content.{index}"
    if index:
        raise BadItem(field, "is a compaction block, which has to be the first block of its message, and the only one")
    if block.get("content") is None and block.get("encrypted_content") is None:
        # A compaction that failed is none.
        return None, "", [rest for message in messages for rest in _without_block(message)]
    portable = await opened(block.get("encrypted_content"), f"{field}.encrypted_content")
    placeholder = portable.record or _NOTHING_LEFT_OUT
    for name, signed in (("content", placeholder), ("tool_changes", None)):
        if block.get(name) not in (None, [], signed):
            raise BadItem(f"{field}.{name}", "is not what was signed")
    rest = _without_block(messages[at])
    return portable, placeholder, [{"role": "user", "content": placeholder}, *rest, *messages[at + 1 :]]


def _without_block(message: Any) -> list[Any]:
    blocks = _blocks(message)
    rest = [block for block in blocks if block.get("type") != "compaction"]
    return [message] if len(rest) == len(blocks) else [{**message, "content": rest}] if rest else []


def _blocks(message: object) -> list[dict[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _check_turn(messages: Sequence[Any], *, has_block: bool) -> None:
    if len(messages) <= has_block:
        raise BadItem("messages", "has nothing to summarize")
    if any(block.get("type") == "tool_use" for block in _blocks(messages[-1])):
        raise BadItem("messages", "ends in a call that no result answers")


class Stream:
    """The events of one answer; LiteLLM has one or more of them in each piece of bytes."""

    at_once = frozenset({"message_start", "ping", "error"})
    at_end = frozenset({"message_delta", "message_stop"})
    index = "index"

    def events(self, frame: object) -> Iterable[object]:
        if isinstance(frame, dict):
            return [frame] if "type" in frame else []
        if not isinstance(frame, (bytes, bytearray)):
            return [frame]
        return [_event(part) for part in bytes(frame).split(b"\n\n") if part.strip()]

    def frame(self, event: dict[str, Any]) -> bytes:
        return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()

    def part(self, told: Told) -> list[dict[str, Any]]:
        if not told.text:
            return []
        block = _block(told)
        given = {name: block[name] for name in ("content", "encrypted_content")}
        begun = {**block, "content": "", "encrypted_content": None}
        return [
            {"type": "content_block_start", "index": 0, "content_block": begun},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "compaction_delta", **given}},
            {"type": "content_block_stop", "index": 0},
        ]

    def ended(self, event: dict[str, Any], told: Told | None) -> dict[str, Any]:
        if told is None or event["type"] == "message_stop":
            return event
        ended = {"delta": {**(event.get("delta") or {}), **_stop(told)}} if told.is_alone else {}
        return {**event, **ended, **_said(told)}


def answered(message: Any, told: Told | None) -> Any:
    """Returns a whole answer with what is to be said of its compaction; LiteLLM's own object is not changed."""
    if told is None or not isinstance(message, dict):
        return None
    blocks = [_block(told)] if told.text else []
    own = [] if told.is_alone else list(message.get("content") or [])
    return {**message, "content": [*blocks, *own], **(_stop(told) if told.is_alone else {}), **_said(told)}


def _event(part: bytes) -> object:
    """An event as a dictionary; as it came if it cannot be read, such as a comment."""
    _, mark, data = part.partition(b"data:")
    try:
        event = json.loads(data) if mark else None
    except ValueError:
        event = None
    return event if isinstance(event, dict) and "type" in event else part + b"\n\n"


def _block(told: Told) -> dict[str, Any]:
    return {
        "type": "compaction",
        "content": told.record or _NOTHING_LEFT_OUT,
        "encrypted_content": told.text,
        "signature": told.text[:64],
        "tool_changes": None,
    }


def _stop(told: Told) -> dict[str, Any]:
    return {"stop_reason": "compaction"} if told.text else {}


def _said(told: Told) -> dict[str, Any]:
    """The edits that were applied, and of an answer without a model the usage: a compaction's own is not in it."""
    counts = {"cleared_tool_uses": told.cleared_calls, "cleared_input_tokens": told.cleared_tokens}
    edits = [{"type": "clear_tool_uses_20250919", **counts}] if told.cleared_calls else []
    tokens = {"input_tokens": 0 if told.text else told.read_tokens, "output_tokens": 0}
    return {"context_management": {"applied_edits": edits}, **({"usage": tokens} if told.is_alone else {})}
