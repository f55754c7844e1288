"""Which value of a thing holds now, where a conversation has given it several.

Asked by the ledger: an older line keeps its words, and says what came later. Only what people and assistants state
counts; rows of a tool's output share their keys without replacing each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# "port = 8080", "`timeout`: 30 s", "the base url is now https://…", "Port ist 8080", "端口是8080".
_STATEMENT = re.compile(
    r"\b(?P<key>[A-Za-z_][\w.-]{2,40})[`'\"]?\s*(?:=|:|\bis(?: now)?\b|\bist(?: jetzt)?\b|\bes\b|\best\b|\bto\b)\s*"
    r"[`'\"]?(?P<value>(?!//)(?=[^\s,;`'\"]{0,80}[\d/_])[^\s,;`'\"]{1,80})"
    r"|(?P<key_zh>[\u4e00-\u9fff]{2,6}?)(?:改)?(?:是|为|成)\s*(?P<value_zh>(?=[^\s，。；]{0,40}\d)[^\s，。；]{1,40})"
)
_MARK = " (later: {values})"


def latest_values(texts: Iterable[str]) -> dict[str, str]:
    """The last stated value of everything that `texts`, oldest first, give a number, a path or an id to."""
    latest: dict[str, str] = {}
    for text in texts:
        for key, value in _statements(text):
            latest.pop(key, None)
            latest[key] = value
    return latest


def marked(line: str, latest: Mapping[str, str]) -> str:
    """`line`, with the values that hold now behind it where it states others."""
    changed = {key: latest[key] for key, value in _statements(line) if latest.get(key, value) != value}
    return (
        line + _MARK.format(values=", ".join(f"{key} {value}" for key, value in changed.items())) if changed else line
    )


def _statements(text: str) -> Iterable[tuple[str, str]]:
    for found in _STATEMENT.finditer(text):
        key, value = found["key"] or found["key_zh"], found["value"] or found["value_zh"]
        if not key.isdigit():
            yield key.lower(), value.rstrip(".:)")
