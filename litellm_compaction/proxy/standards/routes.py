"""Routes of the protocols that LiteLLM does not serve for a local model: compacting alone, and counting.

A request on one of them is passed to LiteLLM as a request for an answer, so that keys, budgets, routing and the chat
that is made of it are LiteLLM's, and its answer is passed back as the route's. It is answered without a model.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from litellm_compaction.concurrency import off_loop_if
from litellm_compaction.proxy.standards import responses

_Application: TypeAlias = Callable[..., Awaitable[None]]
_Json: TypeAlias = dict[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Json]]
# A field of a body that wants the tokens of its prompt in place of an answer. Whoever sends it himself gets them, too.
COUNTS = "litellm_compaction_counts"
# Above that no request is read here, and LiteLLM answers as it does without us.
_MOST_BYTES, _LONG_BYTES = 256_000_000, 200_000
# The rest of a body says how an answer is made: LiteLLM would refuse some values, and ask for others in vain.
_COUNTED = (
    *("model", "messages", "system", "input", "instructions", "previous_response_id", "conversation"),
    *("tools", "tool_choice", "parallel_tool_calls", "context_management", "metadata", "user"),
)
# So do these headers; what fails here would fail again.
_HOW = (*(b"x-litellm-" + name for name in (b"num-retries", b"timeout", b"stream-timeout", b"keepalive-seconds")),)
_ONCE = (b"x-litellm-num-retries", b"0")
_OK = 200


class _Route(NamedTuple):
    """A route as a request for an answer.

    Attributes:
        asked: makes that request's body of the client's; None if LiteLLM could make no chat of it.
        told: makes the route's answer of the client's body and the answer.
    """

    asked: Callable[[_Json], _Json | None]
    told: Callable[[_Json, _Json], _Json]


def serving(application: _Application, is_guarded: Callable[[object], Awaitable[bool]]) -> _Application:
    """Returns an application that serves the protocols' routes for guarded models, and leaves others to `application`.

    Args:
        is_guarded: says if every deployment of a model is.
    """

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        path = scope.get("path", "")
        route = _ROUTES.get(path.removeprefix(scope.get("root_path", ""))) if is_post else None
        if route is None:
            await application(scope, receive, send)
            return
        content = await _read(receive)
        is_long = len(content) > _LONG_BYTES
        body = await off_loop_if(is_long, lambda: _json(content))
        if body is None or not await is_guarded(body.get("model")):
            await application(scope, _again(content, receive), send)
            return
        asked = route.asked(body)
        # LiteLLM's own route names what is missing at once.
        path = path if asked is None else path.rpartition("/")[0]
        inner = await off_loop_if(is_long, lambda: json.dumps(asked or {"model": body["model"]}).encode())
        kept = [(name, value) for name, value in scope["headers"] if name.lower() not in _HOW]
        headers = _with_length([*kept, _ONCE], len(inner))
        start: _Json = {}
        parts: list[bytes] = []

        async def answered(message: _Json) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))

        scope = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await application(scope, _again(inner, receive), answered)
        content = b"".join(parts)
        if start["status"] == _OK and (answer := _json(content)) is not None:
            content = json.dumps(route.told(body, answer), ensure_ascii=False).encode()
        await send({**start, "headers": _with_length(start.get("headers", ()), len(content))})
        await send({"type": "http.response.body", "body": content})

    return serve


async def _read(receive: _Receive) -> bytes:
    parts, has_more = [], True
    while has_more:
        message = await receive()
        parts.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    return b"".join(parts)


def _again(content: bytes, receive: _Receive) -> _Receive:
    """Gives a body that was read as if it came now; what comes after it is the client's."""
    waiting = [content]

    async def received() -> _Json:
        return {"type": "http.request", "body": waiting.pop(), "more_body": False} if waiting else await receive()

    return received


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(length).encode())]


def _json(content: bytes) -> _Json | None:
    """None for anything but an object; what LiteLLM cannot read either it refuses itself."""
    try:
        body = json.loads(content) if len(content) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _compact(body: _Json) -> _Json:
    return {**body, "input": [*responses.messages_of(body.get("input")), responses.TRIGGER], "stream": False}


def _count(body: _Json, **most_tokens: int) -> _Json:
    """`most_tokens`: the least answer that the protocol has, of a key whose guard is off; its usage is the count."""
    return {**{key: body[key] for key in _COUNTED if key in body}, COUNTS: True, **most_tokens}


def _count_messages(body: _Json) -> _Json | None:
    messages = body.get("messages")
    return _count(body, max_tokens=1) if isinstance(messages, list) and any(map(_is_said, messages)) else None


def _is_said(message: object) -> bool:
    """Returns False for a message of thinking alone, which LiteLLM drops, and for what is no message."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [{"type": "text"}]
    return bool(content) and any(isinstance(part, dict) and "thinking" not in str(part.get("type")) for part in parts)


def _counted(_: _Json, answer: _Json) -> _Json:
    return {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}


def _counted_messages(body: _Json, answer: _Json) -> _Json:
    tokens = answer["usage"]["input_tokens"]
    if not body.get("context_management"):
        return {"input_tokens": tokens}
    edits = (answer.get("context_management") or {}).get("applied_edits") or ()
    original = tokens + sum(edit["cleared_input_tokens"] for edit in edits)
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": original}}


_RESPONSES = ("/v1/responses", "/responses", "/openai/v1/responses")
_ROUTES: Mapping[str, _Route] = {
    **{f"{path}/compact": _Route(_compact, responses.compacted_response) for path in _RESPONSES},
    **{f"{path}/input_tokens": _Route(partial(_count, max_output_tokens=16), _counted) for path in _RESPONSES},
    "/v1/messages/count_tokens": _Route(_count_messages, _counted_messages),
}
