"""What is left of typed canaries after five compactions within a budget: an outside kit's sessions and its judgement.

    python benchmarks/quality/conformance.py [--seeds 1-4] [--budgets 10%,20%,30%] [--only NAME] [--json]

`compaction-conformance-kit` (MIT; the extra `bench`) plants rules, constraints, facts, goals and preferences in
sessions of about 8,200 characters, compacts each five times, the result of one round being the next round's input, and
looks for them in what is left, which may be 10, 20 or 30 % of the session. Its own compactors know the marks of what it
plants (`SAFETY RULE:`); ours sees turns like any other.

Our rows are the engine, asked to compact now, at the largest window whose result fits the budget, with a dead, a lossy
and an ideal pruning model. The budget is of kept text: the words that are the same in every record (its frame and its
headings, 640 characters) are left out of it; in the rows `framed` they count, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.measuring import JsonDict, Transcript, prompt_tokens
from benchmarks.lib.methods import ours
from benchmarks.lib.summarisers import Kind
from litellm_compaction.core.ledger import ANCHORS_HEAD, NAMES_HEAD, OPERATOR_HEAD, WORDS_HEAD
from litellm_compaction.core.prompts import FRAME_BEGIN, FRAME_END, FRAME_NOTE, LEDGER_TITLE, SUMMARY_TITLE

_KINDS: tuple[Kind, ...] = ("dead", "lossy", "ideal")
_WINDOWS_TOKENS = (240, 12_000)
# The request at which the session is compacted is ours, so it is none of the session's text.
_REQUEST = "Go on."
# What every record says, whatever it keeps, and the mark that stands for it in a counted text.
_CONSTANT = tuple(
    (f"§{at}", text)
    for at, text in enumerate(
        (FRAME_BEGIN, FRAME_NOTE, FRAME_END, LEDGER_TITLE, WORDS_HEAD, OPERATOR_HEAD, ANCHORS_HEAD, NAMES_HEAD)
    )
)
# By which a record is known to be one where no store says so.
_HEADING = SUMMARY_TITLE.format(round=1)
_TURN = re.compile(r"^\[(system|user|assistant|tool)\] ", re.MULTILINE)


def main() -> None:
    """Prints the kit's leaderboard with our rows in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=_seeds, default=[1, 2, 3, 4], metavar="A-B")
    parser.add_argument("--budgets", type=_budgets, default=[0.1, 0.2, 0.3], metavar="10%,20%,30%")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", action="store_true", help="the kit's own report")
    chosen = parser.parse_args()
    try:
        from compaction_kit.benchmark import budget_benchmark_to_markdown
    except ImportError:
        parser.error("needs the extra `bench`: pip install 'litellm-compaction[bench]'")
    report = measured(chosen.seeds, chosen.budgets, chosen.only)
    print(json.dumps(report, indent=1) if chosen.json else budget_benchmark_to_markdown(report))


def measured(seeds: Sequence[int], budgets: Sequence[float], only: str = "") -> dict[str, Any]:
    """The kit's report for these seeds, with its own compactors and ours."""
    from compaction_kit.benchmark import run_budget_benchmark
    from compaction_kit.cli import COMPACTORS

    planted = _planted(seeds)
    rows: dict[str, Callable[[], Any]] = dict(COMPACTORS)
    for kind in _KINDS:
        rows[f"ours, {kind}"] = partial(Compactor, kind, planted)
        rows[f"ours, {kind}, framed"] = partial(Compactor, kind, planted, is_framed=True)
    chosen = {name: make for name, make in rows.items() if only in name}
    found: dict[str, Any] = run_budget_benchmark(chosen, budgets=budgets, seeds=seeds)
    return found


def _planted(seeds: Sequence[int]) -> list[str]:
    """What an ideal pruning model knows to keep; it says of it what stands in its prompt. The adapter never looks."""
    from compaction_kit.corpus import build_random_session
    from compaction_kit.semantic_corpus import build_semantic_heldout_session, build_semantic_session

    builders = (build_random_session, build_semantic_session, build_semantic_heldout_session)
    return sorted({canary.content for build in builders for seed in seeds for canary in build(seed)[1]})


class Compactor:
    """Our engine as the kit's protocol has it: turns in, text within a budget out; nothing is kept between rounds."""

    def __init__(self, kind: Kind, planted: Sequence[str], *, is_framed: bool = False) -> None:
        self.name = f"ours, {kind}{', framed' if is_framed else ''}"
        self._kind = kind
        self._facts: list[JsonDict] = [{"text": text, "msg": 0} for text in planted]
        self._is_framed = is_framed
        self._known: dict[tuple[object, ...], str] = {}

    def compact(self, turns: Sequence[Any], round_num: int = 1, budget_chars: int | None = None) -> Any:
        """One round: the longest result that fits, of the engine at growing windows."""
        from compaction_kit.compacted import CompactedContext

        # A round whose input is an earlier one's comes to the same.
        session = (budget_chars, *((turn.role, turn.text) for turn in turns))
        if session not in self._known:
            self._known[session] = self._longest(list(_messages(turns)), budget_chars)
        return CompactedContext(text=self._known[session], compactor_name=self.name, round_num=round_num)

    def _longest(self, messages: list[JsonDict], budget_chars: int | None) -> str:
        best = ""
        least, most = _WINDOWS_TOKENS
        while most - least > max(least // 50, 4):
            window = (least + most) // 2
            text = asyncio.run(self._compacted(messages, window))
            if text is None:
                # Too small for what no compaction can shrink.
                least = window
            elif budget_chars is None or len(text) <= budget_chars:
                least, best = window, max(best, text, key=len)
            else:
                most = window
        return best

    async def _compacted(self, messages: list[JsonDict], window_tokens: int) -> str | None:
        request = [*messages, {"role": "user", "content": _REQUEST}]
        session = Transcript("session", request, [], self._facts)
        turn = await ours(self._kind, session, window_tokens, now=True)(session, request)
        if turn.messages is None or prompt_tokens((), turn.messages) > window_tokens:
            return None
        return self._counted(turn.messages)

    def _counted(self, messages: Sequence[JsonDict]) -> str:
        """The messages as text, without the request and with marks for what every record says."""
        lines = [f"[{message['role']}] {message['content']}" for message in messages]
        text = "\n".join(lines).removesuffix(_REQUEST).rstrip().removesuffix("[user]").rstrip()
        text = text.replace(f"{_HEADING}\n{FRAME_BEGIN}", FRAME_BEGIN)
        if not self._is_framed:
            for mark, constant in _CONSTANT:
                text = text.replace(constant, mark)
        return text


def _messages(turns: Sequence[Any]) -> Iterator[JsonDict]:
    """A session's turns as messages; of a later round, those that our text of the round before was."""
    if len(turns) > 1:
        yield from ({"role": turn.role, "content": turn.text} for turn in turns)
        return
    text = turns[0].text
    for mark, constant in _CONSTANT:
        text = text.replace(mark, constant)
    parts = _TURN.split(text)
    for role, content in zip(parts[1::2], parts[2::2], strict=True):
        headed = f"{_HEADING}\n{content}" if content.startswith(FRAME_BEGIN) else content
        yield {"role": role, "content": headed.rstrip("\n")}


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def _budgets(text: str) -> list[float]:
    return [float(each.rstrip("%")) / 100 for each in text.split(",")]


if __name__ == "__main__":
    main()
