"""Many streamed conversations at once, with compactions and restarts, through our proxies and through stock LiteLLM.

    python benchmarks/load/load.py [--conversations 64] [--turns 6] [--rounds 2] [--workers 1 2 4]
                                   [--stores sqlite redis]
    python benchmarks/load/load.py --quick

Each conversation begins at half of its window and grows over it; one answer in one of four of them is longer than what
is left. Its turns go to the workers in turn, so that what one of them compacted is another's to reuse. The model writes
numbered words: one that is lost or comes twice is an error, as is a prompt over the window (P1). Stock LiteLLM gets the
same conversations, from the same client, in front of the same simulator with a window that is never full; what it has
to send grows, what we send does not. Both in turns, in one run: only ratios mean something beside other work.

Printed for each number of workers and each store: requests a second, the time of a request, to its first byte and
between chunks, the processor time of all workers for a request, and by how much their memory has grown for each
conversation since the round before. Then the time of a request beside stock's same one, by what was done for it, and
what the server was asked besides. The exit code is 1 where there was an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.builders import prose, talk
from tests.integration.bench import SUMMARY, is_question, is_summary_call, overrun
from tests.integration.harness import CHAT, Proxy, lm_studio, proxy, write_config
from tests.lmstudio_double import ChatCall, Model, Reply, Simulator, serve
from tests.stores.servers import any_program, running

_GROUP, _KEY = "load", "glm-4-9b-0414"
_WINDOW_TOKENS, _WIDE_TOKENS = 4096, 131_072
# Half of the window at first; a turn adds about an eighth.
_FIRST_TOKENS, _TURN_WORDS, _ANSWER_WORDS = 2000, 150, 40
# A long answer is more than the window has left, in one conversation of four.
_LONG_WORDS, _LONG_TURN, _LONG_EVERY = 500, 1, 4
_CHUNK_TOKENS = 4
_LIMIT_S = 300.0
# Contexts that are not shared: what a request waits for there is measured by `cost/shared_pool.py`.
_SETTINGS = {"admission": "off", "summary_timeout_s": _LIMIT_S}
_ROUTER = {"num_retries": 0, "disable_cooldowns": True}
_FAILED = re.compile(r"litellm_compaction:\w+: (\w+_failed|failed_open)")
_ASKED = re.compile(r"Write (\d+) words of (\w+)\.")


class Timing(NamedTuple):
    """One streamed request.

    Attributes:
        kind: what was done for it, as its header says; `restarted` where its answer is longer than the window.
        error: why its answer is not the one that the model gave; "" where it is.
    """

    kind: str
    first_ms: float
    whole_ms: float
    chunk_ms: float
    error: str = ""


class Asked(NamedTuple):
    """What a server was asked in one round, and how promise P1 was broken there."""

    chats: int
    summaries: int
    questions: int
    listings: int
    findings: list[str]


@dataclass
class Side:
    """Some workers in front of one server, and what came of the requests to them.

    Attributes:
        memory_kb: of all workers, behind each round.
        failures: what they logged as failed, such as `store_failed`.
    """

    name: str
    workers: Sequence[Proxy]
    server: Server
    timings: list[Timing] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_kb: list[float] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def run(self, topic: str, conversations: int, turns: int) -> None:
        """Has all conversations at once."""
        begun_s, begun_cpu_s = time.perf_counter(), self._cpu_s()
        said = [len(worker.lines) for worker in self.workers]
        timings = asyncio.run(_talk_all(self.workers, topic, conversations, turns))
        self.wall_s += time.perf_counter() - begun_s
        self.cpu_s += self._cpu_s() - begun_cpu_s
        self.timings += timings
        self.memory_kb.append(sum(_resident_kb(each) for each in self.workers))
        self.asked.append(self.server.asked())
        for worker, before in zip(self.workers, said, strict=True):
            self.failures.update(word for line in worker.lines[before:] for word in _FAILED.findall(line))

    @property
    def errors(self) -> list[str]:
        """Everything that went wrong."""
        return [timing.error for timing in self.timings if timing.error] + [
            finding for asked in self.asked for finding in asked.findings
        ]

    def _cpu_s(self) -> float:
        return sum(_cpu_s(each) for each in self.workers)


class Server:
    """A simulator in the other process."""

    def __init__(self, name: str, base_url: str, pipe: Connection) -> None:
        self.base_url = base_url
        self._name = name
        self._pipe = pipe

    def asked(self) -> Asked:
        """What it was asked since the last look."""
        self._pipe.send(self._name)
        return Asked(*self._pipe.recv())


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--conversations", type=int, default=64, help="at once")
    parser.add_argument("--turns", type=int, default=6, help="of each conversation")
    parser.add_argument("--rounds", type=int, default=2, help="of so many conversations")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="processes")
    parser.add_argument("--stores", nargs="+", choices=["sqlite", "redis"], default=["sqlite", "redis"])
    parser.add_argument("--quick", action="store_true", help="4 conversations, one worker, SQLite")
    options = parser.parse_args(arguments)
    if options.quick:
        options.conversations, options.turns, options.rounds = 4, 3, 1
        options.workers, options.stores = [1], ["sqlite"]
    errors: list[str] = []
    with ExitStack() as stack:
        stock_server, own_server = stack.enter_context(servers())
        most = max(options.workers)
        stock = _warm(_workers(stack, stock_server, most, None))
        for store in options.stores:
            with ExitStack() as inner:
                settings: dict[str, Any] = dict(_SETTINGS)
                if store == "redis":
                    settings["store"] = inner.enter_context(running(any_program())).url
                own = _warm(_workers(inner, own_server, most, settings))
                own_server.asked()
                for count in options.workers:
                    sides = (Side("stock", stock[:count], stock_server), Side("ours", own[:count], own_server))
                    for number in range(options.rounds):
                        for side in sides:
                            side.run(f"{store} {count} {number}", options.conversations, options.turns)
                    print(f"\n{store}, {count} workers, {options.conversations} conversations of {options.turns} turns")
                    print(table(*sides, options.conversations), flush=True)
                    errors += [f"{side.name}: {error}" for side in sides for error in side.errors]
    print("\n".join(["", *(errors[:20] or ["no errors"])]))
    return 1 if errors else 0


def table(stock: Side, own: Side, conversations: int) -> str:
    """The figures of both sides, and ours beside the other's."""
    columns = (
        "requests/s",
        "request ms",
        "95 %",
        "first byte",
        "95 %",
        "chunk ms",
        "95 %",
        "CPU ms",
        "kB more",
        "errors",
    )
    lines = [f"{'':8}" + "".join(f"{column:>11}" for column in columns)]
    figures = [_figures(side, conversations) for side in (stock, own)]
    for side, row in zip((stock, own), figures, strict=True):
        lines.append(f"{side.name:8}" + "".join(f"{value:11.1f}" for value in row) + f"{len(side.errors):11}")
    ratios = [mine / other if other else 0.0 for mine, other in zip(figures[1][:-1], figures[0][:-1], strict=True)]
    lines.append(f"{'ratio':8}" + "".join(f"{ratio:10.2f}x" for ratio in ratios))
    # Both had the same requests in the same order.
    pairs = list(zip(own.timings, stock.timings, strict=True))
    for kind, number in sorted(Counter(timing.kind for timing in own.timings).items()):
        both = [(mine.whole_ms, other.whole_ms) for mine, other in pairs if mine.kind == kind]
        added_ms = _spread([mine_ms - other_ms for mine_ms, other_ms in both])
        ratio = statistics.median(mine_ms / other_ms for mine_ms, other_ms in both if other_ms)
        lines.append(
            f"{number:5} {kind:10} {ratio:5.2f}x; {added_ms[0]:.0f} ms more than stock, 95 % {added_ms[1]:.0f} ms"
        )
    chats, summaries, questions, listings = (sum(each[at] for each in own.asked) for at in range(4))
    lines.append(
        f"asked of the server: {chats} answers, {summaries} summaries, {questions} counts; "
        f"{listings} listings, {listings / max(own.wall_s, 1e-9):.2f} a second"
    )
    if own.failures:
        lines.append(f"logged: {dict(own.failures)}")
    return "\n".join(lines)


