"""How wrong counts are for a model that we do not know, from request to request of real sessions.

    python benchmarks/tokens/calibration.py FOLDER [--truth qwen3]

FOLDER (or the environment variable COMPACTION_TRANSCRIPTS) holds conversations as JSON: `messages`, `tools`. Each is
resent turn by turn, as a stateless client does: "fresh" each on a deployment that has served none before, "following"
one after the other on the same. The truth is the exact prompt of another family, whose name the counter is not told.
"without anchors" forgets them before every count. Errors are (count − truth) / truth; "too low" are requests whose
truth lies above what is kept free for them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from litellm_compaction.core.messages import Message, Request, parse_message
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.prefix import Anchors

_VARIABLE = "COMPACTION_TRANSCRIPTS"
TRUTHS = {
    "qwen3": ("qwen3", "qwen3-8b"),
    "llama3.1": ("llama", "llama-3.1-8b"),
    "mistral-nemo": ("llama", "mistral-nemo"),
    "mistral-v3": ("llama", "mistral-7b-instruct-v0.3"),
    "mistral-small": ("mistral3", "mistral-small-3.2-24b-instruct-2506"),
    "devstral": ("llama", "devstral-small-2507"),
    "gemma4": ("gemma4", "gemma-4"),
    "gpt-oss": ("gpt-oss", "gpt-oss-20b"),
}
UNKNOWN = family_of("", "nobody-knows")
SPANS = ((0, 1), (1, 2), (2, 10), (10, 20), (20, 1000), (2, 1000))


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=os.environ.get(_VARIABLE))
    parser.add_argument("--truth", choices=TRUTHS, action="append")
    chosen = parser.parse_args()
    if not chosen.folder:
        parser.error(f"name the folder with the conversations, or set {_VARIABLE}")
    files = sorted(Path(chosen.folder).glob("*.json"))
    if not files:
        parser.error(f"{chosen.folder} holds no .json file")
    ways = {"fresh": (True, True), "following": (False, True), "following, without anchors": (False, False)}
    for way, (fresh, anchored) in ways.items():
        everything: dict[int, list[tuple[float, bool]]] = {}
        for name in chosen.truth or list(TRUTHS):
            found = asyncio.run(measure(name, files, fresh=fresh, anchored=anchored))
            report(f"{name}, {way}", found)
            for number, errors in found.items():
                everything.setdefault(number, []).extend(errors)
        report(f"all, {way}", everything)


async def measure(
    name: str, files: Sequence[Path], *, fresh: bool, anchored: bool
) -> dict[int, list[tuple[float, bool]]]:
    """For each number of a request in its session: how wrong the count was, and whether it was too low."""
    truth_family = family_of(*TRUTHS[name])
    counter, exact = TokenCounter(), TokenCounter()
    found: dict[int, list[tuple[float, bool]]] = {}
    for file in files:
        if fresh:
            counter = TokenCounter()
        read = json.loads(file.read_text(encoding="utf-8"))
        messages, tools = tuple(map(parse_message, read["messages"])), tuple(read.get("tools") or ())
        for number, end in enumerate(requests(messages)):
            request = Request(messages=messages[:end], tools=tools)
            if not anchored:
                counter._anchors = Anchors()
            count = await counter.count("t", UNKNOWN, request)
            truth = (await exact.count("t", truth_family, request)).tokens
            is_low = truth > count.tokens + count.margin_tokens
            found.setdefault(number, []).append((count.tokens / truth - 1, is_low))
            counter.learn("t", count, truth)
    return found


def report(title: str, found: dict[int, list[tuple[float, bool]]]) -> None:
    """One block of the table."""
    print(f"{title}:")
    for start, end in SPANS:
        rows = [row for number, rows in found.items() if start <= number < end for row in rows]
        errors = [error for error, _ in rows]
        sizes = sorted(map(abs, errors))
        print(
            f"  requests {start + 1}–{min(end, max(found) + 1)}: |error| median {statistics.median(sizes):.2%}, "
            f"p90 {sizes[int(0.9 * (len(sizes) - 1))]:.2%}, from {min(errors):+.1%} to {max(errors):+.1%}, "
            f"{sum(is_low for _, is_low in rows)} of {len(rows)} too low"
        )


def requests(messages: Sequence[Message]) -> list[int]:
    """Where requests end: before every assistant message."""
    return [index for index, message in enumerate(messages) if message.role == "assistant" and index]


if __name__ == "__main__":
    main()
