"""Questions about long chats: does the literal answer stand in the prompt behind the last turn?

    python benchmarks/quality/questions.py --checkouts CHECKOUTS [--windows 8192 16384 32768] [--tune]

Reads, at fixed commits, BEAM (20 chats of 100,000 tokens; probing questions) and LoCoMo (10 chats of friends; questions
whose evidence is named). No model answers: counted is the share of questions whose whole evidence is in the prompt.
Each row is two: chats that may be looked at while something is tuned, and a reserve that nobody looked at. With
`--tune` the first alone, which is no figure for a report.

`ours` is the engine with a scripted summariser: dead (none), extractive (every n-th sentence of what it is shown) and
ideal (an oracle that keeps every evidence sentence). `rule of forty lines` takes the place of the dead one's record, at
no more tokens: of each of the user's messages its directives and a few words around values (`methods.by_rule`).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
import statistics
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import methods
from benchmarks.lib.measuring import JsonDict, Transcript
from benchmarks.lib.summarisers import Kind
from benchmarks.lib.transcripts import said
from benchmarks.quality.compaction import TUNED_ALONE
from benchmarks.quality.held_out import in_turn, locomo
from tests.integration.validity import searchable

BEAM = ("BEAM", "b2a3ee8ba12d68f83143dda191097dc3e028ddd3")
LOCOMO = ("locomo", "e76cdff4a04fce19090596d49862fe87a5c15aaa")
FRIENDS = (26, 30, 41, 42, 43, 44, 47, 48, 49, 50)
# The later ones of both are the reserve.
_FIRST_RESERVED = {"beam": 13, "locomo": 44}
_RULE, _CUT = "rule of forty lines", "server cuts the middle"
_KINDS: tuple[Kind, ...] = ("dead", "extractive", "ideal")
# A value counts beside two of the words beside which it was said, within this many characters.
_NEAR_CHARACTERS = 120
_WORD = re.compile(r"[^\W\d_]{4,}")
_VALUE = re.compile(
    r"\$?\d[\d,]*(?:\.\d+)*%?(?:[a-zA-Z]+)?|[A-Z][a-z]+(?: [A-Z][a-z]+)+|[a-zA-Z]+(?:[-_.][a-zA-Z0-9]+)+"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n")


class Evidence(NamedTuple):
    """A sentence that was said, and what of it answers.

    Attributes:
        sentence: as it was said.
        value: the literal answer in it; "" where most of its words answer, as for an instruction.
        words: beside the value, or those most of which must stand in one sentence; small letters.
    """

    sentence: str
    value: str
    words: frozenset[str]

    def stands_in(self, text: str) -> bool:
        """If the value stands beside two of its words, or four fifths of the words in one sentence."""
        if not self.value:
            least = 0.8 * len(self.words)
            return any(len(self.words & _words(each)) >= least for each in _SENTENCE_END.split(text))
        least = min(2, len(self.words))
        return any(
            len(self.words & _words(_around(place, text, _NEAR_CHARACTERS))) >= least
            for place in _places(self.value, text)
        )


class Chat(NamedTuple):
    """A conversation and the evidence of each question about it."""

    transcript: Transcript
    questions: Sequence[Sequence[Evidence]]
    is_reserved: bool


def main() -> None:
    """Prints one table for each source and context length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, help="folder with clones of BEAM and locomo")
    parser.add_argument("--windows", type=int, nargs="+", default=[8192, 16_384, 32_768], metavar="TOKENS")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--tune", action="store_true", help="leave the reserve unread; no figure for a report")
    chosen = parser.parse_args()
    if chosen.tune:
        print(TUNED_ALONE)
    for name, chats in (("beam", list(beam(chosen.checkouts))), ("locomo", list(friends(chosen.checkouts)))):
        halves = {"tuned": [chat for chat in chats if not chat.is_reserved]}
        if not chosen.tune:
            halves["reserve"] = [chat for chat in chats if chat.is_reserved]
        for window in chosen.windows:
            print(f"\n{name}, {window} tokens", flush=True)
            for label, half in halves.items():
                for row, shares in measured(half, window, chosen.only).items():
                    print(f"{row:24} {label:8} {statistics.mean(shares):.3f} of {len(shares)}", flush=True)


