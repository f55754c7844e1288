"""Clients' orders, followed and told."""

from __future__ import annotations

from dataclasses import replace

from litellm_compaction.core.clear_order import ClearOrder
from litellm_compaction.core.messages import Request
from litellm_compaction.engine import Attempts
from litellm_compaction.proxy.call import Call, Calls, ClientRequest
from litellm_compaction.proxy.standards.items import Items
from litellm_compaction.proxy.standards.orders import Orders
from litellm_compaction.proxy.standards.standards import Standards
from tests.builders import parsed
from tests.core.test_clearing import RAW
from tests.core.test_portable import COMPACTION
from tests.engine.bench import Bench


async def test_what_is_not_worth_it_is_not_cleared() -> None:
    """An order says how much it has to save, and is followed once for a request."""
    bench = Bench()
    standards = Standards(bench.compactor, Calls(), Items(lambda: None))
    told: list[int] = []
    for least, gone in ((10_000, 0), (1, 3)):
        order = ClearOrder(above_calls=1, keep=1, at_least_tokens=least)
        request = Request(messages=parsed([{**each, "content": f"{each['content']} " * 40} for each in RAW]))
        orders = Orders(clear=order, count=told.append)
        call = Call(ClientRequest(received=request, original=request, group="small", orders=orders), Attempts(3))
        for _ in range(2):
            await standards.clear(call, bench.context(8192), order)
        assert call.client.cleared_calls == gone
        assert (call.client.cleared_tokens > 0) == bool(gone)
        assert (call.client.original is request) == (not gone)
    assert len(told) == 1


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
