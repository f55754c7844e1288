"""Decides if a model's summary may be used, and leaves out those of its sentences that may not.

Small models say their instruction back, write one sentence again and again, go on with the dialogue, or state rules of
their own. A rule (`inventions.toml` tells it) that nobody gave would bind whoever reads the record, so it needs two
sentences in a row with half of its words, and a negation if it has one. Values stand verbatim in the ledger.
"""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.core import table
from litellm_compaction.core.ledger import ANCHORS_HEAD, NAMES_HEAD, OPERATOR_HEAD, WORDS_HEAD
from litellm_compaction.core.prompts import FRAME_NOTE, INCORPORATES, LEDGER_TITLE

Fault: TypeAlias = Literal["echo", "loop", "dialogue", "script", "invented", "empty", ""]

_FRAME = (FRAME_NOTE, INCORPORATES, LEDGER_TITLE, WORDS_HEAD, OPERATOR_HEAD, ANCHORS_HEAD, NAMES_HEAD)
# A line is the instruction's if more than half of its runs of so many words stand there.
_RUN_WORDS, _ECHO_SHARE = 4, 0.5
# Prose takes a third to a half of its bytes, one phrase again and again a tenth.
_LOOP_BYTES, _LOOP_RATIO = 200, 0.12
# Words of a sentence that counts: "Done." may well stand in every row.
_LEAST_SENTENCE_WORDS = 3
_MOST_DROPPED_RATIO = 0.5
# A script that is most of a summary and hardly in the source is not the conversation's; of few letters nothing is told.
_MAIN_SCRIPT_RATIO, _KNOWN_SCRIPT_RATIO, _LEAST_LETTERS = 0.6, 0.02, 40
_SAMPLE_TEXTS, _SAMPLE_CHARS = 100, 200
# So few bytes of different words say nothing if none of them is of a source that is so many times as long.
_FEW_BYTES, _FAR_SHORTER_RATIO = 26, 20
_WORD = re.compile(r"\w+")
# Behind a number in front of an item there is none.
_SENTENCE_END = re.compile(r"(?<=[.!?;])(?<!^\d[.])(?<!^\d\d[.])(?=\s)|(?<=[。！？；])|\n", re.MULTILINE)
_HEADING = re.compile(r"\s{0,8}#{1,6}\s|\|?[\s:|-]{3,200}\|?\s{0,8}\Z")
# How a transcript is shown to a summariser (`prompts.render_message`).
_TURN = re.compile(r"\s{0,8}(?:(?:USER|ASSISTANT|SYSTEM|DEVELOPER|TOOL RESULT):\s{0,8}\Z|ASSISTANT CALLED \w)")
# A summary with more rules is a list: its lines are believed. A longer sentence is none.
_MOST_RULES, _SENTENCE_CHARS = 400, 600
_STEM = re.compile(
    r"[^\W\d_\u0e00-\u0eff\u2e80-\uffff]{4,40}|\b[A-Z]{2,3}\b|\d{1,40}|[\u0e00-\u0eff\u2e80-\ud7ff]{2,200}"
)
_STEM_CHARS, _WITHOUT_SPACES = 5, "\u0e00"
_BULLETS = "-*•> \t[]()0123456789."
# 0.6 keeps fewer invented rules and loses as many more of the user's; a word in every sentence counts a little.
_SUPPORT_RATIO, _LEAST_WEIGHT = 0.5, 0.1

_WORDS = {
    key: "|".join(re.escape(word.replace("_", " ")) for word in words.split())
    for key, words in table("inventions").items()
}
_RULE = re.compile(
    rf"(?<!\w)(?:{_WORDS['anywhere']})(?!\w)|(?:\A|[^\w\s,'’]|\b(?:{_WORDS['before']}))\s{{0,3}}(?:{_WORDS['opening']})(?!\w)"
    rf"|{_WORDS['inside']}",
    re.IGNORECASE,
)
_RULE_WORDS = re.compile(
    rf"(?<!\w)(?:{_WORDS['anywhere']}|{_WORDS['opening']}|{_WORDS['negations']}|users?|assistant)(?!\w)|{_WORDS['inside']}",
    re.IGNORECASE,
)
_NEGATION = re.compile(rf"(?<!\w)(?:{_WORDS['negations']})(?!\w)|n['’]|{_WORDS['negations_inside']}", re.IGNORECASE)


class Judgement(NamedTuple):
    """A summary as it may be used, or a word for events that says why nothing of it may."""

    text: str
    fault: Fault


class _Sentence(NamedTuple):
    line: int
    text: str  # With the blanks before it.
    words: int  # 0 in a heading, which is never at fault.
    fault: Fault = ""


def judged(summary: str, *, instruction: str, source: Sequence[str]) -> Judgement:
    """The summary without the sentences that say nothing, every character of the others, or why it may not be used.

    `source` are all texts that its writer was shown: what none of them states is an invention.
    """
    sentences = _looked_at(summary, instruction)
    invented = inventions([each.text for each in sentences if each.words and not each.fault], (instruction, *source))
    sentences = [each._replace(fault="invented") if each.text in invented else each for each in sentences]
    words: Counter[Fault] = Counter()
    for each in sentences:
        words[each.fault] += each.words
    total, good = words.total(), words.pop("", 0)
    if total and _is_foreign(summary, instruction, source):
        return Judgement("", "script")
    if total - good > _MOST_DROPPED_RATIO * total:
        return Judgement("", max(words, key=words.__getitem__))
    left = [each for each in sentences if not each.fault]
    if not total or _says_nothing(" ".join(each.text for each in left if each.words), instruction, source):
        return Judgement("", "empty")
    lines = ("".join(each.text for each in line) for _, line in groupby(left, key=lambda each: each.line))
    return Judgement("\n".join(lines).strip() if good < total else summary, "")


