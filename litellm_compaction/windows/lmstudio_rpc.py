"""The protocol of LM Studio's SDKs: one WebSocket for each server and key, and the calls that it carries.

Called while a request waits, never on a timer. Only remote calls are made, which address loaded models; the protocol's
channels load models and generate, and none is opened (lmstudio-js, `lms-communication`).

A loaded model is asked by them, with a request in the protocol's words (`ChatHistoryData.ts` and `LLMToolUseSetting.ts`
of lmstudio-js 6ec11db): LM Studio makes the same of a chat completion, where `developer` becomes `system`, too
(lmstudio-bug-tracker 1730). An unanswered question is None: the caller goes on without it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf
from typing import NamedTuple, TypeAlias

import aiohttp
import anyio

from litellm_compaction.concurrency import Bounded, Rests, Tasks, ended
from litellm_compaction.config import Settings
from litellm_compaction.core.messages import JsonObject, JsonValue, Message, Request, ToolCall
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import MAX_BODY_BYTES, at, bearer, is_quickly_read, positive, text_at
from litellm_compaction.windows.lmstudio import server_root

# A longer question would hold others up while it is written, for more than 5 ms (CPython 3.11).
_MOST_CHARS = 1_000_000
# An agent's tools may take so long between two requests.
_SHORT_TTL_S = 300.0
_ROLES = {"developer": "system", "system": "system", "assistant": "assistant", "tool": "tool", "function": "tool"}
_PARAMETERS = ("type", "properties", "required", "additionalProperties", "$defs")
logger = logging.getLogger("litellm_compaction")

# Names the client and its passkey; without one LM Studio takes any guest (lmstudio-js, `LMStudioClient.ts`).
_TOKEN = re.compile(r"sk-lm-([^:]+):(.+)")
_IDLE_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 3600.0
_NO_PASSAGE = "let WebSockets to /llm pass through what is in front of LM Studio"

_Connection: TypeAlias = "aiohttp.ClientWebSocketResponse[bool]"
_Place: TypeAlias = "tuple[str, str | None]"


class CallRefused(ServerUnavailable):
    """LM Studio took the call and refused it: the model is gone, its template raises, or there is no such call."""


class _Failed(ServerUnavailable):
    """The protocol does not pass; `advice` names the remedy."""

    def __init__(self, failure: str, advice: str = "update LM Studio") -> None:
        super().__init__(failure)
        self.advice = advice


class _Call(NamedTuple):
    endpoint: str
    text: str
    answer: asyncio.Future[object]

    def refuse(self, failure: ServerUnavailable) -> None:
        if not self.answer.done():
            self.answer.set_exception(failure)


@dataclass(slots=True, eq=False)
class _Socket:
    """One server as one key sees it; endpoints that it does not have are `unknown`."""

    connection: _Connection | None = None
    reader: asyncio.Task[None] | None = None
    calls: dict[object, _Call] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    ids: Iterator[int] = field(default_factory=itertools.count)

    async def serve(self, connection: _Connection, api_key: str | None) -> None:
        """Shows the key, sends waiting calls, and hands answers to their calls until nothing has come for long.

        A _Failed says that the key is refused, the connection ended in a call, or an answer is not the protocol's.
        """
        await connection.send_json(_credentials(api_key))
        answer = await connection.receive_json()
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise _Failed("the key was refused", "give the deployment an `api_key` that LM Studio knows")
        waiting, self.connection = list(self.calls.values()), connection
        for call in waiting:
            await connection.send_str(call.text)
        try:
            async for message in connection:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                self._hand_over(message.data)
        except asyncio.TimeoutError:
            return
        if self.calls:
            raise _Failed("it closed the connection in a call")

    def _hand_over(self, text: str) -> None:
        try:
            message = json.loads(text if is_quickly_read(text.encode("utf-8", "replace")) else "")
            kind, call = message["type"], self.calls.get(message.get("callId"))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            # Its words may be a conversation's.
            raise _Failed("an answer that is not the protocol's") from None
        refused = [call] if call is not None else []
        if kind == "communicationWarning":
            # Of a wrong parameter or an unknown endpoint, without callId and five times at most (`ServerPort.ts`).
            warning = str(message.get("warning"))
            refused = [each for each in self.calls.values() if each.endpoint in warning]
            self.unknown |= {each.endpoint for each in refused if "unknown endpoint" in warning}
        elif kind == "rpcResult" and call is not None and not call.answer.done():
            call.answer.set_result(message.get("result"))
        for each in refused:
            each.refuse(CallRefused(f"LM Studio refused {each.endpoint}"))


class LMStudioRpc:
    """The sockets to all servers, opened in the running loop when a call needs them.

    Args:
        is_on: whether any server is asked.
        timeout_s: limit for a call, with the opening of its socket.
    """

    def __init__(
        self, *, is_on: bool = True, timeout_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_on = is_on
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._sockets: Bounded[_Place, _Socket] = Bounded()
        self._readers = Tasks()
        self._rests: Rests[_Place] = Rests(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, clock)

    @classmethod
    def of(cls, settings: Settings) -> LMStudioRpc:
        """Builds it from an operator's settings."""
        return cls(is_on=settings.constants.ask_server, timeout_s=settings.constants.ask_server_timeout_s)

    def is_usable(self, api_base: str, api_key: str | None) -> bool:
        """Returns True if a server may be asked now."""
        return self._is_on and self._rests.is_over((server_root(api_base), api_key))

    async def call(self, api_base: str, api_key: str | None, endpoint: str, parameter: JsonObject | None) -> object:
        """The result of a remote call to `/llm`, as parsed JSON; never of one that loads a model.

        Raises:
            CallRefused: the server refused the call.
            ServerUnavailable: it is not asked now, or did not answer in time; then it is left alone for a while.
        """
        place = server_root(api_base), api_key
        if not self.is_usable(*place):
            raise ServerUnavailable(f"{place[0]} is not asked by LM Studio's protocol now")
        socket = self._sockets.setdefault(place, _Socket())
        if endpoint in socket.unknown:
            raise CallRefused(f"LM Studio has no {endpoint}")
        call_id, connection = next(socket.ids), socket.connection
        asked = {"type": "rpcCall", "endpoint": endpoint, "callId": call_id}
        text = json.dumps(asked if parameter is None else {**asked, "parameter": parameter})
        call = socket.calls[call_id] = _Call(endpoint, text, asyncio.get_running_loop().create_future())

        async def answered() -> object:
            if connection is not None:
                await connection.send_str(text)
            return await call.answer

        if connection is None and (socket.reader is None or socket.reader.done()):
            socket.reader = self._readers.begin(self._read(place, socket))
        try:
            with anyio.fail_after(self._timeout_s):
                answer = await answered()
        except TimeoutError:
            failure = _Failed(f"no connection within {self._timeout_s:g} s", _NO_PASSAGE)
            if socket.connection is not None:
                slow = "use a LM Studio that answers faster"
                failure = _Failed(f"no answer to {endpoint} within {self._timeout_s:g} s", slow)
            if socket.reader is not None:
                socket.reader.cancel()
            raise self._left(place, socket, failure) from None
        except (aiohttp.ClientError, ConnectionError) as exc:
            raise ServerUnavailable(f"the connection ended ({type(exc).__name__})") from exc
        finally:
            del socket.calls[call_id]
        self._rests.end(place)
        return answer

    async def aclose(self) -> None:
        """Closes all sockets."""
        await ended(self._readers)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _read(self, place: _Place, socket: _Socket) -> None:
        """Opens a connection and serves the calls of a socket, again as long as there are any."""
        self._session = self._session or aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        limits = aiohttp.ClientWSTimeout(ws_receive=_IDLE_S, ws_close=self._timeout_s)
        url, headers = f"{place[0]}/llm", bearer(place[1])
        try:
            while socket.calls:
                async with self._session.ws_connect(
                    url, headers=headers, max_msg_size=MAX_BODY_BYTES, timeout=limits
                ) as connection:
                    try:
                        await socket.serve(connection, place[1])
                    except _Failed as failure:
                        # Before the connection is closed, which takes its time.
                        self._left(place, socket, failure)
                        return
                    finally:
                        socket.connection = None
        except (aiohttp.ClientError, OSError, TypeError, ValueError, RecursionError, asyncio.TimeoutError) as exc:
            what, advice = f"no connection ({type(exc).__name__})", _NO_PASSAGE
            if isinstance(exc, aiohttp.WSServerHandshakeError):
                what = f"HTTP {exc.status} where a WebSocket was to be opened"
                # The simulator says so: there is nothing to be mended.
                advice = "" if exc.status == HTTPStatus.NOT_IMPLEMENTED else _NO_PASSAGE
            self._left(place, socket, _Failed(what, advice))

    def _left(self, place: _Place, socket: _Socket, failure: _Failed) -> _Failed:
        """Fails the calls of a socket for good, and asks its server no more for a while."""
        self._sockets.pop(place, None)
        for call in socket.calls.values():
            call.refuse(failure)
        if self._rests.begin(place) and failure.advice:
            logger.warning(
                "ask_server server=%s: LM Studio's own protocol does not answer: %s. Counts are estimated meanwhile "
                "and corrected by usage; it is asked again in %.0f s (logged once). To have exact counts, %s.",
                place[0].rpartition("@")[2],
                failure,
                _FIRST_PAUSE_S,
                failure.advice,
            )
        return failure


