"""A server behind the transport: what it answers, in pieces or whole, and what it was sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from litellm_compaction.proxy.answer.client import Asked
from litellm_compaction.proxy.answer.transport import GuardedTransport
from litellm_compaction.proxy.wire import client_texts
from tests.proxy.scripted import IN_TEXT, Scene, Turn

SHORT = [{"role": "user", "content": "Count."}]
USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 3,
    "total_tokens": 14,
    "completion_tokens_details": {"reasoning_tokens": 1},
}
Body = dict[str, Any]


def sse(*chunks: Body, done: bool = True, status: int = 200) -> httpx.Response:
    """An answer in pieces."""

    async def pieces() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
        if done:
            yield b"data: [DONE]\n\n"

    headers = {"content-type": "text/event-stream", "x-request-id": "r1", "transfer-encoding": "chunked"}
    return httpx.Response(status, headers=headers, content=pieces())


def chunk(delta: Body, reason: str | None = None, **fields: Any) -> Body:
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "served",
        "system_fingerprint": "fp",
        "choices": [choice],
        **fields,
    }


USAGE_CHUNK = {**chunk({}), "choices": [], "usage": USAGE}


def whole(message: Body, reason: str = "stop", **usage: int) -> httpx.Response:
    """An answer in one piece."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    body = {"id": "c", "object": "chat.completion", "created": 7, "model": "served", "choices": [choice]}
    return httpx.Response(200, json={**body, "usage": {**USAGE, **usage}, "stats": {"tokens_per_second": 9.5}})


@dataclass
class Wire:
    """A server behind the transport, and what it was sent."""

    answers: Sequence[Callable[[], httpx.Response]]
    window_tokens: int = 2048
    settings: dict[str, Any] = field(default_factory=dict)
    sent: list[Body] = field(default_factory=list)
    headers: list[httpx.Headers] = field(default_factory=list)
    is_lmstudio: bool = False
    scene: Scene | None = None

    async def ask(self, **body: Any) -> httpx.Response:
        """One client request."""
        transport, _ = await self.transport(**body)
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.post("http://served/v1/chat/completions", json={"messages": SHORT, **body})

    async def transport(self, **body: Any) -> tuple[GuardedTransport, Scene]:
        """What carries one client request."""
        messages = body.get("messages", SHORT)
        options: dict[str, Any] = {"window_tokens": self.window_tokens, "is_lmstudio": self.is_lmstudio}
        scene = self.scene = Scene(messages, [Turn()], settings=self.settings, **options)
        asked = Asked(
            request=scene.request,
            output_tokens=None,
            is_json=False,
            notices=IN_TEXT,
            wants_usage=True,
            client_text=client_texts({"messages": SHORT, **body}),
        )
        made = GuardedTransport(
            httpx.MockTransport(self._serve),
            scene.compactor,
            scene.context,
            asked,
            await scene.compactor.prepare(scene.request, scene.context),
            scene.listener,
        )
        return made, scene

    async def _serve(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(json.loads(request.content))
        self.headers.append(request.headers)
        return self.answers[min(len(self.sent), len(self.answers)) - 1]()


def text_of(answer: httpx.Response) -> str:
    """Of an answer in pieces."""
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def choice_of(answer: httpx.Response) -> Body:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert isinstance(choice, dict)
    return choice
