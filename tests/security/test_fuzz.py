"""Threat: foreign bytes. Every reader refuses them in its own words.

In under a second of processor time and 64 MiB each: what is generated is small.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from litellm_compaction.config import deployment_settings_from, settings_from
from litellm_compaction.core.messages import Request as ChatRequest
from litellm_compaction.core.messages import parse_message
from litellm_compaction.core.secrets import redacted
from litellm_compaction.errors import ConfigError, ServerUnavailable
from litellm_compaction.windows.fetch import NotThisApi
from litellm_compaction.windows.lmstudio import answers_as_lmstudio, list_models, parse_list
from litellm_compaction.windows.other_servers import SERVERS, Served, list_served, tokens_by_server
from tests.proxy.answer.wired import Wire

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_WORDS = ("password", "=", ":", "sk-", "Bearer ", "://", "@", '"', "-----BEGIN PRIVATE KEY-----", "\n", "a1", " ", "\\")


_MOST_BYTES = 64 * 2**20


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """What is loaded lazily is loaded before anything is measured."""
    with warnings.catch_warnings():
        # LiteLLM's own.
        warnings.simplefilter("ignore")
        importlib.import_module("litellm.proxy.proxy_server")

    async def ask() -> None:
        for stream in ({}, {"stream": True}):
            await Wire([lambda: httpx.Response(200, content=b"{}")]).ask(**stream)

    asyncio.run(ask())


@contextmanager
def _bounds() -> Iterator[None]:
    tracemalloc.start()
    begun_s = time.process_time()
    try:
        yield
        assert time.process_time() - begun_s < 1
        assert tracemalloc.get_traced_memory()[1] < _MOST_BYTES
    finally:
        tracemalloc.stop()


@given(_JSON)
def test_settings(value: object) -> None:
    """Taken or refused with a name, never another error."""
    for read in (settings_from, deployment_settings_from):
        with _bounds(), suppress(ConfigError):
            read(value)


@given(st.lists(st.sampled_from(_WORDS) | st.text(max_size=5), max_size=30).map("".join))
def test_redacting(text: str) -> None:
    """Any text, and a second time changes no more than the first left."""
    with _bounds():
        redacted(redacted(text))


def _near(*shapes: object) -> st.SearchStrategy[Any]:
    """JSON like `shapes`, of which any part may be missing, or anything else."""
    return st.sampled_from(shapes).flatmap(_bent)


def _bent(shape: object) -> st.SearchStrategy[Any]:
    if isinstance(shape, dict):
        kept: st.SearchStrategy[Any] = st.fixed_dictionaries({}, optional={key: _bent(shape[key]) for key in shape})
        # Most of the time whole: what lies deep is met only then.
        kept |= st.fixed_dictionaries({key: _bent(shape[key]) for key in shape})
    elif isinstance(shape, list) and shape:
        kept = st.lists(st.one_of([_bent(each) for each in shape]), max_size=3)
    else:
        kept = st.just(shape)
    return st.integers(0, 9).flatmap(lambda odds: _JSON if odds == 0 else kept)


_LISTED = {
    "v1": {
        "models": [
            {
                "type": "llm",
                "publisher": "p",
                "key": "k",
                "architecture": "qwen2",
                "loaded_instances": [{"id": "k", "config": {"context_length": 4096, "parallel": 4}}],
                "max_context_length": 8192,
                "variants": ["k@q4"],
                "quantization": {"name": "Q4"},
                "format": "gguf",
            }
        ]
    },
    "v0": {"data": [{"id": "k", "type": "llm", "arch": "a", "state": "loaded", "loaded_context_length": 4096}]},
    "llama.cpp": {"default_generation_settings": {"n_ctx": 4096}, "total_slots": 4, "model_path": "/m", "n_ctx": 4096},
    "vllm": {"data": [{"id": "k", "max_model_len": 4096, "meta": {"n_ctx": 4096}}]},
}
_ALL_LISTED = _near(*_LISTED.values())


@given(_ALL_LISTED, st.sampled_from(["k", "K", "k@q4", "p/k", "", "k:latest"]))
def test_listings(answer: object, name: str) -> None:
    """Of LM Studio, llama.cpp and vLLM: models, or another API; a name finds one, or none."""
    for api in ("v1", "v0"):
        with _bounds(), suppress(NotThisApi):
            listing = parse_list(api, answer)
            _ = listing.find(name), listing.chats
    for server in SERVERS.values():
        with _bounds(), suppress(NotThisApi):
            served = Served(api=server.name, models=server.read(answer))
            _ = served.find(name), served.chats


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200) | _ALL_LISTED.map(lambda answer: json.dumps(answer).encode()), st.integers(200, 599))
async def test_servers_that_are_asked(content: bytes, status: int) -> None:
    """Whatever they answer, with whatever status: a listing, a count, or an error of ours."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
    request = ChatRequest(messages=(parse_message({"role": "user", "content": "x"}),))
    with _bounds():
        async with httpx.AsyncClient(transport=transport) as http:
            for ask in (
                list_models(http, "http://s", None),
                answers_as_lmstudio(http, "http://s", None),
                list_served(http, "http://s", None, tuple(SERVERS)),
            ):
                with suppress(ServerUnavailable):
                    await ask
            for api in SERVERS:
                assert await tokens_by_server(http, api, "http://s", None, "k", request) != 0
