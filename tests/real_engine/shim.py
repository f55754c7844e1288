"""LM Studio's listings in front of real engines; what is asked of `/v1/…` goes to the engine, byte by byte.

Every answer is kept as an `Exchange`: what was asked, and what the engine itself says about it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.real_engine.engine import Engine

_LIMIT_S = 60.0
_HIGHEST_TOKENS = 8192


@dataclass
class Exchange:
    """One request to an engine and its answer.

    Attributes:
        prompt_tokens: as the engine counted them, also in a refusal; 0 while it has not said.
        cached_tokens: of the prompt, found in the engine's cache (`cache_n`).
        total_tokens: of prompt and answer.
        error: the engine's own words; "" without one.
        is_whole: the answer has come to its end; else its reader left.
        ended: whether everything is noted. A client may have all of an answer before that.
    """

    model: str
    path: str
    body: dict[str, Any]
    status: int = 0
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    total_tokens: int = 0
    error: str = ""
    is_whole: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def note(self, event: Mapping[str, Any]) -> None:
        """Takes over what one answer, or one chunk of it, says."""
        if usage := event.get("usage"):
            self.prompt_tokens, self.total_tokens = usage["prompt_tokens"], usage["total_tokens"]
        if timings := event.get("timings"):
            self.cached_tokens = timings["cache_n"]
            self.prompt_tokens = timings["cache_n"] + timings["prompt_n"]
            self.total_tokens = self.prompt_tokens + timings["predicted_n"]
        if error := event.get("error"):
            self.error = json.dumps(error)
            self.prompt_tokens = error.get("n_prompt_tokens", self.prompt_tokens)
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            said = choice.get("delta") or choice.get("message") or {}
            self.text += said.get("content") or choice.get("text") or ""


@dataclass
class Shim:
    """The listings and the way to the engines.

    Attributes:
        engines: by the name under which LM Studio would list them.
        exchanges: every `POST`, in the order in which they came.
    """

    engines: dict[str, Engine]
    base_url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    def answers(self, model: str, *, since: int = 0) -> list[Exchange]:
        """The chats and completions of one model, from the `since`th exchange on, when they have ended."""
        found = [each for each in self.exchanges[since:] if each.model == model and "completions" in each.path]
        for each in found:
            assert each.ended.wait(_LIMIT_S), f"{each.path} has no end"
        return found

    def app(self) -> Starlette:
        """What serves it."""
        return Starlette(
            routes=[
                Route("/lmstudio-greeting", lambda _: JSONResponse({"lmstudio": True})),
                Route("/api/v1/models", lambda _: JSONResponse({"models": self._v1()})),
                Route("/v1/{path:path}", self._forward, methods=["POST"]),
                Route("/llama.cpp/{model}/{path:path}", self._bare, methods=["GET", "POST"]),
            ]
        )

    def _v1(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for name, engine in self.engines.items():
            config = {"context_length": engine.window_tokens, "eval_batch_size": 512, "parallel": engine.slots}
            row = {"type": "llm", "publisher": "HuggingFaceTB", "key": name, "architecture": "llama", "format": "gguf"}
            row["loaded_instances"] = [{"id": name, "config": config}] if engine.base_url else []
            row["max_context_length"] = _HIGHEST_TOKENS
            row["capabilities"] = {"vision": False, "trained_for_tool_use": True}
            rows.append(row)
        return rows

    async def _bare(self, request: Request) -> Response:
        """An engine without LM Studio before it."""
        path = f"/{request.path_params['path']}"
        if request.method == "POST":
            return await self._forwarded(path, await request.body())
        async with httpx.AsyncClient(trust_env=False, timeout=_LIMIT_S) as client:
            answer = await client.get(self.engines[request.path_params["model"]].base_url + path)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def _forward(self, request: Request) -> Response:
        return await self._forwarded(request.url.path, await request.body())

    async def _forwarded(self, path: str, content: bytes) -> Response:
        body = json.loads(content)
        exchange = Exchange(model=str(body.get("model")), path=path, body=body)
        self.exchanges.append(exchange)
        engine = self.engines.get(exchange.model)
        if engine is None or not engine.base_url:
            # As LM Studio answers for a model that it cannot load.
            exchange.status = 404
            exchange.ended.set()
            return JSONResponse({"error": {"message": f"Model {exchange.model} is not loaded."}}, 404)
        client = httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(None))
        try:
            up = client.build_request("POST", f"{engine.base_url}{path}", content=content)
            up.headers["content-type"] = "application/json"
            answer = await client.send(up, stream=True)
        except httpx.HTTPError as error:
            await client.aclose()
            exchange.error = type(error).__name__
            exchange.ended.set()
            return JSONResponse({"error": {"message": "The model has crashed."}}, 500)
        exchange.status = answer.status_code
        return StreamingResponse(
            _pumped(client, answer, exchange), answer.status_code, media_type=answer.headers.get("content-type")
        )


async def _pumped(client: httpx.AsyncClient, answer: httpx.Response, exchange: Exchange) -> AsyncIterator[bytes]:
    """The answer's bytes; leaving closes the connection, which stops the engine."""
    is_stream = "event-stream" in answer.headers.get("content-type", "")
    read = b""
    try:
        async for part in answer.aiter_raw():
            read += part
            while is_stream and b"\n" in read:
                line, _, read = read.partition(b"\n")
                if line.startswith(b"data: {"):
                    exchange.note(json.loads(line[6:]))
                # Not at the end of the connection: its reader may leave with this line.
                exchange.is_whole |= line.startswith(b"data: [DONE]")
            yield part
        if not is_stream:
            exchange.note(json.loads(read))
            exchange.is_whole = True
    finally:
        exchange.ended.set()
        await answer.aclose()
        await client.aclose()


@contextmanager
def serve(engines: dict[str, Engine]) -> Iterator[Shim]:
    """A shim on a free port, in a thread, while the block lasts."""
    shim = Shim(engines)
    listener = socket.create_server(("127.0.0.1", 0))
    shim.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        shim.app(), http="h11", ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="shim", daemon=True)
    thread.start()
    try:
        # What comes before it serves waits in the listener's queue.
        yield shim
    finally:
        server.should_exit = True
        thread.join(_LIMIT_S)
        listener.close()
