"""What tests and demos plug into the simulator, what they are told, and what it remembers of each request."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from litellm_compaction.simulator.refusals import JsonObject

Outcome = Literal["running", "ok", "error", "overflow", "mid_overflow", "pool_overflow", "fault", "disconnected"]


@dataclass(kw_only=True)
class RequestRecord:
    """One request. Token counts are the server's own (scaled); times are `time.monotonic()` seconds.

    `prompt_tokens` counts what was sent, `kept_tokens` what was left of it after truncation; of these
    `cached_tokens` came from the KV cache and `computed_tokens` had to be computed. `body` is the parsed
    JSON, None for a GET or for bytes that are not a JSON object. Header names are lower case.
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
    outcome: Outcome = "running"
    error: str = ""
    status: int = 0
    streamed: bool = False
    first_delta_s: float | None = None
    ended_s: float | None = None
    disconnected_s: float | None = None
    seen_text: str = field(default="", repr=False)


ReasoningField = Literal["reasoning_content", "reasoning", "think"]
FaultKind = Literal["500", "drop", "hang", "empty", "error_event", "slow"]
FaultPoint = Literal["before_first_delta", "mid_text"]
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Fault:
    """One failure of the server; `after_tokens` None means half of the answer (only for mid_text)."""

    kind: FaultKind
    at: FaultPoint = "before_first_delta"
    _: KW_ONLY
    after_tokens: int | None = None
    message: str = "generation failed"
    status: int = 500
    delay_ms: int = 1000


class Gate(threading.Event):
    """A point where an answer waits until the gate is set; `reached` is set when the answer gets there."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def open(self) -> None:
        """Let the answer go on; the same as `set`."""
        self.set()


@dataclass(frozen=True)
class Reply:
    """What the model generates.

    `tool_calls` are (name, JSON arguments). `gate` holds the answer after `gate_after_tokens` generated
    tokens, 0 being before the first delta; a plain `threading.Event` serves too. `status` or `raw_body`
    replace the whole generation by a plain HTTP response.
    """

    content: str = ""
    _: KW_ONLY
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] | list[tuple[str, str]] = ()
    finish_reason: FinishReason | None = None
    delay_ms: int = 0
    gate: threading.Event | None = None
    gate_after_tokens: int = 0
    fault: Fault | None = None
    status: int | None = None
    raw_body: JsonObject | str | bytes | None = None
    tokens_per_second: float | None = None
    chunk_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """What a script knows about the request it answers.

    `prompt_text` is what the model still sees: message contents, tool results, and tool-call arguments,
    joined by newlines, after any truncation; `sent_text` is the same before it. `index` counts inference
    calls from 0.
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


def default_reply(call: ChatCall) -> Reply:
    return Reply(f"This is answer {call.index + 1} of the simulated model.")


def numbered_words(n: int, start: int = 1) -> str:
    """The text `word1 word2 …` with n words, in which every loss and repetition shows."""
    return " ".join(f"word{number}" for number in range(start, start + n))


def summary_of_facts(
    prompt_text: str, facts: Iterable[str], keep_ratio: float = 1.0, max_chars: int | None = None
) -> str:
    """A structured markdown summary with those `facts` that stand literally in `prompt_text`.

    Args:
        keep_ratio: the share (0–1) of them that survives; which ones depends only on the fact's own text.
        max_chars: bound of the summary; facts are dropped from the end until it fits.
    """
    kept = [fact for fact in facts if fact in prompt_text and _stable_ratio(fact) < keep_ratio]
    summary = _summary(kept)
    while max_chars is not None and len(summary) > max_chars and kept:
        kept.pop()
        summary = _summary(kept)
    return summary if max_chars is None else summary[:max_chars]


def _summary(facts: list[str]) -> str:
    lines = "\n".join(f"- {fact}" for fact in facts) or "- none"
    return (
        "## Original task\nContinue the work that the user asked for.\n\n"
        f"## Key decisions and facts\n{lines}\n\n"
        f"## Current state\n{len(facts)} facts are carried over from the conversation.\n\n"
        "## Pending\n- [ ] Answer the newest request."
    )


def _stable_ratio(text: str) -> float:
    digest = hashlib.sha256(text.encode("utf-8", errors="replace")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
