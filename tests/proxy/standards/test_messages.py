"""Anthropic's context edits and compaction blocks, in a request and in the events of its answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from litellm_compaction.core.forms import ClearOrder
from litellm_compaction.core.portable import Portable, portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.messages import Stream, answered, read_orders
from litellm_compaction.proxy.standards.orders import Orders, Told
from litellm_compaction.proxy.standards.streams import with_part
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


async def test_an_order_about_old_thoughts_changes_nothing() -> None:
    """In any place: chat templates leave them out by themselves."""
    orders, changed = await read_orders(edits({"type": TOOLS}, {"type": THINKING, "keep": "all"}), opened)
    assert orders.clear is not None
    assert changed == {"context_management": None}


_EDITS = "context_management.edits"
_PLACE = "messages.0.content."
_SUMMARIZE = {"compaction": {"type": "summarize"}}


def sent(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [*content]}, USER]}


def triggered(kind: str, value: object) -> dict[str, Any]:
    return edits({"type": COMPACT, "trigger": {"type": kind, "value": value}})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (edits({"type": "other"}), f"{_EDITS}.0.type"),
        (edits({}), f"{_EDITS}.0"),
        (edits({"type": TOOLS}, {"type": TOOLS}), _EDITS),
        ({"messages": [USER], "context_management": {"edits": 3}}, _EDITS),
        ({"messages": [USER], "context_management": "edits"}, "context_management"),
        *(
            (triggered("input_tokens", each), f"{_EDITS}.0.{COMPACT}.trigger.value")
            for each in (0, -5, "9", None, True)
        ),
        (triggered("tool_uses", 1), f"{_EDITS}.0.{COMPACT}.trigger.type"),
        (edits({"type": TOOLS, "exclude_tools": "f"}), f"{_EDITS}.0.{TOOLS}.exclude_tools"),
        (edits({"type": COMPACT, "instructions": 3}), f"{_EDITS}.0.{COMPACT}.instructions"),
        (edits({"type": TOOLS}, **_SUMMARIZE), "compaction"),
        ({"messages": [USER], "compaction": {"type": "other"}}, "compaction.type"),
        ({"messages": [USER], "compaction": 3}, "compaction"),
        ({"messages": [], **_SUMMARIZE}, "messages"),
        ({"messages": [USER, CALL], **_SUMMARIZE}, "messages"),
        (sent({**BLOCK, "encrypted_content": "?"}), _PLACE + "0.encrypted_content"),
        (sent({**BLOCK, "content": "Obey."}), _PLACE + "0.content"),
        (sent({**BLOCK, "tool_changes": [{}]}), _PLACE + "0.tool_changes"),
        (sent({"type": "text", "text": "x"}, BLOCK), _PLACE + "1"),
        (sent(BLOCK, BLOCK), _PLACE + "1"),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_its_place(body: dict[str, Any], field: str) -> None:
    """As the protocol writes it, and without the client's own words."""
    with pytest.raises(BadItem) as caught:
        await read_orders(body, opened)
    assert caught.value.field == field
    assert "other" not in str(caught.value)
    assert "Obey" not in str(caught.value)


MADE = Told(text="text", record="The record.", cleared_calls=2, cleared_tokens=9, read_tokens=70)
APPLIED = {"applied_edits": [{"type": TOOLS, "cleared_tool_uses": 2, "cleared_input_tokens": 9}]}


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


async def told(found: Told) -> list[dict[str, Any]]:
    async def source() -> AsyncIterator[bytes]:
        for each in FRAMES:
            yield each

    async def made() -> Told:
        return found

    raw = b"".join([each async for each in with_part(source(), Stream(), made, lambda: True)])
    return [json.loads(part.split(b"data: ", 1)[1]) for part in raw.split(b"\n\n") if b"data: " in part]


async def test_the_block_comes_before_what_the_model_says() -> None:
    """The events of a block with its whole summary, the others behind it; edits in `message_delta`."""
    start, opening, delta, stop, text, _, end, _ = await told(MADE)
    assert start["type"] == "message_start"
    block = opening["content_block"]
    assert (opening["index"], block["type"], block["content"]) == (0, "compaction", "")
    assert delta["delta"] == {"type": "compaction_delta", "content": "The record.", "encrypted_content": "text"}
    assert (stop["type"], text["index"]) == ("content_block_stop", 1)
    assert end["context_management"] == APPLIED
    assert end["usage"]["input_tokens"] == 5


async def test_an_answer_without_a_model_is_the_block_or_the_count_alone() -> None:
    """Whole and streamed; the compaction's tokens are not in the usage."""
    whole = {"content": [{"type": "text", "text": " "}], "stop_reason": "end_turn", "usage": {"input_tokens": 5}}
    alone = MADE._replace(is_alone=True)
    events = await told(alone)
    blocks = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert (blocks, events[-2]["delta"]["stop_reason"]) == (["compaction"], "compaction")
    said = answered(whole, alone)
    assert [block["type"] for block in said["content"]] == ["compaction"]
    assert (said["stop_reason"], said["usage"]["input_tokens"], said["context_management"]) == (
        "compaction",
        0,
        APPLIED,
    )
    counted = answered(whole, Told(read_tokens=70, is_alone=True))
    assert (counted["content"], counted["usage"]["input_tokens"]) == ([], 70)
