"""What a compaction is worth: real conversations replayed turn by turn, beside what people do without it.

    python benchmarks/compaction.py FOLDER [--windows 4096 8192 16384 32768] [--only NAME]

FOLDER (or the environment variable COMPACTION_TRANSCRIPTS) holds conversations as JSON: `messages`, `tools`, `facts`.
In-process: the engine with a scripted pruning model, no server. `work` is uncached prefill + 15 × decode tokens,
relative to an unlimited context; `cued` counts a fact only beside a word beside which it stood.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import methods
from benchmarks.measuring import Method, Row, Tally, Transcript, load, replay, row
from benchmarks.summarisers import KINDS

_VARIABLE = "COMPACTION_TRANSCRIPTS"
_Make = Callable[[Transcript, int], Method]


def main() -> None:
    """Prints one table for each context length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=os.environ.get(_VARIABLE))
    parser.add_argument("--windows", type=int, nargs="+", default=[4096, 8192, 16_384, 32_768], metavar="TOKENS")
    parser.add_argument("--only", default="", help="methods whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="one line for each conversation, and the facts lost")
    chosen = parser.parse_args()
    if not chosen.folder:
        parser.error(f"name the folder with the conversations, or set {_VARIABLE}")
    transcripts = load(Path(chosen.folder))
    for window in chosen.windows:
        print(f"\n{window} tokens, {len(transcripts)} conversations\n{_HEAD}", flush=True)
        for name, make in _rows():
            if chosen.only in name:
                tallies = [asyncio.run(replay(each, window, make(each, window))) for each in transcripts]
                print(_line(name, row(tallies)), flush=True)
                if chosen.verbose:
                    print("\n".join(map(_detail, tallies)))


_HEAD = f"{'':28} truncated refused valid  facts  cued  calls/100 stability  work  reduction"


def _rows() -> Iterator[tuple[str, _Make]]:
    for kind in KINDS:
        yield f"ours, {kind}", partial(methods.ours, kind)
    yield "greedy optimum", methods.greedy
    for kind in KINDS[:2]:
        yield f"summarise every time, {kind}", partial(methods.every_time, kind)
    yield "server cuts the middle", methods.stock
    yield "litellm trim_messages", methods.trimmed
    yield "litellm.compress", methods.compressed


def _line(name: str, found: Row) -> str:
    return (
        f"{name:28} {found.truncated:9} {found.refused:7} {found.valid_ratio:5.3f} {found.facts:6.3f} "
        f"{found.bound_facts:5.3f} {found.calls_per_100:10.1f} {found.stability:9.3f} {found.work_ratio:5.2f} "
        f"{found.reduction:10.2f}"
    )


def _detail(tally: Tally) -> str:
    lost = ", ".join(f"{text[:40]!r} ×{times}" for text, times in tally.lost.items())
    return f"  {_line(tally.name, row([tally]))}\n    lost: {lost or 'nothing'}; {tally.invalid[:2]}"


if __name__ == "__main__":
    main()
