"""Requests that need the same summary at the same time: one is written, also where they have to wait for room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import CompactionNeeded, PreparedRequest, RequestContext, Reservation
from tests.builders import JsonDict, as_bytes, chat, parsed, user
from tests.engine.bench import Bench, FakeAsk

WINDOW = 8192
LONG = chat(44, words=60)
# The other half of a shared context, so that a summary of LONG has to wait.
BUSY_TOKENS = 4000


class Scene:
    """Answers to one model whose requests share a context."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self.bench = Bench(ask=FakeAsk(gate=asyncio.Event()))
        self.timeout_s = timeout_s
        self.rooms: list[Reservation] = []

    def context(self) -> RequestContext:
        return self.bench.context(WINDOW, admission="pool", admission_timeout_s=self.timeout_s)

    def room(self) -> Reservation:
        self.rooms.append(self.bench.compactor.room(self.context()))
        return self.rooms[-1]

    async def busy(self) -> Reservation:
        """Another answer, which holds so much of the context that no summary fits beside it."""
        room, short = self.room(), await self.bench.guard([user("hello")], WINDOW)
        await room.acquire(short, BUSY_TOKENS, is_watched=False)
        return room

    async def asked(self, raw: Sequence[JsonDict]) -> PreparedRequest:
        """As the carriers do it: prepared, then finished and sent in room of its own."""
        room, context = self.room(), self.context()
        try:
            prepared = await self.bench.compactor.prepare(Request(messages=parsed(raw)), context)
            assert isinstance(prepared, CompactionNeeded)
            prepared = await self.bench.compactor.finish(prepared, room)
            await room.acquire(prepared, 100, is_watched=True)
        finally:
            room.release()
        return prepared

    def start(self, *conversations: Sequence[JsonDict]) -> list[asyncio.Task[PreparedRequest]]:
        return [asyncio.create_task(self.asked(raw)) for raw in conversations]

    async def joined(self, waiters: int) -> None:
        """Returns when so many wait for one compaction; hashing a long conversation takes a thread."""
        flights = self.bench.compactor._compactions._flights
        for _ in range(200_000):
            if [flight.waiters for flight in flights.values()] == [waiters]:
                return
            await asyncio.sleep(0)

    def open(self) -> None:
        assert self.bench.ask.gate is not None
        self.bench.ask.gate.set()

    def is_empty(self) -> bool:
        """Whether nobody holds or waits for any room."""
        return not self.bench.compactor._admission._pools


async def test_four_that_wait_for_room_share_one_summary() -> None:
    """One call, the same bytes for all, one of them told as made and the others as reused."""
    scene = Scene()
    other = await scene.busy()
    tasks = scene.start(*[LONG] * 4)
    await asyncio.wait_for(scene.joined(4), 60)
    assert scene.bench.ask.prompts == []
    other.release()
    scene.open()
    sent = [prepared.messages for prepared in await asyncio.gather(*tasks)]
    assert sent[0] is not None
    assert all(each is not None and as_bytes(each) == as_bytes(sent[0]) for each in sent)
    assert len(scene.bench.ask.prompts) == 1
    assert sorted(scene.bench.outcomes) == ["compacted", *["reused"] * 3]
    assert scene.is_empty()