def _figures(side: Side, conversations: int) -> list[float]:
    requests = len(side.timings)
    spread = [
        value
        for column in ("whole_ms", "first_ms", "chunk_ms")
        for value in _spread([getattr(timing, column) for timing in side.timings])
    ]
    grown_kb = side.memory_kb[-1] - side.memory_kb[-2] if len(side.memory_kb) > 1 else 0.0
    return [requests / side.wall_s, *spread, 1000 * side.cpu_s / requests, grown_kb / conversations]


def _spread(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]


async def _talk_all(workers: Sequence[Proxy], topic: str, conversations: int, turns: int) -> list[Timing]:
    # A connection that the server ends while it is taken again would count as an error of the answer.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=_LIMIT_S, trust_env=False, limits=limits) as client:
        talks = [_talk(client, workers, topic, number, turns) for number in range(conversations)]
        return [timing for each in await asyncio.gather(*talks) for timing in each]


async def _talk(
    client: httpx.AsyncClient, workers: Sequence[Proxy], topic: str, number: int, turns: int
) -> list[Timing]:
    messages = talk(f"{topic} {number}", _FIRST_TOKENS)[:-1]
    timings: list[Timing] = []
    for turn in range(turns):
        words = _LONG_WORDS if is_long(number, turn) else _ANSWER_WORDS
        tag = f"c{number}t{turn}x"
        text = f"{prose(f'{topic} {number} {turn}', _TURN_WORDS)}\nWrite {words} words of {tag}."
        messages = [*messages, {"role": "user", "content": text}]
        timing, answer = await _asked(client, workers[(number + turn) % len(workers)], messages)
        expected = " ".join(f"{tag}{at}" for at in range(1, words + 1))
        if not timing.error and answer != expected:
            timing = timing._replace(error=f"{topic} {tag}: {_difference(answer, expected)}")
        timings.append(timing._replace(kind="restarted" if is_long(number, turn) else timing.kind))
        messages = [*messages, {"role": "assistant", "content": answer or "Nothing."}]
    return timings


