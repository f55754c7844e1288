"""Finds the lines of a summary that state something no message states: values, names and rules.

Weak models add rules (codegraff issue 738, oh-my-openagent 1483) and get values wrong, which is worse than a shorter
summary. Losing a correct line costs as well, so the checks are lenient:

- A value (a path, an id, an address, a number from 13 or with decimals) may be rounded, reckoned, given in another unit
  or written in another way. A conversation that says its numbers in words has small and round ones unchecked.
- A name is a capital inside a sentence. Any form or misspelling of it counts, and nothing is checked if the
  conversation is German, whose nouns have capitals, or in another script.
- A rule (`inventions.toml` tells it) needs two sentences in a row that have half of its words, and a
  negation if it has one. The record holds what a user said verbatim, so a lost paraphrase costs little.

Measured 2026-11 on data that nothing was tuned on: `docs/strategies.md`, "Which summaries are used".
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from importlib import resources
from typing import NamedTuple

from litellm_compaction.core.directives import languages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A summary with more of them is a list: its other lines are believed.
_MOST_CLAIMS = 400
# Smaller numbers are counts, which summaries make themselves; so are those of days, months and hours.
_LEAST_VALUE = 13
# In a text that says its numbers in words, these are still written in digits.
_LEAST_SPOKEN, _MOST_SPOKEN_DIGITS = 100, 2
# Agents' sessions, orders and chats have a number of two digits in 40 to 2,300 characters, transcripts of
# speech none in a million. 500 to 4,000 give the same on people's summaries.
_CHARS_PER_NUMBER = 2_000
_SLICE_CHARS, _OVERLAP_CHARS = 65_536, 256
_LETTERS = re.compile(r"[^\W\d_]{1,200}")
_NUMBER = re.compile(r"\d{1,3}(?:[ \u00a0\u202f]\d{3}){1,6}(?!\d)|\d{1,40}(?:[.,'’_]\d{1,40}){0,8}")
# Of scripts whose names have other forms in Latin letters.
_OTHER_SCRIPT = re.compile(r"[\u0370-\u1cff\u1f00-\u1fff\u2e80-\ud7ff\uf900-\ufaff]{2}")
_RUN = re.compile(r"[A-Za-z0-9_@~$€£%+/\\.:#-]{2,200}")
# Days of a week, months of a year, hours of a day.
_COUNTED_WITH = (7.0, 12.0, 24.0)
# With a unit, or a time of day.
_FIGURES = re.compile(r"[$€£~+-]{0,2}\d[\d.,:/-]{0,40}(?:T[\d:.]{4,20})?[A-Za-z%]{0,5}\Z")
_THOUSANDS = re.compile(r"\d{1,3}(?:([.,'’_ \u00a0\u202f])\d{3})(?:\1\d{3})*\Z")
_EXTENSION = re.compile(r"[\w-]{2}\.[a-z]\w{0,4}\Z")
# "step-3", "v2", "10-fold": a word with a count.
_COUNTED = re.compile(r"(?:[A-Za-z]{1,20}-?\d{1,2}|\d{1,2}-?[A-Za-z]{1,20})\Z")
# Rounding moves a number by no more.
_MOST_ROUNDED = 0.1
# The same quantity in other units: thousands, and ten thousands as Chinese counts, which are rounded; minutes and
# hours, which are not.
_SCALES = (1e3, 1e4, 1e6, 1e8, 1e9)
_EXACT_SCALES = (60.0, 3600.0)
# A capital after a word and a blank; not part of a path, a compound or a quotation.
_NAME = re.compile(r"(?:(?<=[^\W_] )|(?<=[^\W_], ))[^\W\d_]{4,20}(?![\w@/\\`&-]|[.:]\w)")
# The one whose nouns have capitals, and the least of its common words that tells of it.
_LANGUAGE_OF_CAPITALS, _LANGUAGE_RATIO = "german", 0.05
_SAMPLE_TEXTS, _SAMPLE_CHARS = 100, 200
_NAME_STEM_CHARS, _ENDING_CHARS = 5, 2
# 0.66 to 0.8 find the same swapped names in dialogues, and in meetings 23 to 31 of 42.
_SAME_NAME_RATIO = 0.75
_WORD = re.compile(
    r"[^\W\d_\u0e00-\u0eff\u2e80-\uffff]{4,40}|\b[A-Z]{2,3}\b|\d{1,40}|[\u0e00-\u0eff\u2e80-\ud7ff]{2,200}"
)
_WITHOUT_SPACES = "\u0e00"
_STEM_CHARS = 5
# "14. fix the tests" counts itself.
_ORDINAL = re.compile(r"\A\s{0,16}\d{1,3}[.)] ")
_BULLETS = "-*•> \t[]()0123456789."
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])|\n")
# A longer sentence is none.
_SENTENCE_CHARS = 600
# 0.6 keeps 2 in 100 fewer invented rules of a chat of 100,000 tokens and loses 2 in 100 more of its user's.
_SUPPORT_RATIO = 0.5
# Of a word in every sentence.
_LEAST_WEIGHT = 0.1
_DATA = tomllib.loads(resources.files(__package__).joinpath("inventions.toml").read_text(encoding="utf-8"))


def _any_of(words: str) -> str:
    return "|".join(re.escape(word.replace("_", " ")) for word in words.split())


_WORDS = {key: _any_of(words) for key, words in _DATA.items()}
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


class _Figure(NamedTuple):
    """A number, and the size of its last digit that says something."""

    value: float
    unit: float


class _Claim(NamedTuple):
    """One of: spellings of a path, an id or an address; readings of a number; a name, casefolded."""

    spellings: tuple[str, ...] = ()
    figures: tuple[_Figure, ...] = ()
    name: str = ""


class _Stated(NamedTuple):
    claims: tuple[_Claim, ...]
    # All that stand in the line.
    numbers: tuple[float, ...]
    # Its sentences that are rules.
    rules: tuple[str, ...]


def inventions(lines: Sequence[str], source: Sequence[str]) -> list[bool]:
    """Tells of each line of a summary if half of its claims, or one of its rules, is not the source's.

    Args:
        lines: "" for those that are believed.
        source: all texts that its writer was shown.
    """
    with_names = not _capitalizes_nouns(source)
    stated = [_read_line(line, with_names=with_names) for line in lines]
    is_stating = any(line.claims or line.rules for line in stated)
    if not is_stating or sum(len(each.claims) for each in stated) > _MOST_CLAIMS:
        return [False] * len(lines)
    said = _Said(source, {each for line in stated for claim in line.claims for each in claim.spellings})
    given = _given((rule for line in stated for rule in line.rules), source)
    return [_is_unstated(line, said) or not given.issuperset(line.rules) for line in stated]


def sample(source: Sequence[str]) -> str:
    """The beginnings of texts from all over the source, which may change its language on the way."""
    step = -(-len(source) // _SAMPLE_TEXTS) or 1
    return "\n".join(text[:_SAMPLE_CHARS] for text in source[::step])


class _Said:
    """A source, read once and in slices: its distinct words are a tenth of its text.

    Attributes:
        found: those of `spellings`, casefolded runs of signs, that stand in it.
        numbers: all that its numbers may be taken for, ascending.
        has_spoken_numbers: it says most of its numbers in words.
    """

    def __init__(self, source: Sequence[str], spellings: set[str]) -> None:
        self.found = set[str]()
        self._runs = set[str]()
        numbers = set[str]()
        written = 0
        for text in source:
            for start in range(0, len(text), _SLICE_CHARS):
                piece = text[start : start + _SLICE_CHARS + _OVERLAP_CHARS]
                self._runs.update(_LETTERS.findall(piece))
                here = _NUMBER.findall(piece)
                written += sum([len(number) > 1 for number in here])
                numbers.update(here)
                if left := spellings - self.found:
                    folded = piece.casefold()
                    self.found.update(each for each in left if each in folded)
        self.numbers = sorted({value for text in numbers for value in _values(text)})
        self.has_spoken_numbers = written * _CHARS_PER_NUMBER < sum(map(len, source))

    @cached_property
    def _words(self) -> list[str]:
        return sorted({run.casefold() for run in self._runs})

    @cached_property
    def _joined(self) -> str:
        return " ".join(self._words)

    def has_name(self, name: str) -> bool:
        """A casefolded name, an inflected form of it or a misspelling of it is a word of the source."""
        if name.isascii() and _OTHER_SCRIPT.search(self._joined) is not None:
            return True
        alike = self._beginning(name[0])
        if not name.isascii() and (not alike or self._beginning(name[: max(3, len(name) - _ENDING_CHARS)])):
            return True
        return name[:_NAME_STEM_CHARS] in self._joined or bool(
            difflib.get_close_matches(name, alike, n=1, cutoff=_SAME_NAME_RATIO)
        )

    def _beginning(self, part: str) -> Sequence[str]:
        return self._words[bisect_left(self._words, part) : bisect_left(self._words, part + "\U0010ffff")]


def _capitalizes_nouns(source: Sequence[str]) -> bool:
    found = languages(sample(source))
    return found[_LANGUAGE_OF_CAPITALS] > _LANGUAGE_RATIO * max(found.values(), default=0)


def _read_line(line: str, *, with_names: bool) -> _Stated:
    line = _ORDINAL.sub("", line)
    sentences = (sentence.lstrip(_BULLETS)[:_SENTENCE_CHARS] for sentence in _SENTENCE_END.split(line))
    names = (found[0] for found in _NAME.finditer(line) if found[0].istitle()) if with_names else ()
    return _Stated(
        claims=(*_claims(line), *(_Claim(name=name.casefold()) for name in names)),
        numbers=tuple(figure.value for text in _NUMBER.findall(line) for figure in _read(text)),
        rules=tuple(sentence for sentence in sentences if _RULE.search(sentence)),
    )


def _given(rules: Iterable[str], texts: Iterable[str]) -> set[str]:
    """The rules that have a source: two sentences with half of the rule's words by weight, the rarer the more."""
    wanted = {rule: _stems(_RULE_WORDS.sub(" ", rule)) for rule in rules}
    sought = frozenset[str]().union(*wanted.values())
    times: Counter[str] = Counter()
    # The words of two sentences in a row, and if there is a negation in them.
    passages: dict[frozenset[str], bool] = {}
    number = 1
    for text in texts if sought else ():
        before, was_negative = frozenset[str](), False
        for sentence in _SENTENCE_END.split(text):
            number += 1
            found = sought & _stems(sentence)
            is_negative = bool(found) and _NEGATION.search(sentence, 0, _SENTENCE_CHARS) is not None
            times.update(found)
            if both := before | found:
                passages[both] = passages.get(both, False) or was_negative or is_negative
            before, was_negative = found, is_negative
    weights = {stem: math.log(number / max(times[stem], 1)) + _LEAST_WEIGHT for stem in sought}

    def is_given(rule: str) -> bool:
        least = _SUPPORT_RATIO * math.fsum(weights[stem] for stem in wanted[rule])
        is_negative = _NEGATION.search(rule) is not None
        return not wanted[rule] or any(
            math.fsum(weights[stem] for stem in wanted[rule] & words) >= least
            for words, has_negation in passages.items()
            if has_negation or not is_negative
        )

    return {rule for rule in wanted if is_given(rule)}


