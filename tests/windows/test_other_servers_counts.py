"""A server's own number for a request, where it has a tokenizer to ask: how it is asked, and what is no answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.windows.other_servers import Api, tokens_by_server
from litellm_compaction.windows.windows import Target, Windows
from tests.windows.fake_lmstudio import BASE

PROPS = {"default_generation_settings": {"n_ctx": 6144}, "total_slots": 1}
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
ASKED = Request(messages=(parse_message({"role": "user", "content": "Größe?"}),), tools=TOOLS, tool_choice="auto")


class Server:
    """Answers by path; every word of a rendered prompt is a token."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, Any]] = []

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.url.path, body))
        answer = self.answers.get(request.url.path, httpx.Response(404, json={"error": "not found"}))
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer(body)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)


def words(body: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": list(range(len(body["content"].split())))}


async def tokens(server: Server, api: Api, request: Request = ASKED) -> int | None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.handle)) as http:
        return await tokens_by_server(http, api, BASE, "sk-secret", "m", request)


async def test_llama_cpp_counts_a_chat_at_once() -> None:
    """In one call, with messages, tools and the choice."""
    server = Server({"/v1/chat/completions/input_tokens": {"object": "response.input_tokens", "input_tokens": 77}})
    assert await tokens(server, "llama.cpp") == 77
    ((_, body),) = server.asked
    assert (body["messages"], body["tools"]) == ([{"role": "user", "content": "Größe?"}], list(TOOLS))


@pytest.mark.parametrize("answer", [{"input_tokens": 0}, {"input_tokens": None}, {"choices": []}, [], "77"])
async def test_what_is_no_count_is_asked_for_in_two_calls(answer: Any) -> None:
    """A server that answers every address with something else."""
    counting: dict[str, Any] = {"/apply-template": {"prompt": "a b"}, "/tokenize": words}
    server = Server({"/v1/chat/completions/input_tokens": httpx.Response(200, json=answer), **counting})
    assert await tokens(server, "llama.cpp") == 2


async def test_older_llama_cpp_renders_and_counts() -> None:
    """The template gets messages, tools and the choice; its prompt is tokenized with special tokens as such."""
    server = Server({"/apply-template": {"prompt": "<s> one two three"}, "/tokenize": words})
    assert await tokens(server, "llama.cpp") == 4
    _, (_, rendered), (_, counted) = server.asked
    assert rendered == {
        "messages": [{"role": "user", "content": "Größe?"}],
        "tools": list(TOOLS),
        "tool_choice": "auto",
    }
    assert counted == {"content": "<s> one two three", "add_special": True, "parse_special": True}


async def test_vllm_counts_at_once() -> None:
    """Messages and tools, with the beginning of the answer."""
    server = Server({"/tokenize": {"count": 77, "max_model_len": 4096, "tokens": [1]}})
    assert await tokens(server, "vllm") == 77
    ((_, body),) = server.asked
    assert (body["model"], body["add_generation_prompt"], body["tools"]) == ("m", True, list(TOOLS))


async def test_extras_are_counted_where_the_tokenizer_takes_them() -> None:
    """llama.cpp renders what its chat does; vLLM takes the template's arguments, and would leave out the rest."""
    with_arguments = replace(ASKED, extras={"chat_template_kwargs": {"note": "x"}})
    with_documents = replace(ASKED, extras={"documents": ["x"], **with_arguments.extras})
    for request in (with_arguments, with_documents):
        server = Server({"/apply-template": {"prompt": "one two"}, "/tokenize": words})
        assert await tokens(server, "llama.cpp", request) == 2
        assert server.asked[0][1].items() >= request.extras.items()
    server = Server({"/tokenize": {"count": 77}})
    assert await tokens(server, "vllm", with_arguments) == 77
    assert server.asked[0][1]["chat_template_kwargs"] == {"note": "x"}
    assert await tokens(server, "vllm", with_documents) is None
    assert len(server.asked) == 1


BROKEN: list[Any] = [
    httpx.Response(404, json={"error": "not found"}),
    httpx.Response(500, text="no"),
    httpx.Response(200, text="<html>"),
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("slow"),
    {"error": "Unexpected endpoint."},
    {"tokens": 5},
    {"prompt": None, "count": "many"},
    {"count": 0},
]


@pytest.mark.parametrize("answer", BROKEN)
@pytest.mark.parametrize("api", ["llama.cpp", "vllm"])
async def test_no_number_is_none(api: Api, answer: Any) -> None:
    """Old servers, broken ones, and those that answer 200 to everything: the estimate stays."""
    assert await tokens(Server({"/apply-template": answer, "/tokenize": answer}), api) is None
    if api == "llama.cpp":
        assert await tokens(Server({"/apply-template": {"prompt": "a b"}, "/tokenize": answer}), api) is None


async def test_images_are_not_asked_about() -> None:
    """No tokenizer counts them."""
    part = {"type": "image_url", "image_url": {"url": "https://host/x.png"}}
    server = Server({"/tokenize": {"count": 77}})
    request = Request(messages=(parse_message({"role": "user", "content": [part]}),))
    assert await tokens(server, "vllm", request) is None
    assert server.asked == []


@pytest.mark.parametrize(
    ("changes", "answers", "expected"),
    [
        ({}, {"/props": PROPS}, 2),
        ({"is_lmstudio": True}, {"/api/v1/models": {"models": []}}, None),
        ({"apis": ()}, {"/props": PROPS}, None),
        ({}, {"/api/ps": {"models": [{"name": "m", "context_length": 4096}]}}, None),
    ],
)
async def test_only_servers_with_a_tokenizer_are_asked(
    changes: dict[str, Any], answers: dict[str, Any], expected: int | None
) -> None:
    """By what they said of their windows; never LM Studio, Ollama, or one that nobody opted in."""
    counting: dict[str, Callable[..., Any] | dict[str, str]] = {
        "/apply-template": {"prompt": "a b"},
        "/tokenize": words,
    }
    server = Server({**answers, **counting})
    known: dict[str, Any] = {"context_length": 4096, "is_lmstudio": False, "apis": ("llama.cpp", "vllm", "ollama")}
    target = Target(key="k", model="m", api_base=BASE, api_key=None, **{**known, **changes})
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.handle)) as http:
        windows = Windows(cache_s=5.0, http=http)
        if not target.is_lmstudio:
            await windows.resolve(target)
        assert await windows.tokens_of(target, ASKED) == expected
        await windows.aclose()
