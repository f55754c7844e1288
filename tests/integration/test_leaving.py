"""Clients that leave: what was done for them ends soon after, on every route.

LiteLLM is not told to cancel here (`cancel_on_disconnect`); where it is: `tests/processes/test_restart_cancel.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from tests.builders import prose, talk
from tests.integration.app import NETWORK, activate, in_loop
from tests.integration.bench import SUMMARY, Bench, Watch, answers
from tests.integration.forms import ROUTES, form, streams
from tests.integration.harness import Proxy
from tests.integration.plain_server import PlainServer
from tests.integration.restart_bench import Restarting, both_carriers
from tests.lmstudio_double import Gate, Reply


def _leaves(
    running: Proxy, call: tuple[str, Mapping[str, Any]], wait: Callable[[], object], *, reads: bool = True
) -> None:
    """Asks, reads what comes, or nothing, and leaves after the `wait`, which blocks."""
    path, body = call
    activate(running)
    request = httpx.Request("POST", f"{running.base_url}{path}", json=dict(body), headers=running.headers)

    async def read() -> None:
        response = await NETWORK.request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            if reads:
                async for _ in response.stream:
                    pass
            await asyncio.Event().wait()
        finally:
            await response.stream.aclose()

    async def leave() -> None:
        reading = asyncio.ensure_future(read())
        await asyncio.to_thread(wait)
        assert not reading.done()
        reading.cancel()
        await asyncio.wait({reading})

    in_loop(leave())


def _all_end(watch: Watch) -> bool:
    records = [record for record in watch.records if record.path.endswith("/completions")]
    return bool(records) and all(each.disconnected_s is not None or each.outcome != "running" for each in records)


@streams
@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_that_has_not_begun_ends_with_its_client(guarded: Bench, route: str, stream: bool) -> None:
    """The server would wait for ever where it is."""
    gate = Gate()
    watch = guarded.watch("left", answers(reply=Reply("Four.", gate=gate)))
    call = form(route, "left", talk(f"leaving {route} {stream}", 300), stream=stream, limit=64)
    _leaves(guarded.proxy, call, lambda: gate.reached.wait(60))
    try:
        watch.simulator.wait_until(lambda: _all_end(watch))
    finally:
        gate.open()


@pytest.mark.parametrize("route", ["chat", "messages", "responses"])
def test_a_stream_that_nobody_reads_ends_with_its_client(guarded: Bench, route: str) -> None:
    """Its server is far ahead of its reader; the room is there for the next request."""
    watch = guarded.watch("left", answers(reply=Reply(prose("much", 3000))))
    call = form(route, "left", talk(f"unread {route}", 300), stream=True, limit=6000)

    def has_begun() -> bool:
        return any(record.first_delta_s is not None for record in watch.records)

    _leaves(guarded.proxy, call, lambda: watch.simulator.wait_until(has_begun), reads=False)
    watch.simulator.wait_until(lambda: _all_end(watch))
    assert watch.chats[0].disconnected_s is not None
    assert guarded.proxy.chat("left", talk(f"next {route}", 300), max_tokens=3000).status_code == 200


def test_nobody_is_answered_by_a_fallback(routes: Bench, plain: PlainServer) -> None:
    """It may be a paid one."""
    gate, since = Gate(), len(plain.requests)
    watch = routes.watch("failing-lms", answers(reply=Reply("Four.", gate=gate)))
    _leaves(routes.proxy, form("chat", "failing-lms", talk("nobody", 300), limit=64), lambda: gate.reached.wait(60))
    watch.simulator.wait_until(lambda: _all_end(watch))
    gate.open()
    assert routes.proxy.chat("failing-lms", talk("somebody", 300)).status_code == 200
    assert plain.posts(since) == []


@both_carriers
@streams
def test_a_summary_ends_with_its_client(restarting: Restarting, stream: bool) -> None:
    """Nothing else is asked for it."""
    gate = Gate()
    watch = restarting.watch("middle", answers(Reply(SUMMARY, gate=gate)))
    call = form("chat", "middle", talk(f"leaving {stream} {restarting.carrier}", 3600), stream=stream)
    _leaves(restarting.proxy, call, lambda: gate.reached.wait(60))
    try:
        watch.simulator.wait_until(lambda: _all_end(watch))
        assert (len(watch.summaries), watch.chats) == (1, [])
    finally:
        gate.open()
