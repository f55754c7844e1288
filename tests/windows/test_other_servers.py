"""Windows and counts that llama.cpp's server and vLLM tell, and what follows where they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.other_servers import SERVERS, Api, list_served, tokens_by_server
from litellm_compaction.windows.windows import Target, Windows
from tests.virtual_time import Clock
from tests.windows.conftest import CACHE_S
from tests.windows.fake_lmstudio import BASE, FakeLMStudio

ALL: tuple[Api, ...] = tuple(SERVERS)
PROPS = {"default_generation_settings": {"id": 0, "n_ctx": 6144}, "total_slots": 4, "chat_template": "…"}
VLLM = {
    "object": "list",
    "data": [
        {"id": "qwen", "object": "model", "max_model_len": 32768},
        {"id": "lora", "object": "model", "parent": "qwen", "max_model_len": None},
    ],
}


def target(model: str = "qwen", apis: tuple[Api, ...] = ALL, **changes: Any) -> Target:
    known = Target(
        key=f"id-{model}",
        model=model,
        api_base=BASE,
        api_key="sk-secret",
        context_length=128_000,
        context_source="default",
        is_lmstudio=False,
        apis=apis,
    )
    return replace(known, **changes)


@pytest.mark.parametrize(
    ("path", "answer", "model", "told"),
    [
        ("/props", PROPS, "whatever", (6144, "llama.cpp", 4)),
        ("/v1/models", VLLM, "qwen", (32768, "vllm", 1)),
        ("/v1/models", VLLM, "lora", (32768, "vllm", 1)),
        ("/v1/models", VLLM, "Qwen", (32768, "vllm", 1)),
    ],
)
async def test_a_server_says_its_window(
    server: FakeLMStudio, windows: Windows, path: str, answer: object, model: str, told: tuple[int, str, int]
) -> None:
    """Each by its own API; llama.cpp answers every name, vLLM those of any case; the number is one request's own."""
    server.answers[path] = answer
    window = await windows.resolve(target(model))
    assert (window.tokens, window.source, window.slots) == told
    assert window.parallel == 1
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer sk-secret"}


async def test_a_context_that_an_overflow_shows_to_be_shared_stays_so(server: FakeLMStudio, windows: Windows) -> None:
    """That two answers or more share it, until the process ends; told once."""
    server.answers = {"/props": PROPS, "/v1/models": VLLM}
    assert windows.learn_shared(target(), 1)
    assert (await windows.resolve(target())).parallel == 2
    assert not windows.learn_shared(target(), 3)
    assert not windows.learn_shared(target(), 2)
    assert (await windows.resolve(target())).parallel == 3
    assert (await windows.resolve(target(key="another"))).parallel == 1


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/props", {"default_generation_settings": {"n_ctx": 0}, "role": "router"}),
        ("/props", {"default_generation_settings": {"n_ctx": "8192"}}),
        ("/props", httpx.Response(200, text="<html>")),
        ("/props", httpx.Response(403, json={})),
        ("/v1/models", {"object": "list", "data": [{"id": "qwen", "meta": {"n_ctx_train": 40960}}]}),
        ("/v1/models", {"object": "list", "data": [{"id": "qwen", "max_model_len": -1}]}),
    ],
)
async def test_no_number_is_no_window(server: FakeLMStudio, windows: Windows, path: str, answer: object) -> None:
    """Another shape, a router's 0, a trained length: the next source counts."""
    server.answers[path] = answer
    window = await windows.resolve(target())
    assert (window.tokens, window.source) == (128_000, "default")


