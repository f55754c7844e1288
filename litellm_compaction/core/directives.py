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


_RULE, _CONDITION, _PERSON, _CHANGE = 3.0, 1.0, 0.5, 0.5
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
# A newer sentence takes the place of an older one: what is longer says more than one thing; only the newest are looked
# at that tell a change, and only for words in few of the sentences.
_LONGEST_CLAIM_CHARS = 240
_MOST_CHANGES, _MOST_PLACES = 100, 30
_LEAST_SENTENCES, _RARE_RATIO = 40, 5
_STEM_CHARS, _LEAST_STEM_CHARS = 6, 4
# An older one that says more beside its value still says that.
_MOST_BESIDE = 5
_LEAST_SAME, _SAME_RATIO = 3, 0.7
_OPENS_CHANGE = frozenset(("update", "new", "change", "correction", "neu", "neue", "korrektur"))
_LABEL = re.compile(r"(?:[^\s:]{1,24} ){0,2}[^\s:]{1,24}: ")
_MONTH = (
    r"(?:jan(?:uary|uar|vier)?|feb(?:ruary|ruar|rero)?|févr?(?:ier)?|mar(?:ch|s|zo)?|märz|apr(?:il|ile)?|avril|abril|may|mai|"
    r"mayo|maio|maggio|june?|juni|juin|junio|july?|juli|juillet|julio|aug(?:ust)?|août|agosto|sept?(?:ember|embre|iembre)?|"
    r"o[ck]t(?:ober|obre|ubre)?|nov(?:ember|embre|iembre)?|de[cz](?:ember|embre)?|décembre|diciembre)\b\.?"
)
_DIGIT_WORD = (
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)"
)
_NUMBER = rf"(?:\d[\d,.]{{0,15}}|{_DIGIT_WORD}(?:[ -](?:{_DIGIT_WORD}|hundred|thousand|million|and)){{0,5}})"
_DIGITS = "0123456789"
_FILE = re.compile(r"/.{0,120}\.\w{1,5}\Z")
# The kinds of values; of one kind another value replaces the first, in rules only where it is one of these.
_MEASURES = frozenset(("money", "date"))
_VALUE = re.compile(
    rf"(?P<money>[$€£]\s?\d[\d,.]{{0,15}}|\b{_NUMBER} ?(?:dollars?|euros?|pounds?|usd|eur|gbp|€)\b)"
    rf"|(?P<date>\b\d{{4}}-\d\d-\d\d\b|(?i:\b{_MONTH}) \d{{1,2}}\b|\b\d{{1,2}}\.? (?i:{_MONTH})\b|\b\d\d-\d\d\b)"
    r"|(?P<url>\bhttps?://\S{1,200})"
    r"|(?P<path>(?<![\w/])[\w.-]{1,60}/[\w./-]{1,120})"
    r"|(?P<upper>\b[A-Z][A-Z0-9]{1,15}(?:-[A-Z0-9]{1,15}){0,3}-\d{1,10}\b)"
    r"|(?P<lower>\b[a-z][a-z0-9]{1,15}(?:-[a-z0-9]{1,15}){0,3}-\d{1,10}\b)"
    r"|(?P<name>\b[A-Z][^\W\d_A-Z]{2,20} [A-Z][^\W\d_A-Z]{2,20}\b)"
)


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
_RULES, _CONDITIONS, _PERSONS, _CHANGES = map(_signals, ("rules", "conditions", "persons", "changes"))
_REPLACES, _ADDS = map(_signals, ("replaces", "adds"))
_COMMONEST = frozenset[str]().union(*_COMMON.values())
RULE_WORDS = _RULES.words
# Words that are nobody's name, however they are written.
NO_NAMES = _COMMONEST.union(*(kind.words for kind in (_RULES, _CONDITIONS, _PERSONS, _CHANGES)))


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
                yield Piece(shown, pasted or is_bulk(shown), opens_line)
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


def replaced(sentences: Sequence[str], talk: Talk | None = None) -> dict[int, int]:
    """Which sentences of a person's a later one has taken the place of, and which one that is.

    A later one says that something changed ("now", "moved to", "no longer"), is about the same, and gives it another
    value of the same kind, in whatever words; or it repeats the older one but for a word or two.

    Args:
        sentences: n, oldest first.
        talk: of which most of them are, where there is one.
    """
    found: dict[int, int] = {}
    talk = talk or _ANY_TALK
    words = [talk.words(sentence) if _may_claim(sentence) else frozenset[str]() for sentence in sentences]
    changes = [at for at, those in enumerate(words) if _tells_change(sentences[at], those)][-_MOST_CHANGES:]
    claims = {at: _read_claim(sentences[at]) for at in changes}
    wanted = frozenset[str]().union(*(claim.stems for claim in claims.values()))
    places: dict[str, list[int]] = {stem: [] for stem in wanted}
    for at, those in enumerate(words) if changes else ():
        for stem in wanted.intersection(word[:_STEM_CHARS] for word in those):
            places[stem].append(at)
    number = max(len(sentences), _LEAST_SENTENCES)
    for newer in changes:
        scores: defaultdict[int, float] = defaultdict(float)
        for stem in sorted(claims[newer].stems):
            if len(places[stem]) <= min(_MOST_PLACES, number / _RARE_RATIO):
                for at in places[stem]:
                    if at < newer:
                        scores[at] += math.log(number / len(places[stem]))
        fitting: dict[int, float] = {}
        for at in scores.keys() - found.keys():
            claim = claims[at] = claims.get(at) or _read_claim(sentences[at])
            if _gives_another(claim, claims[newer]):
                fitting[at] = scores[at]
        best = max(fitting.values(), default=0.0)
        found.update((at, newer) for at, score in fitting.items() if score == best)
    return found


