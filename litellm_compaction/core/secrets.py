"""Keys, tokens and passwords in a text, each replaced by a marker that leaves its name.

Asked for whatever is written down: the ledger, summaries, what is stored. The prompt itself keeps what was sent. Known
by their form (prefixes of their issuers, headers, URLs, private keys) or by the name before them; commit ids, uuids and
paths stay, since the ledger is there for them. Every repetition is bounded, so that hostile text costs linear time.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeAlias

from litellm_compaction.core.messages import Message

MARKER = "[secret removed]"
Redact: TypeAlias = "Callable[[str], str]"
# Hints, and what to search lines with one of them for.
_Kind: TypeAlias = "tuple[Sequence[str], Sequence[Redact]]"

# Prefixes that issuers are known to give their keys; written from common knowledge, held by the table in the tests.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"sk-(?=[A-Za-z_-]{0,60}\d)[A-Za-z0-9_-]{16,250}"
    r"|(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,200}|whsec_[A-Za-z0-9+/=]{16,200}"
    r"|gh[pousr]_[A-Za-z0-9]{20,255}|github_pat_[A-Za-z0-9_]{22,255}|gl(?:pat|dt|rt|ptt)-[A-Za-z0-9_-]{16,255}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,255}|xapp-[A-Za-z0-9-]{10,255}"
    r"|hooks\.slack\.com/services/[A-Za-z0-9/]{20,100}"
    r"|(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA|ANVA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|AIza[A-Za-z0-9_-]{30,60}|ya29\.[A-Za-z0-9_-]{20,400}|GOCSPX-[A-Za-z0-9_-]{20,60}"
    r"|hf_[A-Za-z0-9]{30,60}|gsk_[A-Za-z0-9]{30,80}|r8_[A-Za-z0-9]{30,60}|tvly-[A-Za-z0-9-]{20,60}"
    r"|npm_[A-Za-z0-9]{30,60}|pypi-[A-Za-z0-9_-]{40,400}|dckr_pat_[A-Za-z0-9_-]{20,60}"
    r"|do[opr]_v1_[a-f0-9]{40,80}|shp(?:at|ss|ca|pa)_[a-fA-F0-9]{30,40}|lsv2_[a-z]{2}_[A-Za-z0-9_]{30,80}"
    r"|SG\.[A-Za-z0-9_-]{16,40}\.[A-Za-z0-9_-]{16,60}|AGE-SECRET-KEY-1[A-Z0-9]{20,80}"
    r"|eyJ[A-Za-z0-9_-]{8,2000}\.eyJ[A-Za-z0-9_-]{4,6000}(?:\.[A-Za-z0-9_-]{0,2000})?"
    r")"
)
_HEADER = re.compile(
    r"(?i)\b(?:authorization|proxy-authorization)\\{0,3}[\"']?[ \t]{0,3}[:=][ \t]{0,3}\\{0,3}[\"']?"
    r"(?:(?:bearer|basic|token|digest|apikey|negotiate)[ \t]{1,3})?"
    r"(?P<secret>(?!\[secret|(?:bearer|basic|token|digest|apikey|negotiate)[ \t])"
    r"[^\s\"'\\,;$<{]{6,4000})"
    r"|\bbearer[ \t]{1,3}(?=[A-Za-z._~+/=-]{0,200}\d)(?P<bearer>[A-Za-z0-9._~+/=-]{16,4000})"
    r"|\b(?:set-)?cookie[ \t]{0,2}:[ \t]{0,3}(?P<cookie>(?![ \t]|\[secret)[^\n\"']{8,4000})"
)
_URL = re.compile(r"://[^\s/:@\"'<>\[\]]{0,100}:(?P<secret>[^\s/@\"'<>$\[\]{}]{1,200})@(?=[\w\[])")
_OPTION = re.compile(
    r"(?<!\S)(?:-u|--user)[ \t]{1,2}[\"']?[^\s:\"'/]{1,80}:(?P<secret>(?!\[secret)(?!\d{1,6}(?!\S))[^\s\"'$]{3,200})"
    r"|(?<!\S)--?(?:password|passwd|passphrase|token|api-?key|secret)[ \t]{1,2}"
    r"(?P<value>(?!\[secret)(?!-)[^\s\"'$<\[]{4,400})"
)
_NAME = (
    r"(?:password|passwd|passwort|kennwort|passphrase|contraseña|secret|token|pwd|credentials?"
    r"|(?:api|access|private|secret|client|auth|account|encryption|signing|master|storage|license|session)[ _-]?key"
    r"|client[_-]?secret|connection[_-]?string|密码|口令|密钥)"
)
# Where a name may begin, in lower case; one character, since names stand in names ("client secret key").
_NAME_BEGINS = re.compile(
    r"p(?=ass(?:word|wd|wort|phrase)|wd|rivate[ _-]?key)|k(?=ennwort)|t(?=oken)|m(?=aster[ _-]?key)"
    r"|l(?=icense[ _-]?key)"
    r"|s(?=ecret|(?:igning|torage|ession)[ _-]?key)|a(?=(?:pi|ccess|uth|ccount)[ _-]?key)|e(?=ncryption[ _-]?key)"
    r"|c(?=redential|lient[ _-]?(?:key|secret)|onnection[_-]?string)"
)
_ASSIGNED = re.compile(
    rf"(?i)(?P<name>{_NAME})(?P<index>_?\d{{0,3}})\\{{0,3}}[\"'`\]]{{0,2}}"
    r"(?P<sign>[ \t]{0,8}(?:=>|:=|==|=|:|：)[ \t]{0,8})"
    r"(?:\\{0,3}[\"'`](?P<quoted>[^\"'`\n\\]{3,1000})|(?P<secret>[^\s\"'`,;&<>(){}\[\]|\\]{3,1000}))"
)
_SAID = re.compile(
    rf"(?i)(?P<name>{_NAME})[ \t]{{1,3}}(?:is|was|ist|lautet|est|es)(?: now| jetzt)?[ \t]{{1,3}}"
    r"(?:[\"'`](?P<quoted>[^\"'`\n]{3,200})[\"'`]|(?P<secret>(?=[^\s\"'`]{0,60}\d)(?=[^\s\"'`]{0,60}[A-Za-z])[^\s\"'`]{6,200}))"
    rf"|(?P<name_zh>密码|口令|密钥)(?:是|为)[ \t]{{0,2}}(?P<secret_zh>(?!\[secret)[!-~]{{4,200}})"
)
_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_BODY = re.compile(r"(?:[A-Za-z0-9+/=\s:,]|\\n){0,20000}")
_KEY_SIGN, _KEY_ENDS, _KEY_CHARS = "-----BEGIN ", "-----END", 20_000
# What stands behind such a name in code, types and templates.
_NO_SECRETS = frozenset(
    (
        *("none", "null", "nil", "true", "false", "undefined", "str", "string", "bytes", "int", "integer", "bool"),
        *("boolean", "number", "object", "any", "text", "varchar", "optional", "required", "missing", "unset"),
        *("invalid", "expired", "empty", "redacted", "hidden", "masked", "removed", "yes", "not", "error", "failed"),
    )
)
_CODE = re.compile(r"(?:[A-Za-z_]\w{0,60}[.])?[A-Za-z_]\w{0,60}(?:[.]\w{1,60}){0,4}\Z", re.ASCII)
_PLACEHOLDER = re.compile(r"[$%<{~]|\.{1,2}/|/|\*{3}|x{3,}\Z|[•*…]{3}|\[secret|(?i:your[_-]|<?insert|changeme|example)")
_SPEAKS = re.compile(r"(?i)pass|token|secret|key|pwd|cred")
# Only lines with one of these, in lower case, are searched for what stands beside them: finding a word is 50 times as
# fast as a search for a pattern.
_TOKEN_HINTS = (
    *("sk-", "_live_", "_test_", "whsec_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "_pat_", "glpat-", "gldt-", "glrt-"),
    *("glptt-", "xox", "xapp-", "hooks.slack", "akia", "asia", "agpa", "aida", "aroa", "anpa", "anva", "aiza", "ya29"),
    *("gocspx", "hf_", "gsk_", "r8_", "tvly-", "npm_", "pypi-", "_v1_", "shp", "lsv2_", "sg.", "age-secret", "eyj"),
)
# The shortest that is searched for: "xoxb-" and ten characters.
_LEAST_TOKEN_CHARS = 15
_NAME_HINTS = ("pass", "kennw", "contras", "secret", "token", "pwd", "credential", "key", "connection", "密", "口令")
_KEY_HINTS = ("private key",)
_OPTION_HINTS = ("-u ", "-u\t", "-user", "-pass", "-token", "-api", "-secret")
# One search through more than this would hold up other threads. Nothing but private keys reaches over lines.
_SLICE_CHARS = 32_768
# So much is looked through at once for hints.
_BATCH_CHARS = 65_536


def redacted(text: str, patterns: Sequence[re.Pattern[str]] = ()) -> str:
    """`text` with a marker in place of each secret; the very same text where there is none.

    Args:
        text: any.
        patterns: the operator's own; what their group `secret` matches goes, else the whole match.
    """
    if any(_holds(text, hint) for hint in _KEY_HINTS):
        text = _without_keys(text)
    pieces = (_own_removed(_known_removed(piece, _SEARCHES), patterns) for piece in _pieces(text))
    return "".join(pieces)


def _holds(text: str, hint: str) -> bool:
    """Whether something stands in a text, in whatever case."""
    slices = range(0, len(text), _SLICE_CHARS)
    return any(hint in text[start : start + _SLICE_CHARS + len(hint)].lower() for start in slices)


def _known_removed(piece: str, kinds: Iterable[_Kind]) -> str:
    """Whole lines of a text, searched where they hold a hint."""
    lower = piece.lower()
    for hints, searches in kinds:
        lines = _hinted_lines(piece, lower, hints)
        if not lines:
            continue
        shown: list[str] = []
        done = 0
        for start, end in lines:
            line = piece[start:end]
            for search in searches:
                line = search(line)
            shown += (piece[done:start], line)
            done = end
        shown.append(piece[done:])
        if (cleaned := "".join(shown)) != piece:
            piece, lower = cleaned, cleaned.lower()
    return piece


def _hinted_lines(piece: str, lower: str, hints: Sequence[str]) -> list[tuple[int, int]]:
    """Where the lines begin and end that hold one of `hints`."""
    if len(lower) != len(piece):
        # A few letters are two in lower case; then places in one say nothing of the other.
        return [(0, len(piece))] if any(map(lower.__contains__, hints)) else []
    found: set[tuple[int, int]] = set()
    for hint in hints:
        end = 0
        while (at := lower.find(hint, end)) >= 0:
            end = piece.find("\n", at)
            end = len(piece) if end < 0 else end
            found.add((piece.rfind("\n", 0, at) + 1, end))
    return sorted(found)


def _own_removed(piece: str, patterns: Sequence[re.Pattern[str]]) -> str:
    for pattern in patterns:
        piece = pattern.sub(_own, piece)
    return piece


def _pieces(text: str) -> Iterator[str]:
    """A text in its order, cut behind lines, else behind words."""
    start = 0
    while len(text) - start > _SLICE_CHARS:
        least, most = start + _SLICE_CHARS // 2, start + _SLICE_CHARS
        at = text.rfind("\n", least, most)
        end = (at if at >= 0 else text.rfind(" ", least, most)) + 1 or most
        yield text[start:end]
        start = end
    yield text[start:]


@dataclass(frozen=True, slots=True)
class Redactor:
    """`redacted` with an operator's patterns."""

    patterns: tuple[re.Pattern[str], ...] = ()

    def __call__(self, text: str) -> str:
        """The text without its secrets."""
        return redacted(text, self.patterns)


