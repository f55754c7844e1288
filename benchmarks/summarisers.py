"""Scripted pruning models for the benchmark: ideal, lossy, dead, lying; deterministic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from benchmarks.measuring import count
from litellm_compaction.simulator import summary_of_facts

Kind = Literal["ideal", "lossy", "dead", "lying"]
KINDS: tuple[Kind, ...] = ("ideal", "lossy", "dead", "lying")
_LOSSY_KEEP_RATIO = 0.3
_FILLER = "- The work went on step by step, and each result was looked at before the next step was taken.\n"


def summary(kind: Kind, prompt: str, facts: Sequence[str], max_tokens: int) -> str:
    """What the model answers, "" for a dead one. As long as it may be: real models use the room that they are given.

    Args:
        kind: ideal keeps every fact that stands in the prompt, lossy 30 % of them, lying all with wrong values.
        prompt: what the model is shown.
        facts: of the conversation.
        max_tokens: bound on the answer.
    """
    if kind == "dead":
        return ""
    text = summary_of_facts(prompt, facts, keep_ratio=_LOSSY_KEEP_RATIO if kind == "lossy" else 1.0)
    if kind == "lying":
        for fact in facts:
            text = text.replace(f"- {fact}\n", f"- {_wrong(fact)}\n")
    lines = max(int(0.95 * max_tokens) - count(text), 0) // count(_FILLER)
    return text + "\n" + _FILLER * lines


def _wrong(fact: str) -> str:
    """A fact with each number one higher, or with its words in another order."""
    if re.search(r"\d", fact):
        return re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), fact)
    return fact[::-1]