def _credentials(api_key: str | None) -> dict[str, object]:
    token = _TOKEN.fullmatch(api_key or "")
    identifier, passkey = token.groups() if token else (f"guest:{uuid.uuid4()}", str(uuid.uuid4()))
    return {"authVersion": 1, "clientIdentifier": identifier, "clientPasskey": passkey}


class LoadedModel(NamedTuple):
    """A loaded copy as the protocol lists it; its `reference` is another one after each load."""

    identifier: str
    context_length: int | None
    reference: str
    ttl_ms: int | None


class ModelSettings(NamedTuple):
    """LM Studio's settings for a model's answers, for people; `warnings` say the better choices for this package."""

    words: str
    warnings: tuple[str, ...]


class InstanceAddress(NamedTuple):
    """A loaded copy of a model: its server, the key to ask with, its identifier."""

    rpc: LMStudioRpc
    api_base: str
    api_key: str | None
    identifier: str

    async def count_tokens(self, request: Request) -> int | None:
        """The tokens of a request's rendered prompt, without images and reasoning."""
        text = await self.render(request)
        if text is None or len(text) > 4 * _MOST_CHARS:
            return None
        return positive(at(await self._ask("countTokens", inputString=text), "tokenCount"))

    async def render(self, request: Request, *, without_bos: bool = False) -> str | None:
        """A request as the model's template writes it, followed by the parts that the protocol cannot say.

        None for more than 1 MB. With `without_bos` the token that begins every prompt is left out.
        """
        arguments = (call.arguments for message in request.messages for call in message.calls)
        if sum(map(len, (*arguments, *(message.text for message in request.messages)))) > _MOST_CHARS:
            return None
        history = history_of(request)
        options: JsonObject = {"toolDefinitions": history.tools} if history.tools else {}
        answer = await self._ask(
            "applyPromptTemplate",
            history={"messages": history.messages},
            predictionConfigStack={"layers": []},
            opts={**options, "omitBosToken": True} if without_bos else options,
        )
        formatted = at(answer, "formatted")
        return formatted + history.unsaid if isinstance(formatted, str) else None

    async def list_loaded(self) -> frozenset[LoadedModel] | None:
        """Every language model that its server has loaded."""
        try:
            rows = await self.rpc.call(self.api_base, self.api_key, "listLoaded", None)
        except ServerUnavailable:
            return None
        if not isinstance(rows, list) or not all(text_at(row, "identifier") for row in rows):
            return None
        return frozenset(
            LoadedModel(
                text_at(row, "identifier"),
                positive(at(row, "contextLength")),
                text_at(row, "instanceReference"),
                positive(at(row, "ttlMs")),
            )
            for row in rows
        )

    async def settings(self) -> ModelSettings | None:
        """The settings with which it would answer a request."""
        fields = at(await self._ask("getBasePredictionConfig"), "fields")
        if not isinstance(fields, list):
            return None
        loaded = await self.list_loaded() or ()
        ttl_s = next((row.ttl_ms / 1000 for row in loaded if row.ttl_ms and row.identifier == self.identifier), inf)
        values = {text_at(each, "key").removeprefix("llm.prediction."): at(each, "value") for each in fields}
        policy, thinks = text_at(values, "contextOverflowPolicy"), values.get("reasoning.enableThinking")
        words, warnings = [f"a prompt that is too long: {policy}"] if policy else [], []
        if policy == "rollingWindow":
            what = "drops the oldest messages, the system message first, of a prompt that is too long after all"
            warnings.append(f"LM Studio {what}: choose `stopAtLimit` as its context overflow policy.")
        if ttl_s < inf:
            words.append(f"unloaded after {ttl_s / 60:,.0f} min without a request")
        if ttl_s < _SHORT_TTL_S:
            what = f"LM Studio unloads the model after {ttl_s:,.0f} s without a request"
            why = "a load takes long, and may choose another context length"
            warnings.append(f"{what}; {why}: give it a longer idle time to live.")
        if isinstance(thinks, bool):
            words.append(f"thinking {'on' if thinks else 'off'}")
        return ModelSettings(", ".join(words), tuple(warnings))

    async def is_busy(self) -> bool:
        """Returns True if it works on a prompt or an answer, or has some waiting; False if it does not say."""
        # The call is experimental (lmstudio-js 6ec11db).
        answer = await self._ask("getInstanceProcessingState", throwIfNotFound=False)
        return text_at(answer, "status") not in ("", "idle") or positive(at(answer, "queued")) is not None

    async def _ask(self, endpoint: str, **parameter: JsonValue) -> object:
        # A query for a loaded model: it loads none.
        asked: JsonObject = {"specifier": {"type": "query", "query": {"identifier": self.identifier}}, **parameter}
        try:
            return await self.rpc.call(self.api_base, self.api_key, endpoint, asked)
        except ServerUnavailable:
            return None


