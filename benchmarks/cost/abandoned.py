"""What streams cost a proxy whose clients leave: memory that a worker keeps, beside the same proxy without us.

    python benchmarks/cost/abandoned.py [--streams 500] [--at-once 25]

Two real proxies one after the other, stock and guarded, before a simulated LM Studio. Each stream is left behind its
first chunk. Megabytes of resident memory: after as many whole streams, at most while streams are left, a while after
that, and what a second round adds, which a leak would add again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from litellm_compaction.simulator import Model, Reply, Simulator, serve
from tests.builders import talk
from tests.integration.harness import CHAT, Proxy, lm_studio, proxy, write_config

_KEY, _WINDOW = "qwen3-8b", 8192
_REST_S = 20
_PROMPT_TOKENS = 1000


def main() -> None:
    """Prints a line for each proxy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=25)
    options = parser.parse_args()
    simulator = Simulator([Model(_KEY)], script=lambda _: Reply("word " * 2000, tokens_per_second=400))
    simulator.load(_KEY, _WINDOW)
    with serve(simulator) as address:
        for name in ("stock", "guarded"):
            with tempfile.TemporaryDirectory() as folder:
                entries = [lm_studio("local", _KEY, address.base_url)]
                config = write_config(Path(folder), entries, {} if name == "guarded" else None)
                with proxy(config) as running:
                    print(f"{name:8} {_measured(running, options.streams, options.at_once)}", flush=True)


def _measured(running: Proxy, streams: int, at_once: int) -> str:
    assert running.process is not None
    pid = running.process.pid
    _leave(running, "whole", streams // 5, at_once, reads=40)
    before, peak, rests = _memory_mb(pid), 0.0, []
    for round_number in range(2):
        _leave(running, f"left {round_number}", streams, at_once, reads=1)
        peak = max(peak, _memory_mb(pid))
        time.sleep(_REST_S)
        rests.append(_memory_mb(pid))
    kept, again = rests[0] - before, rests[1] - rests[0]
    return f"before {before:.0f} MB, peak +{peak - before:.0f}, kept +{kept:.0f}, a second round +{again:.0f}"


def _leave(running: Proxy, word: str, streams: int, at_once: int, *, reads: int) -> None:
    def leave(number: int) -> None:
        body = {"model": "local", "messages": talk(f"{word} {number}", _PROMPT_TOKENS), "stream": True}
        with running.client.stream("POST", CHAT, json=body, headers=running.headers) as answer:
            for _, _ in zip(range(reads), answer.iter_lines(), strict=False):
                pass

    with ThreadPoolExecutor(at_once) as threads:
        for done in [threads.submit(leave, number) for number in range(streams)]:
            done.result()


def _memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


if __name__ == "__main__":
    main()
