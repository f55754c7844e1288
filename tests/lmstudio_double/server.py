"""Serves the double: the application with older versions' and llama.cpp's paths, and the SDKs' sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from litellm_compaction.simulator import server as simulated
from litellm_compaction.simulator.inference import Connection, Send
from litellm_compaction.simulator.messages import JsonObject
from litellm_compaction.simulator.server import Address, Receive
from litellm_compaction.simulator.simulator import RequestRecord

from .catalog import llama_models, llama_props, v0_models
from .inference import Inference
from .messages import unauthorized
from .rpc import SdkConnection
from .script import SdkSocket
from .simulator import Api, Simulator

_OFFERED: dict[Api, tuple[str, ...]] = {
    "v1": ("/v1/", "/api/v0/", "/api/v1/", "/lmstudio-greeting"),
    "v0": ("/v1/", "/api/v0/", "/lmstudio-greeting"),
    "openai": ("/v1/",),
    "llama.cpp": ("/v1/", "/props"),
}


class Application(simulated.Application):
    """The ASGI application of one double."""

    simulator: Simulator

    async def after_client_left(self, record: RequestRecord, job: asyncio.Future[None]) -> None:
        if self.simulator.runs_on and not record.streamed:
            stopping = asyncio.ensure_future(self.stopping.wait())
            await asyncio.wait({job, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()

    async def serve_socket(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        socket = SdkSocket(namespace=scope["path"].lstrip("/"))
        self.simulator.sdk.sockets.append(socket)
        self.simulator.notify()
        cut = partial(self.close, scope.get("client"))
        await SdkConnection(self.simulator, socket, receive, send, cut).serve()

    async def infer(self, record: RequestRecord, body: JsonObject, connection: Connection) -> None:
        is_text = record.path == "/v1/completions"
        inference = Inference(
            simulator=self.simulator, connection=connection, record=record, body=body, is_text=is_text
        )
        await inference.serve()

    def offers(self, record: RequestRecord) -> bool:
        self._check_token(record)
        return record.path.startswith(_OFFERED[self.simulator.api])

    def _check_token(self, record: RequestRecord) -> None:
        token = self.simulator.api_token
        if token is None or record.path == "/lmstudio-greeting":
            return
        if record.headers.get("authorization") != f"Bearer {token}":
            raise unauthorized()

    async def plain(self, record: RequestRecord, body: JsonObject | None) -> JsonObject:
        simulator, route = self.simulator, (record.method, record.path)
        loaded = simulator.loaded()
        if route == ("GET", "/props") and loaded:
            return llama_props(loaded[0])
        if route == ("GET", "/v1/models") and simulator.api == "llama.cpp":
            return llama_models(loaded, tells_whole=simulator.tells_whole)
        if route == ("GET", "/api/v0/models"):
            return v0_models(simulator.models, loaded)
        return await super().plain(record, body)


@contextmanager
def serve(simulator: Simulator, port: int = 0) -> Iterator[Address]:
    """As the simulator's."""
    with simulated.serve(simulator, port, Application) as address:
        yield address
