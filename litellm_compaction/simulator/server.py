"""How a simulator is served over HTTP: on a free port, in a thread, while a `with` block lasts."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from .app import Application
from .simulator import Simulator
from .vocabulary import load_vocabulary

_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a simulator listens."""

    host: str
    port: int

    @property
    def base_url(self) -> str:
        """The URL without a path, such as http://127.0.0.1:43211."""
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
    # asyncio turns Nagle's delay off only where the protocol is named; with it each request takes 40 ms more.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except BaseException:
        # Nobody else knows the socket yet; Ctrl-C included.
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
            ws="none",
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
        """Serve until `stop` is called."""
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
