"""The operator's own prompts: read once, checked at start. Called by the settings.

A prompt is plain text in UTF-8. `{words}` and the other placeholders of its strategy are replaced by numbers; every
other brace is text. What is to be condensed follows the prompt, or stands before it; it needs no placeholder.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

StrategyName = Literal["summary", "prune", "handoff"]

# A longer instruction takes a small model's window from the conversation.
_MAX_BYTES = 16 * 1024
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


class Placeholders(NamedTuple):
    """What a strategy's prompt must hold, and what it may hold."""

    required: tuple[str, ...]
    optional: tuple[str, ...]


PLACEHOLDERS: Mapping[StrategyName, Placeholders] = {
    "summary": Placeholders(("words",), ("round",)),
    "handoff": Placeholders(("words",), ("round",)),
    "prune": Placeholders(("words", "target_tokens"), ("current_tokens", "limit_tokens", "round")),
}


@functools.lru_cache(maxsize=64)
def read_prompt(strategy: StrategyName, path: str) -> str:
    """The prompt in the file `path`, checked; a file is read once in the life of a process.

    Args:
        strategy: whose placeholders it has.
        path: absolute, relative to the working directory, or with `~`.

    Raises:
        ValueError: it cannot be read, or its placeholders are not the strategy's; says what is allowed.
    """
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{strategy}: {path}: {error.strerror}; allowed: a readable text file") from None
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{strategy}: {path}: longer than allowed: {_MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise ValueError(f"{strategy}: {path}: allowed: text in UTF-8") from None
    required, optional = PLACEHOLDERS[strategy]
    found = set(_PLACEHOLDER.findall(text))
    unknown = sorted(found - {*required, *optional})
    missing = [name for name in required if name not in found]
    if unknown or missing:
        wrong = [*(f"unknown placeholder {{{name}}}" for name in unknown), *(f"without {{{name}}}" for name in missing)]
        known = ", ".join(f"{{{name}}}" for name in required)
        more = ", ".join(f"{{{name}}}" for name in optional)
        raise ValueError(f"{strategy}: {path}: {', '.join(wrong)}; required: {known}; allowed besides: {more}")
    return text
