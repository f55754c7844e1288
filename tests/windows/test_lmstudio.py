"""LM Studio's API: shapes, failures, keys, and which instance a name reaches."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import re
from collections.abc import AsyncIterator

import httpx
import pytest

from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import NotThisApi, fetch_json, unfolds_slowly
from litellm_compaction.windows.lmstudio import Instance, answers_as_lmstudio, list_models, match
from tests.virtual_time import in_virtual_time
from tests.windows.fake_lmstudio import BASE, FakeLMStudio, v0_model, v1_model


async def test_v0_is_asked_when_v1_answers_200_with_an_error(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """LM Studio before 0.4 answers 200 with an error body on v1, and that is no listing."""
    server.list_v0(v0_model("one", tokens=4096), v0_model("two", tokens=None, state="not-loaded"))
    listing = await list_models(http, BASE, None)
    assert listing.api == "v0"
    assert listing.models[0].instances == (Instance(id="one", context_length=4096, parallel=1),)
    assert listing.models[1].instances == ()


async def test_missing_optional_fields_are_accepted(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """Only key and loaded_instances are needed; nulls, odd types and unknown fields do not hurt."""
    server.list_v1(
        {"key": "bare", "loaded_instances": None, "architecture": None, "variants": None, "new": {"x": 1}},
        {"key": "odd", "loaded_instances": [{"id": "odd", "config": {"context_length": "many"}}], "variants": [3]},
        {"type": "embedding", "key": "embed", "loaded_instances": [{"id": "embed"}]},
        {"key": 7, "loaded_instances": []},
    )
    listing = await list_models(http, BASE, None)
    assert [listed.key for listed in listing.models] == ["bare", "odd", "embed"]
    assert listing.models[1].instances == (Instance(id="odd", context_length=None, parallel=1),)
    assert not listing.models[2].answers_chats


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "Unexpected endpoint"},
        {"models": [{"name": "llama3", "size": 3}]},
        None,
        httpx.Response(302, headers={"location": "/login"}),
        httpx.Response(200, content=b'{"models": [' + b" " * (4 * 1024 * 1024) + b"]}"),
        httpx.Response(200, text="[" * 100_000),
    ],
)
async def test_another_api_is_refused(server: FakeLMStudio, http: httpx.AsyncClient, answer: object) -> None:
    """Whatever is not LM Studio's shape, or too large, is named as another API."""
    server.answers = {"/api/v1/models": answer, "/api/v0/models": {"data": [{"id": "m", "object": "model"}]}}
    with pytest.raises(ServerUnavailable, match="not LM Studio's API"):
        await list_models(http, BASE, None)


async def test_a_greeting_or_a_listing_identifies_lmstudio(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """A listing needs models, as other servers have empty ones; another server is a no, a dead one raises."""
    server.list_v1()
    assert not await answers_as_lmstudio(http, BASE, None)
    server.list_v1(v1_model())
    assert await answers_as_lmstudio(http, BASE, None)
    server.answers, server.requests = {"/lmstudio-greeting": {"lmstudio": True}}, []
    assert await answers_as_lmstudio(http, BASE, None)
    assert server.paths == ["/lmstudio-greeting"]
    server.answers["/lmstudio-greeting"] = httpx.Response(401)
    assert not await answers_as_lmstudio(http, BASE, None)
    server.answers["/lmstudio-greeting"] = httpx.Response(502)
    with pytest.raises(ServerUnavailable):
        await answers_as_lmstudio(http, BASE, None)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("mine", ("qwen/qwen3-8b", "mine")),
        ("qwen/qwen3-8b", ("qwen/qwen3-8b", "small")),
        ("qwen/qwen3-8b@q4_k_m", ("qwen/qwen3-8b", "small")),
        ("qwen/qwen3-8b@q8_0", ("qwen/qwen3-8b", "small")),
        ("qwen3-8b", ("qwen/qwen3-8b", "small")),
        ("QWEN/Qwen3-8B", ("qwen/qwen3-8b", "small")),
        ("Mine", ("qwen/qwen3-8b", "mine")),
        ("idle", ("x/idle", None)),
        ("", None),
        # A key that is also an instance's id is that one; of two publishers' models the one that is loaded.
        ("q/q", ("q/q", "q/q")),
        ("twin", ("b/twin", "b/twin")),
    ],
)
async def test_names_reach_models_in_order(
    server: FakeLMStudio, http: httpx.AsyncClient, model: str, expected: tuple[str, str | None] | None
) -> None:
    """Instance id, key, variant, without quantisation, without publisher, without case; else the smallest instance."""
    server.list_v1(
        v1_model("x/idle"),
        v1_model("qwen/qwen3-8b", mine=32768, silent=None, small=4096),
        v1_model("q/q", _=16384, other=4096),
        v1_model("a/twin"),
        v1_model("b/twin", _=8192),
    )
    found = match(await list_models(http, BASE, None), model)
    assert (found and (found[0].key, found[1].id if found[1] else None)) == expected


