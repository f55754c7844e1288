"""Weighs a person's sentences: rules, conditions and wishes before chatter, prose before pasted bulk.

A rule is known by its modal verbs, negations and limits in the languages of `languages.toml`. No list is complete, so
plain prose is worth something as well; pasted text (code, logs, tables) is worth least, because it can be read
again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from litellm_compaction.core import table

_RULE, _CONDITION = 3.0, 1.0
# What is long past being answered, and what only keeps a talk going.
_QUESTION_RATIO, _QUESTION_ENDS = 0.6, ("?", "？", "؟")
_SHORT_RATIO, _SHORT_CHARS = 0.3, 12
# Prose repeats few of its words, and no person writes a longer sentence.
_LEAST_WORDS, _DISTINCT_RATIO, _LONGEST_CHARS = 20, 0.25, 600
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
# Prose is letters and blanks; a log, a table or code is not.
_PROSE_RATIO = 0.75
_AROUND_WORDS = ".,:;!?()'\""
_LEAST_PLAIN_WORDS, _PLAIN_WORDS_RATIO = 4, 0.7
# Only signs with which no sentence begins: "import the data first" and "$ 500" are people's words.
_BULK_LINE = re.compile(
    r"\s*(?:\d{4}-\d\d-\d\d[T ]\d\d:|\[?(?:DEBUG|INFO|WARN|WARNING|ERROR|TRACE)\b|Traceback \(|File \"|at \S{1,200}\(|"
    r">>> |\$ [a-z./]|\+\+\+ |--- |@@ |\||#include|import [\w.]{1,80}(?: as \w{1,40})?;?\s*$|"
    r"from [\w.]{1,80} import |(?<=\s\s)return\b|def \w{1,80}\(|class \w{1,80}(?:\(.{0,80}\))?[:{]\s*$|\{|\}|"
    r"</?\w{1,40}>\s*$)"
)
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+(?=\S)|(?<=[。！？；])")
# Of scripts that set no words apart.
_WIDE = re.compile("[\u2e80-\U0010ffff]")
_FENCE = "```"
_SHORT_FENCE_LINES = 4
# The least factor, for prose without a word of its own.
_LEAST_NEWS = 0.3
# From where on a word is rare among a person's sentences; three that stand in no other are news, seven are more.
_RARE_FROM, _NEWS, _MOST_NEWS = 0.5, 1.5, 2.0
_LEAST_SENTENCES = 40


_LANGUAGES = table("languages")


class _Signals:
    """Words, phrases, and parts of words in scripts without blanks, all of one kind, in all languages."""

    def __init__(self, kind: str) -> None:
        languages = _LANGUAGES.values()
        words = {word.replace("_", " ") for language in languages for word in language.get(kind, "").split()}
        self.words = frozenset(word for word in words if " " not in word)
        # With their first words.
        self._phrases = [(phrase.partition(" ")[0], phrase) for phrase in sorted(words - self.words)]
        parts = {part for language in languages for part in language.get("unspaced", {}).get(kind, "").split()}
        self._parts = re.compile("|".join(map(re.escape, sorted(parts))))

    def stand_in(self, sentence: str, words: Set[str]) -> bool:
        """Returns True if a sentence, with its words in lower case, has one of them."""
        if not self.words.isdisjoint(words) or (not sentence.isascii() and self._parts.search(sentence)):
            return True
        lower = sentence.lower()
        return any(first in words and phrase in lower for first, phrase in self._phrases)


_RULES, _CONDITIONS = map(_Signals, ("rules", "conditions"))
RULE_WORDS = _RULES.words


class Sentence(NamedTuple):
    """A sentence, or a line that was pasted, without the blanks around it; a line of the text may begin with it."""

    text: str
    pasted: bool
    opens_line: bool


def sentences(text: str) -> Iterator[Sentence]:
    """The sentences and lines of a text, in order."""
    lines = text.splitlines()
    fences = [at for at, line in enumerate(lines) if line.lstrip().startswith(_FENCE)] if _FENCE in text else []
    borders = set(fences)
    # One that is never closed encloses nothing, and a person wants a command or two to be used.
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
        for sentence in (line,) if pasted else _SENTENCE_END.split(line):
            if shown := sentence.strip():
                yield Sentence(shown, pasted or is_bulk(shown), opens_line)
                opens_line = False


def is_bulk(line: str) -> bool:
    """Returns True if a line was pasted rather than written: code, a log, a table, or without an end."""
    if _BULK_LINE.match(line) or (len(line) > _LONGEST_CHARS and _SENTENCE_END.search(line) is None):
        return True
    words = line.split()
    if len(words) >= _LEAST_WORDS and len(set(words)) < _DISTINCT_RATIO * len(words):
        return True
    plain_chars = sum(map(str.isalpha, line)) + line.count(" ")
    if len(line) < _SHORT_CHARS or plain_chars >= _PROSE_RATIO * len(line) or _WIDE.search(line) is not None:
        return False
    # "The deadline is 2027-03-19." has few letters, and is said.
    plain = sum([word.strip(_AROUND_WORDS).isalpha() for word in words])
    return plain < _LEAST_PLAIN_WORDS or plain < _PLAIN_WORDS_RATIO * len(words)


def _words(sentence: str) -> set[str]:
    return set(map(str.casefold, _WORD.findall(sentence.replace("’", "'"))))


class Weight(NamedTuple):
    """The worth of a sentence apart from what it names, and if it has a word that makes rules."""

    worth: float
    is_rule: bool


class Talk:
    """The words a person uses all the time, which are no news."""

    def __init__(self, sentences: Iterable[str] = ()) -> None:
        times: Counter[str] = Counter()
        self._sentences = 0
        for sentence in sentences:
            self._sentences += 1
            times.update(_words(sentence))
        # Of words in more than one sentence, from 0 for one in all of them; that of the others is 1.
        log = math.log(max(self._sentences, _LEAST_SENTENCES))
        self._rarity = {word: max(1 - math.log(count) / log, 0.0) for word, count in times.items() if count > 1}

    def weight(self, sentence: str) -> Weight:
        """Weighs a sentence of this person's: about 1 for prose, up to 5.7 for a rule."""
        words = _words(sentence)
        is_rule = _RULES.stand_in(sentence, words)
        worth = self._news(words) + _RULE * is_rule + _CONDITION * _CONDITIONS.stand_in(sentence, words)
        if sentence.endswith(_QUESTION_ENDS):
            worth *= _QUESTION_RATIO
        if len(sentence) < _SHORT_CHARS and sentence.isascii():
            worth *= _SHORT_RATIO
        return Weight(worth, is_rule)

    def _news(self, words: Set[str]) -> float:
        """From 0.3 to 1.7, by words that hardly another sentence has; 1 if no other is known."""
        if not self._sentences:
            return 1.0
        # In any order of the set the same.
        rare = math.fsum([max(self._rarity.get(word, 1.0) - _RARE_FROM, 0.0) for word in words])
        return _LEAST_NEWS + (1 - _LEAST_NEWS) * min(rare / _NEWS, _MOST_NEWS)
