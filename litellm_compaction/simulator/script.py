"""What a script answers to a request, and the record of each request that a simulated server got."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from .messages import JsonObject

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(kw_only=True)
class RequestRecord:
    """One request. Token counts are the server's own (scaled); times are `time.monotonic()` seconds.

    `prompt_tokens` counts the prompt as sent, `kept_tokens` the rest after truncation; of these `cached_tokens` came
    from the KV cache and `computed_tokens` had to be computed. `body` is the parsed JSON, None for a GET or for bytes
    that are not a JSON object. Header names are lower case.
    """

    path: str
    method: str
    headers: dict[str, str]
    started_s: float
    body: dict[str, Any] | None = None
    model: str = ""
    instance_id: str = ""
    context_length: int = 0
    prompt_tokens: int = 0
    truncated: bool = False
    kept_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    content: str = ""
    finish_reason: str | None = None
    outcome: str = "running"
    error: str = ""
    status: int = 0
    streamed: bool = False
    first_delta_s: float | None = None
    ended_s: float | None = None
    disconnected_s: float | None = None
    seen_text: str = field(default="", repr=False)
    sent_text: str = field(default="", repr=False)


@dataclass(frozen=True)
class Reply:
    """An answer that the model generates; `tool_calls` are (name, JSON arguments)."""

    content: str = ""
    _: KW_ONLY
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] | list[tuple[str, str]] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """A request as its script sees it.

    `prompt_text` is the text that the model still sees: message contents, tool results, and tool-call arguments, joined
    by newlines, after any truncation; `sent_text` is the same before it. `index` counts inference calls from 0.
    """

    body: JsonObject
    messages: list[JsonObject]
    model: str
    instance_id: str
    prompt_text: str
    sent_text: str
    prompt_tokens: int
    context_length: int
    truncated: bool
    index: int
    stream: bool


Script = Callable[[ChatCall], "Reply | None"]


# How a request for a summary begins.
_ASKS_FOR_SUMMARY = re.compile(r"\b(?:write the record|summari[sz]\w*|condense)\b", re.IGNORECASE)
_OPENING_CHARS, _MOST_LINES, _LINE_CHARS = 400, 24, 160
_SAID = re.compile(r"^USER:\n(.+)", re.MULTILINE)
_HEADING = "### What the user said"


def default_reply(call: ChatCall) -> Reply:
    """A numbered answer; to a request for a summary the beginnings of what the user has said."""
    last = str(call.messages[-1].get("content") or "") if call.messages else ""
    if not _ASKS_FOR_SUMMARY.search(last[:_OPENING_CHARS]):
        return Reply(f"This is answer {call.index + 1} of the simulated model.")
    said = [str(each.get("content") or "") for each in call.messages[:-1] if each.get("role") == "user"]
    # An earlier summary of its own, or several to be merged into one, come first.
    summarized = [line[2:] for line in last.partition(_HEADING)[2].splitlines() if line.startswith("- ")]
    said = [*summarized, *said, *_SAID.findall(last)]
    lines = [f"- {' '.join(each.split())[:_LINE_CHARS]}" for each in said if each.strip()]
    return Reply("\n".join((_HEADING, *(lines[-_MOST_LINES:] or ["- nothing"]))))
