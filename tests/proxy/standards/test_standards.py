"""Clients' orders, followed and told."""

from __future__ import annotations

from dataclasses import replace

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import Attempts
from litellm_compaction.proxy.call import Call, Calls, ClientRequest
from litellm_compaction.proxy.standards.items import Items
from litellm_compaction.proxy.standards.orders import Orders
from litellm_compaction.proxy.standards.standards import Standards
from tests.builders import parsed
from tests.core.test_clear_order import RAW
from tests.core.test_portable import COMPACTION
from tests.engine.bench import Bench


async def test_an_answer_is_whole_without_an_item_that_cannot_be_made() -> None:
    """A fault of ours costs the client nothing but the item."""

    def broken() -> str:
        raise RuntimeError("no secret")

    bench = Bench()
    standards = Standards(bench.compactor, Calls(), Items(broken))
    request = Request(messages=parsed(RAW))
    client = ClientRequest(received=request, original=request, group="small", orders=Orders(wants_item=True))
    call = Call(client, Attempts(3))
    call.attempt.prepared = replace(await bench.guard(RAW, 8192), compaction=COMPACTION)
    assert await standards.item(call) is None
    block = await standards.block(call)
    assert block is not None
    assert block.block is None
