"""Counts of whole requests against what llama.cpp counts for them.

golden/engine.json was made by golden/build_engine.py with a real llama-server; where one is on this machine
(LLAMA_SERVER), a part of the numbers is asked for again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

from benchmarks.lib.engine_models import MODELS
from benchmarks.tokens.accuracy import parsed
from litellm_compaction.tokens.count import Count
from litellm_compaction.tokens.counter import TokenCounter
from tests.tokens.golden.build_engine import GOLDEN, golden_requests

MADE = json.loads(GOLDEN.read_text(encoding="utf-8"))
REQUESTS = golden_requests()
# One for all: it learns nothing here, and knows what it has counted before.
COUNTER = TokenCounter()


def pairs(model: str, kind: str) -> Iterator[tuple[int, Count, int]]:
    """For each request that the engine takes: its number, our count, and the engine's."""
    family = MODELS[model].family
    for index, (request, truth) in enumerate(zip(REQUESTS[kind], MADE["tokens"][model][kind], strict=True)):
        if truth is not None:
            yield index, asyncio.run(COUNTER.count("t", family, parsed(request))), truth
