"""Anthropic's Messages: context edits and compaction blocks in a request, and in the stream or body of its answer.

Shapes: anthropic 2.12.0 (`types/beta`: `beta_clear_*`, `beta_compaction_*`) and Anthropic's "Context editing" and
"Compaction" (read 2026-11-22). Two generations: the edit `compact_20260112`, and `compaction: {type: summarize}`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from litellm_compaction.core.clear_order import ClearOrder
from litellm_compaction.core.portable import Portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.orders import Orders

_Fields = Mapping[str, Any]
_CLEAR_TOOLS, _CLEAR_THINKING, _COMPACT = "clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"
_EDITS = (_CLEAR_THINKING, _CLEAR_TOOLS, _COMPACT)
_EDITS_FIELD = "context_management.edits"
# Anthropic's own defaults.
_CLEAR_TOKENS, _COMPACT_TOKENS, _KEPT_CALLS, _KEPT_THOUGHTS = 100_000, 150_000, 3, 1
_NOTHING_LEFT_OUT = "The conversation is kept whole."
_NO_USAGE: _Fields = {"input_tokens": 0, "output_tokens": 0}
_THOUGHTS = ("thinking", "redacted_thinking")
# Of the second generation: `error.details.error_code`.
_AMBIGUOUS, _MISPLACED = "compaction_block_ambiguous", "compaction_block_misplaced"
_MISMATCH, _CHANGES = "compaction_block_content_mismatch", "compaction_block_tool_changes_mismatch"
_SIGNATURE = "compaction_block_signature_invalid"
_INCOMPLETE, _NOTHING = "compaction_incomplete_turn", "compaction_nothing_to_summarize"

Opened = Callable[[object, str], Awaitable[Portable]]


class Block(NamedTuple):
    """An answer's word about the compaction of its conversation.

    Attributes:
        text: of the portable compaction, None for none.
        summary: as a person may read it.
        edits: those that were applied, as the protocol has them.
        read_tokens, written_tokens: of the compaction, if it was made for this answer; else 0.
    """

    text: str | None
    summary: str
    edits: Sequence[_Fields]
    read_tokens: int
    written_tokens: int

    @property
    def block(self) -> dict[str, Any] | None:
        if self.text is None:
            return None
        return {
            "type": "compaction",
            "content": self.summary or _NOTHING_LEFT_OUT,
            "encrypted_content": self.text,
            "signature": self.text[:64],
            "tool_changes": None,
        }


async def read_orders(body: _Fields, opened: Opened) -> tuple[Orders, dict[str, Any]]:
    """Returns a request's orders, and the fields of its body as LiteLLM may have them; None for one that goes.

    Raises:
        BadItem: a block or a field is not as the protocol has it.
    """
    messages = body.get("messages")
    edits, config = _edits(body.get("context_management")), body.get("compaction")
    changed: dict[str, Any] = {key: None for key in ("context_management", "compaction") if body.get(key) is not None}
    if config is not None and edits:
        raise BadItem("compaction", "cannot be combined with context_management")
    compact = edits.get(_COMPACT)
    focus = _focus(config, "compaction") if config is not None else ""
    if compact is not None:
        focus = _focus(compact, f"{_EDITS_FIELD}.{_COMPACT}")
    orders = Orders(
        compacts_only=config is not None,
        wants_item=compact is not None,
        pauses=compact is not None and compact.get("pause_after_compaction") is True,
        threshold_tokens=0 if compact is None else _trigger(compact, _COMPACT, _COMPACT_TOKENS, ("input_tokens",))[1],
        clear=_clear_order(edits[_CLEAR_TOOLS]) if _CLEAR_TOOLS in edits else None,
        tells_edits=bool(edits),
        focus=focus,
    )
    if not isinstance(messages, list):
        return orders, changed
    portable, placeholder, kept = await _portable(messages, opened)
    thoughts = 0
    if _CLEAR_THINKING in edits:
        kept, thoughts = _without_thoughts(kept, edits[_CLEAR_THINKING])
    if config is not None:
        _check_turn(kept, has_block=portable is not None)
    if kept != messages:
        changed["messages"] = kept
    return replace(orders, portable=portable, placeholder=placeholder, cleared_thoughts=thoughts), changed


def _edits(value: object) -> dict[str, _Fields]:
    if value is None:
        return {}
    listed = value.get("edits") if isinstance(value, Mapping) else None
    if listed is None and isinstance(value, Mapping):
        return {}
    if not isinstance(listed, list):
        raise BadItem(_EDITS_FIELD, "is no list")
    found: dict[str, _Fields] = {}
    for at, edit in enumerate(listed):
        kind = edit.get("type") if isinstance(edit, Mapping) else None
        if kind not in _EDITS:
            allowed = ", ".join(map(repr, _EDITS))
            raise BadItem(f"{_EDITS_FIELD}.{at}.type", f"does not match any of the expected tags: {allowed}")
        if kind in found:
            raise BadItem(f"{_EDITS_FIELD}.{at}.type", "stands there twice")
        if kind == _CLEAR_THINKING and found:
            raise BadItem(f"{_EDITS_FIELD}.{at}.type", f"is {_CLEAR_THINKING}, which has to be the first edit")
        found[kind] = edit
    return found


def _trigger(edit: _Fields, kind: str, default: int, kinds: Sequence[str]) -> tuple[str, int]:
    trigger = edit.get("trigger")
    if trigger is None:
        return "input_tokens", default
    field = f"{_EDITS_FIELD}.{kind}.trigger"
    if not isinstance(trigger, Mapping) or trigger.get("type") not in kinds:
        raise BadItem(f"{field}.type", f"does not match any of the expected tags: {', '.join(map(repr, kinds))}")
    return str(trigger["type"]), _number(trigger, "value", field, least=1)


def _number(value: _Fields, key: str, field: str, *, least: int = 0) -> int:
    number = value.get(key)
    if type(number) is not int or number < least:
        raise BadItem(f"{field}.{key}", f"is no whole number from {least} on")
    return number


def _focus(config: object, field: str) -> str:
    if not isinstance(config, Mapping) or (field == "compaction" and config.get("type") != "summarize"):
        raise BadItem(f"{field}.type", "does not match any of the expected tags: 'summarize'")
    instructions = config.get("instructions")
    if instructions is None:
        return ""
    if not isinstance(instructions, str):
        raise BadItem(f"{field}.instructions", "is no text")
    return " ".join(instructions.split())[:500]


def _clear_order(edit: _Fields) -> ClearOrder:
    field = f"{_EDITS_FIELD}.{_CLEAR_TOOLS}"
    kind, value = _trigger(edit, _CLEAR_TOOLS, _CLEAR_TOKENS, ("input_tokens", "tool_uses"))
    keep, least = edit.get("keep"), edit.get("clear_at_least")
    excluded, inputs = edit.get("exclude_tools") or [], edit.get("clear_tool_inputs") or False
    for name, found in (("exclude_tools", excluded), ("clear_tool_inputs", inputs)):
        is_list = isinstance(found, list) and all(isinstance(each, str) for each in found)
        if not is_list and not (name == "clear_tool_inputs" and found is True) and found:
            raise BadItem(f"{field}.{name}", "is no list of names of tools")
    return ClearOrder(
        above_tokens=value if kind == "input_tokens" else 0,
        above_calls=value if kind == "tool_uses" else 0,
        keep=_KEPT_CALLS if not isinstance(keep, Mapping) else _number(keep, "value", f"{field}.keep"),
        at_least_tokens=0 if not isinstance(least, Mapping) else _number(least, "value", f"{field}.clear_at_least"),
        excluded=frozenset(excluded),
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
    if sum(place == at for place, _ in places) > 1:
        raise BadItem(field, f"is not the only compaction block of its message ({_AMBIGUOUS})")
    if index:
        raise BadItem(field, f"is a compaction block, which has to be the first block of its message ({_MISPLACED})")
    if block.get("content") is None and block.get("encrypted_content") is None:
        # A compaction that failed is none.
        return None, "", _dropped(messages)
    try:
        portable = await opened(block.get("encrypted_content"), f"{field}.encrypted_content")
    except BadItem as error:
        raise BadItem(error.field, f"{error.why} ({_SIGNATURE})") from None
    if block.get("content") is not None and block["content"] != (portable.record or _NOTHING_LEFT_OUT):
        raise BadItem(f"{field}.content", f"is not what was signed ({_MISMATCH})")
    if block.get("tool_changes"):
        raise BadItem(f"{field}.tool_changes", f"is not what was signed ({_CHANGES})")
    placeholder = portable.record or _NOTHING_LEFT_OUT
    behind = _blocks(messages[at])[index + 1 :]
    rest = [{**messages[at], "content": behind}] if behind else []
    return portable, placeholder, [{"role": "user", "content": placeholder}, *rest, *messages[at + 1 :]]


def _dropped(messages: Sequence[Any]) -> list[Any]:
    kept = []
    for message in messages:
        blocks = _blocks(message)
        rest = [block for block in blocks if block.get("type") != "compaction"]
        if len(rest) == len(blocks):
            kept.append(message)
        elif rest:
            kept.append({**message, "content": rest})
    return kept


def _blocks(message: object) -> list[dict[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _without_thoughts(messages: Sequence[Any], edit: _Fields) -> tuple[list[Any], int]:
    """The messages with the thoughts of the newest turns alone, and of how many turns they went."""
    keep, field = edit.get("keep"), f"{_EDITS_FIELD}.{_CLEAR_THINKING}.keep"
    if keep == "all" or (isinstance(keep, Mapping) and keep.get("type") == "all"):
        return list(messages), 0
    most = (
        _KEPT_THOUGHTS if keep is None else _number(keep if isinstance(keep, Mapping) else {}, "value", field, least=1)
    )
    thinking = [
        at for at, each in enumerate(messages) if any(block.get("type") in _THOUGHTS for block in _blocks(each))
    ]
    gone = set(thinking[: max(len(thinking) - most, 0)])
    return [_thoughtless(each) if at in gone else each for at, each in enumerate(messages)], len(gone)


def _thoughtless(message: dict[str, Any]) -> dict[str, Any]:
    rest = [block for block in message["content"] if not (isinstance(block, dict) and block.get("type") in _THOUGHTS)]
    return {**message, "content": rest or [{"type": "text", "text": "…"}]}


def _check_turn(messages: Sequence[Any], *, has_block: bool) -> None:
    if len(messages) <= has_block:
        raise BadItem("messages", f"has nothing to summarize ({_NOTHING})")
    if any(block.get("type") == "tool_use" for block in _blocks(messages[-1])):
        raise BadItem("messages", f"ends in a call that no result answers ({_INCOMPLETE})")


async def with_block(
    frames: AsyncIterator[Any],
    made: Callable[[], Awaitable[Block | None]],
    *,
    is_settled: Callable[[], bool],
    is_alone: Callable[[], bool],
) -> AsyncGenerator[Any, None]:
    """Yields a stream's events with a compaction block before what the model says, or in its place.

    Args:
        frames: LiteLLM's, each one event or more as bytes; others pass.
        made: what is to be said of the compaction; None for nothing.
        is_settled: the request was sent, so that `made` knows.
        is_alone: nothing but the block is the answer.
    """
    waiting: list[dict[str, Any]] | None = []
    found: Block | None = None
    shift = 0
    async for frame in frames:
        for event in _events(frame):
            if not isinstance(event, dict):
                yield event
                continue
            kind = event.get("type")
            if kind in ("message_start", "ping", "error"):
                yield _frame(event)
                continue
            has_ended = kind in ("message_delta", "message_stop")
            if waiting is not None and (has_ended or is_settled()):
                found = await made() if is_settled() else None
                if found is not None and (block := found.block) is not None:
                    for each in _block_events(block):
                        yield _frame(each)
                    shift = 1
                for early in () if is_alone() and shift else waiting:
                    yield _frame(_shifted(early, shift))
                waiting = None
            if kind == "message_delta":
                yield _frame(_delta(event, found, is_alone=is_alone() and shift == 1))
            elif kind == "message_stop":
                yield _frame(event)
            elif waiting is not None:
                waiting.append(event)
            elif not (is_alone() and shift):
                yield _frame(_shifted(event, shift))


def answered(message: Any, found: Block | None, *, is_alone: bool) -> Any:
    """Returns a whole answer with what is to be said of its compaction; LiteLLM's own object is not changed."""
    if found is None or not isinstance(message, dict):
        return None
    block = found.block
    alone = is_alone and block is not None
    own = [] if alone else list(message.get("content") or [])
    said = {**message, "usage": _NO_USAGE, "stop_reason": "compaction"} if alone else message
    return {**said, "content": [block, *own] if block is not None else own, **_extras(said, found)}