def _stems(text: str) -> frozenset[str]:
    """The beginnings of a text's words, its numbers, and of scripts without blanks each two signs."""
    words = _WORD.findall(text)
    found = {word[:_STEM_CHARS].casefold() for word in words if word[0] < _WITHOUT_SPACES}
    wide = (word for word in words if word[0] >= _WITHOUT_SPACES)
    return frozenset(found.union(word[at : at + 2] for word in wide for at in range(len(word) - 1)))


def _is_unstated(line: _Stated, said: _Said) -> bool:
    unstated = [claim for claim in line.claims if not _is_stated(claim, said)]
    wrong = [claim for claim in unstated if not _is_reckoned(claim, (*line.numbers, *_COUNTED_WITH))]
    # A small number stands somewhere by accident.
    right = [
        claim
        for claim in line.claims
        if claim not in unstated and not (claim.figures and claim.figures[0].value < _LEAST_SPOKEN)
    ]
    return len(wrong) >= max(len(right), 1)


def _is_stated(claim: _Claim, said: _Said) -> bool:
    if claim.name:
        return said.has_name(claim.name)
    if claim.figures and said.has_spoken_numbers and not any(map(_is_written_in_digits, claim.figures)):
        return True
    return not said.found.isdisjoint(claim.spellings) or any(_is_near(figure, said.numbers) for figure in claim.figures)


