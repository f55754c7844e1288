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
    field_of_item,
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


@pytest.mark.parametrize("item", [ITEM, TRIGGER, {**ITEM, "type": "compaction_summary"}])
def test_the_first_item_is_found_by_its_place(item: dict[str, Any]) -> None:
    """One that nobody has read is refused by it; otherwise what it stands for would be lost in silence."""
    assert field_of_item([said("Hello."), item, ITEM]) == "input[1]"


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


class Event(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str


OPENING = [Event(type="response.created", response={"id": "r"}), Event(type="response.in_progress", response={})]
ANSWER = [
    Event(type="response.output_item.added", output_index=0, item={"type": "message"}),
    Event(type="response.output_text.delta", output_index=0, delta="Hi"),
]


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


async def test_without_a_compaction_only_the_numbers_are_ours() -> None:
    """Nothing is put in, and a failure stays one; what is no event of theirs passes as it is."""
    failed = Event(type="response.failed", response={"status": "failed"})
    events = await told([b": ping\n\n", *OPENING, *ANSWER, failed], None)
    assert events[0] == {"raw": b": ping\n\n"}
    assert [event["type"] for event in events[1:]] == [event.type for event in (*OPENING, *ANSWER, failed)]
    assert events[-1]["response"] == {"status": "failed"}
    assert [event["type"] for event in await told([*OPENING, failed], "text")][-1] == "response.failed"