def measured(chats: Sequence[Chat], window_tokens: int, only: str = "") -> dict[str, list[float]]:
    """By row, 1.0 for each question whose whole evidence is in the prompt, else 0.0."""
    found: dict[str, list[float]] = {}
    for chat in chats:
        for row, text in asyncio.run(_prompts(chat.transcript, window_tokens, only)).items():
            kept = [float(all(each.stands_in(text) for each in question)) for question in chat.questions]
            found.setdefault(row, []).extend(kept)
    return found


async def _prompts(transcript: Transcript, window_tokens: int, only: str) -> dict[str, str]:
    """By row, the prompt of the last request."""
    found: dict[str, str] = {}
    turns = [at for at, message in enumerate(transcript.messages) if message["role"] == "assistant" and at >= 2]
    for kind in _KINDS:
        if only in f"ours, {kind}" or (kind == "dead" and only in _RULE):
            method = methods.ours(kind, transcript, window_tokens)
            for index in turns:
                turn = await method(transcript, transcript.messages[:index])
            found[f"ours, {kind}"] = searchable(turn.messages or ())
            if kind == "dead":
                found[_RULE] = searchable(methods.by_rule(transcript.messages, turn.messages or ()))
    if only in _CUT:
        cut = await methods.stock(transcript, window_tokens)(transcript, transcript.messages[: turns[-1]])
        found[_CUT] = searchable(cut.messages or ())
    return {name: text for name, text in found.items() if only in name}


def beam(checkouts: Path) -> Iterator[Chat]:
    """The chats of 100,000 tokens."""
    for number in range(1, 21):
        said_by_id, probing = beam_chat(checkouts, number)
        texts = {at: each["content"] for at, each in said_by_id.items() if each["role"] == "user"}
        asked = [_asked(category, question, texts) for category, questions in probing.items() for question in questions]
        yield _chat(f"beam_{number}", in_turn(iter(said_by_id.values())), asked, number >= _FIRST_RESERVED["beam"])


def beam_chat(checkouts: Path, number: int) -> tuple[dict[int, JsonDict], JsonDict]:
    """Returns the messages of a chat of BEAM by their ids, and what is asked about it by category."""
    folder = f"chats/100K/{number}"
    said_by_id: dict[int, JsonDict] = {}
    for batch in json.loads(checked_out(checkouts, BEAM, f"{folder}/chat.json")):
        for message in (message for turn in batch["turns"] for message in turn):
            content = re.sub(r"\s*->->.*$", "", message["content"], flags=re.DOTALL).strip()
            said_by_id[message["id"]] = said(message["role"], content)
    return said_by_id, json.loads(checked_out(checkouts, BEAM, f"{folder}/probing_questions/probing_questions.json"))


def _asked(category: str, question: JsonDict, texts: dict[int, str]) -> list[Evidence]:
    """Nothing for a question without a literal answer among the user's own words."""
    sources = question.get("source_chat_ids") or []
    wanted = question.get("instruction_being_tested") or question.get("preference_being_tested")
    if wanted:
        best = _closest(wanted, _sentences(sources, texts))
        return [best] if best and len(best.words) >= 0.7 * len(_words(wanted)) else []
    if category == "contradiction_resolution" and isinstance(sources, dict):
        sides = [_closest(question["ideal_answer"], _sentences(side, texts)) for side in sources.values()]
        return [side for side in sides if side] if len(sides) == 2 and all(sides) else []
    if category == "temporal_reasoning":
        return _values(" ".join(map(str, question.get("time_points", ()))), _sentences(sources, texts))
    if category in ("information_extraction", "multi_session_reasoning"):
        return _values(str(question["answer"]), _sentences(sources, texts))
    if category == "knowledge_update":
        newest = sources.get("updated_info", sources) if isinstance(sources, dict) else sources
        return _values(str(question["answer"]), _sentences(newest, texts))
    return []


