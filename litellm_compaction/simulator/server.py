"""The paths of LM Studio's server, served over HTTP: on a free port, in a thread, while a `with` block lasts."""

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

from litellm_compaction.simulator.catalog import (
    Instance,
    find_model,
    find_target,
    llama_models,
    llama_props,
    load_config,
    openai_models,
    v0_model,
    v0_models,
    v1_models,
)
from litellm_compaction.simulator.generation import Connection, Send
from litellm_compaction.simulator.inference import Inference
from litellm_compaction.simulator.messages import (
    JsonObject,
    Refusal,
    bad_field,
    model_not_found,
    unauthorized,
    unknown_path,
)
from litellm_compaction.simulator.rendering import load_vocabulary
from litellm_compaction.simulator.rpc import SdkConnection
from litellm_compaction.simulator.script import RequestRecord, SdkSocket
from litellm_compaction.simulator.simulator import Api, Simulator

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
# Closes the connection that comes from this client address.
CloseConnection = Callable[[Any], None]

_CONTROL = "/v1/chat/completions/control"
_COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
_OFFERED: dict[Api, tuple[str, ...]] = {
    "v1": ("/v1/", "/api/v0/", "/api/v1/", "/lmstudio-greeting"),
    "v0": ("/v1/", "/api/v0/", "/lmstudio-greeting"),
    "openai": ("/v1/",),
    "llama.cpp": ("/v1/", "/props"),
}
# The largest message for the server of LM Studio's SDKs: the default of its library, `ws`.
_MOST_FRAME_BYTES = 100 << 20
# Other keys, such as parallel or the KV quantization, are rejected (bt#2024).
_LOAD_KEYS = {
    "model",
    "context_length",
    "flash_attention",
    "eval_batch_size",
    "num_experts",
    "offload_kv_cache_to_gpu",
    "echo_load_config",
}


