"""Keys, tokens and passwords in a text, each replaced by a marker that leaves its name.

Asked for all that is written down: ledgers, summaries, stored records. Secrets are known by their form (prefixes of
their issuers, headers, URLs, private keys) or by the name before them; commit ids, uuids and paths stay, since the
ledger is there for them. Every repetition is bounded, so that hostile text costs linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TypeAlias

import regex

MARKER = "[secret removed]"
TOO_SLOW = "[left out: a pattern of `redact_patterns` takes too long here]"
Redact: TypeAlias = "Callable[[str], str]"

# Prefixes that issuers are known to give their keys; written from common knowledge, held by the table in the tests.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"sk-lm-[A-Za-z0-9_-]{4,60}:[A-Za-z0-9_-]{8,200}"
    r"|sk-(?=[A-Za-z_-]{0,60}\d)[A-Za-z0-9_-]{16,250}"
    r"|(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,200}|whsec_[A-Za-z0-9+/=]{16,200}"
    r"|gh[pousr]_[A-Za-z0-9]{20,255}|github_pat_[A-Za-z0-9_]{22,255}|gl(?:pat|dt|rt|ptt|cbt|ft|soat|agent|imt)-[A-Za-z0-9_-]{16,255}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,255}|xapp-[A-Za-z0-9-]{10,255}"
    r"|hooks\.slack\.com/services/[A-Za-z0-9/]{20,100}"
    r"|(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA|ANVA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|AIza[A-Za-z0-9_-]{30,60}|ya29\.[A-Za-z0-9_-]{20,400}|GOCSPX-[A-Za-z0-9_-]{20,60}"
    r"|hf_[A-Za-z0-9]{30,60}|gsk_[A-Za-z0-9]{30,80}|r8_[A-Za-z0-9]{30,60}|tvly-[A-Za-z0-9-]{20,60}"
    r"|npm_[A-Za-z0-9]{30,60}|pypi-[A-Za-z0-9_-]{40,400}|dckr_pat_[A-Za-z0-9_-]{20,60}"
    r"|do[opr]_v1_[a-f0-9]{40,80}|shp(?:at|ss|ca|pa)_[a-fA-F0-9]{30,40}|lsv2_[a-z]{2}_[A-Za-z0-9_]{30,80}"
    r"|SG\.[A-Za-z0-9_-]{16,40}\.[A-Za-z0-9_-]{16,60}|AGE-SECRET-KEY-1[A-Z0-9]{20,80}"
    r"|eyJ[A-Za-z0-9_-]{8,2000}\.eyJ[A-Za-z0-9_-]{4,6000}(?:\.[A-Za-z0-9_-]{0,2000})?"
    r"|xai-[A-Za-z0-9_-]{30,200}|pplx-[A-Za-z0-9]{30,100}|hv[sbr]\.[A-Za-z0-9_-]{20,300}|AT[AC]TT3[A-Za-z0-9_=-]{40,400}"
    r"|dapi[a-f0-9]{32}(?:-\d)?|lin_(?:api|oauth)_[A-Za-z0-9]{30,80}|ntn_[A-Za-z0-9]{40,60}|secret_[A-Za-z0-9]{43}"
    r"|\d{8,10}:AA[A-Za-z0-9_-]{32,36}|sbp_[a-f0-9]{40}|sb_secret_[A-Za-z0-9_-]{20,80}"
    r"|pscale_(?:tkn|pw|oauth)_[A-Za-z0-9_.=-]{30,80}|glsa_[A-Za-z0-9]{30,60}_[a-f0-9]{8}|glc_[A-Za-z0-9+/=]{30,400}"
    r"|NRAK-[A-Z0-9]{27}|sntry[su]_[A-Za-z0-9+/=_-]{40,400}|figd_[A-Za-z0-9_-]{30,60}"
    r"|PMAK-[a-f0-9]{24}-[a-f0-9]{34}|dp\.(?:pt|st|sa|ct|scim|audit)\.(?:[a-z0-9_-]{2,40}\.)?[A-Za-z0-9]{40,48}"
    r"|f(?:m2|o1)_[A-Za-z0-9+/=_-]{30,1000}|tskey-[a-z]{2,20}-[A-Za-z0-9-]{16,100}|key-[a-f0-9]{32}"
    r"|[a-f0-9]{32}-us\d{1,2}|EAAA[A-Za-z0-9_-]{56,80}|sq0[a-z]{3}-[A-Za-z0-9_-]{20,60}"
    r"|[A-Za-z0-9_~.]{3}\dQ~[A-Za-z0-9_~.-]{31,36}|1//0[A-Za-z0-9_-]{40,200}"
    r"|ops_eyJ[A-Za-z0-9+/=_-]{40,2000}|LTAI[A-Za-z0-9]{12,24}(?![A-Za-z0-9])|rubygems_[a-f0-9]{48}|EZ[AT]K[A-Za-z0-9]{54}"
    r"|duffel_(?:test|live)_[A-Za-z0-9_=-]{43}|dt0[a-z]01\.[A-Z0-9]{24}\.[A-Z0-9]{64}|FLWSECK(?:_TEST)?-[A-Za-z0-9-]{12,50}"
    r"|pul-[a-f0-9]{40}|rdme_[a-z0-9]{70}|tfp_[A-Za-z0-9]{59}|sgp_[A-Za-z0-9_]{40,80}|nvapi-[A-Za-z0-9_-]{40,100}"
    r"|\$(?:[156y]|apr1|2[abxy]|argon2(?:id|i|d))\$[./A-Za-z0-9$=,+]{20,200}"
    r")"
)
# Signatures of signed URLs and webhooks, and issuers whose keys are known beside the issuer's name alone.
_SIGNED = re.compile(
    r"(?i)(?:[?&;]sig|x-amz-signature|x-amz-security-token|x-goog-signature)=(?P<secret>[A-Za-z0-9%+/=_-]{30,2000})"
    r"|discord(?:app)?\.com/api/webhooks/\d{10,25}/(?P<hook>[A-Za-z0-9_-]{40,100})"
    r"|[\"']auth[\"'][ \t]{0,3}:[ \t]{0,3}[\"'](?P<docker>[A-Za-z0-9+/=]{12,4000})[\"']"
    r"|(?<![a-z0-9])(?P<twilio>sk[a-f0-9]{32}(?![a-z0-9])|pat[a-z0-9]{14}\.[a-f0-9]{64})"
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
    r"(?<!\S)(?:-u[ \t]{0,2}|--user[ \t=]{1,2})[\"']?[^\s:\"'/]{1,80}:"
    r"(?P<secret>(?!\[secret)(?!\d{1,6}(?!\S))[^\s\"'$]{3,200})"
    r"|(?<!\S)--?(?:password|passwd|passphrase|token|api-?key|secret)[ \t]{1,2}"
    r"(?P<value>(?!\[secret)(?!-)[^\s\"'$<\[]{4,400})"
)
# Commands and files that give a password without a name and sign before it.
_COMMAND = re.compile(
    r"(?i)\b(?:mysql\w{0,10}|mariadb(?:-\w{1,10})?)[ \t](?:[^\n|;&]{0,200}?[ \t])?"
    r"-p(?P<mysql>(?!\[secret)[^\s\"'$<-][^\s\"'$]{2,200})"
    r"|\b(?:docker|podman|helm)[ \t][^\n|;&]{0,40}?\blogin[ \t](?:[^\n|;&]{0,200}?[ \t])?-p[ \t]{1,3}[\"']?"
    r"(?P<login>(?!\[secret)[^\s\"'$<-][^\s\"'$]{2,200})"
    r"|[ \t]-pass(?:in|out)?[ \t]{1,3}pass:(?P<openssl>(?!\[secret)[^\s\"'$<]{3,200})"
    r"|\bconfigure[ \t]{1,3}set[ \t]{1,3}[\w.-]{0,60}(?:secret|token)[\w-]{0,30}"
    r"[ \t]{1,3}(?P<aws>(?!\[secret)[^\s\"'$<]{8,2000})"
    r"|\bsshpass[ \t]{1,3}-p[ \t]{0,3}[\"']?(?P<sshpass>(?!\[secret)[^\s\"'$<]{3,200})"
    r"|\bredis-cli[ \t](?:[^\n|;&]{0,200}?[ \t])?-a[ \t]{1,3}[\"']?(?P<redis>(?!\[secret)[^\s\"'$<]{3,200})"
    r"|\bhtpasswd(?![^\n]{0,600}\[secret)[ \t]{1,3}-\w{0,8}b\w{0,8}(?:[ \t]{1,3}\S{1,200}){1,2}"
    r"[ \t]{1,3}[\"']?(?P<htpasswd>[^\s\"'$<]{3,200})"
    r"|\blogin[ \t]{1,3}\S{1,100}[ \t]{1,3}password[ \t]{1,3}(?P<netrc>(?!\[secret)\S{3,200})"
    r"|(?<![\w.*-])[\w.*-]{1,100}:(?:5432|6432|\*):[\w.*-]{1,60}:[\w.*-]{1,60}:(?P<pgpass>(?!\[secret)[^\s:]{3,200})(?!\S)"
)
_NAME = (
    r"(?:password|passwd|passwort|kennwort|passphrase|contraseña|secret|token|pwd|credentials?"
    r"|(?:api|access|private|secret|client|auth|account|encryption|signing|master|storage|license|session)[ _-]?key"
    r"|(?:service|admin|webhook|deploy|hmac)[ _-]?key|mot de passe|senha|wachtwoord|hasło|пароль|パスワード|비밀번호"
    r"|client[_-]?secret|connection[_-]?string|密码|口令|密钥)"
)
_ASSIGNED = re.compile(
    rf"(?i)(?P<name>{_NAME}|[_-](?:pass|pw|auth))(?P<index>_?\d{{0,3}})\\{{0,3}}[\"'`\]]{{0,2}}"
    r"(?P<sign>[ \t]{0,8}(?:=>|:=|==|=|:|：)[ \t]{0,8})"
    r"(?:\\{0,3}[\"'`](?P<quoted>[^\"'`\n\\]{3,1000})|(?P<secret>[^\s\"'`,;&<>(){}\[\]|\\]{3,1000}))"
)
_SAID = re.compile(
    rf"(?i)(?P<name>{_NAME})[ \t]{{1,3}}(?:is|was|ist|lautet|est|es)(?: now| jetzt)?[ \t]{{1,3}}"
    r"(?:[\"'`](?P<quoted>[^\"'`\n]{3,200})[\"'`]|(?P<secret>(?=[^\s\"'`]{0,60}\d)(?=[^\s\"'`]{0,60}[A-Za-z])[^\s\"'`]{6,200}))"
    rf"|(?P<name_zh>密码|口令|密钥)(?:是|为)[ \t]{{0,2}}(?P<secret_zh>(?!\[secret)[!-~]{{4,200}})"
)
_FORM = re.compile(
    rf"(?i)<[\w:-]{{0,40}}{_NAME}(?:[ \t][^<>\n]{{0,100}})?>[ \t]{{0,8}}(?P<element>[^<>\s]{{3,400}})[ \t]{{0,8}}</"
    rf"|\b(?:define|setenv|putenv|set_?config|set_?property)\([ \t]{{0,3}}[\"'][\w.-]{{0,60}}{_NAME}[\"'][ \t]{{0,3}},"
    r"[ \t]{0,3}(?:\"(?P<defined>[^\"\n]{3,200})\"|'(?P<defined_so>[^'\n]{3,200})')"
    rf"|{_NAME}(?:[ \t]{{0,20}}[|│][ \t]{{0,20}}|\t{{1,3}})[\"'`]?"
    r"(?P<cell>(?=[^\s|│\"'`]{0,60}\d)(?=[^\s|│\"'`]{0,60}[a-z])[^\s|│\"'`]{6,200})"
    r"|\b(?:use|take|set|with)[ \t]{1,3}(?:[\"'`](?P<quoted>[^\"'`\n]{4,200})[\"'`]"
    r"|(?P<said>(?=[^\s\"'`]{0,60}\d)[^\s\"'`]{6,200}))"
    rf"[ \t]{{1,3}}as[ \t]{{1,3}}(?:the|your|my|its|a|our)[ \t]{{1,3}}(?:[a-z]{{1,20}}[ \t]){{0,2}}{_NAME}"
)
# Begins in one line and has its value in a later one; the names as in `_BROKEN_HINTS`.
_BROKEN = re.compile(
    rf"(?i)(?:{_NAME}[\"']?[ \t]{{0,3}}[:=][ \t]{{0,3}}(?:[|>][+-]?)?\r?\n[ \t]{{0,40}}[\"'`]?"
    r"(?P<next>(?![\w.-]{1,60}[\"']?:(?:\s|\Z))(?=[^\s\"'`]{0,60}\d)[^\s\"'`]{6,1000})"
    r"(?=[\"'`]?[ \t]{0,8}(?:[\r\n]|\Z))"
    rf"|variable[ \t]{{1,3}}\"[\w-]{{0,60}}{_NAME}\w{{0,20}}\"[ \t]{{0,3}}\{{"
    r"(?:[^\n{}]{0,200}\n){0,6}?[ \t]{0,20}default[ \t]{0,20}=[ \t]{0,3}\"(?P<default>[^\"\n]{3,400})\""
    r"|private-lines:[ \t]{1,3}\d{1,4}\r?\n(?P<putty>(?:[A-Za-z0-9+/=]{64}\r?\n){0,200}[A-Za-z0-9+/=]{1,64}))"
)
# Colour codes, as they are and as JSON, shells and Python write them, and characters without a width.
_HIDDEN = re.compile(
    r"(?:\x1b|\\{1,4}(?:u001b|x1b|033|e))\[[0-9;:?]{0,40}[@-~]|[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]",
    re.IGNORECASE,
)
_NO_WIDTH = tuple(map(chr, (0xAD, *range(0x200B, 0x2010), *range(0x2060, 0x2065), 0xFEFF)))
_ESCAPES = ("\x1b", "\\u001b[", "\\u001B[", "\\x1b[", "\\x1B[", "\\033[", "\\e[")
_KEY_BEGINS = regex.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_BODY = re.compile(r"(?:[A-Za-z0-9+/=\s:,]|\\n){0,20000}")
_KEY_TAIL = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINE = re.compile(r"[A-Za-z0-9+/=]{16,80}\r?\Z")
_KEY_ENDS, _KEY_CHARS = "-----END", 20_000
# Follows such a name in code, types and templates.
_NO_SECRETS = frozenset(
    (
        *("none", "null", "nil", "true", "false", "undefined", "str", "string", "bytes", "int", "integer", "bool"),
        *("boolean", "number", "object", "any", "text", "varchar", "optional", "required", "missing", "unset"),
        *("invalid", "expired", "empty", "redacted", "hidden", "masked", "removed", "yes", "not", "error", "failed"),
        *("include", "same-origin", "omit"),
    )
)
_CODE = re.compile(r"(?:[A-Za-z_]\w{0,60}[.])?[A-Za-z_]\w{0,60}(?:(?:[.]|::)\w{1,60}){0,4}\Z", re.ASCII)
_NAME_ALONE = re.compile(rf"(?i){_NAME}\Z")
_PLACEHOLDER = re.compile(
    # Of YAML, of stores of secrets, of ciphers.
    r"\*[A-Za-z_]\w{0,60}\Z|(?:vault|op|ssm|env|file):|(?:AES|RSA|SHA|HMAC|HS|RS|ES)-?\d{2,4}(?:-[A-Z]{3})?\Z"
    r"|[$%<{~]|\.{1,2}/|/|\*{3}|x{3,}\Z|[•*…]{3}|\[secret|(?i:your[_-]|<?insert|changeme|example)"
)
_SPEAKS = re.compile(r"(?i)pass|token|secret|key|pwd|cred")
# Only lines with one of these, in lower case, are searched for what stands beside them: finding a word is 50 times as
# fast as a search for a pattern.
_TOKEN_HINTS = (
    *("sk-", "_live_", "_test_", "whsec_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "_pat_", "glpat-", "gldt-", "glrt-"),
    *("glptt-", "xox", "xapp-", "hooks.slack", "akia", "asia", "agpa", "aida", "aroa", "anpa", "anva", "aiza", "ya29"),
    *("gocspx", "hf_", "gsk_", "r8_", "tvly-", "npm_", "pypi-", "_v1_", "shp", "lsv2_", "sg.", "age-secret", "eyj"),
    *("xai-", "pplx-", "hvs.", "hvb.", "hvr.", "atatt3", "atctt3", "dapi", "lin_", "ntn_", "secret_", ":aa", "sbp_"),
    *("pscale_", "glsa_", "glc_", "nrak-", "sntry", "figd_", "pmak-", "dp.", "fm2_", "fo1_", "tskey-", "key-", "-us"),
    *("eaaa", "sq0", "q~", "1//0", "glcbt-", "glft-", "glsoat-", "glagent-", "glimt-", "sb_secret"),
    *("ops_eyj", "ltai", "rubygems_", "ezak", "eztk", "duffel_", "dt0", "flwseck", "pul-", "rdme_", "tfp_", "sgp_"),
    *("nvapi-",),
    *("$1$", "$5$", "$6$", "$y$", "$apr1$", "$2a$", "$2b$", "$2x$", "$2y$", "$argon2"),
)
_SIGNED_HINTS = ("sig=", "signature=", "security-token=", "webhooks/", "twilio", "airtable", '"auth"', "'auth'")
_COMMAND_HINTS = (
    *("mysql", "mariadb", "sshpass", "redis-cli", "htpasswd", "login", "pass:", "configure"),
    *(":5432:", ":6432:", ":*:"),
)
_NAME_HINTS = (
    *("pass", "kennw", "contras", "secret", "token", "pwd", "credential", "key", "connection", "密", "口令", "senha"),
    *("mot de passe", "wachtwoord", "hasło", "пароль", "パスワード", "비밀번호", "_pw", "-pw", "_auth", "-auth"),
)
# One of these stands in what `_FORM` finds in ASCII, one in what `_SAID` finds.
_FORM_SIGNS = ("</", "(", "|", "\t", " as ")
_SAID_SIGNS = tuple(f"{blank}{verb}" for blank in " \t" for verb in ("is", "was", "lautet", "es"))
_BROKEN_HINTS = (
    *("password:\n", "password: |", "password: >", "passwort:\n", "passphrase:\n", "token:\n", "token: |", "token: >"),
    *("secret:\n", "secret: |", "secret: >", "key:\n", "key: |", "key: >", 'variable "', "private-lines:"),
)
_KEY_HINTS = ("private key", *_BROKEN_HINTS)
# One search through more than this would hold up other threads. Nothing but private keys reaches over lines.
_SLICE_CHARS = 32_768
# For one of an operator's patterns in one piece: a good one takes a few ms on a slow machine.
_OWN_LIMIT_S = 0.2


def redacted(text: str, patterns: Sequence[regex.Pattern[str]] = ()) -> str:
    """`text` with a marker in place of each secret; the very same text if there is none.

    Args:
        text: any.
        patterns: the operator's own; what their group `secret` matches goes, else the whole match. Of a text in which
            one takes longer than 0.2 s the rest is left out (`TOO_SLOW`): nothing is written down unsearched.
    """
    shown = _unhidden(text)
    if shown is not text:
        # Colours and widths are given up only if they hid a secret.
        return text if (searched := redacted(shown, patterns)) == shown else searched
    if _holds(text, _KEY_HINTS):
        text = _without_keys(text)
    cleaned: list[str] = []
    for piece in _pieces(text):
        for hints, signs, search in _SEARCHES:
            piece = _hinted_removed(piece, hints, signs, search)
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


def _unhidden(text: str) -> str:
    """`text` without colour codes and characters that have no width; the very same text if there are none."""
    if not any(map(text.__contains__, _ESCAPES if text.isascii() else (*_ESCAPES, *_NO_WIDTH))):
        return text
    found = "".join(_HIDDEN.sub("", piece) for piece in _pieces(text))
    return text if len(found) == len(text) else found


def _holds(text: str, hints: Sequence[str]) -> bool:
    """One of `hints`, which are in lower case, stands in a text, in whatever case."""
    most = max(map(len, hints))
    slices = (text[start : start + _SLICE_CHARS + most].lower() for start in range(0, len(text), _SLICE_CHARS))
    return any(any(map(lower.__contains__, hints)) for lower in slices)


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


def _hinted_removed(piece: str, hints: Sequence[str], signs: Sequence[str], search: Redact) -> str:
    """Searches the lines of a text that hold one of `hints` and, in ASCII, one of `signs`."""
    lower = piece.lower()
    if not any(map(lower.__contains__, hints)):
        return piece
    # A few letters are two in lower case; then places in one say nothing of the other.
    lines = {(0, len(piece))} if len(lower) != len(piece) else set(_hinted_lines(lower, hints))
    shown: list[str] = []
    done = 0
    for start, end in sorted(lines):
        line = piece[start:end]
        if not line.isascii() or any(map(line.lower().__contains__, signs)):
            shown += (piece[done:start], search(line))
            done = end
    return "".join((*shown, piece[done:]))


def _hinted_lines(lower: str, hints: Sequence[str]) -> Iterator[tuple[int, int]]:
    for hint in hints:
        end = 0
        while (at := lower.find(hint, end)) >= 0:
            end = lower.find("\n", at)
            end = len(lower) if end < 0 else end
            yield lower.rfind("\n", 0, at) + 1, end


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
    done = 0
    at = -1
    while (at := text.find(_KEY_ENDS, at + 1)) >= 0:
        begun = at
        if text.startswith("\n", at - 1) and _KEY_TAIL.match(text, at) is not None:
            while begun > done:
                start = text.rfind("\n", max(done, begun - 90), begun - 1) + 1 or done
                if _KEY_LINE.match(text[start : begun - 1]) is None:
                    break
                begun = start
        if begun < at:
            kept += (text[done:begun], MARKER, "\n")
            done = at
    return "".join((*kept, text[done:]))


# Hints and signs of which a line has to hold one each, in lower case, and the search through it.
_SEARCHES: tuple[tuple[Sequence[str], Sequence[str], Redact], ...] = (
    (_TOKEN_HINTS, ("",), partial(_TOKEN.sub, MARKER)),
    (("authorization", "bearer", "cookie"), ("",), partial(_HEADER.sub, _unnamed)),
    (("://",), ("@",), partial(_URL.sub, _unnamed)),
    (("-u", "-user", "-pass", "-token", "-api", "-secret"), ("",), partial(_OPTION.sub, _unnamed)),
    (_SIGNED_HINTS, ("",), partial(_SIGNED.sub, _unnamed)),
    (_COMMAND_HINTS, ("",), partial(_COMMAND.sub, _unnamed)),
    (_NAME_HINTS, _FORM_SIGNS, partial(_FORM.sub, _unnamed)),
    (_NAME_HINTS, ("=", ":"), partial(_ASSIGNED.sub, _assigned)),
    (_NAME_HINTS, _SAID_SIGNS, partial(_SAID.sub, _unnamed)),
)