def _is_written_in_digits(figure: _Figure) -> bool:
    digits = f"{figure.value:.6e}".partition("e")[0].replace(".", "").rstrip("0")
    return figure.value >= _LEAST_SPOKEN and len(digits) > _MOST_SPOKEN_DIGITS


def _is_near(figure: _Figure, numbers: Sequence[float]) -> bool:
    """A number is one of the source's, rounded, or in another unit."""
    scaled = [(scale, figure.unit) for scale in _SCALES] + [(scale, 0.0) for scale in _EXACT_SCALES]
    return _has_one(figure.value, figure.unit, numbers) or any(
        _has_one(figure.value * factor, unit * factor, numbers, is_scaled=True)
        for scale, unit in scaled
        for factor in (scale, 1 / scale)
    )


def _has_one(value: float, unit: float, numbers: Sequence[float], *, is_scaled: bool = False) -> bool:
    # One more or less is another number; so much is what binary fractions take.
    reach = min(unit * 0.999, _MOST_ROUNDED * value) + 1e-9 * value
    # A single digit is a multiple of anything.
    least = max(value - reach, 10.0) if is_scaled else value - reach
    at = bisect_left(numbers, least)
    return at < len(numbers) and numbers[at] <= value + reach


def _is_reckoned(claim: _Claim, figures: Sequence[float]) -> bool:
    """A number is the sum, the difference or the product of two others of its line."""
    value = claim.figures[0].value if claim.figures else 0.0
    others = {each for each in figures if each != value and each > 1}
    return value > 0 and any(value in (a + b, a - b, a * b) for a in others for b in others)


