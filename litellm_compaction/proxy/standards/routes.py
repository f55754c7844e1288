"""Routes of the protocols that LiteLLM does not serve for a local model: compacting alone, and counting.

Each is asked of LiteLLM as a request for an answer, so that keys, budgets and routing are LiteLLM's, and is answered
without one: no model reads or writes anything but a compaction. Requests for other models go their own way unread.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

from litellm_compaction.concurrency import Shares, off_loop_if
from litellm_compaction.proxy.standards import responses
from litellm_compaction.proxy.standards.encodings import (
    MOST_BYTES,
    Plain,
    Unreadable,
    encoding_of,
    most_plain_bytes,
    plain,
)

_Application: TypeAlias = Callable[..., Awaitable[None]]
Json: TypeAlias = dict[str, Any]
# The prompt that the running task counts, for the hooks of the request that it makes of it.
_count: ContextVar[Callable[[int], None] | None] = ContextVar("litellm_compaction_count", default=None)
# Above that no request is read here, and LiteLLM answers as it does without us.
_MOST_BYTES = 256_000_000
_LONG_BYTES = 200_000
# LiteLLM's routes for guarded models; bodies for others are handed on as they came.
_ANSWERING = re.compile(
    r"(?:/openai)?(?:/v1)?/(?:chat/completions|completions|messages|responses)"
    r"|(?:/v1)?/(?:engines|openai/deployments)/.+/(?:chat/)?completions"
)
_UNREADABLE = "messages: a list of objects is needed, each with a role and a content that is text or a list of parts"
_CODE = re.compile(r"\((compaction_[a-z_]{1,60})\)")


class _Route(NamedTuple):
    """A route, as a request for an answer.

    Attributes:
        path: of the request for an answer.
        asked: gives the body of that.
        told: gives the body of our answer, of the client's body, the answer's, and the tokens of the prompt: as it
            came, and as the client's own edits leave it.
        counts: no compaction is made, either.
    """

    path: str
    asked: Callable[[Json], Json]
    told: Callable[[Json, Json, Sequence[int]], Json | None]
    counts: bool


def counting() -> Callable[[int], None] | None:
    """Returns what is told the tokens of the running task's request; None if its client wants an answer."""
    return _count.get()


def serving(
    application: _Application,
    is_guarded: Callable[[object], Awaitable[bool]],
    key_owner: Callable[[Json, Mapping[str, str], str], Awaitable[object]],
) -> _Application:
    """Returns an application that serves the protocols' routes for guarded models, and leaves others to `application`.

    Args:
        is_guarded: says if every deployment of a model is.
        key_owner: of a request's scope, its headers, and the path that its key has to be good for; an error of it is
            the answer of `application` to a wrong key.
    """
    unpacking = Shares(MOST_BYTES)

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        root, path = scope.get("root_path", ""), scope.get("path", "")
        if scope["type"] == "http" and scope["method"] == "GET" and _asks_anthropics_list(scope):
            await _with_capabilities(application, scope, receive, send, is_guarded)
            return
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = _ROUTES.get(path.removeprefix(root)) if is_post else None
        asked_path = path.removeprefix(root) if route is None else route.path
        if is_post and encoding_of(scope["headers"]) and _ANSWERING.fullmatch(asked_path):
            # What is compressed costs far more than sending it, so nothing of it is read for whoever has no key.
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            await key_owner(scope, headers, asked_path)
            try:
                scope, receive = await _uncompressed(scope, receive, is_guarded, unpacking)
            except Unreadable as error:
                await _send_error(send, error.status, str(error))
                return
        if route is None:
            is_messages = is_post and path.removeprefix(root) == _MESSAGES
            await application(scope, receive, _with_code(send) if is_messages else send)
            return
        content = await _read(receive)
        body = await off_loop_if(len(content) > _LONG_BYTES, lambda: _json(content))
        if body is None or not await is_guarded(body.get("model")):
            await application(scope, _again(content, receive), send)
            return
        if route.counts and route.path == _MESSAGES and not _is_readable(body):
            # LiteLLM fails over it while it makes a chat of it, which clients would try again.
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            await key_owner(scope, headers, route.path)
            await _send_error(send, 400, _UNREADABLE, is_anthropics=True)
            return
        told: list[int] = []
        token = _count.set(told.append if route.counts else None)
        try:
            asked = await off_loop_if(len(content) > _LONG_BYTES, lambda: json.dumps(route.asked(body)).encode())
            answer = _Answer()
            inner = {**scope, "path": (root if path.startswith(root) else "") + route.path}
            inner["raw_path"] = inner["path"].encode()
            inner["headers"] = _with_length(scope["headers"], len(asked))
            await application(inner, _again(asked, receive), answer.take)
        finally:
            _count.reset(token)
        found = _json(answer.content) if answer.status == 200 else None
        whole = None if found is None else route.told(body, found, told)
        await answer.give(send, None if whole is None else json.dumps(whole, ensure_ascii=False).encode())

    return serve


