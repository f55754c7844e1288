"""Keys, tokens and passwords in a text, each replaced by a marker that leaves its name.

Asked for all that is written down: ledgers, summaries, stored records. Secrets are known by their form (prefixes of
their issuers, headers, URLs, private keys) or by the name before them; commit ids, uuids and paths stay, since the
ledger is there for them. Every repetition is bounded, so that hostile text costs linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

import regex

from litellm_compaction.core import table

MARKER = "[secret removed]"
TOO_SLOW = "[left out: a pattern of `redact_patterns` takes too long here]"
# `str` where nothing is to be redacted.
Redact: TypeAlias = "Callable[[str], str]"

_FORMS = table("secrets")


def _compiled(forms: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(forms).replace("{NAME}", _FORMS["name"]))


class _Search(NamedTuple):
    """A pattern, and words in lower case of which what is searched has one: they are found 50 times as fast."""

    pattern: re.Pattern[str]
    hints: Sequence[str]
    over_lines: bool = False  # Line by line if not.


def _searches() -> Iterator[_Search]:
    issuers = _FORMS["issuers"]
    issued = re.compile(f"(?<![A-Za-z0-9])(?:{'|'.join(form for form, _, _ in issuers)})")
    yield _Search(issued, [hint for _, hints, _ in issuers for hint in hints])
    for own in _FORMS["search"]:
        yield _Search(_compiled(own["forms"]), own.get("hints", _FORMS["name_hints"]), own.get("over_lines", False))


_SEARCHES = tuple(_searches())
_PLACEHOLDER, _NAME_ALONE = _compiled(_FORMS["placeholder"]), _compiled(["(?i){NAME}\\Z"])
_NO_SECRETS = frozenset(_FORMS["harmless"])
_HIDDEN = re.compile(_FORMS["hidden"])
# Other threads run while they are searched: keys are looked for over a whole text.
_KEY = regex.compile(_FORMS["key"])
_KEY_END = regex.compile(_FORMS["key_end"])
_CODE = re.compile(r"(?:[A-Za-z_]\w{0,60}[.])?[A-Za-z_]\w{0,60}(?:(?:[.]|::)\w{1,60}){0,4}\Z", re.ASCII)
_SPEAKS = re.compile(r"(?i)pass|token|secret|key|pwd|cred")
# One search through more than this would hold up other threads. Nothing but private keys reaches over so much.
_SLICE_CHARS = 32_768
# For one of an operator's patterns in one piece: a good one takes a few ms on a slow machine.
_OWN_LIMIT_S = 0.2


def redacted(text: str, patterns: Sequence[regex.Pattern[str]] = ()) -> str:
    """`text` with a marker in place of each secret; the very same text if there is none.

    Of an operator's own patterns goes what their group `secret` matches, else the whole match. Of a text in which one
    takes longer than 0.2 s the rest is left out (`TOO_SLOW`): nothing is written down unsearched.
    """
    shown = "".join(_HIDDEN.sub("", piece) for piece in _pieces(text))
    if len(shown) != len(text):
        # Colours and widths are given up only if they hid a secret.
        return text if (searched := redacted(shown, patterns)) == shown else searched
    if "PRIVATE KEY" in text:
        text = _KEY.sub(rf"\1{MARKER}", text, concurrent=True)
        text = _KEY_END.sub(f"{MARKER}\n", text, concurrent=True)
    cleaned: list[str] = []
    for piece in _pieces(text):
        for search in _SEARCHES:
            piece = _searched(piece, search)
        try:
            for pattern in patterns:
                # Other threads go on meanwhile.
                piece = pattern.sub(_own, piece, concurrent=True, timeout=_OWN_LIMIT_S)
        except TimeoutError:
            return "".join([*cleaned, TOO_SLOW])
        cleaned.append(piece)
    return "".join(cleaned)


@lru_cache(maxsize=64)
def redactor(patterns: tuple[str, ...]) -> Redact:
    """`redacted` with an operator's patterns, compiled once."""
    return partial(redacted, patterns=tuple(map(regex.compile, patterns)))


def _holds(text: str, hints: Sequence[str]) -> bool:
    """One of `hints`, which are in lower case, stands in a text, in whatever case."""
    return any(map(text.lower().__contains__, hints))


def _pieces(text: str) -> Iterator[str]:
    """A text in its order, cut after lines, else after words."""
    start = 0
    while len(text) - start > _SLICE_CHARS:
        least, most = start + _SLICE_CHARS // 2, start + _SLICE_CHARS
        at = text.rfind("\n", least, most)
        end = (at if at >= 0 else text.rfind(" ", least, most)) + 1 or most
        yield text[start:end]
        start = end
    yield text[start:]


def _searched(piece: str, search: _Search) -> str:
    """Searches what of a text holds one of a search's hints: its lines, or all of it."""
    if not _holds(piece, search.hints):
        return piece
    parts = [piece] if search.over_lines else piece.split("\n")
    return "\n".join(search.pattern.sub(_hidden, each) if _holds(each, search.hints) else each for each in parts)


def _hidden(match: re.Match[str]) -> str:
    """A match with the marker in place of its one group that is a secret; of a form without groups all of it goes."""
    groups = {name: value for name, value in match.groupdict().items() if value and not name.startswith("name")}
    if not groups:
        return MARKER
    name, value = next(iter(groups.items()))
    is_word = value.lower().rstrip(".!?:") in _NO_SECRETS
    # A placeholder, a word of code, or a secret's name as a value, as translations have it.
    is_harmless = is_word or _PLACEHOLDER.match(value) or _NAME_ALONE.match(value)
    is_code = "name_sign" in match.groupdict() and _is_code(match, value)
    return match[0] if is_harmless or is_code else _put(match, name)


def _is_code(match: re.Match[str], value: str) -> bool:
    """What is given to a name of secrets is no secret: a sentence in quotation marks, a call, another name."""
    name, sign = match["name"], match["name_sign"]
    if match["quoted"] is not None:
        return value.count(" ") > 3
    if match.string[match.end() : match.end() + 1] in ("(", "[", "{"):
        return True
    has_digits = any(map(str.isdigit, value))
    is_assigned = sign[:1].isspace() or sign[-1:] == "="
    if _CODE.match(value) and not has_digits:
        # `token = parse`, `password=password`; an upper-case name is a variable of the environment.
        is_named = (is_assigned or "." in value or "::" in value) and not name.isupper()
        if is_named or _SPEAKS.search(value):
            return True
    # `first_pass: results` is no password, and `token = 42` is a number of them.
    is_part = name[0] in "_-" and not has_digits and not is_assigned
    return is_part or (value.isdigit() and name.lower() == "token" and len(value) < 7)


def _own(found: regex.Match[str]) -> str:
    if found.start() == found.end():
        return ""
    return _put(found, "secret" if found.groupdict().get("secret") is not None else 0)


def _put(found: re.Match[str] | regex.Match[str], group: str | int) -> str:
    start, end = found.span(group)
    return found.string[found.start() : start] + MARKER + found.string[end : found.end()]