class History(NamedTuple):
    """A request in the protocol's shape, a message for each of its messages.

    `unsaid` is the JSON of what it has no place for, to be counted besides; reasoning and images are not in it.
    """

    messages: list[JsonObject]
    tools: list[JsonObject]
    unsaid: str


def history_of(request: Request) -> History:
    """The request in the protocol's words."""
    left: list[object] = []
    messages = [_said(message, left) for message in request.messages]
    tools = [said for tool in request.tools if (said := _tool(tool, left)) is not None]
    return History(messages, tools, json.dumps(left, ensure_ascii=False, default=str) if left else "")


def _said(message: Message, left: list[object]) -> JsonObject:
    role, name, content = _ROLES.get(message.role, "user"), message.raw.get("name"), message.raw.get("content")
    if role != "assistant":
        left += ([call.name, call.arguments] for call in message.calls)
    if role == "tool":
        fields = {"toolCallId": message.call_id, "name": name}
        given = {key: value for key, value in fields.items() if isinstance(value, str) and value}
        return {"role": role, "content": [{"type": "toolCallResult", "content": message.text, **given}]}
    # The second is the form that came before `tool_calls`.
    left += (value for value in (name, message.raw.get("function_call")) if isinstance(value, (str, Mapping)))
    texts: list[object] = [message.text] if message.text or not message.calls else []
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    parts: list[JsonValue] = [{"type": "text", "text": text} for text in texts if isinstance(text, str)]
    if role == "assistant":
        parts += (_called(call, left) for call in message.calls)
    return {"role": role, "content": parts}