class Application:
    def __init__(self, simulator: Simulator, close: CloseConnection) -> None:
        self._simulator = simulator
        self._close = close
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End the answers that are still generated for clients that have gone."""
        self._stopping.set()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one HTTP request, or the calls of one WebSocket."""
        if scope["type"] == "websocket":
            await self._serve_sdk(scope, receive, send)
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
        body = _json_object(raw)
        record.body = body
        self._simulator.add_record(record)
        connection = Connection(send, partial(self._close, scope.get("client")))
        job = asyncio.ensure_future(self._answer(record, body, connection))
        watch: asyncio.Future[Any] = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                record.disconnected_s = time.monotonic()
                connection.client_left.set()
                self._simulator.notify()
                if self._simulator.runs_on and not record.streamed:
                    watch = asyncio.ensure_future(self._stopping.wait())
                    await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (job, watch):
                task.cancel()
            results = await asyncio.gather(job, watch, return_exceptions=True)
            self._simulator.finish(record, "error")
        if isinstance(results[0], Exception):
            raise results[0]

    async def _serve_sdk(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        socket = SdkSocket(
            namespace=scope["path"].lstrip("/"),
            headers={name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]},
            opened_s=time.monotonic(),
        )
        self._simulator.sdk.sockets.append(socket)
        self._simulator.notify()
        cut = partial(self._close, scope.get("client"))
        await SdkConnection(self._simulator, socket, receive, send, cut).serve()

    async def _answer(self, record: RequestRecord, body: JsonObject | None, connection: Connection) -> None:
        status, answer = 200, unknown_path(record.method, record.path)
        try:
            self._check_token(record)
            is_offered = record.path.startswith(_OFFERED[self._simulator.api])
            if is_offered and record.method == "POST" and record.path in _COMPLETIONS:
                if body is None:
                    raise bad_field("The request body is not a JSON object")
                inference = Inference(
                    simulator=self._simulator,
                    connection=connection,
                    record=record,
                    body=body,
                    is_text=record.path == "/v1/completions",
                )
                await inference.serve()
                return
            if is_offered:
                answer = await self._plain(record, body)
        except Refusal as refusal:
            status, answer = refusal.status, refusal.body
        record.status = status
        self._simulator.finish(record, "ok" if status == 200 and "error" not in answer else "error")
        await connection.send_json(status, answer)

    def _check_token(self, record: RequestRecord) -> None:
        token = self._simulator.api_token
        if token is None or record.path == "/lmstudio-greeting":
            return
        if record.headers.get("authorization") != f"Bearer {token}":
            raise unauthorized()

    async def _plain(self, record: RequestRecord, body: JsonObject | None) -> JsonObject:
        simulator, route = self._simulator, (record.method, record.path)
        loaded = simulator.loaded()
        if route == ("GET", "/lmstudio-greeting"):
            return {"lmstudio": True}
        if route == ("GET", "/props") and loaded:
            return llama_props(loaded[0])
        if route == ("POST", _CONTROL) and simulator.api == "llama.cpp":
            return self._control(body or {})
        if route == ("GET", "/v1/models") and simulator.api == "llama.cpp":
            return llama_models(loaded, tells_whole=simulator.tells_whole)
        if route == ("GET", "/v1/models"):
            return openai_models(simulator.models, loaded, simulator.jit)
        if route == ("GET", "/api/v0/models"):
            return v0_models(simulator.models, loaded)
        if route == ("GET", "/api/v1/models"):
            return v1_models(simulator.models, loaded)
        if route == ("POST", "/api/v1/models/load"):
            return await self._load(body or {})
        if route == ("POST", "/api/v1/models/unload"):
            return self._unload(body or {})
        if record.method == "GET" and record.path.startswith("/api/v0/models/"):
            return self._v0_model(record.path.removeprefix("/api/v0/models/"), loaded)
        return unknown_path(record.method, record.path)

    def _control(self, body: JsonObject) -> JsonObject:
        """llama.cpp's answers to its control route (seen with its build of 2026-10-11)."""
        mode, end = self._simulator.thought_control, self._simulator.thoughts.get(str(body.get("id")))
        if mode == "absent":
            raise Refusal(404, {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}})
        if body.get("action") != "reasoning_end":
            message = "unknown control action"
            raise Refusal(400, {"error": {"code": 400, "message": message, "type": "invalid_request_error"}})
        if end is None or mode == "refuses":
            return {"success": False, "message": "no active completion for this id"}
        if mode == "ends":
            end()
        return {"success": True}

    def _v0_model(self, name: str, loaded: list[Instance]) -> JsonObject:
        target = find_target(name, loaded, self._simulator.models)
        if target is None:
            raise model_not_found(name)
        if isinstance(target, Instance):
            return v0_model(target.model, target)
        return v0_model(target, None)

    async def _load(self, body: JsonObject) -> JsonObject:
        unknown = sorted(set(body) - _LOAD_KEYS)
        if unknown:
            raise bad_field(f"Unrecognized key(s) in object: {', '.join(unknown)}")
        name, window = body.get("model"), body.get("context_length")
        if not isinstance(name, str):
            raise bad_field("'model' field is required and must be a string")
        if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
            raise bad_field("'context_length' must be an integer")
        model = find_model(name, self._simulator.models)
        if model is None:
            raise model_not_found(name)
        try:
            instance = await self._simulator.load_slowly(model, window)
        except ValueError as error:
            raise bad_field(str(error)) from error
        answer: JsonObject = {
            "type": "embedding" if model.type == "embeddings" else "llm",
            "instance_id": instance.id,
            "load_time_seconds": self._simulator.load_ms / 1000,
            "status": "loaded",
        }
        if body.get("echo_load_config") is True:
            # The documented fields of this answer have no `parallel`, unlike the list.
            answer["load_config"] = {name: value for name, value in load_config(instance).items() if name != "parallel"}
        return answer

    def _unload(self, body: JsonObject) -> JsonObject:
        instance_id = body.get("instance_id")
        if not isinstance(instance_id, str):
            raise bad_field("'instance_id' field is required and must be a string")
        try:
            self._simulator.unload(instance_id)
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
def serve(simulator: Simulator, host: str = "127.0.0.1", port: int = 0) -> Iterator[Address]:
    """Serve `simulator` until the block ends; port 0 takes a free one.

    On leaving, open streams are cut at once and the thread has ended.

    Raises:
        OSError: the port is taken.
    """
    load_vocabulary()
    listener = _listen(host, port)
    server = _Server(simulator, listener)
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

    def __init__(self, simulator: Simulator, listener: socket.socket) -> None:
        self.listening = threading.Event()
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._application = Application(simulator, self._close_connection)
        config = uvicorn.Config(
            self._application,
            http="h11",
            # The one without warnings; older uvicorns have none of it, and then there are no SDKs.
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
