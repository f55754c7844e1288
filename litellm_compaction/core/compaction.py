"""A compaction as data, the one function that applies it to a conversation, and to which conversations it belongs.

It is made once, stored under the hash of exactly the messages that it covers, and applied purely: the same bytes every
time keep the server's KV cache warm. Of messages that it shows shorter it holds no text but their sizes, so a
stored one can put nothing else into their place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from litellm_compaction.core.cuts import open_think
from litellm_compaction.core.forms import Form, How, ImagePlace, called, image_parts, in_forms
from litellm_compaction.core.identity import Seen, chain_behind, edits, text_hash
from litellm_compaction.core.messages import (
    JsonValue,
    Message,
    calls_by_position,
    clients_length,
    merged,
    normal_text,
    parse_message,
    system_prefix_length,
    user_message,
    with_text,
)
from litellm_compaction.core.prompts import defused, frame, strategy
from litellm_compaction.core.stretches import divided
from litellm_compaction.core.view import View, shows_results

State: TypeAlias = Literal["applied", "provisional", "ready", "read"]

# Somebody who goes back further pays one summary.
_NEWEST_RECORDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialCoverage:
    """The beginning of an answer, carried over the limit, that a record stands for: characters, and their hash."""

    chars: int
    text_hash: str


def part_covered_by(text: str) -> PartialCoverage | None:
    """Returns `text`, without our notices, as the beginning of a longer answer; None if no later turn shows it."""
    # Thoughts are no part of a normal text. With a sign after it white space before the next word is part of it.
    seen = "" if open_think(text) else normal_text(parse_message({"role": "assistant", "content": f"{text}|"}))[:-1]
    return PartialCoverage(chars=len(seen), text_hash=text_hash(seen)) if seen else None


def begins(message: Message, part: PartialCoverage) -> bool:
    """Returns True if `message` is an answer that opens with exactly the covered text, and goes on."""
    text = normal_text(message)
    return message.role == "assistant" and len(text) > part.chars and text_hash(text[: part.chars]) == part.text_hash


def shown_behind(messages: Sequence[Message], position: int, part: PartialCoverage | None) -> Sequence[Message]:
    """The same messages; of the one at `position` only its calls, and the rest after `part`."""
    if part is None or position >= len(messages):
        return messages
    rest = with_text(messages[position], normal_text(messages[position])[part.chars :])
    return [*messages[:position], rest, *messages[position + 1 :]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Stands in for the first messages of a conversation.

    Its many fields are one stored value; positions count from the first message after the leading system ones.
    """

    covered_messages: int  # So many it replaces or shows in another form.
    covered_hash: str  # Their entry in the hash chain.
    # The record stands for what is before this position, but for what has a form there, `whole` or `words`: the user's
    # in its message, after it a call and its results, whose answer was carried over the limit.
    start: int
    forms: tuple[Form, ...] = ()  # Ascending by position; those from `start` on are an edit's, or a pruning's.
    round: int = 1
    summary: str = ""  # A model's words about what is not shown any more, earlier ones merged into later ones.
    summarized_messages: int = 0  # Of so many first messages; less than are covered where a later one failed.
    ledger: str = ""  # Verbatim anchors of everything covered.
    level: str = "truncate"  # Of the newest part: a strategy's name, `edit`, `truncate` if no model's text was usable.
    window_tokens: int = 0
    # `provisional` if it was made without room for a summary, so that the next one goes on from an earlier one. `ready`
    # if it was written ahead, and waits. `read` if the server has read what it leaves: it takes effect at once.
    state: State = "applied"
    covered_part: PartialCoverage | None = None  # Of the message at `start`, if the record stands for that as well.
    images: tuple[ImagePlace, ...] = ()  # Of covered messages, not of ones that stay; in their place or beside it.
    # Above 0 for the mark in place of a record that its owner has undone, which stands for nothing: a conversation of
    # at most so many messages is sent as it is while it fits.
    undone_messages: int = 0
    words_hash: str = ""  # Their entry in the chain of words alone; "" if it must be these very messages.
    seen: tuple[Seen, ...] = ()  # What they were, for a client that clears data in them; empty without `words_hash`.

    @property
    def is_record(self) -> bool:
        """The record stands for all that is covered but what stays verbatim."""
        return self.start == self.covered_messages

    @property
    def is_waiting(self) -> bool:
        """It was written ahead, and no request has been sent with it."""
        return self.state in ("ready", "read")

    @property
    def form_of(self) -> Mapping[int, How]:
        """The forms of covered messages by position; of a message that the record stands for `gone`."""
        return {**dict.fromkeys(range(self.start), "gone"), **dict(self.forms)}

    @property
    def pinned(self) -> tuple[int, ...]:
        """The positions of messages that stay verbatim."""
        return tuple(at for at, how in self.forms if how in ("whole", "words"))

    @property
    def gone(self) -> frozenset[int]:
        """The positions of covered messages that are not sent."""
        return frozenset(at for at, how in self.form_of.items() if how == "gone")

    @property
    def record(self) -> str:
        """The text that travels before the first kept words; "" where lines alone say everything."""
        if not (self.start or self.summary or self.ledger or self.gone):
            return ""
        return frame(self.summary, self.ledger, round_number=self.round) + strategy(self.level).lead_in