async def _asked(client: httpx.AsyncClient, worker: Proxy, messages: list[dict[str, Any]]) -> tuple[Timing, str]:
    body = {"model": _GROUP, "messages": messages, "stream": True}
    begun_s, first_s, parts = time.perf_counter(), 0.0, list[bytes]()
    try:
        async with client.stream("POST", worker.base_url + CHAT, json=body, headers=worker.headers) as answer:
            async for part in answer.aiter_raw():
                first_s = first_s or time.perf_counter()
                parts.append(part)
            status, kind = answer.status_code, answer.headers.get("x-litellm-compaction", "untouched")
    except httpx.HTTPError as error:
        return Timing("error", 0.0, 0.0, 0.0, f"{type(error).__name__}"), ""
    ended_s = time.perf_counter()
    raw = b"".join(parts)
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
    timing = Timing(
        kind=kind,
        first_ms=1000 * (first_s - begun_s),
        whole_ms=1000 * (ended_s - begun_s),
        chunk_ms=1000 * (ended_s - first_s) / max(len(lines) - 1, 1),
        error="" if status == 200 and raw.endswith(b"data: [DONE]\n\n") else f"{status}: {raw[-200:]!r}",
    )
    chunks = [json.loads(line) for line in lines]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk.get("choices") or ()]
    return timing, "".join(delta.get("content") or "" for delta in deltas)