def applied_edits(orders: Orders, cleared_calls: int, cleared_tokens: int) -> list[_Fields]:
    """Returns the edits that were applied to a request, as the protocol has them."""
    edits: list[_Fields] = []
    if cleared_calls:
        counts = {"cleared_tool_uses": cleared_calls, "cleared_input_tokens": cleared_tokens}
        edits.append({"type": _CLEAR_TOOLS, **counts})
    if orders.cleared_thoughts:
        # A chat template leaves out old thoughts; so none of them took tokens.
        edits.append(
            {"type": _CLEAR_THINKING, "cleared_thinking_turns": orders.cleared_thoughts, "cleared_input_tokens": 0}
        )
    return edits


def _extras(message: _Fields, found: Block) -> dict[str, Any]:
    extras: dict[str, Any] = {"context_management": {"applied_edits": list(found.edits)}}
    usage = message.get("usage")
    if found.read_tokens and isinstance(usage, Mapping):
        # Those of the compaction are not in the usage itself.
        iterations = [{"type": "compaction", **_tokens(found.read_tokens, found.written_tokens)}]
        if usage is not _NO_USAGE:
            answer = _tokens(usage.get("input_tokens", 0), usage.get("output_tokens", 0))
            iterations.append({"type": "message", **answer})
        extras["usage"] = {**usage, "iterations": iterations}
    return extras


