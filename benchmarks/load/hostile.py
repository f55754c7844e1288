"""What hostile input costs a proxy, beside the same proxy without us: processor time, and how long it holds others up.

    python benchmarks/load/hostile.py [--only WORD] [--rounds 1]

Two real proxies one after the other, stock and guarded, with a server that answers as told. For each attack the
processor time of the whole proxy, and the longest times, each in milliseconds:
- held: in which its event loop served nobody, stock LiteLLM's own work included: the smaller of the time and the
  processor time between two ticks of 5 ms, so that another program's load does not count;
- by us: which a step of ours takes of the loop's thread, from one suspension to the next (`--lines` shows which);
- by threads: in which it waited while threads worked: who holds the interpreter lock, or another use of the processors;
- garbage: of one collection of Python's, whoever made the objects.
And how many megabytes of memory it took at most, beyond what the proxy had before. `--lines` also says, of each time of
over 100 ms in which nobody was served, where the loop's thread was then (or the threads that it waited for): looked at
every 4 ms, by the innermost line of LiteLLM's or ours.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.integration.harness import CHAT, Proxy, lm_studio, proxy, write_config

_PROBE = """
import asyncio, collections, collections.abc, gc, sys, threading, time
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy import proxy_server
from litellm_compaction.proxy import internal
from litellm_compaction.proxy.answer import transport as upstream
from litellm_compaction.proxy.callback import CompactionHandler

TOLD_S = 0.02
TOLD_GAP_S = 0.1
WATCHES = False

def owner(frame):
    # Whose code a thread is in: the innermost line of ours or of LiteLLM's, and the innermost one of all.
    inner = "%s:%s" % (frame.f_code.co_filename.rpartition("/")[2], frame.f_lineno)
    while frame is not None:
        for name in ("/litellm_compaction/", "/litellm/"):
            _, found, file = frame.f_code.co_filename.rpartition(name)
            if found:
                return "%s %s:%s (%s)" % (name.strip("/"), file, frame.f_lineno, inner)
        frame = frame.f_back
    return "others (%s)" % inner

