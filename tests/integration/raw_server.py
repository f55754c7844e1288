"""A server whose next answer is written byte by byte, and what each kind of client reads of it.

All else, such as the window that is loaded, it answers as LM Studio does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.integration.app import NETWORK, in_loop
from tests.integration.bench import KEY
from tests.integration.harness import CHAT, Proxy
from tests.lmstudio_double import Model, Simulator
from tests.lmstudio_double.rendering import load_vocabulary
from tests.lmstudio_double.server import Application

PATHS = {"chat": CHAT, "messages": "/v1/messages", "responses": "/v1/responses"}
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}}


@dataclass
class RawServer:
    """What a server answers next to a request for a chat, and the bodies that it got.

    Attributes:
        pieces: of a stream, each sent by itself.
        whole: of an answer that is no stream; a stream's pieces for a server that only streams.
        then: the pieces of further answers.
    """

    base_url: str
    inner: Application
    pieces: Sequence[bytes] = ()
    whole: bytes | None = None
    then: Sequence[Sequence[bytes]] = ()
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != CHAT:
            await self.inner(scope, receive, send)
            return
        content, more = b"", True
        while more:
            event = await receive()
            content, more = content + event.get("body", b""), event.get("more_body", False)
        body = json.loads(content)
        at = len(self.bodies)
        self.bodies.append(body)
        pieces = self.pieces if at == 0 or not self.then else self.then[min(at, len(self.then)) - 1]
        is_whole = self.whole is not None and not body.get("stream")
        kind = b"application/json" if is_whole else b"text/event-stream"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for piece in [self.whole] if is_whole else pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def entry(self, name: str, **compaction: Any) -> dict[str, Any]:
        """A deployment for a config.yaml."""
        params = {"model": f"lm_studio/{KEY}", "api_base": f"{self.base_url}/v1", "api_key": "k"}
        return {"model_name": name, "litellm_params": params, "model_info": {"compaction": compaction}}


@contextmanager
def serve_raw(window: int) -> Iterator[RawServer]:
    """Such a server in this process while the block lasts."""
    load_vocabulary()
    simulator = Simulator([Model(KEY, publisher="zai-org", architecture="glm4")])
    simulator.load(KEY, window)
    url = NETWORK.address()

    async def attach() -> RawServer:
        server = RawServer(url, Application(simulator, NETWORK.cut))
        NETWORK.attach(url, server)
        return server

    async def detach() -> None:
        NETWORK.detach(url)
        server.inner.stop()
        simulator.forget_connections()

    server = in_loop(attach())
    try:
        yield server
    finally:
        in_loop(detach())


class Read(NamedTuple):
    """What a client has of an answer; `is_whole` is False for one that ends with an error."""

    is_whole: bool
    text: str
    thoughts: str
    calls: tuple[tuple[str, str], ...]
    reason: str | None


def read(proxy: Proxy, route: str, model: str, *, stream: bool, said: str = "Go.", **fields: Any) -> Read:
    """One request, and what its client reads."""
    function = {"name": "read", "parameters": TOOL}
    body: dict[str, Any] = {"model": model, "stream": stream, **fields}
    if route == "responses":
        body |= {"input": said, "tools": [{"type": "function", **function}]}
        if "max_tokens" in body:
            body["max_output_tokens"] = body.pop("max_tokens")
    else:
        body["messages"] = [{"role": "user", "content": said}]
        is_chat = route == "chat"
        body["tools"] = [
            {"type": "function", "function": function} if is_chat else {"name": "read", "input_schema": TOOL}
        ]
    if route == "messages":
        body.setdefault("max_tokens", 1000)
    answer = proxy.post(body, PATHS[route])
    if not stream:
        found = answer.json() if answer.status_code == 200 else {}
        return _WHOLE[route](found) if found else Read(False, "", "", (), None)
    events = [
        json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:") and "[DONE]" not in line
    ]
    return _STREAMED[route](events)


def _calls(calls: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, arguments if isinstance(arguments, str) else json.dumps(arguments)) for name, arguments in calls
    )


def _whole_chat(found: Any) -> Read:
    (choice,) = found["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    thoughts = message.get("reasoning_content") or ""
    return Read(True, message.get("content") or "", thoughts, _calls(calls), choice["finish_reason"])


def _streamed_chat(events: Sequence[Any]) -> Read:
    text, thoughts, reason, is_whole = "", "", None, True
    calls: dict[int, list[str]] = {}
    for event in events:
        is_whole = is_whole and "error" not in event
        for choice in event.get("choices") or ():
            delta = choice["delta"]
            text += delta.get("content") or ""
            thoughts += delta.get("reasoning_content") or ""
            reason = choice.get("finish_reason") or reason
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], ["", ""])
                known[0] = known[0] or call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
    return Read(
        is_whole and reason is not None, text, thoughts, _calls([tuple(call) for call in calls.values()]), reason
    )


def _whole_messages(found: Any) -> Read:
    blocks = found["content"]
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    return Read(True, text, thoughts, _calls(calls), found["stop_reason"])


def _streamed_messages(events: Sequence[Any]) -> Read:
    text, thoughts, reason, is_over = "", "", None, False
    calls: dict[int, list[str]] = {}
    for event in events:
        delta = event.get("delta") or {}
        text += delta.get("text") or ""
        thoughts += delta.get("thinking") or ""
        if event.get("type") == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = [event["content_block"]["name"], ""]
        elif delta.get("type") == "input_json_delta":
            calls[event["index"]][1] += delta["partial_json"]
        reason = delta.get("stop_reason") or reason
        is_over = is_over or event.get("type") == "message_stop"
    has_failed = any("error" in event for event in events)
    return Read(is_over and not has_failed, text, thoughts, _calls([tuple(call) for call in calls.values()]), reason)


def _whole_responses(found: Any) -> Read:
    items = found.get("output") or ()
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    text = "".join(part.get("text") or "" for part in parts)
    return Read(found.get("status") != "failed", text, "", _calls(calls), found.get("status"))


def _streamed_responses(events: Sequence[Any]) -> Read:
    text = "".join(event["delta"] for event in events if event.get("type") == "response.output_text.delta")
    ends = [event for event in events if event.get("type") in ("response.completed", "response.incomplete")]
    done = [event["item"] for event in events if event.get("type") == "response.output_item.done"]
    calls = [(item["name"], item["arguments"]) for item in done if item["type"] == "function_call"]
    reason = ends[-1]["response"]["status"] if ends else None
    has_failed = any(event.get("error") or event.get("type") == "error" for event in events)
    return Read(bool(ends) and not has_failed, text, "", _calls(calls), reason)


_WHOLE = {"chat": _whole_chat, "messages": _whole_messages, "responses": _whole_responses}
_STREAMED = {"chat": _streamed_chat, "messages": _streamed_messages, "responses": _streamed_responses}
