"""Finds what was said long ago: is the evidence among the first hits, and what does a search take?

    python benchmarks/quality/recall.py --checkouts CHECKOUTS --transcripts FOLDER [--tune]

Reads, at fixed commits, LoCoMo (10 chats of friends; its licence forbids commercial use, and none of it is part of this
project) and BEAM (20 chats with long answers); and recorded agents. A question counts if a message that answers it, or
half of it, or 300 characters, stands in the first 5 or 10 hits: `any` for one such message, `all` for each of them.
Of an agent each fact is asked for by the words around it, and as it is written, and has to stand in a hit.

The rows beside ours are SQLite's FTS5 with Porter's stems: of the question as it is, of its words joined by OR, of the
user's messages alone, and of windows of four messages that overlap. Tokens: one for four characters of five hits.

Chats 1 to 5 of LoCoMo and 1 to 12 of BEAM were looked at while something was tuned, the others were not; with `--tune`
they are not read, which is no figure for a report. The last table is the time and the memory of 100,000 messages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sqlite3
import statistics
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.measuring import JsonDict, load
from benchmarks.lib.transcripts import said
from benchmarks.quality.compaction import TUNED_ALONE
from benchmarks.quality.questions import FRIENDS, LOCOMO, beam_chat, checked_out
from litellm_compaction.core.messages import Message, chain, parse_message, system_prefix_length, visible_text
from litellm_compaction.recall import Index, search

_KINDS = {1: "several hops", 2: "when", 3: "open", 4: "one hop", 5: "not answerable"}
# Those are answered by nothing, or by all of a chat.
_NO_EVIDENCE = ("abstention", "summarization", "event_ordering")
FIRST_RESERVED = {"locomo": 5, "beam": 12}
_FEW, _MOST = 5, 10
_SHOWN_CHARS, _PART_CHARS = 300, 20
_WINDOW = 4
_AROUND_CHARS, _CUE_WORDS = 120, 8
_MANY, _MANY_QUESTIONS = 100_000, 200
_WORD = re.compile(r"\w+")

Search = Callable[[str], Sequence[str]]
"""Gives the texts of at most ten hits, the best first."""


class Evidence(NamedTuple):
    """A text that was said, and how many characters of it have to be shown in one hit."""

    text: str
    least_chars: int

    def stands_in(self, shown: Sequence[str]) -> bool:
        if self.least_chars == len(self.text):
            return any(self.text in text for text in shown)
        parts = [self.text[at : at + _PART_CHARS] for at in range(0, len(self.text), _PART_CHARS)]
        return any(sum(len(part) for part in parts if part in text) >= self.least_chars for text in shown)


class Asked(NamedTuple):
    """A question, its kind, and what answers it."""

    question: str
    kind: str
    evidence: Sequence[Evidence]


class Chat(NamedTuple):
    """A conversation without its leading system messages, the hash chain of it, and what is asked about it."""

    messages: Sequence[Message]
    hashes: Sequence[str]
    asked: Sequence[Asked]


def main() -> None:
    """Prints one table for each source, and the time and size of many messages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, help="folder with clones of BEAM and locomo")
    parser.add_argument("--transcripts", type=Path, help="folder with recorded conversations of agents")
    parser.add_argument("--tune", action="store_true", help="leave the reserve unread; no figure for a report")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    chosen = parser.parse_args()
    if chosen.tune:
        print(TUNED_ALONE)
    sources = {"locomo": list(friends(chosen.checkouts)), "beam": list(beam(chosen.checkouts))}
    for name, chats in sources.items():
        first_reserved = FIRST_RESERVED[name]
        _print(f"{name}, tuned", chats[:first_reserved], chosen.only)
        if not chosen.tune:
            _print(f"{name}, reserve", chats[first_reserved:], chosen.only)
    if chosen.transcripts is not None:
        _print("agents", list(agents(chosen.transcripts)), chosen.only)
    _print_many([chat for chats in sources.values() for chat in chats])


