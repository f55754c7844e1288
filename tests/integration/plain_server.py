"""A hosted-style server that is not LM Studio: it answers five APIs, and keeps all that it gets.

The witness of promise P7: the same requests through a proxy with and without the callback have to leave the same
records here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.integration.app import attached, let_clients_in
from tests.integration.harness import entry

JsonDict = dict[str, Any]
Says = Callable[[JsonDict], tuple[int, JsonDict]]
_USAGE = {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15}
_ANTHROPIC_USAGE = {"input_tokens": 11, "output_tokens": 4}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "tool_0", "arguments": '{"path": "a.txt"}'}}
_MISSING = {"error": {"message": "Not found", "type": "invalid_request_error"}}


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
    """What a plain server was asked; `gets` are the documents that it gives by path, nothing else is there.

    `says` makes the status and the answer of a chat in place of the fixed one.
    """

    base_url: str = ""
    requests: list[RawRequest] = field(default_factory=list)
    gets: dict[str, JsonDict] = field(default_factory=dict)
    says: Says | None = None

    @property
    def bodies(self) -> list[JsonDict]:
        """What it was asked in chats."""
        return [request.json for request in self.posts() if request.path.endswith("/chat/completions")]

    def posts(self, since: int = 0) -> list[RawRequest]:
        return [request for request in self.requests[since:] if request.method == "POST"]

    def probes(self, since: int) -> list[RawRequest]:
        return [request for request in self.requests[since:] if request.method == "GET"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        path = scope["path"] + (f"?{query}" if query else "")
        request = RawRequest(scope["method"], path, headers, (await receive())["body"])
        self.requests.append(request)
        status, body = self._answer(request)
        kind = b"application/json" if isinstance(body, dict) else b"text/event-stream"
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        lines = [(b"content-type", kind), (b"content-length", str(len(raw)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        await send({"type": "http.response.body", "body": raw})

    def _answer(self, request: RawRequest) -> tuple[int, JsonDict | bytes]:
        if request.method == "GET":
            return (200, self.gets[request.path]) if request.path in self.gets else (404, _MISSING)
        if b"FAIL" in request.body:
            status = 429 if b"FAIL 429" in request.body else 500 if b"FAIL 500" in request.body else 400
            return status, {"error": {"message": f"Asked to fail with {status}", "type": "test", "code": "x"}}
        body = json.loads(request.body or b"{}")
        if self.says and request.path.endswith("/chat/completions"):
            return self.says(body)
        kind = request.path.split("?")[0].rstrip("/").rpartition("/")[2]
        if body.get("stream") and kind in _EVENTS:
            return 200, _stream(_EVENTS[kind](body), named=kind in ("messages", "responses"))
        return (200, _WHOLE[kind](body)) if kind in _WHOLE else (404, _MISSING)


@contextmanager
def serve_plain() -> Iterator[PlainServer]:
    """A plain server in this process while the block lasts."""
    let_clients_in()
    server = PlainServer()
    with attached(server) as server.base_url:
        yield server


def plain_entries(base_url: str) -> list[JsonDict]:
    """`model_list` entries that reach a plain server, none of them guarded."""
    own = f"{base_url}/v1"
    return [
        entry("plain", "openai/plain-model", own),
        entry("plain-disabled", "lm_studio/plain-model", own, compaction={"enabled": False}),
        entry("plain-embedding", "openai/plain-embedding", own),
        entry("claude", "anthropic/claude-test", base_url),
    ]


def _stream(events: list[JsonDict], *, named: bool) -> bytes:
    lines = [(f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n" for event in events]
    return ("".join(lines) + ("" if named else "data: [DONE]\n\n")).encode()


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