# ------------------------------------------------------------------ one document from a server


@pytest.mark.parametrize(
    ("failure", "text", "tries"),
    [
        (httpx.ConnectError("refused"), "no connection", 1),
        (httpx.ReadTimeout("slow"), "timeout", 1),
        (httpx.ReadError("broken"), "no usable answer", 2),
        # As a server ends an idle connection, in the moment of its next use.
        (httpx.RemoteProtocolError("ended"), "no usable answer", 2),
        (httpx.ConnectTimeout("slow"), "timeout, no connection", 2),
        # Its words quote the key.
        (httpx.LocalProtocolError("Illegal header value b'sk'"), r"not sent \(LocalProtocolError\): correct", 1),
    ],
)
async def test_no_answer_is_told_apart(
    server: FakeLMStudio, http: httpx.AsyncClient, failure: Exception, text: str, tries: int
) -> None:
    """A dead server is reported at once, by kind; only a connection that ended says nothing, and is tried again."""
    server.down = failure
    with pytest.raises(ServerUnavailable, match=text):
        await list_models(http, BASE, None)
    assert len(server.requests) == tries


@in_virtual_time
async def test_a_server_that_never_answers_times_out() -> None:
    """The limit covers the whole exchange, whatever the client's own limits are."""
    server = FakeLMStudio(gate=asyncio.Event())
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.handle)) as http:
        with pytest.raises(ServerUnavailable, match="timeout, no answer within 30 s"):
            await list_models(http, BASE, None)


@pytest.mark.parametrize(
    ("statuses", "text"),
    [
        ((200, 299), ""),
        ((401, 403), "KeyRefused: .* the API key was refused"),
        ((300, 400, 402, 404, 428, 430, 499), "NotThisApi: .* not LM Studio's API, HTTP ..."),
        ((429, 500, 503), "ServerUnavailable: .*HTTP ..."),
    ],
)
async def test_a_status_says_what_is_wrong(
    server: FakeLMStudio, http: httpx.AsyncClient, statuses: tuple[int, ...], text: str
) -> None:
    """The key, the API, or that a server cannot answer now."""
    for status in statuses:
        server.answers["/x"] = httpx.Response(status, json="told")
        try:
            said = await fetch_json(http, "http://host/x", "sk-lm-1")
        except ServerUnavailable as error:
            said = f"{type(error).__name__}: {error}"
        assert re.fullmatch(text or "told", str(said)), status


@pytest.mark.parametrize(
    ("body", "is_read"),
    [
        (b'"%b"' % (b"a" * (4 * 1024 * 1024 - 2)), True),
        (b'"%b"' % (b"a" * (4 * 1024 * 1024 - 1)), False),
        (b"[%b0]" % (b"0," * 399_999), True),
        (b"[%b0]" % (b"0," * 400_000), False),
    ],
)
async def test_a_body_is_read_that_holds_nothing_up(
    server: FakeLMStudio, http: httpx.AsyncClient, body: bytes, is_read: bool
) -> None:
    """Up to 4 MiB, and 400,000 values."""
    server.answers["/x"] = httpx.Response(200, content=body)
    with contextlib.nullcontext() if is_read else pytest.raises(NotThisApi):
        await fetch_json(http, "http://host/x", None)


async def test_a_bad_address_is_unavailable(http: httpx.AsyncClient) -> None:
    """A malformed api_base raises our error, not httpx's, and hides credentials."""
    with pytest.raises(ServerUnavailable) as caught:
        await list_models(http, "ftp://user:secret@host/v1", None)
    assert "secret" not in str(caught.value)
    with pytest.raises(ServerUnavailable):
        await list_models(http, "http://[::bad", None)


async def test_a_compressed_answer_is_closed_with_its_connection() -> None:
    """Else it keeps one of the few for good; it is unfolded piece by piece, and others run between them."""

    class Body(httpx.AsyncByteStream):
        is_closed = False

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield folded

        async def aclose(self) -> None:
            self.is_closed = True

    async def others() -> None:
        while not body.is_closed:
            await asyncio.sleep(0)
            turns.append(len(turns))

    folded, body, turns = gzip.compress(random.Random(1).randbytes(9_000)), Body(), list[int]()
    response = httpx.Response(200, headers={"content-encoding": "gzip"}, stream=body)
    assert unfolds_slowly(response)
    beside = asyncio.ensure_future(others())
    pieces = [piece async for piece in response.aiter_raw()]
    assert ([len(piece) for piece in pieces[:2]], b"".join(pieces)) == ([4096, 4096], folded)
    assert len(turns) >= 2
    await beside
    assert body.is_closed


async def test_whoever_is_cancelled_as_an_answer_comes_is_cancelled() -> None:
    """Work in the background that missed it would keep a proxy from its end."""

    def answer(request: httpx.Request) -> httpx.Response:
        asking.cancel()
        return httpx.Response(200, json={})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        asking = asyncio.ensure_future(fetch_json(http, BASE, None))
        with pytest.raises(asyncio.CancelledError):
            await asking