def _called(call: ToolCall, left: list[object]) -> JsonObject:
    try:
        # `int` refuses NaN and Infinity, which JSON does not have.
        arguments = json.loads(call.arguments, parse_constant=int)
    except (RecursionError, ValueError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {}
        left.append(call.arguments)
    said: JsonObject = {"type": "function", "name": call.name, "arguments": arguments}
    return {"type": "toolCallRequest", "toolCallRequest": {**said, "id": call.id} if call.id else said}


def _tool(tool: JsonValue, left: list[object]) -> JsonObject | None:
    """A function as the protocol takes it; other fields, which LM Studio drops there, are left."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        left.append(tool)
        return None
    said, parameters = {"name": function["name"]}, function.get("parameters")
    if isinstance(function.get("description"), str):
        said["description"] = function["description"]
    if isinstance(parameters, Mapping) and parameters.get("type", "object") == "object":
        known = {key: value for key, value in parameters.items() if key in _PARAMETERS}
        said["parameters"] = {"properties": {}, **known, "type": "object"}
    schema = parameters if isinstance(parameters, Mapping) and "parameters" in said else {}
    for fields, taken in ((schema, _PARAMETERS), (function, said), (tool, ("type", "function"))):
        if more := {key: value for key, value in fields.items() if key not in taken and value is not None}:
            left.append(more)
    return {"type": "function", "function": said}
