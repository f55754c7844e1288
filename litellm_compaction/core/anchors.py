"""What a text names: numbers with the words next to them, ids, paths, identifiers, names, and what is set off.

What names something is a matter of its form, so it is the same in any language. Deterministic and in linear time.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

# A number or an id says most; a name says where to look again. Moving one of them by half changes no figure of the
# held-out conversations by more than .01 (2026-11).
NUMBER, ID, ERROR, PATH, IDENTIFIER, NAME = 3.0, 3.0, 3.0, 2.0, 1.5, 1.0
# Between a number and the words next to it: "12 months" and "12 eggs" are two things to know.
_NEXT = "\t"
_ATOM = re.compile(r"[^\s\"`“”„«»「」『』,;(){}\[\]<>|=*…、，；：（）【】《》]+")
_SENTENCE_ENDS = ".!?:。！？"
_AROUND = "'’‘.:!?。！？-–—#&~+\\/"
_QUOTES = "'’‘.:!?"
_IDENTIFIER = re.compile(r"[^\W_]_\w|\w[/\\]\w|[a-z][A-Z]|\w\.[^\W\d]\w|::|^_\w|^\.{0,2}/\w|^--?\w\w|@\w")
_SPAN = re.compile(r"`([^`\n]{2,60})`|\*\*([^*\n]{2,60})\*\*|\"([^\"\n]{2,60})\"|“([^”\n]{2,60})”|「([^」\n]{2,60})」")
# Scripts that set no words apart; in Japanese, loanwords and foreign names are written in katakana.
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u9fff]")
_UNSPACED_NUMBER = re.compile(r"[^\W\d_]{0,2}\d[\d.,:/-]{0,20}[^\W\d_]{0,2}")
_KATAKANA = re.compile(r"[\u30a1-\u30fa\u30fc]{3,20}")
# A path, an id or an identifier inside such a text.
_SPACED_RUN = re.compile(r"[A-Za-z0-9_./:@+-]{3,80}")
# What went wrong, in any program's output; without the colon it is the code's.
_ERROR = re.compile(r"(?:[Ee]rror|ERROR|Exception|Warning|Failure|Panic|FAILED):\Z")
_LEAST_ID_CHARS, _LEAST_NAME_CHARS = 5, 3
# Nothing longer is looked up again by its name.
_MOST_ATOM_CHARS = 120


class _Kind(Enum):
    WORD = auto()
    NUMBER = auto()
    NAMED = auto()
    CAPITAL = auto()


class _Atom(NamedTuple):
    """A word, or what has the place of one: its text without marks around it, and what it names in any sentence."""

    bare: str
    kind: _Kind
    named: tuple[tuple[str, float], ...] = ()


def named(text: str, *, number_weight: float = NUMBER) -> dict[str, float]:
    """What a text names, and how much each says.

    Args:
        text: a sentence or a line.
        number_weight: of a bare number; in a listing it says little.
    """
    words = _ATOM.findall(text)
    atoms = [_atom(word) for word in words]
    found: dict[str, float] = {}
    for at, atom in enumerate(atoms):
        if atom.kind is _Kind.NAMED:
            found.update(atom.named)
        elif atom.kind is _Kind.NUMBER:
            before = atoms[at - 1].bare.lower() if at else ""
            behind = atoms[at + 1].bare.lower() if at + 1 < len(atoms) else ""
            found[f"{before}{_NEXT}{atom.bare}{_NEXT}{behind}"] = number_weight
        elif atom.kind is _Kind.CAPITAL and at and words[at - 1][-1] not in _SENTENCE_ENDS:
            found[atom.bare] = NAME
    for groups in _SPAN.findall(text):
        found.update((span, NAME) for span in groups if span)
    return found


def name_of(key: str) -> str:
    """What stands in the text for a key of `named`."""
    return key.split(_NEXT)[1] if _NEXT in key else key


def is_plain(name: str) -> bool:
    """Returns True for what is written as a word: a person's name, or in German any noun."""
    return name.isalpha() and name[1:] == name[1:].lower()


def is_number(name: str) -> bool:
    """Returns True for a bare figure, which says little without its line."""
    return not any(map(str.isalpha, name))


@lru_cache(maxsize=16_384)
def _atom(word: str) -> _Atom:
    """Reads a word. Remembered: words come back, in a conversation and in its next compaction."""
    bare = word.strip(_AROUND)
    if not bare or len(bare) > _MOST_ATOM_CHARS:
        return _Atom(bare[:_MOST_ATOM_CHARS], _Kind.WORD)
    if not bare.isascii() and _UNSPACED.search(bare):
        found = dict.fromkeys(_KATAKANA.findall(bare), NAME) | dict.fromkeys(_UNSPACED_NUMBER.findall(bare), NUMBER)
        for run in _SPACED_RUN.findall(bare):
            found |= dict(_atom(run).named)
        if "/" in bare:
            found[bare] = PATH
        return _Atom(bare, _Kind.NAMED, tuple(found.items()))
    if any(map(str.isdigit, bare)):
        if len(bare) >= _LEAST_ID_CHARS and any(map(str.isalpha, bare)):
            return _Atom(bare, _Kind.NAMED, ((bare, ID),))
        return _Atom(bare, _Kind.NUMBER)
    if _ERROR.search(word):
        return _Atom(bare, _Kind.NAMED, ((f"{bare}:", ERROR),))
    if _IDENTIFIER.search(word.strip(_QUOTES)):
        return _Atom(bare, _Kind.NAMED, ((bare, PATH if "/" in bare else IDENTIFIER),))
    is_name = bare[0].isupper() and len(bare) >= _LEAST_NAME_CHARS
    return _Atom(bare, _Kind.CAPITAL if is_name else _Kind.WORD)
