"""A compaction as data, and the one function that applies it to a conversation.

It is made once, stored under the hash of exactly the messages that it covers, and applied purely: the same bytes every
time keep the server's KV cache warm. Of messages that it shows shorter it holds no text but their sizes, so a
stored one can put nothing else into their place.

An answer that is carried over the limit is covered up to a place inside it. In the client's next turn it is one
message, so a record that reaches into it says how far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from litellm_compaction.core.clearing import (
    ImagePlace,
    StubSize,
    called,
    edited,
    image_parts,
    without_data,
)
from litellm_compaction.core.continuation.text import open_think
from litellm_compaction.core.cut_points import shows_results
from litellm_compaction.core.excerpts import ends
from litellm_compaction.core.identity import Seen
from litellm_compaction.core.messages import (
    JsonValue,
    Message,
    merged,
    normal_text,
    parse_message,
    system_prefix_length,
    with_text,
)
from litellm_compaction.core.prompts import defused, frame
from litellm_compaction.core.rounds import calls_by_position
from litellm_compaction.core.strategies import lead_in

REMOVED = "[An earlier message was removed.]"
# Of the words that came with an image.
_LABEL_CHARS = 80


class Shown(NamedTuple):
    """The form in which a covered message is sent.

    Attributes:
        position: of the message, after the leading system ones.
        how: `stub` for a tool result as one line, or a message with a line for the data that is attached to it; `gone`
            for nothing; or how many characters of the head and the tail of its normal text, 0 for a line in its place.
    """

    position: int
    how: Literal["stub", "gone"] | int


def as_stubs(positions: Iterable[int]) -> tuple[Shown, ...]:
    return tuple(Shown(position, "stub") for position in positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialCoverage:
    """The beginning of a message that a record stands for.

    Attributes:
        chars: how long it is, in characters of the message's normal text.
        text_hash: of exactly those characters.
    """

    chars: int
    text_hash: str


def part_covered_by(text: str) -> PartialCoverage | None:
    """Returns `text`, without our notices, as the beginning of a longer answer; None if no later turn shows it."""
    # Inside a reasoning block everything so far belongs to the block, which is no part of a normal text.
    if open_think(text):
        return None
    # With a sign after it: white space before the next word is part of the covered text.
    seen = normal_text(parse_message({"role": "assistant", "content": f"{text}|"}))[:-1]
    return PartialCoverage(chars=len(seen), text_hash=_hash(seen)) if seen else None


def begins(message: Message, part: PartialCoverage) -> bool:
    """Returns True if `message` is an answer that opens with exactly the covered text, and goes on."""
    text = normal_text(message)
    return message.role == "assistant" and len(text) > part.chars and _hash(text[: part.chars]) == part.text_hash


def behind(message: Message, part: PartialCoverage) -> Message:
    """`message` after that part; its calls stay."""
    return with_text(message, normal_text(message)[part.chars :])


def shown_behind(messages: Sequence[Message], position: int, part: PartialCoverage | None) -> Sequence[Message]:
    """The same messages; of the one at `position` only the rest after `part`."""
    if part is None or position >= len(messages):
        return messages
    return [*messages[:position], behind(messages[position], part), *messages[position + 1 :]]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One round's summary; it and the earlier segments cover so many messages after the leading system ones."""

    text: str
    round: int
    covered_messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Stands in for the first messages of a conversation.

    Attributes:
        covered_messages: how many messages after the leading system ones it replaces or edits.
        covered_hash: the chain entry of exactly those messages.
        pinned: positions after the prefix of covered messages that stay verbatim, in their place or with the record:
            the user's in its message; after it a call and its results, whose answer was carried over the limit.
        round: 1 for a conversation's first compaction.
        segments: frozen summaries, oldest first; they may reach less far than the compaction when a summary failed.
        ledger: verbatim anchors of everything covered.
        level: of the newest part: a strategy's name, `edit` without a model, `truncate` if no model's text was usable.
        window_tokens: of the window that it was made for.
        provisional: made while one huge result left hardly any room; good for this very conversation, but the next
            compaction goes on from an earlier, richer one.
        edited_from: position after the prefix from which covered messages are sent edited (rung 1); those before it are
            replaced by the record. None: all are replaced.
        shown: of the messages that are sent, but not as they are; ascending by position. Only a stub's position may be
            one of those that the record replaces, if it is pinned.
        stub_sizes: of results that leave a stub, at most one of each.
        omissions: a pruning model's words about messages that are gone or shorter; it covers nothing on its own, so a
            later summary reads the originals.
        covered_part: the beginning of the first shown message if the record stands for it as well, else None: an answer
            was carried over the limit inside that message.
        ahead: written before anything had to be compacted; it takes effect when that time comes, and not earlier.
        early: was `ahead`, and takes effect at once, since the server was made to read what it leaves; not used yet.
        images: those of covered messages that are sent all the same, by positions after the prefix: in their place, or
            beside the record if that stands for their message. Those of pinned messages are not among them.
        undone_messages: above 0 for the mark in place of a record that its owner has undone: a conversation of at most
            so many messages after the leading system ones is sent as it is while it fits. It stands for nothing.
        words_hash: the entry of the covered messages in the chain of words alone; "" if it must be these very messages.
        seen: what the covered messages were, for a client that clears data in them; empty without `words_hash`.
    """

    covered_messages: int
    covered_hash: str
    pinned: tuple[int, ...]
    round: int
    segments: tuple[Segment, ...]
    ledger: str
    level: str
    window_tokens: int = 0
    provisional: bool = False
    edited_from: int | None = None
    shown: tuple[Shown, ...] = ()
    stub_sizes: tuple[StubSize, ...] = ()
    omissions: str = ""
    covered_part: PartialCoverage | None = None
    ahead: bool = False
    early: bool = False
    images: tuple[ImagePlace, ...] = ()
    undone_messages: int = 0
    words_hash: str = ""
    seen: tuple[Seen, ...] = ()

    @property
    def is_mark(self) -> bool:
        """It stands in the place of a record that is gone."""
        return self.undone_messages > 0

    @property
    def stubbed(self) -> tuple[int, ...]:
        """The positions of stubs."""
        return tuple(position for position, how in self.shown if how == "stub")

    @property
    def dropped(self) -> tuple[int, ...]:
        """The positions of messages that are not sent at all, by a model's choice."""
        return tuple(position for position, how in self.shown if how == "gone")

    @property
    def record_images(self) -> tuple[ImagePlace, ...]:
        """The images that travel beside the record."""
        return tuple(place for place in self.images if place[0] < self.replaced_messages)

    @property
    def replaced_messages(self) -> int:
        """The number of messages after the prefix that the record stands for."""
        return self.covered_messages if self.edited_from is None else self.edited_from

    @property
    def hidden(self) -> frozenset[int]:
        """The positions of covered messages that the model does not see as they were."""
        replaced = set(range(self.replaced_messages)) - {*self.pinned}
        return frozenset(replaced.union(position for position, _ in self.shown))

    @property
    def summarized_messages(self) -> int:
        """The reach of the summaries, in messages after the prefix."""
        return self.segments[-1].covered_messages if self.segments else 0

    @property
    def summary(self) -> str:
        """All segments as one text."""
        return "\n\n".join(segment.text for segment in self.segments)

    @property
    def model_text(self) -> str:
        """The models' own text about all that is not shown any more."""
        return "\n\n".join(filter(None, (self.summary, self.omissions)))

    @property
    def record(self) -> str:
        """The text that travels before the first kept words; "" where stubs alone say everything."""
        if not (self.replaced_messages or self.segments or self.ledger or self.dropped or self.omissions):
            return ""
        return frame(self.model_text, self.ledger, round_number=self.round) + lead_in(self.level)