@lru_cache(maxsize=64)
def redactor(patterns: tuple[str, ...]) -> Redactor:
    """A redactor whose patterns are compiled once."""
    return Redactor(tuple(map(re.compile, patterns)))


def plain(text: str) -> str:
    """`text` as it is, where nothing is to be redacted."""
    return text


class Cleaned:
    """Messages as the ledger may read them: without secrets, each cleaned when it is first looked at.

    `raw` stays, which nothing that is written down is taken from. A message is cleaned together with some older ones of
    people and assistants, or of tools, as it is: looking through many texts at once is several times as fast.
    """

    def __init__(self, messages: Sequence[Message], redact: Redact) -> None:
        self._messages = messages
        self._redact = redact
        self._found: list[Message | None] = [None] * len(messages)
        # An operator's pattern may match anything.
        self._looks_for_hints = isinstance(redact, Redactor) and not redact.patterns

    def __getitem__(self, position: int) -> Message:
        """The message at `position`, from 0."""
        found = self._found[position]
        return self._clean_from(position) if found is None else found

    def _clean_from(self, position: int) -> Message:
        chars, batch = 0, list[int]()
        is_stated = _is_stated(self._messages[position])
        for at in range(position, -1, -1):
            message = self._messages[at]
            if _is_stated(message) is not is_stated:
                continue
            if self._found[at] is not None or chars > _BATCH_CHARS:
                break
            batch.append(at)
            chars += len(message.text) + sum(len(call.arguments) for call in message.calls)
        cleaned = self._cleaned([self._messages[at] for at in batch])
        for at, message in zip(batch, cleaned, strict=True):
            self._found[at] = message
        return cleaned[0]

    def _cleaned(self, messages: Sequence[Message]) -> list[Message]:
        if not self._looks_for_hints:
            redact = self._redact
            return [
                _with_texts(message, [redact(message.text), *(redact(call.arguments) for call in message.calls)])
                for message in messages
            ]
        found = list(messages)
        texts: list[str] = []
        owners: list[int] = []
        for at, message in enumerate(messages):
            texts.append(message.text)
            owners.append(at)
            for call in message.calls:
                texts.append(call.arguments)
                owners.append(at)
        cleaned = {index: _redacted_by(texts[index], kinds) for index, kinds in _hinted(texts).items()}
        for at in {owners[index] for index in cleaned}:
            first = bisect_left(owners, at)
            found[at] = _with_texts(
                messages[at],
                [cleaned.get(index, texts[index]) for index in range(first, first + 1 + len(messages[at].calls))],
            )
        return found