def _asks_anthropics_list(scope: Json) -> bool:
    path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
    return path == "/v1/models" and any(name.lower() == b"anthropic-version" for name, _ in scope["headers"])


async def _with_capabilities(
    application: _Application,
    scope: Json,
    receive: Callable[[], Awaitable[Json]],
    send: Callable[[Json], Awaitable[None]],
    is_guarded: Callable[[object], Awaitable[bool]],
) -> None:
    """Anthropic's list of models, which says of guarded ones that their context can be managed."""
    answer = _Answer()
    await application(scope, receive, answer.take)
    found = _json(answer.content) if answer.status == 200 else None
    models = found.get("data") if found is not None else None
    for model in models if isinstance(models, list) else ():
        if isinstance(model, dict) and model.get("type") == "model" and await is_guarded(model.get("id")):
            model["capabilities"] = {**(model.get("capabilities") or {}), **_CAPABILITIES}
    await answer.give(send, None if found is None else json.dumps(found, ensure_ascii=False).encode())


async def _uncompressed(
    scope: Json,
    receive: Callable[[], Awaitable[Json]],
    is_guarded: Callable[[object], Awaitable[bool]],
    unpacking: Shares,
) -> tuple[Json, Callable[[], Awaitable[Json]]]:
    """A request for a guarded model without its body's encoding; others as they came."""
    content = await _read(receive, MOST_BYTES)

    def unpacked() -> tuple[Plain, object]:
        found = plain(content, scope["headers"])
        return found, (_json(found.content) or {}).get("model")

    found, model = await unpacking.run(most_plain_bytes(len(content)), unpacked)
    if not await is_guarded(model):
        return scope, _again(content, receive)
    headers = _with_length(found.headers, len(found.content))
    return {**scope, "headers": headers}, _again(found.content, receive)


