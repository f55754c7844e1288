"""OpenAI's compaction items, in a request and in the events of its answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from litellm_compaction.core.portable import Portable, portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.responses import (
    answered,
    compacted_response,
    field_of_item,
    item_of,
    read_orders,
    usage_of,
    with_item,
)
from tests.builders import parsed
from tests.core.test_portable import COMPACTION, RAW

FOUND = portable(parsed(RAW), COMPACTION)
ITEM = {"type": "compaction", "encrypted_content": "text"}
TRIGGER = {"type": "compaction_trigger"}


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


async def opened(text: object, field: str) -> Portable:
    if text != "text":
        raise BadItem(field, "is none")
    return FOUND


@pytest.mark.parametrize("items", [None, "Hello.", [], [said("Hello."), "?"]])
def test_an_input_without_items_names_no_place(items: object) -> None:
    """Whatever else it is."""
    assert field_of_item(items) == ""


@pytest.mark.parametrize("item", [ITEM, TRIGGER, {**ITEM, "type": "compaction_summary"}])
def test_the_first_item_is_found_by_its_place(item: dict[str, Any]) -> None:
    """One that nobody has read is refused by it; otherwise what it stands for would be lost in silence."""
    assert field_of_item([said("Hello."), item, ITEM]) == "input[1]"


async def test_without_a_word_about_its_context_nothing_changes() -> None:
    """The body is LiteLLM's as it came."""
    orders, changed = await read_orders({"input": [said("Hi.")], "truncation": None}, opened)
    assert not changed
    assert not orders.shows


async def test_the_newest_item_stands_for_what_came_before() -> None:
    """System messages stay, older items and messages go."""
    items = [said("Rules.", "developer"), ITEM, said("Old."), ITEM, said("New.")]
    orders, changed = await read_orders({"input": items}, opened)
    assert orders.portable is FOUND
    assert [each["role"] for each in changed["input"]] == ["developer", "user", "user"]
    assert changed["input"][1]["content"] == [{"type": "input_text", "text": FOUND.record}]
    assert orders.placeholder == FOUND.record


async def test_a_trigger_wants_the_compaction_alone() -> None:
    """Whatever the client says of truncation."""
    orders, changed = await read_orders({"input": [said("Hi."), TRIGGER], "truncation": "disabled"}, opened)
    assert (orders.compacts_only, orders.may_change, orders.spares_requests) == (True, True, True)
    assert changed == {"input": [said("Hi.")], "truncation": None}


