"""OpenAI's compaction items, in a request and in the events of its answer."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.core.portable import Portable, portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.responses import (
    field_of_item,
    read_orders,
)
from tests.builders import parsed
from tests.core.test_portable import COMPACTION, RAW

FOUND = portable(parsed(RAW), COMPACTION)
ITEM = {"type": "compaction", "encrypted_content": "text"}
TRIGGER = {"type": "compaction_trigger"}


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def managed(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"input": "Hi.", "context_management": [*entries]}


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
        (managed({"type": "compaction"}, {"type": "compaction"}), "context_management"),
        (managed({"type": "other"}), "context_management[0].type"),
        *(
            (managed({"type": "compaction", "compact_threshold": value}), "context_management[0].compact_threshold")
            for value in (0, -1, True, "1000", 1.5)
        ),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_its_place(body: dict[str, Any], field: str) -> None:
    """The protocol's own word, and no guess."""
    with pytest.raises(BadItem) as caught:
        await read_orders(body, opened)
    assert caught.value.field == field
