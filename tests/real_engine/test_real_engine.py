"""The promises on a real engine: what a simulator takes for granted is what llama.cpp itself says here."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.models.counter import TokenCounter
from litellm_compaction.models.sources import Sources
from litellm_compaction.models.window import Target
from tests.real_engine.bench import Bench

_TEXTS = (
    "Hi.",
    "  two  spaces,\ttabs\n\n\nand lines  ",
    'def f(x):\n    return {"a": [x, 1.5e-3], "b": None}  # 100 %',
    "Größe, naïve café, Ελληνικά, русский текст, 日本語の文章, 한국어, العربية, 👩‍👩‍👧 🇪🇺",
    "the user wrote <|im_end|> and <|im_start|>system in the middle of a sentence",
    "/srv/data/2026-11-22/part-00017.parquet 9f86d081884c7d659a2feaa0c55ad015 +49 30 1234567",
)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _conversations() -> list[list[dict[str, Any]]]:
    system = {"role": "system", "content": "Answer in one word."}
    plain = [[_user(text)] for text in _TEXTS]
    talks = [[system, _user(text), _assistant(text), _user("And?")] for text in _TEXTS]
    return [*plain, *talks, [system, _user(" ".join(_TEXTS)), _assistant("Yes."), _user("x" * 300)]]


async def test_counts_by_the_models_file_are_the_engines_own(bench: Bench) -> None:
    """Each of our counts is what the engine reads: its template, its vocabulary, control tokens in texts included."""
    target = Target(key="k", model="smollm2", api_base=None, api_key=None, context_length=2048)
    source = await Sources(tokenizer=str(bench.weights)).source(target, "llama", None, patient=True)
    wrong: list[tuple[int, int, str]] = []
    async with httpx.AsyncClient(base_url=bench.engines["talk"].base_url, timeout=60) as engine:
        for messages in _conversations():
            prompt = (await engine.post("/apply-template", json={"messages": messages})).json()["prompt"]
            asked = {"content": prompt, "add_special": True, "parse_special": True}
            counted = len((await engine.post("/tokenize", json=asked)).json()["tokens"])
            request = Request(messages=tuple(map(parse_message, messages)))
            ours = await TokenCounter().count("k", source.family, request)
            if ours.tokens != counted:
                wrong.append((ours.tokens, counted, prompt[-80:]))
    assert wrong == []


def test_thirty_turns_overflow_nothing_and_keep_the_prompt_cache(bench: Bench) -> None:
    """A conversation of twice the window: every turn is answered, nothing is cut, and the cache holds the last turn."""
    window = bench.engines["talk"].window_tokens
    messages: list[dict[str, Any]] = []
    compacted: list[int] = []
    begun = len(bench.shim.exchanges)
    for turn in range(30):
        fact = f"Item {turn} lies in box {turn * 37 % 101}, shelf {turn * 53 % 97}. "
        messages.append(_user(fact * 5 + "Where does it lie?"))
        answer = bench.proxy.chat("talk", messages, max_tokens=6, temperature=0)
        assert answer.status_code == 200, answer.text
        if answer.headers["x-litellm-compaction"] == "compacted":
            compacted.append(turn)
        messages.append(_assistant(answer.json()["choices"][0]["message"]["content"]))
    asked = bench.shim.answers("talk", since=begun)
    assert [exchange.error for exchange in asked if exchange.error] == []
    assert len(asked) == 30
    assert max(exchange.total_tokens for exchange in asked) <= window
    assert 2 <= len(compacted) <= 5
    for turn, (before, after) in enumerate(pairwise(asked), 1):
        if turn not in compacted:
            # All of the last prompt and its answer, but for what the template ends an answer with.
            assert after.cached_tokens >= before.total_tokens - 2, turn
