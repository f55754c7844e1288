"""Tells a request beside a conversation (a title, tags, suggestions) from the conversation's next turn, by its form.

It is one short message over a copy of the conversation's end, without tools, and differs from the conversation's own
requests: its answer is bounded where theirs is not, or it has none of their tools. In doubt a request is an ordinary
one. No summary is made for it, and nothing is kept of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Message

# No title and no list of suggestions is longer.
_MOST_ANSWER_TOKENS = 512
_MOST_CHARS = 4000
# Of a conversation's end, by which a copy of it is known; a copy of one message may be anybody's.
_END, _LEAST_COPIED = 32, 2
_MOST_TENANTS, _MOST_CONVERSATIONS = 4096, 16


class _Seen(NamedTuple):
    """A conversation's newest request; messages as hashes of role and text, `end` newest first."""

    length: int
    first: int
    end: tuple[int, ...]
    has_tools: bool
    is_bounded: bool


class Conversations:
    """The newest conversations of each tenant, without their texts."""

    def __init__(self) -> None:
        self._seen: Bounded[str, tuple[_Seen, ...]] = Bounded(_MOST_TENANTS)

    def is_beside(self, tenant: str, messages: Sequence[Message], *, has_tools: bool, asked_tokens: int | None) -> bool:
        """Returns True for a request beside a conversation of its tenant's; takes note of any other."""
        if not messages:
            return False
        hashes = [hash((message.role, message.text, message.calls)) for message in reversed(messages)]
        is_bounded = asks_for_little(asked_tokens)
        known = self._seen.get(tenant, ())
        if not has_tools and any(_is_beside(messages, hashes, each, is_bounded=is_bounded) for each in known):
            return True
        own = _Seen(len(messages), hashes[-1], tuple(hashes[:_END]), has_tools, is_bounded)
        others = (each for each in known if each.end[0] not in hashes or each.first != own.first)
        self._seen[tenant] = (own, *others)[:_MOST_CONVERSATIONS]
        return False


def asks_for_little(asked_tokens: int | None) -> bool:
    return asked_tokens is not None and 0 < asked_tokens <= _MOST_ANSWER_TOKENS


def _is_beside(messages: Sequence[Message], hashes: Sequence[int], seen: _Seen, *, is_bounded: bool) -> bool:
    if seen.end[0] not in hashes:
        return False
    newest = hashes.index(seen.end[0])
    copied = next(
        (at for at, each in enumerate(seen.end) if hashes[newest + at : newest + at + 1] != [each]), len(seen.end)
    )
    last = len(messages) - 1 - newest
    before, behind = messages[: last + 1 - copied], messages[last + 1 :]
    begins_alike = last == seen.length - 1 and hashes[-1] == seen.first
    if behind and behind[0].role == "assistant" and not behind[0].calls:
        # The answer that the conversation's next turn will have.
        behind, copied = behind[1:], copied + 1
    added = [*(() if begins_alike else before), *behind]
    says_little = is_bounded and not seen.is_bounded
    if copied < _LEAST_COPIED or not (says_little or (seen.has_tools and not begins_alike)):
        return False
    return len(added) == 1 and (added[0].is_system or added[0].role == "user") and len(added[0].text) <= _MOST_CHARS
