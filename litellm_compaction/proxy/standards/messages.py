"""Anthropic's Messages: context edits and compaction blocks in a request, and in the stream or body of its answer.

Source: anthropic-sdk-python (`types/beta`: `beta_clear_*`, `beta_compaction_*`), and Anthropic's "Context editing" and
"Compaction". Two generations: the edit `compact_20260112`, and `compaction: {type: summarize}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr

from litellm_compaction.core.forms import ClearOrder
from litellm_compaction.core.portable import Portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.orders import Opened, Orders, Told, checked, record_of


class _Amount(BaseModel):
    value: Annotated[int, Field(strict=True, ge=0)]


class _Trigger(BaseModel):
    type: Literal["input_tokens", "tool_uses"]
    value: Annotated[int, Field(strict=True, ge=1)]


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


class _Compaction(BaseModel):
    type: Literal["summarize"]
    instructions: StrictStr = ""


async def read_orders(body: Mapping[str, Any], opened: Opened) -> tuple[Orders, dict[str, Any]]:
    """Returns a request's orders, and the fields of its body as LiteLLM may have them; None for one that goes.

    Raises:
        BadItem: a block or a field is not as the protocol has it.
    """
    messages, config = body.get("messages"), body.get("compaction")
    changed: dict[str, Any] = {key: None for key in ("context_management", "compaction") if body.get(key) is not None}
    edits = checked(_Management, body.get("context_management") or {}, "context_management", ".{}").edits
    by_type = {type(edit): edit for edit in edits}
    if len(by_type) < len(edits):
        raise BadItem("context_management.edits", "has two edits of one type")
    summarize = None if config is None else checked(_Compaction, config, "compaction", ".{}")
    if summarize is not None and edits:
        raise BadItem("compaction", "cannot be combined with context_management")
    clear, compact = by_type.get(_ClearTools), by_type.get(_Compact)
    portable = None
    if isinstance(messages, list):
        portable, kept = await _portable(messages, opened)
        if summarize is not None and len(kept) <= (portable is not None):
            raise BadItem("messages", "has nothing to summarize")
        if kept != messages:
            changed["messages"] = kept
    asked = summarize or compact
    orders = Orders(
        portable=portable,
        compacts_only=summarize is not None,
        wants_item=compact is not None,
        pauses=isinstance(compact, _Compact) and compact.pause_after_compaction,
        threshold_tokens=compact.trigger.value if isinstance(compact, _Compact) else 0,
        clear=clear.order() if isinstance(clear, _ClearTools) else None,
        tells_edits=bool(edits),
        focus=" ".join(getattr(asked, "instructions", "").split())[:500],
    )
    return orders, changed


async def _portable(messages: list[Any], opened: Opened) -> tuple[Portable | None, list[Any]]:
    """The newest block's compaction, and the messages from that on."""
    blocks = [
        (at, index, block)
        for at, message in enumerate(messages)
        for index, block in enumerate(_blocks(message))
        if block.get("type") == "compaction"
    ]
    if not blocks:
        return None, messages
    at, index, block = blocks[-1]
    field = f"messages.{at}.content.{index}"
    if index:
        raise BadItem(field, "is a compaction block, which has to be the first block of its message, and the only one")
    if block.get("content") is None and block.get("encrypted_content") is None:
        # A compaction that failed is none.
        return None, [rest for message in messages for rest in _without_block(message)]
    portable = await opened(block.get("encrypted_content"), f"{field}.encrypted_content")
    record = record_of(portable)
    if block.get("content") not in (None, record):
        raise BadItem(f"{field}.content", "is not what was signed")
    rest = _without_block(messages[at])
    return portable, [{"role": "user", "content": record}, *rest, *messages[at + 1 :]]


def _without_block(message: Any) -> list[Any]:
    blocks = _blocks(message)
    rest = [block for block in blocks if block.get("type") != "compaction"]
    return [message] if len(rest) == len(blocks) else [{**message, "content": rest}] if rest else []


def _blocks(message: object) -> list[dict[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


class Stream:
    """The events of one answer, as `responses.Stream` has them; LiteLLM has one or more in each piece of bytes."""

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
        return {**event, "delta": {**(event.get("delta") or {}), **_stop(told)}, **_said(told)}


def answered(message: Any, told: Told | None) -> Any:
    """Returns a whole answer with what is to be said of its compaction; LiteLLM's own object is not changed."""
    if told is None or not isinstance(message, dict):
        return None
    blocks = [_block(told)] if told.text else []
    own = [] if told.is_alone else list(message.get("content") or [])
    return {**message, "content": [*blocks, *own], **_stop(told), **_said(told)}


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
        "content": told.record,
        "encrypted_content": told.text,
        "signature": told.text[:64],
        "tool_changes": None,
    }


def _stop(told: Told) -> dict[str, Any]:
    return {"stop_reason": "compaction"} if told.is_alone and told.text else {}


def _said(told: Told) -> dict[str, Any]:
    """The edits that were applied, and of an answer without a model the usage: a compaction's own is not in it."""
    counts = {"cleared_tool_uses": told.cleared_calls, "cleared_input_tokens": told.cleared_tokens}
    edits = [{"type": "clear_tool_uses_20250919", **counts}] if told.cleared_calls else []
    tokens = {"input_tokens": 0 if told.text else told.read_tokens, "output_tokens": 0}
    return {"context_management": {"applied_edits": edits}, **({"usage": tokens} if told.is_alone else {})}
