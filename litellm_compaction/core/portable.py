"""A portable compaction, which a client keeps: the record, and the messages that stay verbatim beside it.

Clients that manage their own context keep it in place of their history and send it back. To the engine the record is
then a stored compaction of one message, the record itself, so that it is applied, chained and outgrown like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from litellm_compaction.core.compaction import Compaction, kept_messages
from litellm_compaction.core.messages import Message, system_prefix_length, user_message

# What a client goes on from stands for good: of its history nothing else is left.
_ANY_WINDOW_TOKENS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Portable:
    """What stands for the beginning of a conversation.

    Attributes:
        base: the record, as a compaction of itself; None if every message stays.
        kept: the messages beside it, oldest first, without leading system ones.
        spares_requests: user's messages that the client sends before it are read all the same.
    """

    base: Compaction | None
    kept: tuple[Message, ...]
    spares_requests: bool = False

    @property
    def record(self) -> str:
        return "" if self.base is None else self.base.record


def portable(messages: Sequence[Message], compaction: Compaction | None, *, spares_requests: bool = False) -> Portable:
    """Returns what stands for a whole conversation after `compaction`; None for one that stays as it is."""
    if compaction is None:
        rest = tuple(messages[system_prefix_length(messages) :])
        return Portable(base=None, kept=rest, spares_requests=spares_requests)
    base = as_base(compaction) if compaction.record else None
    return Portable(base=base, kept=kept_messages(messages, compaction), spares_requests=spares_requests)


def as_base(compaction: Compaction) -> Compaction:
    """Returns the record of a compaction as one that covers the message in which it comes back, and nothing else."""
    return replace(
        compaction,
        covered_messages=1,
        covered_hash="",
        pinned=(),
        segments=tuple(replace(each, covered_messages=1) for each in compaction.segments),
        window_tokens=_ANY_WINDOW_TOKENS,
        provisional=False,
        edited_from=None,
        shown=(),
        stub_contents=(),
        covered_part=None,
        ahead=False,
        early=False,
        images=(),
    )


def unfolded(messages: Sequence[Message], found: Portable, placeholder: str) -> tuple[Message, ...]:
    """Returns a conversation in which the message with the text `placeholder` stands for all before it, in full.

    The record comes first, then what else the client has kept of the user's, the messages beside it, and the rest.
    """
    prefix = system_prefix_length(messages)
    at = next((at for at, each in enumerate(messages) if at >= prefix and each.text == placeholder), None)
    if at is None:
        return tuple(messages)
    known = {each.text for each in found.kept if each.role == "user"}
    spared = [each for each in messages[prefix:at] if each.role == "user" and each.text not in known]
    # Sent as the user's, as records are; an answer's to the engine, so that nothing takes it for the person's words.
    record = [replace(user_message(found.record), role="assistant")] if found.base else []
    return (*messages[:prefix], *record, *spared, *found.kept, *messages[at + 1 :])


def base_of(rest: Sequence[Message], hashes: Sequence[str], base: Compaction | None) -> Compaction | None:
    """Returns `base` as found for a conversation that begins with its record; None for any other conversation.

    Args:
        rest: the messages after the leading system ones.
        hashes: their chain, one entry more.
    """
    if base is None or not rest or rest[0].text != base.record:
        return None
    return replace(base, covered_hash=hashes[1])
