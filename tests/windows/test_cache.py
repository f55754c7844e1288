"""Listings as they are kept: how old one may be, who reads it, and what is known of a server."""

from __future__ import annotations

import asyncio

import pytest

from litellm_compaction.windows.fetch import Unreached
from litellm_compaction.windows.windows import Windows
from tests import virtual_time
from tests.windows.conftest import CACHE_S
from tests.windows.fake_lmstudio import BASE, Clock, FakeLMStudio, settled, target, v1_model


async def test_young_values_come_from_memory(server: FakeLMStudio, windows: Windows, clock: Clock) -> None:
    """Within cache_s nothing is sent, for any model of the same server."""
    server.list_v1(v1_model(_=8192), v1_model("b/other", _=4096))
    await windows.resolve(target())
    clock.now_s += CACHE_S - 0.1
    await windows.resolve(target())
    assert (await windows.resolve(target("other"))).tokens == 4096
    assert len(server.requests) == 1


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
