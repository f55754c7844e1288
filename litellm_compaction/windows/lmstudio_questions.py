"""The questions that LM Studio answers about a loaded model by its SDKs' protocol, and a request in its words.

Called by `windows.py`. An unanswered question is None here: the caller goes on without it. Shapes: lmstudio-js 6ec11db,
`ChatHistoryData.ts` and `LLMToolUseSetting.ts`. LM Studio makes the same of a chat completion; `developer` becomes
`system` there, too (lmstudio-bug-tracker 1730).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from litellm_compaction.core.messages import JsonObject, JsonValue, Message, Request, ToolCall
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import at, positive, text_at
from litellm_compaction.windows.lmstudio_rpc import LMStudioRpc

# A longer question would hold others up while it is written, for more than 5 ms (CPython 3.11).
_MOST_CHARS = 1_000_000
# An agent's tools may take so long between two requests.
_SHORT_TTL_S = 300.0
_ROLES = {"developer": "system", "system": "system", "assistant": "assistant", "tool": "tool", "function": "tool"}
_PARAMETERS = ("type", "properties", "required", "additionalProperties", "$defs")


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
