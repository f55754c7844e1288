"""Threat: foreign bytes. Every reader refuses them in its own words.

In under a second of processor time and 64 MiB each: what is generated is small.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import struct
import time
import tracemalloc
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import APIError

from litellm_compaction.config import LIVE, deployment_settings_from, settings_from
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import Request as ChatRequest
from litellm_compaction.core.messages import parse_message
from litellm_compaction.core.record import read_record
from litellm_compaction.core.secrets import redacted
from litellm_compaction.errors import ConfigError, ServerUnavailable, UnusableModelFile, overflow_from_text
from litellm_compaction.proxy.callback import CompactionHandler
from litellm_compaction.proxy.page import routes
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.data import Surroundings, revision_of
from litellm_compaction.stores.store import decode
from litellm_compaction.templates.environment import TemplateRefusal
from litellm_compaction.templates.template import Template
from litellm_compaction.tokenizers import files
from litellm_compaction.tokenizers.files import read_tokenizer_json
from litellm_compaction.tokenizers.gguf import read_gguf
from litellm_compaction.windows.fetch import NotThisApi
from litellm_compaction.windows.lmstudio import Listing, _parse_v0, _parse_v1, answers_as_lmstudio, list_models, match
from litellm_compaction.windows.other_servers import (
    SERVERS,
    Served,
    find_served,
    list_served,
    tokens_by_server,
)
from tests.proxy.answer.wired import Wire
from tests.security.bounded import ROOT, in_child
from tests.security.hooks import Router

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_WORDS = ("password", "=", ":", "sk-", "Bearer ", "://", "@", '"', "-----BEGIN PRIVATE KEY-----", "\n", "a1", " ", "\\")
_BLOCKS = (
    "{%",
    "%}",
    "{{",
    "}}",
    " for x in messages ",
    " endfor ",
    "x",
    "|",
    "tojson",
    "(",
    ")",
    "[",
    "]",
    "1",
    "*",
    "'",
)


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


def _bounded(call: Callable[[], object], *allowed: type[Exception]) -> object:
    with _bounds():
        try:
            return call()
        except allowed:
            return None


@given(st.binary(max_size=400) | st.builds(lambda text: text.encode("utf-8", "replace"), st.text()))
def test_rows_of_a_store(data: bytes) -> None:
    """A compaction, or none."""
    assert isinstance(_bounded(lambda: decode(data)), Compaction | None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    version=st.integers(0, 4),
    counts=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    rest=st.binary(max_size=300),
)
def test_gguf_files(tmp_path: Path, version: int, counts: tuple[int, int], rest: bytes) -> None:
    """Refused, whatever it promises of its lengths."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, *counts) + rest)
    _bounded(lambda: read_gguf(path), UnusableModelFile)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_tokenizer_files(tmp_path: Path, data: bytes) -> None:
    """Refused."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    # Here: a process for each would take a minute.
    with pytest.MonkeyPatch.context() as patch:
        here = SimpleNamespace(run=lambda _, payload: files.examined(payload), end=lambda: None)
        patch.setattr(files, "Contained", lambda: here)
        with pytest.raises(UnusableModelFile):
            _bounded(lambda: read_tokenizer_json(path))


@given(st.lists(st.sampled_from(_BLOCKS), max_size=30).map("".join))
def test_templates(source: str) -> None:
    """Written or refused, never another error."""
    _bounded(lambda: Template(source).render([{"role": "user", "content": "x"}], []), TemplateRefusal)


@given(_JSON)
def test_settings(value: object) -> None:
    """Taken or refused with a name, never another error."""
    _bounded(lambda: settings_from(value), ConfigError)
    _bounded(lambda: deployment_settings_from(value), ConfigError)


@given(st.lists(st.sampled_from(_WORDS) | st.text(max_size=5), max_size=30).map("".join))
def test_redacting(text: str) -> None:
    """Any text, and a second time changes no more than the first left."""
    once = _bounded(lambda: redacted(text))
    assert isinstance(once, str)
    _bounded(lambda: redacted(once))


@given(st.text())
def test_errors_and_records(text: str) -> None:
    """A server's error and a client's record, of any text."""
    _bounded(lambda: overflow_from_text(text))
    _bounded(lambda: read_record(parse_message({"role": "user", "content": "## Session Summary" + text})))


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
    "ollama": {"models": [{"name": "k", "model": "k", "context_length": 4096}]},
}
_ALL_LISTED = _near(*_LISTED.values())


@given(_ALL_LISTED, st.sampled_from(["k", "K", "k@q4", "p/k", "", "k:latest"]))
def test_listings(answer: object, name: str) -> None:
    """Of LM Studio, llama.cpp, vLLM and Ollama: models, or another API; a name finds one, or none."""
    for parse in (_parse_v1, _parse_v0):
        listing = _bounded(lambda parse=parse: parse(answer), NotThisApi)  # type: ignore[misc]
        if isinstance(listing, Listing):
            _bounded(lambda listing=listing: match(listing, name))  # type: ignore[misc]
    for server in SERVERS.values():
        models = _bounded(lambda server=server: server.read(answer), NotThisApi)  # type: ignore[misc]
        if isinstance(models, tuple):
            served = Served(api=server.name, models=models)
            _bounded(lambda served=served: find_served(served, name))  # type: ignore[misc]


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


_CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_DELTA = {"role": "assistant", "content": "x ", "reasoning_content": "r", "tool_calls": [_CALL], "refusal": "no"}
_OLD_CALL = {"function_call": {"name": "f", "arguments": "{"}}
_USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "completion_tokens_details": {"a": 1}}
_CHUNKS = _near(
    {"id": "c", "choices": [{"index": 0, "delta": _DELTA, "finish_reason": None}]},
    {"id": "c", "choices": [{"index": 0, "delta": _OLD_CALL, "finish_reason": "stop"}], "usage": _USAGE},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "timings": {"a": 1}},
    {"choices": [], "usage": _USAGE},
    {"error": {"message": "context size has been exceeded"}},
    {"choices": [{"index": 0, "text": "x", "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]},
)
_EVENTS = st.lists(
    _CHUNKS.map(lambda chunk: b"data: " + json.dumps(chunk).encode())
    | st.sampled_from([b": ping", b"data: [DONE]", b"event: x", b"data:", b"data: {", b"\xff\xfe"]),
    max_size=5,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(_EVENTS, st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n"]), st.booleans(), st.booleans())
async def test_streams_of_servers(events: list[bytes], end: bytes, stream: bool, whole: bool) -> None:
    """An answer, in pieces or joined, or an error that clients understand; never one of Python's own."""

    async def pieces() -> AsyncIterator[bytes]:
        for event in events:
            yield event.removeprefix(b"data: ") if whole else event + end

    kind = "application/json" if whole else "text/event-stream"
    wire = Wire([lambda: httpx.Response(200, headers={"content-type": kind}, content=pieces())])
    with _bounds(), suppress(APIError):
        answer = await wire.ask(**({"stream": True} if stream else {}))
        assert answer.status_code in (200, 400, 500, 502)
        if answer.status_code == 200 and not stream and not whole:
            assert isinstance(answer.json(), dict)


