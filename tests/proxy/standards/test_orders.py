"""What goes back to a client that keeps its compaction itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.core.portable import portable
from litellm_compaction.proxy.standards.orders import NO_ORDERS, Orders, returned
from tests.builders import parsed
from tests.core.test_portable import COMPACTION, RAW
from tests.engine.bench import Bench

REQUEST = Request(messages=parsed(RAW))


@pytest.mark.parametrize(
    ("orders", "is_compacted", "is_returned"),
    [
        (NO_ORDERS, True, False),
        (Orders(wants_item=True), True, True),
        (Orders(wants_item=True), False, False),
        (Orders(compacts_only=True), True, True),
        (Orders(compacts_only=True), False, True),
        (Orders(tells_edits=True), True, False),
        (Orders(wants_item=True, portable=portable(parsed(RAW), COMPACTION)), True, False),
    ],
)
async def test_it_gets_a_compaction_that_it_does_not_have(
    orders: Orders, is_compacted: bool, is_returned: bool
) -> None:
    """If it wants one; in place of an answer it always gets something."""
    prepared = await Bench().guard(RAW, 8192)
    prepared = replace(prepared, compaction=COMPACTION if is_compacted else None)
    found = returned(orders, REQUEST, prepared)
    assert (found is not None) == is_returned
    assert returned(orders, REQUEST, None) is None
    # A record that stands for a part of the answer, too, is for the store.
    assert returned(orders, REQUEST, replace(prepared, way="turn")) is None
    if found is not None:
        assert found == portable(parsed(RAW), prepared.compaction)
