"""What a sentence of a person's is worth: rules, conditions and wishes before chatter, prose before pasted bulk.

A rule is known by its modal verbs, negations and limits in the languages of `languages.toml`. No list is complete, so
plain prose is worth something as well; what was pasted (code, logs, tables) is worth least, because it can be read
again. Pure and in linear time.
"""

from __future__ import annotations

import math
import re
import string
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from importlib import resources
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_RULE, _CONDITION = 3.0, 1.0
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
_AROUND_WORDS = ".,:;!?()'\""
_LEAST_PLAIN_WORDS, _PLAIN_WORDS_RATIO = 4, 0.7
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
# Blanks in place of what no word has.
_NO_WORDS = bytes(sign if chr(sign) in string.ascii_letters + "'" else ord(" ") for sign in range(256))
# Of scripts that set no words apart.
_WIDE = re.compile("[\u2e80-\U0010ffff]")
_FENCE = "```"
_SHORT_FENCE_LINES = 4


# A rule's word says so much less at most where every sentence has it; prose without a word of its own so much.
_LEAST_RARITY, _LEAST_NEWS = 0.2, 0.3
# From where on a word is rare among a person's sentences; three that stand in no other are news, seven are more.
_RARE_FROM, _NEWS, _MOST_NEWS = 0.5, 1.5, 2.0
_LEAST_SENTENCES = 40


class _Signals(NamedTuple):
    """What signals one thing in all languages.

    Attributes:
        words: by themselves.
        phrases: of several words, by their first.
        parts: of words where blanks set none apart.
    """

    words: frozenset[str]
    phrases: Mapping[str, Sequence[str]]
    parts: re.Pattern[str]

    def are_in(self, sentence: str, words: Set[str]) -> bool:
        """Whether a sentence, with its words in lower case, has one of them."""
        return not self.words.isdisjoint(words) or bool(self.longer_in(sentence, words))

    def found_in(self, sentence: str, words: Set[str]) -> list[str]:
        """Those that a sentence has, with its words in lower case; one may come twice."""
        return [*self.words.intersection(words), *self.longer_in(sentence, words)]

    def longer_in(self, sentence: str, words: Set[str]) -> list[str]:
        """Phrases, and parts of words, that a sentence has, with its words in lower case."""
        found = [] if sentence.isascii() else self.parts.findall(sentence)
        if not self.phrases.keys().isdisjoint(words):
            lower = sentence.lower()
            found += (
                phrase for first in self.phrases.keys() & words for phrase in self.phrases[first] if phrase in lower
            )
        return found


def _signals(kind: str) -> _Signals:
    languages = _LANGUAGES.values()
    words = {word for language in languages for word in language.get(kind, "").split()}
    phrases: defaultdict[str, list[str]] = defaultdict(list)
    for phrase in sorted(word.replace("_", " ") for word in words if "_" in word):
        phrases[phrase.partition(" ")[0]].append(phrase)
    parts = {part for language in languages for part in language.get("unspaced", {}).get(kind, "").split()}
    return _Signals(
        frozenset(word for word in words if "_" not in word),
        dict(phrases),
        re.compile("|".join(map(re.escape, sorted(parts)))),
    )


_LANGUAGES = tomllib.loads(resources.files(__package__).joinpath("languages.toml").read_text(encoding="utf-8"))
_COMMON = {name: frozenset(each["common"].split()) for name, each in _LANGUAGES.items() if "common" in each}
_RULES, _CONDITIONS = map(_signals, ("rules", "conditions"))
RULE_WORDS = _RULES.words


class Sentence(NamedTuple):
    """A sentence, or a line that was pasted.

    Attributes:
        text: one line, without the blanks around it.
        pasted: whether nobody wrote it here.
        opens_line: whether a line of the text begins with it.
    """

    text: str
    pasted: bool
    opens_line: bool


def sentences(text: str) -> Iterator[Sentence]:
    """The sentences and lines of a text, in order."""
    lines = text.splitlines()
    fences = [at for at, line in enumerate(lines) if line.lstrip().startswith(_FENCE)] if _FENCE in text else []
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
                yield Sentence(shown, pasted or is_bulk(shown), opens_line)
                opens_line = False


def _is_one(line: str) -> bool:
    """Whether a line is certain to have one sentence; a search for the ends of others looks at each character."""
    return line.isascii() and not any(map(line.__contains__, _MAY_END))