async def test_a_server_that_is_down_says_why(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """llama.cpp's server answers 503 while it loads its model; nobody else is asked at the same address then."""
    server.answers["/props"] = httpx.Response(503, json={"error": {"message": "Loading model"}})
    with pytest.raises(ServerUnavailable, match="503"):
        await list_served(http, BASE, None, ALL)
    assert server.paths == ["/props"]


async def test_a_silent_server_is_seldom_asked(server: FakeLMStudio, windows: Windows, clock: Clock) -> None:
    """A server that tells no window is left in peace for 60 s, and asked again then; one that does for `cache_s`."""
    for _ in range(10):
        await windows.resolve(target())
        clock.now_s += CACHE_S
    assert server.paths == ["/props", "/v1/models"]
    clock.now_s += 10
    server.answers["/props"] = {**PROPS, "total_slots": 1}
    for _ in range(3):
        assert (await windows.resolve(target())).tokens == 6144
        clock.now_s += 1
    assert server.paths[2:] == ["/props"]


# ------------------------------------------------------------------ a server's own number for a request

ONE_SLOT = {**PROPS, "total_slots": 1}
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
ASKED = Request(messages=(parse_message({"role": "user", "content": "Größe?"}),), tools=TOOLS, tool_choice="auto")


def words(body: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": list(range(len(body["content"].split())))}


AT_ONCE = "/v1/chat/completions/input_tokens"
BY_TEMPLATE: dict[str, Any] = {"/apply-template": {"prompt": "a b"}, "/tokenize": words}
ARGUMENTS = replace(ASKED, extras={"chat_template_kwargs": {"note": "x"}})
DOCUMENTS = replace(ASKED, extras={"documents": ["x"], **ARGUMENTS.extras})
PART = {"type": "image_url", "image_url": {"url": "https://host/x.png"}}
PICTURE = Request(messages=(parse_message({"role": "user", "content": [PART]}),))


@pytest.mark.parametrize(
    ("api", "answers", "request_", "expected", "asked"),
    [
        ("llama.cpp", {AT_ONCE: {"input_tokens": 77}}, ASKED, 77, 1),
        # llama.cpp renders what its chat does; vLLM takes the template's arguments, and would leave out the rest.
        ("llama.cpp", BY_TEMPLATE, DOCUMENTS, 2, 3),
        ("vllm", {"/tokenize": {"count": 77, "max_model_len": 4096, "tokens": [1]}}, ASKED, 77, 1),
        ("vllm", {"/tokenize": {"count": 77}}, ARGUMENTS, 77, 1),
        ("vllm", {"/tokenize": {"count": 77}}, DOCUMENTS, None, 0),
        # No tokenizer counts images.
        ("vllm", {"/tokenize": {"count": 77}}, PICTURE, None, 0),
        # A server that answers every address with something else is asked in two calls.
        *(
            ("llama.cpp", {AT_ONCE: httpx.Response(200, json=answer), **BY_TEMPLATE}, ASKED, 2, 3)
            for answer in ({"input_tokens": 0}, {"input_tokens": None}, {"choices": []}, [], "77")
        ),
    ],
)
async def test_a_server_counts_a_request(
    server: FakeLMStudio,
    http: httpx.AsyncClient,
    api: Api,
    answers: dict[str, Any],
    request_: Request,
    expected: int | None,
    asked: int,
) -> None:
    """Its messages, tools, the choice and the template's extras, with the beginning of the answer."""
    server.answers = answers
    assert await tokens_by_server(http, api, BASE, "sk-secret", "m", request_) == expected
    assert len(server.requests) == asked
    if asked:
        body = json.loads(server.requests[0].content)
        assert (body["messages"], body["tools"]) == ([{"role": "user", "content": "Größe?"}], list(TOOLS))
        assert body.items() >= request_.extras.items()
        assert api != "vllm" or (body["model"], body["add_generation_prompt"]) == ("m", True)


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, json={"error": "not found"}),
        httpx.Response(200, text="<html>"),
        httpx.ReadTimeout("slow"),
        {"error": "Unexpected endpoint."},
        {"count": 0},
    ],
)
async def test_no_number_is_none(server: FakeLMStudio, http: httpx.AsyncClient, answer: Any) -> None:
    """Old servers, broken ones, and those that answer 200 to everything: the estimate stays."""
    cases: list[tuple[Api, Any]] = [("llama.cpp", answer), ("vllm", answer), ("llama.cpp", {"prompt": "a b"})]
    for api, rendered in cases:
        server.answers = {"/apply-template": rendered, "/tokenize": answer}
        assert await tokens_by_server(http, api, BASE, "sk-secret", "m", ASKED) is None


@pytest.mark.parametrize(
    ("changes", "answers", "expected"),
    [
        ({}, {"/props": ONE_SLOT}, 2),
        ({"is_lmstudio": True}, {"/api/v1/models": {"models": []}}, None),
        ({"apis": ()}, {"/props": ONE_SLOT}, None),
    ],
)
async def test_only_servers_with_a_tokenizer_are_asked(
    server: FakeLMStudio, windows: Windows, changes: dict[str, Any], answers: dict[str, Any], expected: int | None
) -> None:
    """By what they said of their windows; never LM Studio, or one that nobody opted in."""
    server.answers, asked = {**answers, **BY_TEMPLATE}, target(**changes)
    if not asked.is_lmstudio:
        await windows.resolve(asked)
    assert await windows.tokens_of(asked, ASKED) == expected
