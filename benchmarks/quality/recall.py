"""Finds what was said long ago: is the evidence among the first hits, and what does a search take?

    python benchmarks/quality/recall.py --checkouts CHECKOUTS [--tune]

Reads, at fixed commits, LoCoMo (10 chats of friends; its licence forbids commercial use, and none of it is part of this
project) and BEAM (20 chats with long answers). A question counts if a message that answers it, or half of it, or 300
characters, stands in the first 5 or 10 hits: `any` for one such message, `all` for each of them.

The rows beside ours are SQLite's FTS5 with Porter's stems, of the words of a question joined by OR: over messages, and
over windows of four messages that overlap. Tokens: one for four characters of five hits.

Chats 1 to 5 of LoCoMo and 1 to 12 of BEAM were looked at while something was tuned, the others were not; with `--tune`
they are not read, which is no figure for a report.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sqlite3
import statistics
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.measuring import JsonDict
from benchmarks.quality.compaction import TUNED_ALONE
from litellm_compaction.core.messages import Message, chain, parse_message, system_prefix_length, visible_text
from litellm_compaction.recall import Index, search

# Those are answered by nothing, or by all of a chat.
_NO_EVIDENCE = ("abstention", "summarization", "event_ordering")
_BEAM = ("BEAM", "b2a3ee8ba12d68f83143dda191097dc3e028ddd3")
_LOCOMO = ("locomo", "e76cdff4a04fce19090596d49862fe87a5c15aaa")
_FRIENDS = (26, 30, 41, 42, 43, 44, 47, 48, 49, 50)
_FIRST_RESERVED = {"locomo": 5, "beam": 12}
_FEW, _MOST = 5, 10
_SHOWN_CHARS, _PART_CHARS = 300, 20
_WINDOW = 4
_WORD = re.compile(r"\w+")

Search = Callable[[str], Sequence[str]]
"""Gives the texts of at most ten hits, the best first."""


class Evidence(NamedTuple):
    """A text that was said: half of it, or 300 characters, have to be shown in one hit."""

    text: str

    def stands_in(self, shown: Sequence[str]) -> bool:
        least_chars = min(-(-len(self.text) // 2), _SHOWN_CHARS)
        parts = [self.text[at : at + _PART_CHARS] for at in range(0, len(self.text), _PART_CHARS)]
        return any(sum(len(part) for part in parts if part in text) >= least_chars for text in shown)


class Asked(NamedTuple):
    """A question, and what answers it."""

    question: str
    evidence: Sequence[Evidence]


class Chat(NamedTuple):
    """A conversation without its leading system messages, the hash chain of it, and what is asked about it."""

    messages: Sequence[Message]
    hashes: Sequence[str]
    asked: Sequence[Asked]


def main() -> None:
    """Prints one table for each source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, help="folder with clones of BEAM and locomo")
    parser.add_argument("--tune", action="store_true", help="leave the reserve unread; no figure for a report")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    chosen = parser.parse_args()
    if chosen.tune:
        print(TUNED_ALONE)
    sources = {"locomo": list(_friends(chosen.checkouts)), "beam": list(_beam(chosen.checkouts))}
    for name, chats in sources.items():
        first_reserved = _FIRST_RESERVED[name]
        _print(f"{name}, tuned", chats[:first_reserved], chosen.only)
        if not chosen.tune:
            _print(f"{name}, reserve", chats[first_reserved:], chosen.only)


def _friends(checkouts: Path) -> Iterator[Chat]:
    """LoCoMo's chats: each turn is a message, the first speaker is the user."""
    data = zipfile.ZipFile(BytesIO(_checked_out(checkouts, _LOCOMO, "data/locomo10.zip")))
    for number in _FRIENDS:
        recorded = json.loads(data.read(f"data/multimodal_dialog/locomo10_v2/{number}.json"))
        names = itertools.takewhile(recorded.__contains__, (f"session_{at}" for at in itertools.count(1)))
        turns = [turn for name in names for turn in recorded[name]]
        texts = {turn["dia_id"]: turn.get("text") or "" for turn in turns}
        roles = {recorded["speaker_a"]: "user", recorded["speaker_b"]: "assistant"}
        asked = [(each["question"], re.findall(r"D\d+:\d+", json.dumps(each["evidence"]))) for each in recorded["qa"]]
        yield _chat(
            [{"role": roles[turn["speaker"]], "content": texts[turn["dia_id"]]} for turn in turns], texts, asked
        )


