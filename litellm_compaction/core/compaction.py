"""A compaction as data, and the one function that applies it to a conversation.

A `Compaction` is made once, stored under the hash of exactly the messages that it covers, and applied purely:
the same conversation and the same compaction always give the same bytes, so the server's KV cache stays warm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from litellm_compaction.core.begun import Begun, begins, shown_behind
from litellm_compaction.core.boundaries import legal_cuts, pinned_positions
from litellm_compaction.core.edits import edited
from litellm_compaction.core.messages import (
    Message,
    joined_with,
    lead_length,
    user_message,
    with_text,
)
from litellm_compaction.core.prompts import LAST_REQUEST, frame
from litellm_compaction.core.pruned import Shortened, pruned

Rung = Literal["edit", "prune", "summary", "handoff", "truncate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one round's summary says, and how far it reaches.

    Attributes:
        covered_messages: how many messages after the leading system ones this and the earlier segments cover.
        covered_hash: the chain entry of that prefix.
    """

    text: str
    round: int
    covered_messages: int
    covered_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What stands in for the first messages of a conversation.

    Attributes:
        covered_messages: how many messages after the leading system ones it replaces or edits.
        covered_hash: the chain entry of exactly those messages.
        pinned: positions after the lead of the covered user messages that stay verbatim, behind the record or in their
            place.
        round: 1 for a conversation's first compaction.
        segments: frozen summaries, oldest first; they may reach less far than the compaction when a summary failed.
        ledger: verbatim anchors of everything covered.
        rung: how the newest part was condensed; `truncate` without a model that gave anything usable.
        window_tokens: of the window that it was made for.
        provisional: made while one huge result left hardly any room; good for this very conversation, but the next
            compaction goes on from an earlier, richer one.
        edited_from: position after the lead from which covered messages are sent edited (rung 1); those before it are
            replaced by the record. None: all are replaced.
        stubbed: positions after the lead of the tool results that are sent as stubs.
        dropped: positions after the lead of edited messages that are not sent at all (strategy `prune`).
        shortened: what is sent of edited messages instead of all their text.
        omissions: what a pruning model says of dropped and shortened messages, and records of other tools among them;
            it covers nothing on its own, so a later summary reads the originals.
        begun: how much of the first message that is shown the record stands for as well, or None: an answer was
            carried over the limit inside it.
    """

    covered_messages: int
    covered_hash: str
    pinned: tuple[int, ...]
    round: int
    segments: tuple[Segment, ...]
    ledger: str
    rung: Rung
    window_tokens: int = 0
    provisional: bool = False
    edited_from: int | None = None
    stubbed: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    shortened: tuple[Shortened, ...] = ()
    omissions: str = ""
    begun: Begun | None = None

    @property
    def replaced_messages(self) -> int:
        """How many messages after the lead the record stands for."""
        return self.covered_messages if self.edited_from is None else self.edited_from

    @property
    def summarized_messages(self) -> int:
        """How far the summaries reach, in messages after the lead."""
        return self.segments[-1].covered_messages if self.segments else 0

    @property
    def summary(self) -> str:
        """All segments as one text."""
        return "\n\n".join(segment.text for segment in self.segments)

    @property
    def record(self) -> str:
        """The text that travels before the first kept words; "" where stubs alone say everything."""
        if not (self.replaced_messages or self.segments or self.ledger or self.dropped or self.omissions):
            return ""
        said = "\n\n".join(filter(None, (self.summary, self.omissions)))
        text = frame(said, self.ledger, round_number=self.round)
        return text + LAST_REQUEST if self.rung == "handoff" else text


def compaction_id(scope: str, covered_hash: str) -> str:
    """A compaction's name in events and on the command line: 16 hexadecimal digits that say nothing else."""
    return hashlib.blake2b(f"{scope}/{covered_hash}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def apply(messages: Sequence[Message], compaction: Compaction, *, record: str | None = None) -> tuple[Message, ...]:
    """The conversation as the model gets it: lead, record in the first user message, kept tail.

    Where covered messages are edited (rung 1, or pruned) they stand behind the record, with their ids.
    The shape is `[S?] U (A | TC T…)* …`, which 31 of 31 chat templates render (llama.cpp's collection, 2026-11).
    Kept messages stay as they are, but for `null` content, which Qwen 3 and gpt-oss refuse: it becomes "".

    Args:
        messages: the original conversation; `is_applicable` holds.
        compaction: made for a conversation that begins with the same messages.
        record: what travels in place of the compaction's own record, or None.
    """
    lead = lead_length(messages)
    start = compaction.replaced_messages
    rest = _shown(messages[lead:], compaction)
    shown = [message for message in edited_part(rest, compaction) if message is not None]
    tail = [*shown, *rest[compaction.covered_messages :]]
    record = compaction.record if record is None else record
    if not record:
        return (*messages[:lead], *map(_without_null, tail))
    behind = [rest[position] for position in compaction.pinned if position < start]
    if tail and tail[0].role == "user":
        behind.append(tail[0])
        tail = tail[1:]
    carrier = joined_with(behind, record) if behind else user_message(record.removesuffix(LAST_REQUEST).rstrip("\n"))
    return (*messages[:lead], carrier, *map(_without_null, tail))


def edited_part(rest: Sequence[Message], compaction: Compaction) -> list[Message | None]:
    """The covered messages as they are sent, None for a dropped one; empty where the record replaces all of them.

    Args:
        rest: the messages after the leading system ones.
        compaction: made for them.
    """
    start = compaction.replaced_messages
    originals = rest[start : compaction.covered_messages]
    shown = edited(
        originals,
        {position - start for position in compaction.stubbed},
        untouched={position - start for position in compaction.pinned},
    )
    return pruned(originals, shown, frozenset(compaction.dropped), compaction.shortened, start=start)


def is_applicable(messages: Sequence[Message], compaction: Compaction, hashes: Sequence[str]) -> bool:
    """Whether `compaction` may stand in for the beginning of this conversation.

    Its messages must be this conversation's first ones, the cut legal here too, and what is being worked on must stay
    verbatim.
    """
    covered = compaction.covered_messages
    if covered >= len(hashes) or hashes[covered] != compaction.covered_hash:
        return False
    lead = lead_length(messages)
    if lead + covered not in legal_cuts(messages):
        return False
    first = lead + compaction.replaced_messages
    if compaction.begun is not None and not begins(messages[first], compaction.begun):
        return False
    return set(pinned_positions(messages, covered)) <= set(compaction.pinned)


def _shown(rest: Sequence[Message], compaction: Compaction) -> Sequence[Message]:
    """The messages after the lead, without the beginning that the record stands for."""
    start = compaction.replaced_messages
    if any(each.position == start for each in compaction.shortened):
        # A pruning has chosen pieces of the whole message since.
        return rest
    return shown_behind(rest, start, compaction.begun)


def _without_null(message: Message) -> Message:
    if message.role == "assistant" and message.raw.get("content") is None:
        return with_text(message, "")
    return message
