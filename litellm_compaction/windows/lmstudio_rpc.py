"""The protocol of LM Studio's SDKs: one WebSocket for each server and key, and the calls that it carries.

Called while a request waits, never on a timer. Only remote calls are made, which address loaded models; the protocol's
channels load models and generate, and none is opened (lmstudio-js 6ec11db, 2026-08-21, `lms-communication`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

import aiohttp

from litellm_compaction.concurrency import Flights, ended
from litellm_compaction.config import Settings
from litellm_compaction.core.messages import JsonObject
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import MAX_BODY_BYTES, bearer, is_quickly_read
from litellm_compaction.windows.lmstudio import server_root

logger = logging.getLogger("litellm_compaction")

# A token names the client and its passkey; without one LM Studio takes any guest (lmstudio-js, `LMStudioClient.ts`).
_TOKEN = re.compile(r"sk-lm-(?P<identifier>[^:]+):(?P<passkey>.+)")
# A socket that nobody has used for so long is closed.
_IDLE_S = 60.0
# A server that failed is asked again after this time, which doubles with each failure in a row.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 3600.0
_NO_PASSAGE = "let WebSockets to /llm pass through what is in front of LM Studio, or set `ask_server: off`"
_OTHER_PROTOCOL = "update LM Studio, or set `ask_server: off`"

_Connection: TypeAlias = "aiohttp.ClientWebSocketResponse[bool]"


class CallRefused(ServerUnavailable):
    """LM Studio took the call and refused it: the model is gone, its template raises, or there is no such call."""


class _Failed(ServerUnavailable):
    """The protocol does not pass; `advice` says what to change."""

    def __init__(self, failure: str, advice: str) -> None:
        super().__init__(failure)
        self.advice = advice


@dataclass(slots=True)
class _Socket:
    """One server as one key sees it.

    Attributes:
        calls: that wait for an answer, with their endpoints, by id.
        unknown: endpoints that it does not have.
        failures: in a row; after one it is asked again at `until_s`.
    """

    root: str
    api_key: str | None = field(repr=False)
    connection: _Connection | None = None
    reader: asyncio.Task[None] | None = None
    calls: dict[int, tuple[str, asyncio.Future[object]]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    last_id: int = 0
    failures: int = 0
    until_s: float = -inf
    has_warned: bool = False

    async def open(self, session: aiohttp.ClientSession, timeout_s: float) -> _Connection:
        """Connects and shows the key."""
        scheme, _, rest = self.root.partition("://")
        connection = await session.ws_connect(
            f"{'wss' if scheme == 'https' else 'ws'}://{rest}/llm",
            headers=bearer(self.api_key),
            max_msg_size=MAX_BODY_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=timeout_s),
        )
        try:
            await connection.send_str(json.dumps(_credentials(self.api_key)))
            answer = json.loads(await connection.receive_str())
        except BaseException:
            # Also on cancellation: no other code knows the connection yet.
            await connection.close()
            raise
        if not isinstance(answer, dict) or answer.get("success") is not True:
            await connection.close()
            raise _Failed("the key was refused", "give the deployment an `api_key` that LM Studio knows")
        self.connection = connection
        self.reader = asyncio.create_task(self._read(connection))
        return connection

    async def ask(self, connection: _Connection, endpoint: str, parameter: JsonObject | None) -> object:
        """The answer to a call."""
        self.last_id += 1
        call_id = self.last_id
        with_parameter = {} if parameter is None else {"parameter": parameter}
        asked = {"type": "rpcCall", "endpoint": endpoint, "callId": call_id, **with_parameter}
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.calls[call_id] = endpoint, answer
        try:
            await connection.send_str(json.dumps(asked))
            return await answer
        finally:
            del self.calls[call_id]

    async def _read(self, connection: _Connection) -> None:
        """Hands answers to their callers, until the connection ends or has been idle for long."""
        failure = _Failed("it closed the connection in a call", _OTHER_PROTOCOL)
        try:
            while True:
                try:
                    message = await connection.receive(timeout=_IDLE_S)
                except asyncio.TimeoutError:
                    if self.calls:
                        continue
                    break
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                if not is_quickly_read(message.data.encode("utf-8", "replace")) or not self._takes(message.data):
                    failure = _Failed("an answer that is not the protocol's", _OTHER_PROTOCOL)
                    break
        finally:
            if self.connection is connection:
                self.connection = None
            for _, answer in self.calls.values():
                if not answer.done():
                    answer.set_exception(failure)
            await connection.close()

    def _takes(self, text: str) -> bool:
        """Hands a message to the call that it answers; False if it is none of the protocol's.

        Its words may be a conversation's, and are not repeated.
        """
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return False
        if not isinstance(message, dict):
            return False
        kind, warning = message.get("type"), ""
        if kind == "communicationWarning":
            # Answers an unknown endpoint or a wrong parameter, and has no callId (lmstudio-js, `ServerPort.ts`).
            warning = str(message.get("warning"))
        for call_id, (endpoint, answer) in self.calls.items():
            if not (endpoint in warning if warning else call_id == message.get("callId")):
                continue
            if "unknown endpoint" in warning:
                # After a few warnings there are none.
                self.unknown.add(endpoint)
            if not answer.done() and kind == "rpcResult":
                answer.set_result(message.get("result"))
            elif not answer.done():
                answer.set_exception(CallRefused(f"LM Studio refused {endpoint}"))
        return True


class LMStudioRpc:
    """The sockets to all servers, opened in the running loop when a call needs them.

    Args:
        is_on: whether anything is asked at all.
        timeout_s: limit for opening a socket, and for each call.
        clock: seconds, monotonic.
    """

    def __init__(
        self, *, is_on: bool = True, timeout_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_on = is_on
        self._timeout_s = timeout_s
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._sockets: dict[tuple[str, str | None], _Socket] = {}
        self._openings: Flights[_Connection] = Flights()

    @classmethod
    def of(cls, settings: Settings) -> LMStudioRpc:
        """As an operator's settings allow it."""
        return cls(is_on=settings.ask_server == "auto", timeout_s=settings.ask_server_timeout_s)

    def is_usable(self, api_base: str, api_key: str | None) -> bool:
        """Whether a server may be asked now, without asking it."""
        socket = self._sockets.get((server_root(api_base), api_key))
        return self._is_on and (socket is None or self._clock() >= socket.until_s)

    async def call(self, api_base: str, api_key: str | None, endpoint: str, parameter: JsonObject | None) -> object:
        """The result of a remote call, as parsed JSON.

        Args:
            api_base: of the server.
            api_key: as for its other questions.
            endpoint: of `/llm`; never one that loads a model.
            parameter: None for a call without one.

        Raises:
            CallRefused: the server answered that it does not do that.
            ServerUnavailable: it is not asked now, or did not answer in time; then it is left alone for a while.
        """
        root = server_root(api_base)
        if not self.is_usable(api_base, api_key):
            raise ServerUnavailable(f"{root} is not asked by LM Studio's protocol now")
        socket = self._sockets.setdefault((root, api_key), _Socket(root, api_key))
        if endpoint in socket.unknown:
            raise CallRefused(f"LM Studio has no {endpoint}")
        try:
            connection = socket.connection
            if connection is None:
                connection = await self._openings.join((root, api_key), lambda: self._opened(socket))
            # The limit holds for sending, too: a server may stop reading.
            answer = await asyncio.wait_for(socket.ask(connection, endpoint, parameter), self._timeout_s)
        except CallRefused:
            socket.failures = 0
            raise
        except asyncio.TimeoutError as exc:
            advice = "raise `ask_server_timeout_s` if it is only slow, or set `ask_server: off`"
            raise self._aside(socket, _Failed(f"no answer to {endpoint} within {self._timeout_s:g} s", advice)) from exc
        except _Failed as failure:
            raise self._aside(socket, failure) from None
        except (aiohttp.ClientError, ConnectionError) as exc:
            ended_early = _Failed(f"the connection ended ({type(exc).__name__})", _OTHER_PROTOCOL)
            raise self._aside(socket, ended_early) from exc
        socket.failures = 0
        return answer

    async def aclose(self) -> None:
        """Closes all sockets."""
        await ended([socket.reader for socket in self._sockets.values() if socket.reader is not None])
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _opened(self, socket: _Socket) -> _Connection:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            return await asyncio.wait_for(socket.open(self._session, self._timeout_s), self._timeout_s)
        except asyncio.TimeoutError as exc:
            raise _Failed(f"no connection within {self._timeout_s:g} s", _NO_PASSAGE) from exc
        except aiohttp.WSServerHandshakeError as exc:
            raise _Failed(f"HTTP {exc.status} where a WebSocket was to be opened", _NO_PASSAGE) from exc
        except (aiohttp.ClientError, OSError, TypeError, ValueError, RecursionError) as exc:
            raise _Failed(f"no connection ({type(exc).__name__})", _NO_PASSAGE) from exc

    def _aside(self, socket: _Socket, failure: _Failed) -> _Failed:
        """Asks a server no more for a while; of several calls that fail together, one counts."""
        if self._clock() < socket.until_s:
            return failure
        pause_s = min(_FIRST_PAUSE_S * 2**socket.failures, _LONGEST_PAUSE_S)
        socket.failures += 1
        socket.until_s = self._clock() + pause_s
        if socket.reader is not None:
            socket.reader.cancel()
        if not socket.has_warned:
            socket.has_warned = True
            logger.warning(
                "ask_server server=%s: LM Studio's own protocol does not answer: %s. Counts are estimated meanwhile "
                "and corrected by usage; it is asked again in %.0f s (logged once). To have exact counts, %s.",
                socket.root.rpartition("@")[2],
                failure,
                pause_s,
                failure.advice,
            )
        return failure


def _credentials(api_key: str | None) -> dict[str, object]:
    token = _TOKEN.fullmatch(api_key or "")
    identifier = token["identifier"] if token else f"guest:{uuid.uuid4()}"
    return {
        "authVersion": 1,
        "clientIdentifier": identifier,
        "clientPasskey": token["passkey"] if token else str(uuid.uuid4()),
    }