def memory_mb():
    # Held now, and at most since the last time.
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status)
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    return [int(found[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")]

class Watch(threading.Thread):
    # Looks every 4 ms at what the loop's thread, or the threads that it waits for, are doing.
    def __init__(self):
        super().__init__(daemon=True)
        self.loop_thread, self.seen = threading.get_ident(), collections.deque(maxlen=100_000)
    def run(self):
        while True:
            time.sleep(0.004)
            frames = sys._current_frames()
            on_loop = owner(frames[self.loop_thread])
            if "select" in on_loop:
                working = [owner(each) for ident, each in frames.items() if ident not in (self.loop_thread, self.ident)]
                on_loop = "threads: " + ", ".join(sorted({each for each in working if "litellm" in each}))
            self.seen.append((time.perf_counter(), on_loop))
    def during(self, begun_s, ended_s):
        found = collections.Counter(place for at_s, place in list(self.seen) if begun_s < at_s <= ended_s)
        return ", ".join("%d x %s" % (times, place) for place, times in found.most_common(6))

class Probe(CustomLogger):
    def __init__(self):
        super().__init__()
        proxy_server.app.add_api_route("/probe", self.read, methods=["GET"])
        self.forget()
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self.task)
        for owner, name in (
            *((CompactionHandler, name) for name in vars(CompactionHandler) if name.startswith("async_")),
            (upstream.GuardedTransport, "handle_async_request"),
        ):
            wrap = self.hooked if "iterator" in name else self.call
            setattr(owner, name, wrap(getattr(owner, name)))
        internal.call_router = self.foreign(internal.call_router)
        chunks, as_it_is = upstream._EventStream.__aiter__, upstream._as_it_is
        upstream._EventStream.__aiter__ = self.stream(chunks)
        upstream._as_it_is = lambda create, own: self.call(as_it_is(self.foreign(create), own))
        gc.callbacks.append(self.collect)
        self.watch = Watch()
        if WATCHES:
            self.watch.start()
        self.ticking = loop.create_task(self.tick())
    def forget(self):
        self.held_s, self.ours_s, self.threads_s, self.gc_s, self.where = 0.0, 0.0, 0.0, 0.0, {}
        self.gaps, self.collected = [], []
    def collect(self, phase, info):
        # Python's collector of garbage, in whatever thread: everybody waits.
        if phase == "start":
            self.collecting_s = time.thread_time()
            return
        took_s = time.thread_time() - self.collecting_s
        self.gc_s = max(self.gc_s, took_s)
        if took_s > TOLD_S:
            where = owner(sys._getframe().f_back)
            self.collected.append((time.perf_counter(), "garbage of generation %d %.0f ms in %s" % (
                info["generation"], 1e3 * took_s, where)))
    async def tick(self):
        while True:
            wall_s, cpu_s, own_s = time.perf_counter(), time.process_time(), time.thread_time()
            await asyncio.sleep(0.005)
            begun_s, ended_s = wall_s, time.perf_counter()
            wall_s, cpu_s = ended_s - wall_s - 0.005, time.process_time() - cpu_s
            own_s = time.thread_time() - own_s
            gap_s = min(wall_s, cpu_s)
            self.held_s = max(self.held_s, gap_s)
            self.threads_s = max(self.threads_s, gap_s - own_s)
            if gap_s > TOLD_GAP_S:
                told = [what for at_s, what in self.collected if begun_s < at_s <= ended_s]
                self.gaps.append((gap_s, "; ".join([*told, self.watch.during(begun_s, ended_s)])))
    def task(self, loop, coro, **options):
        code = getattr(coro, "cr_code", None)
        if code is not None and "/litellm_compaction/" in code.co_filename:
            coro = Timed(coro, self)
        return asyncio.Task(coro, loop=loop, **options)
    def call(self, run):
        async def timed(*args, **options):
            return await Timed(run(*args, **options), self)
        return timed
    def foreign(self, run):
        async def timed(*args, **options):
            return await Foreign(run(*args, **options), self)
        return timed
    def hooked(self, run):
        # What the hook reads is LiteLLM's stream again.
        timed = self.stream(run)
        return lambda handler, **given: timed(handler, **{**given, "response": ForeignStream(given["response"], self)})
    def stream(self, run):
        async def timed(*args, **options):
            inner = run(*args, **options)
            try:
                while True:
                    try:
                        item = await Timed(inner.__anext__(), self, inner)
                    except StopAsyncIteration:
                        return
                    yield item
            finally:
                await inner.aclose()
        return timed
    async def read(self):
        now_mb, peak_mb = memory_mb()
        found = {"now_mb": now_mb, "peak_mb": peak_mb,
                 "held_s": self.held_s, "ours_s": self.ours_s, "threads_s": self.threads_s, "gc_s": self.gc_s,
                 "cpu_s": time.process_time(), "gaps": sorted(self.gaps, reverse=True)[:12],
                 "where": sorted(self.where.items(), key=lambda item: -item[1])[:12]}
        self.forget()
        return found

class Timed(collections.abc.Coroutine):
    # What of the loop's thread each step of ours takes, from one suspension to the next, without what it calls that is
    # LiteLLM's again.
    innermost = None
    def __init__(self, inner, probe, told=None):
        self.inner, self.probe, self.told = inner, probe, told or inner
        self.inside_s = 0.0
    def send(self, value):
        return self.step(self.inner.send, value)
    def throw(self, *error):
        return self.step(self.inner.throw, *error)
    def close(self):
        self.inner.close()
    def __await__(self):
        return self
    def __iter__(self):
        return self
    def __next__(self):
        return self.send(None)
    def step(self, run, *given):
        before, outer, Timed.innermost = self.place(), Timed.innermost, self
        self.inside_s, begun_s = 0.0, time.thread_time()
        try:
            return run(*given)
        finally:
            took_s = time.thread_time() - begun_s
            Timed.innermost = outer
            if outer is not None:
                outer.inside_s += took_s
            self.note(before, took_s - self.inside_s)
    def note(self, before, took_s):
        self.probe.ours_s = max(self.probe.ours_s, took_s)
        if took_s > TOLD_S:
            line = before + " -> " + self.place()
            self.probe.where[line] = max(self.probe.where.get(line, 0.0), took_s)
    def place(self):
        coro, lines = self.told, []
        while coro is not None:
            frame = self.of(coro, "_frame")
            file = frame.f_code.co_filename if frame is not None else ""
            if "/litellm_compaction/" in file:
                lines.append("%s:%d" % (file.rpartition("/litellm_compaction/")[2], frame.f_lineno))
            coro = self.of(coro, "_await")
        return " ".join(lines[-2:]) or "end"

    def of(self, coro, what):
        return next((found for kind in ("cr", "ag", "gi") if (found := getattr(coro, kind + what, None))), None)

class Foreign(Timed):
    def note(self, before, took_s):
        pass

class ForeignStream:
    def __init__(self, inner, probe):
        self._inner, self._probe = inner, probe
    def __aiter__(self):
        return self
    def __anext__(self):
        return Foreign(self._inner.__anext__(), self._probe)
    def __getattr__(self, name):
        return getattr(self._inner, name)

handler = Probe()
"""
_WINDOWS = {"wide": 1_000_000, "narrow": 8192, "middle": 32_768}
_SUMMARY = "### Current state\nThe parser is ported, the tests pass, and what is left is the printer.\n" * 3
_MB = 1_000_000


class Cost(NamedTuple):
    """Of one attack."""

    status: str
    cpu_s: float
    held_s: float
    ours_s: float
    threads_s: float
    gc_s: float
    peak_mb: float

    @property
    def cell(self) -> str:
        """In a table."""
        held = (self.held_s, self.ours_s, self.threads_s, self.gc_s)
        return (
            f"{self.status:>10} {self.cpu_s:6.2f} s"
            + "".join(f" {1e3 * each:5.0f} ms" for each in held)
            + f" {self.peak_mb:5.0f} MB"
        )


Body = dict[str, Any]
Attack = Callable[[Proxy], str]


def _tiny(messages: int) -> list[Body]:
    said = ("ok", "go on")
    return [{"role": ("user", "assistant")[i % 2], "content": f"{said[i % 2]} {i}"} for i in range(messages - 1)] + [
        {"role": "user", "content": "And now?"}
    ]


def _rounds(rounds: int) -> list[Body]:
    messages: list[Body] = [{"role": "user", "content": "Port the parser."}]
    for number in range(rounds):
        call = {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "read", "arguments": json.dumps({"n": number})},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"line {number} of the file"})
    return messages


def _words(chars: int) -> str:
    return "some words of a text " * (chars // 21)


def _tools(tools: int) -> list[Body]:
    return [
        {"type": "function", "function": {"name": f"tool_{number}", "parameters": {"type": "object", "properties": {}}}}
        for number in range(tools)
    ]


def _sent(model: str, messages: list[Body], **body: Any) -> Attack:
    content = json.dumps({"model": model, "messages": messages, **body}).encode()
    return lambda running: str(running.post_bytes(content).status_code)


_HI = [{"role": "user", "content": "Hi."}]
_OLD = [{"role": "user", "content": _words(50 * _MB)}, {"role": "assistant", "content": "Read."}, *_HI]


def _attacks() -> Iterator[tuple[str, Callable[[], Attack]]]:
    """Name and maker of each; those in brackets are no attacks, but what the others are compared with."""
    yield "(hello)", lambda: _sent("narrow", _HI)
    yield "40,000 tiny messages, they fit", lambda: _sent("wide", _tiny(40_000))
    yield "40,000 tiny messages, compacted", lambda: _sent("middle", _tiny(40_000))
    yield "20,000 tiny messages, compacted", lambda: _sent("narrow", _tiny(20_000))
    yield "20,000 tiny messages, again", lambda: _sent("narrow", _tiny(20_000))
    yield "4,000 tool rounds, compacted", lambda: _sent("middle", _rounds(4_000))
    yield "a message of 50 MB", lambda: _sent("narrow", [{"role": "user", "content": _words(50 * _MB)}])
    yield "a message of 200 MB", lambda: _sent("narrow", [{"role": "user", "content": _words(200 * _MB)}])
    yield "an old message of 50 MB", lambda: _sent("narrow", _OLD)
    yield "a message of 50 MB, no chat", lambda: _text_of(50 * _MB)
    yield "100,000 tools", lambda: _sent("narrow", _HI, tools=_tools(100_000))
    yield "50 slow uploads", lambda: _slowly
    for name in _ANSWERS:
        yield f"server: {name}", lambda name=name: _sent(f"narrow-{name}", _HI)
        yield f"server: {name}, streamed", lambda name=name: _sent(f"narrow-{name}", _HI, stream=True)
    for name in _LISTINGS:
        yield f"listing: {name}", lambda name=name: _sent(f"listing-{name}", _HI)


def _text_of(chars: int) -> Attack:
    content = json.dumps({"model": "narrow", "prompt": _words(chars)}).encode()
    return lambda running: str(running.post_bytes(content, "/v1/completions").status_code)


def _slowly(running: Proxy) -> str:
    """Fifty clients that send a byte at a time for some seconds, and then leave."""
    host, port = running.base_url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.key}\r\nContent-Length: 100000\r\n\r\n"
    clients = [socket.create_connection((host, int(port))) for _ in range(50)]
    for each in clients:
        each.sendall(head.encode())
    for _ in range(40):
        for each in clients:
            each.sendall(b" ")
        time.sleep(0.1)
    for each in clients:
        each.close()
    return "left"


def _events(*chunks: bytes) -> Iterator[bytes]:
    for chunk in chunks:
        yield b"data: " + chunk + b"\n\n"
    yield b"data: [DONE]\n\n"


def _chunk(text: str, reason: str | None = None) -> bytes:
    delta = {"content": text} if reason is None else {}
    return json.dumps({"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}).encode()


def _unfolding(megabytes: int) -> bytes:
    packer = gzip.GzipFile(fileobj=(buffer := _Buffer()), mode="wb")
    for _ in range(megabytes):
        packer.write(b" " * _MB)
    packer.close()
    return b"".join(buffer.pieces)


class _Buffer:
    """What gzip writes to."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self.pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held."""


_JSON, _STREAM = {"Content-Type": "application/json"}, {"Content-Type": "text/event-stream"}
_FOLDED = {"Content-Encoding": "gzip"}
_BOMB = _unfolding(200)
# No commas: LiteLLM asks several models where a name has one.
_ANSWERS: Mapping[str, tuple[dict[str, str], Callable[[], Iterator[bytes]]]] = {
    "gzip bomb of 200 MB": (_JSON | _FOLDED, lambda: iter([_BOMB])),
    "gzip bomb in a stream": (_STREAM | _FOLDED, lambda: iter([_BOMB])),
    "100 MB without a line end": (_STREAM, lambda: (b"x" * _MB for _ in range(100))),
    "one delta of 7 MB": (_STREAM, lambda: _events(_chunk(_words(7 * _MB)), _chunk("", "stop"))),
    "one delta of 20 MB": (_STREAM, lambda: _events(_chunk(_words(20 * _MB)), _chunk("", "stop"))),
    "60k chunks": (_STREAM, lambda: _events(*[_chunk("x")] * 60_000, _chunk("", "stop"))),
    "6 MB of empty lists": (_JSON, lambda: iter([b'{"choices":[' + b"[]," * 2 * _MB + b"[]]}"])),
    "an error of 50 MB": (_JSON | {"Status": "400"}, lambda: iter([b"no stream " * 5 * _MB])),
}


def _listed(models: int, name: str) -> bytes:
    rows = [
        {"type": "llm", "publisher": "p", "key": f"model-{number}", "architecture": "qwen2", "loaded_instances": []}
        for number in range(models)
    ]
    return json.dumps({"models": [*rows, _loaded(name, 8192)]}).encode()


_LISTINGS = {"30k models": 30_000, "100k models": 100_000}


def _loaded(name: str, window: int) -> Body:
    config = {"context_length": window, "parallel": 1}
    instances = [{"id": name, "config": config}]
    return {"type": "llm", "publisher": "p", "key": name, "architecture": "qwen2", "loaded_instances": instances}


class _Server(BaseHTTPRequestHandler):
    """Answers by the requested model's name."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The listing: under the first part of the path it is the one that is meant."""
        name = self.path.split("/")[1].replace("%20", " ")
        if not self.path.endswith("/api/v1/models"):
            self._answer(_JSON, iter([b"{}"]), 404)
        elif name in _LISTINGS:
            self._answer(_JSON, iter([_listed(_LISTINGS[name], "qwen")]))
        else:
            listed = [_loaded(f"qwen-{each}", tokens) for each, tokens in _WINDOWS.items()]
            self._answer(_JSON, iter([json.dumps({"models": listed}).encode()]))

    def do_POST(self) -> None:
        """An answer, or what the model's name says instead."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.path.split("/")[1].replace("%20", " ")
        if name in _ANSWERS:
            headers, pieces = _ANSWERS[name]
            self._answer(headers, pieces(), int(headers.get("Status", 200)))
        elif b'"stream":true' in body[-2000:] or b'"stream": true' in body[-2000:] or b'"stream":true' in body[:2000]:
            self._answer(_STREAM, _events(_chunk(_SUMMARY), _chunk("", "stop")))
        else:
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": _SUMMARY}}
            self._answer(_JSON, iter([json.dumps({"id": "c", "choices": [choice]}).encode()]))

    def _answer(self, headers: Mapping[str, str], pieces: Iterator[bytes], status: int = 200) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for piece in pieces:
                self.wfile.write(piece)
        except OSError:
            # The proxy has heard enough.
            pass
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def _server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


def _costs(
    base_url: str, settings: dict[str, Any] | None, only: str, rounds: int, shows_lines: bool
) -> dict[str, Cost]:
    models = [lm_studio(name, f"qwen-{name}", base_url) for name in _WINDOWS]
    models += [lm_studio(f"narrow-{name}", "qwen-narrow", f"{base_url}/{name}") for name in _ANSWERS]
    models += [lm_studio(f"listing-{name}", "qwen", f"{base_url}/{name}") for name in _LISTINGS]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "probe.py").write_text(_PROBE.replace("WATCHES = False", f"WATCHES = {shows_lines}"))
        config = write_config(
            Path(folder),
            models,
            settings,
            litellm_settings={"callbacks": ["probe.handler"]},
            router_settings={"num_retries": 0, "disable_cooldowns": True},
        )
        with proxy(config) as running:
            _sent("narrow", _HI)(running)
            return dict(_measured(running, only, rounds, shows_lines))


def _measured(running: Proxy, only: str, rounds: int, shows_lines: bool) -> Iterator[tuple[str, Cost]]:
    for name, make in _attacks():
        if re.search(only, name) is None:
            continue
        attack = make()
        for _ in range(rounds):
            before = running.client.get("/probe").json()
            try:
                status = attack(running)
            except httpx.HTTPError as error:
                status = type(error).__name__
            # What is logged and stored after the answer costs, too.
            time.sleep(1)
            after = running.client.get("/probe").json()
            cost = Cost(
                status,
                after["cpu_s"] - before["cpu_s"],
                after["held_s"],
                after["ours_s"],
                after["threads_s"],
                after["gc_s"],
                after["peak_mb"] - before["now_mb"],
            )
            print(f"{name:44} {cost.cell}", file=sys.stderr, flush=True)
            for line, seconds in after["where"] if shows_lines else ():
                print(f"    {1e3 * seconds:6.0f} ms  {line}", file=sys.stderr, flush=True)
            for seconds, places in after["gaps"] if shows_lines else ():
                print(f"    gap {1e3 * seconds:6.0f} ms  {places}", file=sys.stderr, flush=True)
            yield name, cost


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="attacks whose names match this")
    parser.add_argument("--rounds", type=int, default=1, help="of each; the last one counts")
    parser.add_argument("--lines", action="store_true", help="shows which lines held the event loop over 30 ms")
    parser.add_argument("--guarded-only", action="store_true", help="leaves the stock proxy out")
    options = parser.parse_args()
    sides = {"guarded": {}} if options.guarded_only else {"stock": None, "guarded": {}}
    with _server() as base_url:
        costs = {
            side: _costs(base_url, settings, options.only, options.rounds, options.lines)
            for side, settings in sides.items()
        }
    heads = "   ".join(f"{f'{side}: processor, held, by us, by threads, garbage, memory':>63}" for side in sides)
    print(f"{'':44} {heads}")
    for name, cost in costs["guarded"].items():
        row = "   ".join(each[name].cell for each in costs.values())
        ratio = cost.cpu_s / max(costs.get("stock", costs["guarded"])[name].cpu_s, 1e-3)
        print(f"{name:44} {row}   {ratio:5.2f}")


if __name__ == "__main__":
    main()
