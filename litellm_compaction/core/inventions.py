"""Which lines of a summary state what no message states: values, persons, and rules that nobody gave.

Weak models add rules (codegraff issue 738, oh-my-openagent 1483) and get values wrong, which is worse than to say
nothing. Everything here errs towards believing a line: only what cannot be guessed counts as a value (numbers from 100
or with decimals, paths, ids, addresses), a number may be rounded, written in another way or given in another unit, and
a rule is an invention only where most of its words are nowhere in the source. Persons are `persons`' question, numbers
below 100 that of `measures`. Of 9,107 sentences of people's summaries (QMSum, DialogSum) 44 are judged inventions, two
in five of them for ids that their transcripts have not (measured 2026-11).
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from litellm_compaction.core.directives import RULE_WORDS, is_rule
from litellm_compaction.core.measures import LARGE_NUMBERS, Measure, contradicted, measures
from litellm_compaction.core.persons import Person, is_named, persons
from litellm_compaction.core.said import NUMBER, Said

# A summary with more of them is a list, whose other lines are believed.
_MOST_CLAIMS, _MOST_PERSONS = 400, 80
# Of numbers that are said in words: "a hundred people", "two and a half million".
_MOST_SPOKEN_DIGITS = 2
# What stands together without a blank, in plain letters and signs: words are left out afterwards.
_RUN = re.compile(r"[A-Za-z0-9_@~$€£%+/\\.:#-]{2,200}")
# A longer line is a paragraph: too much to lose for one name, or one small number.
_MOST_NAMING_CHARS = 400
# Days of a week, months of a year, hours of a day.
_COUNTED_WITH = (7.0, 12.0, 24.0)
# With a unit, or a time of day.
_FIGURES = re.compile(r"[$€£~+-]{0,2}\d[\d.,:/-]{0,40}(?:T[\d:.]{4,20})?[A-Za-z%]{0,5}\Z")
_THOUSANDS = re.compile(r"\d{1,3}(?:([.,'’_ \u00a0\u202f])\d{3})(?:\1\d{3})*\Z")
_EXTENSION = re.compile(r"[\w-]{2}\.[a-z]\w{0,4}\Z")
# "step-3", "v2", "10-fold": a word with a count.
_COUNTED = re.compile(r"(?:[A-Za-z]{1,20}-?\d{1,2}|\d{1,2}-?[A-Za-z]{1,20})\Z")
_LEAST_VALUE = 100
# Nobody rounds by more.
_MOST_ROUNDED = 0.1
_SUFFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
# The same quantity in other units: thousands, bytes, and ten thousands as Chinese counts, which are rounded; percent
# and time, which are not.
_SCALES = (1e3, 1e6, 1e9, 1e4, 1e8, 1024.0, 1048576.0)
_EXACT_SCALES = (100.0, 60.0, 3600.0)
# Of scripts that set words apart.
_WORD = re.compile(r"[^\W\d_\u0e00-\u0eff\u2e80-\uffff]{4,40}")
_STEM_CHARS = 5
# These every rule has.
_RULE_STEMS = frozenset(word[:_STEM_CHARS] for word in RULE_WORDS)
_LEAST_NEW_STEMS, _NEW_RATIO = 3, 0.6
# A line of which most words are not the source's is a translation, or free speech: its rules cannot be compared.
_KNOWN_RATIO = 0.5


class _Figure(NamedTuple):
    """A number, and the size of its last digit that says something."""

    value: float
    unit: float


class _Claim(NamedTuple):
    """What a line states: one of several spellings, or one of several readings of a number."""

    spellings: tuple[str, ...] = ()
    figures: tuple[_Figure, ...] = ()


def inventions(lines: Sequence[str], source: Iterable[str]) -> list[bool]:
    """Whether each line states mostly what the source does not.

    Args:
        lines: of a summary; "" for those that are believed.
        source: all texts that its writer was shown.
    """
    stated = [_read_line(line) for line in lines]
    if sum(len(each.persons) for each in stated) > _MOST_PERSONS:
        stated = [each._replace(persons=()) for each in stated]
    is_stating = any(line.claims or line.persons or line.measures or line.rule for line in stated)
    if not is_stating or sum(len(each.claims) for each in stated) > _MOST_CLAIMS:
        return [False] * len(lines)
    said = Said(source, {each for line in stated for claim in line.claims for each in claim.spellings})
    numbers = sorted({value for text in said.numbers for value in _values(text)})
    is_comparable = any(line.rule for line in stated) and _is_comparable(lines, said)
    wrong = iter(contradicted([each for line in stated for each in line.measures], said))
    measured = [sum(itertools.islice(wrong, len(line.measures))) for line in stated]
    return [
        _is_unstated(line, miscounted, said, numbers) or (is_comparable and _is_new(line.rule, said))
        for line, miscounted in zip(stated, measured, strict=True)
    ]


class _Stated(NamedTuple):
    """What a line states that can be looked up.

    Attributes:
        claims: values.
        numbers: all that stand in it.
        persons: whom it names.
        measures: its small numbers.
        rule: the beginnings of a rule's words.
    """

    claims: tuple[_Claim, ...]
    numbers: tuple[float, ...]
    persons: tuple[Person, ...]
    measures: tuple[Measure, ...]
    rule: frozenset[str]


def _read_line(line: str) -> _Stated:
    is_short = len(line) <= _MOST_NAMING_CHARS
    return _Stated(
        claims=tuple(_claims(line)),
        numbers=tuple(figure.value for text in NUMBER.findall(line) for figure in _read(text)),
        persons=tuple(persons(line)) if is_short else (),
        measures=tuple(measures(line)) if is_short else (),
        rule=_stems(line) if is_rule(line) else frozenset(),
    )


def _is_comparable(lines: Iterable[str], said: Said) -> bool:
    stems = frozenset(stem for line in lines for stem in _stems(line))
    return sum(map(said.has_part, stems)) >= _KNOWN_RATIO * len(stems) > 0


def _is_unstated(line: _Stated, miscounted: int, said: Said, numbers: Sequence[float]) -> bool:
    unstated = [claim for claim in line.claims if not _is_stated(claim, said.found, numbers)]
    if unstated and any(said.has_beginning(word, 0) for word in LARGE_NUMBERS):
        unstated = [claim for claim in unstated if not any(map(_is_round, claim.figures))]
    unstated = [claim for claim in unstated if not _is_reckoned(claim, (*line.numbers, *_COUNTED_WITH))]
    wrong = len(unstated) + miscounted + sum(not is_named(person, said) for person in line.persons)
    return 2 * wrong >= len(line.claims) + len(line.persons) + len(line.measures) > 0 < wrong


def _is_round(figure: _Figure) -> bool:
    digits = f"{figure.value:.6e}".partition("e")[0].replace(".", "").rstrip("0")
    return figure.value >= _LEAST_VALUE and len(digits) <= _MOST_SPOKEN_DIGITS


def _is_stated(claim: _Claim, said: set[str], numbers: Sequence[float]) -> bool:
    return not said.isdisjoint(claim.spellings) or any(_is_near(figure, numbers) for figure in claim.figures)


def _is_near(figure: _Figure, numbers: Sequence[float]) -> bool:
    """Whether a number is one of the source's, rounded, or in another unit."""
    if _has_one(figure.value, figure.unit, numbers):
        return True
    scaled = [(scale, figure.unit) for scale in _SCALES] + [(scale, 0.0) for scale in _EXACT_SCALES]
    return any(
        _has_one(figure.value * factor, unit * factor, numbers, is_scaled=True)
        for scale, unit in scaled
        for factor in (scale, 1 / scale)
    )