async def _send_error(
    send: Callable[[Json], Awaitable[None]], status: int, message: str, *, is_anthropics: bool = False
) -> None:
    error: Json = {"type": "invalid_request_error", "message": message}
    said = (
        {"type": "error", "error": error} if is_anthropics else {"error": {**error, "param": None, "code": str(status)}}
    )
    body = json.dumps(said).encode()
    headers = _with_length([(b"content-type", b"application/json")], len(body))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_readable(body: Json) -> bool:
    """Messages as Anthropic's protocol has them, as far as LiteLLM takes that for granted."""

    def is_message(found: object) -> bool:
        content = found.get("content") if isinstance(found, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = all(isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in parts)
        return (
            isinstance(found, dict) and found.get("role") in ("user", "assistant", "system") and bool(parts) and texts
        )

    def is_thought(message: Json) -> bool:
        content = message["content"]
        return isinstance(content, list) and all("thinking" in str(part.get("type")) for part in content)

    messages = body.get("messages")
    # LiteLLM drops messages of thinking alone.
    return isinstance(messages, list) and all(map(is_message, messages)) and not all(map(is_thought, messages))


class _Answer:
    """An application's answer, kept until it is known what the client gets."""

    def __init__(self) -> None:
        self.status = 500
        self.content = b""
        self._start: Json = {"type": "http.response.start", "status": 500, "headers": []}

    async def take(self, message: Json) -> None:
        if message["type"] == "http.response.start":
            self._start, self.status = message, message["status"]
        elif message["type"] == "http.response.body":
            self.content += message.get("body", b"")

    async def give(self, send: Callable[[Json], Awaitable[None]], content: bytes | None) -> None:
        """Sends the answer with another body; None for its own."""
        body = self.content if content is None else content
        await send({**self._start, "headers": _with_length(self._start.get("headers", ()), len(body))})
        await send({"type": "http.response.body", "body": body})


def _with_code(send: Callable[[Json], Awaitable[None]]) -> Callable[[Json], Awaitable[None]]:
    """Sends answers as they are, but a refusal of Anthropic's protocol with its code in `error.details`.

    LiteLLM has no place for that (1.106.2), so it comes in the message.
    """
    held: list[Json] = []

    async def sent(message: Json) -> None:
        if message["type"] == "http.response.start" and message["status"] == 400:
            held.append(message)
            return
        if not held:
            await send(message)
            return
        start = held.pop()
        body = message.get("body", b"")
        found = None if message.get("more_body") else _json(body)
        error = found.get("error") if found is not None else None
        code = _CODE.search(str(error.get("message"))) if isinstance(error, dict) else None
        if isinstance(error, dict) and code is not None:
            error["details"] = {"error_code": code[1]}
            body = json.dumps(found, ensure_ascii=False).encode()
        await send({**start, "headers": _with_length(start.get("headers", ()), len(body))} if code else start)
        await send({**message, "body": body})

    return sent


async def _read(receive: Callable[[], Awaitable[Json]], most_bytes: int | None = None) -> bytes:
    """A body; of one that has more than `most_bytes`, not much more."""
    parts: list[bytes] = []
    left_bytes = most_bytes if most_bytes is not None else math.inf
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        left_bytes -= len(parts[-1])
        if message["type"] != "http.request" or not message.get("more_body") or left_bytes < 0:
            return b"".join(parts)


def _again(content: bytes, receive: Callable[[], Awaitable[Json]]) -> Callable[[], Awaitable[Json]]:
    """Gives a body that was read as if it came now; what comes after it is the client's."""
    waiting = [content]

    async def received() -> Json:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return received


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(length).encode())]


def _json(content: bytes) -> Json | None:
    """None for anything but an object; what LiteLLM cannot read either it refuses itself."""
    if len(content) > _MOST_BYTES:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _items(body: Mapping[str, Any]) -> list[Any]:
    given = body.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given) if isinstance(given, list) else []


def _compact(body: Json) -> Json:
    return {**body, "input": [*_items(body), {"type": "compaction_trigger"}], "stream": False}


def _compacted(body: Json, answer: Json, _: Sequence[int]) -> Json | None:
    return responses.compacted_response(answer, _items(body))


def _asked_responses(body: Json) -> Json:
    return {**body, "stream": False}


def _asked_messages(body: Json) -> Json:
    # Anthropic takes these here, too, and counts without them; as a request LiteLLM would refuse some of their values.
    aside = ("compaction", "thinking", "output_config")
    return {"max_tokens": 1, **{key: value for key, value in body.items() if key not in aside}, "stream": False}


def _told_responses(_: Json, __: Json, tokens: Sequence[int]) -> Json | None:
    return {"object": "response.input_tokens", "input_tokens": tokens[-1]} if tokens else None


def _told_messages(body: Json, _: Json, tokens: Sequence[int]) -> Json | None:
    if not tokens:
        return None
    edits = {"context_management": {"original_input_tokens": tokens[0]}} if body.get("context_management") else {}
    return {"input_tokens": tokens[-1], **edits}


_SUPPORTED = {"supported": True}
# anthropic 2.12.0, `types/beta/beta_model_capabilities.py`.
_CAPABILITIES = {
    "context_management": {
        **_SUPPORTED,
        "clear_tool_uses_20250919": _SUPPORTED,
        "clear_thinking_20251015": _SUPPORTED,
        "compact_20260112": _SUPPORTED,
    },
    "compaction": {**_SUPPORTED, "summarize": _SUPPORTED},
}
_RESPONSES = ("/v1/responses", "/responses", "/openai/v1/responses")
_MESSAGES = "/v1/messages"
_ROUTES: Mapping[str, _Route] = {
    **{f"{path}/compact": _Route(path, _compact, _compacted, counts=False) for path in _RESPONSES},
    **{f"{path}/input_tokens": _Route(path, _asked_responses, _told_responses, counts=True) for path in _RESPONSES},
    f"{_MESSAGES}/count_tokens": _Route(_MESSAGES, _asked_messages, _told_messages, counts=True),
}
