"""Many agents at once, for many turns, over servers that fail and clients that leave: what a week does in minutes.

    python benchmarks/load/endurance.py [--requests 3000] [--agents 4] [--short] [--set carrier=hooks] [--alone]

A real proxy in front of two simulators with small windows. The agents' conversations grow by messages and tool results
until they end; some answers are longer than the window, one in thirty requests and one in ten summaries fails, one in
twelve streams is left by its client. Beside it, at the same time, as many agents with stock LiteLLM and two more such
simulators. Printed as it goes on: each proxy's memory, threads and open files; at the end, by how much it grew for
a thousand requests in the second half, when what fills up at first is full. The exit code is 1 where a prompt was
truncated or over its window (P1), where we failed open, or where something goes on generating for nobody.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.integration.bench import SUMMARY, Bench, Group, is_summary_call, open_bench
from tests.integration.harness import CHAT
from tests.lmstudio_double import ChatCall, Reply, numbered_words

_GROUPS = (Group("small", 4096, simulator={"chunk_tokens": 8}), Group("wide", 16384, simulator={"chunk_tokens": 8}))
_SHORT_GROUPS = (
    Group("small", 4096, simulator={"chunk_tokens": 64}),
    Group("wide", 16384, key="qwen2.5-7b-instruct", architecture="qwen2", simulator={"chunk_tokens": 64}),
)
_LINES = 36
# Messages that a short conversation brings, and how many of such conversations one is too long for its window.
_BROUGHT, _LONG_EVERY = 12, 8
_FAILED = Reply("", status=500, raw_body={"error": "the server failed, as it was told to"})


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=3000, help="of all agents together")
    parser.add_argument("--agents", type=int, default=4, help="at once")
    parser.add_argument("--short", action="store_true", help="short conversations with many messages of their own")
    parser.add_argument("--alone", action="store_true", help="without stock LiteLLM beside it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the callback")
    options = parser.parse_args()
    settings = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in options.set)}
    groups = _SHORT_GROUPS if options.short else _GROUPS
    with ExitStack() as stack:
        logs = [Log("ours", _opened(stack, groups, settings), options.requests)]
        if not options.alone:
            unguarded = [replace(group, guarded=False) for group in groups]
            logs.append(Log("stock", _opened(stack, unguarded, None), options.requests))
        numbers = range(options.agents)
        agents = [Agent(log, random.Random(number), is_short=options.short) for log in logs for number in numbers]
        with ThreadPoolExecutor(len(agents)) as pool:
            list(pool.map(Agent.work, agents))
        # What stock LiteLLM leaves behind is told, and is no fault of ours.
        codes = [log.judge() for log in logs]
        return codes[0]


def _opened(stack: ExitStack, groups: Sequence[Group], settings: dict[str, Any] | None) -> Bench:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    router = {"num_retries": 0, "disable_cooldowns": True}
    bench = stack.enter_context(open_bench(folder, groups, settings, router_settings=router))
    for simulator in bench.simulators.values():
        simulator.script = _script
    return bench


def _script(call: ChatCall) -> Reply:
    """The model: by the number of the call, so that a run can be had again."""
    luck = random.Random(call.index)
    if is_summary_call(call.body):
        return _FAILED if luck.random() < 0.1 else Reply(SUMMARY)
    kind = luck.random()
    if kind < 0.03:
        return _FAILED
    if kind < 0.10:
        return Reply(numbered_words(1500))
    if kind < 0.30:
        return Reply("", tool_calls=[("read_file", json.dumps({"path": f"src/part_{call.index}.py"}))])
    return Reply(f"Answer {call.index}. " + "It is done. " * luck.randrange(1, 60))


@dataclass
class Log:
    """What has happened so far.

    Attributes:
        sizes_kb: the proxy's memory, by the number of requests.
    """

    name: str
    bench: Bench
    requests: int
    sizes_kb: dict[int, float] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _begun_s: float = field(default_factory=time.monotonic)

    def note(self, end: str) -> None:
        """One request has ended."""
        with self._lock:
            self.ends[end] += 1
            if self.ends.total() % max(1, self.requests // _LINES) == 0:
                said = f"{self.ends.total():6} requests {time.monotonic() - self._begun_s:6.0f} s  {self._size()}"
                print(f"{self.name:6}{said}", flush=True)

    @property
    def is_full(self) -> bool:
        """Whether there have been enough requests."""
        return self.ends.total() >= self.requests

    def judge(self) -> int:
        """The exit code; what it stands for is printed."""
        findings = self.bench.findings()
        findings += [line for line in self.bench.proxy.lines if "failed_open" in line]
        simulators = self.bench.simulators.values()
        findings += [f"{record.path} goes on" for each in simulators for record in each.requests if not record.ended_s]
        upstream = sum(len(simulator.requests) for simulator in simulators)
        print(f"{self.name}: {dict(self.ends)}, {upstream} requests upstream; at the end {self._size()}")
        for third, name in enumerate(("first", "second", "last")):
            within = {
                number: kb for number, kb in self.sizes_kb.items() if third <= 3 * number / self.requests <= third + 1
            }
            if len(within) > 1:
                slope_kb = statistics.linear_regression(list(within), list(within.values())).slope
                print(f"{self.name}: {1000 * slope_kb:+.0f} kB for 1,000 requests in the {name} third")
        print("\n".join(findings) or "no findings")
        return 1 if findings else 0

    def _size(self) -> str:
        process = Path(f"/proc/{self.bench.proxy.process.pid}")
        if not process.exists():
            return ""
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        memory_kb = self.sizes_kb[self.ends.total()] = float(status["VmRSS"].split()[0])
        files = len(list((process / "fd").iterdir()))
        store = sum(path.stat().st_size for path in self.bench.folder.rglob("store.sqlite3*")) / 2**20
        return f"{memory_kb / 1024:.0f} MB, {status['Threads'].strip()} threads, {files} files, store {store:.1f} MB"


class Agent:
    """A client that has one conversation after the other."""

    def __init__(self, log: Log, luck: random.Random, *, is_short: bool = False) -> None:
        self._log = log
        self._luck = luck
        self._is_short = is_short

    def work(self) -> None:
        """Until there have been enough requests."""
        proxy = self._log.bench.proxy
        with httpx.Client(base_url=proxy.base_url, headers=proxy.headers, timeout=120, trust_env=False) as client:
            while not self._log.is_full:
                self._converse(client)

    def _converse(self, client: httpx.Client) -> None:
        group = self._luck.choice(_GROUPS).name
        details = "a detail of it, " * self._luck.randrange(200)
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"You are agent {self._luck.random()}. " + "Be careful and brief. " * 10},
            {"role": "user", "content": f"Task {self._luck.random()}: {details}"},
        ]
        if self._is_short:
            messages += self._brought()
        for _ in range(self._luck.randrange(1, 4) if self._is_short else self._luck.randrange(5, 60)):
            if self._log.is_full:
                return
            end, answer = self._ask(client, {"model": group, "messages": messages})
            self._log.note(end)
            if end == "400":
                return
            if answer is not None:
                messages += [answer, *self._reaction(answer)]

    def _brought(self) -> list[dict[str, Any]]:
        """What a conversation was elsewhere, which nobody here has counted yet."""
        words = 300 if self._luck.randrange(_LONG_EVERY) == 0 else 10
        said = [f"{self._luck.random()}: " + "it is so, " * self._luck.randrange(words) for _ in range(_BROUGHT)]
        roles = ("assistant", "user") * (_BROUGHT // 2)
        return [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]

    def _reaction(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        if calls := answer.get("tool_calls"):
            length = self._luck.randrange(5, 250)
            return [
                {"role": "tool", "tool_call_id": call["id"], "content": "a line of it; " * length} for call in calls
            ]
        return [{"role": "user", "content": "Next: " + "some more words here " * self._luck.randrange(2, 150)}]

    def _ask(self, client: httpx.Client, body: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
        """How a request ended, and the answer where there is a whole one."""
        if self._luck.random() < 0.3:
            whole = client.post(CHAT, json=body)
            return str(whole.status_code), _plain(whole.json()["choices"][0]["message"]) if whole.is_success else None
        lines_left = self._luck.randrange(1, 30) if self._luck.random() < 1 / 12 else None
        text, calls = list[str](), dict[int, dict[str, Any]]()
        with client.stream("POST", CHAT, json={**body, "stream": True}) as stream:
            for number, line in enumerate(stream.iter_lines()):
                if number == lines_left:
                    return "left", None
                chunk = json.loads(line[6:]) if line.startswith("data: {") else {}
                if "error" in chunk:
                    return "error in stream", None
                for choice in chunk.get("choices") or ():
                    text.append(choice["delta"].get("content") or "")
                    _add(calls, choice["delta"].get("tool_calls") or ())
        if not stream.is_success:
            return str(stream.status_code), None
        return "200", _plain({"content": "".join(text), "tool_calls": list(calls.values())})


def _add(calls: dict[int, dict[str, Any]], fragments: Any) -> None:
    for fragment in fragments:
        call = calls.setdefault(fragment["index"], {"id": "", "type": "function", "function": {}})
        call["id"] = fragment.get("id") or call["id"]
        for key in ("name", "arguments"):
            call["function"][key] = call["function"].get(key, "") + (fragment["function"].get(key) or "")


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """An answer as clients send it back."""
    calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    return {"role": "assistant", "content": message.get("content") or "", **calls}


if __name__ == "__main__":
    sys.exit(main())