def friends(checkouts: Path) -> Iterator[Chat]:
    """LoCoMo's chats: each turn is a message, the first speaker is the user."""
    data = zipfile.ZipFile(BytesIO(checked_out(checkouts, LOCOMO, "data/locomo10.zip")))
    for number in FRIENDS:
        recorded = json.loads(data.read(f"data/multimodal_dialog/locomo10_v2/{number}.json"))
        names = itertools.takewhile(recorded.__contains__, (f"session_{at}" for at in itertools.count(1)))
        turns = [turn for name in names for turn in recorded[name]]
        texts = {turn["dia_id"]: turn.get("text") or "" for turn in turns}
        roles = {recorded["speaker_a"]: "user", recorded["speaker_b"]: "assistant"}
        asked = [
            (each["question"], _KINDS[each["category"]], re.findall(r"D\d+:\d+", json.dumps(each["evidence"])))
            for each in recorded["qa"]
        ]
        yield _chat([said(roles[turn["speaker"]], texts[turn["dia_id"]]) for turn in turns], texts, asked)


def beam(checkouts: Path) -> Iterator[Chat]:
    """BEAM's chats of 100,000 tokens, with the questions to which messages are named."""
    for number in range(1, 21):
        said_by_id, probing = beam_chat(checkouts, number)
        texts = {str(at): message["content"] for at, message in said_by_id.items()}
        asked = [
            (each["question"], kind, re.findall(r"\d+", json.dumps(each.get("source_chat_ids") or [])))
            for kind, questions in probing.items()
            if kind not in _NO_EVIDENCE
            for each in questions
        ]
        yield _chat(list(said_by_id.values()), texts, asked)


def agents(folder: Path) -> Iterator[Chat]:
    """Recorded conversations; a fact is asked for by the words around it, and as it is written."""
    for transcript in load(folder):
        asked: list[tuple[str, str, list[str]]] = []
        texts: dict[str, str] = {}
        for fact in transcript.facts:
            text, message = fact["text"], parse_message(transcript.messages[fact["msg"]])
            if message.is_system or text not in (whole := visible_text(message)):
                continue
            texts[text] = text
            asked += ((_cue(whole, text), "words around", [text]), (text, "as it is written", [text]))
        yield _chat(transcript.messages, texts, asked, is_literal=True)


def _cue(whole: str, fact: str) -> str:
    """The words of a text that stand nearest to a fact in it."""
    at = whole.index(fact)
    before = _WORD.findall(whole[max(at - _AROUND_CHARS, 0) : at])
    after = _WORD.findall(whole[at + len(fact) : at + len(fact) + _AROUND_CHARS])
    known = set(_WORD.findall(fact))
    nearest = [word for pair in itertools.zip_longest(reversed(before), after) for word in pair if word]
    return " ".join(list(dict.fromkeys(word for word in nearest if word not in known))[:_CUE_WORDS])