def _sentences(sources: object, texts: dict[int, str]) -> list[str]:
    identifiers = [int(found) for found in re.findall(r"\d+", json.dumps(sources))]
    said_there = [texts[at] for at in identifiers if at in texts]
    return [each.strip() for text in said_there for each in _SENTENCE_END.split(text) if each.strip()]


def _closest(wanted: str, sentences: Sequence[str]) -> Evidence | None:
    if not sentences:
        return None
    best = max(sentences, key=lambda each: len(_words(wanted) & _words(each)) / (6 + len(_words(each))))
    return Evidence(best, "", frozenset(_words(wanted) & _words(best)))


def _values(answer: str, sentences: Sequence[str]) -> list[Evidence]:
    """Each value of the answer at the first sentence that has it; more than six are a summary, not an answer."""
    values = [value.strip(".,") for value in dict.fromkeys(_VALUE.findall(answer))]
    found = [_beside(value, each) for value in values if len(value) > 1 for each in sentences if _has(value, each)]
    first = list({each.value: each for each in reversed(found)}.values())
    return first if len(first) <= 6 else []


def friends(checkouts: Path) -> Iterator[Chat]:
    """LoCoMo's, with the questions whose answer stands in the evidence that is named, part by part."""
    data = checked_out(checkouts, LOCOMO, "data/locomo10.zip")
    for number in FRIENDS:
        member = f"data/multimodal_dialog/locomo10_v2/{number}.json"
        recorded = json.loads(zipfile.ZipFile(io.BytesIO(data)).read(member))
        sessions = [value for key, value in recorded.items() if re.fullmatch(r"session_\d+", key)]
        texts = {turn["dia_id"]: turn.get("text") or "" for session in sessions for turn in session}
        asked: list[list[Evidence]] = []
        for question in recorded["qa"]:
            parts = [part.strip() for part in str(question.get("answer", "")).split(",")]
            said_there = [texts.get(at, "") for at in question["evidence"]]
            found = [next((_beside(part, each) for each in said_there if _has(part, each)), None) for part in parts]
            asked.append([each for each in found if each] if all(found) and min(map(len, parts)) > 2 else [])
        messages = in_turn(locomo(member)(data))
        yield _chat(f"locomo_{number}", messages, asked, number >= _FIRST_RESERVED["locomo"])


def _chat(name: str, messages: list[JsonDict], asked: Sequence[Sequence[Evidence]], is_reserved: bool) -> Chat:
    questions = [question for question in asked if question]
    sentences = dict.fromkeys(each.sentence for question in questions for each in question)
    # The oracle keeps evidence sentences as it would keep facts.
    facts = [{"text": sentence, "msg": 0} for sentence in sentences]
    return Chat(Transcript(name, messages, [], facts), questions, is_reserved)


def _beside(value: str, sentence: str) -> Evidence:
    near = _around(next(_places(value, sentence)), sentence, 80)
    return Evidence(sentence, value, frozenset(_words(near) - _words(value)))


def _around(place: re.Match[str], text: str, characters: int) -> str:
    return text[max(0, place.start() - characters) : place.end() + characters]


def _has(value: str, text: str) -> bool:
    return next(_places(value, text), None) is not None


def _places(value: str, text: str) -> Iterator[re.Match[str]]:
    return re.finditer(rf"(?<![\w.]){re.escape(value)}(?!\w)", text, re.IGNORECASE)


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def checked_out(checkouts: Path, source: tuple[str, str], path: str) -> bytes:
    """Returns a file of a clone, of which there may be no more than its git directory."""
    command = ["git", "-C", str(checkouts / source[0]), "show", f"{source[1]}:{path}"]
    return subprocess.run(command, capture_output=True, check=True).stdout


if __name__ == "__main__":
    main()