def is_long(number: int, turn: int) -> bool:
    """Whether the answer to a conversation's turn is longer than what the window has left."""
    return turn == _LONG_TURN and number % _LONG_EVERY == 0


def write(call: ChatCall) -> Reply:
    """The model: numbered words, as many as it is asked for, after those that it sees."""
    if is_summary_call(call.body):
        return Reply(SUMMARY)
    asked = _ASKED.findall(call.sent_text)
    if not asked:
        return Reply("Nothing was asked.")
    words, tag = asked[-1]
    done = max((int(each) for each in re.findall(rf"\b{tag}(\d+)\b", call.sent_text)), default=0)
    text = " ".join(f"{tag}{at}" for at in range(done + 1, int(words) + 1))
    return Reply(text, chunk_tokens=_CHUNK_TOKENS)


def _difference(answer: str, expected: str) -> str:
    at = next((at for at, (one, two) in enumerate(zip(answer, expected, strict=False)) if one != two), len(answer))
    return f"{len(answer)} characters of {len(expected)}, other from {at} on: {answer[max(at - 20, 0) : at + 40]!r}"


def _workers(stack: ExitStack, server: Server, count: int, settings: dict[str, Any] | None) -> list[Proxy]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    config = write_config(folder, [lm_studio(_GROUP, _KEY, server.base_url)], settings, router_settings=_ROUTER)
    return [stack.enter_context(proxy(config)) for _ in range(count)]


def _warm(workers: list[Proxy]) -> list[Proxy]:
    """The same, when each has answered: the first requests load what is loaded lazily."""
    asyncio.run(_talk_all(workers, "first", len(workers), 2 * len(workers)))
    return workers


@contextmanager
def servers() -> Iterator[tuple[Server, Server]]:
    """The simulators of stock LiteLLM and of ours, in a process that is neither the client's nor a worker's."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_simulate, args=(there,))
    process.start()
    there.close()
    try:
        urls = here.recv()
        yield Server("stock", urls["stock"], here), Server("ours", urls["ours"], here)
    finally:
        here.close()
        process.join()


def _simulate(pipe: Connection) -> None:
    """Serves until the other end is closed."""
    simulators = {"stock": simulated(_WIDE_TOKENS), "ours": simulated(_WINDOW_TOKENS)}
    with ExitStack() as stack:
        pipe.send({name: stack.enter_context(serve(each)).base_url for name, each in simulators.items()})
        while True:
            try:
                name = pipe.recv()
            except EOFError:
                return
            pipe.send(told(simulators[name], is_guarded=name == "ours"))


def simulated(window_tokens: int) -> Simulator:
    """A server that answers any number at once, each in a window of its own."""
    simulator = Simulator([Model(_KEY, publisher="zai-org", architecture="glm4")], unified_kv=False, script=write)
    simulator.load(_KEY, window_tokens, parallel=256)
    return simulator


def told(simulator: Simulator, *, is_guarded: bool) -> Asked:
    """What it was asked since the last look, which it forgets."""
    records = list(simulator.requests)
    del simulator.requests[: len(records)]
    chats = [record for record in records if record.path == CHAT]
    return Asked(
        chats=len(chats),
        summaries=sum(is_summary_call(record.body) for record in chats),
        questions=sum(is_question(record.body) for record in chats),
        listings=sum(record.path == "/api/v1/models" for record in records),
        findings=[problem for record in chats if is_guarded and (problem := overrun(record))],
    )


def _cpu_s(worker: Proxy) -> float:
    fields = _proc(worker, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100 if fields else 0.0


def _resident_kb(worker: Proxy) -> float:
    found = re.search(r"^VmRSS:\s+(\d+)", _proc(worker, "status"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def _proc(worker: Proxy, name: str) -> str:
    """What Linux tells of a process; "" elsewhere."""
    path = Path(f"/proc/{worker.process.pid}/{name}")
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
