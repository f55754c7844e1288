"""Terms of a text: what the index files a passage under and what a query is searched by.

No language is known and no word is listed. Words are cut to their beginnings, scripts without spaces give pairs of
characters, and whatever is written like code (an identifier, a path, a number, an id) counts as it is written, too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import regex

# A word counts by both of its beginnings, so a long one counts more; that finds as much as Porter's English stems.
_STEMS_CHARS = (4, 6)
_LEAST_ID_CHARS, _MOST_PLAIN_DIGITS = 5, 4
# A longer run is data.
_MOST_RUN_CHARS, _MOST_PARTS = 200, 12
_REMEMBERED = 16_384
# Digits in groups; else letters and digits with what holds an identifier, a path or an address together.
_RUN = regex.compile(
    r"\d{1,3}(?:[,'’\u202f]\d{3}){1,6}(?![\w,])"
    rf"|[\w\p{{M}}](?:[\w\p{{M}}@./\\:#+'’-]{{0,{_MOST_RUN_CHARS}}}[\w\p{{M}}])?"
)
_GROUPING = str.maketrans("", "", ",'’\u202f")
_PART = regex.compile(r"[\w\p{M}--_]+", regex.V1)
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_LINE, _SLASH = re.compile(r":\d+(?::\d+)?\Z"), re.compile(r"[/\\]")
_EXTENSION = re.compile(r"[^\W\d_]\.[^\W\d_]\w")
# Thai, Lao, Burmese, Khmer, kana, Han; and Hangul, whose words carry their particles.
_UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]+)"
)
_ACCENT = re.compile("[\u0300-\u036f]")


class Sought(NamedTuple):
    """A run of a query as it was written, the terms that stand for it, and if it names one thing alone."""

    written: str
    terms: tuple[str, ...]
    is_id: bool


def terms(text: str) -> list[str]:
    """Returns the terms of a text in its order, each as often as it stands there."""
    return [term for run in _RUN.findall(text) for term in _sought(run).terms]


def sought(query: str) -> list[Sought]:
    """Returns the runs of a query in their order, each once."""
    return [_sought(run) for run in dict.fromkeys(_RUN.findall(query))]


@lru_cache(maxsize=_REMEMBERED)
def _sought(run: str) -> Sought:
    """A run with its terms: its parts, and the whole of an identifier, a path or an id."""
    folded, is_id = _folded(run), _is_id(run)
    if folded.isdigit():
        return Sought(run, (folded,), is_id)
    humps = [hump for part in _PART.findall(run)[:_MOST_PARTS] for hump in _HUMP.split(part, _MOST_PARTS)]
    words = [term for hump in humps for term in _words(_folded(hump))]
    return Sought(run, tuple(dict.fromkeys((*_spellings(folded), *words)) if is_id else words), is_id)


def _spellings(folded: str) -> Iterator[str]:
    """An id as it is written; a path also without its line, and its last part alone."""
    yield folded
    place = _LINE.sub("", folded)
    yield place
    name = _SLASH.split(place)[-1]
    if len(name) >= _LEAST_ID_CHARS:
        yield name


def _words(folded: str) -> list[str]:
    """A part of a run as terms: words by two beginnings, scripts without spaces by pairs of characters."""
    found: list[str] = []
    for at, piece in enumerate([folded] if folded.isascii() else _UNSPACED.split(folded)):
        if at % 2 and len(piece) > 1:
            found += (piece[start : start + 2] for start in range(len(piece) - 1))
        elif piece:
            found += dict.fromkeys(piece[:chars] for chars in _STEMS_CHARS) if piece.isalpha() else [piece]
    return found


def _folded(run: str) -> str:
    """A run without case, accents and width; digits in groups as one number."""
    if not run.isascii():
        run = unicodedata.normalize("NFC", _ACCENT.sub("", unicodedata.normalize("NFKD", run)))
    folded = run.casefold()
    digits = folded.translate(_GROUPING)
    return digits if digits.isdigit() else folded


def _is_id(run: str) -> bool:
    """It names one thing: a number of five digits or more, letters with digits, a path, an address, an identifier."""
    if len(run) < _LEAST_ID_CHARS or _UNSPACED.search(run) is not None:
        return False
    has_digit, has_letter = any(map(str.isdigit, run)), any(map(str.isalpha, run))
    if not has_letter:
        return sum(map(str.isdigit, run)) > _MOST_PLAIN_DIGITS
    return (
        has_digit
        or any(map(run.__contains__, "_@\\"))
        or run.count("/") > 1
        or _HUMP.search(run) is not None
        or _EXTENSION.search(run) is not None
    )