def _is_stated(message: Message) -> bool:
    return message.role in ("user", "assistant")


def _with_texts(message: Message, texts: Sequence[str]) -> Message:
    text, *arguments = texts
    calls = tuple(
        call if call.arguments == each else replace(call, arguments=each)
        for call, each in zip(message.calls, arguments, strict=True)
    )
    return message if text == message.text and calls == message.calls else replace(message, text=text, calls=calls)


def _redacted_by(text: str, kinds: Set[int]) -> str:
    """`redacted`, of a text with hints of these kinds alone."""
    if _KEYS in kinds:
        return redacted(text)
    searches = [_SEARCHES[kind] for kind in sorted(kinds)]
    return "".join(_known_removed(piece, searches) for piece in _pieces(text))


def _hinted(texts: Sequence[str]) -> dict[int, set[int]]:
    """Which of many texts hold hints, and of which kinds."""
    # Each word is looked at once, however often it stands there: that is a fifth of the characters of a conversation.
    unique = set("\n".join(texts).split())
    words = "\n".join(unique).lower()
    long_words = "\n".join(word for word in unique if len(word) >= _LEAST_TOKEN_CHARS).lower()
    met = [(hint, kind) for hint, word, kind in _HINTS if word in (words if kind != _TOKENS else long_words)]
    found: dict[int, set[int]] = {}
    for index, text in enumerate(texts if met else ()):
        lower = text.lower()
        if kinds := {kind for hint, kind in met if hint in lower}:
            found[index] = kinds
    return found