def _checked_out(checkouts: Path, source: tuple[str, str], path: str) -> bytes:
    """A file of a clone, of which there may be no more than its git directory."""
    command = ["git", "-C", str(checkouts / source[0]), "show", f"{source[1]}:{path}"]
    return subprocess.run(command, capture_output=True, check=True).stdout


def _beam(checkouts: Path) -> Iterator[Chat]:
    """BEAM's chats of 100,000 tokens, with the questions to which messages are named."""
    for number in range(1, 21):
        folder = f"chats/100K/{number}"
        probing = json.loads(_checked_out(checkouts, _BEAM, f"{folder}/probing_questions/probing_questions.json"))
        said_by_id: dict[int, JsonDict] = {}
        for batch in json.loads(_checked_out(checkouts, _BEAM, f"{folder}/chat.json")):
            for message in (message for turn in batch["turns"] for message in turn):
                content = re.sub(r"\s*->->.*$", "", message["content"], flags=re.DOTALL).strip()
                said_by_id[message["id"]] = {"role": message["role"], "content": content}
        texts = {str(at): message["content"] for at, message in said_by_id.items()}
        asked = [
            (each["question"], re.findall(r"\d+", json.dumps(each.get("source_chat_ids") or [])))
            for kind, questions in probing.items()
            if kind not in _NO_EVIDENCE
            for each in questions
        ]
        yield _chat(list(said_by_id.values()), texts, asked)


def _chat(raw: Sequence[JsonDict], texts: Mapping[str, str], asked: Sequence[tuple[str, Sequence[str]]]) -> Chat:
    messages = [parse_message(each) for each in raw]
    found: list[Asked] = []
    for question, names in asked:
        said_there = [texts[name].strip() for name in dict.fromkeys(names) if texts.get(name, "").strip()]
        if said_there:
            found.append(Asked(question, [Evidence(text) for text in said_there]))
    return Chat(messages[system_prefix_length(messages) :], chain(messages), found)


def _ours(chat: Chat) -> Search:
    index = Index()
    index.add(chat.messages, chat.hashes)

    def found(question: str) -> list[str]:
        hits = search(index, question, limit=_MOST).hits
        return ["\n".join(piece.text.strip("…") for piece in hit.pieces) for hit in hits]

    return found


def _fts(documents: Sequence[str]) -> Search:
    """FTS5 over some documents, by an OR of a question's words."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE VIRTUAL TABLE said USING fts5(text, tokenize='porter unicode61')")
    database.executemany("INSERT INTO said VALUES (?)", ((document,) for document in documents))

    def found(question: str) -> list[str]:
        query = " OR ".join(f'"{word}"' for word in _WORD.findall(question))
        rows = database.execute("SELECT text FROM said WHERE said MATCH ? ORDER BY bm25(said) LIMIT ?", (query, _MOST))
        return [text for (text,) in rows]

    return found


def _texts(chat: Chat) -> list[str]:
    return [visible_text(message).strip() for message in chat.messages]


def _windows(chat: Chat) -> list[str]:
    texts, step = _texts(chat), _WINDOW // 2
    return ["\n".join(texts[at : at + _WINDOW]) for at in range(0, max(len(texts) - step, 1), step)]


_ROWS: Mapping[str, Callable[[Chat], Search]] = {
    "FTS5": lambda chat: _fts(_texts(chat)),
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
        shares = "  ".join(f"{counted[key] / number:.3f}" for key in ("any5", "any10", "all5", "all10"))
        times = f"{statistics.median(taken_ms):5.1f} {statistics.quantiles(taken_ms, n=20)[-1]:4.1f}"
        print(f"{row:28} {shares} {counted['tokens'] // number:5} {times}", flush=True)


if __name__ == "__main__":
    main()
