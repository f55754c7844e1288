"""What asking LM Studio by its own protocol costs a request, beside a proxy that does not ask, in one run.

    python benchmarks/cost/ask_server.py [--rounds 60]

The simulated server runs in a process of its own. Prints milliseconds from a request's arrival in the engine to the
decision, the median and the ninth decile, and the calls of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from litellm_compaction.config import settings_from
from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.engine import Attempts, Compactor, RequestContext
from litellm_compaction.errors import DoesNotFit
from litellm_compaction.stores import memory_store
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.lmstudio_rpc import LMStudioRpc
from litellm_compaction.windows.windows import Target, Windows
from tests.lmstudio_double import Model, Simulator, serve

KNOWN, STRANGE, WINDOW = "qwen/qwen3-8b", "acme/strange-7b", 32_768


class CountingRpc(LMStudioRpc):
    """Counts the calls, so that each row shows that it has asked what it is about."""

    calls = 0

    async def call(self, *arguments: Any) -> object:
        CountingRpc.calls += 1
        return await super().call(*arguments)


def serve_in_a_process(pipe: Connection) -> None:
    """Serves two models until the other end says so."""
    simulator = Simulator([Model(KNOWN, architecture="qwen3"), Model(STRANGE, architecture="strange")])
    for key in (KNOWN, STRANGE):
        simulator.load(key, WINDOW)
    with serve(simulator) as address:
        pipe.send(f"{address.base_url}/v1")
        pipe.recv()


async def no_answer(request: Request, *, answer_tokens: int = 1) -> int | None:
    """No prefill is to be needed."""
    raise AssertionError(request)


async def loads_nothing() -> None:
    return


def engine(base: str, *, asks: bool) -> tuple[Compactor, Callable[[str, Request], Awaitable[object]]]:
    windows = Windows(cache_s=3600.0, rpc=CountingRpc(is_on=asks))
    compactor = Compactor(
        windows=windows, counter=TokenCounter(), store=memory_store(ttl_s=3600, max_bytes=10_000_000), quiet_s=3600
    )

    async def prepare(key: str, request: Request) -> object:
        target = Target(key=key, model=key, api_base=base, api_key=None, context_length=None)
        context = RequestContext(
            label=key, target=target, settings=settings_from({}), scope="team", pruning_models=(),
            warm_up=loads_nothing, attempts=Attempts(summary_calls_left=4), measure=no_answer if asks else None,
        )  # fmt: skip
        try:
            return await compactor.prepare(request, context)
        except DoesNotFit:
            return None

    return compactor, prepare


def request(words: int, mark: object, messages: int = 10) -> Request:
    each = f"{mark} " + "alpha beta gamma " * (words // messages // 3)
    roles = ["user" if index % 2 == 0 else "assistant" for index in range(messages - 1)]
    raw: list[dict[str, Any]] = [{"role": "system", "content": each}, *({"role": r, "content": each} for r in roles)]
    return Request(messages=tuple(map(parse_message, raw)))


async def measured(make: Callable[[int], Awaitable[object]], rounds: int) -> str:
    took: list[float] = []
    for number in range(rounds):
        begun_s = time.perf_counter()
        await make(number)
        took.append(1e3 * (time.perf_counter() - begun_s))
    return f"{statistics.median(took):8.2f} {statistics.quantiles(took, n=10)[-1]:8.2f}"


async def compare(base: str, rounds: int) -> None:
    engines = {asks: engine(base, asks=asks) for asks in (False, True)}
    hello, certain = request(3, "hello", 2), request(4_000, "certain")
    rows: dict[str, Callable[[Any, int], Awaitable[object]]] = {
        "hello": lambda prepare, number: prepare(KNOWN, hello),
        "certain, 4,000 tokens": lambda prepare, number: prepare(KNOWN, certain),
        "doubtful, 26,000 tokens": lambda prepare, number: prepare(STRANGE, request(26_000, number)),
        "50 at once, 26,000 tokens": lambda prepare, number: asyncio.gather(
            *(prepare(STRANGE, request(26_000, f"{number} {each}")) for each in range(50))
        ),
        "5 MB": lambda prepare, number: prepare(STRANGE, request(900_000, number)),
    }
    print(f"{'':28}{'off p50':>8} {'p90':>8}   {'auto p50':>8} {'p90':>8}")
    for name, make in rows.items():
        times = rounds if name[0] != "5" else 5
        cells = []
        for _, prepare in engines.values():
            await make(prepare, -1)
            CountingRpc.calls = 0
            cells.append(await measured(lambda number, make=make, prepare=prepare: make(prepare, number), times))  # type: ignore[misc]
        asked = CountingRpc.calls / times / (50 if name.startswith("50") else 1)
        print(f"{name:28}{'   '.join(cells)}   {asked:.1f} calls each", flush=True)
    for compactor, _ in engines.values():
        await compactor.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="of each row; the two long ones have five")
    rounds = parser.parse_args().rounds
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve_in_a_process, args=(theirs,))
    server.start()
    asyncio.run(compare(ours.recv(), rounds))
    ours.send("end")
    server.join()


if __name__ == "__main__":
    main()
