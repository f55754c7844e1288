"""What keeping originals, and the tool that looks them up, add to a turn, to a compaction, and to the disk.

    python benchmarks/cost/originals.py [--turns 120]

Three real proxies in front of simulators with 8,192 tokens, asked the same conversations in turn: originals off; kept,
without a tool (`recall: off`); and kept, with the tool in every prompt after a compaction. Turns are of an agent, 350
tokens of new text each, streamed. Medians of the time to the first word and of the proxy's processor time, over turns
that went as they came or with a stored record (`turn`), and over those that made a compaction (`compaction`, whose
summary is there at once); and the medians of the ratios to the first proxy in the same turn. Then the compactions, the
prompt tokens that the server was sent, and the bytes of originals on the disk.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.builders import prose
from tests.integration.bench import KEY, SUMMARY, is_summary_call
from tests.integration.harness import CHAT, NOTHING_AHEAD, Proxy, lm_studio, proxy, write_config
from tests.lmstudio_double import ChatCall, Model, Reply, Simulator, serve

_WINDOW_TOKENS, _WORDS = 8192, 150
_ROWS = {
    "off": {"keep_originals": "off"},
    "kept": {"keep_originals": "compacted", "recall": "off"},
    "kept, tool": {"keep_originals": "compacted", "recall": "auto"},
}
_TOOL = {
    "type": "function",
    "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
_WARM = 3


class Turn(NamedTuple):
    """One turn, in milliseconds."""

    first_ms: float
    whole_ms: float
    cpu_ms: float
    is_compaction: bool


class Row(NamedTuple):
    proxy: Proxy
    simulator: Simulator
    folder: Path


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=120, help="of the conversation")
    options = parser.parse_args()
    with ExitStack() as stack:
        rows = {name: _row(stack, settings) for name, settings in _ROWS.items()}
        taken = _conversation(rows, options.turns)
        off = taken["off"]
        print(
            f"{'':12}{'':12}{'first ms':>10}{'ratio':>7}{'whole ms':>10}{'ratio':>7}{'CPU ms':>8}{'ratio':>7}{'of':>5}"
        )
        for name, turns in taken.items():
            for kind in ("turn", "compaction"):
                pairs = [
                    (own, base)
                    for own, base in zip(turns, off, strict=True)
                    if own.is_compaction == base.is_compaction == (kind == "compaction")
                ]
                line = f"{name:12}{kind:12}"
                for at, width in ((0, 10), (1, 10), (2, 8)):
                    line += f"{statistics.median(own[at] for own, _ in pairs):{width}.1f}"
                    line += f"{statistics.median(own[at] / base[at] for own, base in pairs):7.2f}"
                print(f"{line}{len(pairs):5}")
        for name, row in rows.items():
            asked = [each for each in row.simulator.requests if each.path == CHAT and not is_summary_call(each.body)]
            compactions = sum(turn.is_compaction for turn in taken[name])
            tokens = sum(each.kept_tokens for each in asked)
            messages = 2 * len(taken[name])
            size = 1000 * sum(_size_bytes(file) for file in row.folder.rglob("*.originals")) // messages
            kept = f"{size:,} bytes of originals for 1,000 messages"
            print(f"{name:12}{compactions} compactions, {tokens} prompt tokens, {kept}")


def _row(stack: ExitStack, settings: dict[str, Any]) -> Row:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    simulator = Simulator([Model(KEY)])
    simulator.load(KEY, _WINDOW_TOKENS)
    simulator.script = _script
    url = stack.enter_context(serve(simulator)).base_url
    config = write_config(folder, [lm_studio("local", KEY, url)], {**settings, **NOTHING_AHEAD})
    return Row(stack.enter_context(proxy(config)), simulator, folder)


def _script(call: ChatCall) -> Reply:
    return Reply(SUMMARY if is_summary_call(call.body) else "Understood.")


def _conversation(rows: dict[str, Row], turns: int) -> dict[str, list[Turn]]:
    taken: dict[str, list[Turn]] = {name: [] for name in rows}
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        messages += [{"role": "user", "content": prose(f"step {number}", _WORDS)}]
        # None of them is always the first.
        for name in [*rows][number % len(rows) :] + [*rows][: number % len(rows)]:
            taken[name].append(_turn(rows[name].proxy, messages))
        messages += [{"role": "assistant", "content": f"Understood. {prose(f'answer {number}', _WORDS)}"}]
    return {name: each[_WARM:] for name, each in taken.items()}


def _turn(running: Proxy, messages: list[dict[str, Any]]) -> Turn:
    body = {"model": "local", "messages": messages, "tools": [_TOOL], "stream": True}
    started_s, started_cpu_s, first_s = time.perf_counter(), _cpu_s(running), 0.0
    # Programs get no notice in the text.
    headers = {**running.headers, "user-agent": "b"}
    with running.client.stream("POST", CHAT, json=body, headers=headers) as answer:
        for line in answer.iter_lines():
            if not first_s and '"content":"' in line.replace('": "', '":"') and '"content":""' not in line:
                first_s = time.perf_counter()
        action = answer.headers.get("x-litellm-compaction", "")
    ended_s, ended_cpu_s = time.perf_counter(), _cpu_s(running)
    return Turn(
        1000 * (first_s - started_s),
        1000 * (ended_s - started_s),
        1000 * (ended_cpu_s - started_cpu_s),
        action == "compacted",
    )


def _size_bytes(file: Path) -> int:
    """Of a database without its log of what was written last."""
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return file.stat().st_size


def _cpu_s(running: Proxy) -> float:
    """The proxy's processor time so far, on Linux: by its clock (clock_getcpuclockid(3)), in nanoseconds."""
    return time.clock_gettime((~running.process.pid << 3) | 2)


if __name__ == "__main__":
    main()
