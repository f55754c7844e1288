"""Counts of whole requests against what llama.cpp counts for them.

golden/engine.json was made by golden/build_engine.py with a real llama-server; where one is on this machine
(LLAMA_SERVER), a part of the numbers is asked for again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.lib.accuracy_requests import JsonObject
from benchmarks.lib.engine_models import MODELS, write_model
from benchmarks.lib.llama_server import VARIABLE, program, served
from benchmarks.tokens.accuracy import parsed
from litellm_compaction.tokens.count import Count
from litellm_compaction.tokens.counter import TokenCounter
from tests.tokens.golden.build_engine import GOLDEN, digest, golden_requests

MADE = json.loads(GOLDEN.read_text(encoding="utf-8"))
REQUESTS = golden_requests()
# One for all: it learns nothing here, and knows what it has counted before.
COUNTER = TokenCounter()
# What llama.cpp does in ways of its own, by model ("" is all), kind and number of the request; "" for all of a kind.
# An answer begun by the client is gone on with, which each template does in another way (up to 4 tokens more).
PREFILLED = ("", "prefill", (1, 2))
OWN_WAYS = (
    PREFILLED,
    # Its engine writes nothing for null, where Python and JavaScript write a word.
    ("gemma4", "calls", (4, 5, 6, 7)),
    # Handed a reasoning, it drops the answer beside it: Devstral's template was not made for Ministral's blocks.
    ("devstral", "reasoning", (0, 1, 4)),
    # It joins the parts of an assistant's and a system message in blocks.
    ("ministral3", "parts", (1, 2)),
)


def own_ways(model: str, kind: str) -> set[int]:
    return {index for name, of, indexes in OWN_WAYS if name in ("", model) and of == kind for index in indexes}


def pairs(model: str, kind: str) -> Iterator[tuple[int, Count, int]]:
    """For each request that the engine takes: its number, our count, and the engine's."""
    family = MODELS[model].family
    for index, (request, truth) in enumerate(zip(REQUESTS[kind], MADE["tokens"][model][kind], strict=True)):
        if truth is not None:
            yield index, asyncio.run(COUNTER.count("t", family, parsed(request))), truth


def test_the_golden_numbers_are_of_these_requests() -> None:
    """A request that was changed needs new numbers: run golden/build_engine.py."""
    assert MADE["requests"] == digest(REQUESTS)


@pytest.mark.parametrize("model", MADE["tokens"])
def test_requests_cost_what_the_engine_says(model: str) -> None:
    """Equal wherever we call a count exact, and covered by its margin everywhere."""
    wrong = []
    for kind in REQUESTS:
        known = own_ways(model, kind)
        for index, ours, truth in pairs(model, kind):
            is_rendered = ours.rendered and index not in known and not ours.doubtful_tools_tokens
            if (is_rendered and ours.tokens != truth) or truth > ours.tokens + ours.margin_tokens:
                wrong.append(f"{kind} {index}: ours {ours.tokens}, engine {truth}")
    assert wrong == []


@pytest.mark.parametrize("model", MADE["tokens"])
def test_text_is_rendered_for_every_family(model: str) -> None:
    """What a user and an assistant say is never left to a formula."""
    for kind in ("one message", "system", "turns", "scripts", "white space", "random text"):
        assert all(ours.rendered for _, ours, _ in pairs(model, kind)), kind


def asked_again() -> Sequence[JsonObject]:
    return [requests[-1] for kind, requests in REQUESTS.items() if kind != "prefill"]


@pytest.mark.parametrize("model", ["llama2", "mistral-v3", "qwen3"])
def test_a_real_engine_says_so_today(model: str, tmp_path: Path) -> None:
    """The engine of this machine counts what we count, for one request of each kind."""
    binary = program()
    if binary is None:
        pytest.skip(f"no llama.cpp here: name its llama-server in {VARIABLE}")
    with served(binary, write_model(tmp_path / "model.gguf", MODELS[model])) as server:
        for request in asked_again():
            ours = asyncio.run(COUNTER.count("t", MODELS[model].family, parsed(request)))
            if ours.rendered:
                assert server.prompt_tokens(request) == ours.tokens