def _unnamed(found: re.Match[str]) -> str:
    """A match with the marker in place of its one group that is a secret."""
    for name, value in found.groupdict().items():
        if value is not None and not name.startswith("name"):
            return _put(found, name)
    return found[0]


def _assigned(found: re.Match[str]) -> str:
    quoted, value = found["quoted"], found["secret"]
    if _PLACEHOLDER.match(quoted or value) or (quoted or value).lower().rstrip(".!?:") in _NO_SECRETS:
        return found[0]
    if quoted is not None:
        # A sentence in quotation marks is no secret.
        return found[0] if quoted.count(" ") > 3 else _put(found, "quoted")
    if found.string[found.end() : found.end() + 1] in ("(", "[", "{"):
        return found[0]
    is_code = _CODE.match(value) is not None and not any(map(str.isdigit, value))
    is_assigned = found["sign"][:1].isspace() or found["sign"][-1:] == "="
    # `token = parse`, `password=password`; an upper-case name is a variable of the environment.
    is_code = is_code and (is_assigned or "." in value) and not found["name"].isupper()
    if is_code or (_SPEAKS.search(value) and _CODE.match(value) and not any(map(str.isdigit, value))):
        return found[0]
    if value.isdigit() and found["name"].lower() == "token" and len(value) < 7:
        return found[0]
    return _put(found, "secret")


