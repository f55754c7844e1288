"""Promise P7 by difference: the same requests through a proxy with and without the callback leave the same bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from litellm_compaction.simulator import Reply
from tests.builders import talk, tool_round, tools
from tests.integration.bench import Bench, answers
from tests.integration.harness import CHAT
from tests.integration.plain_server import PlainServer, RawRequest

# Of the request: connection details. Of the answer: times, ids and versions of this very call.
_VOLATILE_SENT = {"host", "x-stainless-read-timeout", "date", "traceparent"}
_VOLATILE_GOT = re.compile(
    r"(llm_provider-)?date|server|x-litellm-(call-id|version|response-duration-ms|overhead-duration-ms|callback-duration-ms|timing-.*"
    r"|model-api-base|response-cost.*|key-spend)"
)
_LONG = talk("untouched", 30_000)


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: dict[str, Any]


def _cases() -> list[Any]:
    short = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, you."}]
    used = {"stream": True, "stream_options": {"include_usage": True}}
    cases: list[Case] = []
    for model in ("plain", "plain-disabled"):
        chat = {"model": model, "messages": short}
        cases += [
            Case(f"{model}-chat", CHAT, chat),
            Case(f"{model}-stream", CHAT, {**chat, "stream": True}),
            Case(f"{model}-stream-usage", CHAT, {**chat, **used}),
            Case(f"{model}-long", CHAT, {**chat, "messages": _LONG}),
            Case(f"{model}-long-stream", CHAT, {**chat, "messages": _LONG, "stream": True}),
            Case(f"{model}-unlimited", CHAT, {**chat, "max_tokens": 1_000_000, "temperature": 0.5}),
            Case(f"{model}-tools", CHAT, {**chat, "tools": tools(3), "tool_choice": "auto"}),
            Case(f"{model}-tools-stream", CHAT, {**chat, "tools": tools(3), "stream": True}),
            Case(f"{model}-tool-result", CHAT, {**chat, "messages": [*short, *tool_round("tool_0", "text")]}),
            Case(f"{model}-metadata", CHAT, {**chat, "metadata": {"compaction": "off", "mine": "1"}, "user": "u"}),
            Case(f"{model}-fails-400", CHAT, {**chat, "messages": [{"role": "user", "content": "FAIL 400"}]}),
            Case(f"{model}-fails-429", CHAT, {**chat, "messages": [{"role": "user", "content": "FAIL 429"}]}),
            Case(
                f"{model}-stream-fails",
                CHAT,
                {**chat, "messages": [{"role": "user", "content": "FAIL 500"}], "stream": True},
            ),
        ]
    messages = {"max_tokens": 100, "system": "Be brief.", "messages": [{"role": "user", "content": "Hello."}]}
    for model in ("claude", "plain"):
        cases += [
            Case(f"{model}-messages", "/v1/messages", {"model": model, **messages}),
            Case(f"{model}-messages-stream", "/v1/messages", {"model": model, **messages, "stream": True}),
        ]
    cases += [
        Case("claude-chat", CHAT, {"model": "claude", "messages": short, "stream": True}),
        Case("responses", "/v1/responses", {"model": "plain", "input": "Hello.", "instructions": "Be brief."}),
        Case("responses-stream", "/v1/responses", {"model": "plain", "input": "Hello.", "stream": True}),
        Case("completions", "/v1/completions", {"model": "plain", "prompt": "Hello", "max_tokens": 9}),
        Case("completions-stream", "/v1/completions", {"model": "plain", "prompt": "Hello", "stream": True}),
        Case("embeddings", "/v1/embeddings", {"model": "plain-embedding", "input": ["Hello", "you"]}),
    ]
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.mark.parametrize("case", _cases())
def test_unguarded_deployments_get_and_give_the_same_bytes(
    guarded: Bench, stock: Bench, plain: PlainServer, case: Case
) -> None:
    """For a deployment that is not guarded, the callback changes neither what is sent nor what comes back."""
    _settle(guarded, plain)
    since = len(plain.requests)
    got = guarded.proxy.stream_body(case.body, case.path)
    sent = plain.posts(since)
    since = len(plain.requests)
    expected = stock.proxy.stream_body(case.body, case.path)
    assert len(sent) == 1
    assert [_comparable(request) for request in sent] == [_comparable(request) for request in plain.posts(since)]
    assert (got.status, _normal(got.raw)) == (expected.status, _normal(expected.raw))
    assert _kept_headers(got.headers) == _kept_headers(expected.headers)


@pytest.mark.parametrize("group", ["local", "one-slot"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extra", [{}, {"tools": tools(3)}, {"max_tokens": 50}, {"temperature": 0.1, "stop": ["END"]}])
def test_below_the_trigger_only_bounds_are_added(
    guarded: Bench, stock: Bench, extra: dict[str, Any], stream: bool, group: str
) -> None:
    """A short guarded request keeps all that it has but `stream`: it is always a stream with its usage upstream.

    Only max_tokens is added to that. The client gets the bytes that it would get without us, where answers share a
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
    assert sent == {**wanted, **bound, "stream": True, "stream_options": {"include_usage": True}}
    assert sent["messages"] == messages
    assert _normal(got.raw) == _normal(expected.raw)


def test_turned_off_and_opted_out_deployments_are_untouched(guarded: Bench, permissive: Bench, stock: Bench) -> None:
    """`mode: off` on a deployment, and a request that may opt out and does, leave LM Studio the client's own body."""
    messages = talk("off", 20_000)
    expected = stock.watch("small")
    stock.proxy.chat("small", messages)
    off = guarded.watch("off")
    guarded.proxy.chat("off", messages)
    opted = permissive.watch("opted")
    permissive.proxy.chat("opted", messages, metadata={"compaction": "off"})
    assert off.chats[0].truncated
    assert _without_model(off.bodies) == _without_model(opted.bodies) == _without_model(expected.bodies)


def test_opting_out_needs_the_operators_leave(guarded: Bench) -> None:
    """Where `allow_opt_out` is not set, metadata opts nobody out."""
    watch = guarded.watch("local")
    messages = talk("no leave", 20_000)
    answer = guarded.proxy.chat("local", messages, metadata={"compaction": "off"})
    assert answer.headers["x-litellm-compaction"] == "compacted"
    assert watch.problems(messages) == []


def _settle(guarded: Bench, plain: PlainServer) -> None:
    """Lets the proxy find out that the plain server is not LM Studio, once, before bytes are compared."""
    if not plain.requests:
        guarded.proxy.chat("plain", [{"role": "user", "content": "Hi."}])


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


def _without_model(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in body.items() if key != "model"} for body in bodies]
