"""Whom a line of a summary names, and whether the source names them: given names, and surnames behind a title.

A capital makes no name: in German every noun has one, and good summaries say "Houston" of an IAH and "York" of a JFK
(14 of 58 good lines of held-out conversations have such a word in a sentence that the source has not, measured
2026-11). What can be told is a name of the list in `given_names.toml`, that no word, place or product is called by, of
which no form, inflection or misspelling stands in the source; and what follows "Mr", "Frau" or "доктор".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

from litellm_compaction.core.said import Said

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Neither part of a path or a compound, nor quoted.
_WORD = re.compile(r"(?<![\w'’@./\\`\"“„«&#$-])[^\W\d_]{3,20}(?![\w@/\\`&-]|[.:]\w| &)")
_BEFORE = re.compile(
    r"(?<![^\W\d_])(?:(?P<first>[^\W\d_]{1,20})(?P<end>[.!?:]?) )?(?P<last>[^\W\d_]{1,20})(?P<dot>[.:!?,]?) \Z"
)
_BEHIND = re.compile(r"(?:['’]s)? (?P<next>[^\W\d_]{1,20}|&)(?P<more>\.| [^\W\d_]{1,20})?")
_LEAST_SURNAME_CHARS = 4
_ENDING_CHARS = 3
# "Prof." is an abbreviation, "signore." the end of a sentence; "500 ms" and "MS" are no lady.
_MOST_SHORT_CHARS = 4
# Of Slavic, Baltic, Finnish and Hungarian cases.
_ENDINGS = (*"aeiouyęąůt", "ie", "ovi", "om", "em", "iem", "owi", "ou", "lle", "nak", "nek")
_DATA = tomllib.loads(resources.files(__package__).joinpath("given_names.toml").read_text(encoding="utf-8"))
_TITLES, _NO_SURNAMES, _BEFORE_THINGS, _PARTICLES, _ARTICLES = (
    frozenset(_DATA[key].split()) for key in ("titles", "no_surnames", "before_things", "particles", "articles")
)


class _Group(NamedTuple):
    """One name: the forms that are looked for in a line, and words that show as well that it was given."""

    forms: tuple[str, ...]
    words: tuple[str, ...]


class Person(NamedTuple):
    """Somebody who is named.

    Attributes:
        text: the name, casefolded.
        groups: whose forms it may be; none for a surname.
        before: the word with a capital before it, if no sentence begins with that.
        behind: the word with a capital behind it.
    """

    text: str
    groups: tuple[_Group, ...]
    before: str
    behind: str


def _inflected(form: str) -> Iterator[str]:
    yield form
    if "а" <= form[0] <= "ё":
        stem = form[:-1]
        endings = {"а": "ыиеу", "я": "иеюй", "й": "яюе", "ь": "яюе"}.get(form[-1])
        yield from (stem + ending for ending in endings or ())
        yield from (stem + ending for ending in {"а": ("ой", "ей"), "я": ("ей", "ёй"), "й": ("ем",)}.get(form[-1], ()))
        yield from (form + ending for ending in ("а", "у", "ом", "е", "ем") if endings is None)
    elif form[-1] not in "sxzß":
        yield form + "s"


def _read() -> dict[str, tuple[_Group, ...]]:
    found: dict[str, tuple[_Group, ...]] = {}
    for line in _DATA["names"].strip().split("\n"):
        forms, _, words = line.partition("|")
        group = _Group(tuple(forms.split()), tuple(words.split()))
        for each in {inflected for form in group.forms for inflected in _inflected(form)}:
            found[each] = (*found.get(each, ()), group)
    return found


_GROUPS = _read()


def persons(line: str) -> Iterator[Person]:
    """Whom a line names, as far as that can be told by form."""
    for found in _WORD.finditer(line):
        word = found[0]
        if not (word[0].isupper() and word[1:].islower()):
            continue
        before = _BEFORE.search(line[max(0, found.start() - 50) : found.start()])
        groups = _GROUPS.get(word.casefold(), ())
        is_titled = before is not None and _is_title(before, word)
        if not (groups or is_titled) or (before is not None and before["last"].casefold() in _BEFORE_THINGS):
            continue
        behind = _BEHIND.match(line, found.end())
        following = behind["next"] if behind is not None else ""
        if following in ("&", "Doe") or (behind is not None and _is_long(behind)):
            continue
        is_surname = following[:1].isupper() and following.casefold() not in _TITLES
        preceding = "" if before is None or is_titled or not _is_inside(before) else before["last"].casefold()
        yield Person(word.casefold(), groups, preceding, following.casefold() if is_surname else "")


def _is_inside(before: re.Match[str]) -> bool:
    """Whether a capital before a name is none that any word has that opens a sentence."""
    return before["last"][0].isupper() and not before["dot"] and before["first"] is not None and not before["end"]


def _is_title(before: re.Match[str], word: str) -> bool:
    title, article = before["last"].casefold(), (before["first"] or "").casefold()
    return (
        title in _TITLES
        and (before["last"].istitle() or len(title) > _MOST_SHORT_CHARS)
        and (before["dot"] == "" or (before["dot"] == "." and len(title) <= _MOST_SHORT_CHARS))
        and article not in _ARTICLES
        and len(word) >= _LEAST_SURNAME_CHARS
        and word.casefold() not in _NO_SURNAMES
    )


def _is_long(behind: re.Match[str]) -> bool:
    """Whether a name is longer: "John F. Kennedy", "John Wayne Airport", "Ludwig van Beethoven"."""
    first, more = behind["next"], (behind["more"] or "").strip()
    is_begun = first[:1].isupper() or first in _PARTICLES
    return is_begun and (more[:1].isupper() or (more == "." and len(first) == 1))


def is_named(person: Person, said: Said) -> bool:
    """Whether a source names somebody, or may do so in a form that nobody can compare."""
    is_cyrillic = "а" <= person.text[0] <= "ё"
    if said.is_foreign or (said.is_cyrillic and not is_cyrillic and not _is_known_in_cyrillic(person)):
        return True
    if is_cyrillic and not person.groups and not said.is_cyrillic:
        return True
    if (person.behind and said.has_part(person.behind)) or (person.before and not said.has_part(person.before)):
        # "Joe Biden" of whom Biden was said; and "Visual Anna" may be a product, where "Reviewer Anna" is not.
        return True
    if not person.groups:
        stem = person.text[: max(_LEAST_SURNAME_CHARS, len(person.text) - _ENDING_CHARS)]
        return said.has_part(stem) or said.has_misspelling(person.text)
    return any(_has_form(group, said) for group in person.groups) or said.has_misspelling(person.text)


def _is_known_in_cyrillic(person: Person) -> bool:
    return bool(person.groups) and any("а" <= form[0] <= "ё" for group in person.groups for form in group.forms)


def _has_form(group: _Group, said: Said) -> bool:
    return any(word in said.capitals for word in group.words) or any(_has_any(form, said) for form in group.forms)


def _has_any(form: str, said: Said) -> bool:
    """Whether a form stands in the source, in any case of its language, or in an id."""
    if "а" <= form[0] <= "ё":
        return said.has_beginning(form[: max(3, len(form) - 1)], 4)
    if len(form) > 4 and said.has_part(form):
        return True
    stems = (form, form[:-1]) if form[-1] in "aeiouyé" else (form,)
    return (
        said.has_beginning(form, 0)
        or form + "s" in said.capitals
        or any(stem + ending in said.capitals for stem in stems for ending in _ENDINGS)
    )
