"""Answers the calls of LM Studio's SDKs: the models that are loaded, their template and their tokenizer.

Called by `server` for each WebSocket. Shapes and silences are those of lmstudio-js 6ec11db (2026-08-21): a message that
is no JSON, or of no known type, is passed over; an unknown endpoint and a parameter of another shape get a warning
without the id of the call, five for each connection; only a handler's exception is an `rpcError`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from litellm_compaction.simulator.messages import JsonObject, Message, ToolCall, unknown_path
from litellm_compaction.simulator.rendering import render_chat

from .catalog import Instance, sdk_base_config, sdk_model, sdk_state
from .script import SdkCall, SdkSocket
from .simulator import Simulator

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# The official client opens all of them; only the first is asked anything.
NAMESPACES = frozenset({"llm", "embedding", "system", "files", "repository"})
_MOST_WARNINGS = 5
# An unanswered key ends the connection (AuthenticatedWsServer.ts).
_KEY_LIMIT_S = 10.0
_MOST_KEY_CHARS = 256
_HUGE = " " * (32 << 20)
# These change the loaded models; none of them is for a client that only counts.
_CHANGING = frozenset({"unloadModel", "preloadDraftModel"})
_CHANNELS = frozenset({"channelCreate", "signalSubscribe", "writableSignalSubscribe"})
_BUSY_POLL_S = 0.005


# Shapes of parameters: a field with ? may be missing or null, () is one of several, {} in a list is any number of them.
_TEXT = {"type": "text", "text": str}
_CALL = {"type": "function", "name": str, "id?": str, "arguments?": dict}
_CALL_PART = {"type": "toolCallRequest", "toolCallRequest": _CALL}
_RESULT = {"type": "toolCallResult", "content": str, "toolCallId?": str, "name?": str}
_MESSAGE = (
    {"role": ("user", "system"), "content": [_TEXT]},
    {"role": "assistant", "content": [(_TEXT, _CALL_PART)]},
    {"role": "tool", "content": [_RESULT]},
)
_SCHEMA = {"type": "object", "properties": dict, "required?": [str], "additionalProperties?": object, "$defs?": dict}
_TOOL = {"type": "function", "function": {"name": str, "description?": str, "parameters?": _SCHEMA}}
_OF_MODEL = {
    "specifier": (
        {"type": "query", "query": {"identifier?": str, "path?": str, "vision?": bool}},
        {"type": "instanceReference", "instanceReference": str},
    )
}
_OF_MODEL_OR_NOTHING = {**_OF_MODEL, "throwIfNotFound": bool}
_FORMATTING = {
    **_OF_MODEL,
    "history": {"messages": [_MESSAGE]},
    "predictionConfigStack": {"layers": [dict]},
    "opts": {"omitBosToken?": bool, "omitEosToken?": bool, "toolDefinitions?": [_TOOL]},
}
_COUNTING = {**_OF_MODEL, "inputString": str}


def _fitted(value: Any, shape: Any) -> Any:
    """A value with the fields of a shape alone, as zod reads it; a ValueError if it has another."""
    if isinstance(shape, tuple):
        for each in shape:
            with suppress(ValueError):
                return _fitted(value, each)
    elif isinstance(shape, list) and isinstance(value, list):
        return [_fitted(each, shape[0]) for each in value]
    elif isinstance(shape, dict) and isinstance(value, dict):
        needed = [name for name in shape if name[-1] != "?" or value.get(name[:-1]) is not None]
        if all(name.rstrip("?") in value for name in needed):
            return {name.rstrip("?"): _fitted(value[name.rstrip("?")], shape[name]) for name in needed}
    elif value == shape or shape is object or type(value) is shape:
        return value
    raise ValueError("another shape")


class _RpcFailed(Exception):
    """An error that a handler raises: the title of an `rpcError`."""


class _Unreadable(Exception):
    """A message that the server answers with a warning: its text and its kind."""

    def __init__(self, warning: str, kind: str) -> None:
        super().__init__(warning)
        self.kind = kind


class SdkConnection:
    def __init__(self, simulator: Simulator, socket: SdkSocket, receive: Receive, send: Send, cut: Callable[[], None]):
        self._simulator = simulator
        self._sdk = simulator.sdk
        self._socket = socket
        self._receive = receive
        self._send = send
        self._cut = cut
        self._warnings = 0
        self._calls: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        try:
            await self._receive()  # websocket.connect
            if await self._accepted() and await self._has_key():
                await self._answer_calls()
        finally:
            for task in self._calls:
                task.cancel()
            self._socket.closed_s = time.monotonic()
            self._simulator.notify()

    async def _accepted(self) -> bool:
        mode = self._sdk.mode
        if mode == "no_handshake":
            await self._receive()  # the client gives up
            return False
        speaks = self._simulator.api in ("v1", "v0") and self._socket.namespace in NAMESPACES
        if not speaks or mode in ("no_upgrade", "error_200"):
            status = 404 if mode == "no_upgrade" else 200
            body = json.dumps(unknown_path("GET", f"/{self._socket.namespace}")).encode()
            headers = [(b"content-type", b"application/json; charset=utf-8")]
            await self._send({"type": "websocket.http.response.start", "status": status, "headers": headers})
            await self._send({"type": "websocket.http.response.body", "body": body})
            return False
        await self._send({"type": "websocket.accept"})
        return True

    async def _has_key(self) -> bool:
        try:
            key = await asyncio.wait_for(self._read_key(), _KEY_LIMIT_S)
        except asyncio.TimeoutError:
            await self._refuse("Authentication timed out")
            return False
        if key is None:
            return False
        if self._sdk.mode == "mute":
            await self._until_closed()
            return False
        token = self._simulator.api_token
        if self._sdk.mode == "refused_key" or (token is not None and token != f"sk-lm-{key[0]}:{key[1]}"):
            await self._refuse("Invalid API token")
            return False
        self._socket.is_accepted = True
        await self._say({"success": True})
        self._simulator.notify()
        return True

    async def _read_key(self) -> tuple[str, str] | None:
        while (message := await self._read()) is not None:
            if message.get("authVersion") != 1:
                continue
            key = message.get("clientIdentifier"), message.get("clientPasskey")
            if all(isinstance(part, str) and len(part) <= _MOST_KEY_CHARS for part in key):
                return str(key[0]), str(key[1])
        return None

    async def _refuse(self, reason: str) -> None:
        await self._say({"success": False, "error": reason})
        await self._send({"type": "websocket.close"})

    async def _until_closed(self) -> None:
        while await self._read() is not None:
            pass

    async def _answer_calls(self) -> None:
        while (message := await self._read()) is not None:
            kind, endpoint = message.get("type"), message.get("endpoint", "")
            if not isinstance(kind, str) or not isinstance(endpoint, str):
                continue
            call = SdkCall(
                kind=kind,
                endpoint=endpoint,
                parameter=message.get("parameter", message.get("creationParameter")),
                is_fault=kind in _CHANNELS or endpoint in _CHANGING,
            )
            self._sdk.calls.append(call)
            self._simulator.notify()
            task = asyncio.ensure_future(self._answer(call, message))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _answer(self, call: SdkCall, message: JsonObject) -> None:
        if self._sdk.mode == "closes":
            self._cut()
        elif self._sdk.mode == "silent":
            pass
        elif call.kind == "keepAlive":
            await self._say({"type": "keepAliveAck"})
        elif call.kind == "rpcCall" and isinstance(call_id := message.get("callId"), int):
            await self._answer_rpc(call, call_id, "parameter" in message)
        elif call.kind in _CHANNELS:
            warning = f"Received {call.kind}, endpoint = {call.endpoint}"
            await self._warn(_Unreadable(warning, "channelEndpointUnhandled"))

    async def _answer_rpc(self, call: SdkCall, call_id: int, has_parameter: bool) -> None:
        answer: JsonObject = {"type": "rpcResult", "callId": call_id}
        try:
            handler = self._handler(call.endpoint)
            result = await handler(call.parameter if has_parameter else _NOTHING)
        except _Unreadable as unreadable:
            await self._warn(unreadable)
            return
        except _RpcFailed as failure:
            answer = {"type": "rpcError", "callId": call_id, "error": {"title": str(failure)}}
        else:
            if result is not None:
                answer["result"] = result
        if self._sdk.mode == "late":
            await asyncio.sleep(3)
        await self._say(answer)

    def _handler(self, endpoint: str) -> Callable[[object], Awaitable[object]]:
        known = {
            "listLoaded": self._list_loaded,
            "getBasePredictionConfig": self._base_config,
            "getInstanceProcessingState": self._state,
            "countTokens": self._count,
            "applyPromptTemplate": self._format,
        }
        hidden = self._sdk.unknown or frozenset(known) if self._sdk.mode == "unknown" else frozenset()
        if endpoint not in known or endpoint in hidden:
            raise _Unreadable(f"Received rpcCall for unknown endpoint, endpoint = {endpoint}", "rpcEndpointUnknown")
        return known[endpoint]

    async def _list_loaded(self, parameter: object) -> object:
        if parameter is not _NOTHING:
            raise _bad_parameter("listLoaded")
        return [sdk_model(instance) for instance in self._loaded()]

    async def _state(self, parameter: object) -> object:
        asked = _read(_OF_MODEL_OR_NOTHING, parameter, "getInstanceProcessingState")
        instance = self._find(asked["specifier"], must_exist=asked["throwIfNotFound"])
        now_s = asyncio.get_running_loop().time()
        return sdk_state(instance, now_s) if instance else None

    async def _base_config(self, parameter: object) -> object:
        self._found(_read(_OF_MODEL, parameter, "getBasePredictionConfig"))
        return sdk_base_config(self._sdk.overflow_policy)

    async def _format(self, parameter: object) -> object:
        asked = _read(_FORMATTING, parameter, "applyPromptTemplate")
        instance = self._found(asked)
        await self._wait_for_worker(instance)
        messages = tuple(_messages(asked["history"]["messages"]))
        if not messages:
            raise _RpcFailed('Error rendering prompt with jinja template: "No messages.".')
        tools = asked["opts"].get("toolDefinitions", [])
        return {"formatted": self._simulator.remember(render_chat(messages, tools))}

    async def _count(self, parameter: object) -> object:
        asked = _read(_COUNTING, parameter, "countTokens")
        instance = self._found(asked)
        await self._wait_for_worker(instance)
        tokens = await asyncio.to_thread(self._simulator.count_text, instance.model, asked["inputString"])
        return {"tokenCount": round(tokens * self._sdk.tokens_factor)}

    async def _wait_for_worker(self, instance: Instance) -> None:
        # Any thread may change it.
        while self._sdk.mode == "busy" and (instance.flights or instance.chats_in_app):  # noqa: ASYNC110
            await asyncio.sleep(_BUSY_POLL_S)

    def _loaded(self) -> list[Instance]:
        return [one for one in self._simulator.loaded() if one.model.type != "embeddings"]

    def _find(self, specifier: JsonObject, *, must_exist: bool = True) -> Instance | None:
        for instance in self._loaded():
            wanted = specifier["query"].get("identifier", instance.id) if "query" in specifier else ""
            if wanted == instance.id or specifier.get("instanceReference") == instance.reference:
                return instance
        if must_exist:
            raise _RpcFailed("No model found that fits the query")
        return None

    def _found(self, asked: JsonObject) -> Instance:
        instance = self._find(asked["specifier"])
        assert instance is not None, "a model that is not found is an error"
        return instance

    async def _warn(self, unreadable: _Unreadable) -> None:
        if self._warnings < _MOST_WARNINGS:
            self._warnings += 1
            await self._say({"type": "communicationWarning", "warning": str(unreadable), "kind": unreadable.kind})

    async def _read(self) -> JsonObject | None:
        """Returns the next message that is a JSON object; None after the end."""
        while True:
            event = await self._receive()
            if event["type"] == "websocket.disconnect":
                return None
            try:
                message = json.loads(event.get("text") or event.get("bytes") or "")
            except (ValueError, RecursionError):
                continue
            if isinstance(message, dict):
                return message

    async def _say(self, message: JsonObject) -> None:
        text = json.dumps(message, ensure_ascii=False)
        is_answer = message.get("type") == "rpcResult"
        if is_answer and self._sdk.mode == "garbage":
            text = text[1 : len(text) // 2]
        elif is_answer and self._sdk.mode == "wrong_shape":
            text = json.dumps(message | {"result": [{"tokenCount": "many", "formatted": 7}]})
        elif is_answer and self._sdk.mode == "huge":
            text += _HUGE
        await self._send({"type": "websocket.send", "text": text})


_NOTHING = object()


def _read(shape: JsonObject, parameter: object, endpoint: str) -> JsonObject:
    try:
        read: JsonObject = _fitted(parameter, shape)
    except ValueError as error:
        raise _bad_parameter(endpoint) from error
    return read


def _bad_parameter(endpoint: str) -> _Unreadable:
    return _Unreadable(f"Received invalid parameter for rpcCall, endpointName = {endpoint}", "rpcParameterTypeError")


def _messages(history: list[JsonObject]) -> list[Message]:
    """Returns the history as the HTTP side's messages; a picture is not in the text of a prompt, so it is left out."""
    messages: list[Message] = []
    for each in history:
        if each["role"] == "tool":
            for part in each["content"]:
                told = (part["content"],) if part["content"] else ()
                messages.append(Message(role="tool", parts=told))
            continue
        calls = []
        for part in each["content"]:
            if part["type"] == "toolCallRequest":
                asked = part["toolCallRequest"]
                arguments = json.dumps(asked.get("arguments", {}), ensure_ascii=False)
                calls.append(ToolCall(asked.get("id", ""), asked["name"], arguments))
        texts = tuple(part["text"] for part in each["content"] if part["type"] == "text")
        messages.append(Message(role=each["role"], parts=texts, tool_calls=tuple(calls)))
    return messages
