"""A conversation: its messages, their sizes, and the facts that every decision goes by.

The engine makes one of each request; the planner asks it for every candidate. Tokens throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from litellm_compaction.core.clearing import ImagePlace, image_parts, without_data
from litellm_compaction.core.compaction import Compaction, begins, edited_part
from litellm_compaction.core.cut_points import (
    doubted_index,
    is_persons,
    latest_cut,
    legal_cuts,
    pinned_among,
    protected_indices,
    request_indices,
    shows_results,
)
from litellm_compaction.core.identity import Seen, chain_behind, edits
from litellm_compaction.core.messages import Message, normal_text, system_prefix_length
from litellm_compaction.core.stretches import own_words

# A record without summary and ledger: markers, note and message overhead, measured with o200k and rounded up.
RECORD_TOKENS = 145
# The words before an image that travels with a record.
_LABEL_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages with their sizes. Facts that follow from them are worked out once, when first asked for.

    A position counts from the first message after the leading system ones, an index from the first message.

    Attributes:
        messages: n, oldest first.
        sizes: n, tokens; sizes[i] belongs to messages[i].
        fixed_tokens: of tools and the template's additions.
        count_text: tokens of a text.
        hashes: chain entries, one more than there are messages after the leading system ones.
        words_hashes: as many, of the chain of words alone.
        seen: what the first messages were before the client edited them; empty if no record says so.
        own_tokens: the whole prompt as it came, if it is known better than by its parts; else None.
        staying: indices of messages that stay verbatim although a compaction may cover them.
        pins: indices of messages that the client wants verbatim: they count as requests.
        words_sizes: of requests with data attached to them: their tokens without it, by index.
    """

    messages: tuple[Message, ...]
    sizes: tuple[int, ...]
    fixed_tokens: int
    count_text: Callable[[str], int] = field(compare=False)
    hashes: tuple[str, ...]
    words_hashes: tuple[str, ...] = ()
    seen: tuple[Seen, ...] = ()
    own_tokens: int | None = None
    staying: tuple[int, ...] = ()
    pins: tuple[int, ...] = ()
    words_sizes: Mapping[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The whole prompt as it came."""
        return self.fixed_tokens + sum(self.sizes) if self.own_tokens is None else self.own_tokens

    @cached_property
    def prefix(self) -> int:
        """The number of leading system messages."""
        return system_prefix_length(self.messages)

    @cached_property
    def rest(self) -> tuple[Message, ...]:
        """The messages after those, by position."""
        return self.messages[self.prefix :]

    @cached_property
    def requests(self) -> tuple[int, ...]:
        return tuple(sorted({*request_indices(self.messages), *self.pins}))

    @cached_property
    def doubted(self) -> int | None:
        return doubted_index(self.messages)

    @cached_property
    def latest_cut(self) -> int:
        """The index at which the protected tail begins."""
        return latest_cut(self.messages)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The legal cuts, ascending, as numbers of covered messages."""
        return tuple(cut - self.prefix for cut in legal_cuts(self.messages))

    @cached_property
    def protected(self) -> frozenset[int]:
        return protected_indices(self.messages).union(self.pins)

    @property
    def prefix_tokens(self) -> int:
        """Tools, the template's additions, and the leading system messages."""
        return self.fixed_tokens + sum(self.sizes[: self.prefix])

    @cached_property
    def floor_tokens(self) -> int:
        """The part that no compaction can shrink: tools, system and protected messages, and the bare record."""
        record = RECORD_TOKENS if len(self.protected) < len(self.messages) else 0
        return self.fixed_tokens + record + sum(map(self.floor_sizes().__getitem__, self.protected))

    def floor_sizes(self) -> tuple[int, ...]:
        """The messages' sizes, of requests that a compaction may cover without the data that is attached to them."""
        if not self.has_data_to_cover:
            return self.sizes
        return tuple(self.words_size(at) if at < self.latest_cut else size for at, size in enumerate(self.sizes))

    @property
    def has_data_to_cover(self) -> bool:
        """True if data is attached to a request that a compaction may cover."""
        return bool(self.words_sizes) and min(self.words_sizes) < self.latest_cut

    def words_size(self, index: int) -> int:
        """Returns the tokens of a message, of a request without the data that is attached to it."""
        return self.words_sizes.get(index, self.sizes[index])

    def span_tokens(self, start: int, end: int) -> int:
        """Returns the tokens of the messages at positions `start` to `end`."""
        return sum(self.sizes[self.prefix + start : self.prefix + end])

    @cached_property
    def task(self) -> int | None:
        """The position of the person's first words."""
        return next((at for at, each in enumerate(self.rest) if is_persons(each) and own_words(each)), None)

    def task_tokens(self, covered_messages: int) -> int:
        """Returns the tokens of the person's first words if a compaction of so many messages hides them, else 0."""
        at = self.task
        if at is None or at >= covered_messages or self.prefix + at in {*self.requests, *self.staying}:
            return 0
        message = self.rest[at]
        return self.sizes[self.prefix + at] * len(own_words(message)) // max(len(message.text), 1)

    def own_words_tokens(self, covered_messages: int) -> int:
        """Returns the tokens of the person's own words in covered messages, without the requests."""
        return sum(
            self.sizes[index] * len(words) // max(len(message.text), 1) + 2
            for index, message in enumerate(self.rest[:covered_messages], self.prefix)
            if message.role == "user"
            and index not in self.requests
            and not message.is_synthetic
            and (words := own_words(message))
        )

    def pinned(self, covered_messages: int, *others: int) -> tuple[int, ...]:
        """Returns the positions of covered messages that stay verbatim: requests, `staying`, and `others` (indices)."""
        return pinned_among({*self.requests, *self.staying, *others}, self.prefix, covered_messages)


def words_sizes(messages: Sequence[Message], sizes: Sequence[int], count: Callable[[str], int]) -> dict[int, int]:
    """Returns the tokens of requests without the data attached to them; requests without data are left out."""
    doubted = doubted_index(messages)
    found: dict[int, int] = {}
    for index in (*request_indices(messages), *([] if doubted is None else [doubted])):
        words = without_data(messages[index])
        if words is not messages[index]:
            found[index] = max(sizes[index] - count(messages[index].text) + count(words.text), 0)
    return found


def grown(conversation: Conversation, tokens: int) -> Conversation:
    """The conversation as if its last message were so many tokens larger."""
    own_tokens = conversation.own_tokens
    return replace(
        conversation,
        sizes=(*conversation.sizes[:-1], conversation.sizes[-1] + tokens),
        own_tokens=None if own_tokens is None else own_tokens + tokens,
    )


def usable(conversation: Conversation, stored: Iterable[Compaction]) -> list[Compaction]:
    """Returns the stored compactions that may stand in for the beginning of a conversation, the one to go by first.

    Their messages must be this conversation's first ones, the cut legal here too, and what is being worked on must stay
    verbatim. A record that was made without room comes last: the earlier, richer one may fit again. Else the newest
    round counts: a summary may cover less than the edit before it.
    """
    known = [each for each in stored if not each.is_mark and _is_of(conversation, each)]
    if not known:
        return []
    cuts = frozenset(conversation.cuts)

    def holds(compaction: Compaction) -> bool:
        covered, covered_part = compaction.covered_messages, compaction.covered_part
        if covered not in cuts:
            return False
        if covered_part is not None and not begins(conversation.rest[compaction.replaced_messages], covered_part):
            return False
        requests = pinned_among(conversation.requests, conversation.prefix, covered)
        return set(requests) <= set(compaction.pinned)

    return sorted(filter(holds, known), key=lambda each: (each.provisional, -each.round))


def as_it_was(conversation: Conversation, stored: Sequence[Compaction]) -> Conversation:
    """Returns a conversation under the hashes that it had before its client cleared or shortened covered data.

    If two compactions differ in nothing but what was cleared, either may be another person's (promise P9), so neither
    counts.

    Args:
        stored: compactions under its hashes, or under those of its words.
    """
    words, rest = conversation.words_hashes, conversation.rest
    candidates = [
        each
        for each in stored
        if each.seen and each.covered_messages < len(words) and words[each.covered_messages] == each.words_hash
    ]
    covered = max((each.covered_messages for each in candidates), default=0)
    found = sorted(
        (edited, each.covered_hash, each.seen)
        for each in candidates
        if each.covered_messages == covered and (edited := edits(rest, each.seen)) is not None
    )
    if not found or found[0][0] == 0 or [edited for edited, *_ in found[:2]] == [found[0][0]] * 2:
        return conversation
    return replace(conversation, hashes=chain_behind(rest, found[0][2]), seen=found[0][2])


def is_undone(conversation: Conversation, stored: Iterable[Compaction]) -> bool:
    """Returns True if the owner has undone the compaction of a conversation, and no more has been said since."""
    said = len(conversation.rest)
    return any(said <= each.undone_messages and _is_of(conversation, each) for each in stored)


def _is_of(conversation: Conversation, compaction: Compaction) -> bool:
    """Returns True if the messages that a compaction covers are the first ones of a conversation."""
    covered, hashes = compaction.covered_messages, conversation.hashes
    return covered < len(hashes) and hashes[covered] == compaction.covered_hash


def applied_tokens(conversation: Conversation, compaction: Compaction) -> int:
    """The estimated prompt after `compaction` is applied."""
    start, covered = compaction.replaced_messages, compaction.covered_messages
    beside_record = [position for position in compaction.pinned if position < start]
    kept = kept_tokens(conversation, start, beside_record, whole=set(beside_record) - set(compaction.stubbed))
    kept -= conversation.span_tokens(start, covered) + _covered_part_tokens(conversation, compaction)
    kept += image_tokens_of(conversation, compaction.record_images)
    return kept + sum(_edited_sizes(conversation, compaction)) + conversation.count_text(compaction.record) + 8


def kept_tokens(
    conversation: Conversation, covered_messages: int, pinned: Iterable[int], *, whole: Collection[int] = ()
) -> int:
    """Returns the tokens that stay if so many messages are replaced, all but the pinned ones.

    Those stay without the data that is attached to them, but for the positions in `whole`.
    """
    prefix, sizes = conversation.prefix, conversation.sizes
    kept = conversation.prefix_tokens + sum(sizes[prefix + covered_messages :])
    return kept + sum(
        sizes[prefix + position] if position in whole else conversation.words_size(prefix + position)
        for position in pinned
    )


def image_tokens_of(conversation: Conversation, images: Iterable[ImagePlace]) -> int:
    """Tokens of images that travel with a record, and of the words before them."""
    return sum(_part_tokens(conversation, conversation.prefix + at) + _LABEL_TOKENS for at, _ in images)


def newest_images(
    conversation: Conversation, covered_messages: int, *, most: int, most_tokens: int
) -> tuple[ImagePlace, ...]:
    """Returns the images that stay although their messages may be covered, ascending: the newest, the user's first.

    Screenshots of agents fill a window before their text does. A tool can be called again, a photo is sent once. They
    are chosen when a compaction is made, so that later turns send the same bytes.

    Args:
        covered_messages: so many may be covered; the requests among them stay in any case.
        most: as many as the operator wants to stay, those in messages that stay among them.
        most_tokens: of all that stay.
    """
    rest, stays = conversation.rest, {index - conversation.prefix for index in conversation.requests}
    places = [(at, index) for at, message in enumerate(rest) for index in range(len(image_parts(message)))]
    going = [place for place in places if place[0] < covered_messages and place[0] not in stays]
    going.sort(key=lambda place: (_is_the_users(rest[place[0]]), place), reverse=True)
    wanted = going[: max(most - (len(places) - len(going)), 0)]
    sums = accumulate(image_tokens_of(conversation, (place,)) for place in wanted)
    return tuple(sorted(wanted[: sum(tokens <= most_tokens for tokens in sums)]))


def _is_the_users(message: Message) -> bool:
    return message.role == "user" and not shows_results(message)


def _part_tokens(conversation: Conversation, index: int) -> int:
    """Tokens of one image of a message: its share of those that the message's text does not take."""
    message, count = conversation.messages[index], conversation.count_text
    left_tokens = max(conversation.sizes[index] - count(message.text) - count(message.reasoning), 0)
    return -(-left_tokens // max(len(message.other_parts), 1))


def _covered_part_tokens(conversation: Conversation, compaction: Compaction) -> int:
    """Tokens by which the first shown message is smaller because the record stands for a part of it."""
    start = compaction.replaced_messages
    if compaction.covered_part is None or dict(compaction.shown).get(start, "stub") != "stub":
        return 0
    head = normal_text(conversation.rest[start])[: compaction.covered_part.chars]
    return min(conversation.count_text(head), max(conversation.sizes[conversation.prefix + start] - 4, 0))


def _edited_sizes(conversation: Conversation, compaction: Compaction) -> list[int]:
    prefix, shown = conversation.prefix, edited_part(conversation.rest, compaction)
    indices = range(prefix + compaction.replaced_messages, prefix + compaction.covered_messages)
    sizes = zip(indices, shown, strict=True)
    return [0 if new is None else _edited_size(conversation, index, new) for index, new in sizes]


def _edited_size(conversation: Conversation, index: int, new: Message) -> int:
    old, size, count = conversation.messages[index], conversation.sizes[index], conversation.count_text
    if new is old:
        return size
    if old.other_parts and not old.calls:
        images_tokens = len(image_parts(new)) * _part_tokens(conversation, index)
        return min(count(new.text) + 8 + images_tokens, size)
    dropped = count(old.text) + count(old.reasoning)
    return min(max(size - dropped, 4) + count(new.text), size)
