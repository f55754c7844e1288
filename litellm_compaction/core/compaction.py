"""A compaction as data, and the one function that applies it to a conversation.

A `Compaction` is made once, stored under the hash of exactly the messages that it covers, and applied purely: the same
conversation and the same compaction always give the same bytes, so the server's KV cache stays warm.

Messages that a pruning left out or shortened are data that holds none of their text: what is kept of a message is a
list of places in the original, so a stored pruning can show nothing that the conversation did not say.

An answer that is carried over the limit is covered up to a place inside it. In the client's next turn it is one
message, so a record that reaches into it says how far.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from litellm_compaction.core.clearing import ImagePlace, called, calls_by_position, edited, image_parts
from litellm_compaction.core.continuation.text import open_think
from litellm_compaction.core.cut_points import legal_cuts, pinned_among, request_indices, shows_results
from litellm_compaction.core.messages import (
    JsonValue,
    Message,
    joined_with,
    merged,
    normal_text,
    parse_message,
    system_prefix_length,
    user_message,
    with_text,
)
from litellm_compaction.core.prompts import defused, frame
from litellm_compaction.core.strategies import lead_in
from litellm_compaction.core.stretches import without_data

REMOVED = "[An earlier message was removed.]"
GAP = "[…]"

Span: TypeAlias = tuple[int, int]

_LEFT_OUT = re.compile(r"\[?(?:…|\.{3,})\]?")
_WORD = re.compile(r"\S+")
_MAX_PIECES = 12
# Shorter pieces, unless they are whole lines, could be put together to words that nobody wrote.
_LEAST_PIECE_CHARS = 16
# A shorter gap is not worth its marker.
_LEAST_GAP_CHARS = 12
_HEAD_SHARE = 0.6
# Of the words that came with an image.
_LABEL_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """What is shown of one message.

    Attributes:
        position: of the message, after the leading system ones.
        spans: begin and end of each kept piece in the message's normal text, in characters, ascending; none: a stub.
    """

    position: int
    spans: tuple[Span, ...]


def pruned(
    originals: Sequence[Message],
    shown: Sequence[Message],
    dropped: Collection[int],
    shortened: Sequence[Shortened],
    *,
    start: int,
) -> list[Message | None]:
    """What is sent of each message, None where it is left out; ids, calls and roles stay.

    Args:
        originals: n messages, the first at position `start` after the lead.
        shown: n, the same after rung 1.
        dropped: positions that are left out.
        shortened: positions that show pieces of themselves.
        start: position of the first one.
    """
    texts = {each.position: kept_text(normal_text(originals[each.position - start]), each.spans) for each in shortened}
    return [
        None if position in dropped else message if (text := texts.get(position)) is None else with_text(message, text)
        for position, message in enumerate(shown, start=start)
    ]


def kept_text(text: str, spans: Sequence[Span]) -> str:
    """The pieces of `text` with a marker for everything between them; a stub where there are none."""
    if not spans:
        return REMOVED
    pieces = [text[begin:end] for begin, end in spans]
    before = "" if spans[0][0] == 0 else f"{GAP}\n"
    behind = "" if spans[-1][1] >= len(text) else f"\n{GAP}"
    return before + f"\n{GAP}\n".join(pieces) + behind


def spans_of(text: str, wanted: str) -> tuple[Span, ...]:
    """Where the pieces stand in `text` of which `wanted` is made.

    `wanted` is an excerpt if its pieces, divided by an ellipsis, stand in `text` in this order, white space aside, each
    of 16 characters or a whole line. Anything else shows only how much a model would keep: so much of the head (60 %)
    and the tail, half of the text at most.
    """
    found = _found(text, wanted)
    return _ends(text, min(len(wanted), len(text) // 2)) if found is None else found


def is_excerpt(text: str, wanted: str) -> bool:
    """Whether `wanted` is made of pieces of `text`."""
    return _found(text, wanted) is not None


def _found(text: str, wanted: str) -> tuple[Span, ...] | None:
    pieces = [" ".join(piece.split()) for piece in _LEFT_OUT.split(wanted)]
    pieces = [piece for piece in pieces if piece]
    if not 0 < len(pieces) <= _MAX_PIECES or pieces[0].split(" ", 1)[0] not in text:
        return None
    words = [(word.start(), word[0]) for word in _WORD.finditer(text)]
    flat = " ".join(word for _, word in words)
    flat_starts: list[int] = []
    at = 0
    for _, word in words:
        flat_starts.append(at)
        at += len(word) + 1

    def place(index: int) -> int:
        word = bisect_right(flat_starts, index) - 1
        return words[word][0] + index - flat_starts[word]

    spans: list[Span] = []
    cursor = 0
    for piece in pieces:
        index = flat.find(piece, cursor)
        if index < 0:
            return None
        begin, cursor = place(index), index + len(piece)
        end = place(cursor - 1) + 1
        if len(piece) < _LEAST_PIECE_CHARS and not _is_line(text, begin, end):
            return None
        if spans and begin - spans[-1][1] < _LEAST_GAP_CHARS:
            begin = spans.pop()[0]
        spans.append((begin, end))
    return tuple(spans)


def _is_line(text: str, begin: int, end: int) -> bool:
    return (begin == 0 or text[begin - 1] == "\n") and (end == len(text) or text[end] == "\n")


def _ends(text: str, keep_chars: int) -> tuple[Span, ...]:
    head, tail = int(keep_chars * _HEAD_SHARE), len(text) - (keep_chars - int(keep_chars * _HEAD_SHARE))
    # Whole words where there are any nearby.
    space = text.rfind(" ", head * 4 // 5, head)
    head = space if space > 0 else head
    space = text.find(" ", tail, tail + (len(text) - tail) // 5)
    tail = space + 1 if space > 0 else tail
    return tuple(span for span in ((0, head), (tail, len(text))) if span[1] > span[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialCoverage:
    """The beginning of a message that a record stands for.

    Attributes:
        chars: how long it is, in characters of the message's normal text.
        text_hash: of exactly those characters.
    """

    chars: int
    text_hash: str


def begun_by(text: str) -> PartialCoverage | None:
    """What is begun by an answer that opens with `text` and goes on; None for nothing that a later turn would show.

    Args:
        text: without our notices.
    """
    # Inside a reasoning block everything so far belongs to the block, which is no part of a normal text.
    if open_think(text):
        return None
    # Something to stand behind it: the white space before the next word is part of what was covered.
    seen = normal_text(parse_message({"role": "assistant", "content": f"{text}|"}))[:-1]
    return PartialCoverage(chars=len(seen), text_hash=_hash(seen)) if seen else None


def begins(message: Message, begun: PartialCoverage) -> bool:
    """Whether `message` is an answer that opens with exactly what was covered, and goes on."""
    text = normal_text(message)
    return message.role == "assistant" and len(text) > begun.chars and _hash(text[: begun.chars]) == begun.text_hash


def behind(message: Message, begun: PartialCoverage) -> Message:
    """`message` from there on; its calls stay."""
    return with_text(message, normal_text(message)[begun.chars :])


def shown_behind(messages: Sequence[Message], position: int, begun: PartialCoverage | None) -> Sequence[Message]:
    """The same messages; of the one at `position` only what is behind `begun`."""
    if begun is None or position >= len(messages):
        return messages
    return [*messages[:position], behind(messages[position], begun), *messages[position + 1 :]]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


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
        pinned: positions after the lead of the covered messages that stay verbatim, in their place or with the record:
            the user's in its message; behind it a call and its results, whose answer was carried over the limit.
        round: 1 for a conversation's first compaction.
        segments: frozen summaries, oldest first; they may reach less far than the compaction when a summary failed.
        ledger: verbatim anchors of everything covered.
        rung: how the newest part was condensed: by a strategy, by its name; `edit` without a model; `truncate` where no
            model gave anything usable.
        window_tokens: of the window that it was made for.
        provisional: made while one huge result left hardly any room; good for this very conversation, but the next
            compaction goes on from an earlier, richer one.
        edited_from: position after the lead from which covered messages are sent edited (rung 1); those before it are
            replaced by the record. None: all are replaced.
        stubbed: positions after the lead of the tool results that are sent as stubs, and of the messages that are sent
            with a line for the data that is attached to them.
        dropped: positions after the lead of edited messages that are not sent at all, by a model's choice.
        shortened: what is sent of edited messages instead of all their text.
        omissions: what a pruning model says of dropped and shortened messages, and records of other tools among them;
            it covers nothing on its own, so a later summary reads the originals.
        begun: how much of the first message that is shown the record stands for as well, or None: an answer was
            carried over the limit inside it.
        ahead: written before anything had to be compacted; it takes effect when that time comes, and not earlier.
        early: was `ahead`, and takes effect at once, since the server was made to read what it leaves; not used yet.
        images: those of covered messages that are sent all the same, by positions after the lead: in their place, or
            beside the record where that stands for their message. Those of pinned messages are not among them.
    """

    covered_messages: int
    covered_hash: str
    pinned: tuple[int, ...]
    round: int
    segments: tuple[Segment, ...]
    ledger: str
    rung: str
    window_tokens: int = 0
    provisional: bool = False
    edited_from: int | None = None
    stubbed: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    shortened: tuple[Shortened, ...] = ()
    omissions: str = ""
    begun: PartialCoverage | None = None
    ahead: bool = False
    early: bool = False
    images: tuple[ImagePlace, ...] = ()

    @property
    def carried_images(self) -> tuple[ImagePlace, ...]:
        """The images that travel beside the record."""
        return tuple(place for place in self.images if place[0] < self.replaced_messages)

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
    def said(self) -> str:
        """What models have said of all that is not shown any more, as one text."""
        return "\n\n".join(filter(None, (self.summary, self.omissions)))

    @property
    def record(self) -> str:
        """The text that travels before the first kept words; "" where stubs alone say everything."""
        if not (self.replaced_messages or self.segments or self.ledger or self.dropped or self.omissions):
            return ""
        return frame(self.said, self.ledger, round_number=self.round) + lead_in(self.rung)