_WORDS_OF_FORMS = st.sampled_from(["guard", "off", "0.5", "nan", "1e999", "-1", "*", "", "on", "summary", "\0", "<b>"])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["save", "reset", "", "other"]),
    st.dictionaries(st.sampled_from([*LIVE, "reset", "x"]), _WORDS_OF_FORMS | st.text(max_size=9), max_size=6),
    st.booleans(),
    st.binary(max_size=30),
)
async def test_forms_of_the_page(do: str, fields: dict[str, str], is_current: bool, noise: bytes) -> None:
    """Saved, or refused by name; the page never fails, whatever an administrator's browser sends."""

    async def administrator(request: Request) -> Visitor | None:
        return Visitor(role="proxy_admin", tenant="t", auth=None)

    handler = CompactionHandler(settings_from({"store": "memory://"}))
    assert handler._live is not None
    assert handler._turns is not None
    around = Surroundings(
        live=handler._live,
        guards=handler._gate.guards,
        compactor=handler._compactor,
        store=handler._store,
        turns=handler._turns,
        router=Router,
    )
    app = FastAPI()
    app.add_api_route("/", routes._Page(around).answer, methods=["POST"])
    known = await handler._live.read()
    form = {"do": do, "revision": revision_of(known) if is_current else "old", **fields}
    body = urlencode(form, errors="replace").encode() + (b"&" + noise if noise else b"")
    headers = {"content-type": "application/x-www-form-urlencoded", "authorization": "Bearer sk-admin"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "visitor_of", administrator)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy.example") as client:
            with _bounds():
                answer = await client.post("/", content=body, headers=headers)
    assert answer.status_code in (200, 303, 409, 415, 422)
    await handler._compactor.aclose()


