"""Promise P7 by difference: the same requests through a proxy with and without the callback leave the same bytes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.builders import talk, tool_round, tools
from tests.integration.bench import Bench, answers
from tests.integration.harness import CHAT
from tests.integration.plain_server import PlainServer, RawRequest
from tests.lmstudio_double import Reply

# Of the request: connection details. Of the answer: times, ids and versions of this very call.
_VOLATILE_SENT = {"host", "x-stainless-read-timeout", "date", "traceparent"}
_VOLATILE_GOT = re.compile(
    r"(llm_provider-)?date|server|x-litellm-(call-id|version|response-duration-ms|overhead-duration-ms|callback-duration-ms|timing-.*"
    r"|model-api-base|response-cost.*|key-spend)"
)
_LONG = talk("untouched", 30_000)


def _chat(content: str = "Hello, you.", **body: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    return CHAT, {"model": "plain", "messages": messages, **body}


_USED = {"stream": True, "stream_options": {"include_usage": True}}
_MESSAGES = {"max_tokens": 100, "system": "Be brief.", "messages": [{"role": "user", "content": "Hello."}]}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": _chat(max_tokens=1_000_000, temperature=0.5),
    "stream": _chat(**_USED),
    "long": _chat(messages=_LONG),
    "long stream": _chat(messages=_LONG, stream=True),
    "tools": _chat(tools=tools(3), tool_choice="auto"),
    "tools, stream": _chat(tools=tools(3), stream=True),
    "tool result": _chat(messages=[*_LONG[:2], *tool_round("tool_0", "text")]),
    "metadata": _chat(metadata={"compaction": "off", "mine": "1"}, user="u"),
    "fails with 400": _chat("FAIL 400"),
    "fails with 429": _chat("FAIL 429"),
    "stream that fails": _chat("FAIL 500", stream=True),
    "switched off": _chat(model="plain-disabled", messages=_LONG, tools=tools(3)),
    "switched off, stream": _chat(model="plain-disabled", messages=_LONG, stream=True),
    "claude": ("/v1/messages", {"model": "claude", **_MESSAGES}),
    "claude, stream": ("/v1/messages", {"model": "claude", **_MESSAGES, "stream": True}),
    "claude's chat": _chat(model="claude", stream=True),
    "messages": ("/v1/messages", {"model": "plain", **_MESSAGES}),
    "messages, stream": ("/v1/messages", {"model": "plain", **_MESSAGES, "stream": True}),
    "responses": ("/v1/responses", {"model": "plain", "input": "Hello.", "instructions": "Be brief."}),
    "responses, stream": ("/v1/responses", {"model": "plain", "input": "Hello.", "stream": True}),
    "completions": ("/v1/completions", {"model": "plain", "prompt": "Hello", "max_tokens": 9}),
    "completions, stream": ("/v1/completions", {"model": "plain", "prompt": "Hello", "stream": True}),
    "embeddings": ("/v1/embeddings", {"model": "plain-embedding", "input": ["Hello", "you"]}),
}
_Left = tuple[list[tuple[str, str, dict[str, str], bytes]], int, bytes, dict[str, str]]


@pytest.fixture(scope="module")
def left(guarded: Bench, stock: Bench, plain: PlainServer) -> list[dict[str, _Left]]:
    """What leaves each proxy for each case, on both sides: one proxy after the other, since one is open at a time."""
    # The proxy finds out that the plain server is not LM Studio, once, before bytes are compared.
    guarded.proxy.chat("plain", [{"role": "user", "content": "Hi."}])
    return [{name: _left(bench, plain, *case) for name, case in _CASES.items()} for bench in (guarded, stock)]


def _left(bench: Bench, plain: PlainServer, path: str, body: dict[str, Any]) -> _Left:
    since = len(plain.requests)
    got = bench.proxy.stream_body(body, path)
    sent = [_comparable(request) for request in plain.posts(since)]
    return sent, got.status, _normal(got.raw), _kept_headers(got.headers)


@pytest.mark.parametrize("name", _CASES)
def test_unguarded_deployments_get_and_give_the_same_bytes(left: list[dict[str, _Left]], name: str) -> None:
    """For a deployment that is not guarded, the callback changes neither what is sent nor what comes back."""
    ours, theirs = (each[name] for each in left)
    assert len(ours[0]) == 1
    assert ours == theirs


@pytest.mark.parametrize(
    ("group", "stream", "extra"),
    [
        ("local", False, {"tools": tools(3)}),
        ("local", True, {"temperature": 0.1, "stop": ["END"]}),
        ("one-slot", True, {"max_tokens": 50}),
    ],
    ids=["whole", "stream", "one slot"],
)
def test_below_the_trigger_only_bounds_are_added(
    guarded: Bench, stock: Bench, group: str, stream: bool, extra: dict[str, Any]
) -> None:
    """To a short guarded request max_tokens is added, and to a stream the question for its usage.

    The client gets the bytes that it would get without us, where answers share a
    context too: nobody else runs there who could end this one.
    """
    messages = [*talk("short", 800), *tool_round("tool_0", "The result.")]
    script = answers(reply=Reply("word1 word2 word3"))
    ours, theirs = guarded.watch(group, script), stock.watch(group, script)
    got = guarded.proxy.stream_body({"model": group, "messages": messages, "stream": stream, **extra})
    expected = stock.proxy.stream_body({"model": group, "messages": messages, "stream": stream, **extra})
    assert (len(ours.bodies), len(theirs.bodies)) == (1, 1)
    (sent,), (wanted,) = ours.bodies, theirs.bodies
    bound = {} if "max_tokens" in extra else {"max_tokens": sent["max_tokens"]}
    assert sent == {**wanted, **bound, **({"stream_options": {"include_usage": True}} if stream else {})}
    assert sent["messages"] == messages
    assert _normal(got.raw) == _normal(expected.raw)


def _comparable(request: RawRequest) -> tuple[str, str, dict[str, str], bytes]:
    headers = {name: value for name, value in request.headers.items() if name not in _VOLATILE_SENT}
    return request.method, request.path, headers, request.body


def _kept_headers(headers: Any) -> dict[str, str]:
    kept = {name: value for name, value in headers.items() if not _VOLATILE_GOT.fullmatch(name)}
    kept.pop("content-length", None)
    return kept


def _normal(raw: bytes) -> bytes:
    raw = re.sub(rb'"(id|item_id|response_id)": ?"[^"]*"', rb'"\1":"-"', raw)
    return re.sub(rb'"(created|created_at|completed_at)": ?\d+(\.\d+)?', rb'"\1":0', raw)