def _tokens(read: int, written: int) -> dict[str, int]:
    none = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    return {"input_tokens": read, "output_tokens": written, **none}


def _delta(event: dict[str, Any], found: Block | None, *, is_alone: bool) -> dict[str, Any]:
    if found is None:
        return event
    if is_alone:
        event = {**event, "usage": _NO_USAGE, "delta": {**(event.get("delta") or {}), "stop_reason": "compaction"}}
    return {**event, **_extras(event, found)}


def _block_events(block: dict[str, Any]) -> list[dict[str, Any]]:
    delta = {"type": "compaction_delta", "content": block["content"], "encrypted_content": block["encrypted_content"]}
    opening = {**block, "content": "", "encrypted_content": None}
    return [
        {"type": "content_block_start", "index": 0, "content_block": opening},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
    ]


def _shifted(event: dict[str, Any], shift: int) -> dict[str, Any]:
    return {**event, "index": event["index"] + shift} if shift and isinstance(event.get("index"), int) else event


def _frame(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def _events(frame: object) -> list[object]:
    """The events of a frame, as dictionaries where they can be read; the frame itself where not."""
    if isinstance(frame, dict):
        return [frame] if "type" in frame else []
    if not isinstance(frame, (bytes, bytearray)):
        return [frame]
    found: list[object] = []
    for part in bytes(frame).split(b"\n\n"):
        _, mark, data = part.partition(b"data:")
        try:
            event = json.loads(data) if mark else None
        except ValueError:
            event = None
        if isinstance(event, dict) and "type" in event:
            found.append(event)
        elif part.strip():
            found.append(part + b"\n\n")
    return found
