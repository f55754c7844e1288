"""Routes that LiteLLM does not serve for a local model, passed to it as requests for an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from litellm_compaction.proxy.standards.standards import COUNTS, route_of

ANSWER = {"id": "r", "output": [{"type": "compaction"}], "usage": {"input_tokens": 70}}
SAID = [{"role": "user", "content": "Hi."}]
MANAGED = {"messages": SAID, "context_management": {"edits": []}}


class Application:
    """Answers as LiteLLM would, and keeps what it was asked."""

    def __init__(self, status: int = 200, answer: Any = None) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.headers: dict[bytes, bytes] = {}
        self._status, self._answer = status, json.dumps(ANSWER if answer is None else answer).encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        content, has_more = b"", True
        while has_more:
            message = await receive()
            content, has_more = content + message["body"], message.get("more_body")
        self.headers = dict(scope["headers"])
        assert int(self.headers.get(b"content-length", len(content))) == len(content)
        try:
            self.asked.append((scope["path"], json.loads(content)))
        except ValueError:
            self.asked.append((scope["path"], content))
        await send({"type": "http.response.start", "status": self._status, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": self._answer[:5], "more_body": True})
        await send({"type": "http.response.body", "body": self._answer[5:]})


async def is_guarded(model: object) -> bool:
    return model == "small"


async def asked(application: Application, path: str, body: Any, *, root: str = "", **headers: str) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else json.dumps({"model": "small", **body}).encode()
    parts = [content[:3], content[3:]]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": root + path, "root_path": root, "headers": listed}
    await route_of(is_guarded).serve(application, scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent)
    assert int(dict(sent[0]["headers"])[b"content-length"]) in (1, len(content))
    return sent[0]["status"], json.loads(content)


@pytest.mark.parametrize("body", [{"model": "other", "input": "Hi."}, b"{", b"[]", b"", b"\x1f\x8bpacked"])
async def test_others_go_their_own_way(body: Any) -> None:
    """Models that are left alone, and bodies that are none, compressed ones among them, are LiteLLM's."""
    application = Application()
    assert await asked(application, "/v1/responses/compact", body) == (200, ANSWER)
    [(path, given)] = application.asked
    assert path == "/v1/responses/compact"
    assert given in (body, [])


@pytest.mark.parametrize(
    ("path", "body", "answer", "told"),
    [
        ("/responses/input_tokens", {"input": "Hi."}, ANSWER, {"object": "response.input_tokens", "input_tokens": 70}),
        ("/v1/messages/count_tokens", {"messages": SAID}, ANSWER, {"input_tokens": 70}),
        (
            "/v1/messages/count_tokens",
            MANAGED,
            {**ANSWER, "context_management": {"applied_edits": [{"cleared_input_tokens": 5}]}},
            {"input_tokens": 70, "context_management": {"original_input_tokens": 75}},
        ),
        (
            "/v1/messages/count_tokens",
            MANAGED,
            ANSWER,
            {"input_tokens": 70, "context_management": {"original_input_tokens": 70}},
        ),
    ],
)
async def test_a_count_is_the_usage_of_an_answer(path: str, body: Any, answer: Any, told: Any) -> None:
    """By the same route below a proxy's root; nothing that says how an answer is made is passed on."""
    application = Application(answer=answer)
    odd = {"thinking": {"budget_tokens": "x"}, "mock_timeout": True, "n": 10**7, "fallbacks": ["other"], "stream": True}
    assert await asked(application, path, {**body, **odd}, root="/proxy", authorization="Bearer sk-1") == (200, told)
    [(inner, given)] = application.asked
    assert inner == f"/proxy{path}".rpartition("/")[0]
    least = {"max_tokens": 1} if "messages" in path else {"max_output_tokens": 16}
    assert given == {"model": "small", COUNTS: True, **body, **least}
    assert application.headers.keys() == {b"authorization", b"content-length"}


async def test_a_compaction_alone_is_asked_for_by_a_trigger() -> None:
    """Of a text or of items; the user's messages come back with it."""
    application = Application()
    _, told = await asked(application, "/openai/v1/responses/compact", {"input": "Hi.", "stream": True})
    [(path, given)] = application.asked
    assert (path, given["input"][-1]["type"], given["stream"]) == ("/openai/v1/responses", "compaction_trigger", False)
    assert [item["type"] for item in told["output"]] == ["message", "compaction"]
    assert (told["object"], told["created_at"]) == ("response.compaction", 0)


@pytest.mark.parametrize("status", [400, 401, 503])
async def test_an_error_is_passed_on(status: int) -> None:
    """As LiteLLM tells it."""
    error = {"error": {"message": "No."}}
    assert await asked(Application(status, error), "/v1/responses/input_tokens", {"input": 5}) == (status, error)


@pytest.mark.parametrize(
    "messages", [None, "x", [], [1], [{"role": "user"}], [{"role": "user", "content": [{"type": "thinking"}]}]]
)
async def test_what_is_no_conversation_is_left_to_litellms_own_count(messages: Any) -> None:
    """Which says at once what is missing; to make an answer it would try for seconds."""
    application = Application(400, {"error": {}})
    await asked(application, "/v1/messages/count_tokens", {"messages": messages})
    assert application.asked == [("/v1/messages/count_tokens", {"model": "small"})]
