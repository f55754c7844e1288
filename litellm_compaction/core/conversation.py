"""A conversation with what it weighs, before and after a compaction is applied to it.

Asked by the planner for every candidate; tokens throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from litellm_compaction.core.clearing import ImagePlace, image_parts
from litellm_compaction.core.compaction import Compaction, edited_part
from litellm_compaction.core.cut_points import doubted_index, latest_cut, protected_indices, request_indices
from litellm_compaction.core.messages import Message, normal_text, system_prefix_length
from litellm_compaction.core.stretches import without_data

# A record without summary and ledger: markers, note and message overhead, measured with o200k and rounded up.
RECORD_TOKENS = 145
# The words before an image that travels with a record.
_LABEL_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages with what they weigh.

    Attributes:
        messages: n, oldest first.
        sizes: n, tokens; sizes[i] belongs to messages[i].
        fixed_tokens: tools and what the template adds once.
        hashes: chain entries, one more than there are messages after the lead.
        own_tokens: the whole prompt as it came, where it is known better than by its parts; else None.
        staying: indices of messages that stay verbatim although a compaction may cover them.
        words_sizes: of requests with data attached to them: their tokens without it, by index.
    """

    messages: tuple[Message, ...]
    sizes: tuple[int, ...]
    fixed_tokens: int
    hashes: tuple[str, ...]
    own_tokens: int | None = None
    staying: tuple[int, ...] = ()
    words_sizes: Mapping[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The whole prompt as it came."""
        return self.fixed_tokens + sum(self.sizes) if self.own_tokens is None else self.own_tokens

    @property
    def lead_tokens(self) -> int:
        """Tools, what the template adds, and the leading system messages."""
        return self.fixed_tokens + sum(self.sizes[: system_prefix_length(self.messages)])

    @property
    def floor_tokens(self) -> int:
        """What no compaction can shrink: tools, system and protected messages, and the bare record."""
        protected = protected_indices(self.messages)
        record = RECORD_TOKENS if len(protected) < len(self.messages) else 0
        return self.fixed_tokens + record + sum(map(self.floor_sizes().__getitem__, protected))

    def floor_sizes(self) -> tuple[int, ...]:
        """The messages' sizes, of requests that a compaction may cover without the data that is attached to them."""
        if not self.has_data_to_cover:
            return self.sizes
        cut = latest_cut(self.messages)
        return tuple(self.words_size(at) if at < cut else size for at, size in enumerate(self.sizes))

    @property
    def has_data_to_cover(self) -> bool:
        """True if data is attached to a request that a compaction may cover."""
        return bool(self.words_sizes) and min(self.words_sizes) < latest_cut(self.messages)

    def words_size(self, index: int) -> int:
        """Returns the tokens of a message, of a request without the data that is attached to it."""
        return self.words_sizes.get(index, self.sizes[index])


def words_sizes(messages: Sequence[Message], sizes: Sequence[int], count: Callable[[str], int]) -> dict[int, int]:
    """Returns the tokens of requests without the data attached to them; requests without data are left out.

    Args:
        messages: n, oldest first.
        sizes: n, tokens; sizes[i] belongs to messages[i].
        count: tokens of a text.
    """
    doubted = doubted_index(messages)
    found: dict[int, int] = {}
    for index in (*request_indices(messages), *([] if doubted is None else [doubted])):
        words = without_data(messages[index])
        if words is not messages[index]:
            found[index] = max(sizes[index] - count(messages[index].text) + count(words.text), 0)
    return found


def grown(conversation: Conversation, tokens: int) -> Conversation:
    """The conversation as if its last message were so many tokens larger.

    Args:
        conversation: of one message at least.
        tokens: 0 or more.
    """
    own_tokens = conversation.own_tokens
    return replace(
        conversation,
        sizes=(*conversation.sizes[:-1], conversation.sizes[-1] + tokens),
        own_tokens=None if own_tokens is None else own_tokens + tokens,
    )


def applied_tokens(conversation: Conversation, compaction: Compaction, count: Callable[[str], int]) -> int:
    """The estimated prompt after `compaction` is applied."""
    start, covered = compaction.replaced_messages, compaction.covered_messages
    behind_record = [position for position in compaction.pinned if position < start]
    lead = system_prefix_length(conversation.messages)
    kept = kept_tokens(conversation, start, behind_record, whole=set(behind_record) - set(compaction.stubbed))
    kept -= sum(conversation.sizes[lead + start : lead + covered])
    kept -= _begun_tokens(conversation, compaction, count)
    kept += carried_image_tokens(conversation, compaction.carried_images, count)
    return kept + sum(_edited_sizes(conversation, compaction, count)) + count(compaction.record) + 8


def kept_tokens(
    conversation: Conversation, covered_messages: int, pinned: Iterable[int], *, whole: Collection[int] = ()
) -> int:
    """Returns the tokens that stay if so many messages after the lead are replaced, all but the pinned ones.

    Args:
        conversation: the messages.
        covered_messages: how many are replaced.
        pinned: positions of those among them that stay, without the data that is attached to them.
        whole: positions of pinned ones that keep their data.
    """
    lead = system_prefix_length(conversation.messages)
    sizes = conversation.sizes
    kept = conversation.fixed_tokens + sum(sizes[:lead]) + sum(sizes[lead + covered_messages :])
    return kept + sum(
        sizes[lead + position] if position in whole else conversation.words_size(lead + position) for position in pinned
    )


def image_tokens(conversation: Conversation, position: int, count: Callable[[str], int]) -> int:
    """What one image of a message after the lead weighs: its share of what the message's text does not."""
    index = system_prefix_length(conversation.messages) + position
    message = conversation.messages[index]
    return _part_tokens(message, conversation.sizes[index], count)


def carried_image_tokens(conversation: Conversation, images: Iterable[ImagePlace], count: Callable[[str], int]) -> int:
    """What images weigh that travel with a record, and the words before them."""
    return sum(image_tokens(conversation, at, count) + _LABEL_TOKENS for at, _ in images)


def _part_tokens(message: Message, size: int, count: Callable[[str], int]) -> int:
    """What one of the parts weighs that are not text."""
    left_tokens = max(size - count(message.text) - count(message.reasoning), 0)
    return -(-left_tokens // max(len(message.other_parts), 1))


def _begun_tokens(conversation: Conversation, compaction: Compaction, count: Callable[[str], int]) -> int:
    """What the first message that is shown weighs less for what the record stands for."""
    start, first = (
        compaction.replaced_messages,
        system_prefix_length(conversation.messages) + compaction.replaced_messages,
    )
    is_cut = any(each.position == start for each in compaction.shortened) or start in compaction.dropped
    if compaction.begun is None or is_cut:
        return 0
    head = normal_text(conversation.messages[first])[: compaction.begun.chars]
    return min(count(head), max(conversation.sizes[first] - 4, 0))


def _edited_sizes(conversation: Conversation, compaction: Compaction, count: Callable[[str], int]) -> list[int]:
    """What the edited messages weigh, in their order."""
    lead = system_prefix_length(conversation.messages)
    span = slice(lead + compaction.replaced_messages, lead + compaction.covered_messages)
    shown = edited_part(conversation.messages[lead:], compaction)
    return [
        0 if new is None else size if new is old else _edited_size(old, new, size, count)
        for old, new, size in zip(conversation.messages[span], shown, conversation.sizes[span], strict=True)
    ]


def _edited_size(old: Message, new: Message, size: int, count: Callable[[str], int]) -> int:
    if old.other_parts and not old.calls:
        images_tokens = len(image_parts(new)) * _part_tokens(old, size, count)
        return min(count(new.text) + 8 + images_tokens, size)
    dropped = count(old.text) + count(old.reasoning)
    return min(max(size - dropped, 4) + count(new.text), size)
