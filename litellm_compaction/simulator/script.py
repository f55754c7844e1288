"""The parts that tests and demos plug into the simulator, their arguments, and its record of each request.

The `Sdk` part is of the protocol that `rpc` speaks. It generates and loads nothing; a request to do so is a `fault`.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, get_args

from litellm_compaction.simulator.messages import JsonObject

Outcome = Literal["running", "ok", "error", "overflow", "mid_overflow", "pool_overflow", "fault", "disconnected"]


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
    """A point at which an answer waits until the gate is set; `reached` is set when the answer gets there."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def open(self) -> None:
        """Let the answer go on; the same as `set`."""
        self.set()


@dataclass(frozen=True)
class Reply:
    """An answer that the model generates.

    `tool_calls` are (name, JSON arguments). `gate` holds the answer after `gate_after_tokens` generated tokens, 0 being
    before the first delta; a plain `threading.Event` serves too. `status` or `raw_body` replace the whole generation by
    a plain HTTP response.
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


# no_upgrade     HTTP 404 in place of the socket, as of a reverse proxy that passes no upgrade
# error_200      HTTP 200 with LM Studio's error body, as it answers unknown paths (hermes-agent)
# no_handshake   the upgrade is never answered, as of a path that LM Studio's socket server does not know
# refused_key    the key is refused, whichever it is, and the socket closed
# mute           the socket opens, the key is never answered
# silent         the key is accepted, no call is answered
# late           each answer comes after `late_s`
# closes         the connection is cut when a call has come
# garbage        answers are no JSON
# wrong_shape    answers are JSON, of another shape than any that is known
# huge           answers are followed by 32 MB of spaces, which JSON allows
# unknown        no endpoint of `unknown` is known; a warning says so, without the id of the call
# unloads        the instance is unloaded after the first answer that concerns it
# busy           the template and the tokenizer wait until the instance generates nothing
SdkMode = Literal[
    "fine",
    "no_upgrade",
    "error_200",
    "no_handshake",
    "refused_key",
    "mute",
    "silent",
    "late",
    "closes",
    "garbage",
    "wrong_shape",
    "huge",
    "unknown",
    "unloads",
    "busy",
]
SDK_MODES: tuple[SdkMode, ...] = get_args(SdkMode)


@dataclass(eq=False, kw_only=True)
class SdkCall:
    """One message of a client; `endpoint` is "" for a message without one, such as keepAlive.

    `outcome` is "running" until it is known, "none" for a call that is never answered, "warning" for one that the
    server cannot read. Times are `time.monotonic()` seconds.
    """

    kind: str
    endpoint: str
    parameter: object
    socket: SdkSocket
    asked_s: float
    outcome: Literal["running", "result", "error", "warning", "none"] = "running"
    answered_s: float | None = None
    is_fault: bool = False


@dataclass(eq=False, kw_only=True)
class SdkSocket:
    """One connection, or an attempt at one; `namespace` is its path without the slash."""

    namespace: str
    headers: dict[str, str]
    opened_s: float
    client_identifier: str = ""
    client_passkey: str = ""
    is_accepted: bool = False
    closed_s: float | None = None


@dataclass(eq=False, kw_only=True)
class Sdk:
    """The protocol's behavior, and the record of its calls; settings may be changed while the simulator serves.

    `tokens_factor` and `extra_tokens` make its counts differ from the server's own `usage`; `unknown` are the
    endpoints that an older server does not have (all of them while it is empty), for the mode of that name.
    `after_call` is told of each call before its answer is sent.
    """

    mode: SdkMode = "fine"
    late_s: float = 3.0
    tokens_factor: float = 1.0
    extra_tokens: int = 0
    unknown: frozenset[str] = frozenset()
    overflow_policy: Literal["stopAtLimit", "truncateMiddle", "rollingWindow"] = "truncateMiddle"
    after_call: Callable[[SdkCall], None] | None = None
    sockets: list[SdkSocket] = field(default_factory=list, init=False)
    calls: list[SdkCall] = field(default_factory=list, init=False)

    def faults(self) -> list[SdkCall]:
        """Returns the calls that a counting client must never make: channels, signals, loading and unloading."""
        return [call for call in self.calls if call.is_fault]

    def open_sockets(self) -> list[SdkSocket]:
        """Returns the connections that were accepted and not closed since."""
        return [socket for socket in self.sockets if socket.is_accepted and socket.closed_s is None]

    def endpoints(self) -> list[str]:
        return [call.endpoint for call in self.calls if call.kind == "rpcCall"]

    def parameters(self, endpoint: str) -> list[JsonObject]:
        return [call.parameter for call in self.calls if call.endpoint == endpoint and isinstance(call.parameter, dict)]
