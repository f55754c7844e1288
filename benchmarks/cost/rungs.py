"""What the parts of a compaction cost that need no model, beside counting the same messages.

    python benchmarks/cost/rungs.py [--rounds 15]

An agent's conversation of 600 tool calls, 120,000 tokens: counted anew, edited (old results become stubs), its ledger
written, with a quarter of it still visible beside that; and the ledger of a chat of as many tokens in 8,000 lines, half
of them a person's. Processor time in ms as median and range, its ratio to counting, and how many times it is that of
half the conversation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from litellm_compaction.core.clearing import edited, stubs
from litellm_compaction.core.ledger import ledger
from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.prompt import own_count
from litellm_compaction.tokens.texts import TextCounts
from tests.builders import agent_run

_FAMILY = family_of("llama", "llama-3.1-8b")
_THINGS = ("port", "file", "deadline", "branch")
_CHATTER = ", as we said, so keep it."


def main() -> None:
    """Measures, and prints a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=15)
    rounds = arguments.parse_args().rounds
    whole = {name: _times_ms(run, rounds) for name, run in _parts(600).items()}
    half = {name: _times_ms(run, rounds) for name, run in _parts(300).items()}
    counting_ms = statistics.median(whole["count"])
    for name, times_ms in whole.items():
        growth = statistics.median(times_ms) / statistics.median(half[name])
        print(f"{name:8} {_shown(times_ms, counting_ms)}, {growth:.1f} times that of half the conversation")


def _parts(calls: int) -> Mapping[str, Callable[[], object]]:
    """What is measured, of an agent's conversation of so many tool calls."""
    messages = tuple(map(parse_message, agent_run(calls, words=200)))
    count = TokenCounter().text_counter("t", _FAMILY)
    asked = Request(messages=messages)
    chat = [
        f"{number}: the {_THINGS[number % 4]} of unit-{number % 37} is {8000 + number}" for number in range(calls * 13)
    ]
    lines = [
        parse_message({"role": ("user", "assistant")[at % 2], "content": text + _CHATTER})
        for at, text in enumerate(chat)
    ]
    covered = len(messages) * 3 // 4
    kept = messages[covered:]
    known = "\n".join(message.text for message in kept)
    return {
        "count": lambda: own_count(_FAMILY, asked, TextCounts()),
        "edit": lambda: edited(messages, frozenset(stubs(messages))),
        "ledger": lambda: ledger(messages[:covered], budget_tokens=2_000, count=count, known=known),
        "chat": lambda: ledger(lines, budget_tokens=2_000, count=count),
    }


def _times_ms(run: Callable[[], object], rounds: int) -> list[float]:
    """Processor time of each round; what the first one has to load is not in it."""
    run()
    times_ms = []
    for _ in range(rounds):
        begun_s = time.process_time()
        run()
        times_ms.append(1e3 * (time.process_time() - begun_s))
    return times_ms


def _shown(times_ms: list[float], counting_ms: float) -> str:
    median_ms = statistics.median(times_ms)
    spread = f"{median_ms:7.2f} ms ({min(times_ms):.2f}–{max(times_ms):.2f})"
    return f"{spread}, {median_ms / counting_ms:.2f} of counting"


if __name__ == "__main__":
    main()
