"""Windows that llama.cpp's server, vLLM and Ollama tell: shapes, names, age, and what follows where they do not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from litellm_compaction.errors import ModelNotLoaded, ServerUnavailable
from litellm_compaction.windows.other_servers import SERVERS, SILENT, Api, list_served
from litellm_compaction.windows.windows import Target, Windows
from tests.windows.fake_lmstudio import BASE, Clock, FakeLMStudio, v1_model

CACHE_S = 5.0
ALL: tuple[Api, ...] = tuple(SERVERS)
PROPS = {"default_generation_settings": {"id": 0, "n_ctx": 6144}, "total_slots": 4, "chat_template": "…"}
VLLM = {
    "object": "list",
    "data": [
        {"id": "qwen", "object": "model", "max_model_len": 32768},
        {"id": "lora", "object": "model", "parent": "qwen", "max_model_len": None},
    ],
}
OLLAMA = {
    "models": [
        {"name": "gemma3:latest", "model": "gemma3:latest", "size": 1, "context_length": 4096},
        {"name": "qwen3:8b", "model": "qwen3:8b", "size": 1, "context_length": 16384},
    ]
}


@pytest.fixture
async def windows(http: httpx.AsyncClient, clock: Clock) -> AsyncIterator[Windows]:
    made = Windows(cache_s=CACHE_S, http=http, clock=clock)
    yield made
    await made.aclose()


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
    ("path", "answer", "model", "tokens", "source", "slots"),
    [
        ("/props", PROPS, "whatever", 6144, "llama.cpp", 4),
        ("/v1/models", VLLM, "qwen", 32768, "vllm", 1),
        ("/v1/models", VLLM, "lora", 32768, "vllm", 1),
        ("/api/ps", OLLAMA, "qwen3:8b", 16384, "ollama", 1),
        ("/api/ps", OLLAMA, "gemma3", 4096, "ollama", 1),
        ("/api/ps", OLLAMA, "Gemma3", 4096, "ollama", 1),
    ],
)
async def test_a_server_says_its_window(
    server: FakeLMStudio,
    windows: Windows,
    path: str,
    answer: object,
    model: str,
    tokens: int,
    source: str,
    slots: int,
) -> None:
    """Each by its own API; llama.cpp answers every name, Ollama means `latest`; the number is one request's own."""
    server.answers[path] = answer
    window = await windows.resolve(target(model))
    assert (window.tokens, window.source, window.slots, window.parallel) == (tokens, source, slots, 1)
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer sk-secret"}


@pytest.mark.parametrize(
    ("props", "listing", "parallel"),
    [
        ({}, {"data": [{"id": "m", "meta": {"n_ctx": 6144}}]}, 4),
        ({}, {"data": [{"id": "m", "meta": {"n_ctx": 24576}}]}, 1),
        ({}, {"data": [{"id": "m", "meta": {"n_ctx_train": 6144}}]}, 1),
        ({}, {"data": [{"id": "m", "meta": None}, {"id": "n"}]}, 1),
        ({}, httpx.Response(503, json={}), 1),
        ({"n_ctx": 6144}, VLLM, 4),
        ({"n_ctx": 24576}, VLLM, 1),
        ({"total_slots": 1, "n_ctx": 6144}, VLLM, 1),
    ],
)
async def test_slots_that_each_have_the_whole_context_share_it(
    server: FakeLMStudio, windows: Windows, props: dict[str, Any], listing: object, parallel: int
) -> None:
    """llama-server's own choice is four slots over one cache: an answer then has what the others leave."""
    server.answers = {"/props": {**PROPS, **props}, "/v1/models": listing}
    window = await windows.resolve(target())
    assert (window.tokens, window.parallel) == (6144, parallel)


async def test_what_an_overflow_shows_of_a_context_holds(server: FakeLMStudio, windows: Windows) -> None:
    """That answers share it, until the process ends; told once."""
    server.answers = {"/props": PROPS, "/v1/models": VLLM}
    assert windows.learn_shared(target(), 3)
    assert not windows.learn_shared(target(), 2)
    assert (await windows.resolve(target())).parallel == 3
    assert (await windows.resolve(target(key="another"))).parallel == 1


async def test_the_first_that_answers_is_enough(server: FakeLMStudio, windows: Windows) -> None:
    """llama.cpp's server lists models as OpenAI does: /props says more, and nothing else is asked then."""
    server.answers = {"/props": {**PROPS, "total_slots": 1}, "/v1/models": VLLM}
    assert (await windows.resolve(target())).tokens == 6144
    assert server.paths == ["/props"]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/props", {"default_generation_settings": {"n_ctx": 0}, "role": "router"}),
        ("/props", {"default_generation_settings": {"n_ctx": "8192"}}),
        ("/props", {"n_ctx": 8192}),
        ("/props", []),
        ("/props", httpx.Response(200, text="<html>")),
        ("/props", httpx.Response(403, json={})),
        ("/v1/models", {"object": "list", "data": [{"id": "qwen", "object": "model"}]}),
        ("/v1/models", {"object": "list", "data": [{"id": "qwen", "meta": {"n_ctx_train": 40960}}]}),
        ("/v1/models", {"data": "qwen"}),
        ("/api/ps", {"models": [{"name": "qwen", "context_length": -1}]}),
        ("/api/ps", {"error": "Unexpected endpoint."}),
    ],
)
async def test_no_number_is_no_window(server: FakeLMStudio, windows: Windows, path: str, answer: object) -> None:
    """Another shape, a router's 0, a trained length: the next source counts."""
    server.answers[path] = answer
    window = await windows.resolve(target())
    assert (window.tokens, window.source) == (128_000, "default")


