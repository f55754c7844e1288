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
from typing import NamedTuple, TypeAlias

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


class _Call(NamedTuple):
    endpoint: str
    answer: asyncio.Future[object]


@dataclass(slots=True)
class _Socket:
    """One server as one key sees it.

    Attributes:
        unknown: endpoints that it does not have.
        failures: in a row; after one it is asked again at `until_s`.
    """

    root: str
    api_key: str | None = field(repr=False)
    connection: _Connection | None = None
    reader: asyncio.Task[None] | None = None
    calls: dict[int, _Call] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    last_id: int = 0
    failures: int = 0
    until_s: float = -inf
    has_warned: bool = False


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
            answer = await self._called(socket, connection, endpoint, parameter)
        except CallRefused:
            socket.failures = 0
            raise
        except _Failed as failure:
            self._set_aside(socket, failure)
            raise
        socket.failures = 0
        return answer

    async def aclose(self) -> None:
        """Closes all sockets."""
        await ended([socket.reader for socket in self._sockets.values() if socket.reader is not None])
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _called(
        self,
        socket: _Socket,
        connection: _Connection,
        endpoint: str,
        parameter: JsonObject | None,
    ) -> object:
        socket.last_id += 1
        call_id = socket.last_id
        asked: dict[str, object] = {"type": "rpcCall", "endpoint": endpoint, "callId": call_id}
        if parameter is not None:
            asked["parameter"] = parameter
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        socket.calls[call_id] = _Call(endpoint, answer)
        try:
            # The limit holds for sending, too: a server may stop reading.
            return await asyncio.wait_for(_sent(connection, json.dumps(asked), answer), self._timeout_s)
        except asyncio.TimeoutError as exc:
            advice = "raise `ask_server_timeout_s` if it is only slow"
            raise _Failed(f"no answer to {endpoint} within {self._timeout_s:g} s", advice) from exc
        except (aiohttp.ClientError, ConnectionError) as exc:
            raise _Failed(f"the connection ended ({type(exc).__name__})", _OTHER_PROTOCOL) from exc
        finally:
            del socket.calls[call_id]

    async def _opened(self, socket: _Socket) -> _Connection:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            connection = await asyncio.wait_for(self._greeted(self._session, socket), self._timeout_s)
        except asyncio.TimeoutError as exc:
            raise _Failed(f"no connection within {self._timeout_s:g} s", _NO_PASSAGE) from exc
        except aiohttp.WSServerHandshakeError as exc:
            raise _Failed(f"HTTP {exc.status} where a WebSocket was to be opened", _NO_PASSAGE) from exc
        except (aiohttp.ClientError, OSError, TypeError, ValueError, RecursionError) as exc:
            raise _Failed(f"no connection ({type(exc).__name__})", _NO_PASSAGE) from exc
        socket.connection = connection
        socket.reader = asyncio.create_task(self._read(socket, connection))
        return connection

    async def _greeted(self, session: aiohttp.ClientSession, socket: _Socket) -> _Connection:
        scheme, _, rest = socket.root.partition("://")
        connection = await session.ws_connect(
            f"{'wss' if scheme == 'https' else 'ws'}://{rest}/llm",
            headers=bearer(socket.api_key),
            max_msg_size=MAX_BODY_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=self._timeout_s),
        )
        try:
            await connection.send_str(json.dumps(_credentials(socket.api_key)))
            answer = json.loads(await connection.receive_str())
        except BaseException:
            await connection.close()
            raise
        if not isinstance(answer, dict) or answer.get("success") is not True:
            await connection.close()
            raise _Failed("the key was refused", "give the deployment an `api_key` that LM Studio knows")
        return connection

    async def _read(self, socket: _Socket, connection: _Connection) -> None:
        """Hands answers to who waits for them, until the connection ends or has been idle for long."""
        failure = _Failed("it closed the connection in a call", _OTHER_PROTOCOL)
        try:
            while True:
                try:
                    message = await connection.receive(timeout=_IDLE_S)
                except asyncio.TimeoutError:
                    if socket.calls:
                        continue
                    break
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                if not is_quickly_read(message.data.encode("utf-8", "replace")) or not _is_taken(socket, message.data):
                    failure = _Failed("an answer that is not the protocol's", _OTHER_PROTOCOL)
                    break
        finally:
            if socket.connection is connection:
                socket.connection = None
            for call in socket.calls.values():
                if not call.answer.done():
                    call.answer.set_exception(failure)
            await connection.close()

    def _set_aside(self, socket: _Socket, failure: _Failed) -> None:
        """Asks a server no more for a while; of several calls that fail together, one counts."""
        if self._clock() < socket.until_s:
            return
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


async def _sent(connection: _Connection, asked: str, answer: asyncio.Future[object]) -> object:
    await connection.send_str(asked)
    return await answer


def _credentials(api_key: str | None) -> dict[str, object]:
    token = _TOKEN.fullmatch(api_key or "")
    identifier = token["identifier"] if token else f"guest:{uuid.uuid4()}"
    passkey = token["passkey"] if token else str(uuid.uuid4())
    return {"authVersion": 1, "clientIdentifier": identifier, "clientPasskey": passkey}


def _is_taken(socket: _Socket, text: str) -> bool:
    """Hands a message to the call that it answers; False where it is none of the protocol's.

    What it says in words may be a conversation's, and is not repeated.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(message, dict):
        return False
    kind, call_id = message.get("type"), message.get("callId")
    if kind == "communicationWarning":
        # Answers an unknown endpoint or a wrong parameter, and has no callId (lmstudio-js, `ServerPort.ts`).
        warning = str(message.get("warning"))
        answered = [call for call in socket.calls.values() if call.endpoint in warning]
        if "unknown endpoint" in warning:
            # After a few warnings it says nothing any more.
            socket.unknown.update(call.endpoint for call in answered)
    else:
        answered = [call for each, call in socket.calls.items() if each == call_id]
    for call in answered:
        if not call.answer.done():
            if kind == "rpcResult":
                call.answer.set_result(message.get("result"))
            else:
                call.answer.set_exception(CallRefused(f"LM Studio refused {call.endpoint}"))
    return True
