"""Excerpts beside a person's question: do they hold what was lost, and what do they cost?

    python benchmarks/quality/beside.py --checkouts CHECKOUTS --transcripts FOLDER [--windows 8192 16384] [--tune]

Reads what `recall.py` reads. First each chat is replayed to its end, and each question about it is asked there: the
share of those of which any or all evidence stands in the compacted prompt, without excerpts and with them, as the
engine places them; the tokens of the excerpts, a mean over all questions; and of how many questions there are any. No
summariser answers, so that a record holds the verbatim part alone.

Then the chats themselves, turn by turn before one server slot with a prefix cache (`measuring.Slot`): uncached prefill
+ 15 × decode tokens, with summaries, relative to no excerpts; in how many turns after a compaction there are any, and
the compactions. `dropped` is what the engine does: the next turn comes without them, and the server reads that question
and its answer again. `kept` leaves them in their place. An agent's requests have tools, and get none.

Chats 1 to 5 of LoCoMo and 1 to 12 of BEAM were looked at while something was tuned, the others were not; with `--tune`
they are not read, which is no figure for a report. The agents' conversations were looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import methods
from benchmarks.lib.measuring import JsonDict, Method, Tally, Transcript, Turn, count, load, replay
from benchmarks.lib.summarisers import Kind
from benchmarks.lib.transcripts import said
from benchmarks.quality.compaction import TUNED_ALONE
from benchmarks.quality.recall import FIRST_RESERVED, Chat, agents, beam, friends
from litellm_compaction.recall import BEGIN, END
from tests.integration.validity import searchable

_KINDS: tuple[Kind, ...] = ("extractive", "dead")
_ON, _OFF = "auto", "off"


class Answered(NamedTuple):
    """A question: which of its evidence stands in the prompt without and with excerpts, and the excerpts' tokens."""

    without: Sequence[bool]
    with_excerpts: Sequence[bool]
    tokens: int


