"""Decisions by LM Studio's own count, over the protocol of its SDKs: exact from the first request on, no prefill.

The simulator's tokenizer is none that this package has where its `tokens_factor` is not 1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.lmstudio_rpc import LMStudioRpc
from litellm_compaction.windows.windows import Windows
from tests.builders import JsonDict, calls, parsed, result, system, talk, user
from tests.engine.bench import Bench
from tests.lmstudio_double import Model, Simulator, serve

WINDOW = 8192
UNKNOWN, KNOWN = "acme/strange-7b", "qwen/qwen3-8b"


class Server:
    """The simulator, and an engine in front of it that sends what it prepares."""

    def __init__(self, simulator: Simulator, bench: Bench, http: httpx.AsyncClient, base_url: str, key: str) -> None:
        self.simulator = simulator
        self.bench = bench
        self.key = key
        self._http = http
        self._base_url = base_url

    @property
    def prefills(self) -> int:
        return len(self.simulator.inference_requests())

    async def post(self, messages: Sequence[JsonDict], tools: Sequence[JsonDict] = (), **fields: Any) -> int:
        """`prompt_tokens` of a chat completion."""
        answer = await self._answer(messages, tools, **fields)
        return int(answer.json()["usage"]["prompt_tokens"])

    async def _answer(
        self, messages: Sequence[JsonDict], tools: Sequence[JsonDict] = (), **fields: Any
    ) -> httpx.Response:
        body = {"model": self.key, "messages": list(messages), **({"tools": list(tools)} if tools else {}), **fields}
        return await self._http.post(f"{self._base_url}/v1/chat/completions", json=body)

    def context(self, **changes: Any) -> Any:
        async def measure(request: Request) -> int | None:
            raw = [dict(message.raw) for message in request.messages]
            answer = await self._answer(raw, list(request.tools), max_tokens=1)  # type: ignore[arg-type]
            return int(answer.json()["usage"]["prompt_tokens"]) if answer.status_code == 200 else None

        target = self.bench.target(
            None, model=self.key, api_base=f"{self._base_url}/v1", is_lmstudio=True, api_key=None
        )
        return self.bench.context(target=target, measure=measure, warm_up=self._warm_up, **changes)

    async def _warm_up(self) -> None:
        self.simulator.load(self.key, WINDOW)

    async def guard(
        self, messages: Sequence[JsonDict], tools: Sequence[JsonDict] = (), **changes: Any
    ) -> PreparedRequest:
        request = Request(messages=parsed(messages), tools=tuple(tools))
        return await self.bench.compactor.guard(request, self.context(**changes))

    async def served(self, messages: Sequence[JsonDict], **changes: Any) -> tuple[PreparedRequest, int]:
        """What was prepared, and the server's own number for it; both are learned from."""
        prepared = await self.guard(messages, **changes)
        sent = messages if prepared.messages is None else [dict(message.raw) for message in prepared.messages]
        told = await self.post(sent, max_tokens=1)  # type: ignore[arg-type]
        self.bench.compactor.replies.learn(self.context(), prepared, prompt_tokens=told, completion_tokens=1)
        return prepared, told


@asynccontextmanager
async def lm_studio(
    key: str = UNKNOWN,
    *,
    factor: float = 1.0,
    asks: bool = True,
    window: int = WINDOW,
    architecture: str = "strange",
) -> AsyncIterator[Server]:
    model = Model(key=key, publisher="acme", architecture=architecture, tokens_factor=factor)
    simulator = Simulator(models=[model])
    simulator.load(key, window)
    with serve(simulator) as address:
        async with httpx.AsyncClient(timeout=30) as http:
            rpc = LMStudioRpc(is_on=asks, timeout_s=1.0)
            bench = Bench(counter=TokenCounter(), windows=Windows(cache_s=1000.0, rpc=rpc))
            try:
                yield Server(simulator, bench, http, address.base_url, key)
            finally:
                await bench.compactor.aclose()


@pytest.mark.parametrize(
    ("factor", "pictures", "share"), [(2.0, 0, 0.01), (2.0, 0, 0.1), (2.0, 0, 0.2), (1.0, 1, 0.01), (1.0, 1, 0.1)]
)
async def test_an_answer_is_bounded_by_the_most_that_its_prompt_may_be(
    factor: float, pictures: int, share: float
) -> None:
    """A known model whose server counts twice as much, or charges a small picture as a large one, unasked.

    If that leaves half of the window; as soon as it has told its number for text, an answer has the rest.
    """
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with lm_studio(KNOWN, architecture="qwen3", factor=factor, asks=False) as server:
        for turn in range(2):
            text = {"type": "text", "text": f"{turn} " + "word " * int(share * WINDOW)}
            asked = {"role": "user", "content": [text, *[picture] * pictures]}
            prepared, told = await server.served([system("Be brief."), asked])
            assert told > factor * share * WINDOW
            assert told + prepared.max_output_tokens(None) <= WINDOW
            # An answer that has ended at that bound tells what text takes, and not what a picture does.
            assert not pictures or told + prepared.max_output_tokens(None, is_certain=True) <= WINDOW
        assert server.prefills == 2
        # One number that is twice ours leaves 30 % of doubt.
        assert told + prepared.max_output_tokens(None) > 0.85 * WINDOW or pictures or share < 0.1


async def test_images_are_not_asked_about() -> None:
    """The protocol counts none, and a number without them would pass for the whole prompt's: an answer tells all."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with lm_studio(factor=0.8) as server:
        question = [{"type": "text", "text": "word " * 6_600}, picture, picture]
        prepared, told = await server.served([system("Be brief."), {"role": "user", "content": question}])
        assert prepared.messages is None
        # Parts first, whose images may cost anything; then all of it, and the test's own request.
        assert 2 <= server.prefills <= 6
        assert told + prepared.max_output_tokens(None) <= WINDOW


@pytest.mark.parametrize(("key", "architecture"), [(KNOWN, "qwen3"), (UNKNOWN, "strange")])
@pytest.mark.parametrize("thinks", [False, True])
async def test_a_count_that_is_too_high_refuses_nothing_before_an_answer_has_confirmed_it(
    key: str, architecture: str, thinks: bool
) -> None:
    """A first number by which a request does not fit, though it does by ours, is held against an answer."""
    async with lm_studio(key, architecture=architecture) as server:
        server.simulator.sdk.tokens_factor = 1.4
        messages = [system("Be brief."), user("word " * int(0.8 * WINDOW))]
        if thinks:
            thought = {**calls("123456789"), "reasoning_content": "I think about it. " * 30}
            messages = [system("Be brief."), user("Fix it."), thought, result("123456789", "word " * int(0.8 * WINDOW))]
        prepared, told = await server.served(messages)
        assert prepared.messages is None
        assert told > 0.75 * WINDOW
        assert told + prepared.max_output_tokens(None) <= WINDOW


@pytest.mark.parametrize(("key", "architecture"), [(KNOWN, "qwen3"), (UNKNOWN, "strange")])
@pytest.mark.parametrize("share", [0.5, 0.95])
async def test_a_count_that_is_too_low_cuts_nothing_from_the_first_request_on(
    key: str, architecture: str, share: float
) -> None:
    """Until an answer has confirmed the protocol, an answer leaves room for what its number may have left out."""
    async with lm_studio(key, architecture=architecture) as server:
        server.simulator.sdk.tokens_factor = 0.85
        for turn in range(2):
            prepared, told = await server.served(talk(f"engine {turn}", int(share * WINDOW), words=300))
            assert told + prepared.max_output_tokens(None) <= WINDOW
