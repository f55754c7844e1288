"""What hostile input costs a proxy, beside the same proxy without us: processor time, and how long it holds others up.

    python benchmarks/hostile.py [--only WORD] [--rounds 1]

Two real proxies one after the other, stock and guarded, with a server that answers as told. For each attack the
processor time of the whole proxy, and the longest time in which its event loop served nobody: the smaller of the time
and the processor time between two ticks of 5 ms, so that another program's load does not count.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.integration.harness import CHAT, Proxy, lm_studio, proxy, write_config

_PROBE = """
import asyncio, time
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy import proxy_server

class Probe(CustomLogger):
    held_s = 0.0
    def __init__(self):
        super().__init__()
        proxy_server.app.add_api_route("/probe", self.read, methods=["GET"])
        self.ticking = asyncio.get_running_loop().create_task(self.tick())
    async def tick(self):
        while True:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.005)
            wall_s, cpu_s = time.perf_counter() - wall_s - 0.005, time.process_time() - cpu_s
            self.held_s = max(self.held_s, min(wall_s, cpu_s))
    async def read(self):
        held_s, self.held_s = self.held_s, 0.0
        return {"held_s": held_s, "cpu_s": time.process_time()}

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

    @property
    def cell(self) -> str:
        """In a table."""
        return f"{self.status:>10} {self.cpu_s:6.2f} s {1e3 * self.held_s:5.0f} ms"


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
_ANSWERS: Mapping[str, tuple[dict[str, str], Callable[[], Iterator[bytes]]]] = {
    "gzip bomb of 200 MB": (_JSON | _FOLDED, lambda: iter([_BOMB])),
    "gzip bomb in a stream": (_STREAM | _FOLDED, lambda: iter([_BOMB])),
    "100 MB without a line end": (_STREAM, lambda: (b"x" * _MB for _ in range(100))),
    "one delta of 7 MB": (_STREAM, lambda: _events(_chunk(_words(7 * _MB)), _chunk("", "stop"))),
    "one delta of 20 MB": (_STREAM, lambda: _events(_chunk(_words(20 * _MB)), _chunk("", "stop"))),
    "60,000 chunks": (_STREAM, lambda: _events(*[_chunk("x")] * 60_000, _chunk("", "stop"))),
    "6 MB of empty lists": (_JSON, lambda: iter([b'{"choices":[' + b"[]," * 2 * _MB + b"[]]}"])),
    "an error of 50 MB": (_JSON | {"Status": "400"}, lambda: iter([b"no stream " * 5 * _MB])),
}


def _listed(models: int, name: str) -> bytes:
    rows = [
        {"type": "llm", "publisher": "p", "key": f"model-{number}", "architecture": "qwen2", "loaded_instances": []}
        for number in range(models)
    ]
    return json.dumps({"models": [*rows, _loaded(name, 8192)]}).encode()


_LISTINGS = {"30,000 models": 30_000, "100,000 models": 100_000}


def _loaded(name: str, window: int) -> Body:
    config = {"context_length": window, "parallel": 1}
    instances = [{"id": name, "config": config}]
    return {"type": "llm", "publisher": "p", "key": name, "architecture": "qwen2", "loaded_instances": instances}


class _Server(BaseHTTPRequestHandler):
    """Answers by the requested model's name."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The listing: under the first part of the path it is the one that is meant."""
        name = self.path.split("/")[1].replace("%20", " ").replace("%2C", ",")
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
        name = self.path.split("/")[1].replace("%20", " ").replace("%2C", ",")
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


def _costs(base_url: str, settings: dict[str, Any] | None, only: str, rounds: int) -> dict[str, Cost]:
    models = [lm_studio(name, f"qwen-{name}", base_url) for name in _WINDOWS]
    models += [lm_studio(f"narrow-{name}", "qwen-narrow", f"{base_url}/{name}") for name in _ANSWERS]
    models += [lm_studio(f"listing-{name}", "qwen", f"{base_url}/{name}") for name in _LISTINGS]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "probe.py").write_text(_PROBE)
        config = write_config(
            Path(folder),
            models,
            settings,
            litellm_settings={"callbacks": ["probe.handler"]},
            router_settings={"num_retries": 0, "disable_cooldowns": True},
        )
        with proxy(config) as running:
            _sent("narrow", _HI)(running)
            return dict(_measured(running, only, rounds))


def _measured(running: Proxy, only: str, rounds: int) -> Iterator[tuple[str, Cost]]:
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
            cost = Cost(status, after["cpu_s"] - before["cpu_s"], after["held_s"])
            print(f"{name:44} {cost.cell}", file=sys.stderr, flush=True)
            yield name, cost


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="attacks whose names match this")
    parser.add_argument("--rounds", type=int, default=1, help="of each; the last one counts")
    options = parser.parse_args()
    with _server() as base_url:
        stock = _costs(base_url, None, options.only, options.rounds)
        ours = _costs(base_url, {}, options.only, options.rounds)
    print(f"{'':44} {'stock':>27}   {'guarded':>27}   ratio")
    for name, cost in ours.items():
        print(f"{name:44} {stock[name].cell}   {cost.cell}   {cost.cpu_s / max(stock[name].cpu_s, 1e-3):5.2f}")


if __name__ == "__main__":
    main()