@pytest.mark.parametrize(("value", "may_change"), [("auto", True), ("disabled", False)])
async def test_truncation_says_if_the_input_may_change(value: str, may_change: bool) -> None:
    """Both words are followed."""
    orders, changed = await read_orders({"input": "Hi.", "truncation": value}, opened)
    assert orders.may_change == may_change
    assert changed == {"truncation": None}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": [TRIGGER, said("Hi.")]}, "input[0]"),
        ({"input": [said("Hi."), TRIGGER, TRIGGER]}, "input[1]"),
        ({"input": [TRIGGER]}, "input"),
        ({"input": [{"type": "compaction"}, said("Hi.")]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction_summary", "encrypted_content": 3}]}, "input[0].encrypted_content"),
        ({"input": "Hi.", "context_management": "compaction"}, "context_management"),
        (
            {"input": "Hi.", "context_management": [{"type": "compaction"}, {"type": "compaction"}]},
            "context_management",
        ),
        ({"input": "Hi.", "context_management": [{"type": "other"}]}, "context_management[0].type"),
        *(
            (
                {"input": "Hi.", "context_management": [{"type": "compaction", "compact_threshold": value}]},
                "context_management[0].compact_threshold",
            )
            for value in (0, -1, True, "1000", 1.5)
        ),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_its_place(body: dict[str, Any], field: str) -> None:
    """The protocol's own word, and no guess."""
    with pytest.raises(BadItem) as caught:
        await read_orders(body, opened)
    assert caught.value.field == field


@pytest.mark.parametrize("threshold", [1, 1000, 10**12, None])
async def test_any_threshold_is_taken(threshold: int | None) -> None:
    """Small windows have small ones."""
    entry = {"type": "compaction", "compact_threshold": threshold}
    orders, changed = await read_orders({"input": "Hi.", "context_management": [entry]}, opened)
    assert orders.wants_item
    assert orders.threshold_tokens == (threshold or 0)
    assert changed == {"context_management": None}


class Event(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str


OPENING = [Event(type="response.created", response={"id": "r"}), Event(type="response.in_progress", response={})]
ANSWER = [
    Event(type="response.output_item.added", output_index=0, item={"type": "message"}),
    Event(type="response.output_text.delta", output_index=0, delta="Hi"),
]
END = Event(type="response.completed", response={"output": [{"type": "message"}], "status": "completed"})


async def told(
    events: Sequence[object], text: str | None, *, is_alone: bool = False, settled_at: int = 0
) -> list[dict[str, Any]]:
    """The events of a stream; the request is sent before the `settled_at`th comes."""
    seen = 0

    async def source() -> AsyncIterator[object]:
        nonlocal seen
        for event in events:
            yield event
            seen += 1

    async def made() -> str | None:
        return text

    stream = with_item(
        source(),
        made,
        is_settled=lambda: seen >= settled_at,
        is_alone=lambda: is_alone,
        usage=lambda: usage_of(70, 7),
    )
    return [json.loads(each) if isinstance(each, str) else {"raw": each} async for each in stream]


@pytest.mark.parametrize("settled_at", [0, 3, 4, 9])
async def test_the_item_comes_before_what_the_model_says(settled_at: int) -> None:
    """However late it is known; numbers and places follow, and the last event has all of it."""
    events = await told([*OPENING, *ANSWER, END], "text", settled_at=0 if settled_at == 9 else settled_at)
    kinds = [event["type"].removeprefix("response.") for event in events]
    item = ["output_item.added", "output_item.done"]
    assert kinds == ["created", "in_progress", *item, "output_item.added", "output_text.delta", "completed"]
    assert [event["sequence_number"] for event in events] == [*range(7)]
    assert [event["output_index"] for event in events if "output_index" in event] == [0, 0, 1, 1]
    assert events[-1]["response"]["output"] == [item_of("text"), {"type": "message"}]


async def test_alone_it_is_the_only_item() -> None:
    """Codex wants exactly one, and `response.completed` behind it."""
    incomplete = Event(type="response.incomplete", response={"output": [{}], "incomplete_details": {"reason": "x"}})
    events = await told([*OPENING, *ANSWER, incomplete], "text", is_alone=True)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == [item_of("text")]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"] == {"output": done, "status": "completed", "usage": usage_of(70, 7)}


async def test_without_a_compaction_only_the_numbers_are_ours() -> None:
    """Nothing is put in, and a failure stays one; what is no event of theirs passes as it is."""
    failed = Event(type="response.failed", response={"status": "failed"})
    events = await told([b": ping\n\n", *OPENING, *ANSWER, failed], None)
    assert events[0] == {"raw": b": ping\n\n"}
    assert [event["type"] for event in events[1:]] == [event.type for event in (*OPENING, *ANSWER, failed)]
    assert events[-1]["response"] == {"status": "failed"}
    assert [event["type"] for event in await told([*OPENING, failed], "text")][-1] == "response.failed"


def test_a_whole_answer_has_it_first() -> None:
    """As a copy: LiteLLM logs its own."""

    class Usage(BaseModel):
        input_tokens: int = 0

    class Response(BaseModel):
        output: list[Any]
        status: str = "incomplete"
        usage: Usage | None = None

    response = Response(output=["said"], usage=Usage())
    assert answered(response, "text", {}, is_alone=False).output == [item_of("text"), "said"]
    alone = answered(response, "text", {"input_tokens": 7}, is_alone=True)
    assert (alone.output, alone.status, alone.usage.input_tokens) == ([item_of("text")], "completed", 7)
    assert response.output == ["said"]
    assert answered(response, None, {}, is_alone=False) is None


def test_the_body_of_a_compaction_has_the_users_messages() -> None:
    """And one item behind them."""
    items = [said("One."), said("Two.", "assistant"), {"role": "user", "content": "Three."}, {"type": "reasoning"}]
    told = compacted_response({"id": "r", "created_at": 1.5, "output": [item_of("text")], "usage": {}}, items)
    texts = [[part["text"] for part in each.get("content") or ()] for each in told["output"]]
    assert texts == [["One."], ["Three."], []]
    assert all(each["status"] == "completed" and each["id"].startswith("msg_") for each in told["output"][:-1])
    assert (told["object"], told["created_at"]) == ("response.compaction", 1)
