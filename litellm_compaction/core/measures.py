"""Small numbers of a summary that the source gives otherwise: "the timeout is 45 seconds" where it says 30.

Numbers below a hundred stand everywhere, and summaries count, add and convert. So only what is measured (time, money,
sizes, lengths, weights) and settings ("the limit is 5") are looked at. One is wrong only where all of this holds: it
stands nowhere in the source, as a figure, a word, or rounded; it is no sum, difference, product or other unit of what
the source measures; nothing in the line says that it was reckoned; and a sentence of the source that has most of the
line's words gives another number of its kind. One of its words is enough unless the number is a setting, or a time
where the source has times of day, from which durations may be reckoned. Of 85 such numbers in 9,107 sentences of
people's summaries (QMSum, DialogSum) none was judged wrong (measured 2026-11). Units and number words: `measures.toml`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

from litellm_compaction.core.said import Said

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Not a part of a date, a version, a path or an id.
_FREE = r"(?<![\w.,:/#%-])(?P<number>\d{1,2})(?![\d:/]|[.,]\d)"
_SIGNS = "$€£¥₽₺"
_NUMBER = re.compile(
    rf"(?:(?P<sign>[{_SIGNS}])\s?)?{_FREE}(?P<range>\s?[-–—/]\s?\d|\s(?:to|bis|à|a|до|of|von|de|out)\s\d)?"
    rf"[ \u00a0\u202f-]?(?P<unit>[{_SIGNS}]|[^\W\d_]{{1,20}})?(?:[ -](?P<thing>[^\W\d_]{{1,20}}))?"
)
_STAND = re.compile(r"(?<![A-Za-z_#.\d])\d{1,2}(?![\d]|[.,]\d)|(?<=\b[A-Za-z])\d{1,2}(?!\w)")
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_TOKEN = re.compile(r"[^\W\d_]+|\d+|[=:]")
_STEM = re.compile(r"[^\W\d_\u0e00-\u0eff\u2e80-\uffff]{4,40}")
_SENTENCE_END = re.compile(r"[.!?;][\s\"')]|[\n。！？；]")
_STEM_CHARS = 5
_MOST_SENTENCE_CHARS = 300
_LEAST_SHARED, _SHARED_RATIO = 2, 0.6
_CLOCK = re.compile(r"\b\d{1,2}:\d\d\b")
# "12.34 s" is 12 s to some, and 13 s to others.
_DECIMAL = re.compile(r"(?<![\d.,])(\d{1,2})[.,]\d")
# What may be measured in units of which so many make one: exactly, or rounded.
_EXACT = {"time": (60.0, 3600.0)}
_ROUNDED: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("time", "length", "weight"), (1e3,)),
    "size": (1e3, 1e6, 1e9, 1024.0, 2.0**20, 2.0**30),
}
_LEAST_LARGE, _MOST_DIGITS, _MOST_ROUNDED = 60.0, 20, 0.05
# Seconds, minutes, hours, days, weeks, months, years; thousands, hundredths.
_FACTORS = (60, 3600, 24, 7, 30, 12, 1000, 1024, 100)
_MOST_NUMBERS = 64
# A source with more is a table of numbers, of which nobody can tell what they are about.
_MOST_LOOKED, _MOST_PLACES = 20_000, 2_000
_DATA = tomllib.loads(resources.files(__package__).joinpath("measures.toml").read_text(encoding="utf-8"))


class _Words(NamedTuple):
    """Words, and beginnings of words."""

    whole: frozenset[str]
    begun: tuple[str, ...]

    def have(self, word: str) -> bool:
        return word in self.whole or word.startswith(self.begun)


def _words(text: str) -> _Words:
    words = text.split()
    return _Words(
        frozenset(each for each in words if not each.endswith("*")),
        tuple(each[:-1] for each in words if each.endswith("*")),
    )


_UNITS = {name: _words(text) for name, text in _DATA["units"].items()}
_LABELS, _FILLERS, _HEDGES = (_words(_DATA[key]["words"]) for key in ("labels", "fillers", "hedges"))
_NUMBER_WORDS = tuple(tuple(line.split()) for line in _DATA["numbers"]["words"])
_PARTS = tuple(_DATA["numbers"]["parts"].split())
LARGE_NUMBERS = tuple(_DATA["numbers"]["large"].split())
_TENS = 20
_CHINESE = "〇一二三四五六七八九"


class Measure(NamedTuple):
    """A small number of a line.

    Attributes:
        value: from 2 to 99.
        kind: what it measures, or the word that it is the setting of.
        stems: beginnings of the line's other words.
        numbers: all others in the line.
    """

    value: int
    kind: str
    stems: frozenset[str]
    numbers: tuple[int, ...]


def measures(line: str) -> Iterator[Measure]:
    """The small numbers of a line that can be held against a source."""
    found = [
        (match, kind)
        for match in _NUMBER.finditer(line)
        if not match["range"] and (kind := _kind_of(match, line)) != ""
    ]
    if not found or any(map(_HEDGES.have, (word.casefold() for word in _TOKEN.findall(line)))) or "~" in line:
        return
    stems, numbers = _stems(line), tuple(map(int, re.findall(r"\d{1,4}", line)))
    for match, kind in found:
        value = int(match["number"])
        if value > 1:
            yield Measure(value, kind, stems, tuple(each for each in numbers if each != value))


def _kind_of(match: re.Match[str], line: str) -> str:
    unit, thing = str(match["unit"] or "").casefold(), str(match["thing"] or "").casefold()
    if match["sign"]:
        return "money"
    if unit and (kind := _unit(unit) or _unit(thing)):
        return kind
    before = [word.casefold() for word in _TOKEN.findall(line[max(0, match.start() - 60) : match.start()])]
    for back, word in enumerate(reversed(before)):
        if _LABELS.have(word):
            return str(word[:_STEM_CHARS])
        if back == 3 or not _FILLERS.have(word):
            break
    return ""


@lru_cache(maxsize=4096)
def _unit(word: str) -> str:
    if word >= "\u2e80":
        return next((kind for kind, words in _UNITS.items() if any(word[:n] in words.whole for n in (3, 2, 1))), "")
    return next((kind for kind, words in _UNITS.items() if words.have(word)), "")


def _stems(text: str) -> frozenset[str]:
    words = (word.casefold() for word in _STEM.findall(text))
    return frozenset(word[:_STEM_CHARS] for word in words if not _unit(word))


class _Place(NamedTuple):
    """A number of the source, what it measures, and the beginnings of the words around it."""

    value: int
    kind: str
    stems: frozenset[str]


def contradicted(found: Sequence[Measure], said: Said) -> list[bool]:
    """Whether the source gives each measure another number, and its own nowhere."""
    if not found:
        return []
    wanted = [each for each in found if not _is_word(each.value, said)]
    standing = _standing(said) if wanted else set[int]()
    wanted = [each for each in wanted if each.value not in standing and not _is_scaled(each, said)]
    places = _places(said, {each.kind for each in wanted}) if wanted else []
    has_clock = bool(places) and sum(len(_CLOCK.findall(text)) for text in said.texts) > 1
    return [
        each in wanted and _is_given_otherwise(each, places, is_strict=has_clock and each.kind == "time")
        for each in found
    ]


def _standing(said: Said) -> set[int]:
    found = set[int]()
    for text in said.texts:
        plain = _DATE.sub(" ", text)
        found.update(map(int, _STAND.findall(plain)))
        found.update(int(whole) + more for whole in _DECIMAL.findall(plain) for more in (0, 1))
    return found


def _is_scaled(measure: Measure, said: Said) -> bool:
    """Whether a large number of the source is this one in a smaller unit."""
    exact = {measure.value * scale for scale in _EXACT.get(measure.kind, ())}
    rounded = [measure.value * scale for scale in _ROUNDED.get(measure.kind, ())]
    if not (exact or rounded):
        return False
    digits = (re.sub(r"\D", "", text) for text in said.numbers)
    large = [float(each) for each in digits if each and len(each) < _MOST_DIGITS]
    return any(
        each in exact or any(abs(each - one) <= _MOST_ROUNDED * one for one in rounded)
        for each in large
        if each >= _LEAST_LARGE
    )


def _is_word(value: int, said: Said) -> bool:
    """Whether a number is said by a word, or may be one of those that the source says half, or a dozen."""
    if any(map(said.has_part, _PARTS)):
        halved = value in (2, 6, 12, 14, 15, 18, 24, 30, 36, 45, 48, 75, 90)
        if halved:
            return True
    tens, ones = divmod(value, 10)
    chinese = ("" if tens < 2 else _CHINESE[tens]) + ("十" if tens else "") + ("" if not ones else _CHINESE[ones])
    if said.has_part(chinese) or (value == 2 and said.has_part("两")):
        return True
    for words in _NUMBER_WORDS:
        if value <= _TENS:
            if _begins(words[value - 1], said):
                return True
        elif _begins(words[tens + 17 if tens > 2 else 19], said) and (not ones or _begins(words[ones - 1], said)):
            return True
    return False


def _begins(word: str, said: Said) -> bool:
    # "Zweiwöchig", "dreitägig"; short ones are the beginning of anything.
    return said.has_beginning(word, 0 if len(word) < 4 else 12)


def _places(said: Said, kinds: Set[str]) -> list[_Place]:
    """Where the source gives numbers of these kinds; none if there are too many."""
    found: list[_Place] = []
    looked = 0
    for text in said.texts:
        for match in _NUMBER.finditer(text):
            looked += 1
            if looked > _MOST_LOOKED or len(found) > _MOST_PLACES:
                return []
            if (kind := _kind_of(match, text)) in kinds:
                found.append(_Place(int(match["number"]), kind, _stems(_sentence(text, match.start(), match.end()))))
    return found


def _sentence(text: str, start: int, end: int) -> str:
    first = max(0, start - _MOST_SENTENCE_CHARS)
    before, behind = text[first:start], text[end : end + _MOST_SENTENCE_CHARS]
    ends = [found.end() for found in _SENTENCE_END.finditer(before)]
    last = _SENTENCE_END.search(behind)
    return before[ends[-1] if ends else 0 :] + " " + text[start:end] + " " + behind[: last.start() if last else None]


def _is_given_otherwise(measure: Measure, places: Sequence[_Place], *, is_strict: bool) -> bool:
    same = [place for place in places if place.kind == measure.kind]
    most = max((len(place.stems & measure.stems) for place in same), default=0)
    if most >= max(_LEAST_SHARED, _SHARED_RATIO * len(measure.stems)):
        # The same words: what it may have been reckoned from has some of them.
        same = [place for place in same if place.stems & measure.stems]
    elif is_strict or measure.kind not in _UNITS or not most:
        return False
    return len(same) <= _MOST_NUMBERS and not _is_reckoned(
        measure.value, [place.value for place in same], measure.numbers
    )


def _is_reckoned(value: int, near: Sequence[int], others: Sequence[int]) -> bool:
    """Whether a number is a sum of some, or the difference, the product or the ratio of two of them, or of a factor."""
    sums = 1
    for each in near:
        sums |= sums << each
    if sums >> value & 1:
        return True
    numbers = {*near, *others}
    if any(value in (a + b, abs(a - b), a * b) or value * b == a for a in numbers for b in numbers):
        return True
    return any(value * factor in numbers or value in (each * factor for each in numbers) for factor in _FACTORS)
