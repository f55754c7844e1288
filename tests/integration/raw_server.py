"""A server whose next answer is written byte by byte, and what each kind of client reads of it.

All else, such as the window that is loaded, it answers as LM Studio does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.integration.app import NETWORK, serve
from tests.integration.bench import KEY
from tests.integration.forms import form, read
from tests.integration.harness import CHAT, Proxy
from tests.lmstudio_double import Model, Simulator

RAW_ROUTES = ("chat", "messages", "responses")
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}}


@dataclass
class RawServer:
    """What a server answers next to a request for a chat, and the bodies that it got.

    The pieces of a stream are sent each by itself, also for a whole answer where there is none.
    """

    base_url: str
    inner: Any
    pieces: Sequence[bytes] = ()
    whole: bytes | None = None
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
        self.bodies.append(body)
        is_whole = self.whole is not None and not body.get("stream")
        kind = b"application/json" if is_whole else b"text/event-stream"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for piece in [self.whole] if is_whole else self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@contextmanager
def serve_raw(window: int) -> Iterator[RawServer]:
    """Such a server in this process while the block lasts."""
    simulator = Simulator([Model(KEY, publisher="zai-org", architecture="glm4")])
    simulator.load(KEY, window)
    with serve(simulator) as address:
        url = address.base_url
        server = RawServer(url, NETWORK.servers[urlsplit(url).netloc])
        NETWORK.attach(url, server)
        yield server


class Read(NamedTuple):
    """What a client has of an answer; `is_whole` is False for one that ends with an error."""

    is_whole: bool
    text: str
    thoughts: str
    calls: tuple[tuple[str, str], ...]
    reason: str | None


def ask_raw(proxy: Proxy, route: str, model: str, *, stream: bool) -> Read:
    """One request, and what its client reads."""
    path, body = form(route, model, [{"role": "user", "content": "Go."}], stream=stream, limit=1000)
    function = {"name": "read", "parameters": TOOL}
    body["tools"] = {
        "chat": [{"type": "function", "function": function}],
        "messages": [{"name": "read", "input_schema": TOOL}],
        "responses": [{"type": "function", **function}],
    }[route]
    answer = proxy.post(body, path)
    said = read(route, answer.text, answer.status_code)
    calls = tuple((name, arguments) for name, arguments in said.calls.values())
    return Read(said.is_whole, said.text, said.thoughts, calls, said.ends[-1] if said.ends else None)
