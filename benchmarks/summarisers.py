"""Scripted pruning models for the benchmark: ideal, lossy, dead, lying, inventing; deterministic."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Literal

from benchmarks.measuring import count
from litellm_compaction.simulator import summary_of_facts

Kind = Literal["ideal", "lossy", "dead", "lying", "inventing"]
KINDS: tuple[Kind, ...] = ("ideal", "lossy", "dead", "lying", "inventing")
_LOSSY_KEEP_RATIO = 0.3
# No two lines alike: a summary that says one thing again and again is rejected.
_PARTS = (
    ("The work", "The assistant", "This part", "The next step", "A second look", "The check", "That change"),
    ("went on", "was done", "came out well", "took a while", "was weighed again"),
    ("before the next one began", "without any surprise", "as it had been agreed", "since nothing spoke against it"),
    ("and the result was read", "and a note was made of it", "and it could be built upon", "and that was all"),
)
# Rules that nobody gave; what users report of real summaries (codegraff 738, oh-my-openagent 1483).
_INVENTED = (
    "- The user said never to edit anything inside the vendor directory.\n"
    "- All further reports must be approved by the legal department first.\n"
    "- Ab jetzt dürfen keine neuen Abhängigkeiten eingeführt werden.\n"
)
_FILLER = tuple(f"- {', '.join(parts)}.\n" for parts in itertools.product(*_PARTS))


def summary(kind: Kind, prompt: str, facts: Sequence[str], max_tokens: int) -> str:
    """What the model answers, "" for a dead one. As long as it may be: real models use the room that they are given.

    Args:
        kind: ideal keeps every fact that stands in the prompt, lossy 30 % of them, lying all with wrong values;
            inventing keeps every fact and adds three rules that nobody gave.
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
    if kind == "inventing":
        text += f"\n{_INVENTED}"
    room = int(0.95 * max_tokens) - count(text)
    sizes = itertools.accumulate(map(count, _FILLER))
    return text + "\n" + "".join(line for line, used in zip(_FILLER, sizes, strict=True) if used <= room)


def _wrong(fact: str) -> str:
    """A fact with each number one higher, or with its words in another order."""
    if re.search(r"\d", fact):
        return re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), fact)
    return fact[::-1]