async def test_lm_studios_listing_is_none_of_them(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """LM Studio answers 200 everywhere; none of that is taken for a window."""
    server.list_v1(v1_model(_=8192))
    server.answers["/v1/models"] = {"object": "list", "data": [{"id": "qwen/qwen3-8b", "object": "model"}]}
    assert await list_served(http, BASE, None, ALL) == SILENT


async def test_a_server_that_is_down_says_why(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """llama.cpp's server answers 503 while it loads its model; nobody else is asked at the same address then."""
    server.answers["/props"] = httpx.Response(503, json={"error": {"message": "Loading model"}})
    with pytest.raises(ServerUnavailable, match="503"):
        await list_served(http, BASE, None, ALL)
    assert server.paths == ["/props"]


async def test_only_the_named_apis_are_asked(server: FakeLMStudio, windows: Windows) -> None:
    """What is known to be Ollama is not asked for vLLM's list; without any, no request is sent at all."""
    server.answers["/api/ps"] = OLLAMA
    assert (await windows.resolve(target("gemma3", ("ollama",)))).tokens == 4096
    assert server.paths == ["/api/ps"]
    assert (await windows.resolve(target(apis=()), fresh=True)).source == "default"
    windows.invalidate(target(apis=()))
    assert (await windows.resolve(target(apis=()))).source == "default"
    assert server.paths == ["/api/ps"]


async def test_young_numbers_come_from_memory(server: FakeLMStudio, windows: Windows, clock: Clock) -> None:
    """One read serves all models of a server for `cache_s`; a reloaded model shows after an invalidation at once."""
    server.answers["/api/ps"] = OLLAMA
    for model in ("gemma3", "qwen3:8b", "gemma3"):
        await windows.resolve(target(model, ("ollama",)))
        clock.now_s += 1
    assert len(server.requests) == 1
    server.answers["/api/ps"] = {"models": [{"name": "gemma3:latest", "context_length": 8192}]}
    windows.invalidate(target("gemma3", ("ollama",)))
    assert (await windows.resolve(target("gemma3", ("ollama",)))).tokens == 8192


async def test_a_model_that_is_loaded_meanwhile_is_found(server: FakeLMStudio, windows: Windows, clock: Clock) -> None:
    """Ollama loads on the first request; from then on its allocated window counts. A guess counts never."""
    for listed in ([], None, [{"name": "other", "context_length": 4096}]):
        server.answers["/api/ps"] = {"models": listed}
        with pytest.raises(ModelNotLoaded):
            await windows.resolve(target("gemma3", ("ollama",)), fresh=True)
        written = target("gemma3", ("ollama",), context_source="operator")
        assert (await windows.resolve(written)).source == "operator"
    server.answers["/api/ps"] = OLLAMA
    clock.now_s += CACHE_S
    assert (await windows.resolve(target("gemma3", ("ollama",)))).tokens == 4096


async def test_a_silent_server_is_seldom_asked(server: FakeLMStudio, windows: Windows, clock: Clock) -> None:
    """A server that tells no window is left in peace for 60 s, and asked again then."""
    for _ in range(10):
        await windows.resolve(target())
        clock.now_s += CACHE_S
    assert server.paths == ["/props", "/v1/models", "/api/ps"]
    clock.now_s += 10
    server.answers["/props"] = PROPS
    assert (await windows.resolve(target())).tokens == 6144


async def test_what_requests_ask_for_bounds_the_window(server: FakeLMStudio, windows: Windows) -> None:
    """`num_ctx` makes Ollama load the model anew: a larger copy that another client loaded does not count."""
    server.answers["/api/ps"] = OLLAMA
    asked = target("qwen3:8b", ("ollama",), asked_tokens=8192, context_length=8192, context_source="operator")
    assert (await windows.resolve(asked)).tokens == 8192
    smaller = target("gemma3", ("ollama",), asked_tokens=8192)
    assert (await windows.resolve(smaller)).tokens == 4096


async def test_a_limit_outlives_a_guess(windows: Windows, clock: Clock) -> None:
    """What a server's own error named is better than an assumption for good, better than the operator for 600 s."""
    guess, written = target(apis=()), target("other", (), context_source="operator")
    for each in (guess, written):
        windows.learn(each, 9000)
        assert (await windows.resolve(each)).source == "learned"
    clock.now_s += 601
    assert (await windows.resolve(guess)).tokens == 9000
    assert (await windows.resolve(written)).tokens == 128_000


async def test_a_limit_above_a_told_window_is_nonsense(server: FakeLMStudio, windows: Windows) -> None:
    """The server's own number is the most that is believed."""
    server.answers["/props"] = PROPS
    await windows.resolve(target())
    windows.learn(target(), 7000)
    assert (await windows.resolve(target())).tokens == 6144
    windows.learn(target(), 5000)
    assert (await windows.resolve(target())).tokens == 5000