def is_bulk(line: str) -> bool:
    """Whether a line was pasted rather than written: code, a log, a table, or without an end."""
    if _BULK_LINE.match(line) or (len(line) > _LONGEST_CHARS and _SENTENCE_END.search(line) is None):
        return True
    words = line.split()
    if len(words) >= _LEAST_WORDS and len(set(words)) < _DISTINCT_RATIO * len(words):
        return True
    if len(line) < _SHORT_CHARS or _plain(line) >= _PROSE_RATIO * len(line) or _WIDE.search(line) is not None:
        return False
    # "The deadline is 2027-03-19." has few letters, and is said.
    plain = sum([word.strip(_AROUND_WORDS).isalpha() for word in words])
    return plain < _LEAST_PLAIN_WORDS or plain < _PLAIN_WORDS_RATIO * len(words)


def _plain(line: str) -> int:
    """How many letters and blanks a line has."""
    if line.isascii():
        return len(line) - len(line.encode().translate(None, _PLAIN_ASCII))
    return sum(map(str.isalpha, line)) + line.count(" ")


def languages(text: str) -> Counter[str]:
    """How many of the commonest words of each language a text has; some are those of several languages."""
    words = Counter(word.casefold() for word in _WORD.findall(text))
    return +Counter({name: sum(words[each] for each in common) for name, common in _COMMON.items()})


def is_rule(sentence: str) -> bool:
    """Whether a sentence has a word that makes rules: a modal verb, a negation, a limit."""
    return _RULES.are_in(sentence, _words(sentence))


def _words(sentence: str) -> set[str]:
    """The words of a sentence in lower case."""
    if not sentence.isascii():
        return set(map(str.casefold, _WORD.findall(sentence.replace("’", "'"))))
    # Five times as fast as a search for them.
    words = set(sentence.lower().encode().translate(_NO_WORDS).decode().split())
    if "'" in sentence:
        for quoted in [word for word in words if "'" in word]:
            words.remove(quoted)
            words.update(_WORD.findall(quoted))
    return words


class Weight(NamedTuple):
    """What a sentence says apart from what it names, and if it has a word that makes rules."""

    worth: float
    is_rule: bool


class Talk:
    """Which words a person uses, and which all the time: where every third sentence has a "not", that forbids nothing.

    Args:
        sentences: of the person; their order does not matter.
    """

    def __init__(self, sentences: Iterable[str] = ()) -> None:
        self._words: dict[str, Set[str]] = {}
        times: Counter[str] = Counter()
        number = 0
        for sentence in sentences:
            number += 1
            words = self._words[sentence] = self.words(sentence)
            times.update(words)
            if longer := _RULES.longer_in(sentence, words):
                times.update(set(longer) - words)
        # Of words in more than one sentence; that of the others is 1.
        log = math.log(max(number, _LEAST_SENTENCES))
        self._rarity = {word: max(1 - math.log(count) / log, 0.0) for word, count in times.items() if count > 1}
        self._news = {word: max(rarity - _RARE_FROM, 0.0) for word, rarity in self._rarity.items()}

    def words(self, sentence: str) -> Set[str]:
        """The words of a sentence in lower case, of this person's or another."""
        words = self._words.get(sentence)
        return _words(sentence) if words is None else words

    def rarity(self, word: str) -> float:
        """From 0 for a word in all sentences to 1 for one in a single sentence, or in none."""
        return self._rarity.get(word, 1.0)

    def news(self, words: Set[str]) -> float:
        """What words say that hardly another sentence has: from 0.3 to 1.7; 1 where no other is known."""
        if not self._words:
            return 1.0
        # In any order of the set the same.
        rare = math.fsum([self._news.get(word, 1 - _RARE_FROM) for word in words])
        return _LEAST_NEWS + (1 - _LEAST_NEWS) * min(rare / _NEWS, _MOST_NEWS)

    def weight(self, sentence: str) -> Weight:
        """What a sentence of this person's says: about 1 for prose, up to 5.7 for a rule."""
        words = self.words(sentence)
        rules = [self.rarity(word) for word in _RULES.found_in(sentence, words)]
        found = self.news(words) + (_RULE * max(*rules, _LEAST_RARITY) if rules else 0.0)
        found += _CONDITION if _CONDITIONS.are_in(sentence, words) else 0.0
        if sentence.endswith(_QUESTION_ENDS):
            found *= _QUESTION_RATIO
        if len(sentence) < _SHORT_CHARS and sentence.isascii():
            found *= _SHORT_RATIO
        return Weight(found, bool(rules))