def _claims(line: str) -> Iterator[_Claim]:
    rest = line
    for found in _RUN.finditer(line):
        run = found[0].strip(".:,-+~#")
        if (claim := _named(run)) is not None:
            rest = rest.replace(found[0], " ", 1)
            yield claim
    for found in _NUMBER.finditer(rest):
        yield from _numbered(found[0], is_ratio=rest[found.end() : found.end() + 2].strip()[:1] == "%")


def _named(run: str) -> _Claim | None:
    """The claim of a run of signs, if it can be no word, no number and no count."""
    has_digit, has_letter = any(map(str.isdigit, run)), any(map(str.isalpha, run))
    if not has_letter or _COUNTED.match(run) or _FIGURES.match(run):
        return None
    slashes = run.count("/") + run.count("\\")
    is_path = _EXTENSION.search(run) is not None or slashes > 1 or run.startswith("/")
    if not (has_digit or is_path or "_" in run.strip("_") or "@" in run):
        return None
    lower = run.casefold()
    place = re.sub(r":\d{1,9}\Z", "", lower)
    base = re.split(r"[/\\]", place.rstrip("/\\"))[-1]
    # A method without its class, a file without its ending.
    last = base.rpartition(".")[2] if _EXTENSION.search(base) is None else base.partition(".")[0]
    spellings = tuple(dict.fromkeys(each for each in (lower, place, base, last) if len(each) > 2))
    return _Claim(spellings=spellings) if spellings else None


def _numbered(text: str, *, is_ratio: bool) -> Iterator[_Claim]:
    figures = tuple(_read(text))
    if not figures:
        # A date, a version, an address: each of its numbers counts.
        for part in re.split(r"[^\d]", text):
            yield from _numbered(part, is_ratio=False) if part else ()
    elif not is_ratio and all(figure.value >= _LEAST_VALUE or figure.unit < 1 for figure in figures):
        yield _Claim(figures=figures)


def _read(text: str) -> Iterator[_Figure]:
    """The readings of a number: `1.250` is a thousand to some and one and a quarter to others."""
    if _THOUSANDS.match(text):
        yield _figure("".join(filter(str.isdigit, text)))
    *pieces, last = re.split(r"[.,]", text)
    if text.isdigit():
        yield _figure(text)
    elif pieces and all(map(str.isdigit, (*pieces, last))) and (len(pieces) == 1 or _THOUSANDS.match(",".join(pieces))):
        yield _Figure(float("".join(pieces) + "." + last), 10.0 ** -len(last))


def _figure(digits: str) -> _Figure:
    rounded = len(digits) - len(digits.rstrip("0")) if float(digits) else 0
    return _Figure(float(digits), 10.0**rounded)


def _values(text: str) -> Iterator[float]:
    """The values of a number in the source: of the whole, of its parts, of the beginning of a version."""
    yield from (figure.value for figure in _read(text))
    parts = [part for part in re.split(r"\D", text) if part]
    yield from map(float, parts)
    if len(parts) > 2:
        yield float(".".join(parts[:2]))
