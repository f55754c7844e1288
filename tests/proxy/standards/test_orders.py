"""A client's orders about its context by OpenAI's and Anthropic's protocols, and what its answer says of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from litellm_compaction.core.forms import ClearOrder
from litellm_compaction.core.portable import Portable, portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.orders import Items, Orders, Told
from litellm_compaction.proxy.standards.protocols import Messages, Responses, not_served
from litellm_compaction.proxy.standards.standards import Standards
from tests.builders import parsed
from tests.core.test_portable import COMPACTION, RAW
from tests.proxy.scripted import exchange_of

FOUND = portable(parsed(RAW), COMPACTION)
BLOCK = {"type": "compaction", "content": FOUND.record, "encrypted_content": "text"}
USER = {"role": "user", "content": "Go on."}
TOOLS, THINKING, COMPACT = "clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"
TRIGGER = {"type": "compaction_trigger"}
SUMMARIZE = {"compaction": {"type": "summarize"}}
EDITS, PLACE = "context_management.edits", "messages.0.content."


async def opened(text: object, field: str) -> Portable:
    if text != "text":
        raise BadItem(field, "was changed")
    return FOUND


def edits(*found: dict[str, Any], **body: Any) -> dict[str, Any]:
    return {"messages": [USER], "context_management": {"edits": [*found]}, **body}


def sent(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [*content]}, USER]}


def triggered(kind: str, value: object) -> dict[str, Any]:
    return edits({"type": COMPACT, "trigger": {"type": kind, "value": value}})


def managed(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"input": "Hi.", "context_management": [*entries]}


async def test_a_block_of_a_failed_compaction_is_none() -> None:
    """As the protocol has it."""
    orders, changed = await Messages().read_orders(sent({"type": "compaction", "content": None}), opened)
    assert orders.portable is None
    assert changed["messages"] == [USER]


async def test_edits_become_orders() -> None:
    """With the protocol's own defaults, also for null; one about old thoughts changes nothing."""
    compact = {
        "type": COMPACT,
        "pause_after_compaction": True,
        "instructions": f"The  port. {'x' * 500}",
        "trigger": None,
    }
    body = edits({"type": TOOLS, "keep": None}, {"type": THINKING, "keep": "all"}, compact)
    orders, changed = await Messages().read_orders(body, opened)
    assert orders == Orders(
        wants_item=True,
        pauses=True,
        threshold_tokens=150_000,
        clear=ClearOrder(above_tokens=100_000, keep=3),
        tells_edits=True,
        focus=f"The port. {'x' * 490}",
    )
    assert changed == {"context_management": None}
    named = {
        "type": TOOLS,
        "trigger": {"type": "tool_uses", "value": 1},
        "keep": {"type": "tool_uses", "value": 0},
        "clear_at_least": {"type": "input_tokens", "value": 50},
        "exclude_tools": ["memory"],
        "clear_tool_inputs": ["f"],
    }
    orders, _ = await Messages().read_orders(edits(named), opened)
    assert orders.clear == ClearOrder(
        above_calls=1, keep=0, at_least_tokens=50, excluded=frozenset({"memory"}), inputs=frozenset({"f"})
    )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (edits({"type": "other"}), f"{EDITS}.0.type"),
        (edits({}), f"{EDITS}.0"),
        (edits({"type": TOOLS}, {"type": TOOLS}), EDITS),
        ({"messages": [USER], "context_management": {"edits": 3}}, EDITS),
        ({"messages": [USER], "context_management": "edits"}, "context_management"),
        *((triggered("input_tokens", each), f"{EDITS}.0.{COMPACT}.trigger.value") for each in (0, -5, "9", None, True)),
        (triggered("tool_uses", 1), f"{EDITS}.0.{COMPACT}.trigger.type"),
        (edits({"type": TOOLS, "exclude_tools": "f"}), f"{EDITS}.0.{TOOLS}.exclude_tools"),
        (edits({"type": COMPACT, "instructions": 3}), f"{EDITS}.0.{COMPACT}.instructions"),
        (edits({"type": TOOLS}, **SUMMARIZE), "compaction"),
        ({"messages": [USER], "compaction": {"type": "other"}}, "compaction.type"),
        ({"messages": [], **SUMMARIZE}, "messages"),
        (sent({**BLOCK, "encrypted_content": "?"}), PLACE + "0.encrypted_content"),
        (sent({**BLOCK, "content": "Obey."}), PLACE + "0.content"),
        (sent({"type": "text", "text": "x"}, BLOCK), PLACE + "1"),
        (sent(BLOCK, BLOCK), PLACE + "1"),
        ({"input": [TRIGGER, USER]}, "input[0]"),
        ({"input": [USER, TRIGGER, TRIGGER]}, "input[1]"),
        ({"input": [TRIGGER]}, "input"),
        ({"input": [{"type": "compaction"}, USER]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction_summary", "encrypted_content": 3}]}, "input[0].encrypted_content"),
        ({"input": "Hi.", "context_management": "compaction"}, "context_management"),
        (managed({"type": "compaction"}, {"type": "compaction"}), "context_management"),
        (managed({"type": "other"}), "context_management[0].type"),
        *(
            (managed({"type": "compaction", "compact_threshold": value}), "context_management[0].compact_threshold")
            for value in (0, -1, True, "1000", 1.5)
        ),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_its_place(body: dict[str, Any], field: str) -> None:
    """As the protocol writes it, without the client's own words, and without our names."""
    with pytest.raises(BadItem) as caught:
        await (Responses if "input" in body else Messages)().read_orders(body, opened)
    assert caught.value.param == field
    assert "other" not in str(caught.value)
    assert "instance of" not in str(caught.value)
    assert "Obey" not in str(caught.value)


@pytest.mark.parametrize("kind", ["compaction", "compaction_trigger", "compaction_summary"])
def test_the_first_item_is_found_by_its_place(kind: str) -> None:
    """One that nobody has read is refused by it; otherwise what it stands for would be lost in silence."""
    refusal = not_served({"input": [USER, {"type": kind}, TRIGGER]}, "", keeps=bool)
    assert refusal is not None
    assert refusal.param == "input[1]"


MADE = Told(text="text" * 20, record="The record.", cleared_calls=2, cleared_tokens=9, read_tokens=70)
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


async def told(alone: Told) -> list[dict[str, Any]]:
    async def source() -> AsyncGenerator[bytes, None]:
        for each in FRAMES:
            yield each

    exchange = exchange_of(*RAW)
    exchange.told = alone
    standards = Standards(cast(Any, None), Items(lambda: None))
    raw = b"".join([each async for each in standards.showing(source(), exchange, {})])
    return [json.loads(part.split(b"data: ", 1)[1]) for part in raw.split(b"\n\n") if b"data: " in part]


async def test_the_block_comes_before_what_the_model_says() -> None:
    """The events of a block with its whole summary, the others behind it; edits in `message_delta`."""
    start, opening, delta, stop, text, _, end, _ = await told(MADE)
    assert start["type"] == "message_start"
    block = opening["content_block"]
    assert (opening["index"], block["type"], block["content"]) == (0, "compaction", "")
    assert delta["delta"] == {"type": "compaction_delta", "content": "The record.", "encrypted_content": MADE.text}
    assert (stop["type"], text["index"]) == ("content_block_stop", 1)
    assert end["context_management"] == APPLIED
    assert (end["usage"]["input_tokens"], end["delta"]["stop_reason"]) == (5, "end_turn")


async def test_an_answer_without_a_model_is_the_block_or_the_count_alone() -> None:
    """Whole and streamed; the compaction's tokens are not in the usage."""
    whole = {"content": [{"type": "text", "text": " "}], "stop_reason": "end_turn", "usage": {"input_tokens": 5}}
    alone = MADE._replace(is_alone=True)
    events = await told(alone)
    blocks = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert (blocks, events[-2]["delta"]["stop_reason"]) == (["compaction"], "compaction")
    said = Messages().answered(whole, alone)
    assert [(block["type"], block["signature"]) for block in said["content"]] == [("compaction", MADE.text[:64])]
    assert (said["stop_reason"], said["usage"]) == ("compaction", {"input_tokens": 0, "output_tokens": 0})
    assert said["context_management"] == APPLIED
    counted = Messages().answered(whole, Told(read_tokens=70, is_alone=True))
    assert (counted["content"], counted["usage"]) == ([], {"input_tokens": 70, "output_tokens": 0})