def is_sound(compaction: Compaction) -> bool:
    """Whether all positions of a compaction lie within the messages that it covers, as those that were made here do.

    What a shared store gives may be anybody's, or another version's.
    """
    covered, start = compaction.covered_messages, compaction.replaced_messages
    positions = (*compaction.pinned, *compaction.stubbed, *compaction.dropped, *(at for at, _ in compaction.images))
    return (
        0 <= start <= covered
        and all(0 <= position < covered for position in positions)
        and all(start <= each.position < covered and _are_spans(each.spans) for each in compaction.shortened)
        and all(0 <= segment.covered_messages <= covered for segment in compaction.segments)
        and all(index >= 0 for _, index in compaction.images)
        and (compaction.begun is None or compaction.begun.chars >= 0)
    )


def _are_spans(spans: Sequence[Span]) -> bool:
    edges = [0, *(edge for span in spans for edge in span)]
    return len(spans) <= _MAX_PIECES and edges == sorted(edges)


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
    lead = system_prefix_length(messages)
    start = compaction.replaced_messages
    rest = _shown(messages[lead:], compaction)
    shown = [message for message in edited_part(rest, compaction) if message is not None]
    tail = [*shown, *rest[compaction.covered_messages :]]
    record = compaction.record if record is None else record
    if not record:
        return (*messages[:lead], *map(_without_null, tail))
    pinned = [position for position in compaction.pinned if position < start]
    behind = [
        without_data(rest[position]) if position in compaction.stubbed else rest[position]
        for position in pinned
        if rest[position].role == "user"
    ]
    tail = [*(rest[position] for position in pinned if rest[position].role != "user"), *tail]
    if tail and tail[0].role == "user":
        behind.append(tail[0])
        tail = tail[1:]
    carrier = _carrier(record, behind, _labelled(rest, compaction.carried_images), lead_in(compaction.rung))
    return (*messages[:lead], carrier, *map(_without_null, tail))