def mark_of(compaction: Compaction, *, undone_messages: int) -> Compaction:
    """Returns the mark that is stored in place of a record that its owner has undone."""
    covered, words_hash, seen = compaction.covered_messages, compaction.words_hash, compaction.seen
    mark = Compaction(covered_messages=covered, covered_hash=compaction.covered_hash, start=covered)
    return replace(mark, words_hash=words_hash, seen=seen, undone_messages=undone_messages)


def is_sound(compaction: Compaction) -> bool:
    """Returns True if all positions lie within the covered messages: a shared store may hold anything."""
    covered, start, part = compaction.covered_messages, compaction.start, compaction.covered_part
    positions = [*(each.position for each in compaction.forms), *(at for at, _ in compaction.images)]
    ends = [start, compaction.summarized_messages, *(at + 1 for at in positions)]
    numbers = [*ends, *positions, *(index for _, index in compaction.images), part.chars if part else 0]
    return (
        min(numbers) >= 0
        and max(ends) <= covered
        and all(start <= at or how in ("whole", "words") for at, how in compaction.forms)
        and len(compaction.seen) in (0, covered)
        and all(each.entry == compaction.covered_hash for each in compaction.seen[-1:])
    )


def compaction_id(scope: str, covered_hash: str) -> str:
    """A compaction's name in events and on the command line: 16 hexadecimal digits that say nothing else."""
    return hashlib.blake2b(f"{scope}/{covered_hash}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def bare(view: View) -> Compaction | None:
    """The hardest compaction: everything that may go goes, and the record says no more than that."""
    if not view.cuts:
        return None
    covered = view.cuts[-1]
    forms = view.pinned_forms(covered)
    return Compaction(covered_messages=covered, covered_hash=view.hashes[covered], start=covered, forms=forms)


# ------------------------------------------------------------------ applied


def as_sent(rest: Sequence[Message], compaction: Compaction) -> list[Message | None]:
    """The messages as they are sent, None for one that is not; one that does not change is the same object."""
    covered = compaction.covered_messages
    shown = shown_behind(rest, compaction.start, compaction.covered_part)
    return [*in_forms(shown[:covered], compaction.form_of, compaction.images), *shown[covered:]]


def hidden_messages(rest: Sequence[Message], compaction: Compaction) -> dict[int, Message]:
    """The text that the model sees no more, by position: messages that are gone, results and what was attached."""
    shown = {
        at: rest[at] if how == "gone" else next((each for each in divided(rest[at]) if each.role == "tool"), None)
        for at, how in sorted(compaction.form_of.items())
        if how != "whole"
    }
    return {at: message for at, message in shown.items() if message is not None}


def apply(messages: Sequence[Message], compaction: Compaction) -> tuple[Message, ...]:
    """The conversation as the model gets it: prefix, record in the first user message, kept tail.

    The shape is `[S?] U (A | TC T…)* …`, which 31 of 31 chat templates render (llama.cpp's collection).
    Kept messages stay as they are, but for `null` content, which Qwen 3 and gpt-oss refuse: it becomes "".
    """
    prefix, record = system_prefix_length(messages), compaction.record
    beside, tail = _beside_record(messages[prefix:], compaction)
    if record:
        if tail and tail[0].role == "user":
            beside.append(tail.pop(0))
        alone = record.removesuffix(strategy(compaction.level).lead_in).rstrip("\n")
        tail.insert(0, merged(beside, record if beside else alone, _labelled(messages[prefix:], compaction)))
    return (*messages[:prefix], *tail)


def kept_messages(messages: Sequence[Message], compaction: Compaction) -> tuple[Message, ...]:
    """What a compaction leaves beside its record, without leading system messages; its images come first, in one."""
    rest = messages[system_prefix_length(messages) :]
    images = _labelled(rest, compaction)
    beside, tail = _beside_record(rest, compaction)
    pictures = [parse_message({"role": "user", "content": images})] if images else []
    return (*pictures, *beside, *tail)


def _beside_record(rest: Sequence[Message], compaction: Compaction) -> tuple[list[Message], list[Message]]:
    """The user's messages that travel with the record, and the messages that follow it."""
    beside: list[Message] = []
    tail: list[Message] = []
    for at, message in enumerate(as_sent(rest, compaction)):
        if message is not None:
            is_null = message.role == "assistant" and message.raw.get("content") is None
            is_beside = at < compaction.start and (message.role == "user" or message.is_renewed)
            shown = user_message(message.text) if is_beside and message.is_system else message
            (beside if is_beside else tail).append(with_text(shown, "") if is_null else shown)
    return beside, tail


def _labelled(rest: Sequence[Message], compaction: Compaction) -> list[JsonValue]:
    """The record's images, each after a few words about its origin; those words are data like the record's."""
    places = [place for place in compaction.images if place[0] < compaction.start]
    calls = calls_by_position(rest) if places else {}
    parts: list[JsonValue] = []
    for at, index in places:
        call = calls.get(at) or (calls.get(at - 1) if shows_results(rest[at]) else None)
        source = f"result of {called(call)}" if call else f"sent by the {rest[at].role}"
        parts.append({"type": "text", "text": defused(f"[An image from earlier in the conversation, {source}]")})
        parts += image_parts(rest[at])[index : index + 1]
    return parts


# ------------------------------------------------------------------ for a conversation


def usable(view: View, stored: Iterable[Compaction]) -> list[Compaction]:
    """Returns the stored compactions that may stand in for the beginning of a conversation, the one to go by first.

    Their messages must be this conversation's first ones, the cut legal here too, and what is being worked on must stay
    verbatim. A record that was made without room comes last; else the newest round counts.
    """

    def holds(compaction: Compaction) -> bool:
        covered, part = compaction.covered_messages, compaction.covered_part
        is_legal = not compaction.undone_messages and _is_of(view, compaction) and covered in view.cuts
        does_begin = is_legal and (part is None or begins(view.rest[compaction.start], part))
        return does_begin and {*view.pinned(covered)}.issubset(compaction.pinned)

    return sorted(filter(holds, stored), key=lambda each: (each.state == "provisional", -each.round))


def superseded(stored: Iterable[Compaction]) -> list[Compaction]:
    """All but the newest of a conversation's records, for each holds what its messages were."""
    newest_first = sorted(stored, key=lambda each: -each.covered_messages)
    return [each for each in newest_first[_NEWEST_RECORDS:] if not each.undone_messages]


def is_undone(view: View, stored: Iterable[Compaction]) -> bool:
    """Returns True if the owner has undone the compaction of a conversation, and no more has been said since."""
    return any(len(view.rest) <= each.undone_messages and _is_of(view, each) for each in stored)


def _is_of(view: View, compaction: Compaction) -> bool:
    """Returns True if the messages that a compaction covers are the first ones of a conversation."""
    covered, hashes = compaction.covered_messages, view.hashes
    return covered < len(hashes) and hashes[covered] == compaction.covered_hash


def as_it_was(view: View, stored: Sequence[Compaction]) -> View:
    """Returns a conversation under the hashes that it had before its client cleared or shortened covered data.

    If two of the compactions stored under its hashes, or those of its words, differ in nothing but what was cleared,
    either may be another person's (promise P9), so neither counts.
    """
    words = dict(enumerate(view.words_hashes))
    alike = [each for each in stored if each.seen and words.get(each.covered_messages) == each.words_hash]
    covered = max((each.covered_messages for each in alike), default=0)
    records = {each.covered_hash: each.seen for each in alike if each.covered_messages == covered}
    told = {key: edits(view.rest[:covered], [each.data for each in seen]) for key, seen in records.items()}
    same = [key for key, edited in told.items() if None not in edited]
    if len(same) != 1 or True not in told[same[0]]:
        return view
    record = records[same[0]]
    return replace(view, hashes=chain_behind(view.rest, record), seen=record)


def keyed(messages: Sequence[Message], hashes: Sequence[str], compaction: Compaction) -> Compaction:
    """`compaction`, made for `messages` with the chain `hashes`, as the client's next turn finds it.

    That has the whole answer in one message, so the record says how much of it, after the client's own, it stands for.
    """
    prefix = system_prefix_length(messages)
    covered, own = compaction.covered_messages, clients_length(messages) - prefix
    if covered <= own:
        return compaction
    said = "".join(each.text for each in messages[prefix + own : prefix + covered] if not each.is_synthetic)
    return replace(
        compaction,
        covered_messages=own,
        start=min(compaction.start, own),
        forms=tuple(each for each in compaction.forms if each.position < own),
        covered_hash=hashes[own],
        summarized_messages=min(compaction.summarized_messages, own),
        covered_part=part_covered_by(said) if compaction.is_record else compaction.covered_part,
    )


def applied_tokens(view: View, compaction: Compaction) -> int:
    """The estimated prompt after `compaction` is applied."""
    sent = enumerate(as_sent(view.rest, compaction), view.prefix)
    kept = view.prefix_tokens + sum(view.size_as(index, message) for index, message in sent if message is not None)
    images = view.image_tokens(place for place in compaction.images if place[0] < compaction.start)
    return kept + images + view.count_text(compaction.record) + 8
