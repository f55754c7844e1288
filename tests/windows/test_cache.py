"""Listings as they are kept: how old one may be, who reads it, and what is known of a server."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from litellm_compaction.errors import ModelNotLoaded
from litellm_compaction.windows.fetch import Unreached
from litellm_compaction.windows.windows import Windows
from tests import virtual_time
from tests.windows.conftest import CACHE_S
from tests.windows.fake_lmstudio import BASE, Clock, FakeLMStudio, settled, target, v1_model


@pytest.mark.parametrize(("failure", "tries"), [(httpx.ConnectError("refused"), 1), (httpx.ConnectTimeout("slow"), 2)])
async def test_a_dead_server_is_not_asked_by_every_request(
    server: FakeLMStudio, windows: Windows, clock: Clock, failure: Exception, tries: int
) -> None:
    """After a failure the next read waits a few seconds, so requests do not queue behind timeouts.

    A connection that took too long is tried once more: it may have waited for a busy process of ours.
    """
    server.down = failure
    for _ in range(5):
        await windows.resolve(target(context_length=5000))
    assert len(server.requests) == tries
    clock.now_s += CACHE_S
    await windows.resolve(target(context_length=5000))
    assert len(server.requests) == 2 * tries


async def test_young_values_come_from_memory(server: FakeLMStudio, windows: Windows, clock: Clock) -> None:
    """Within cache_s nothing is sent, for any model of the same server."""
    server.list_v1(v1_model(_=8192), v1_model("b/other", _=4096))
    await windows.resolve(target())
    clock.now_s += CACHE_S - 0.1
    await windows.resolve(target())
    assert (await windows.resolve(target("other"))).tokens == 4096
    assert len(server.requests) == 1


@pytest.mark.parametrize("age_s", [CACHE_S, 7.0, 30.0, 60.0, 10_000.0])
async def test_an_old_value_is_read_again_before_it_is_used(
    server: FakeLMStudio, windows: Windows, clock: Clock, age_s: float
) -> None:
    """Past cache_s a hundred callers wait for one read, and none of them gets the larger window of before."""
    server.list_v1(v1_model(_=32768))
    await windows.resolve(target())
    server.list_v1(v1_model(_=4096))
    clock.now_s += age_s
    found = await asyncio.gather(*(windows.resolve(target()) for _ in range(100)))
    assert {window.tokens for window in found} == {4096}
    assert len(server.requests) == 2


async def test_a_value_is_as_old_as_its_reading_began(server: FakeLMStudio, windows: Windows, clock: Clock) -> None:
    """What a slow server says is of the moment in which it was asked, not of that in which its answer came."""
    server.list_v1(v1_model(_=32768))
    server.gate = asyncio.Event()
    asked = asyncio.create_task(windows.resolve(target()))
    await settled()
    server.list_v1(v1_model(_=4096))
    clock.now_s += CACHE_S
    server.gate.set()
    await asked
    assert (await windows.resolve(target())).tokens == 4096


async def test_fresh_means_begun_after_the_call(server: FakeLMStudio, windows: Windows, clock: Clock) -> None:
    """A read that was already under way does not count as fresh: it may have seen the model before it was loaded."""
    server.list_v1(v1_model())
    server.gate = asyncio.Event()
    early = asyncio.create_task(windows.resolve(target()))
    await settled()
    server.list_v1(v1_model(_=8192))
    late = [asyncio.create_task(windows.resolve(target(), fresh=True)) for _ in range(5)]
    await settled()
    server.gate.set()
    assert {(await task).tokens for task in late} == {8192}
    with pytest.raises(ModelNotLoaded):
        await early
    assert len(server.requests) == 2


async def test_one_cancelled_waiter_leaves_the_others(server: FakeLMStudio, windows: Windows) -> None:
    """Cancelling one caller does not cancel the read that others wait for."""
    server.list_v1(v1_model(_=8192))
    server.gate = asyncio.Event()
    first, second = (asyncio.create_task(windows.resolve(target())) for _ in range(2))
    await settled()
    first.cancel()
    await settled()
    server.gate.set()
    assert (await second).tokens == 8192
    assert first.cancelled()
    assert len(server.requests) == 1


async def test_the_verdict_is_cached_by_kind(server: FakeLMStudio, windows: Windows, clock: Clock) -> None:
    """Unknown is asked again after 5 s, no after 60 s, yes never; callers at the same time share one probe."""
    server.down = httpx.ConnectError("refused")
    assert await asyncio.gather(*(windows.is_lmstudio(BASE, None) for _ in range(5))) == [None] * 5
    assert len(server.requests) == 1
    server.down = None
    assert await windows.is_lmstudio(BASE, None) is None
    clock.now_s += 5
    assert await windows.is_lmstudio(BASE, None) is False
    server.answers["/lmstudio-greeting"] = {"lmstudio": True}
    clock.now_s += 59
    assert await windows.is_lmstudio(BASE, None) is False
    clock.now_s += 1
    assert await windows.is_lmstudio(BASE, None) is True
    sent = len(server.requests)
    server.answers.clear()
    clock.now_s += 10**6
    assert await windows.is_lmstudio(BASE, None) is True
    assert len(server.requests) == sent


@pytest.mark.parametrize(
    ("answers", "waited_s", "found"),
    [
        # How long each answer takes, with what it is; what four requests, 10 s apart, wait and learn.
        ([(0, None), (0, None), (0, True)], [0, 0, 0, 0], [None, None, True, True]),
        # A silent server is waited for half a minute once, then for 3 s of each time that it is asked.
        ([(60, True)], [30, 0, 0, 0], [None, None, None, True]),
        ([(29, None), (29, True)], [29, 3, 0, 0], [None, None, None, None]),
        ([(25, True)], [25, 0, 0, 0], [True, True, True, True]),
        # What has said no is waited for no longer than that either.
        ([(0, False), (0, False), (40, True)], [0, 0, 0, 0], [False, False, False, False]),
    ],
)
def test_a_silent_server_holds_nobody_up_for_long(
    answers: list[tuple[float, bool | None]],
    waited_s: list[float],
    found: list[bool | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LM Studio that loads a model takes its time; one that never answers keeps nobody waiting again and again."""
    left = iter(answers)

    async def asked(*_: object, timeout_s: float) -> bool:
        after_s, answer = next(left)
        await asyncio.sleep(after_s)
        if answer is None:
            raise Unreached("no connection")
        return answer

    async def run() -> tuple[list[float], list[bool | None]]:
        loop = asyncio.get_running_loop()
        windows = Windows(cache_s=5.0, clock=loop.time)
        waited, said = [], []
        for _ in range(4):
            begun_s = loop.time()
            said.append(await windows.is_lmstudio(BASE, None))
            waited.append(round(loop.time() - begun_s, 1))
            await asyncio.sleep(10)
        await windows.aclose()
        return waited, said

    monkeypatch.setattr("litellm_compaction.windows.cache.answers_as_lmstudio", asked)
    assert virtual_time.run(run()) == (waited_s, found)
