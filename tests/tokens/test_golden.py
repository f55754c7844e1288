"""Counts against a real llama.cpp's: golden/engine.json has what it counts for whole requests (build_engine.py)."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.lib.engine_models import MODELS
from benchmarks.tokens.accuracy import parsed
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS
from litellm_compaction.core.messages import Request
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from tests.tokens.golden.build_engine import GOLDEN, digest, golden_requests

ENGINE = json.loads(GOLDEN.read_text(encoding="utf-8"))
REQUESTS = golden_requests()
# One for all: it learns nothing here, and knows what it has counted before.
COUNTER = TokenCounter()
# What llama.cpp does in ways of its own, by model, kind and numbers of the requests: an answer begun by the client is
# gone on with, a null is nothing, a reasoning takes the answer's place, parts are joined.
OWN_WAYS = {("", "prefill"): (1, 2), ("gemma4", "calls"): (4, 5, 6, 7), ("devstral", "reasoning"): (0, 1, 4)}
OWN_WAYS |= {("ministral3", "parts"): (1, 2)}


def counted(family: Family, request: Request) -> Estimate:
    return asyncio.run(COUNTER.count("t", family, request))


def test_the_golden_numbers_are_of_these_requests() -> None:
    """A request that was changed needs new numbers: run golden/build_engine.py."""
    assert ENGINE["requests"] == digest(REQUESTS)


# The vocabulary of the Gemmas takes a second of processor time to load.
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[pytest.mark.slow] * ("gemma" in name)) for name in ENGINE["tokens"]]
)
def test_requests_cost_what_the_engine_says(model: str) -> None:
    """Equal wherever we call a count exact, as any talk in a known family is; covered by its margin everywhere."""
    wrong, family = [], MODELS[model].family
    for kind, requests in REQUESTS.items():
        known = (*OWN_WAYS.get(("", kind), ()), *OWN_WAYS.get((model, kind), ()))
        for index, (request, truth) in enumerate(zip(requests, ENGINE["tokens"][model][kind], strict=True)):
            if truth is not None:
                ours = counted(family, parsed(request))
                assert ours.own.exact >= (family.exact and kind == "turns"), index
                is_rendered = ours.own.rendered and index not in known and not ours.own.optional_tokens
                if (is_rendered and ours.tokens != truth) or truth > max(ours.likely, ours.tokens + MARGIN_MIN_TOKENS):
                    wrong.append(f"{kind} {index}: ours {ours.tokens}, engine {truth}")
    assert wrong == []
