"""How much of an answer stands in a record although the rest of it is still shown.

An answer that is carried over the limit is covered up to a place inside it. In the client's next turn it is one
message, so a record that reaches into it says how far: `carry_over` writes that down, `compaction` applies it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from litellm_compaction.core.chain import normal_text
from litellm_compaction.core.enclosures import open_think
from litellm_compaction.core.messages import Message, parse_message, with_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The beginning of a message that a record stands for.

    Attributes:
        chars: how long it is, in characters of the message's normal text.
        text_hash: of exactly those characters.
    """

    chars: int
    text_hash: str


def begun_by(text: str) -> Begun | None:
    """What is begun by an answer that opens with `text` and goes on; None for nothing that a later turn would show.

    Args:
        text: without our notices.
    """
    # Inside a reasoning block everything so far belongs to the block, which is no part of a normal text.
    if open_think(text):
        return None
    # Something to stand behind it: the white space before the next word is part of what was covered.
    seen = normal_text(parse_message({"role": "assistant", "content": f"{text}|"}))[:-1]
    return Begun(chars=len(seen), text_hash=_hash(seen)) if seen else None


def begins(message: Message, begun: Begun) -> bool:
    """Whether `message` is an answer that opens with exactly what was covered, and goes on."""
    text = normal_text(message)
    return message.role == "assistant" and len(text) > begun.chars and _hash(text[: begun.chars]) == begun.text_hash


def behind(message: Message, begun: Begun) -> Message:
    """`message` from there on; its calls stay."""
    return with_text(message, normal_text(message)[begun.chars :])


def shown_behind(messages: Sequence[Message], position: int, begun: Begun | None) -> Sequence[Message]:
    """The same messages; of the one at `position` only what is behind `begun`."""
    if begun is None or position >= len(messages):
        return messages
    return [*messages[:position], behind(messages[position], begun), *messages[position + 1 :]]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
