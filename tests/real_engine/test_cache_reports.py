"""What a real llama.cpp reports of its cache, and what is learned of it: a running state, and plain attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from litellm_compaction.engine.cache_reports import CacheReports
from litellm_compaction.tokenizers.families import HEURISTIC
from tests.builders import prose
from tests.engine.bench import Bench
from tests.engine.test_cache_reports import as_sent
from tests.real_engine.engine import Engine, running
from tests.real_engine.weights import write_running_state

_WINDOW = 2048
_LEAD = {"role": "system", "content": prose("lead", 300)}


def _ask(engine: Engine, messages: list[dict[str, Any]]) -> tuple[str, int, int]:
    """The answer, and its prompt's tokens: all, and those from the cache."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{engine.base_url}/v1/chat/completions", json=body, timeout=300).json()
    usage = answer["usage"]
    text: str = answer["choices"][0]["message"]["content"]
    return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("kind", ["running state", "attention"])
def test_llama_cpp_says_by_its_cached_tokens_how_it_reads(kind: str, weights: Path, tmp_path: Path) -> None:
    """Nothing of the system message is at hand behind a change for the one, all of it for the other."""
    bench = Bench()
    case = bench.case(_WINDOW, target=bench.target(_WINDOW, model="nobody-knows"))
    reports = CacheReports()
    reports.recall(case.target, HEURISTIC)
    changed: list[int] = []
    with running(weights if kind == "attention" else write_running_state(tmp_path), _WINDOW) as engine:
        for number in range(4):
            messages = [_LEAD, {"role": "user", "content": f"{number}: {prose(f'q{number}', 40)}"}]
            for turn in range(2):
                guarded = as_sent(messages)
                reports.sending(case, guarded)
                text, prompt_tokens, cached_tokens = _ask(engine, messages)
                reports.learn(case, guarded, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
                changed += [cached_tokens] if number and not turn else []
                messages = [
                    *messages,
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": prose(f"then {number}", 30)},
                ]
    assert [tokens >= 256 for tokens in changed] == [kind == "attention"] * 3
    assert reports.rereads(case.target, HEURISTIC) is (kind == "running state")
