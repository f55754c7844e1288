"""Anthropic's context edits and compaction blocks, in a request and in the events of its answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from litellm_compaction.core.clear_order import ClearOrder
from litellm_compaction.core.portable import Portable, portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.messages import Block, read_orders, with_block
from litellm_compaction.proxy.standards.orders import Orders
from tests.builders import parsed
from tests.core.test_portable import COMPACTION, RAW

FOUND = portable(parsed(RAW), COMPACTION)
BLOCK = {"type": "compaction", "content": FOUND.record, "encrypted_content": "text"}
USER = {"role": "user", "content": "Go on."}
TOOLS, THINKING, COMPACT = "clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}


async def opened(text: object, field: str) -> Portable:
    if text != "text":
        raise BadItem(field, "was changed")
    return FOUND


def edits(*found: dict[str, Any], **body: Any) -> dict[str, Any]:
    return {"messages": [USER], "context_management": {"edits": [*found]}, **body}


def thought(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": text}, {"type": "text", "text": "Ok."}]}


async def test_a_block_of_a_failed_compaction_is_none() -> None:
    """As the protocol has it."""
    failed = {"type": "compaction", "content": None}
    orders, changed = await read_orders({"messages": [{"role": "assistant", "content": [failed]}, USER]}, opened)
    assert orders.portable is None
    assert changed["messages"] == [USER]


async def test_edits_become_orders() -> None:
    """With the protocol's own defaults."""
    body = edits({"type": TOOLS}, {"type": COMPACT, "pause_after_compaction": True, "instructions": "The  port."})
    orders, changed = await read_orders(body, opened)
    assert orders == Orders(
        wants_item=True,
        pauses=True,
        threshold_tokens=150_000,
        clear=ClearOrder(above_tokens=100_000, keep=3),
        tells_edits=True,
        focus="The port.",
    )
    assert changed == {"context_management": None}
    named = {
        "type": TOOLS,
        "trigger": {"type": "tool_uses", "value": 4},
        "keep": {"type": "tool_uses", "value": 0},
        "clear_at_least": {"type": "input_tokens", "value": 50},
        "exclude_tools": ["memory"],
        "clear_tool_inputs": ["f"],
    }
    orders, _ = await read_orders(edits(named), opened)
    expected = ClearOrder(
        above_calls=4, keep=0, at_least_tokens=50, excluded=frozenset({"memory"}), inputs=frozenset({"f"})
    )
    assert orders.clear == expected


async def test_old_thoughts_go() -> None:
    """All but those of the newest turns."""
    messages = [thought("a"), USER, thought("b"), USER, thought("c")]
    kept: list[int] = []
    for keep in ({}, {"keep": {"type": "thinking_turns", "value": 2}}, {"keep": "all"}, {"keep": {"type": "all"}}):
        orders, changed = await read_orders(edits({"type": THINKING, **keep}, messages=messages), opened)
        kept.append(json.dumps(changed.get("messages", messages)).count('"thinking":'))
        assert orders.cleared_thoughts == 3 - kept[-1]
    assert kept == [1, 2, 3, 3]


_EDITS = "context_management.edits"
_PLACE = "messages.0.content."
_SUMMARIZE = {"compaction": {"type": "summarize"}}


def answered(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [*content]}, USER]}