def mark_of(compaction: Compaction, *, undone_messages: int) -> Compaction:
    """Returns the mark that is stored in place of a record that its owner has undone."""
    return Compaction(
        covered_messages=compaction.covered_messages,
        covered_hash=compaction.covered_hash,
        pinned=(),
        round=compaction.round,
        segments=(),
        ledger="",
        level="truncate",
        undone_messages=undone_messages,
        words_hash=compaction.words_hash,
        seen=compaction.seen,
    )


def is_sound(compaction: Compaction) -> bool:
    """Returns True if all positions lie within the covered messages: a shared store may hold anything."""
    covered, start = compaction.covered_messages, compaction.replaced_messages
    stubs = (each.position for each in compaction.stub_sizes)
    positions = (*compaction.pinned, *stubs, *(at for at, _ in (*compaction.shown, *compaction.images)))
    return (
        0 <= start <= covered
        and all(0 <= position < covered for position in positions)
        and all(isinstance(how, str) or (start <= position and how >= 0) for position, how in compaction.shown)
        and all(0 <= segment.covered_messages <= covered for segment in compaction.segments)
        and all(index >= 0 for _, index in compaction.images)
        and (compaction.covered_part is None or compaction.covered_part.chars >= 0)
        and len(compaction.seen) in (0, covered)
        and all(each.entry == compaction.covered_hash for each in compaction.seen[-1:])
    )


