"""Serves a simulated LM Studio over HTTP: its listings, and one request after the other."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.utils import ClientDisconnected

from .inference import Connection, Inference, Send
from .messages import JsonObject, Refusal, bad_field, unknown_path
from .rendering import load_vocabulary
from .simulator import RequestRecord, Simulator, openai_models, v1_models

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
# Closes the connection that comes from this client address.
CloseConnection = Callable[[Any], None]
MakeApplication = Callable[[Simulator, CloseConnection], "Application"]

_COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
# The largest message for the server of LM Studio's SDKs: the default of its library, `ws`.
_MOST_FRAME_BYTES = 100 << 20


class Application:
    """The ASGI application of one simulator."""

    def __init__(self, simulator: Simulator, close: CloseConnection) -> None:
        self.simulator, self.close = simulator, close
        self.stopping = asyncio.Event()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one HTTP request; a socket of LM Studio's SDKs is told that there is no such protocol here."""
        if scope["type"] == "websocket":
            await self.serve_socket(scope, receive, send)
            return
        request = Request(scope, receive)
        record = RequestRecord(
            path=unquote(request.url.path),
            method=request.method,
            headers={name.lower(): value for name, value in request.headers.items()},
            started_s=time.monotonic(),
        )
        try:
            raw = await request.body()
        except ClientDisconnect:
            return
        record.body = _json_object(raw)
        self.simulator.add_record(record)
        connection = Connection(send, partial(self.close, scope.get("client")))
        job = asyncio.ensure_future(self.answer(record, record.body, connection))
        watch: asyncio.Future[Any] = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                record.disconnected_s = time.monotonic()
                connection.client_left.set()
                self.simulator.notify()
                await self.after_client_left(record, job)
        finally:
            for task in (job, watch):
                task.cancel()
            results = await asyncio.gather(job, watch, return_exceptions=True)
            self.simulator.finish(record, "error")
        if isinstance(results[0], Exception):
            raise results[0]

    async def serve_socket(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.http.response.start", "status": 501, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b""})
        # uvicorn takes the end of a call without a handshake for a fault.
        raise ClientDisconnected

    async def after_client_left(self, record: RequestRecord, job: asyncio.Future[None]) -> None:
        """Whatever is generated for a client that has gone; nothing here."""

    async def answer(self, record: RequestRecord, body: JsonObject | None, connection: Connection) -> None:
        status, answer = 200, unknown_path(record.method, record.path)
        try:
            is_offered = self.offers(record)
            if is_offered and record.method == "POST" and record.path in _COMPLETIONS:
                if body is None:
                    raise bad_field("The request body is not a JSON object")
                await self.infer(record, body, connection)
                return
            if is_offered:
                answer = await self.plain(record, body)
        except Refusal as refusal:
            status, answer = refusal.status, refusal.body
        record.status = status
        self.simulator.finish(record, "ok" if status == 200 and "error" not in answer else "error")
        await connection.send_json(status, answer)

    def offers(self, record: RequestRecord) -> bool:
        """Returns True if the server has the path, or may have it; raises for a client that may not ask."""
        return True

    async def infer(self, record: RequestRecord, body: JsonObject, connection: Connection) -> None:
        is_text = record.path == "/v1/completions"
        inference = Inference(
            simulator=self.simulator, connection=connection, record=record, body=body, is_text=is_text
        )
        await inference.serve()

    async def plain(self, record: RequestRecord, body: JsonObject | None) -> JsonObject:
        """Every answer that is no inference."""
        models, loaded = self.simulator.models, self.simulator.loaded()
        match record.method, record.path:
            case "GET", "/lmstudio-greeting":
                return {"lmstudio": True}
            case "GET", "/v1/models":
                return openai_models(models, loaded)
            case "GET", "/api/v1/models":
                return v1_models(models, loaded)
        return unknown_path(record.method, record.path)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json_object(raw: bytes) -> JsonObject | None:
    with suppress(ValueError, RecursionError):
        return body if isinstance(body := json.loads(raw), dict) else None
    return None


_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Address:
    host: str = "127.0.0.1"
    port: int

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextmanager
def serve(simulator: Simulator, port: int = 0, application: MakeApplication = Application) -> Iterator[Address]:
    """Serve `simulator` until the block ends, when open streams are cut; port 0 takes a free one.

    An OSError says that the port is taken.
    """
    load_vocabulary()
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    # Answers are small; waiting for more to send takes 40 ms each.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = _Server(simulator, listener, application)
    thread = threading.Thread(target=server.run, name="simulator", daemon=True)
    thread.start()
    try:
        if not server.listening.wait(_START_LIMIT_S):
            raise RuntimeError(f"the simulator did not start within {_START_LIMIT_S} s")
        yield Address(port=listener.getsockname()[1])
    finally:
        server.stop()
        thread.join(_STOP_LIMIT_S)
        listener.close()
        simulator.forget_connections()
        if thread.is_alive():
            raise RuntimeError(f"the simulator did not stop within {_STOP_LIMIT_S} s")


class _Server:
    """uvicorn without its 0.1 s ticks: it starts and stops on events."""

    def __init__(self, simulator: Simulator, listener: socket.socket, application: MakeApplication) -> None:
        self.listening = threading.Event()
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._application = application(simulator, self._close_connection)
        config = uvicorn.Config(
            self._application,
            http="h11",
            # The one without warnings; older uvicorns have none of it.
            ws="websockets-sansio" if "websockets-sansio" in uvicorn.config.WS_PROTOCOLS else "none",
            ws_max_size=_MOST_FRAME_BYTES,
            ws_ping_interval=None,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            # A client that a busy machine holds up for seconds meets no connection that is being closed: it would look
            # like a failure of the server's.
            timeout_keep_alive=60,
        )
        config.load()
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.lifespan = config.lifespan_class(config)

    def run(self) -> None:
        asyncio.run(self._run())

    def stop(self) -> None:
        """Make `run` return; may be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _run(self) -> None:
        await self._uvicorn.startup(sockets=[self._listener])
        self._loop = asyncio.get_running_loop()
        self.listening.set()
        await self._stop.wait()
        for listener in self._uvicorn.servers:
            listener.close()
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        # Answers that are still generated for clients that have gone.
        self._application.stopping.set()
        if tasks := list(self._uvicorn.server_state.tasks):
            await asyncio.wait(tasks, timeout=_STOP_LIMIT_S / 2)

    def _close_connection(self, client: object) -> None:
        for connection in list(self._uvicorn.server_state.connections):
            if getattr(connection, "client", None) == client:
                connection.transport.close()