def triggered(kind: str, value: object) -> dict[str, Any]:
    return edits({"type": COMPACT, "trigger": {"type": kind, "value": value}})


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        (edits({"type": "other"}), f"{_EDITS}.0.type", ""),
        (edits({}), f"{_EDITS}.0.type", ""),
        (edits({"type": TOOLS}, {"type": THINKING}), f"{_EDITS}.1.type", ""),
        (edits({"type": TOOLS}, {"type": TOOLS}), f"{_EDITS}.1.type", ""),
        ({"messages": [USER], "context_management": {"edits": 3}}, _EDITS, ""),
        *(
            (triggered("input_tokens", each), f"{_EDITS}.{COMPACT}.trigger.value", "")
            for each in (0, -5, "9", None, True)
        ),
        (triggered("tool_uses", 1), f"{_EDITS}.{COMPACT}.trigger.type", ""),
        (edits({"type": TOOLS, "exclude_tools": "f"}), f"{_EDITS}.{TOOLS}.exclude_tools", ""),
        (edits({"type": COMPACT, "instructions": 3}), f"{_EDITS}.{COMPACT}.instructions", ""),
        (edits({"type": TOOLS}, **_SUMMARIZE), "compaction", ""),
        ({"messages": [USER], "compaction": {"type": "other"}}, "compaction.type", ""),
        ({"messages": [], **_SUMMARIZE}, "messages", "nothing_to_summarize"),
        ({"messages": [USER, CALL], **_SUMMARIZE}, "messages", "incomplete_turn"),
        (answered({**BLOCK, "encrypted_content": "?"}), _PLACE + "0.encrypted_content", "block_signature_invalid"),
        (answered({**BLOCK, "content": "Obey."}), _PLACE + "0.content", "block_content_mismatch"),
        (answered({**BLOCK, "tool_changes": [{}]}), _PLACE + "0.tool_changes", "block_tool_changes_mismatch"),
        (answered({"type": "text", "text": "x"}, BLOCK), _PLACE + "1", "block_misplaced"),
        (answered(BLOCK, BLOCK), _PLACE + "1", "block_ambiguous"),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_its_place(body: dict[str, Any], field: str, code: str) -> None:
    """With the protocol's code where it has one."""
    with pytest.raises(BadItem) as caught:
        await read_orders(body, opened)
    assert caught.value.field == field
    assert f"(compaction_{code})" in str(caught.value) or not code


MADE = Block(text="text", summary="The record.", edits=[{"type": TOOLS}], read_tokens=70, written_tokens=7)


def frame(**event: Any) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


FRAMES = [
    frame(type="message_start", message={}),
    frame(type="content_block_start", index=0, content_block={"type": "text"})
    + frame(type="content_block_stop", index=0),
    b": ping\n\n",
    frame(type="message_delta", delta={"stop_reason": "end_turn"}, usage={"input_tokens": 5, "output_tokens": 2}),
    frame(type="message_stop"),
]


async def told(found: Block, *, is_alone: bool = False) -> list[dict[str, Any]]:
    async def source() -> AsyncIterator[bytes]:
        for each in FRAMES:
            yield each

    async def made() -> Block | None:
        return found

    stream = with_block(source(), made, is_settled=lambda: True, is_alone=lambda: is_alone)
    raw = b"".join([each async for each in stream])
    return [json.loads(part.split(b"data: ", 1)[1]) for part in raw.split(b"\n\n") if b"data: " in part]


async def test_the_block_comes_before_what_the_model_says() -> None:
    """The events of a block with its whole summary, the others behind it; usage and edits in `message_delta`."""
    start, opening, delta, stop, text, _, end, _ = await told(MADE)
    assert start["type"] == "message_start"
    assert (opening["index"], opening["content_block"]["type"], opening["content_block"]["content"]) == (
        0,
        "compaction",
        "",
    )
    assert delta["delta"] == {"type": "compaction_delta", "content": "The record.", "encrypted_content": "text"}
    assert (stop["type"], text["index"]) == ("content_block_stop", 1)
    assert end["context_management"] == {"applied_edits": [{"type": TOOLS}]}
    assert [each["type"] for each in end["usage"]["iterations"]] == ["compaction", "message"]
    assert [each["input_tokens"] for each in end["usage"]["iterations"]] == [70, 5]
    assert end["usage"]["input_tokens"] == 5
    alone = await told(MADE, is_alone=True)
    blocks = [event["content_block"]["type"] for event in alone if event["type"] == "content_block_start"]
    assert (blocks, alone[-2]["delta"]["stop_reason"]) == (["compaction"], "compaction")
