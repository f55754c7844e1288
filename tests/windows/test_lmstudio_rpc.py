"""LM Studio's own protocol as a client speaks it: one socket, matched calls, and what happens if it does not pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.lmstudio_rpc import CallRefused, InstanceAddress, LMStudioRpc
from litellm_compaction.windows.windows import Windows
from tests.builders import request_of
from tests.constants import settings_of
from tests.lmstudio_double import Model, Simulator, serve
from tests.virtual_time import Clock
from tests.windows.fake_lmstudio import target

MODEL = "qwen/qwen3-8b"


def of(identifier: str, **more: str) -> dict[str, Any]:
    return {"specifier": {"type": "query", "query": {"identifier": identifier}}, **more}


@pytest.fixture
def simulator() -> Simulator:
    made = Simulator([Model(MODEL)])
    made.load(MODEL, 8192)
    return made


@pytest.fixture
def base(simulator: Simulator) -> Iterator[str]:
    with serve(simulator) as address:
        yield f"{address.base_url}/v1"


@asynccontextmanager
async def client(**changes: Any) -> AsyncIterator[LMStudioRpc]:
    rpc = LMStudioRpc(**changes)
    try:
        yield rpc
    finally:
        await rpc.aclose()


@pytest.mark.parametrize(
    ("mode", "failure"),
    [
        ("no_upgrade", "HTTP 404"),
        ("error_200", "HTTP 200"),
        ("refused_key", "the key was refused"),
        ("no_handshake", "no connection within"),
        ("mute", "no connection within"),
        ("silent", "no answer to listLoaded within"),
        ("garbage", "not the protocol's"),
        ("huge", "closed the connection"),
        ("closes", "closed the connection"),
    ],
)
async def test_a_server_that_does_not_answer_is_left_alone_for_a_while(
    simulator: Simulator, base: str, mode: Any, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, with what to do; then asked again after a minute, two, four, and at most an hour."""
    clock, simulator.sdk.mode = Clock(), mode
    limit_s = 0.2 if mode in ("no_handshake", "mute", "silent") else 600
    async with client(timeout_s=limit_s, clock=clock) as rpc:
        for pause_s in (60, 120, 240, *((480, 960, 1920, 3600, 3600) if mode == "no_upgrade" else ())):
            with pytest.raises(ServerUnavailable):
                await rpc.call(base, None, "listLoaded", None)
            asked = len(simulator.sdk.sockets)
            clock.now_s += pause_s - 1
            assert not rpc.is_usable(base, None)
            with pytest.raises(ServerUnavailable):
                await rpc.call(base, None, "listLoaded", None)
            assert len(simulator.sdk.sockets) == asked
            clock.now_s += 1
            assert rpc.is_usable(base, None)
        (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert failure in told
        assert "ask_server" in told


async def test_a_refused_call_is_no_failure(simulator: Simulator, base: str) -> None:
    """A model that is gone says nothing of the protocol, and the words of a refusal may be a conversation's.

    A server that answers again is asked as soon after its next failure as after its first.
    """
    clock = Clock()
    async with client(timeout_s=600, clock=clock) as rpc:
        with pytest.raises(CallRefused) as refused:
            await rpc.call(base, None, "countTokens", of("gone", inputString="SECRET"))
        assert "SECRET" not in str(refused.value)
        assert rpc.is_usable(base, None)
        for mode in ("closes", "", "closes"):
            simulator.sdk.mode = mode  # type: ignore[assignment]
            with pytest.raises(ServerUnavailable) if mode else contextlib.nullcontext():
                await rpc.call(base, None, "listLoaded", None)
            clock.now_s += 60
        assert rpc.is_usable(base, None)


class Answering(LMStudioRpc):
    """Answers each call by its name."""

    def __init__(self, **answers: Any) -> None:
        super().__init__()
        self.answers = answers

    async def call(self, api_base: str, api_key: str | None, endpoint: str, parameter: Any) -> object:
        return self.answers[endpoint]


@pytest.mark.parametrize(
    ("asked", "rendered", "tokens"),
    [(1_000_000, 4_000_000, 7), (1_000_001, 9, None), (9, 4_000_001, None)],
)
async def test_what_would_hold_others_up_is_not_asked(asked: int, rendered: int, tokens: int | None) -> None:
    """A long question takes its time to be written; our own count has to do."""
    rpc = Answering(applyPromptTemplate={"formatted": "x" * rendered}, countTokens={"tokenCount": 7})
    request = request_of({"role": "user", "content": "x" * asked})
    assert await InstanceAddress(rpc, "http://host", None, MODEL).count_tokens(request) == tokens


@pytest.mark.parametrize(
    ("ttl_ms", "policy", "words", "warnings"),
    [
        (299_900, "rollingWindow", "a prompt that is too long: rollingWindow, unloaded after 5 min", [2, "300 s"]),
        (300_000, "stopAtLimit", "a prompt that is too long: stopAtLimit, unloaded after 5 min", [0]),
        (None, None, "", [0]),
    ],
)
async def test_lm_studios_settings_are_told(
    ttl_ms: int | None, policy: str | None, words: str, warnings: list[Any]
) -> None:
    """With a warning for those that cut or unload too soon."""
    row = {"identifier": MODEL, "contextLength": 8192, "instanceReference": "r", "ttlMs": ttl_ms}
    fields = [{"key": "llm.prediction.contextOverflowPolicy", "value": policy}]
    state = {"status": "idle", "queued": 1}
    rpc = Answering(listLoaded=[row], getBasePredictionConfig={"fields": fields}, getInstanceProcessingState=state)
    told = await InstanceAddress(rpc, "http://host", None, MODEL).settings()
    assert await InstanceAddress(rpc, "http://host", None, MODEL).is_busy()
    assert told.words.removesuffix(" without a request") == words
    assert len(told.warnings) == warnings[0]
    assert all(word in "".join(told.warnings) for word in warnings[1:])


async def test_an_unknown_endpoint_is_asked_for_once(simulator: Simulator, base: str) -> None:
    """A warning has no callId, and after five there are none; other calls wait on undisturbed."""
    simulator.sdk.mode, simulator.sdk.unknown = "unknown", frozenset({"applyPromptTemplate"})
    async with client() as rpc:
        for _ in range(3):
            with pytest.raises(CallRefused):
                await rpc.call(base, None, "applyPromptTemplate", of(MODEL))
        assert simulator.sdk.endpoints() == ["applyPromptTemplate"]
        assert await rpc.call(base, None, "listLoaded", None)


async def test_windows_close_the_sockets_of_their_questions(simulator: Simulator, base: str) -> None:
    """A count opens one; after a load that a request has asked for, the model is another one; none is left open."""
    async with httpx.AsyncClient(trust_env=False) as http:
        windows = Windows(cache_s=5.0, http=http, rpc=LMStudioRpc())
        asked = replace(target(MODEL), api_base=base)
        load = partial(asyncio.to_thread, simulator.load, MODEL, 8192)
        assert (await windows.ready(asked, prompt_tokens=4000, load=load)).load == 0
        raw = {"role": "user", "content": "one two three"}
        assert await windows.tokens_of(asked, request_of(raw)) == simulator.count_chat(simulator.instances[0], [raw])
        assert len(simulator.sdk.open_sockets()) == 1
        simulator.unload(MODEL)
        assert (await windows.ready(asked, prompt_tokens=4000, load=load)).load == 1
        await windows.aclose()
        await asyncio.to_thread(simulator.wait_until, lambda: simulator.sdk.open_sockets() == [])


async def test_a_caller_that_leaves_takes_nobody_along(simulator: Simulator, base: str) -> None:
    """Its call is forgotten; others go on."""
    sdk = simulator.sdk
    sdk.mode, simulator.instances[0].chats_in_app = "busy", 1
    async with client() as rpc:
        leaving = asyncio.ensure_future(rpc.call(base, None, "countTokens", of(MODEL, inputString="x")))
        await asyncio.to_thread(simulator.wait_until, lambda: "countTokens" in sdk.endpoints())
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await rpc.call(base, None, "listLoaded", None)
        simulator.instances[0].chats_in_app = 0


async def test_off_asks_nothing(simulator: Simulator, base: str) -> None:
    """No socket is opened where the protocol is not to be asked."""
    rpc = LMStudioRpc.of(settings_of(ask_server=False))
    assert not rpc.is_usable(base, None)
    with pytest.raises(ServerUnavailable):
        await rpc.call(base, None, "listLoaded", None)
    assert simulator.sdk.sockets == []
