"""An Ollama by its own API, as harsh as the real one: it cuts what is too long and answers 200, unless told not to.

Read in Ollama's source of 2026-08-21: `chatPrompt` drops the oldest messages but the system's and the last; with
`truncate: false` the runner refuses with llama.cpp's words. Answers come as one JSON a line.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.integration.plain_server import Listener
from tests.lmstudio_double.rendering import count

MODEL = "qwen3:8b"
JsonDict = dict[str, Any]


@dataclass
class Ollama:
    """What it was asked; `says` is the window that `/api/ps` tells, `window` the one that it has."""

    base_url: str = ""
    says: int = 8192
    window: int = 8192
    chats: list[JsonDict] = field(default_factory=list)
    cuts: list[bool] = field(default_factory=list)
    seen: list[list[JsonDict]] = field(default_factory=list)

    def answer(self, body: JsonDict) -> tuple[int, JsonDict]:
        """The status and the last line of an answer."""
        self.chats.append(body)
        self.cuts.append(False)
        asked = messages = body.get("messages") or [{"role": "user", "content": body["prompt"]}]
        if body.get("truncate") is False and _tokens(messages) > self.window:
            said = f"request ({_tokens(messages)} tokens) exceeds the available context size ({self.window} tokens)"
            return 400, {"error": f"{said}, try increasing it"}
        while _tokens(messages) > self.window and len(messages) > 1:
            at = next((at for at, each in enumerate(messages[:-1]) if each["role"] != "system"), 0)
            messages = [*messages[:at], *messages[at + 1 :]]
        self.cuts[-1] = messages is not asked
        self.seen.append(messages)
        said = {"message": {"role": "assistant", "content": "Fine."}} if "messages" in body else {"response": "Fine."}
        counts = {"prompt_eval_count": min(_tokens(messages), self.window), "eval_count": 2}
        return 200, {"model": body["model"], "created_at": "2026-01-01T00:00:00Z", **said, "done": False, **counts}


def _tokens(messages: list[JsonDict]) -> int:
    return sum(count(str(each.get("content") or "")) + 4 for each in messages)


@contextmanager
def serve_ollama() -> Iterator[Ollama]:
    """An Ollama on a free port while the block lasts."""
    ollama = Ollama()

    class Handler(_Handler):
        served = ollama

    listener = Listener(("127.0.0.1", 0), Handler)
    ollama.base_url = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield ollama
    finally:
        listener.shutdown()
        thread.join(60)
        listener.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Ollama
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        model = {"name": MODEL, "model": MODEL, "context_length": self.served.says}
        self._send(200 if self.path == "/api/ps" else 404, [{"models": [model]} if self.path == "/api/ps" else {}])

    def do_POST(self) -> None:
        body: JsonDict = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        if self.path not in ("/api/chat", "/api/generate"):
            self._send(404, [{"error": "not found"}])
            return
        status, said = self.served.answer(body)
        if status != 200:
            self._send(status, [said])
            return
        done = {**said, "done": True, "done_reason": "stop"}
        if not body.get("stream"):
            self._send(200, [done])
            return
        ending = {key: {**value, "content": ""} if key == "message" else value for key, value in done.items()}
        self._send(200, [said, {**ending, **({"response": ""} if "response" in ending else {})}])

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""

    def _send(self, status: int, lines: list[JsonDict]) -> None:
        body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        self.send_response(status)
        self.send_header("content-type", "application/x-ndjson" if len(lines) > 1 else "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
