"""A network inside of this process: HTTP and WebSockets between applications that share one event loop.

A stream is as harsh as a real one: a piece is handed over when the reader asks for it or a few are waiting, a reader
that closes is a client that has left, and a server may cut the connection in the middle of an answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar
from unittest.mock import patch
from urllib.parse import urlsplit

import aiohttp
import httpx

Application: TypeAlias = Callable[..., Awaitable[None]]
T = TypeVar("T")
_Event: TypeAlias = MutableMapping[str, Any]
# Pieces that wait for a reader, as in the buffers of a socket.
_MOST_WAITING = 16
_PEERS = itertools.count(1)


class Network:
    """The servers that are reached without a socket, by host and port; others are reached as ever."""

    def __init__(self) -> None:
        self.servers: dict[str, Application | None] = {}
        self._open: dict[Any, _Exchange] = {}
        self._ports = itertools.count(20001)

    def address(self) -> str:
        """A base URL on this machine that nobody else has here."""
        return f"http://127.0.0.1:{next(self._ports)}"

    def attach(self, base_url: str, server: Application) -> None:
        """Lets `server` answer at an address."""
        self.servers[urlsplit(base_url).netloc] = server

    def detach(self, base_url: str) -> None:
        """From now on connections to an address are refused."""
        self.servers[urlsplit(base_url).netloc] = None

    def cut(self, peer: Any) -> None:
        """Ends the connection of a client as it is."""
        if exchange := self._open.get(peer):
            exchange.cut()

    def has(self, netloc: str) -> bool:
        """Tells whether a server at HOST:PORT is one of these, now or earlier."""
        return netloc in self.servers

    async def request(self, request: httpx.Request) -> httpx.Response:
        """Answers an HTTP request; the body of the answer comes as it is read."""
        server = self.servers[request.url.netloc.decode()]
        if server is None:
            raise httpx.ConnectError("All connection attempts failed", request=request)
        exchange = _Exchange(server, request, await request.aread(), self._open)
        return await exchange.response()

    async def socket(self, url: str, headers: list[tuple[bytes, bytes]], longest: int) -> Socket:
        """Opens a WebSocket that takes messages of so many bytes."""
        server = self.servers[urlsplit(url).netloc]
        if server is None:
            raise aiohttp.ClientConnectionError("nobody listens")
        return await Socket.opened(server, url, headers, longest)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Sends what httpx and aiohttp would send over sockets through this network.

        The patch stands at the transport, the last place before the socket: clients, pools and limits are real.
        """
        network, by_socket = self, httpx.AsyncHTTPTransport.handle_async_request
        socket_by_socket = aiohttp.ClientSession.ws_connect

        async def handled(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
            if network.has(request.url.netloc.decode()):
                return await network.request(request)
            return await by_socket(transport, request)

        def connected(session: aiohttp.ClientSession, url: str, *, headers: Any = None, **options: Any) -> Any:
            if not network.has(urlsplit(str(url)).netloc):
                return socket_by_socket(session, url, headers=headers, **options)
            pairs = [(str(name).lower().encode(), str(value).encode()) for name, value in dict(headers or {}).items()]
            return _Opening(network.socket(str(url), pairs, options["max_msg_size"]))

        with (
            patch.object(httpx.AsyncHTTPTransport, "handle_async_request", handled),
            patch.object(aiohttp.ClientSession, "ws_connect", connected),
        ):
            yield


class _Exchange(httpx.AsyncByteStream):
    """One request and its answer; closing it before its end is a client that leaves."""

    def __init__(self, server: Application, request: httpx.Request, body: bytes, opened: dict[Any, _Exchange]) -> None:
        self._peer = ("127.0.0.1", next(_PEERS))
        self._opened = opened
        self._request = request
        self._body: bytes | None = body
        self._head: asyncio.Future[_Event] = asyncio.get_running_loop().create_future()
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)
        self._left = asyncio.Event()
        self._is_cut = self._is_whole = False
        self._patience_s: float | None = (request.extensions.get("timeout") or {}).get("read")
        url = request.url
        scope = {
            "type": "http",
            # As uvicorn says it: an application then waits for the client to leave.
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.partition(b"?")[0],
            "query_string": url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": self._peer,
            "server": (url.host, url.port or 80),
            "state": {},
        }
        opened[self._peer] = self
        self._task = asyncio.ensure_future(server(scope, self._receive, self._send))
        self._task.add_done_callback(self._ended)

    async def response(self) -> httpx.Response:
        try:
            head = await self._in_time(asyncio.shield(self._head))
        except BaseException:
            await self.aclose()
            raise
        return httpx.Response(head["status"], headers=head.get("headers", []), stream=self, request=self._request)

    def cut(self) -> None:
        self._is_cut = True
        self._left.set()
        self._end()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not (self._is_cut and self._pieces.empty()):
            piece = await self._piece()
            if piece is None:
                break
            yield piece
        if not self._is_whole:
            raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")

    async def _piece(self) -> bytes | None:
        return await self._in_time(self._pieces.get()) if self._pieces.empty() else self._pieces.get_nowait()

    async def _in_time(self, waited_for: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(waited_for, self._patience_s)
        except asyncio.TimeoutError:
            raise httpx.ReadTimeout("", request=self._request) from None

    async def aclose(self) -> None:
        self._left.set()
        # A server that waits for this reader goes on, into nothing.
        while not self._pieces.empty():
            self._pieces.get_nowait()

    async def _receive(self) -> _Event:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: _Event) -> None:
        if self._left.is_set():
            return
        if event["type"] == "http.response.start":
            self._head.set_result(event)
            return
        if event.get("body"):
            await self._put(event["body"])
        if not event.get("more_body"):
            self._is_whole = True
            self._end()

    async def _put(self, piece: bytes) -> None:
        """Waits for a reader that is behind, until it leaves."""
        left = asyncio.ensure_future(self._left.wait())
        put = asyncio.ensure_future(self._pieces.put(piece))
        await asyncio.wait({left, put}, return_when=asyncio.FIRST_COMPLETED)
        for task in (left, put):
            task.cancel()

    def _end(self) -> None:
        if not self._head.done():
            self._head.set_exception(httpx.RemoteProtocolError("Server disconnected without sending a response."))
            self._head.exception()
        if self._pieces.full():
            # The reader finds the end behind what waits.
            self._pieces = _with_end(self._pieces)
        else:
            self._pieces.put_nowait(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._opened.pop(self._peer, None)
        failed = not task.cancelled() and task.exception() is not None
        if failed and not self._head.done():
            # As uvicorn answers for an application that fails before it has answered.
            self._head.set_result({"status": 500, "headers": [(b"content-type", b"text/plain; charset=utf-8")]})
            self._pieces.put_nowait(b"Internal Server Error")
            self._is_whole = True
            self._end()
        elif not (self._is_whole or self._is_cut):
            self._end()


def _with_end(pieces: asyncio.Queue[bytes | None]) -> asyncio.Queue[bytes | None]:
    longer: asyncio.Queue[bytes | None] = asyncio.Queue()
    while not pieces.empty():
        longer.put_nowait(pieces.get_nowait())
    longer.put_nowait(None)
    return longer


class _Opening:
    """What `async with session.ws_connect(…)` needs."""

    def __init__(self, opening: Awaitable[Socket]) -> None:
        self._opening = opening

    async def __aenter__(self) -> Socket:
        self._socket = await self._opening
        return self._socket

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()


class Socket:
    """The client's side of a WebSocket, with the methods of aiohttp's that are used."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._to_server: asyncio.Queue[_Event] = asyncio.Queue()
        self._to_client: asyncio.Queue[_Event] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def opened(cls, server: Application, url: str, headers: list[tuple[bytes, bytes]], longest: int) -> Socket:
        made, parts = cls(longest), urlsplit(url)
        scope = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": parts.path,
            "query_string": parts.query.encode(),
            "headers": headers,
            "client": ("127.0.0.1", next(_PEERS)),
            "subprotocols": [],
        }
        made._to_server.put_nowait({"type": "websocket.connect"})
        made._task = asyncio.ensure_future(server(scope, made._to_server.get, made._to_client.put))
        made._task.add_done_callback(lambda _: made._to_client.put_nowait({"type": "websocket.close"}))
        try:
            event = await made._to_client.get()
        except BaseException:
            await made.close()
            raise
        if event["type"] != "websocket.accept":
            await made.close()
            info = aiohttp.RequestInfo(url, "GET", {}, url)  # type: ignore[arg-type]
            raise aiohttp.WSServerHandshakeError(info, (), status=event.get("status", 403), message="refused")
        return made

    async def send_str(self, text: str) -> None:
        self._to_server.put_nowait({"type": "websocket.receive", "text": text})

    async def send_json(self, value: object) -> None:
        await self.send_str(json.dumps(value))

    async def receive_json(self) -> Any:
        event = await self._to_client.get()
        if event["type"] != "websocket.send":
            raise TypeError("the connection is closed")
        return json.loads(event["text"])

    async def close(self) -> None:
        self._to_server.put_nowait({"type": "websocket.disconnect", "code": 1000})
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def __aiter__(self) -> Socket:
        return self

    async def __anext__(self) -> aiohttp.WSMessage:
        event = await self._to_client.get()
        if event["type"] != "websocket.send":
            raise StopAsyncIteration
        if len(event["text"].encode()) > self._longest:
            return aiohttp.WSMessage(aiohttp.WSMsgType.ERROR, None, None)
        return aiohttp.WSMessage(aiohttp.WSMsgType.TEXT, event["text"], None)
