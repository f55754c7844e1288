"""What a find and a put cost, in microseconds, in a store that is already full: memory and SQLite side by side.

    python benchmarks/cost/store.py [--rows 10000] [--calls 1000]

Rows are of a usual size: a summary of 3 kB, a ledger of 3 kB. `find 1` looks for one hash that is there, `find 2000`
for the 2,000 hashes of a long conversation, ten of which are. Medians and 99th percentiles, event loop included.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.stores import Store, open_store
from litellm_compaction.stores.sqlite import SqliteFile, SqliteRows

_TEXT = "The importer was split in two; see src/ledger/imports.py, line 120. " * 45


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=10_000, help="compactions in the store")
    parser.add_argument("--calls", type=int, default=1000, help="calls of each kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_compare(Path(folder), options.rows, options.calls))


async def _compare(folder: Path, rows: int, calls: int) -> None:
    print(f"{rows:,} rows, {calls:,} calls; µs, median / 99 %")
    print(f"{'':10}{'find 1':>16}{'find 2000':>16}{'put':>16}{'add_event':>16}{'file':>10}")
    path = folder / "store.sqlite3"
    bound = {"ttl_s": 86_400.0, "max_bytes": 1 << 30}
    stores: dict[str, Store] = {
        "memory": open_store("memory://", **bound),
        "sqlite": Store(SqliteRows(SqliteFile(path), **bound)),
    }
    for name, store in stores.items():
        columns = await _columns(store, rows, calls)
        await store.aclose()
        size = f"{path.stat().st_size / 1e6:.0f} MB" if name == "sqlite" else "-"
        print(f"{name:10}{''.join(columns)}{size:>10}")


async def _columns(store: Store, rows: int, calls: int) -> list[str]:
    for number in range(rows):
        await store.put("scope", _compaction(number))
    known = [f"hash{number}" for number in range(0, rows, max(1, rows // 10))][:10]
    chain = [*(f"other{number}" for number in range(2000 - len(known))), *known]
    event = '{"event": "compaction"}' + " " * 500
    return [
        await _timed(calls, lambda number: store.find("scope", [f"hash{number % rows}"])),
        await _timed(max(10, calls // 10), lambda _: store.find("scope", chain)),
        await _timed(calls, lambda number: store.put("scope", _compaction(rows + number))),
        await _timed(calls, lambda _: store.add_event(time.time(), event)),
    ]


async def _timed(calls: int, call: Callable[[int], Awaitable[object]]) -> str:
    taken_us: list[float] = []
    for number in range(calls):
        begun_s = time.perf_counter()
        await call(number)
        taken_us.append(1e6 * (time.perf_counter() - begun_s))
    return f"{statistics.median(taken_us):8,.0f} /{statistics.quantiles(taken_us, n=100)[98]:6,.0f}"


def _compaction(number: int) -> Compaction:
    return Compaction(
        covered_messages=number,
        covered_hash=f"hash{number}",
        start=number,
        round=1,
        summary=_TEXT,
        summarized_messages=number,
        ledger=_TEXT,
        level="summary",
    )


if __name__ == "__main__":
    main()
