"""Weighs a person's sentences: rules, conditions and wishes before chatter, prose before pasted bulk.

A rule is known by its modal verbs, negations and limits in the languages of `languages.toml`. No list is complete, so
plain prose is worth something as well; pasted text (code, logs, tables) is worth least, because it can be read
again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from litellm_compaction.core import table

# The least worth of a sentence that rules something.
RULE_WORTH = 4.0
# No person writes a longer sentence.
_LONGEST_CHARS = 600
# So many words of a sentence that stand in no other are news.
_NEWS_WORDS = 3
_WORD = re.compile(r"[^\W\d_]+")
# Prose is letters and blanks; a log or a table is not.
_PROSE_RATIO, _LEAST_BULK_CHARS = 0.6, 12
# Signs with which no sentence begins: of a prompt, a difference, a table, an object, and tags.
_BULK_LINE = re.compile(r"\s*(?:>>> |\$ [a-z./]|\+\+\+ |--- |@@ |[|{}]|</?\w{1,40}>\s*$)")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+(?=\S)|(?<=[。！？；])")


def _signals(kind: str) -> re.Pattern[str]:
    """Words and phrases in lower case, and parts of words in scripts without blanks, of one kind in all languages."""
    languages = table("languages").values()
    words = {word for language in languages for word in language.get(kind, "").split()}
    parts = {part for language in languages for part in language.get("unspaced", {}).get(kind, "").split()}
    spaced, unspaced = ("|".join(map(re.escape, sorted(each))) for each in (words, parts))
    return re.compile(rf"(?<![^\W\d_])(?:{spaced.replace('_', ' ')})(?![^\W\d_])|{unspaced}")


RULES, _CONDITIONS = map(_signals, ("rules", "conditions"))


class Sentence(NamedTuple):
    """A sentence, or a line that was pasted, without the blanks around it; a line of the text may begin with it."""

    text: str
    pasted: bool
    opens_line: bool


def sentences(text: str) -> Iterator[Sentence]:
    """The sentences and lines of a text, in order."""
    lines = text.splitlines()
    fences = [at for at, line in enumerate(lines) if line.lstrip().startswith("```")]
    # One that is never closed encloses nothing, and around a line of its own it says what to run.
    closed = [range(*pair) for pair in zip(fences[::2], fences[1::2], strict=False)]
    fenced = {at for inside in closed if len(inside) > 2 for at in inside}
    for at in sorted({*range(len(lines))}.difference(fences)):
        opens_line, is_pasted = True, at in fenced or _BULK_LINE.match(lines[at]) is not None
        for sentence in [lines[at]] if is_pasted else _SENTENCE_END.split(lines[at]):
            if shown := sentence.strip():
                yield Sentence(shown, is_pasted or _is_bulk(shown), opens_line)
                opens_line = False


def _is_bulk(line: str) -> bool:
    """Returns True if a line was pasted rather than written: a log, a table, or without an end."""
    plain_chars = sum(map(str.isalpha, line)) + line.count(" ")
    return len(line) > _LONGEST_CHARS or (len(line) >= _LEAST_BULK_CHARS and plain_chars < _PROSE_RATIO * len(line))


def worth(sentence: str) -> float:
    """The worth of a person's sentence apart from what it names: 1 for prose, from `RULE_WORTH` on for a rule."""
    lower = sentence.lower().replace("’", "'")
    of_prose = 1.0 + (_CONDITIONS.search(lower) is not None)
    return of_prose + (RULE_WORTH - 1.0) * (RULES.search(lower) is not None)


def news(sentences: Sequence[str]) -> Callable[[str], float]:
    """Tells of a person's sentence, one of `sentences`, how new its words are: from 0.3 up to 1.7.

    A rule without a word that makes rules ("The people who run this still have Python 3.7.") is known by nothing else.
    """
    times = Counter(word for each in sentences for word in _words(each))
    return lambda sentence: 0.3 + 0.7 * min(sum(times[word] == 1 for word in _words(sentence)) / _NEWS_WORDS, 2.0)


def _words(sentence: str) -> set[str]:
    return set(_WORD.findall(sentence.casefold()))
