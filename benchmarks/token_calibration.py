"""How wrong counts are for a model that we do not know, from request to request of real sessions.

    python benchmarks/token_calibration.py [--truth qwen3] [--folder ../shared/transcripts]

Every transcript is resent turn by turn, as a stateless client does; the sessions follow each other on one deployment.
The truth is the exact prompt of another family, whose name the counter is not told. "calibrated" forgets the anchors
before every count. Errors are (count − truth) / truth; "too low" are requests whose truth lies above count × (1 +
error_ratio).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from litellm_compaction.core.messages import Message, Request, parse_message
from litellm_compaction.models.counter import TokenCounter
from litellm_compaction.models.families import family_of
from litellm_compaction.models.prefix_anchors import Anchors

TRUTHS = {
    "qwen3": ("qwen3", "qwen3-8b"),
    "llama3.1": ("llama", "llama-3.1-8b"),
    "mistral-nemo": ("llama", "mistral-nemo"),
    "gemma4": ("gemma4", "gemma-4"),
    "gpt-oss": ("gpt-oss", "gpt-oss-20b"),
}
UNKNOWN = family_of("", "nobody-knows")
SPANS = ((0, 1), (1, 2), (2, 10), (10, 20), (20, 1000))


def main() -> None:
    """Measures, and prints a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--truth", choices=TRUTHS, action="append")
    arguments.add_argument("--folder", type=Path, default=Path("../shared/transcripts"))
    chosen = arguments.parse_args()
    for name in chosen.truth or list(TRUTHS):
        for anchored in (False, True):
            print(f"{name}, {'with anchors' if anchored else 'calibrated'}:")
            asyncio.run(measure(name, sorted(chosen.folder.glob("*.json")), anchored=anchored))


async def measure(name: str, files: Sequence[Path], *, anchored: bool) -> None:
    """One block of the table."""
    truth_family = family_of(*TRUTHS[name])
    counter, exact = TokenCounter(), TokenCounter()
    errors: dict[int, list[float]] = {}
    low: dict[int, int] = {}
    for file in files:
        read = json.loads(file.read_text(encoding="utf-8"))
        messages, tools = tuple(map(parse_message, read["messages"])), tuple(read.get("tools") or ())
        for number, end in enumerate(requests(messages)):
            request = Request(messages=messages[:end], tools=tools)
            if not anchored:
                counter._anchors = Anchors()
            count = await counter.count("t", UNKNOWN, request)
            truth = (await exact.count("t", truth_family, request)).tokens
            errors.setdefault(number, []).append(count.tokens / truth - 1)
            low[number] = low.get(number, 0) + (truth > count.tokens + count.margin_tokens)
            counter.learn("t", count, truth)
    for start, end in SPANS:
        numbers = [number for number in errors if start <= number < end]
        found = [error for number in numbers for error in errors[number]]
        sizes = sorted(map(abs, found))
        print(
            f"  requests {start + 1}–{min(end, max(errors) + 1)}: |error| median {statistics.median(sizes):.2%}, "
            f"p90 {sizes[int(0.9 * (len(sizes) - 1))]:.2%}, from {min(found):+.1%} to {max(found):+.1%}, "
            f"{sum(low[number] for number in numbers)} of {len(found)} too low"
        )


def requests(messages: Sequence[Message]) -> list[int]:
    """Where requests end: before every assistant message."""
    return [index for index, message in enumerate(messages) if message.role == "assistant" and index]


if __name__ == "__main__":
    main()
