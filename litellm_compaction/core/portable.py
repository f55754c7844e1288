"""A portable compaction, which a client keeps: the record, and the messages that stay verbatim beside it.

Clients that manage their own context keep it in place of their history and send it back. To the engine the record is
then a stored compaction of one message, the record itself, so that it is applied, chained and outgrown like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from litellm_compaction.core.compaction import Compaction, kept_messages
from litellm_compaction.core.ledger import ANCHORS_HEAD, NAMES_HEAD, OPERATOR_HEAD, WORDS_HEAD
from litellm_compaction.core.messages import Message, parse_message, system_prefix_length, user_message

# What a client goes on from stands for good: of its history nothing else is left.
_ANY_WINDOW_TOKENS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Portable:
    """The part of a client's conversation that stands for its beginning.

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
    base = as_base(compaction, covered_messages=1) if compaction.record else None
    return Portable(base=base, kept=kept_messages(messages, compaction), spares_requests=spares_requests)


def as_base(compaction: Compaction, *, covered_messages: int) -> Compaction:
    """Returns the record of a compaction as one that covers the first messages of the conversation that it begins."""
    return replace(
        compaction,
        covered_messages=covered_messages,
        covered_hash="",
        start=covered_messages,
        forms=(),
        segments=tuple(replace(each, covered_messages=covered_messages) for each in compaction.segments),
        window_tokens=_ANY_WINDOW_TOKENS,
        provisional=False,
        covered_part=None,
        ahead=False,
        early=False,
        images=(),
        words_hash="",
        seen=(),
    )


class Unfolded(NamedTuple):
    """A conversation in full, and its record as compactions that may stand for its beginning, the smallest one first.

    The larger one stands for the user's messages, too, that the client sends beside it: for when they do not fit.
    """

    messages: tuple[Message, ...]
    bases: tuple[Compaction, ...] = ()


def unfolded(messages: Sequence[Message], found: Portable, placeholder: str) -> Unfolded:
    """Returns a conversation in which the message with the text `placeholder` stands for all before it.

    The record comes first, then what else the client has kept of the user's, the messages beside it, and the rest.
    """
    prefix = system_prefix_length(messages)
    at = next((at for at, each in enumerate(messages) if at >= prefix and each.text == placeholder), None)
    if at is None:
        return Unfolded(tuple(messages))
    known = {each.text for each in found.kept if each.role == "user"}
    spared = [each for each in messages[prefix:at] if each.role == "user" and each.text not in known]
    # Sent as the user's, as records are; an answer's to the engine, so that nothing takes it for the person's words.
    record = [replace(user_message(found.record), role="assistant")] if found.base else []
    bases = (
        (as_base(found.base, covered_messages=covered) for covered in dict.fromkeys((1, 1 + len(spared))))
        if found.base
        else ()
    )
    return Unfolded((*messages[:prefix], *record, *spared, *found.kept, *messages[at + 1 :]), tuple(bases))


def bases_of(rest: Sequence[Message], hashes: Sequence[str], bases: Sequence[Compaction]) -> list[Compaction]:
    """Returns `bases` as found for a conversation that begins with their record; none for any other conversation.

    Args:
        rest: the messages after the leading system ones.
        hashes: their chain, one entry more.
    """
    known = [each for each in bases if each.covered_messages < len(hashes) and rest[0].text == each.record]
    return [replace(each, covered_hash=hashes[each.covered_messages]) for each in known]


def ledger_messages(ledger: str) -> list[Message]:
    """A ledger's quotations as messages that a new ledger is made from: users' words, system messages', then the rest.

    Those come back as a tool's, so that they give way to newer ones; names as the assistant's, who had them in use.
    """
    # Of several ledgers each has its own heads.
    words: list[str] = []
    lines: list[str] = []
    names: list[str] = []
    orders: list[str] = []
    heads = {WORDS_HEAD: words, OPERATOR_HEAD: orders, ANCHORS_HEAD: lines, NAMES_HEAD: names}
    items = words
    for line in ledger.split("\n"):
        if line in heads:
            items = heads[line]
        elif line.startswith("- "):
            items.append(line.removeprefix("- "))
        elif items:
            items[-1] += f"\n{line}"
    others = (("system", "\n".join(orders)), ("tool", "\n".join(lines)), ("assistant", ", ".join(names)))
    return [
        *map(user_message, words),
        *(parse_message({"role": role, "content": content}) for role, content in others if content),
    ]
