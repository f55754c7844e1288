"""What a sentence or a line names: numbers with the words next to them, ids, paths, names, and what is set off.

By form alone, so that it serves any language.
"""

from __future__ import annotations

import re
from functools import lru_cache

# A number or an id says most; a name says where to look again.
NUMBER, _ID, _PATH, _IDENTIFIER, _NAME = 3.0, 3.0, 2.0, 1.5, 1.0
# Between a number and the words next to it: "12 months" and "12 eggs" are two things to know.
_NEXT = "\t"
_WORD = re.compile(r"[^\s\"`“”„«»「」『』,;(){}\[\]<>|=*…、，；：（）【】《》]+")
_SENTENCE_ENDS = ".!?:。！？"
_AROUND = "'’‘.:!?。！？-–—#&~+\\/"
_MARKS = "'’‘.:!?"
_IDENTIFIER_SIGN = re.compile(r"[^\W_]_\w|\w[/\\]\w|[a-z][A-Z]|\w\.[^\W\d]\w|::|^_\w|^\.{0,2}/\w|^--?\w\w|@\w")
_SPAN = re.compile(r"`([^`\n]{2,60})`|\*\*([^*\n]{2,60})\*\*|\"([^\"\n]{2,60})\"|“([^”\n]{2,60})”|「([^」\n]{2,60})」")
# Scripts that set no words apart; in Japanese, loanwords and foreign names are written in katakana.
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u9fff]")
_IN_UNSPACED = re.compile(
    r"[\u30a1-\u30fa\u30fc]{3,20}|[^\W\d_]{0,2}\d[\d.,:/-]{0,20}[^\W\d_]{0,2}|[A-Za-z0-9_./:@+-]{3,80}"
)
# An error, in any program's output; without the colon it is the code's.
_ERROR_SIGN = re.compile(r"(?:[Ee]rror|ERROR|Exception|Warning|Failure|Panic|FAILED):\Z")
_LEAST_ID_CHARS, _LEAST_NAME_CHARS = 5, 3
# Nothing longer is looked up again by its name.
_MOST_WORD_CHARS = 120


def named(text: str, *, number_weight: float = NUMBER) -> dict[str, float]:
    """Names and values in a sentence or a line, with the weight of each; a number goes with the words next to it."""
    words = _WORD.findall(text)
    found: dict[str, float] = {}
    for at, word in enumerate(words):
        for name, weight in _names_in(word):
            if not weight:
                before = words[at - 1].strip(_AROUND).lower() if at else ""
                behind = words[at + 1].strip(_AROUND).lower() if at + 1 < len(words) else ""
                found[f"{before}{_NEXT}{name}{_NEXT}{behind}"] = number_weight
            elif weight != _NAME or (at and words[at - 1][-1] not in _SENTENCE_ENDS):
                found[name] = weight
    for groups in _SPAN.findall(text):
        found.update((span, _NAME) for span in groups if span)
    return found


def name_of(key: str) -> str:
    return key.split(_NEXT)[1] if _NEXT in key else key


def is_number(name: str) -> bool:
    return not any(map(str.isalpha, name))


@lru_cache(maxsize=16_384)
def _names_in(word: str) -> tuple[tuple[str, float], ...]:
    """What a word names, with its weight, 0 for a bare number. Remembered: words come back."""
    bare = word.strip(_AROUND)
    if not bare or len(bare) > _MOST_WORD_CHARS:
        return ()
    if not bare.isascii() and _UNSPACED.search(bare):
        found = tuple((name, _PATH) for name in _IN_UNSPACED.findall(bare))
        return (*found, (bare, _PATH)) if "/" in bare else found
    if any(map(str.isdigit, bare)):
        is_id = len(bare) >= _LEAST_ID_CHARS and any(map(str.isalpha, bare))
        return ((bare, _ID if is_id else 0.0),)
    if _ERROR_SIGN.search(word):
        return ((f"{bare}:", _ID),)
    if _IDENTIFIER_SIGN.search(word.strip(_MARKS)):
        return ((bare, _PATH if "/" in bare else _IDENTIFIER),)
    return ((bare, _NAME),) if bare[0].isupper() and len(bare) >= _LEAST_NAME_CHARS else ()
