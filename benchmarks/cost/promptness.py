"""How soon a client hears of a compaction, and how soon a server is left alone: the promises of 100 ms.

    python benchmarks/cost/promptness.py [--rounds 20]

One real proxy with the default settings. Medians (and the range): the first chunk of a request that needs nothing,
which is what the machine and LiteLLM take; the start notice of one that has to be compacted first, while its summary
is held; how long after the client has read the notice a stream that reached its limit is closed (below 0: before); and
how long after a client has gone its stream is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from litellm_compaction.core.messages import START_NOTICE
from tests.builders import talk
from tests.integration.bench import SUMMARY, Bench, Group, Watch, open_bench
from tests.integration.harness import CHAT
from tests.integration.restart_bench import LONG, Teller, asked
from tests.lmstudio_double import Gate, Reply

_GROUP = Group("middle", 4096, simulator={"chunk_tokens": 16})
# A server that is slower than the proxy, so that none is a buffer ahead of the other.
_TOKENS_PER_S = 4000
_IN_THE_MIDDLE = 600


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=20, help="of each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open_bench(Path(folder), [_GROUP], {}) as bench:
        for what, measure in (
            ("first chunk", _first_chunk),
            ("start notice", _start_notice),
            ("closed at the limit", _closed_at_the_limit),
            ("closed for a client that left", _closed_for_nobody),
        ):
            # The first one loads what is loaded lazily.
            taken_ms = [1e3 * measure(bench, number) for number in range(options.rounds + 1)][1:]
            print(f"{what:30} {statistics.median(taken_ms):6.1f} ms ({min(taken_ms):.1f}–{max(taken_ms):.1f})")


@contextmanager
def _lines(bench: Bench, messages: list[dict[str, Any]]) -> Iterator[Iterator[str]]:
    body = {"model": _GROUP.name, "messages": messages, "stream": True}
    with bench.proxy.client.stream("POST", CHAT, json=body, headers=bench.proxy.headers) as answer:
        yield answer.iter_lines()


def _first_chunk(bench: Bench, number: int) -> float:
    bench.watch(_GROUP.name, Teller(Reply("Fine.")))
    begun_s = time.monotonic()
    with _lines(bench, asked(f"at once {number}")) as lines:
        next(lines)
        return time.monotonic() - begun_s


def _start_notice(bench: Bench, number: int) -> float:
    gate = Gate()
    bench.watch(_GROUP.name, Teller(Reply("Fine."), summary=Reply(SUMMARY, gate=gate)))
    messages = talk(f"noticed {number}", 3600)
    begun_s = time.monotonic()
    with _lines(bench, messages) as lines:
        assert any(START_NOTICE in line for line in lines)
        waited_s = time.monotonic() - begun_s
        gate.open()
        assert any("Fine." in line for line in lines)
    return waited_s


def _closed_at_the_limit(bench: Bench, number: int) -> float:
    watch = bench.watch(_GROUP.name, Teller(Reply(LONG, tokens_per_second=_TOKENS_PER_S)))
    with _lines(bench, asked(f"stopped {number}")) as lines:
        assert any(START_NOTICE in line for line in lines)
        read_s = time.monotonic()
        assert sum(map(len, lines))
    return _closed_s(watch) - read_s


def _closed_for_nobody(bench: Bench, number: int) -> float:
    gate = Gate()
    watch = bench.watch(_GROUP.name, Teller(Reply(LONG, gate=gate, gate_after_tokens=_IN_THE_MIDDLE)))
    with _lines(bench, asked(f"left {number}")) as lines:
        next(lines)
        assert gate.reached.wait(60)
        left_s = time.monotonic()
    bench.simulators[_GROUP.name].wait_until(lambda: watch.chats[0].disconnected_s is not None)
    return _closed_s(watch) - left_s


def _closed_s(watch: Watch) -> float:
    closed_s = watch.chats[0].disconnected_s
    assert closed_s is not None
    return closed_s


if __name__ == "__main__":
    main()
