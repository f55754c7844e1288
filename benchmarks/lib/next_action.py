"""Next-action support: does a prompt still hold what the recorded next answer took from the conversation?

Nobody chooses what counts; the real next step does. `measuring.py` asks it of every compacted prompt. Written apart
from the ledger's extraction rules, and shares no pattern with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from tests.integration.validity import JsonDict, searchable, text_of

# What the newest messages hold is always upstream: it would say nothing about a compaction.
_NEWEST = 3
_QUOTED_CHARS = 60
_URL = r"https?://[^\s\"'<>()\[\]{}`]+"
_EMAIL = r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
_PATH = r"~?[\w.-]*(?:/[\w.@+-]+)+"
_NUMBER = r"(?<!\w)\d[\d.,:-]*\d(?!\w)"
_WORD = r"\w+(?:[.-]\w+)*"
_TOKEN = re.compile(f"(?P<url>{_URL})|(?P<email>{_EMAIL})|(?P<path>{_PATH})|(?P<number>{_NUMBER})|{_WORD}", re.ASCII)
_QUOTED = re.compile(
    r"`([^`\n]+)`|\"([^\"\n]+)\"|“([^”\n]+)”|„([^“”\n]+)[“”]|«([^»\n]+)»|「([^」\n]+)」|《([^》\n]+)》"
)
_IS_PATH = re.compile(r"[\d_.~]|^/|/.*/")
_IS_IDENTIFIER = re.compile(
    r"(?=.*\d)(?=.*[A-Za-z])|[A-Za-z0-9]_+[A-Za-z0-9]|[a-z][A-Z]|^[A-Za-z]\w+(?:\.[A-Za-z]\w+)+$", re.ASCII
)
_JOINS_DIGITS = ".,:-"


def tokens(answer: JsonDict) -> set[str]:
    """The identifiers, paths and numbers in an assistant's message: its text and the arguments of its calls.

    A token is, by its form alone and in any language: a URL; an e-mail address; a path (a word with a slash that also
    has a digit, a dot, an underscore, a second slash or a leading one); a number of two digits or more, with the
    separators inside it (`1,204.50`, `2024-05-20`, `10:30`); a word with letters and digits, an underscore inside, a
    capital behind a small letter, or dots between names (`a1b2c3`, `user_id`, `lastName`, `np.random`); a string of 3
    to 60 characters (2, where not ASCII) in quotes or backticks, or alone as an argument of a call. Plain words are
    none.
    """
    texts = [text_of(answer)]
    found: set[str] = set()
    for call in answer.get("tool_calls") or ():
        for text in _leaves(call["function"]["arguments"]):
            texts.append(text)
            if _is_quotable(text):
                found.add(text)
    for text in texts:
        for match in _TOKEN.finditer(text):
            token = match[0] if match["number"] else match[0].rstrip(".,:;-")
            is_known = match["url"] or match["email"] or match["number"]
            if is_known or (_IS_PATH if match["path"] else _IS_IDENTIFIER).search(token):
                found.add(token)
        found.update(quoted for groups in _QUOTED.findall(text) for quoted in groups if _is_quotable(quoted))
    return found


def taken(client: Sequence[JsonDict], answer: JsonDict) -> list[str]:
    """What `answer` takes from the conversation before its last three messages, and not from those three, sorted."""
    before, newest = searchable(client[:-_NEWEST]), searchable(client[-_NEWEST:])
    return sorted(token for token in tokens(answer) if stands(token, before) and not stands(token, newest))


def stands(token: str, text: str) -> bool:
    """Whether `token` stands in `text` as a word of its own: `12` neither in `2012` nor in `12.5`."""
    is_number = token[0].isdigit() and not any(map(str.isalpha, token))
    at = text.find(token)
    while at >= 0:
        if not (
            _continues(text[max(at - 2, 0) : at][::-1], is_number)
            or _continues(text[at + len(token) : at + len(token) + 2], is_number)
        ):
            return True
        at = text.find(token, at + 1)
    return False


def _continues(beside: str, is_number: bool) -> bool:
    """Whether a token goes on with these two characters, the nearer one first."""
    if not beside:
        return False
    is_word = beside[0].isascii() and (beside[0].isalnum() or beside[0] == "_")
    return is_word or (is_number and beside[0] in _JOINS_DIGITS and beside[1:].isdigit())


def _is_quotable(text: str) -> bool:
    least_chars = 3 if text.isascii() else 2
    return (
        least_chars <= len(text) <= _QUOTED_CHARS
        and "\n" not in text
        and text.strip() == text
        and any(map(str.isalnum, text))
    )


def _leaves(arguments: str) -> Iterator[str]:
    """The values of a call's arguments as they read; the text itself where it is no JSON."""
    try:
        pending = [json.loads(arguments)]
    except ValueError:
        yield arguments
        return
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str):
            yield value
        elif value is not None and not isinstance(value, bool):
            yield json.dumps(value)