def _carrier(record: str, behind: Sequence[Message], images: Sequence[JsonValue], opening: str) -> Message:
    """The first user message after a compaction: the record, images of what it stands for, then the user's own words.

    Args:
        record: ends with `opening` where its strategy has one.
        behind: the user messages that share it.
        images: parts of a content.
        opening: what stands before the user's words, "" for nothing.
    """
    if images:
        text = record.removesuffix(opening).rstrip("\n")
        between = [{"type": "text", "text": opening}] if opening and behind else []
        first = parse_message({"role": "user", "content": [{"type": "text", "text": text}, *images, *between]})
        return merged([first, *behind])
    return joined_with(behind, record) if behind else user_message(record.removesuffix(opening).rstrip("\n"))


def _labelled(rest: Sequence[Message], places: Sequence[ImagePlace]) -> list[JsonValue]:
    """Images, each behind a few words that say where it came from; those words are data like the record's."""
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
        images={(position - start, index) for position, index in compaction.images},
    )
    return pruned(originals, shown, frozenset(compaction.dropped), compaction.shortened, start=start)


def is_applicable(messages: Sequence[Message], compaction: Compaction, hashes: Sequence[str]) -> bool:
    """Whether `compaction` may stand in for the beginning of this conversation; see `applicable`."""
    return bool(applicable(messages, (compaction,), hashes))


def applicable(
    messages: Sequence[Message], compactions: Iterable[Compaction], hashes: Sequence[str]
) -> list[Compaction]:
    """The compactions that may stand in for the beginning of this conversation, in their order.

    Their messages must be this conversation's first ones, the cut legal here too, and what is being worked on must stay
    verbatim. The conversation is walked over once, however many there are.
    """
    known = [
        each
        for each in compactions
        if each.covered_messages < len(hashes) and hashes[each.covered_messages] == each.covered_hash
    ]
    if not known:
        return []
    lead, cuts, requests = system_prefix_length(messages), frozenset(legal_cuts(messages)), request_indices(messages)

    def holds(compaction: Compaction) -> bool:
        covered, begun = compaction.covered_messages, compaction.begun
        if lead + covered not in cuts:
            return False
        if begun is not None and not begins(messages[lead + compaction.replaced_messages], begun):
            return False
        return set(pinned_among(requests, lead, covered)) <= set(compaction.pinned)

    return [each for each in known if holds(each)]


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
