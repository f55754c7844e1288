"""A hosted-style server that is not LM Studio: it answers five APIs with fixed bytes and keeps all that it gets.

The witness of promise P7: the same requests through a proxy with and without the callback have to leave the same
records here.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JsonDict = dict[str, Any]
_USAGE = {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15}
_ANTHROPIC_USAGE = {"input_tokens": 11, "output_tokens": 4}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "tool_0", "arguments": '{"path": "a.txt"}'}}


class Listener(ThreadingHTTPServer):
    """Says nothing of a client that has gone: another test may be reading what is said by then."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@dataclass(frozen=True)
class RawRequest:
    """One request, as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> JsonDict:
        parsed: JsonDict = json.loads(self.body)
        return parsed


@dataclass
class PlainServer:
    """What a plain server was asked; `gets` are the documents that it gives by path, nothing else is there."""

    base_url: str
    requests: list[RawRequest] = field(default_factory=list)
    gets: dict[str, JsonDict] = field(default_factory=dict)

    def posts(self, since: int = 0) -> list[RawRequest]:
        return [request for request in self.requests[since:] if request.method == "POST"]

    def probes(self, since: int) -> list[RawRequest]:
        return [request for request in self.requests[since:] if request.method == "GET"]


@contextmanager
def serve_plain() -> Iterator[PlainServer]:
    """A plain server on a free port while the block lasts."""
    server = PlainServer("")

    class Handler(_Handler):
        plain = server

    listener = Listener(("127.0.0.1", 0), Handler)
    server.base_url = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join(60)
        listener.server_close()


def plain_entries(base_url: str) -> list[JsonDict]:
    """`model_list` entries that reach a plain server, none of them guarded."""

    def entry(name: str, model: str, address: str = f"{base_url}/v1", **more: Any) -> JsonDict:
        return {"model_name": name, "litellm_params": {"model": model, "api_base": address, "api_key": "k"}, **more}

    return [
        entry("plain", "openai/plain-model"),
        entry("plain-disabled", "lm_studio/plain-model", model_info={"compaction": {"enabled": False}}),
        entry("plain-embedding", "openai/plain-embedding"),
        entry("claude", "anthropic/claude-test", base_url),
    ]


class _Handler(BaseHTTPRequestHandler):
    plain: PlainServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._record(b"")
        missing = {"error": {"message": "Not found", "type": "invalid_request_error"}}
        found = self.plain.gets.get(self.path)
        self._send_json(404 if found is None else 200, missing if found is None else found)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._record(raw)
        body: JsonDict = json.loads(raw or b"{}")
        if "FAIL" in raw.decode("utf-8", "replace"):
            status = 429 if b"FAIL 429" in raw else 500 if b"FAIL 500" in raw else 400
            self._send_json(status, {"error": {"message": f"Asked to fail with {status}", "type": "test", "code": "x"}})
            return
        kind = self.path.split("?")[0].rstrip("/").rpartition("/")[2]
        events = _EVENTS[kind](body) if body.get("stream") and kind in _EVENTS else None
        if events is not None:
            self._send_stream(events, named=kind in ("messages", "responses"))
        elif kind in _WHOLE:
            self._send_json(200, _WHOLE[kind](body))
        else:
            self._send_json(404, {"error": {"message": "Not found", "type": "invalid_request_error"}})

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""

    def _record(self, body: bytes) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.plain.requests.append(RawRequest(self.command, self.path, headers, body))

    def _send_json(self, status: int, answer: JsonDict) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_stream(self, events: list[JsonDict], *, named: bool) -> None:
        lines = [(f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n" for event in events]
        body = ("".join(lines) + ("" if named else "data: [DONE]\n\n")).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _chat(body: JsonDict) -> JsonDict:
    message: JsonDict = {"role": "assistant", "content": "Four plain words here."}
    if body.get("tools"):
        message |= {"content": None, "tool_calls": [_CALL]}
    reason = "tool_calls" if body.get("tools") else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return _frame(body, "chat.completion") | {"choices": [choice], "usage": _USAGE}


def _chat_events(body: JsonDict) -> list[JsonDict]:
    frame = _frame(body, "chat.completion.chunk")
    deltas: list[JsonDict] = [{"role": "assistant", "content": ""}]
    deltas += [{"tool_calls": [{"index": 0, **_CALL}]}] if body.get("tools") else [{"content": "Four plain"}]
    deltas += [] if body.get("tools") else [{"content": " words here."}]
    events = [frame | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    reason = "tool_calls" if body.get("tools") else "stop"
    events.append(frame | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(frame | {"choices": [], "usage": _USAGE})
    return events


def _text(body: JsonDict) -> JsonDict:
    choice = {"index": 0, "text": "Four plain words here.", "logprobs": None, "finish_reason": "stop"}
    return _frame(body, "text_completion") | {"choices": [choice], "usage": _USAGE}


def _text_events(body: JsonDict) -> list[JsonDict]:
    return [_frame(body, "text_completion") | {"choices": _text(body)["choices"]}]


def _embedding(body: JsonDict) -> JsonDict:
    row = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
    return {
        "object": "list",
        "model": body.get("model"),
        "data": [row],
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }


def _message(body: JsonDict) -> JsonDict:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": body.get("model"),
        "content": [{"type": "text", "text": "Four plain words here."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": _ANTHROPIC_USAGE,
    }


def _message_events(body: JsonDict) -> list[JsonDict]:
    start = _message(body) | {"content": [], "stop_reason": None}
    return [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Four plain words here."}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 4},
        },
        {"type": "message_stop"},
    ]


def _response(body: JsonDict) -> JsonDict:
    part = {"type": "output_text", "text": "Four plain words here.", "annotations": []}
    item = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1700000000,
        "status": "completed",
        "model": body.get("model"),
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "usage": {
            "input_tokens": 11,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 15,
        },
    }


def _response_events(body: JsonDict) -> list[JsonDict]:
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    return [
        {"type": "response.created", "sequence_number": 0, "response": _response(body) | {"status": "in_progress"}},
        {"type": "response.output_text.delta", "sequence_number": 1, "delta": "Four plain words here.", **place},
        {"type": "response.output_text.done", "sequence_number": 2, "text": "Four plain words here.", **place},
        {"type": "response.completed", "sequence_number": 3, "response": _response(body)},
    ]


def _frame(body: JsonDict, kind: str) -> JsonDict:
    return {"id": "chatcmpl-1", "object": kind, "created": 1700000000, "model": body.get("model")}


_WHOLE = {
    "completions": lambda body: _text(body) if "prompt" in body else _chat(body),
    "embeddings": _embedding,
    "messages": _message,
    "responses": _response,
}
_EVENTS = {
    "completions": lambda body: _text_events(body) if "prompt" in body else _chat_events(body),
    "messages": _message_events,
    "responses": _response_events,
}
