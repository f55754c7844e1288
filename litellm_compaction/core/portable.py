"""A record that travels: kept by a client in place of its history, or read back from the messages that carry it.

To the engine it is a stored compaction of one message, the record itself. The library's messages carry it under
`## Session Summary`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from litellm_compaction.core.compaction import Compaction, kept_messages
from litellm_compaction.core.ledger import ANCHORS_HEAD, NAMES_HEAD, OPERATOR_HEAD, WORDS_HEAD
from litellm_compaction.core.messages import (
    FRAME_BEGIN,
    FRAME_END,
    Message,
    parse_message,
    system_prefix_length,
    user_message,
)
from litellm_compaction.core.prompts import FRAME_NOTE, INCORPORATES, LEDGER_TITLE, SUMMARY_TITLE, without_lead_in
from litellm_compaction.core.stretches import texts_of, with_texts

_HEADING = re.compile(r"\s*#{2,3} Session Summary\b(?:[^\n]*?\b(?i:round)\W{0,3}(\d{1,6})(?!\d))?[^\n]*\n?")
_INCORPORATES = re.escape(INCORPORATES).replace(r"\{rounds\}", r"\d{1,6}")
_OPENS_FRAME = re.compile(rf"{re.escape(FRAME_BEGIN)}\s*(?:{re.escape(FRAME_NOTE)}\s*)?(?:{_INCORPORATES})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Portable:
    """The part of a client's conversation that stands for its beginning."""

    base: Compaction | None  # The record, as a compaction of itself; None if every message stays.
    kept: tuple[Message, ...]  # Those beside it, oldest first, without leading system ones.
    spares_requests: bool = False  # User's messages that the client sends before it are read all the same.

    @property
    def record(self) -> str:
        return "" if self.base is None else self.base.record


def portable(messages: Sequence[Message], compaction: Compaction | None, *, spares_requests: bool = False) -> Portable:
    """Returns what stands for a whole conversation after `compaction`; None for one that stays as it is."""
    if compaction is None:
        rest = tuple(messages[system_prefix_length(messages) :])
        return Portable(base=None, kept=rest, spares_requests=spares_requests)
    base = _covering(1, compaction) if compaction.record else None
    return Portable(base=base, kept=kept_messages(messages, compaction), spares_requests=spares_requests)


# What a client goes on from stands for good, whatever the window: of its history nothing else is left.
_RECORD = Compaction(covered_messages=1, covered_hash="", start=1, level="summary", window_tokens=2**31)


def _covering(covered: int, record: Compaction) -> Compaction:
    """A record as one that covers the first messages of the conversation that it begins."""
    reach = covered if record.summary else 0
    known = replace(_RECORD, covered_messages=covered, start=covered, summarized_messages=reach)
    return replace(known, round=record.round, summary=record.summary, ledger=record.ledger, level=record.level)


# A conversation in full, and its record as compactions of its beginning; the larger one covers spared requests.
Unfolded: TypeAlias = tuple[tuple[Message, ...], tuple[Compaction, ...]]


def unfolded(messages: Sequence[Message], carried: Portable, placeholder: str) -> Unfolded:
    """Returns a conversation in which the message with the text `placeholder` stands for all before it."""
    prefix = system_prefix_length(messages)
    at = next((at for at, each in enumerate(messages) if at >= prefix and each.text == placeholder), None)
    if at is None:
        return tuple(messages), ()
    kept = {each.text for each in carried.kept if each.role == "user"}
    spared = [each for each in messages[prefix:at] if each.role == "user" and each.text not in kept]
    record = [_as_message(carried.base)] if carried.base else []
    bases = tuple(_covering(each, carried.base) for each in dict.fromkeys((1, 1 + len(spared))) if carried.base)
    return (*messages[:prefix], *record, *spared, *carried.kept, *messages[at + 1 :]), bases


def _as_message(base: Compaction) -> Message:
    """A record, sent as the user's; an answer's to the engine: it is none of the person's words."""
    return replace(user_message(base.record), role="assistant")


def bases_of(rest: Sequence[Message], hashes: Sequence[str], bases: Sequence[Compaction]) -> list[Compaction]:
    """Returns `bases` for a conversation that begins with their record and has this hash chain; none for any other."""
    own = [each for each in bases if each.covered_messages < len(hashes) and rest[0].text == each.record]
    return [replace(each, covered_hash=hashes[each.covered_messages]) for each in own]


def ledger_messages(ledger: str) -> list[Message]:
    """A ledger's quotations as messages that a new ledger is made from: users', system messages', tools', its names."""
    # Of several ledgers each has its own heads.
    items: dict[str, list[str]] = {WORDS_HEAD: [], OPERATOR_HEAD: [], ANCHORS_HEAD: [], NAMES_HEAD: []}
    head = WORDS_HEAD
    for line in ledger.split("\n"):
        if line in items:
            head = line
        elif line.startswith("- "):
            items[head].append(line.removeprefix("- "))
        elif items[head]:
            items[head][-1] += f"\n{line}"
    words, orders, lines, names = items.values()
    others = (("system", "\n".join(orders)), ("tool", "\n".join(lines)), ("assistant", ", ".join(names)))
    raw = [{"role": role, "content": content} for role, content in others if content]
    return [*map(user_message, words), *map(parse_message, raw)]


class Found(NamedTuple):
    """A record: its message's position, the record as a compaction of one message, the user's own words behind it."""

    at: int
    base: Compaction
    rest: Message | None

    def unfolded(self, messages: Sequence[Message]) -> tuple[list[Message], list[int]]:
        """Returns the conversation with the record in a message of its own, and for each message its old position."""
        own = list(enumerate(messages))
        own[self.at : self.at + 1] = [(self.at, self.rest)] if self.rest else []
        own.insert(system_prefix_length([message for _, message in own]), (self.at, _as_message(self.base)))
        return [message for _, message in own], [place for place, _ in own]


def read_record(messages: Sequence[Message]) -> Found | None:
    """The record that opens a conversation with `## Session Summary`, in a system message or the first other; or None.

    One of ours ends at its end marker, and the rest is the user's; of any other tool's all is the summary, of round 1
    if its heading has no number.
    """
    for at, message in enumerate(messages[: system_prefix_length(messages) + 1]):
        text, *others = texts_of(message) or [""]
        heading = None if message.role == "tool" or message.calls else _HEADING.match(text)
        if heading is not None:
            body, words, number = text[heading.end() :], "", max(int(heading[1] or 1), 1)
            if (opening := _OPENS_FRAME.match(body)) is not None:
                body, _, words = body[opening.end() :].partition(FRAME_END)
            summary, _, ledger = f"\n{body.strip()}\n".partition(f"\n{LEDGER_TITLE}\n")
            record = replace(_RECORD, round=number, summary=summary.strip(), ledger=ledger.strip())
            rest = with_texts(message, [without_lead_in(words.removeprefix("\n\n")), *others])
            return Found(at, _covering(1, record), rest if rest.text or rest.other_parts else None)
    return None


def headed(message: Message, round_number: int) -> Message:
    """The message that carries a record of ours, with the heading first of all, where `read_record` finds it."""
    (text, *others), title = texts_of(message) or [""], f"{SUMMARY_TITLE.format(round=round_number)}\n"
    own = [title + text.replace(title, "", 1), *others]
    return with_texts(message, own) if text.startswith(FRAME_BEGIN) else message
