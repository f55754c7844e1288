"""Serves a simulated LM Studio over HTTP: its listings, loading, and one request after the other."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import uvicorn
from starlette.requests import ClientDisconnect, Request

from .answer import Connection, Send
from .catalog import find_model, load_config, openai_models, v1_models
from .inference import Inference
from .messages import JsonObject, Refusal, bad_field, model_not_found, unknown_path
from .rendering import load_vocabulary
from .script import RequestRecord
from .simulator import Simulator

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
# Closes the connection that comes from this client address.
CloseConnection = Callable[[Any], None]

_COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
# The largest message for the server of LM Studio's SDKs: the default of its library, `ws`.
_MOST_FRAME_BYTES = 100 << 20


class Application:
    """The ASGI application of one simulator."""

    def __init__(self, simulator: Simulator, close: CloseConnection) -> None:
        self.simulator = simulator
        self.close = close
        self.stopping = asyncio.Event()

    def stop(self) -> None:
        """End the answers that are still generated for clients that have gone."""
        self.stopping.set()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one HTTP request; a socket of LM Studio's SDKs gets its answer to unknown paths."""
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
        await send({"type": "websocket.close"})

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
        simulator, route = self.simulator, (record.method, record.path)
        loaded = simulator.loaded()
        if route == ("GET", "/lmstudio-greeting"):
            return {"lmstudio": True}
        if route == ("GET", "/v1/models"):
            return openai_models(simulator.models, loaded)
        if route == ("GET", "/api/v1/models"):
            return v1_models(simulator.models, loaded)
        if route == ("POST", "/api/v1/models/load"):
            return self._load(body or {})
        if route == ("POST", "/api/v1/models/unload"):
            return self._unload(body or {})
        return unknown_path(record.method, record.path)

    def _load(self, body: JsonObject) -> JsonObject:
        name, window = body.get("model"), body.get("context_length")
        model = find_model(name, self.simulator.models) if isinstance(name, str) else None
        if model is None:
            raise model_not_found(str(name))
        if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
            raise bad_field("'context_length' must be an integer")
        try:
            instance = self.simulator.load(model.key, window)
        except ValueError as error:
            raise bad_field(str(error)) from error
        kind = "embedding" if model.type == "embeddings" else "llm"
        answer: JsonObject = {"type": kind, "instance_id": instance.id, "load_time_seconds": 0.0, "status": "loaded"}
        if body.get("echo_load_config") is True:
            # The documented fields of this answer have no `parallel`, unlike the list.
            answer["load_config"] = {key: value for key, value in load_config(instance).items() if key != "parallel"}
        return answer

    def _unload(self, body: JsonObject) -> JsonObject:
        instance_id = body.get("instance_id")
        if not isinstance(instance_id, str):
            raise bad_field("'instance_id' field is required and must be a string")
        try:
            self.simulator.unload(instance_id)
        except KeyError as error:
            raise model_not_found(instance_id) from error
        return {"instance_id": instance_id}


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json_object(raw: bytes) -> JsonObject | None:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Address:
    host: str
    port: int

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextmanager
def serve(
    simulator: Simulator,
    host: str = "127.0.0.1",
    port: int = 0,
    application: Callable[[Simulator, CloseConnection], Application] = Application,
) -> Iterator[Address]:
    """Serve `simulator` until the block ends; port 0 takes a free one.

    On leaving, open streams are cut at once and the thread has ended.

    Raises:
        OSError: the port is taken.
    """
    load_vocabulary()
    listener = _listen(host, port)
    server = _Server(simulator, listener, application)
    thread = threading.Thread(target=server.run, name="simulator", daemon=True)
    thread.start()
    try:
        if not server.listening.wait(_START_LIMIT_S):
            raise RuntimeError(f"the simulator did not start within {_START_LIMIT_S} s")
        yield Address(host=host, port=listener.getsockname()[1])
    finally:
        server.stop()
        thread.join(_STOP_LIMIT_S)
        listener.close()
        simulator.forget_connections()
        if thread.is_alive():
            raise RuntimeError(f"the simulator did not stop within {_STOP_LIMIT_S} s")


def _listen(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # asyncio turns Nagle's delay off only if the protocol is named; with it each request takes 40 ms more.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except BaseException:
        # No other code knows the socket yet; Ctrl-C included.
        listener.close()
        raise
    return listener


class _Server:
    """uvicorn without its 0.1 s ticks: it starts and stops on events."""

    def __init__(
        self,
        simulator: Simulator,
        listener: socket.socket,
        application: Callable[[Simulator, CloseConnection], Application],
    ) -> None:
        self.listening = threading.Event()
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
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
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _run(self) -> None:
        await self._uvicorn.startup(sockets=[self._listener])
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.listening.set()
        await self._stop.wait()
        for listener in self._uvicorn.servers:
            listener.close()
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        self._application.stop()
        if tasks := list(self._uvicorn.server_state.tasks):
            await asyncio.wait(tasks, timeout=_STOP_LIMIT_S / 2)

    def _close_connection(self, client: object) -> None:
        for connection in list(self._uvicorn.server_state.connections):
            if getattr(connection, "client", None) == client:
                connection.transport.close()
