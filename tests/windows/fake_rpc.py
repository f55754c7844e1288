"""A small LM Studio that speaks the protocol of its SDKs on a random port; shapes as in lmstudio-js 6ec11db."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

MODEL = "qwen/qwen3-8b"


@dataclass
class FakeRpc:
    """Answers `listLoaded`, the template, counts and settings; a word is a token.

    Attributes:
        loaded: context lengths by identifier.
        answers: what to answer to an endpoint instead, as a whole message without its callId; a callable gets the
            parameter; None for silence.
        accepts: whether keys are.
        greets: whether a key is answered at all.
        status: of an HTTP answer in place of the socket; 0 for the socket.
        raw: sent in place of every answer.
        closes: in place of every answer.
    """

    loaded: dict[str, int] = field(default_factory=lambda: {MODEL: 8192})
    answers: dict[str, Any] = field(default_factory=dict)
    accepts: bool = True
    greets: bool = True
    status: int = 0
    raw: str | None = None
    closes: bool = False
    calls: list[tuple[str, Any]] = field(default_factory=list)
    keys: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sockets: list[web.WebSocketResponse] = field(default_factory=list)
    base: str = ""

    @property
    def open(self) -> int:
        return len(self.sockets)

    async def end_connections(self) -> None:
        """As a server that stops: each client has heard of it when this returns."""
        for socket in [*self.sockets]:
            await socket.close()

    @property
    def endpoints(self) -> list[str]:
        return [endpoint for endpoint, _ in self.calls]

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        if self.status:
            return web.json_response({"error": "Unexpected endpoint. (GET /llm)"}, status=self.status)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sockets.append(socket)
        try:
            key = await socket.receive_json()
            self.keys.append((key["clientIdentifier"], key["clientPasskey"]))
            if self.greets:
                await socket.send_json({"success": self.accepts})
            if not self.accepts:
                return socket
            async for message in socket:
                if message.type is not WSMsgType.TEXT or self.closes:
                    break
                await self._answer(socket, message.json())
        finally:
            self.sockets.remove(socket)
            await socket.close()
        return socket

    async def _answer(self, socket: web.WebSocketResponse, asked: dict[str, Any]) -> None:
        assert asked["type"] == "rpcCall"
        self.calls.append((asked["endpoint"], asked.get("parameter")))
        if self.raw is not None:
            await socket.send_str(self.raw)
            return
        chosen = self.answers.get(asked["endpoint"], self.usual(asked["endpoint"]))
        answer = chosen(asked.get("parameter")) if callable(chosen) else chosen
        if answer is None:
            return
        if answer["type"] != "communicationWarning":
            answer = {**answer, "callId": asked["callId"]}
        await socket.send_json(answer)

    def usual(self, endpoint: str) -> Callable[[Any], dict[str, Any]]:
        def answer(parameter: Any) -> dict[str, Any]:
            if endpoint == "listLoaded":
                rows = [{"identifier": name, "contextLength": tokens} for name, tokens in self.loaded.items()]
                return {"type": "rpcResult", "result": rows}
            identifier = parameter["specifier"]["query"]["identifier"]
            if identifier not in self.loaded:
                return {"type": "rpcError", "error": {"title": "No model found that fits the query"}}
            return {"type": "rpcResult", "result": result(endpoint, parameter)}

        return answer


def result(endpoint: str, parameter: Any) -> Any:
    """What an endpoint answers about a loaded model."""
    if endpoint == "applyPromptTemplate":
        texts = [
            part.get("text") or part.get("content") or ""
            for message in parameter["history"]["messages"]
            for part in message["content"]
        ]
        tools = [tool["function"]["name"] for tool in parameter["opts"].get("toolDefinitions", [])]
        return {"formatted": " ".join([*texts, *tools])}
    if endpoint == "countTokens":
        return {"tokenCount": len(parameter["inputString"].split())}
    if endpoint == "getInstanceProcessingState":
        return {"status": "idle", "queued": 0}
    return {"fields": []}


@asynccontextmanager
async def serving(fake: FakeRpc) -> AsyncIterator[FakeRpc]:
    """The fake behind a port of its own."""
    app = web.Application()
    app.router.add_get("/llm", fake.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.base = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield fake
    finally:
        await asyncio.sleep(0)
        await runner.cleanup()