def compaction_id(scope: str, covered_hash: str) -> str:
    """A compaction's name in events and on the command line: 16 hexadecimal digits that say nothing else."""
    return hashlib.blake2b(f"{scope}/{covered_hash}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def apply(messages: Sequence[Message], compaction: Compaction, *, record: str | None = None) -> tuple[Message, ...]:
    """The conversation as the model gets it: prefix, record in the first user message, kept tail.

    Edited covered messages (rung 1, or pruned) stand after the record, with their ids.
    The shape is `[S?] U (A | TC T…)* …`, which 31 of 31 chat templates render (llama.cpp's collection).
    Kept messages stay as they are, but for `null` content, which Qwen 3 and gpt-oss refuse: it becomes "".

    Args:
        messages: the original conversation.
        compaction: made for a conversation that begins with the same messages.
        record: travels in place of the compaction's own record, or None.
    """
    prefix = system_prefix_length(messages)
    rest = messages[prefix:]
    record = compaction.record if record is None else record
    behind, tail = _beside_record(rest, compaction)
    if not record:
        return (*messages[:prefix], *map(_without_null, tail))
    if tail and tail[0].role == "user":
        behind.append(tail[0])
        tail = tail[1:]
    carrier = _carrier(record, behind, _labelled(rest, compaction.record_images), lead_in(compaction.level))
    return (*messages[:prefix], carrier, *map(_without_null, tail))


def kept_messages(messages: Sequence[Message], compaction: Compaction) -> tuple[Message, ...]:
    """The messages that `compaction` leaves of a conversation beside its record, in order, without leading system ones.

    The record's images come first, in a message of their own.
    """
    rest = messages[system_prefix_length(messages) :]
    images = _labelled(rest, compaction.record_images)
    behind, tail = _beside_record(rest, compaction)
    pictures = [parse_message({"role": "user", "content": images})] if images else []
    return (*pictures, *behind, *map(_without_null, tail))


def _beside_record(rest: Sequence[Message], compaction: Compaction) -> tuple[list[Message], list[Message]]:
    """The user's messages that travel with the record, and the messages that follow it."""
    start = compaction.replaced_messages
    rest = shown_rest(rest, compaction)
    shown = [message for message in edited_part(rest, compaction) if message is not None]
    pinned = [position for position in compaction.pinned if position < start]
    behind = [
        without_data(rest[position]) if position in compaction.stubbed else rest[position]
        for position in pinned
        if rest[position].role == "user"
    ]
    others = (rest[position] for position in pinned if rest[position].role != "user")
    return behind, [*others, *shown, *rest[compaction.covered_messages :]]


def _carrier(record: str, behind: Sequence[Message], images: Sequence[JsonValue], opening: str) -> Message:
    """The first user message after a compaction: the record, images of what it stands for, then the user's own words.

    Before those stands `opening`, "" for nothing, with which the record ends.
    """
    alone = record.removesuffix(opening).rstrip("\n")
    if not behind:
        content = [{"type": "text", "text": alone}, *images] if images else alone
        return parse_message({"role": "user", "content": content})
    if not images:
        return merged(behind, record)
    return merged(behind, alone, [*images, *([{"type": "text", "text": opening}] if opening else [])])


def _labelled(rest: Sequence[Message], places: Sequence[ImagePlace]) -> list[JsonValue]:
    """Images, each after a few words about its origin; those words are data like the record's."""
    if not places:
        return []
    calls = calls_by_position(rest)
    parts: list[JsonValue] = []
    for at, index in places:
        message = rest[at]
        if message.role == "tool" or shows_results(message):
            source = f"result of {called(calls.get(at) or calls.get(at - 1))}"
        else:
            words = " ".join(message.text[: 4 * _LABEL_CHARS].split())[:_LABEL_CHARS]
            source = f"{'sent by the user' if message.role == 'user' else 'of an answer'}{words and ': '}{words}"
        parts.append({"type": "text", "text": defused(f"[An image from earlier in the conversation, {source}]")})
        parts += image_parts(message)[index : index + 1]
    return parts


def edited_part(rest: Sequence[Message], compaction: Compaction) -> list[Message | None]:
    """The covered messages as they are sent, None for one that is gone; empty if the record replaces all of them.

    `rest` are the messages after the leading system ones.
    """
    start = compaction.replaced_messages
    originals = rest[start : compaction.covered_messages]
    shown = edited(
        originals,
        {position - start for position in compaction.stubbed},
        untouched={position - start for position in compaction.pinned},
        images={(position - start, index) for position, index in compaction.images},
        sizes={each.position - start: each.size for each in compaction.stub_sizes},
    )
    forms = dict(compaction.shown)
    return [
        _in_form(message, original, forms.get(position))
        for position, (message, original) in enumerate(zip(shown, originals, strict=True), start)
    ]


def _in_form(message: Message, original: Message, how: str | int | None) -> Message | None:
    if how == "gone":
        return None
    if isinstance(how, int):
        return with_text(message, ends(normal_text(original), how) if how else REMOVED)
    return message


def shown_rest(rest: Sequence[Message], compaction: Compaction) -> Sequence[Message]:
    """The messages after the prefix, without the beginning that the record stands for."""
    start = compaction.replaced_messages
    if isinstance(dict(compaction.shown).get(start), int):
        # A pruning has chosen pieces of the whole message since.
        return rest
    return shown_behind(rest, start, compaction.covered_part)


def _without_null(message: Message) -> Message:
    if message.role == "assistant" and message.raw.get("content") is None:
        return with_text(message, "")
    return message