def _has_one(value: float, unit: float, numbers: Sequence[float], *, is_scaled: bool = False) -> bool:
    # One more or less is another number; so much is what binary fractions take.
    reach = min(unit * 0.999, _MOST_ROUNDED * value) + 1e-9 * value
    at = bisect_left(numbers, value - reach)
    while at < len(numbers) and numbers[at] <= value + reach:
        # A single digit is a multiple of anything.
        if not is_scaled or numbers[at] >= 10:
            return True
        at += 1
    return False


def _is_reckoned(claim: _Claim, figures: Sequence[float]) -> bool:
    """Whether a number is the sum, the difference or the product of two others of its line."""
    value = claim.figures[0].value if claim.figures else 0.0
    others = {each for each in figures if each != value and each > 1}
    return value > 0 and any(value in (a + b, a - b, a * b) for a in others for b in others)


def _stems(line: str) -> frozenset[str]:
    return frozenset(word[:_STEM_CHARS].casefold() for word in _WORD.findall(line)) - _RULE_STEMS


def _is_new(stems: frozenset[str], said: Said) -> bool:
    new = [stem for stem in stems if not said.has_part(stem)]
    return len(new) >= max(_LEAST_NEW_STEMS, _NEW_RATIO * len(stems))


def _claims(line: str) -> Iterator[_Claim]:
    rest = line
    for found in _RUN.finditer(line):
        run = found[0].strip(".:,-+~#")
        if (claim := _named(run)) is not None:
            rest = rest.replace(found[0], " ", 1)
            yield claim
    for found in NUMBER.finditer(rest):
        yield from _numbered(found[0], rest[found.end() : found.end() + 2].strip()[:1])


def _named(run: str) -> _Claim | None:
    """What a run of signs names, if it can be no word, no number and no count."""
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


def _numbered(text: str, behind: str) -> Iterator[_Claim]:
    figures = [*_read(text), *(_read(text, _SUFFIXES[behind.lower()]) if behind.lower() in _SUFFIXES else ())]
    if not figures:
        # A date, a version, an address: each of its numbers counts.
        for part in re.split(r"[^\d]", text):
            yield from _numbered(part, "") if part else ()
    elif all(figure.value >= _LEAST_VALUE or figure.unit < 0.1 for figure in figures) and behind != "%":
        yield _Claim(figures=tuple(figures))


def _read(text: str, factor: float = 1.0) -> Iterator[_Figure]:
    """The readings of a number: `1.250` is a thousand to some and one and a quarter to others."""
    if _THOUSANDS.match(text):
        yield _figure("".join(filter(str.isdigit, text)), factor)
    pieces = re.split(r"[.,]", text)
    if text.isdigit():
        yield _figure(text, factor)
    elif len(pieces) == 2 and all(map(str.isdigit, pieces)):
        yield _Figure(float(".".join(pieces)) * factor, 10.0 ** -len(pieces[1]) * factor)
    elif len(pieces) > 2 and all(map(str.isdigit, pieces)) and _THOUSANDS.match(",".join(pieces[:-1])):
        yield _Figure(float("".join(pieces[:-1]) + "." + pieces[-1]) * factor, 10.0 ** -len(pieces[-1]) * factor)


def _figure(digits: str, factor: float) -> _Figure:
    value = float(digits)
    rounded = len(digits) - len(digits.rstrip("0")) if value else 0
    return _Figure(value * factor, 10.0**rounded * factor)


def _values(text: str) -> Iterator[float]:
    """All that a number in the source may be taken for: as a whole, its parts, the beginning of a version."""
    yield from (figure.value for figure in _read(text))
    parts = [part for part in re.split(r"\D", text) if part]
    yield from map(float, parts)
    if len(parts) > 2:
        yield float(".".join(parts[:2]))