def _looked_at(summary: str, instruction: str) -> list[_Sentence]:
    instructed = {run for text in (instruction, *_FRAME) for run in _runs(_words(text))}
    sentences: list[_Sentence] = []
    seen: set[tuple[str, ...]] = set()
    in_dialogue = False
    for number, line in enumerate(summary.split("\n")):
        is_heading, data = _HEADING.match(line) is not None, line.encode("utf-8", "surrogatepass")
        in_dialogue = not is_heading and (in_dialogue or _TURN.match(line) is not None)
        # One phrase, in whatever script, again and again.
        turns_round = len(data) >= _LOOP_BYTES and len(zlib.compress(data)) < _LOOP_RATIO * len(data)
        for text in _SENTENCE_END.split(line):
            words = () if is_heading else _words(text)
            runs = _runs(words)
            faults: dict[Fault, bool] = {
                "dialogue": in_dialogue,
                "echo": sum(run in instructed for run in runs) > _ECHO_SHARE * len(runs),
                "loop": turns_round or (len(words) >= _LEAST_SENTENCE_WORDS and words in seen),
            }
            fault: Fault = next((name for name, holds in faults.items() if holds and words), "")
            sentences.append(_Sentence(number, text, len(words), fault))
            seen.add(words)
    return sentences


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.casefold()))


def _runs(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Each few words in a row; none of a line of fewer, which may be any writer's."""
    return [words[start : start + _RUN_WORDS] for start in range(len(words) - _RUN_WORDS + 1)]


def _says_nothing(body: str, instruction: str, source: Sequence[str]) -> bool:
    """A few words stand for a long source and none of them is of it ("OK.", "I'm sorry, I can't.")."""
    size = len("".join(set(_words(body))).encode("utf-8", "surrogatepass"))
    shown = "\n".join(text for text in source if instruction not in text).casefold() if size <= _FEW_BYTES else ""
    # "none" is a word of many sources; "pars" of "parsing" stands in "parser".
    stems = {stem[:4] for stem in _stems(body) if len(stem) == _STEM_CHARS or not (stem.isascii() and stem.isalpha())}
    return len(shown) > _FAR_SHORTER_RATIO * size and not any(stem in shown for stem in stems)


def _is_foreign(summary: str, instruction: str, source: Sequence[str]) -> bool:
    """A summary is in a script that neither its instruction nor its source has; Japanese writes several together.

    Weak models answer an English instruction in English, and what they say of another language's conversation is true.
    """
    # From all over the source, which may change its script on the way.
    sample = "".join(text[:_SAMPLE_CHARS] for text in source[:: -(-len(source) // _SAMPLE_TEXTS) or 1])
    written, read, instructed = map(_scripts, (summary, sample, instruction))
    ((script, times),) = written.most_common(1) or [("", 0)]
    is_sure = min(written.total(), read.total()) >= _LEAST_LETTERS and times >= _MAIN_SCRIPT_RATIO * written.total()
    return is_sure and read[script] < _KNOWN_SCRIPT_RATIO * read.total() and script not in instructed


def _scripts(text: str) -> Counter[str]:
    letters = filter(str.isalpha, text[: _SAMPLE_TEXTS * _SAMPLE_CHARS])
    names = (unicodedata.name(letter, "").partition(" ")[0] for letter in letters)
    return Counter("CJK" if "KATAKANA" in name or name == "HIRAGANA" else name for name in names)


def inventions(sentences: Sequence[str], source: Sequence[str]) -> set[str]:
    """Returns those sentences of a summary that are rules, and not the source's; rarer words weigh more."""
    stripped = {each: each.lstrip(_BULLETS)[:_SENTENCE_CHARS] for each in sentences}
    rules = {each: rule for each, rule in stripped.items() if _RULE.search(rule)}
    wanted = {rule: _stems(_RULE_WORDS.sub(" ", rule)) for rule in rules.values()}
    sought = frozenset[str]().union(*wanted.values()) if len(wanted) <= _MOST_RULES else frozenset[str]()
    times: Counter[str] = Counter()
    # The words of two sentences in a row, and if there is a negation in them.
    passages: set[tuple[frozenset[str], bool]] = set()
    number = 1
    for text in source if sought else ():
        passage = [(frozenset[str](), False)]
        for sentence in _SENTENCE_END.split(text):
            stems = sought & _stems(sentence)
            times.update(stems)
            passage.append((stems, bool(stems and _NEGATION.search(sentence, 0, _SENTENCE_CHARS))))
        number += len(passage) - 1
        passages.update((before | stems, was or is_) for (before, was), (stems, is_) in pairwise(passage))
    weights = {stem: math.log(number / max(times[stem], 1)) + _LEAST_WEIGHT for stem in sought}

    def is_given(rule: str) -> bool:
        least = _SUPPORT_RATIO * math.fsum(weights.get(stem, 0.0) for stem in wanted[rule])
        is_negative = _NEGATION.search(rule) is not None
        return not least or any(
            math.fsum(weights[stem] for stem in wanted[rule] & words) >= least
            for words, has_negation in passages
            if has_negation or not is_negative
        )

    return {each for each, rule in rules.items() if not is_given(rule)}


def _stems(text: str) -> frozenset[str]:
    """The beginnings of a text's words, its numbers, and of scripts without blanks each two signs."""
    words = _STEM.findall(text)
    spaced = {word[:_STEM_CHARS].casefold() for word in words if word[0] < _WITHOUT_SPACES}
    wide = (word for word in words if word[0] >= _WITHOUT_SPACES)
    return frozenset(spaced.union(word[at : at + 2] for word in wide for at in range(len(word) - 1)))
