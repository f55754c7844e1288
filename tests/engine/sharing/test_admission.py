"""Who runs in one loaded context, of one process or several: never more than fit, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.concurrency import ended
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.engine.sharing.admission import Admission
from litellm_compaction.engine.sharing.leases import Leases, shared_name
from litellm_compaction.errors import Overloaded
from tests.builders import chat, request_of
from tests.engine.bench import Bench, FakeAsk
from tests.stores.made import MemoryBoard
from tests.virtual_time import in_virtual_time, run, settled

POOL = "http://127.0.0.1:1234 qwen3-8b"
WINDOW_TOKENS = 100


class SlowBoard(MemoryBoard):
    """Others may be faster while it answers."""

    delay_s = 0.0

    async def change(self, *args: Any) -> None:
        await super().change(*args)
        await asyncio.sleep(self.delay_s)


@pytest.mark.parametrize("order", ["cancel", "cancel release", "release cancel", "limit cancel"])
@in_virtual_time
async def test_one_that_hangs_up_as_it_is_let_in_holds_nothing(order: str) -> None:
    """Or as its time is over: what was granted in the same moment is free for the next one."""
    admission, limits = Admission(), {"window_tokens": WINDOW_TOKENS, "most_tokens": 0, "is_restart": False}
    running, gone, later = (admission.seat(POOL) for _ in range(3))
    await running.take(60, **limits, timeout_s=1)
    waiting = asyncio.ensure_future(gone.take(50, **limits, timeout_s=1))
    await asyncio.sleep(0)
    acts = {"cancel": waiting.cancel, "release": running.release}
    if "limit" in order:
        asyncio.get_running_loop().call_at(1.0, waiting.cancel)
        await asyncio.wait({waiting})
    for act in order.split():
        acts.get(act, int)()
    with pytest.raises((asyncio.CancelledError, Overloaded)):
        await waiting
    await later.take(100 if running.left.done() else 40, **limits, timeout_s=1)


async def test_a_summary_has_its_room_although_its_first_client_leaves() -> None:
    """It waits in the name of the next one, and has it until the server can have noticed that nobody is left."""
    bench, clients = Bench(ask=FakeAsk(gate=asyncio.Event())), list[asyncio.Task[PreparedRequest]]()
    running = bench.compactor.admission.seat("None test-model")
    await running.take(2000, window_tokens=2048, timeout_s=1, most_tokens=0, is_restart=False)
    for _ in range(2):
        context = bench.context(2048, admission="pool")
        room = bench.compactor.room(context)
        clients.append(asyncio.ensure_future(bench.compactor.guard(request_of(*chat(20)), context, room)))
        clients[-1].add_done_callback(lambda _, room=room: room.release())
        await settled()
    [pool] = bench.compactor.admission.pools.values()
    clients[0].cancel()
    await settled()
    assert [seat.waits for seat in pool.seats] == [False, True]
    running.release()
    await bench.ask.asked.wait()
    clients[1].cancel()
    await settled()
    assert (bench.ask.cancelled, pool.used_tokens) == (1, 2048)


@in_virtual_time
async def test_a_server_is_not_idle_while_it_summarizes_for_an_answer_that_goes_on() -> None:
    """Or another conversation's record would be written there, in its place in the cache."""
    bench = Bench()
    context = bench.context(2048)
    room, window = bench.compactor.room(context), await bench.compactor.measurer.window(context)
    for _ in range(2):
        async with room.for_summary(window, 1):
            await asyncio.sleep(2)
            assert not bench.compactor.admission.is_idle("None")
        room.ended()


def test_each_machine_has_its_own_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes on several machines may share a store, and no server that they name so."""
    names: list[set[str]] = [set(), set()]
    for host in ("one", "two"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        for each, address in zip(names, ("http://localhost:1234 qwen", "http://gpu.lan:1234 qwen"), strict=True):
            each.add(shared_name(address))
    assert [len(each) for each in names] == [2, 1]


@given(seed=st.integers(0, 1 << 32), processes=st.integers(1, 4), delay_s=st.sampled_from([0.0, 0.001, 0.3]))
def test_everybody_is_served_and_never_over_the_window(seed: int, processes: int, delay_s: float) -> None:
    """Clients of several processes that wait, are lent to, called back, go on, leave and give up in any order."""

    async def client(admission: Admission, chance: random.Random) -> None:
        await asyncio.sleep(chance.choice([0, 0, 0.05, 1, 5, 20]))
        seat, timeout_s = admission.seat(POOL), chance.choice([0.5, 3.0, 1e6, 1e6])
        try:
            for leg in range(chance.randint(1, 5)):
                limits: dict[str, Any] = {"window_tokens": WINDOW_TOKENS, "timeout_s": timeout_s}
                most_tokens = chance.randint(0, 150)
                await seat.take(chance.randint(1, 110), most_tokens=most_tokens, is_restart=leg > 0, **limits)
                needed_tokens = chance.choice([None, chance.randint(1, 60)])
                for _ in range(chance.choice([0, 1, 10, 60])):
                    await asyncio.sleep(0.2)
                    if seat.must_give_way(needed_tokens):
                        break
        except Overloaded:
            return
        finally:
            seat.release()
        await admission.after_those_present(POOL, 0.0)

    async def watched() -> None:
        chance, clock = random.Random(seed), asyncio.get_running_loop().time
        board = SlowBoard(clock=clock)
        board.delay_s = delay_s
        leases = [Leases(board, clock=clock) for _ in range(processes)]
        admissions = [Admission(leases=each if processes > 1 else None) for each in leases]
        clients = [
            asyncio.ensure_future(client(chance.choice(admissions), chance)) for _ in range(chance.randint(2, 14))
        ]
        given_up = chance.sample(clients, len(clients) // 5)
        try:
            while not all(each.done() for each in clients):
                await asyncio.sleep(0.03)
                seats = [seat for each in admissions for pool in each.pools.values() for seat in pool.seats]
                held = [seat.tokens for seat in seats if seat.tokens]
                assert sum(held) <= WINDOW_TOKENS or len(held) == 1
                if given_up and chance.random() < 0.01:
                    given_up.pop().cancel()
                assert clock() < 5000, "somebody starves"
            assert all(each.cancelled() or each.exception() is None for each in clients)
            await asyncio.sleep(5)
            assert not board.topics
            assert not any(each.pools for each in admissions)
        finally:
            await ended(clients)
            for each in leases:
                await each.aclose()

    run(watched())
