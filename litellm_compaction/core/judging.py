"""Decides if a model's summary may be used, and leaves out those of its lines that may not.

Small models say their instruction back, write one sentence again and again, go on with the dialogue, tell another
story, or state rules of their own: so did all of 29 summaries of a model with 135 million parameters, and
each left an assistant with less than no summary at all. If such lines are most of a summary, it is not used,
and its room goes to the ledger.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.core.inventions import inventions
from litellm_compaction.core.ledger import ANCHORS_HEAD, NAMES_HEAD, OPERATOR_HEAD, WORDS_HEAD
from litellm_compaction.core.prompts import FRAME_NOTE, INCORPORATES, LEDGER_TITLE

Fault: TypeAlias = Literal["echo", "loop", "dialogue", "script", "invented", "empty"]

_FRAME = (FRAME_NOTE, INCORPORATES, LEDGER_TITLE, WORDS_HEAD, OPERATOR_HEAD, ANCHORS_HEAD, NAMES_HEAD)
# A line is the instruction's own if more than half of its runs of so many words stand there.
_RUN_WORDS = 4
# So much of the beginning is enough to know an instruction by.
_ECHO_CHARS = 60
_ECHO_SHARE = 0.5
# Of so many sentences no writer says only three in five once.
_LEAST_SENTENCES = 6
_LEAST_DISTINCT_RATIO = 0.6
# Prose takes a third to a half of its bytes, one phrase again and again a tenth.
_LOOP_BYTES, _LOOP_RATIO = 200, 0.12
# Words of a sentence that counts: "Done." may well stand in every row.
_LEAST_SENTENCE_WORDS = 3
_MOST_DROPPED_RATIO = 0.5
# A script that the source hardly has is not the conversation's.
_MAIN_SCRIPT_RATIO = 0.6
_KNOWN_SCRIPT_RATIO = 0.02
_LEAST_LETTERS = 40
_LETTERS_CHARS = 20_000
_SAMPLE_TEXTS, _SAMPLE_CHARS = 100, 200
# So few bytes of different words say nothing if none of them is of a source that is so many times as long.
# (The shortest of forty good summaries has 21, and is of its source.)
_FEW_BYTES, _FAR_SHORTER_RATIO = 20, 20
_WITHOUT_SPACES = "\u2e80"
_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|(?<=[。！？])")
# Of a longer line only the bad sentences are left out.
_LONG_LINE_CHARS = 200
_LONG_LINE_END = re.compile(r"(?<=[^\W\d_][.!?]) ")
_RULE = re.compile(r"\|?[\s:|-]{3,200}\|?\s{0,8}\Z")
_HEADING = re.compile(r"\s{0,8}#{1,6}\s|" + _RULE.pattern)
# How a transcript is shown to a summariser (`prompts.render_message`).
_TURN = re.compile(r"\s{0,8}(?:(?:USER|ASSISTANT|SYSTEM|DEVELOPER|TOOL RESULT):\s{0,8}\Z|ASSISTANT CALLED \w)")
# Scripts that are written together, by the first words of their letters' names.
_TOGETHER = dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"), "CJK")


class Judgement(NamedTuple):
    """A summary as it may be used, or a word for events that says why nothing of it may."""

    text: str
    fault: Fault | Literal[""]


class _Line(NamedTuple):
    """A line, or a sentence of a long one; `end` is the blank or the line break after it."""

    text: str
    end: str
    is_heading: bool
    words: int
    fault: Fault | Literal[""]


def judged(summary: str, *, instruction: str, source: Sequence[str]) -> Judgement:
    """The summary without the lines that say nothing, every character of the others, or why it may not be used.

    Args:
        summary: as the model wrote it, without its reasoning; its caller has bounded it.
        instruction: that it was given.
        source: all texts that its writer was shown: what none of them states is an invention.
    """
    if summary.startswith(instruction[:_ECHO_CHARS]):
        return Judgement("", "echo")
    lines = _held_against(_looked_at(summary, _told_by(instruction)), (instruction, *source))
    words = sum(line.words for line in lines if not line.is_heading)
    if not words:
        return Judgement("", "empty")
    if _is_foreign(summary, instruction, source):
        return Judgement("", "script")
    dropped: Counter[Fault] = Counter()
    for line in lines:
        if line.fault:
            dropped[line.fault] += line.words
    if dropped.total() > _MOST_DROPPED_RATIO * words:
        return Judgement("", dropped.most_common(1)[0][0])
    if _says_nothing(" ".join(line.text for line in lines if not (line.is_heading or line.fault)), instruction, source):
        return Judgement("", "empty")
    if _repeats(line.text for line in lines if not line.is_heading):
        return Judgement("", "loop")
    if not dropped:
        return Judgement(summary, "")
    return Judgement("".join(_without_faults(lines)).strip(), "")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.casefold() for word in _WORD.findall(text))


def _is_repeated(words: tuple[str, ...], seen: Collection[tuple[str, ...]]) -> bool:
    return len(words) >= _LEAST_SENTENCE_WORDS and words in seen


def _split(summary: str) -> Iterator[tuple[str, str]]:
    """The lines, of long ones the sentences, each with the sign that parts it from the next."""
    for line in summary.split("\n"):
        sentences = _LONG_LINE_END.split(line) if len(line) > _LONG_LINE_CHARS else [line]
        yield from zip(sentences, [" "] * (len(sentences) - 1) + ["\n"], strict=True)


def _looked_at(summary: str, told: frozenset[tuple[str, ...]]) -> list[_Line]:
    found: list[_Line] = []
    seen: set[tuple[str, ...]] = set()
    in_dialogue = False
    pieces = list(_split(summary))
    for (text, end), (below, _) in zip(pieces, [*pieces[1:], ("", "")], strict=True):
        # The row over a table's rule names its columns.
        is_heading = _HEADING.match(text) is not None or (text.startswith("|") and _RULE.match(below) is not None)
        words = _words(text)
        in_dialogue = not is_heading and (in_dialogue or _TURN.match(text) is not None)
        fault: Fault | Literal[""] = ""
        if not is_heading and words:
            if in_dialogue:
                fault = "dialogue"
            elif _is_told(words, told):
                fault = "echo"
            elif _is_repeated(words, seen) or _turns_round(text):
                fault = "loop"
            seen.add(words)
        found.append(_Line(text, end, is_heading, len(words), fault))
    return found


def _held_against(lines: Sequence[_Line], source: Sequence[str]) -> list[_Line]:
    believed = [line.is_heading or bool(line.fault) for line in lines]
    invented = inventions(["" if each else line.text for each, line in zip(believed, lines, strict=True)], source)
    return [line._replace(fault="invented") if each else line for each, line in zip(invented, lines, strict=True)]


def _told_by(instruction: str) -> frozenset[tuple[str, ...]]:
    return frozenset(run for text in (instruction, *_FRAME) for run in _runs(_words(text)))


def _runs(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [words[start : start + _RUN_WORDS] for start in range(len(words) - _RUN_WORDS + 1)]


def _is_told(words: tuple[str, ...], told: frozenset[tuple[str, ...]]) -> bool:
    """A line is made of the instruction's own words; one of a few words may be any writer's."""
    runs = _runs(words)
    return bool(runs) and sum(run in told for run in runs) > _ECHO_SHARE * len(runs)


def _turns_round(line: str) -> bool:
    """A line is one phrase, in whatever script, again and again."""
    data = line.encode("utf-8", "surrogatepass")
    return len(data) >= _LOOP_BYTES and len(zlib.compress(data)) < _LOOP_RATIO * len(data)


def _says_nothing(body: str, instruction: str, source: Sequence[str]) -> bool:
    """A few words stand for a long source and none of them is of it ("OK.", "Sure, here you go!").

    In any language: a number of the source says something of it, and so does the beginning of a longer word, as `pars`
    of `parsing` in `parser`. A summary of more than a few words is believed here.
    """
    words = {word.casefold() for word in _WORD.findall(body)}
    size = sum(len(word.encode("utf-8", "surrogatepass")) for word in words)
    texts = [text.casefold() for text in source if instruction not in text] if size <= _FEW_BYTES else []
    if sum(map(len, texts)) < _FAR_SHORTER_RATIO * size or not texts:
        return False
    pieces = {piece for word in words for piece in _pieces(word)}
    return not any(piece in text for text in texts for piece in pieces)


def _pieces(word: str) -> Iterator[str]:
    """The signs of a word: a whole number, a long word's beginning, any part in a script without spaces."""
    if word.isdecimal():
        yield word
    elif word[0] >= _WITHOUT_SPACES:
        yield from (word[at : at + 3] for at in range(len(word) - 2))
    elif len(word) > 4:
        yield word[:4]