def _named_removed(pattern: re.Pattern[str], put: Callable[[re.Match[str]], str], line: str) -> str:
    """`pattern.sub(put, line)`, for a pattern that begins with `_NAME`; tried only where one may begin.

    A search that ignores case tries each of the names at each character.
    """
    lower = line.lower()
    if len(lower) != len(line) or not lower.isascii():
        return pattern.sub(put, line)
    shown: list[str] = []
    done = 0
    for begun in _NAME_BEGINS.finditer(lower):
        if begun.start() >= done and (found := pattern.match(line, begun.start())) is not None:
            shown += (line[done : found.start()], put(found))
            done = found.end()
    return "".join((*shown, line[done:])) if shown else line


def _own(found: re.Match[str]) -> str:
    return _put(found, "secret") if found.groupdict().get("secret") is not None else MARKER


def _put(found: re.Match[str], group: str) -> str:
    start, end = found.span(group)
    return found.string[found.start() : start] + MARKER + found.string[end : found.end()]


def _without_keys(text: str) -> str:
    kept: list[str] = []
    start = 0
    while (begun := _key_from(text, start)) is not None:
        kept += (text[start : begun.end()], MARKER)
        start = begun.end()
        if text.startswith(MARKER, start):
            start += len(MARKER)
            continue
        end = text.find(_KEY_ENDS, start, start + _KEY_CHARS)
        body = _KEY_BODY.match(text, start)
        start = end if end >= 0 else body.end() if body is not None else start
    return "".join((*kept, text[start:]))


def _key_from(text: str, start: int) -> re.Match[str] | None:
    """The next line that begins a private key."""
    for least in range(start, len(text), _SLICE_CHARS):
        most = min(least + _SLICE_CHARS, len(text))
        at = least - 1
        while (at := text.find(_KEY_SIGN, at + 1, most + len(_KEY_SIGN) - 1)) >= 0:
            if (begun := _KEY_BEGINS.match(text, at)) is not None:
                return begun
    return None


_SEARCHES: tuple[_Kind, ...] = (
    (_TOKEN_HINTS, (partial(_TOKEN.sub, MARKER),)),
    (("authorization", "bearer", "cookie"), (partial(_HEADER.sub, _unnamed),)),
    (("://",), (partial(_URL.sub, _unnamed),)),
    (_OPTION_HINTS, (partial(_OPTION.sub, _unnamed),)),
    (_NAME_HINTS, (partial(_named_removed, _ASSIGNED, _assigned), partial(_named_removed, _SAID, _unnamed))),
)
_KEYS, _TOKENS = -1, 0
# With the first of its words, which no blank divides, and the kind.
_HINTS = tuple(
    (hint, hint.split(maxsplit=1)[0], kind)
    for kind, hints in ((_KEYS, _KEY_HINTS), *((kind, hints) for kind, (hints, _) in enumerate(_SEARCHES)))
    for hint in hints
)
