"""What a sentence of a person's is worth: rules, conditions and wishes before chatter, prose before pasted bulk.

A rule is known by its modal verbs, negations and limits in the languages of `languages.toml`. No list is complete, so
plain prose is worth something as well; what was pasted (code, logs, tables) is worth least, because it can be read
again. Pure and in linear time.
"""

from __future__ import annotations

import re
import string
import sys
from collections import Counter
from collections.abc import Iterator, Set
from importlib import resources
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_RULE, _CONDITION, _PERSON = 3.0, 1.0, 0.5
_PROSE, _BULK = 1.0, 0.2
# What is long past being answered, and what only keeps a talk going.
_QUESTION_RATIO = 0.6
_QUESTION_ENDS = ("?", "？", "؟")
_SHORT_CHARS = 12
# Prose repeats few of its words.
_LEAST_WORDS, _DISTINCT_RATIO = 20, 0.25
# Nobody writes a longer sentence.
_LONGEST_CHARS = 600
_SHORT_RATIO = 0.3
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
# Prose is letters and blanks; a log, a table or code is not.
_PROSE_RATIO = 0.75
# Only what nobody begins a sentence with: "import the data first" and "$ 500" are said by people.
_BULK_LINE = re.compile(
    r"\s*(?:\d{4}-\d\d-\d\d[T ]\d\d:|\[?(?:DEBUG|INFO|WARN|WARNING|ERROR|TRACE)\b|Traceback \(|File \"|at \S{1,200}\(|"
    r">>> |\$ [a-z./]|\+\+\+ |--- |@@ |\||#include|import [\w.]{1,80}(?: as \w{1,40})?;?\s*$|"
    r"from [\w.]{1,80} import |(?<=\s\s)return\b|def \w{1,80}\(|class \w{1,80}(?:\(.{0,80}\))?[:{]\s*$|\{|\}|"
    r"</?\w{1,40}>\s*$)"
)
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+(?=\S)|(?<=[。！？；])")
# Where a sentence of plain letters may end.
_MAY_END = (". ", "! ", "? ", "; ", "\t", "\x1f")
_PLAIN_ASCII = (string.ascii_letters + " ").encode()
_FENCE = "```"
_SHORT_FENCE_LINES = 4


class _Signals(NamedTuple):
    """The words of all languages that signal one thing, and the parts of words where blanks set none apart."""

    words: frozenset[str]
    parts: re.Pattern[str]

    def are_in(self, sentence: str, words: Set[str]) -> bool:
        """Whether a sentence, with its words in lower case, has one of them."""
        return not self.words.isdisjoint(words) or (not sentence.isascii() and self.parts.search(sentence) is not None)


def _signals(kind: str) -> _Signals:
    languages = _LANGUAGES.values()
    words = {word for language in languages for word in language.get(kind, "").split()}
    parts = {part for language in languages for part in language.get("unspaced", {}).get(kind, "").split()}
    return _Signals(frozenset(words), re.compile("|".join(map(re.escape, sorted(parts)))))


_LANGUAGES = tomllib.loads(resources.files(__package__).joinpath("languages.toml").read_text(encoding="utf-8"))
_COMMON = {name: frozenset(each["common"].split()) for name, each in _LANGUAGES.items() if "common" in each}
_RULES, _CONDITIONS, _PERSONS = map(_signals, ("rules", "conditions", "persons"))
RULE_WORDS = _RULES.words


class Piece(NamedTuple):
    """A sentence, or a line that was pasted.

    Attributes:
        text: one line, without the blanks around it.
        pasted: whether nobody wrote it here.
        opens_line: whether a line of the text begins with it.
    """

    text: str
    pasted: bool
    opens_line: bool


def sentences(text: str) -> Iterator[Piece]:
    """The sentences and lines of a text, in order."""
    lines = text.splitlines()
    fences = [at for at, line in enumerate(lines) if line.lstrip().startswith(_FENCE)]
    borders = set(fences)
    # One that is never closed encloses nothing, and a command or two are what somebody wants to have used.
    fenced = {
        at
        for begin, end in zip(fences[::2], fences[1::2], strict=False)
        if end - begin > _SHORT_FENCE_LINES
        for at in range(begin, end)
    }
    for at, line in enumerate(lines):
        if at in borders:
            continue
        pasted, opens_line = at in fenced or _BULK_LINE.match(line) is not None, True
        for sentence in (line,) if pasted or _is_one(line) else _SENTENCE_END.split(line):
            if shown := sentence.strip():
                yield Piece(shown, pasted or is_bulk(shown), opens_line)
                opens_line = False


def _is_one(line: str) -> bool:
    """Whether a line is certain to have one sentence; a search for the ends of others looks at each character."""
    return line.isascii() and not any(map(line.__contains__, _MAY_END))


def is_bulk(line: str) -> bool:
    """Whether a line was pasted rather than written: code, a log, a table, or without an end."""
    if _BULK_LINE.match(line) or (len(line) > _LONGEST_CHARS and _SENTENCE_END.search(line) is None):
        return True
    words = line.split() if len(line) > 2 * _LEAST_WORDS - 2 else ()
    if len(words) >= _LEAST_WORDS and len(set(words)) < _DISTINCT_RATIO * len(words):
        return True
    return len(line) >= _SHORT_CHARS and _plain(line) < _PROSE_RATIO * len(line) and not any(map(_is_wide, line))


def _plain(line: str) -> int:
    """How many letters and blanks a line has."""
    if line.isascii():
        return len(line) - len(line.encode().translate(None, _PLAIN_ASCII))
    return sum(map(str.isalpha, line)) + line.count(" ")


def _is_wide(sign: str) -> bool:
    return sign >= "\u2e80"


def languages(text: str) -> Counter[str]:
    """How many of the commonest words of each language a text has; some are those of several languages."""
    words = Counter(word.casefold() for word in _WORD.findall(text))
    return +Counter({name: sum(words[each] for each in common) for name, common in _COMMON.items()})


def is_rule(sentence: str) -> bool:
    """Whether a sentence has a word that makes rules: a modal verb, a negation, a limit."""
    return _RULES.are_in(sentence, _words(sentence))


def _words(sentence: str) -> set[str]:
    if sentence.isascii():
        return set(_WORD.findall(sentence.lower()))
    return {word.casefold().replace("’", "'") for word in _WORD.findall(sentence)}


def worth(sentence: str, *, pasted: bool = False) -> float:
    """What a sentence says beside the values in it: from 0.2 for a pasted line to about 4.5 for a rule."""
    if pasted:
        return _BULK
    words = _words(sentence)
    found = _PROSE
    found += _RULE if _RULES.are_in(sentence, words) else 0.0
    found += _CONDITION if _CONDITIONS.are_in(sentence, words) else 0.0
    found += _PERSON if _PERSONS.are_in(sentence, words) else 0.0
    if sentence.endswith(_QUESTION_ENDS):
        found *= _QUESTION_RATIO
    if len(sentence) < _SHORT_CHARS and sentence.isascii():
        found *= _SHORT_RATIO
    return found
