"""How calls, store operations and memory grow with a fleet: a thousand conversations over fifty pods and one store.

    python benchmarks/load/fleet.py [--conversations 1000] [--pods 50] [--turns 6] [--redis]

Each pod is an engine of its own, with a cold memory at first, over one shared store and one board; each turn of a
conversation goes to another pod. They are in one process, with fakes for the tokenizer and the pruning model, and time
is virtual: 50 conversations are under way at once, and a summary takes ten seconds. With `--redis` store and board are
in a real Redis, in real time, and a summary takes none.

Printed after each quarter of the conversations, for that quarter alone: summaries for each conversation, operations of
the store and of the board for each request (with `--redis` also the server's own commands), and by how much the store
and this process have grown for each conversation. A fleet whose cost is linear has the same figures in each line.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from litellm_compaction.stores import Board, open_board, open_store
from litellm_compaction.summarizer import SummaryAnswer
from tests import virtual_time
from tests.builders import answered, prose, talk
from tests.engine.bench import Bench, FakeAsk
from tests.stores.made import MemoryBoard, MemoryStore
from tests.stores.servers import Server, any_program, running

_WINDOW_TOKENS = 4096
_FIRST_TOKENS, _TURN_WORDS = 2200, 250
_AT_ONCE, _QUARTERS = 50, 4
_SUMMARY_S = 10.0
_TTL_S, _MAX_BYTES = 7 * 86_400.0, 256 * 2**20


class Row(NamedTuple):
    """What a quarter of the conversations cost.

    Attributes:
        store, board, commands: operations for each request.
        stored_kb, memory_kb: for each conversation.
    """

    conversations: int
    requests: int
    summaries: float
    store: float
    board: float
    commands: float
    stored_kb: float
    memory_kb: float


class Counted:
    """Counts the calls of every method of something."""

    def __init__(self, inner: Any, calls: Counter[str]) -> None:
        self._inner = inner
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if callable(found):
            self._calls[name] += 1
        return found


class SlowAsk(FakeAsk):
    """A pruning model that takes its time, and keeps nothing of what it was asked."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.calls = 0

    async def __call__(self, messages: Any, **_: Any) -> SummaryAnswer:
        self.calls += 1
        await asyncio.sleep(self._seconds)
        return SummaryAnswer(text=str(self.answer))


@dataclass
class Fleet:
    """The pods, and what they have asked of store, board and model so far.

    Attributes:
        stored_bytes: how much the store holds.
        commands: how many its server has read from connections.
    """

    pods: Sequence[Bench]
    ask: SlowAsk
    store_calls: Counter[str]
    board_calls: Counter[str]
    stored_bytes: Callable[[], float]
    commands: Callable[[], int]
    requests: int = 0
    conversations: int = 0
    _luck: random.Random = field(default_factory=lambda: random.Random(7))

    async def quarter(self, conversations: int, turns: int) -> Row:
        """Has so many more conversations."""
        before, places = self._figures(), asyncio.Semaphore(_AT_ONCE)

        async def placed(number: int) -> None:
            async with places:
                await self._converse(number, turns)

        numbers = range(self.conversations, self.conversations + conversations)
        await asyncio.gather(*map(placed, numbers))
        self.conversations += conversations
        requests, summaries, store, board, commands, stored, memory = (
            now - then for now, then in zip(self._figures(), before, strict=True)
        )
        return Row(
            conversations=self.conversations,
            requests=self.requests,
            summaries=summaries / conversations,
            store=store / requests,
            board=board / requests,
            commands=commands / requests,
            stored_kb=stored / 1024 / conversations,
            memory_kb=memory / 1024 / conversations,
        )

    async def _converse(self, number: int, turns: int) -> None:
        messages = talk(f"conversation {number}", _FIRST_TOKENS)
        for turn in range(turns):
            pod = self._luck.choice(self.pods)
            await pod.guard(messages, _WINDOW_TOKENS, scope=f"team {number % 20}", background="off")
            pod.events.clear()
            self.requests += 1
            messages = answered(messages, prose(f"{number} {turn}", _TURN_WORDS), f"Go on with step {turn}.")

    def _figures(self) -> tuple[float, ...]:
        return (
            self.requests,
            self.ask.calls,
            self.store_calls.total(),
            self.board_calls.total(),
            self.commands(),
            self.stored_bytes(),
            _resident_bytes(),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=50)
    parser.add_argument("--turns", type=int, default=6, help="of each conversation")
    parser.add_argument("--redis", action="store_true", help="a real Redis, in real time")
    options = parser.parse_args(arguments)
    begun_s = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(running(any_program())) if options.redis else None
        played: Callable[[Awaitable[None]], None] = virtual_time.run if server is None else asyncio.run
        played(_run(server, options.pods, options.conversations, options.turns))
    print(f"{options.pods} pods, {time.monotonic() - begun_s:.0f} s")


async def _run(server: Server | None, pods: int, conversations: int, turns: int) -> None:
    fleet = opened(server, pods)
    print("conversations  requests  summaries  store/request  board/request  commands  kB stored  kB of memory")
    for _ in range(_QUARTERS):
        row = await fleet.quarter(conversations // _QUARTERS, turns)
        print(
            f"{row.conversations:13,} {row.requests:9,} {row.summaries:10.2f} {row.store:14.2f} {row.board:14.2f} "
            f"{row.commands:9.2f} {row.stored_kb:10.1f} {row.memory_kb:13.1f}",
            flush=True,
        )
    print(f"store: {dict(fleet.store_calls)}; board: {dict(fleet.board_calls)}")
    for pod in fleet.pods:
        await pod.compactor.aclose()


def opened(server: Server | None, count: int) -> Fleet:
    """A fleet over one store in memory, or over one Redis, with a connection for each pod."""
    store_calls, board_calls = Counter[str](), Counter[str]()
    ask = SlowAsk(_SUMMARY_S if server is None else 0.0)
    memory, board = MemoryStore(ttl_s=_TTL_S, max_bytes=_MAX_BYTES), MemoryBoard()
    pods = []
    for _ in range(count):
        store: Any = memory if server is None else open_store(server.url, ttl_s=_TTL_S, max_bytes=_MAX_BYTES)
        shared: Board | None = board if server is None else open_board(server.url, store)
        pods.append(Bench(store=Counted(store, store_calls), board=Counted(shared, board_calls), ask=ask))  # type: ignore[arg-type]
    return Fleet(
        pods,
        ask,
        store_calls,
        board_calls,
        stored_bytes=(lambda: memory.rows._bytes_by_scope.total())
        if server is None
        else lambda: _told(server, "memory", "used_memory"),
        commands=(lambda: 0) if server is None else lambda: _told(server, "stats", "total_reads_processed"),
    )


def _told(server: Server, section: str, name: str) -> int:
    found = re.search(rf"{name}:(\d+)", server.says("INFO", section).decode())
    return int(found[1]) if found else 0


def _resident_bytes() -> float:
    """What Linux says of this process; 0 elsewhere."""
    status = Path("/proc/self/status")
    found = re.search(r"^VmRSS:\s+(\d+)", status.read_text(), re.MULTILINE) if status.exists() else None
    return 1024 * float(found[1]) if found else 0.0


if __name__ == "__main__":
    main()
