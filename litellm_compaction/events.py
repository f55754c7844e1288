"""Events: one frozen record for each decision about a request, without text of a conversation, and its log line."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, TypeAlias

from pydantic import TypeAdapter, ValidationError

Outcome: TypeAlias = Literal["reused", "compacted", "fallback", "kept", "refused", "observed", "prepared", "given_up"]
# Of records that are written before they are needed, while no request waits.
AHEAD: frozenset[Outcome] = frozenset(("prepared", "given_up"))
# The reason of a reuse that puts such a record into effect.
USED_AHEAD = "prepared"
# The same below the trigger: the turn was expected to cross it, and the server has read the compacted prompt for it.
USED_EARLY = "early"
# The owner has undone the compaction of a conversation, which is kept as it is.
UNDONE = "undone"
# Why a compaction is not as configured although nothing is wrong: no summary has room, the client writes its own, or
# texts were shortened as the operator allows.
BY_PLAN = frozenset(("no_room", "client_summary", "attached", "excerpt"))
# Of an answer that the window has cut.
Cut: TypeAlias = Literal["attempts", "aborted", "unanswered"]
AnswerOutcome: TypeAlias = Literal["completed"] | Cut
ContinuationOutcome: TypeAlias = Literal["restarted"] | Cut
Phase: TypeAlias = Literal["pre_request", "tool_response", "streaming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionEvent:
    """One decision about a request above the trigger, or a record that was written, or given up, before it is needed.

    As many fields as a line of the history has; texts that do not apply are "".

    Attributes:
        model: `model_name` or deployment that was asked.
        tokens_before, tokens_after: estimated prompt as it came and as it was sent.
        rung: how the newest part of the record was condensed.
        duration_ms: from the first count to sending; it includes `summary_ms`.
        reason: one word for a fallback or a failure; `prepared`, below the trigger `early`: a record written ahead.
        compaction_id, continues_id: of the record that is sent, and of that from which a new one goes on.
        tenant: fingerprint of the request's owner (promise P9: never a name or a key).
        refusal: the earlier refusal as too long: `http_400`, `error_event`, `empty_stream`, `crash`.
        messages: the client's, without the leading system ones.
    """

    outcome: Outcome
    phase: Phase
    model: str
    window_tokens: int
    window_source: str
    tokens_before: int
    tokens_after: int
    covered_messages: int = 0
    round: int = 0
    strategy: str = "summary"
    pruning_model: str = ""
    summary_calls: int = 0
    duration_ms: float = 0.0
    reason: str = ""
    when_s: float = 0.0
    rung: str = ""
    summary_ms: float = 0.0
    compaction_id: str = ""
    continues_id: str = ""
    tenant: str = ""
    refusal: str = ""
    messages: int = 0
    excerpts: int = 0
    excerpt_tokens: int = 0

    @property
    def filled_percent(self) -> float:
        """The window's fill by the prompt as it came."""
        return 100.0 * self.tokens_before / self.window_tokens

    @property
    def log_level(self) -> int:
        """WARNING if the operator may have something to change."""
        is_made = self.outcome in ("compacted", "fallback")
        if self.outcome == "refused" or (is_made and self.reason not in ("", *BY_PLAN)):
            return logging.WARNING
        is_told = is_made or self.outcome in ("observed", "prepared") or self.reason == UNDONE
        return logging.INFO if is_told else logging.DEBUG

    @property
    def log_line(self) -> str:
        fill = "server overflow" if self.refusal else f"{self.filled_percent:.0f} %"
        line = (
            f"{self.outcome} model={self.model} phase={self.phase} {self.tokens_before}/{self.window_tokens} tokens "
            f"({fill}) before={self.tokens_before} after={self.tokens_after} covered={self.covered_messages} "
            f"round={self.round} calls={self.summary_calls} window_source={self.window_source} "
            f"pruning_model={self.pruning_model or '-'} duration_ms={self.duration_ms:.0f} "
            f"summary_ms={self.summary_ms:.0f}"
        )
        if self.excerpts:
            line += f" excerpts={self.excerpts} excerpt_tokens={self.excerpt_tokens}"
        line += f" reason={self.reason}" if self.reason else ""
        return f"{line} refusal={self.refusal}" if self.refusal else line


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationAlarm:
    """A reply whose usage says that the server did not see the whole prompt."""

    model: str
    window_tokens: int
    expected_tokens: int
    reported_tokens: int
    reason: str
    when_s: float = 0.0
    tenant: str = ""
    log_level: ClassVar[int] = logging.WARNING

    @property
    def log_line(self) -> str:
        return (
            f"truncation_alarm model={self.model} reason={self.reason} reported={self.reported_tokens} "
            f"expected={self.expected_tokens} window={self.window_tokens} tokens"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationEvent:
    """An answer that reached the limit while it was written.

    Attributes:
        outcome: it went on over a compacted prompt; or ended: no attempt left, no room to gain, or only thoughts.
        attempt: of `attempts`; their number if the answer has ended.
        tokens_before: of the window when it stopped, prompt and answer.
        tokens_after: the prompt with which it goes on.
        lost_tokens: of `tokens_before`, those of the answer that were thrown away, such as a call that was cut.
    """

    outcome: ContinuationOutcome
    model: str
    window_tokens: int
    attempt: int
    attempts: int
    tokens_before: int
    tokens_after: int
    lost_tokens: int = 0
    when_s: float = 0.0
    tenant: str = ""

    @property
    def gained_tokens(self) -> int:
        """Room that the compaction has made; the lost tokens have to be written again."""
        return max(self.tokens_before - self.lost_tokens - self.tokens_after, 0)

    @property
    def log_level(self) -> int:
        return logging.WARNING if self.outcome == "restarted" else logging.ERROR

    @property
    def log_line(self) -> str:
        return (
            f"restart outcome={self.outcome} model={self.model} attempt={self.attempt} of {self.attempts} "
            f"before={self.tokens_before} after={self.tokens_after} gained={self.gained_tokens} "
            f"window={self.window_tokens} tokens"
        )


Event: TypeAlias = CompactionEvent | TruncationAlarm | ContinuationEvent
Observer: TypeAlias = Callable[[Event], None]

# C0 and C1 controls, and all that changes the direction of reading or is not seen.
_COMMANDS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")

_NAMES: dict[type[Event], str] = {
    CompactionEvent: "compaction",
    TruncationAlarm: "truncation_alarm",
    ContinuationEvent: "answer",
}
_READERS: dict[str, TypeAdapter[Event]] = {name: TypeAdapter(kind) for kind, name in _NAMES.items()}


def harmless(text: str, *, keep: str = "") -> str:
    """`text` with its control characters spelled out, but those to `keep`, for a terminal or a log.

    Names of models and stored texts are strangers' (terminal escapes; bidirectional controls, CVE-2021-42574).
    """
    return _COMMANDS.sub(lambda found: found[0] if found[0] in keep else f"\\u{ord(found[0]):04x}", text)


class HarmlessRecords(logging.Filter):
    """Makes a log line's arguments harmless, and lets every line through."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(harmless(value) if isinstance(value, str) else value for value in record.args)
        return True


def event_to_json(event: Event) -> str:
    """One line: the event's fields, and its kind as `event`."""
    return json.dumps({"event": _NAMES[type(event)], **asdict(event)})


def event_from_json(text: str) -> Event | None:
    """The event in a line of `event_to_json`; None if this version cannot read it."""
    try:
        fields = json.loads(text)
        reader = _READERS.get(fields.pop("event"))
        return None if reader is None else reader.validate_python(fields)
    except (ValidationError, ValueError, TypeError, AttributeError, KeyError):
        return None


def log_observer(logger: logging.Logger) -> Observer:
    """Writes one line an event.

    INFO for a planned compaction, WARNING after trouble and for a restart, ERROR for a cut answer, else DEBUG.
    """

    def observe(event: Event) -> None:
        if logger.isEnabledFor(event.log_level):
            logger.log(event.log_level, "%s", event.log_line)

    return observe
