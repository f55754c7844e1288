"""Many turns: compaction stays rare, the record goes on, and nothing grows without end."""

from __future__ import annotations

import itertools

import pytest

from litellm_compaction.errors import SummaryFailed
from tests.builders import JsonDict, calls, numbered, result, system, user
from tests.engine.bench import Bench, FakeAsk, sent

TASK = "Port src/parser.py to Rust and never touch /etc/passwd."
# A summary as long as it may be.
FULL = "### Original task\nPort the parser.\n" + numbered("a line of the record with src/file.rs in it", 60)


@pytest.mark.parametrize("answer", [FULL, SummaryFailed("error")])
@pytest.mark.parametrize("fixed_words", [0, 4400])
async def test_small_turns_are_never_compacted_one_by_one(answer: str | Exception, fixed_words: int) -> None:
    """However much of the window the system prompt takes: after a compaction the next turns reuse it."""
    bench = Bench(ask=FakeAsk(answer))
    raw: list[JsonDict] = [system("rule " * fixed_words), user(TASK)]
    compacted: list[int] = []
    for number in range(90):
        raw = [*raw, calls(f"c{number}"), result(f"c{number}", f"result {number} " + "data " * 30)]
        prepared = await bench.guard(raw)
        sent(raw, prepared)
        if prepared.action == "compacted":
            compacted.append(number)
    assert compacted
    gaps = [later - earlier for earlier, later in itertools.pairwise(compacted)]
    assert min(gaps, default=99) >= 3, gaps
