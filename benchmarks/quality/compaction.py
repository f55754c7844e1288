"""What a compaction is worth: real conversations replayed turn by turn, beside what people do without it.

    python benchmarks/quality/compaction.py FOLDER [--windows 4096 8192 16384 32768] [--only NAME]
                                    [--held-out FOLDER]

FOLDER (or the environment variable COMPACTION_TRANSCRIPTS) holds conversations as JSON: `messages`, `tools`, `facts`.
With `--held-out`, conversations that nothing was tuned on (`held_out.py` makes them) are measured beside them; each
row is then three: tuned, held-out, and the gap (held-out less tuned). A figure is reported with its held-out row only.
In-process: the engine with a scripted pruning model, no server. `work` is uncached prefill + 15 × decode tokens,
relative to an unlimited context; `waited` is what of it the first words of 100 answers waited for, beside what was new
in them; of `idle` rows the client leaves the time to write ahead behind every answer. `cued` counts a fact only beside
a word beside which it stood; `next` is the share of what the recorded next answers take from far back that the prompts
before them hold (`lib/next_action.py`); `invented` is the share of compactions with a rule that nobody gave.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import methods
from benchmarks.lib.constraints import EXPLICIT, IMPLICIT, planted
from benchmarks.lib.measuring import JsonDict, Method, Row, Transcript, load, replay, row
from benchmarks.lib.summarisers import KINDS, Kind
from tests.integration.validity import searchable

_VARIABLE = "COMPACTION_TRANSCRIPTS"
_Make = Callable[[Transcript, int], Method]
TUNED_ALONE = "Of data that was tuned on alone: to choose by, not to report."


def main() -> None:
    """Prints one table for each context length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=os.environ.get(_VARIABLE))
    parser.add_argument("--windows", type=int, nargs="+", default=[4096, 8192, 16_384, 32_768], metavar="TOKENS")
    parser.add_argument("--only", default="", help="methods whose name contains this")
    parser.add_argument("--held-out", metavar="FOLDER", help="conversations that nothing was tuned on")
    parser.add_argument("--verbose", action="store_true", help="one line for each conversation")
    chosen = parser.parse_args()
    if not chosen.folder:
        parser.error(f"name the folder with the conversations, or set {_VARIABLE}")
    # LiteLLM's rows need no prices from the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    sets = {"": load(Path(chosen.folder))}
    if chosen.held_out:
        sets = {"tuned": sets[""], "held-out": load(Path(chosen.held_out))}
    else:
        print(TUNED_ALONE)
    for window in chosen.windows:
        counts = " + ".join(str(len(transcripts)) for transcripts in sets.values())
        print(f"\n{window} tokens, {counts} conversations\n{_HEAD}", flush=True)
        for name, make in _rows():
            if chosen.only in name:
                _print_row(name, make, sets, window, is_verbose=chosen.verbose)
        if chosen.only in ("", "constraints"):
            for label, transcripts in sets.items():
                print(_constraints(transcripts, window), label, flush=True)


_HEAD = f"{'':37} truncated refused valid  facts  cued  calls/100 stability  work  waited/100  next  invented"


def _print_row(
    name: str, make: _Make, sets: Mapping[str, Sequence[Transcript]], window: int, *, is_verbose: bool
) -> None:
    found: list[Row] = []
    for label, transcripts in sets.items():
        tallies = [asyncio.run(replay(each, window, make(each, window))) for each in transcripts]
        found.append(row(tallies))
        print(_line(name, label, found[-1]), flush=True)
        if is_verbose:
            print("\n".join(f"  {_line(each.name, '', row([each]))} {each.invalid[:2]}" for each in tallies))
    if len(found) == 2:
        tuned, held_out = found
        print(
            _line(name, "gap", Row(*(theirs - ours for ours, theirs in zip(tuned, held_out, strict=True)))), flush=True
        )


def _constraints(transcripts: Sequence[Transcript], window: int) -> str:
    """How many side constraints still stand verbatim in the prompts behind them, with a dead pruning model."""
    found: list[str] = []
    for kind, sentences in (("explicit", EXPLICIT), ("implicit", IMPLICIT)):
        for place in ("top", "middle", "late"):
            kept: list[float] = []
            for number, each in enumerate(transcripts):
                for sentence in (sentences[number % len(sentences)], sentences[(number + 3) % len(sentences)]):
                    changed = planted(each, place, sentence)
                    if changed is not None:
                        kept += asyncio.run(_compacted(changed, window, "dead", partial(_stands, sentence)))
            found.append(f"{kind} {place} {statistics.mean(kept) if kept else 1:.3f} of {len(kept)}")
    return "side constraints kept, dead summariser: " + "; ".join(found)


_Judge = Callable[[Sequence[JsonDict], Sequence[JsonDict]], bool | None]


def _stands(sentence: str, client: Sequence[JsonDict], upstream: Sequence[JsonDict]) -> bool | None:
    return sentence in searchable(upstream) if sentence in searchable(client) else None


async def _compacted(transcript: Transcript, window: int, kind: Kind, judge: _Judge) -> list[float]:
    """What `judge` says of each compacted prompt, without those of which it says nothing."""
    method = methods.ours(kind, transcript, window)
    found: list[float] = []
    for index, message in enumerate(transcript.messages):
        client = transcript.messages[:index]
        if message["role"] == "assistant" and index >= 2:
            turn = await method(transcript, client)
            said = judge(client, turn.messages) if turn.messages is not None and turn.is_compacted else None
            found += [] if said is None else [float(said)]
    return found


def _rows() -> Iterator[tuple[str, _Make]]:
    for kind in KINDS:
        yield f"ours, {kind}", partial(methods.ours, kind)
    yield "ours, ideal, idle", partial(methods.ours, "ideal", background="idle")
    yield "server cuts the middle", methods.stock
    yield "litellm trim_messages", methods.trimmed


def _line(name: str, label: str, found: Row) -> str:
    return (
        f"{name:28} {label:8} {found.truncated:9} {found.refused:7} {found.valid_ratio:5.3f} {found.facts:6.3f} "
        f"{found.bound_facts:5.3f} {found.calls_per_100:10.1f} {found.stability:9.3f} {found.work_ratio:5.2f} "
        f"{found.waited_per_100:11.0f} {found.next_ratio:6.3f} {found.invented_ratio:9.3f}"
    )


if __name__ == "__main__":
    main()
