"""A record as it travels in a list of messages, written so that a later compaction can read it back.

Used by the library, whose callers have no store: there the messages carry the earlier summary, round and ledger.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from litellm_compaction.core.ledger import ANCHORS_HEAD, NAMES_HEAD, OPERATOR_HEAD, WORDS_HEAD
from litellm_compaction.core.messages import JsonValue, Message, parse_message, user_message
from litellm_compaction.core.prompts import FRAME_BEGIN, FRAME_END, FRAME_NOTE, INCORPORATES, LEDGER_TITLE, frame
from litellm_compaction.core.strategies import without_lead_in

_HEADING = re.compile(r"\s*## Session Summary\b(?P<rest>[^\n]*)\n?")
_INCORPORATES = re.compile(r"\A" + re.escape(INCORPORATES).replace(r"\{rounds\}", r"\d{1,6}"))
_ROUND = re.compile(r"\bround\W{0,3}(\d{1,6})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An earlier compaction's summary, its ledger ("" for none) and its round, from 1."""

    summary: str
    ledger: str
    round: int


class Found(NamedTuple):
    """A record, and the rest of its message: the user's own words, or None."""

    record: Record
    rest: Message | None


def write_record(record: Record, *, lead_in: str = "") -> str:
    """The leading text of the first user message, as `frame` makes it, but with the heading first; then `lead_in`."""
    return frame(record.summary, record.ledger, round_number=record.round, headed=True) + lead_in


def read_record(message: Message) -> Found | None:
    """The record with which `message` begins, or None.

    A record begins with `## Session Summary`. One of ours ends at its end marker (and a strategy's lead-in), and the
    rest is the user's; of any other tool's the whole text is the summary. Without a number in its heading it counts
    as round 1. Tool results, and messages that call tools, are never records.
    """
    if message.role == "tool" or message.calls:
        return None
    content = message.raw.get("content")
    text = _first_text(content)
    heading = _HEADING.match(text)
    if heading is None:
        return None
    number = _ROUND.search(heading["rest"])
    body, rest = _divided(text[heading.end() :])
    summary, _, ledger = body.partition(f"\n{LEDGER_TITLE}\n")
    record = Record(summary=summary.strip(), ledger=ledger.strip(), round=max(int(number[1]), 1) if number else 1)
    return Found(record, _rest_of(message, content, rest))


def taken_out(messages: Sequence[Message]) -> tuple[Record | None, list[Message]]:
    """Returns the records that messages begin with, joined, None for none; and the messages without them."""
    found = [(message, read_record(message)) for message in messages]
    rest = [message if each is None else each.rest for message, each in found]
    return joined([each.record for _, each in found if each]), [message for message in rest if message is not None]


def joined(records: Sequence[Record]) -> Record | None:
    if not records:
        return None
    return Record(
        summary="\n\n".join(record.summary for record in records if record.summary),
        ledger="\n".join(record.ledger for record in records if record.ledger),
        round=max(record.round for record in records),
    )


def ledger_messages(ledger: str) -> list[Message]:
    """A ledger's quotations as messages that a new ledger is made from: users' words, system messages', then the rest.

    Those come back as a tool's, so that they give way to newer ones; names as the assistant's, who had them in use.
    """
    # Of several ledgers each has its own heads.
    words: list[str] = []
    lines: list[str] = []
    names: list[str] = []
    orders: list[str] = []
    heads = {WORDS_HEAD: words, OPERATOR_HEAD: orders, ANCHORS_HEAD: lines, NAMES_HEAD: names}
    items = words
    for line in ledger.split("\n"):
        if line in heads:
            items = heads[line]
        elif line.startswith("- "):
            items.append(line.removeprefix("- "))
        elif items:
            items[-1] += f"\n{line}"
    others = (("system", "\n".join(orders)), ("tool", "\n".join(lines)), ("assistant", ", ".join(names)))
    return [
        *map(user_message, words),
        *(parse_message({"role": role, "content": content}) for role, content in others if content),
    ]


def listable(message: Message) -> Message:
    """A user's message whose own lists are indented, so that the ledger's items can be told apart when read back."""
    if message.role != "user" or "\n- " not in message.text:
        return message
    return user_message(message.text.replace("\n- ", "\n  - "))


def _divided(text: str) -> tuple[str, str]:
    """The text inside the frame, and the text after it."""
    if not text.startswith(FRAME_BEGIN):
        return text, ""
    inside, _, rest = text.removeprefix(FRAME_BEGIN).partition(FRAME_END)
    inside = _INCORPORATES.sub("", inside.strip().removeprefix(FRAME_NOTE).strip())
    return "\n" + inside.strip(), without_lead_in(rest.removeprefix("\n\n"))


def _first_text(content: JsonValue) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and content:
        part = content[0]
        text = part.get("text") if isinstance(part, Mapping) else part
        return text if isinstance(text, str) else ""
    return ""


def _rest_of(message: Message, content: JsonValue, rest: str) -> Message | None:
    if isinstance(content, str) or not isinstance(content, Sequence):
        return parse_message({**message.raw, "content": rest}) if rest else None
    parts = [*([{"type": "text", "text": rest}] if rest else []), *content[1:]]
    return parse_message({**message.raw, "content": parts}) if parts else None