def _repeats(lines: Iterable[str]) -> bool:
    """Most sentences are said more than once, on one line or on several."""
    sentences = [
        words
        for line in lines
        for sentence in _SENTENCE_END.split(line)
        if len(words := tuple(_WORD.findall(sentence.casefold()))) >= _LEAST_SENTENCE_WORDS
    ]
    return len(sentences) >= _LEAST_SENTENCES and len(set(sentences)) <= _LEAST_DISTINCT_RATIO * len(sentences)


def _is_foreign(summary: str, instruction: str, source: Sequence[str]) -> bool:
    """A summary is in a script that neither its instruction nor its source has.

    Weak models answer an English instruction in English, and what they say of another language's conversation is true.
    """
    said = _letters(summary)
    total = said.total()
    if total < _LEAST_LETTERS:
        return False
    script, count = said.most_common(1)[0]
    if count < _MAIN_SCRIPT_RATIO * total or script in _letters(instruction):
        return False
    read = _letters(_sample(source))
    return read.total() >= _LEAST_LETTERS and read[script] < _KNOWN_SCRIPT_RATIO * read.total()


def _sample(source: Sequence[str]) -> str:
    """The beginnings of texts from all over the source, which may change its script on the way."""
    step = -(-len(source) // _SAMPLE_TEXTS) or 1
    return "\n".join(text[:_SAMPLE_CHARS] for text in source[::step])


def _letters(text: str) -> Counter[str]:
    letters = filter(str.isalpha, text[:_LETTERS_CHARS])
    scripts = (unicodedata.name(letter, "").partition(" ")[0] for letter in letters)
    return Counter(_TOGETHER.get(script, script) for script in scripts)


def _without_faults(lines: Sequence[_Line]) -> Iterator[str]:
    """The lines that stay; a heading goes with the last line under it."""
    for at, line in enumerate(lines):
        if line.fault:
            continue
        if line.is_heading:
            under = list(itertools.takewhile(lambda each: not each.is_heading, lines[at + 1 :]))
            if any(each.fault for each in under) and not any(each.words and not each.fault for each in under):
                continue
        yield line.text + line.end
