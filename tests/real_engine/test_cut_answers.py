"""Answers that are cut and gone on with: the next token is the one that the model would have said.

With temperature 0 the uncut answer is what every way has to come to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from litellm_compaction.core.cuts import settled_length
from litellm_compaction.core.joiner import Joiner
from litellm_compaction.core.messages import Message, parse_message
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.begun import begun_prompt, needed_renderings
from tests.real_engine.engine import Engine, running

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that reverses a list, and explain it.",
    "List the planets of the solar system, one line each.",
)
_SAME_CHARS = 20
_ANSWER_TOKENS = 72


class Continued(NamedTuple):
    """A cut answer, what its model would have said next, and what it said."""

    prompt: str
    rest: str
    given: str
    opening: str

    @property
    def is_exact(self) -> bool:
        """Whether both begin with the same words; further on two equally likely ones may part them."""
        return len(self.given) >= _SAME_CHARS and self.rest[:_SAME_CHARS] == self.given[:_SAME_CHARS]


def _said(engine: httpx.Client, path: str, **body: Any) -> str:
    """What an engine says, asked for a stream as the proxy does."""
    asked = {"temperature": 0, "max_tokens": _ANSWER_TOKENS, "stream": True, **body}
    text = ""
    with engine.stream("POST", path, json=asked) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in httpx.Response(200, content=line[6:]).json()["choices"]:
                    text += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    return text


def _rendered(engine: httpx.Client, messages: Sequence[Message]) -> str:
    """A prompt as the engine's own template writes it."""
    asked = {"messages": [dict(message.raw) for message in messages]}
    return str(engine.post("/apply-template", json=asked).json()["prompt"])


def go_on(engine: httpx.Client, way: str, index: int, whole: str) -> Continued:
    """One answer, cut where a restart could have cut it, and gone on with."""
    asked = {"role": "user", "content": PROMPTS[index]}
    partial = whole[: settled_length(whole[: len(whole) * (30 + 10 * (index % 4)) // 100])]
    rest, shown = whole[len(partial) :], partial.rstrip()
    messages = [asked, {"role": "assistant", "content": shown}]
    joiner = Joiner(partial, shown=shown)
    if way == "raw":
        parsed = [parse_message(message) for message in messages]
        by_server = [_rendered(engine, each) for each in needed_renderings(parsed)]
        prompt = begun_prompt(family_of("llama", "smollm2"), parsed, datetime(2026, 11, 22), by_server)
        assert prompt is not None
        given = _said(engine, "/v1/completions", prompt=prompt.text, stop=[prompt.end_of_turn])
    else:
        given = _said(engine, "/v1/chat/completions", messages=messages)
    return Continued(PROMPTS[index], rest, joiner.feed(given) + joiner.finish(), joiner.opening)


def client_of(engine: Engine) -> httpx.Client:
    """A client that opens a connection for each request: the engine may close an idle one just then."""
    return httpx.Client(base_url=engine.base_url, timeout=300, limits=httpx.Limits(max_keepalive_connections=0))


@pytest.fixture(scope="module")
def engine(weights: Path) -> Iterator[httpx.Client]:
    """An engine of its own, asked without a proxy."""
    with running(weights, 512) as started, client_of(started) as client:
        yield client


@pytest.fixture(scope="module")
def answers(engine: httpx.Client) -> dict[int, str]:
    """What the model says where nothing is cut."""
    asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return {at: _said(engine, "/v1/chat/completions", messages=messages) for at, messages in enumerate(asked)}


@pytest.mark.parametrize("way", ["raw", "prefill"])
async def test_a_cut_answer_goes_on_at_the_next_token(engine: httpx.Client, way: str, answers: dict[int, str]) -> None:
    """Sent raw, as the engine renders it, or as a message: no instruction, no seam, nothing begun anew."""
    continued = [go_on(engine, way, index, whole) for index, whole in answers.items()]
    assert [each.opening for each in continued] == ["new"] * len(PROMPTS)
    assert [each for each in continued if not each.is_exact] == []
