"""Which images of a conversation stay when it is compacted, and how they travel with a record.

Screenshots of agents fill a window before their text does (claude-code issue 24298: 86 % of a context). Images in old
tool results go before the user's own, the oldest first (hermes-agent issue 89938): a tool can be called again, a photo
is sent once. What stays is chosen when a compaction is made and kept in it, so that the turns after it send the same
bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from litellm_compaction.core.clearing import ImagePlace, image_parts
from litellm_compaction.core.conversation import Conversation, carried_image_tokens, image_tokens
from litellm_compaction.core.cut_points import shows_results
from litellm_compaction.core.messages import Message

# What stands for an image that is gone, with its address.
PLACEHOLDER_TOKENS = 16


def going_order(conversation: Conversation, positions: Iterable[int]) -> list[ImagePlace]:
    """The images of some messages after the lead in the order in which they go: the user's last, the newest last."""
    rest = conversation.rest
    places = [(at, index) for at in positions if rest[at].other_parts for index in range(len(image_parts(rest[at])))]
    return sorted(places, key=lambda place: (_is_the_users(rest[place[0]]), place))


def of_the_user(conversation: Conversation, positions: Iterable[int]) -> list[ImagePlace]:
    """Those among the images of some messages after the lead that a person sent."""
    return [place for place in going_order(conversation, positions) if _is_the_users(conversation.rest[place[0]])]


def staying(
    conversation: Conversation, positions: Sequence[int], *, keep_images: int, most_tokens: int
) -> tuple[ImagePlace, ...]:
    """The images that stay whether their messages do or not, ascending.

    Args:
        conversation: of which images in messages that stay in any case are among those that the operator wants kept.
        positions: after the lead, of the messages that may be covered.
        keep_images: how many the operator wants to stay.
        most_tokens: of all that stay.
    """
    may_go = frozenset(positions)
    shown = sum(len(image_parts(message)) for at, message in enumerate(conversation.rest) if at not in may_go)
    left_tokens = most_tokens
    chosen: list[ImagePlace] = []
    for place in reversed(going_order(conversation, positions)):
        if len(chosen) >= keep_images - shown:
            break
        tokens = carried_image_tokens(conversation, (place,))
        if tokens <= left_tokens:
            left_tokens -= tokens
            chosen.append(place)
    return tuple(sorted(chosen))


def without_first(
    conversation: Conversation, images: Collection[ImagePlace], over_tokens: int
) -> tuple[tuple[ImagePlace, ...], int]:
    """The images that stay where what they weigh has to shrink by `over_tokens`, and what is then still over.

    Args:
        conversation: theirs.
        images: in messages that are sent edited.
        over_tokens: above 0 where any have to go.
    """
    left = set(images)
    for place in going_order(conversation, {at for at, _ in images}):
        if over_tokens <= 0:
            break
        if place in left:
            left.discard(place)
            over_tokens -= max(image_tokens(conversation, place[0]) - PLACEHOLDER_TOKENS, 0)
    return tuple(sorted(left)), over_tokens


def _is_the_users(message: Message) -> bool:
    return message.role == "user" and not shows_results(message)
