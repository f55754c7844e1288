"""What it adds to a request that its room is agreed on with other processes, in milliseconds, side by side.

    python benchmarks/cost/shared_pool.py [--requests 500] [--redis redis://127.0.0.1:6379/0]

Each round takes and leaves room once alone (this process only), once over a SQLite board, and once over Redis if one is
named, in turns, so that all see the same machine. `enter` is what a request waits for; `whole` is the processor time of
entering and leaving, in this process with its threads. Medians and 95th percentiles, event loop included.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from litellm_compaction.engine.sharing.coordination import Coordination
from litellm_compaction.engine.sharing.pool import Admission
from litellm_compaction.stores import Board, Store, board_of, open_store

_POOL, _WINDOW_TOKENS = "http://127.0.0.1:1234 benchmark", 8192
# What is told behind an answer is done by then.
_BETWEEN_S = 0.005


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=500, help="requests of each kind")
    parser.add_argument("--redis", help="URL of a server to measure as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_compare(Path(folder), options.requests, options.redis))


async def _compare(folder: Path, requests: int, redis: str | None) -> None:
    urls = {"sqlite": f"sqlite:///{folder / 'store'}"} | ({"redis": redis} if redis else {})
    stores: dict[str, Store] = {name: open_store(url, ttl_s=60, max_bytes=1 << 20) for name, url in urls.items()}
    boards: dict[str, Board] = {
        name: board for name, url in urls.items() if (board := board_of(stores[name])) is not None
    }
    coordinations = {name: Coordination(board) for name, board in boards.items()}
    admissions = {"alone": Admission()}
    admissions |= {name: Admission(coordination=each) for name, each in coordinations.items()}
    entering_s: dict[str, list[float]] = {name: [] for name in admissions}
    whole_s: dict[str, list[float]] = {name: [] for name in admissions}
    for _ in range(requests):
        for name, admission in admissions.items():
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            seat = await admission.enter(
                _POOL, window_tokens=_WINDOW_TOKENS, tokens=1000, most_tokens=_WINDOW_TOKENS, timeout_s=60
            )
            entering_s[name].append(time.perf_counter() - begun_s)
            seat.release()
            await asyncio.sleep(_BETWEEN_S)
            whole_s[name].append(time.process_time() - begun_cpu_s)
    print(f"{requests:,} requests; ms, median / 95 %, and the median beside `alone`")
    print(f"{'':10}{'enter':>18}{'':>10}{'whole (processor)':>22}")
    for name in admissions:
        ratio = statistics.median(entering_s[name]) / statistics.median(entering_s["alone"])
        print(f"{name:10}{_told(entering_s[name]):>18}{ratio:>9.1f}x{_told(whole_s[name]):>22}")
    for each in coordinations.values():
        await each.aclose()
    for store in stores.values():
        await store.aclose()


def _told(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{1000 * statistics.median(ordered):.2f} / {1000 * ordered[int(0.95 * len(ordered))]:.2f}"


if __name__ == "__main__":
    main()
