"""Conversations at a model that nobody knows, or whose server counts otherwise than its name says: promise P1.

Real vocabularies and templates count them. The same is measured on recorded conversations by
`benchmarks/tokens/unknown_models.py`.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from benchmarks.lib.accuracy_requests import CODE, LOG, PROSE, SCRIPTS, TABLE
from benchmarks.lib.measuring import Transcript
from benchmarks.tokens.unknown_models import replayed

_KINDS = {
    "prose": PROSE * 4,
    "code": CODE * 3,
    "log": LOG,
    "table": TABLE * 3,
    "other scripts": "\n".join(SCRIPTS.values()),
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a file of the harbor's office.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
    },
}


def agent(seed: int, turns: int = 24) -> Transcript:
    """An agent's session: each turn reads another kind of text, and now and then its user says something."""
    chance = random.Random(seed)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You work for the harbor. " * 12},
        {"role": "user", "content": "Find out why the fees of November are wrong. " + PROSE},
    ]
    kinds = list(_KINDS)
    for turn in range(turns):
        if turn % 7 == 6:
            messages += [
                {"role": "assistant", "content": PROSE},
                {"role": "user", "content": f"And what about number {turn}? {_KINDS[chance.choice(kinds)][:300]}"},
            ]
            continue
        kind = kinds[min(turn // 5, len(kinds) - 1)] if chance.random() < 0.6 else chance.choice(kinds)
        arguments = json.dumps({"path": f"/srv/harbor/{turn}.txt", "lines": turn * 37})
        call = {"id": f"call{turn:05d}", "type": "function", "function": {"name": "look", "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": f"Now {kind}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": _KINDS[kind][: chance.randint(300, 1800)]},
        ]
    return Transcript(f"agent {seed}", [*messages, {"role": "assistant", "content": "Done."}], [_TOOL], [])


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("nobody-knows", "mistral-7b-instruct-v0.3"),
        ("nobody-knows", "gemma-4-12b"),
        ("nobody-knows", "qwen3-8b:no-calls"),
        ("glm-4", "mistral-nemo"),
        ("glm-4", "mistral-7b-instruct-v0.3"),
        ("glm-4", "llama-3.1-8b"),
    ],
)
async def test_nothing_is_cut_whoever_counts(name: str, truth: str) -> None:
    """Prompt and answer stay inside the window at every turn, and so do questions and summaries."""
    for seed in range(2):
        found = await replayed(agent(seed), truth, name, 4096)
        assert (found.truncated, found.low, found.invalid) == (0, 0, 0)
        # A template that leaves out calls and results leaves nothing that would have to be compacted.
        assert found.compacted > 0 or truth.endswith(":no-calls")
        assert [refusal for refusal in found.refusals if refusal.can_fit] == []


@pytest.mark.parametrize("truth", ["llama-3.1-8b:x0.8", "llama-3.1-8b:x1.2", "llama-3.1-8b:x1.3"])
async def test_a_known_family_that_counts_otherwise_refuses_nothing_that_fits(truth: str) -> None:
    """What all of a long conversation has too much is no fixed cost of each compaction of it."""
    found = await replayed(agent(3, turns=60), truth, "llama-3.1-8b", 4096)
    assert found.compacted > 10
    assert [refusal for refusal in found.refusals if refusal.can_fit] == []
    assert (found.refused, found.invalid) == (found.unfit, 0)
    assert found.questions <= 0.5 * found.turns