class _Claim(NamedTuple):
    """What a sentence is about, and what it gives that.

    Attributes:
        stems: beginnings of its words.
        values: by their kind.
        words: all of them, without a label before a colon.
        is_rule: whether one of them makes rules.
        is_in_place: whether it says that it stands in the place of something.
        is_beside: whether it says that it stands beside something.
    """

    stems: frozenset[str]
    values: Mapping[str, str]
    words: frozenset[str]
    is_rule: bool
    is_in_place: bool
    is_beside: bool


def _may_claim(sentence: str) -> bool:
    return len(sentence) <= _LONGEST_CLAIM_CHARS and not sentence.endswith(_QUESTION_ENDS)


def _tells_change(sentence: str, words: Set[str]) -> bool:
    """Whether a sentence with these words says that something is not what it was; "Now run it" says what is next."""
    if not words or not _CHANGES.are_in(sentence, words):
        return False
    first, _, behind = sentence.partition(" ")
    return first.rstrip(_AROUND_WORDS).casefold() in _OPENS_CHANGE or _CHANGES.are_in(sentence, _words(behind))


def _read_claim(sentence: str) -> _Claim:
    label = _LABEL.match(sentence)
    said = sentence[label.end() :] if label else sentence
    values: dict[str, str] = {}

    def taken(found: re.Match[str]) -> str:
        kind = str(found.lastgroup)
        if kind == "name" and found[0].partition(" ")[0].lower() in _COMMONEST:
            # "Die Abnahme" is nobody.
            return found[0]
        values.setdefault(kind, found[0].rstrip(_AROUND_WORDS))
        return " "

    rest = _VALUE.sub(taken, said)
    # Of a path's first folder there may be many: "feature/login" is one branch, "feature/search" another.
    words = _words(rest) | _words(values.get("path", "").partition("/")[0])
    stems = {word[:_STEM_CHARS] for word in words if len(word) >= _LEAST_STEM_CHARS and not _is_common(word)}
    words = _words(said)
    return _Claim(
        stems=frozenset(stems),
        values=values,
        words=frozenset(words),
        is_rule=_RULES.are_in(said, words),
        is_in_place=_REPLACES.are_in(sentence, _words(sentence)),
        is_beside=_ADDS.are_in(said, words),
    )


def _is_common(word: str) -> bool:
    return word in _RULES.words or word in _CHANGES.words or word in _CONDITIONS.words or word in _PERSONS.words


def _gives_another(older: _Claim, newer: _Claim) -> bool:
    beside = len(older.stems - newer.stems)
    kinds = older.values.keys() & newer.values.keys()
    if newer.is_beside:
        return False
    if older.is_rule and not newer.is_rule and beside:
        # "Never ship orders to eu-north-2" holds where they are now in another.
        return False
    if older.is_rule and not newer.is_in_place and (beside or not kinds & _MEASURES):
        # Of "from now on, never push to feature/search" nobody can tell whether it stands beside another such rule. A
        # limit has one value.
        return False
    if kinds:
        is_other = any(_is_another(older.values[kind], newer.values[kind]) for kind in kinds)
        return is_other and beside <= _MOST_BESIDE
    shared = len(older.words & newer.words)
    return len(older.words) > _LEAST_SAME and _SAME_RATIO * len(older.words) <= shared < len(older.words)


def _is_another(older: str, newer: str) -> bool:
    """Whether values differ; files, and tickets of one series ("ABC-1", "ABC-2"), stand side by side."""
    if older == newer or _FILE.search(older) or _FILE.search(newer):
        return False
    return older.rstrip(_DIGITS) != newer.rstrip(_DIGITS) or not older[:1].isalpha()


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


_ANY_TALK = Talk()


def worth(sentence: str, *, pasted: bool = False, talk: Talk = _ANY_TALK) -> float:
    """What a sentence says beside the values in it: from 0.2 for a pasted line to about 4.5 for a rule.

    Args:
        sentence: of a person's.
        pasted: whether nobody wrote it here.
        talk: which words that person uses all the time.
    """
    if pasted:
        return _BULK
    words = talk.words(sentence)
    found = _PROSE * talk.news(words)
    rules = [talk.rarity(word) for word in _RULES.found_in(sentence, words)]
    found += _RULE * max(*rules, _LEAST_RARITY) if rules else 0.0
    found += _CONDITION if _CONDITIONS.are_in(sentence, words) else 0.0
    found += _PERSON if _PERSONS.are_in(sentence, words) else 0.0
    is_change = _may_claim(sentence) and _tells_change(sentence, words) and _VALUE.search(sentence) is not None
    found += _CHANGE if is_change else 0.0
    if sentence.endswith(_QUESTION_ENDS):
        found *= _QUESTION_RATIO
    if len(sentence) < _SHORT_CHARS and sentence.isascii():
        found *= _SHORT_RATIO
    return found
