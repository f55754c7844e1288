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
Redact: TypeAlias = "Callable[[str], str]"


_FORMS = table("secrets")


def _compiled(forms: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(forms).replace("{NAME}", _FORMS["name"]))


_BROKEN = _compiled(_FORMS["broken"])
_BROKEN_HINTS: Sequence[str] = _FORMS["broken_hints"]
_PLACEHOLDER, _NAME_ALONE = _compiled(_FORMS["placeholder"]), _compiled(["(?i){NAME}\\Z"])
_NO_SECRETS = frozenset(_FORMS["harmless"])
# Colour codes, as they are and as JSON, shells and Python write them, and characters without a width.
_HIDDEN = re.compile(
    r"(?:\x1b|\\{1,4}(?:u001b|x1b|033|e))\[[0-9;:?]{0,40}[@-~]|[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]",
    re.IGNORECASE,
)
_KEY_BEGINS = regex.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
# Whole lines: of the line behind a key that is cut short, nothing may go that a secret in it is known by.
_KEY_BODY = re.compile(
    r"(?:\s|\\[nr]|[A-Za-z0-9+/=]{1,4000}(?=[ \t\r]{0,8}(?:[\n\\\"']|\Z))"
    r"|(?:Proc-Type|DEK-Info|Comment):[^\n]{0,200}){0,20000}"
)
_KEY_TAIL = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINE = re.compile(r"[A-Za-z0-9+/=]{16,80}\r?\Z")
_KEY_ENDS, _KEY_CHARS = "-----END", 20_000
_CODE = re.compile(r"(?:[A-Za-z_]\w{0,60}[.])?[A-Za-z_]\w{0,60}(?:(?:[.]|::)\w{1,60}){0,4}\Z", re.ASCII)
_SPEAKS = re.compile(r"(?i)pass|token|secret|key|pwd|cred")
_KEY_HINTS = ("private key", *_BROKEN_HINTS)
# One search through more than this would hold up other threads. Nothing but private keys reaches over lines.
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
    if _holds(text, _KEY_HINTS):
        text = _without_keys(text)
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


def plain(text: str) -> str:
    """`text` as it is, if nothing is to be redacted."""
    return text


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
    """Searches the lines of a text that hold one of a search's hints and, in ASCII, one of its signs."""
    if not _holds(piece, search.hints):
        return piece

    def may_hold(line: str) -> bool:
        lower = line.lower()
        is_hinted = any(map(lower.__contains__, search.hints))
        return is_hinted and (not line.isascii() or any(map(lower.__contains__, search.signs)))

    lines = piece.split("\n")
    return "\n".join(search.pattern.sub(search.replaced, line) if may_hold(line) else line for line in lines)


def _unnamed(found: re.Match[str]) -> str:
    """A match with the marker in place of its one group that is a secret."""
    for name, value in found.groupdict().items():
        if value is not None and not name.startswith("name"):
            return found[0] if _is_harmless(value) else _put(found, name)
    return found[0]


def _is_harmless(value: str) -> bool:
    """A placeholder, a word of code, or a secret's name as a value, as translations have it."""
    is_word = value.lower().rstrip(".!?:") in _NO_SECRETS
    return is_word or _PLACEHOLDER.match(value) is not None or _NAME_ALONE.match(value) is not None


def _assigned(found: re.Match[str]) -> str:
    quoted, value = found["quoted"], found["secret"]
    if _is_harmless(quoted or value):
        return found[0]
    if quoted is not None:
        # A sentence in quotation marks is no secret.
        return found[0] if quoted.count(" ") > 3 else _put(found, "quoted")
    if found.string[found.end() : found.end() + 1] in ("(", "[", "{"):
        return found[0]
    is_code = _CODE.match(value) is not None and not any(map(str.isdigit, value))
    is_assigned = found["sign"][:1].isspace() or found["sign"][-1:] == "="
    # `token = parse`, `password=password`; an upper-case name is a variable of the environment.
    is_code = is_code and (is_assigned or "." in value or "::" in value) and not found["name"].isupper()
    # `first_pass: results` is no password.
    is_code = is_code or (found["name"][0] in "_-" and not any(map(str.isdigit, value)) and not is_assigned)
    if is_code or (_SPEAKS.search(value) and _CODE.match(value) and not any(map(str.isdigit, value))):
        return found[0]
    if value.isdigit() and found["name"].lower() == "token" and len(value) < 7:
        return found[0]
    return _put(found, "secret")


def _own(found: regex.Match[str]) -> str:
    if found.start() == found.end():
        return ""
    return _put(found, "secret") if found.groupdict().get("secret") is not None else MARKER


def _put(found: re.Match[str] | regex.Match[str], group: str) -> str:
    start, end = found.span(group)
    return found.string[found.start() : start] + MARKER + found.string[end : found.end()]


def _without_keys(text: str) -> str:
    kept: list[str] = []
    start = 0
    while (begun := _KEY_BEGINS.search(text, start, concurrent=True)) is not None:
        kept += (text[start : begun.end()], MARKER)
        start = begun.end()
        if text.startswith(MARKER, start):
            start += len(MARKER)
            continue
        end = text.find(_KEY_ENDS, start, start + _KEY_CHARS)
        body = _KEY_BODY.match(text, start)
        start = end if end >= 0 else body.end() if body is not None else start
    pieces = _pieces(_without_tails("".join((*kept, text[start:]))))
    return "".join(_BROKEN.sub(_unnamed, piece) if _holds(piece, _BROKEN_HINTS) else piece for piece in pieces)


def _without_tails(text: str) -> str:
    """A text without the ends of private keys whose first lines were cut off."""
    kept: list[str] = []
    for line in text.split("\n") if _KEY_ENDS in text else [text]:
        if _KEY_TAIL.match(line) and kept and _KEY_LINE.match(kept[-1]):
            while kept and _KEY_LINE.match(kept[-1]):
                kept.pop()
            kept.append(MARKER)
        kept.append(line)
    return "\n".join(kept)


class _Search(NamedTuple):
    """A pattern, what takes its place, and words of which a line has to hold one each, in lower case, to be searched.

    Finding a word is 50 times as fast as a search for a pattern.
    """

    pattern: re.Pattern[str]
    replaced: str | Callable[[re.Match[str]], str]
    hints: Sequence[str]
    signs: Sequence[str]


def _search(name: str, replaced: str | Callable[[re.Match[str]], str] = _unnamed) -> _Search:
    table = _FORMS[name]
    hints, signs = table.get("hints", _FORMS["name_hints"]), table.get("signs", ("",))
    return _Search(_compiled(table["forms"]), replaced, hints, signs)


def _search_by_issuers() -> _Search:
    rows = _FORMS["issuers"]
    pattern = re.compile(f"(?<![A-Za-z0-9])(?:{'|'.join(form for form, _, _ in rows)})")
    return _Search(pattern, MARKER, [hint for _, hints, _ in rows for hint in hints], ("",))


_SEARCHES = (
    _search_by_issuers(),
    *map(_search, ("header", "url", "option", "signed", "command", "form")),
    _search("assigned", _assigned),
    _search("said"),
)
