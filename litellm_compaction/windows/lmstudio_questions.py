"""The questions that LM Studio answers about a loaded model by its SDKs' protocol, and a request in its words.

Called by `windows.py`. An unanswered question is None here: the caller goes on without it. Shapes: lmstudio-js 6ec11db,
`ChatHistoryData.ts` and `LLMToolUseSetting.ts`. LM Studio makes the same of a chat completion; `developer` becomes
`system` there, too (lmstudio-bug-tracker 1730).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from litellm_compaction.core.messages import JsonObject, JsonValue, Message, Request, ToolCall
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import at, positive, text_at
from litellm_compaction.windows.lmstudio_rpc import CallRefused, LMStudioRpc

# A longer question would hold others up while it is written, for more than 5 ms (CPython 3.11).
_MOST_CHARS = 1_000_000
# An agent's tools may take so long between two requests.
_SHORT_TTL_S = 300.0
_ROLES = {"developer": "system", "system": "system", "assistant": "assistant", "tool": "tool", "function": "tool"}
_PARAMETERS = ("type", "properties", "required", "additionalProperties", "$defs")


class Instance(NamedTuple):
    """A loaded copy of a model: its server, the key to ask with, its identifier."""

    api_base: str
    api_key: str | None
    identifier: str


class LoadedModel(NamedTuple):
    """A loaded copy as the protocol lists it; its `reference` is another one after each load."""

    identifier: str
    context_length: int | None
    reference: str
    ttl_ms: int | None


class ModelSettings(NamedTuple):
    """LM Studio's settings for a model's answers; "" and None if it tells none.

    Attributes:
        overflow_policy: `stopAtLimit`, `truncateMiddle`, `rollingWindow`.
        thinks: whether thinking is switched on.
        ttl_s: without a request for so long it is unloaded; None for never.
    """

    overflow_policy: str
    thinks: bool | None
    ttl_s: float | None

    def in_words(self) -> str:
        """For people; "" if there is nothing to say."""
        words = (
            f"a prompt that is too long: {self.overflow_policy}" if self.overflow_policy else "",
            f"unloaded after {self.ttl_s / 60:,.0f} min without a request" if self.ttl_s is not None else "",
            f"thinking {'on' if self.thinks else 'off'}" if self.thinks is not None else "",
        )
        return ", ".join(filter(None, words))

    def works_against(self) -> list[str]:
        """The settings that work against this package, and the better choice for each."""
        found: list[str] = []
        if self.overflow_policy == "rollingWindow":
            what = "drops the oldest messages, the system message first, of a prompt that is too long after all"
            found.append(f"LM Studio {what}: choose `stopAtLimit` as its context overflow policy.")
        if self.ttl_s is not None and self.ttl_s < _SHORT_TTL_S:
            what = f"LM Studio unloads the model after {self.ttl_s:,.0f} s without a request"
            why = "a load takes long, and may choose another context length"
            found.append(f"{what}; {why}: give it a longer idle time to live.")
        return found


async def count_tokens(rpc: LMStudioRpc, instance: Instance, request: Request) -> int | None:
    """The tokens of a request's rendered prompt, without images and reasoning.

    Raises:
        CallRefused: the model is gone, or its template raises.
    """
    text = await render(rpc, instance, request)
    if text is None or len(text) > 4 * _MOST_CHARS:
        return None
    return positive(at(await _ask(rpc, instance, "countTokens", inputString=text), "tokenCount"))


async def render(rpc: LMStudioRpc, instance: Instance, request: Request, *, without_bos: bool = False) -> str | None:
    """A request as the model's template writes it, followed by the parts that the protocol cannot say.

    Args:
        rpc: carries the question.
        instance: the loaded copy.
        request: at most 1 MB of it; a longer one gives None.
        without_bos: leave out the token that begins every prompt.

    Raises:
        CallRefused: as `count_tokens`.
    """
    arguments = (call.arguments for message in request.messages for call in message.calls)
    if sum(map(len, (*arguments, *(message.text for message in request.messages)))) > _MOST_CHARS:
        return None
    history = history_of(request)
    options: JsonObject = {"toolDefinitions": history.tools} if history.tools else {}
    answer = await _ask(
        rpc,
        instance,
        "applyPromptTemplate",
        history={"messages": history.messages},
        predictionConfigStack={"layers": []},
        opts={**options, "omitBosToken": True} if without_bos else options,
    )
    formatted = at(answer, "formatted")
    return formatted + history.unsaid if isinstance(formatted, str) else None


async def list_loaded(rpc: LMStudioRpc, instance: Instance) -> frozenset[LoadedModel] | None:
    """Every language model that the instance's server has loaded."""
    try:
        rows = await rpc.call(instance.api_base, instance.api_key, "listLoaded", None)
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


async def read_settings(rpc: LMStudioRpc, instance: Instance, loaded: Iterable[LoadedModel]) -> ModelSettings | None:
    """The settings with which it would answer a request; `loaded` comes from `list_loaded`."""
    try:
        fields = at(await _ask(rpc, instance, "getBasePredictionConfig"), "fields")
    except CallRefused:
        return None
    if not isinstance(fields, list):
        return None
    values = {text_at(each, "key").removeprefix("llm.prediction."): at(each, "value") for each in fields}
    thinks = values.get("reasoning.enableThinking")
    ttl_ms = next((row.ttl_ms for row in loaded if row.identifier == instance.identifier), None)
    return ModelSettings(
        overflow_policy=text_at(values, "contextOverflowPolicy"),
        thinks=thinks if isinstance(thinks, bool) else None,
        ttl_s=ttl_ms / 1000 if ttl_ms else None,
    )


async def is_busy(rpc: LMStudioRpc, instance: Instance) -> bool:
    """Returns True if it works on a prompt or an answer, or has some waiting; False if it does not say."""
    try:
        answer = await _ask(rpc, instance, "getInstanceProcessingState", throwIfNotFound=False)
    except CallRefused:
        # The call is experimental (lmstudio-js 6ec11db).
        return False
    return text_at(answer, "status") not in ("", "idle") or positive(at(answer, "queued")) is not None


async def _ask(rpc: LMStudioRpc, instance: Instance, endpoint: str, **parameter: JsonValue) -> object:
    # A query for a loaded model: it loads none.
    asked: JsonObject = {"specifier": {"type": "query", "query": {"identifier": instance.identifier}}, **parameter}
    try:
        return await rpc.call(instance.api_base, instance.api_key, endpoint, asked)
    except CallRefused:
        raise
    except ServerUnavailable:
        return None


class History(NamedTuple):
    """A request in the protocol's shape.

    Attributes:
        messages: one for each of the request's, in order.
        tools: the request's functions.
        unsaid: what neither of them holds, as JSON, to be counted besides. Images and reasoning are not in it: the
            protocol has no place for reasoning, and counts no image.
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
