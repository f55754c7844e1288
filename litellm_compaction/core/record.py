"""A record as it travels in a list of messages, read back: the library has no store, so the messages carry it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from litellm_compaction.core.compaction import Compaction, Segment
from litellm_compaction.core.messages import JsonValue, Message, parse_message, system_prefix_length, user_message
from litellm_compaction.core.portable import as_base
from litellm_compaction.core.prompts import (
    FRAME_BEGIN,
    FRAME_END,
    FRAME_NOTE,
    INCORPORATES,
    LEDGER_TITLE,
    SUMMARY_TITLE,
)
from litellm_compaction.core.strategies import without_lead_in

_HEADING = re.compile(r"\s*#{2,3} Session Summary\b(?P<rest>[^\n]*)\n?")
_ROUND = re.compile(r"\bround\W{0,3}(\d{1,6})(?!\d)", re.IGNORECASE)
_INCORPORATES = re.compile(r"\A" + re.escape(INCORPORATES).replace(r"\{rounds\}", r"\d{1,6}"))


class Found(NamedTuple):
    """A record: its message's position, the record as a compaction of one message, the user's own words behind it."""

    at: int
    base: Compaction
    rest: Message | None

    def unfolded(self, messages: Sequence[Message]) -> tuple[list[Message], list[int]]:
        """Returns the conversation with the record in a message of its own, and for each message its old position."""
        behind = [*messages[: self.at], *([self.rest] if self.rest else []), *messages[self.at + 1 :]]
        places = [at for at in range(len(messages)) if self.rest or at != self.at]
        prefix = system_prefix_length(behind)
        # An answer's to the engine, so that nothing takes it for the person's words.
        record = replace(user_message(self.base.record), role="assistant")
        return [*behind[:prefix], record, *behind[prefix:]], [*places[:prefix], self.at, *places[prefix:]]


def read_record(messages: Sequence[Message]) -> Found | None:
    """The record that opens a conversation, in a system message or in the first one behind those; None for none.

    It begins with `## Session Summary`. One of ours ends at its end marker, and the rest is the user's; of any other
    tool's the whole text is the summary. Without a number in its heading it counts as round 1.
    """
    for at, message in enumerate(messages[: system_prefix_length(messages) + 1]):
        text, _ = _opening(message)
        heading = None if message.role == "tool" or message.calls else _HEADING.match(text)
        if heading is not None:
            number = _ROUND.search(heading["rest"])
            body, words = _divided(text[heading.end() :])
            base = _base(body, max(int(number[1]), 1) if number else 1)
            return Found(at, base, _opened_with(message, words))
    return None


def headed(message: Message, round_number: int) -> Message:
    """The message that carries a record of ours, with the heading first of all, where `read_record` finds it."""
    text, _ = _opening(message)
    title = f"{SUMMARY_TITLE.format(round=round_number)}\n"
    if not text.startswith(FRAME_BEGIN):
        return message
    return _opened_with(message, title + text.replace(title, "", 1)) or message


def _base(body: str, round_number: int) -> Compaction:
    summary, _, ledger = (part.strip() for part in body.partition(f"\n{LEDGER_TITLE}\n"))
    segments = (Segment(text=summary, round=round_number, covered_messages=1),) if summary else ()
    record = Compaction(
        covered_messages=1,
        covered_hash="",
        start=1,
        round=round_number,
        segments=segments,
        ledger=ledger,
        level="summary",
    )
    return as_base(record, covered_messages=1)


def _divided(text: str) -> tuple[str, str]:
    """The text inside the frame, and the text after it."""
    if not text.startswith(FRAME_BEGIN):
        return text, ""
    inside, _, rest = text.removeprefix(FRAME_BEGIN).partition(FRAME_END)
    inside = _INCORPORATES.sub("", inside.strip().removeprefix(FRAME_NOTE).strip())
    return "\n" + inside.strip(), without_lead_in(rest.removeprefix("\n\n"))


def _opening(message: Message) -> tuple[str, list[JsonValue]]:
    """The text that a message begins with, and the content parts behind it."""
    content = message.raw.get("content")
    if isinstance(content, str):
        return content, []
    first, *others = content if isinstance(content, Sequence) and content else [""]
    text = first.get("text") if isinstance(first, Mapping) else first
    return text if isinstance(text, str) else "", others


def _opened_with(message: Message, text: str) -> Message | None:
    """`message` with another text in front; None if nothing is left of it."""
    content: JsonValue = text
    if not isinstance(message.raw.get("content"), str):
        content = [*([{"type": "text", "text": text}] if text else []), *_opening(message)[1]]
    return parse_message({**message.raw, "content": content}) if content else None