def _chat(
    raw: Sequence[JsonDict],
    texts: Mapping[str, str],
    asked: Sequence[tuple[str, str, Sequence[str]]],
    *,
    is_literal: bool = False,
) -> Chat:
    messages = [parse_message(each) for each in raw]
    found: list[Asked] = []
    for question, kind, names in asked:
        said_there = [texts[name].strip() for name in dict.fromkeys(names) if texts.get(name, "").strip()]
        evidence = [
            Evidence(text, len(text) if is_literal else min(-(-len(text) // 2), _SHOWN_CHARS)) for text in said_there
        ]
        if evidence:
            found.append(Asked(question, kind, evidence))
    return Chat(messages[system_prefix_length(messages) :], chain(messages), found)


def _ours(chat: Chat) -> Search:
    index = Index()
    index.add(chat.messages, chat.hashes)

    def found(question: str) -> list[str]:
        hits = search(index, question, limit=_MOST).hits
        return ["\n".join(piece.text.strip("…") for piece in hit.pieces) for hit in hits]

    return found


def _fts(documents: Sequence[str], *, joined: bool = True) -> Search:
    """FTS5 over some documents; `joined` makes an OR of a question's words, else it is passed on as a string."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE VIRTUAL TABLE said USING fts5(text, tokenize='porter unicode61')")
    database.executemany("INSERT INTO said VALUES (?)", ((document,) for document in documents))

    def found(question: str) -> list[str]:
        query = " OR ".join(f'"{word}"' for word in _WORD.findall(question)) if joined else question
        # What a person writes is mostly no query: a comma, a question mark.
        with suppress(sqlite3.OperationalError):
            rows = database.execute(
                "SELECT text FROM said WHERE said MATCH ? ORDER BY bm25(said) LIMIT ?", (query, _MOST)
            )
            return [text for (text,) in rows]
        return []

    return found


def _texts(chat: Chat) -> list[str]:
    return [visible_text(message).strip() for message in chat.messages]


def _windows(chat: Chat) -> list[str]:
    texts, step = _texts(chat), _WINDOW // 2
    return ["\n".join(texts[at : at + _WINDOW]) for at in range(0, max(len(texts) - step, 1), step)]


def _users(chat: Chat) -> list[str]:
    return [text for text, message in zip(_texts(chat), chat.messages, strict=True) if message.role == "user"]


_ROWS: Mapping[str, Callable[[Chat], Search]] = {
    "FTS5, the question as it is": lambda chat: _fts(_texts(chat), joined=False),
    "FTS5, words joined by OR": lambda chat: _fts(_texts(chat)),
    "FTS5, user's messages alone": lambda chat: _fts(_users(chat)),
    "FTS5, windows of four": lambda chat: _fts(_windows(chat)),
    "ours": _ours,
}


def _print(title: str, chats: Sequence[Chat], only: str) -> None:
    number = sum(len(chat.asked) for chat in chats)
    print(f"\n{title}: {number} questions, {sum(len(chat.messages) for chat in chats)} messages")
    print(f"{'':28} any@5 any@10 all@5 all@10 tokens   ms  p95")
    for row, made in _ROWS.items():
        if only not in row:
            continue
        counted: Counter[str] = Counter()
        by_kind: dict[str, list[tuple[bool, bool]]] = {}
        taken_ms: list[float] = []
        for chat in chats:
            find = made(chat)
            for each in chat.asked:
                start = time.perf_counter()
                shown = find(each.question)
                taken_ms.append((time.perf_counter() - start) * 1000)
                in_few = [evidence.stands_in(shown[:_FEW]) for evidence in each.evidence]
                in_most = [evidence.stands_in(shown) for evidence in each.evidence]
                counted.update(any5=any(in_few), any10=any(in_most), all5=all(in_few), all10=all(in_most))
                counted["tokens"] += sum(map(len, shown[:_FEW])) // 4
                by_kind.setdefault(each.kind, []).append((any(in_few), any(in_most)))
        shares = "  ".join(f"{counted[key] / number:.3f}" for key in ("any5", "any10", "all5", "all10"))
        times = f"{statistics.median(taken_ms):5.1f} {statistics.quantiles(taken_ms, n=20)[-1]:4.1f}"
        print(f"{row:28} {shares} {counted['tokens'] // number:5} {times}", flush=True)
        if row == "ours":
            for kind, found in sorted(by_kind.items()):
                few, most = (statistics.mean(each[at] for each in found) for at in (0, 1))
                print(f"    {kind:24} {few:.3f}  {most:.3f}  of {len(found)}")


def _print_many(chats: Sequence[Chat]) -> None:
    """The chats again and again, each as another one, until there are enough messages."""
    index = Index()
    before_mb, start, number = _memory_mb(), time.perf_counter(), 0
    for at in itertools.count():
        chat = chats[at % len(chats)]
        hashes = [f"{at:06x}{number:06x}" for number in range(len(chat.hashes))]
        index.add(chat.messages, hashes)
        number += len(chat.messages)
        if number >= _MANY:
            break
    taken_s = time.perf_counter() - start
    text_mb = sum(len(each.text) for each in index.originals) / 1e6
    memory_mb = _memory_mb() - before_mb
    print(f"\n{number} messages, {text_mb:.0f} MB of text, {len(index.passages)} passages")
    print(f"made in {taken_s:.1f} s, {memory_mb:.0f} MB with the text")
    questions = [each.question for chat in chats for each in chat.asked]
    for title, within in (("over all", None), ("in one chat", [f"{0:06x}{at:06x}" for at in range(1, 700)])):
        taken_ms: list[float] = []
        for question in questions[:: len(questions) // _MANY_QUESTIONS]:
            start = time.perf_counter()
            search(index, question, within=within)
            taken_ms.append((time.perf_counter() - start) * 1000)
        ordered = statistics.quantiles(taken_ms, n=20)
        print(f"a search {title}: {statistics.median(taken_ms):.1f} ms, p95 {ordered[-1]:.1f}")


def _memory_mb() -> float:
    # Not everywhere, and for this alone.
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
