"""One document from a server: how a failure is told, and which keys are sent."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator

import httpx
import pytest

from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import unfolds_slowly
from litellm_compaction.windows.lmstudio import (
    list_models,
)
from tests.windows.fake_lmstudio import BASE, FakeLMStudio


@pytest.mark.parametrize(
    ("failure", "text", "tries"),
    [
        (httpx.ConnectError("refused"), "no connection", 1),
        (httpx.ReadTimeout("slow"), "timeout", 1),
        (httpx.ReadError("broken"), "no usable answer", 2),
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


async def test_a_server_that_never_answers_times_out(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """The limit covers the whole exchange, whatever the client's own limits are."""
    server.gate = asyncio.Event()
    with pytest.raises(ServerUnavailable, match=r"timeout, no answer within 0\.01 s"):
        await list_models(http, BASE, None, timeout_s=0.01)


async def test_a_refused_key_is_named(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """401 and 403 say that it is the key."""
    server.answers = {"/api/v1/models": httpx.Response(401), "/api/v0/models": httpx.Response(403)}
    with pytest.raises(ServerUnavailable, match=r"HTTP 401, the API key was refused.*HTTP 403"):
        await list_models(http, BASE, "sk-lm-1")


async def test_a_bad_address_is_unavailable(http: httpx.AsyncClient) -> None:
    """A malformed api_base raises our error, not httpx's, and hides credentials."""
    with pytest.raises(ServerUnavailable) as caught:
        await list_models(http, "ftp://user:secret@host/v1", None)
    assert "secret" not in str(caught.value)
    with pytest.raises(ServerUnavailable):
        await list_models(http, "http://[::bad", None)


@pytest.mark.parametrize(
    ("api_key", "sent"),
    [
        (None, None),
        ("", None),
        ("fake-api-key", None),
        ("sk-lm-1", "Bearer sk-lm-1"),
        ("schlüssel", "Bearer schlüssel"),
    ],
)
async def test_only_real_keys_are_sent(
    server: FakeLMStudio, http: httpx.AsyncClient, api_key: str | None, sent: str | None
) -> None:
    """Placeholders are not sent as bearer tokens."""
    server.list_v1()
    await list_models(http, BASE, api_key)
    got = dict(server.requests[0].headers.raw).get(b"Authorization")
    assert (got.decode() if got is not None else None) == sent


async def test_a_compressed_answer_is_closed_with_its_connection() -> None:
    """A server that sends more than is read would keep one of the few for good."""

    class Body(httpx.AsyncByteStream):
        is_closed = False

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield gzip.compress(b"[]")

        async def aclose(self) -> None:
            self.is_closed = True

    body = Body()
    response = httpx.Response(200, headers={"content-encoding": "gzip"}, stream=body)
    assert unfolds_slowly(response)
    await response.aclose()
    assert body.is_closed