def main() -> None:
    """Prints both tables for each context length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, help="folder with clones of BEAM and locomo")
    parser.add_argument("--transcripts", type=Path, help="folder with recorded conversations of agents")
    parser.add_argument("--windows", type=int, nargs="+", default=[8192, 16_384], metavar="TOKENS")
    parser.add_argument("--tune", action="store_true", help="leave the reserve unread; no figure for a report")
    parser.add_argument("--only", default="", help="sets whose name contains this")
    parser.add_argument("--part", choices=["evidence", "work"], help="one of the two tables")
    chosen = parser.parse_args()
    if chosen.tune:
        print(TUNED_ALONE)
    sets = {name: chats for name, chats in _sets(chosen.checkouts, tune=chosen.tune) if chosen.only in name}
    recorded = load(chosen.transcripts) if chosen.transcripts is not None and chosen.only in "agents, tuned" else []
    asked = {**sets, **({"agents, tuned": list(agents(chosen.transcripts))} if recorded else {})}
    replayed = {name: [Transcript(name, _said(chat), [], []) for chat in chats] for name, chats in sets.items()}
    replayed.update({"agents, tuned": recorded} if recorded else {})
    for window in chosen.windows:
        if chosen.part != "work":
            _print_evidence(asked, window)
        if chosen.part != "evidence":
            _print_work(replayed, window)


def _sets(checkouts: Path, *, tune: bool) -> Iterator[tuple[str, Sequence[Chat]]]:
    for name, chats in (("locomo", list(friends(checkouts))), ("beam", list(beam(checkouts)))):
        yield f"{name}, tuned", chats[: FIRST_RESERVED[name]]
        if not tune:
            yield f"{name}, reserve", chats[FIRST_RESERVED[name] :]


def _print_evidence(sets: Mapping[str, Sequence[Chat]], window_tokens: int) -> None:
    print(f"\n{window_tokens} tokens{'':13} questions  any: without  with   all: without  with   tokens  shown")
    for name, chats in sets.items():
        found = [each for chat in chats for each in asyncio.run(answered(chat, window_tokens))]
        shares = [
            statistics.mean(judge(each) for each in rows)
            for judge in (any, all)
            for rows in ([each.without for each in found], [each.with_excerpts for each in found])
        ]
        tokens, shown = statistics.mean(each.tokens for each in found), statistics.mean(bool(e.tokens) for e in found)
        cells = f"{shares[0]:13.3f} {shares[1]:6.3f} {shares[2]:13.3f} {shares[3]:6.3f} {tokens:8.0f} {shown:6.2f}"
        print(f"{name:26} {len(found):9} {cells}", flush=True)


async def answered(chat: Chat, window_tokens: int) -> list[Answered]:
    """Asks each question at the end of a chat; those that are asked before it was compacted count, too."""
    before = _said(chat)
    questions = [said("user", each.question) for each in chat.asked]
    transcript = Transcript("", [*before, *questions], [], [])
    method = methods.ours("dead", transcript, window_tokens, keep_originals="compacted", recall=_ON)
    for index, message in enumerate(before):
        if message["role"] == "assistant" and index >= 2:
            await method(transcript, before[:index])
    found: list[Answered] = []
    for question, each in zip(questions, chat.asked, strict=True):
        turn = await method(transcript, [*before, question])
        frame, plain = parted(turn.messages or ())
        # The lines of a quotation are set in.
        without, quoted = searchable(plain), frame.replace("\n  ", "\n")
        stands = [evidence.stands_in([without]) for evidence in each.evidence]
        with_it = [evidence.stands_in([without, quoted]) for evidence in each.evidence]
        found.append(Answered(stands, with_it, count(frame)))
    return found


def _said(chat: Chat) -> list[JsonDict]:
    """The messages of a chat up to its last answer."""
    messages = [dict(message.raw) for message in chat.messages]
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return messages


def parted(messages: Sequence[JsonDict]) -> tuple[str, Sequence[JsonDict]]:
    """Returns the excerpts with their frame, "" for none, and the messages without them."""
    if not messages or BEGIN not in (content := str(messages[-1].get("content"))):
        return "", messages
    before, _, after = content.partition(BEGIN)
    inside, _, question = after.partition(f"{END}\n\n")
    frame = f"{BEGIN}{inside}{END}\n\n"
    return frame, [*messages[:-1], {**messages[-1], "content": before + question}]


def _print_work(sets: Mapping[str, Sequence[Transcript]], window_tokens: int) -> None:
    print(f"\n{window_tokens} tokens{'':22} work: dropped   kept   turns with excerpts   compactions: dropped   kept")
    for name, transcripts in sets.items():
        for kind in _KINDS:
            without, dropped, kept = Counted(), Counted(), Counted()
            for each in transcripts:
                frames: dict[int, str] = {}
                off, on = (_method(kind, each, window_tokens, recall=recall) for recall in (_OFF, _ON))
                without.add(asyncio.run(replay(each, window_tokens, off)))
                noted = _noting(on, frames, dropped)
                dropped.add(asyncio.run(replay(each, window_tokens, noted)))
                changed = _with_frames(each, frames)
                again = _method(kind, changed, window_tokens, recall=_OFF)
                kept.add(asyncio.run(replay(changed, window_tokens, again)))
            shares = f"{dropped.work / without.work:13.3f} {kept.work / without.work:6.3f}"
            turns = f"{dropped.with_excerpts:6} of {dropped.compacted:5}"
            made = f"{dropped.compactions - without.compactions:+20} {kept.compactions - without.compactions:+6}"
            print(f"{name:16} {kind:10} {shares} {turns:>21} {made} of {without.compactions}", flush=True)


class Counted:
    """Sums over conversations."""

    def __init__(self) -> None:
        self.work = self.compactions = self.compacted = self.with_excerpts = 0

    def add(self, tally: Tally) -> None:
        self.work += tally.work
        self.compactions += tally.compactions


def _method(kind: Kind, transcript: Transcript, window_tokens: int, *, recall: str) -> Method:
    return methods.ours(kind, transcript, window_tokens, keep_originals="compacted", recall=recall)


def _noting(method: Method, frames: dict[int, str], counted: Counted) -> Method:
    """The same; notes the excerpts by the index of the message that they were put before."""

    async def send(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        turn = await method(transcript, client)
        frame, _ = parted(turn.messages or ())
        counted.compacted += turn.is_compacted
        if frame:
            counted.with_excerpts += 1
            frames[len(client) - 1] = frame
        return turn

    return send


def _with_frames(transcript: Transcript, frames: Mapping[int, str]) -> Transcript:
    """The conversation as if each excerpt had been said before its question."""
    messages = [
        {**message, "content": frames[at] + message["content"]} if at in frames else message
        for at, message in enumerate(transcript.messages)
    ]
    return transcript if not frames else Transcript(transcript.name, messages, transcript.tools, transcript.facts)


if __name__ == "__main__":
    main()