_MUTATED = """
import random, struct, sys, tempfile, time, tracemalloc
from pathlib import Path
sys.path.insert(0, given["root"])
from tests.tokenizers.gguf_writer import Array, bpe_fields, gguf
from litellm_compaction.errors import UnusableModelFile
from litellm_compaction.tokenizers.gguf import read_gguf
chance = random.Random(given["seed"])
spm = {
    "general.architecture": "llama", "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": Array("str", ["<unk>", "<s>", "</s>", "a"]),
    "tokenizer.ggml.scores": Array("f32", [0.0, 0.0, 0.0, -1.5]),
    "tokenizer.ggml.token_type": Array("i32", [2, 3, 3, 1]),
}
whole = [gguf(bpe_fields(), version=2), gguf(bpe_fields(), tail=bytes(64)), gguf(spm)]
numbers = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 10**6, 10**9]

def flipped(data):
    for _ in range(chance.choice((1, 3, 30))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)

def numbered(data):
    place, size = chance.randrange(len(data) - 8), chance.choice((4, 8))
    data[place : place + size] = (chance.choice(numbers) % 256**size).to_bytes(size, "little")

def cut(data):
    del data[chance.randrange(len(data)) :]

def dropped(data):
    place = chance.randrange(len(data))
    del data[place : place + chance.choice((1, 4, 8, 40))]

def doubled(data):
    place = chance.randrange(len(data))
    data[place:place] = data[place : place + chance.choice((1, 8, 200))] * chance.choice((1, 9, 999))

def typed(data):
    data[chance.randrange(8, len(data))] = chance.randrange(16)

def noisy(data):
    place = chance.randrange(len(data))
    data[place : place + 16] = chance.randbytes(16)

changes = [flipped, numbered, cut, dropped, doubled, typed, noisy]
read = refused = 0
worst_s, path = 0.0, Path(tempfile.mkdtemp()) / "model.gguf"
tracemalloc.start()
for number in range(given["files"]):
    data = bytearray(chance.choice(whole))
    for _ in range(chance.choice((1, 1, 2, 4))):
        if len(data) > 16:
            changes[number % len(changes) if _ == 0 else chance.randrange(len(changes))](data)
    path.write_bytes(data)
    begun_s = time.process_time()
    try:
        read_gguf(path)
        read += 1
    except UnusableModelFile:
        refused += 1
    worst_s = max(worst_s, time.process_time() - begun_s)
path.unlink()
path.parent.rmdir()
print(json.dumps({"read": read, "refused": refused, "worst_s": worst_s, "bytes": tracemalloc.get_traced_memory()[1]}))
"""


def test_mutated_gguf_files() -> None:
    """2,400 of them, of seven kinds: read or refused, and none costs more than any other file of its size."""
    given_now = {"seed": 2356, "files": 2_400, "root": str(ROOT)}
    found = in_child(_MUTATED, given_now, cpu_s=60, memory_mb=1024)
    assert found["read"] + found["refused"] == 2_400
    assert min(found["read"], found["refused"]) > 100, "all of one kind: these are no mutations any more"
    assert found["worst_s"] < 1
    assert found["bytes"] < 64 * 2**20
