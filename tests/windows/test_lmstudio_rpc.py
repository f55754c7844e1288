"""LM Studio's own protocol as a client speaks it: one socket, matched calls, and what happens if it does not pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from litellm_compaction.config import settings_from
from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.lmstudio_rpc import CallRefused, LMStudioRpc
from litellm_compaction.windows.windows import Windows
from tests.windows.fake_lmstudio import Clock, FakeLMStudio, target, v1_model
from tests.windows.fake_rpc import MODEL, FakeRpc, serving

SPECIFIER = {"specifier": {"type": "query", "query": {"identifier": MODEL}}}


@asynccontextmanager
async def client(**changes: Any) -> AsyncIterator[LMStudioRpc]:
    rpc = LMStudioRpc(**changes)
    try:
        yield rpc
    finally:
        await rpc.aclose()


HARSH: list[tuple[dict[str, Any], str]] = [
    ({"status": 404}, "HTTP 404"),
    ({"status": 200}, "HTTP 200"),
    ({"accepts": False}, "the key was refused"),
    ({"greets": False}, "no connection within"),
    ({"answers": {"listLoaded": None}}, "no answer to listLoaded within"),
    ({"raw": "<html>"}, "not the protocol's"),
    ({"raw": "[" * 100_000}, "not the protocol's"),
    ({"raw": " " * (5 << 20) + "{}"}, "closed the connection"),
    ({"closes": True}, "closed the connection"),
]


@pytest.mark.parametrize(("changes", "failure"), HARSH)
async def test_a_server_that_does_not_answer_is_left_alone_for_a_while(
    changes: dict[str, Any], failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, with what to do; then asked again after a minute, two, four, and at most an hour."""
    clock = Clock()
    async with serving(FakeRpc(**changes)) as fake, client(timeout_s=0.2, clock=clock) as rpc:
        for pause_s in (60, 120, 240):
            with pytest.raises(ServerUnavailable):
                await rpc.call(fake.base, None, "listLoaded", None)
            asked = len(fake.headers)
            clock.now_s += pause_s - 1
            assert not rpc.is_usable(fake.base, None)
            with pytest.raises(ServerUnavailable):
                await rpc.call(fake.base, None, "listLoaded", None)
            assert len(fake.headers) == asked
            clock.now_s += 1
            assert rpc.is_usable(fake.base, None)
        (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert failure in told
        assert "ask_server" in told


async def test_a_refused_call_is_no_failure() -> None:
    """A model that is gone says nothing of the protocol, and the words of a refusal may be a conversation's."""
    async with serving(FakeRpc()) as fake, client() as rpc:
        gone = {"specifier": {"type": "query", "query": {"identifier": "gone"}}, "inputString": "SECRET"}
        with pytest.raises(CallRefused) as refused:
            await rpc.call(fake.base, None, "countTokens", gone)
        assert "SECRET" not in str(refused.value)
        assert rpc.is_usable(fake.base, None)


async def test_an_unknown_endpoint_is_asked_for_once() -> None:
    """A warning has no callId, and after five there are none; other calls wait on undisturbed."""
    async with serving(FakeRpc()) as fake, client(timeout_s=0.5) as rpc:
        fake.answers["applyPromptTemplate"] = {
            "type": "communicationWarning",
            "warning": "Received rpcCall for unknown endpoint, endpoint = applyPromptTemplate",
        }
        for _ in range(3):
            with pytest.raises(CallRefused):
                await rpc.call(fake.base, None, "applyPromptTemplate", {**SPECIFIER})
        assert fake.endpoints == ["applyPromptTemplate"]
        assert await rpc.call(fake.base, None, "listLoaded", None)


async def test_windows_close_the_sockets_of_their_questions(server: FakeLMStudio, http: httpx.AsyncClient) -> None:
    """A count opens one; nothing is left open when the proxy stops."""
    server.list_v1(v1_model(MODEL, _=8192))
    async with serving(FakeRpc()) as fake:
        windows = Windows(cache_s=5.0, http=http, rpc=LMStudioRpc())
        asked = replace(target(MODEL), api_base=fake.base)
        await windows.resolve(asked)
        request = Request(messages=(parse_message({"role": "user", "content": "one two three"}),))
        assert await windows.tokens_of(asked, request) == 3
        assert fake.open == 1
        await windows.aclose()
        while fake.open:  # noqa: ASYNC110 - another task's count
            await asyncio.sleep(0)


async def test_a_caller_that_leaves_takes_nobody_along() -> None:
    """Its call is forgotten; others go on."""
    async with serving(FakeRpc()) as fake, client() as rpc:
        fake.answers["countTokens"] = None
        leaving = asyncio.ensure_future(rpc.call(fake.base, None, "countTokens", {**SPECIFIER, "inputString": "x"}))
        while "countTokens" not in fake.endpoints:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await rpc.call(fake.base, None, "listLoaded", None)


async def test_off_asks_nothing() -> None:
    """`ask_server: off` opens no socket."""
    async with serving(FakeRpc()) as fake:
        rpc = LMStudioRpc.of(settings_from({"ask_server": "off"}))
        assert not rpc.is_usable(fake.base, None)
        with pytest.raises(ServerUnavailable):
            await rpc.call(fake.base, None, "listLoaded", None)
        assert fake.headers == []
