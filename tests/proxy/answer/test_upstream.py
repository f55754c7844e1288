"""What a server is sent to go on with an answer, and what its failures mean there."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from litellm_compaction.core.go_on import Partial, Way
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.proxy.answer.legs import Leg
from litellm_compaction.proxy.answer.sse import UpstreamDropped
from litellm_compaction.proxy.answer.transport import HttpUpstream
from litellm_compaction.proxy.wire import DOCUMENT_KEYS, is_structured
from litellm_compaction.windows.windows import Source
from tests.builders import parsed
from tests.proxy.answer.test_loop_going_on import SHORT, scene
from tests.proxy.scripted import Scene, Turn


def _leg(prepared: PreparedRequest) -> Leg:
    return Leg(prepared=prepared, max_tokens=50, goes_on=True)


def _upstream(body: dict[str, Any], **headers: str) -> tuple[HttpUpstream, list[httpx.Request]]:
    """A server that goes on with one word, and what it got."""
    seen: list[httpx.Request] = []

    def serve(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"choices": [{"index": 0, "text": " three", "finish_reason": "stop"}]})

    request = httpx.Request("POST", "http://here/v1/chat/completions", headers=headers)
    return HttpUpstream(httpx.MockTransport(serve), request, {"model": "m", "messages": SHORT, **body}), seen


async def _going_on(
    made: Scene,
    ways: frozenset[Way],
    partial: Partial = Partial(text="one two "),  # noqa: B008 - is frozen
) -> PreparedRequest:
    return await made.compactor.continued(await made.compactor.go_on(made.request, partial, made.context, ways=ways))


async def _sent(body: dict[str, Any], made: Scene) -> tuple[str, dict[str, Any]]:
    """Where a continuation goes, and its body."""
    upstream, seen = _upstream(body)
    prepared = await _going_on(made, upstream.ways)
    async with upstream.open(_leg(prepared)) as chunks:
        deltas = [chunk["choices"][0]["delta"] async for (chunk,) in chunks]
    assert deltas == [{"content": " three"}] or prepared.continuation.way != "raw"
    return seen[0].url.path, json.loads(seen[0].content)


async def test_a_text_completion_gets_what_the_client_asked_for() -> None:
    """Its sampling, its limits and its stop strings, with the template's own end; nothing that only chats know."""
    body = {"temperature": 0.3, "seed": 7, "stop": "END", "n": 1, "max_tokens": 900}
    path, sent = await _sent(body, scene(Turn()))
    assert path == "/v1/completions"
    assert sent.pop("prompt").endswith("assistant<|end_header_id|>\n\none two")
    assert sent == {"model": "m", "temperature": 0.3, "seed": 7, "stop": ["END", "<|eot_id|>"], "max_tokens": 50}


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_system_messages_keep_the_role_that_litellm_wrote(role: str) -> None:
    """It writes `system` where a server does not know `developer`; a list of ours holds the client's own word."""
    body = {"messages": [{"role": role, "content": "Be brief."}, *SHORT]}
    upstream, seen = _upstream(body)
    ours = parsed([{"role": "developer", "content": "Be brief."}, *SHORT])
    prepared = replace(await scene(Turn()).prepared(), messages=tuple(ours))
    await upstream.send(Leg(prepared=prepared, max_tokens=50))
    assert json.loads(seen[0].content)["messages"] == body["messages"]


@pytest.mark.parametrize("key", DOCUMENT_KEYS)
async def test_nothing_shapes_a_document_that_has_begun(key: str) -> None:
    """By a schema or a grammar, of whichever server, it would begin a new one inside of it."""
    own = {key: {"type": "object"}}
    assert is_structured(own)
    assert is_structured({"extra_body": own})
    assert not any(is_structured({key: odd}) for odd in ("", None, {"type": "text"}))
    _, sent = await _sent({"temperature": 0.3, **own}, scene(Turn()))
    assert (key in sent, sent["temperature"]) == (False, 0.3)


CLOSINGS = {
    ("llama.cpp", "llama-3.1-8b"): {
        "thinking_budget_tokens": 0,
        "chat_template_kwargs": {"custom": 1, "enable_thinking": False},
        "reasoning_effort": "high",
    },
    ("vllm", "qwen3-8b"): {"chat_template_kwargs": {"custom": 1, "enable_thinking": False}, "reasoning_effort": "high"},
    ("operator", "qwen3-8b"): {"chat_template_kwargs": {"custom": 1}, "reasoning_effort": "none"},
    ("operator", "gpt-oss-20b"): {"chat_template_kwargs": {"custom": 1}, "reasoning_effort": "low"},
    ("ollama", "qwen3-8b"): {"chat_template_kwargs": {"custom": 1}, "reasoning_effort": "high"},
}


@pytest.mark.parametrize(("source", "model"), CLOSINGS)
async def test_thoughts_are_closed_as_the_server_knows_it(source: Source, model: str) -> None:
    """By the fields that it has for it, beside the client's own; what begins is still the document asked for."""
    made = scene(Turn(), model=model, source=source)
    own = {
        "reasoning_effort": "high",
        "chat_template_kwargs": {"custom": 1},
        "response_format": {"type": "json_object"},
    }
    upstream, seen = _upstream(own)
    partial = Partial(text="", reasoning="I count: one, two", closes=True)
    prepared = await _going_on(made, upstream.ways, partial)
    async with upstream.open(_leg(prepared)):
        pass
    sent = json.loads(seen[0].content)
    expected = {"response_format": {"type": "json_object"}, **CLOSINGS[source, model]}
    names = (*own, "thinking_budget_tokens")
    assert {key: value for key, value in sent.items() if key in names} == expected
    last = sent["messages"][-1]["content"]
    assert "I count: one, two" in last
    assert last.endswith(" /no_think") is (model == "qwen3-8b")


@pytest.mark.parametrize("error", [httpx.ReadTimeout, httpx.ConnectError, httpx.PoolTimeout, httpx.WriteError])
async def test_a_time_limit_at_a_continuation_is_no_end(error: type[httpx.TransportError]) -> None:
    """Another way may do; where there is none, and for an answer that begins, the client's error stays what it was."""

    def fail(request: httpx.Request) -> httpx.Response:
        raise error("too late", request=request)

    made = scene(Turn())
    request = httpx.Request("POST", "http://here/v1/chat/completions")
    body = {"model": "m", "messages": SHORT}
    upstream = HttpUpstream(httpx.MockTransport(fail), request, body)
    for ways, expected in ((upstream.ways, UpstreamDropped), (frozenset[Way](("turn",)), error)):
        prepared = await _going_on(made, ways)
        with pytest.raises(expected) as raised:
            async with upstream.open(_leg(prepared)):
                pass
        assert isinstance(raised.value.__cause__ if expected is UpstreamDropped else raised.value, error)
    with pytest.raises(error):
        async with upstream.open(Leg(prepared=await made.prepared(), max_tokens=50)):
            pass


async def test_a_clients_framing_is_not_that_of_our_body() -> None:
    """Threat: with both a length and chunks a server waits for the rest, and its context is held from everybody."""
    upstream, seen = _upstream({}, **{"transfer-encoding": "chunked", "expect": "100-continue"})
    async with upstream.open(Leg(prepared=await scene(Turn()).prepared(), max_tokens=50)):
        pass
    assert not {"transfer-encoding", "expect"} & set(seen[0].headers)
    assert seen[0].headers["content-length"] == str(len(seen[0].content))
