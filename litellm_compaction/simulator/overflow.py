"""What happens to a prompt that exceeds the window: cut silently, or refused in one of LM Studio's ways.

Asked once per request that is too long. Which way a real server takes depends on its version and engine; the
reports are bt#237 and bt#546 (silent middle truncation, 0.3), bt#1620 (0.4.0), bt#2322 and goose#11318
(event, 0.4.21), bt#2339 (empty stream), openclaw#141357 (400, 0.4.23).
"""

from __future__ import annotations

from array import array
from typing import Literal

from .rendering import Block, Prompt, Segment
from .vocabulary import decode

Overflow = Literal[
    "truncate_middle", "rolling", "error_400_string", "error_400_object", "error_event", "empty", "crash"
]
MidOverflow = Literal["length", "error", "drop", "stop", "shift"]

# A truncated prompt leaves this share of the window for the answer (simplification; LM Studio's share is not
# known).
_ANSWER_SHARE = 8


def keep_tokens(prompt: Prompt) -> int:
    """The tokens that middle truncation never drops: system, first user message, opening of the answer."""
    return _count(_head(prompt)) + sum(segment.count_tokens() for segment in prompt.opening)


def truncate_middle(prompt: Prompt, window_tokens: int) -> Prompt:
    """The prompt with the middle dropped: system, first user message, and the newest messages that fit.

    The newest message loses its front where it does not fit whole. The caller guarantees
    `keep_tokens(prompt) < window_tokens`.
    """
    return _with_newest(prompt, _head(prompt), window_tokens)


def rolling_window(prompt: Prompt, window_tokens: int) -> Prompt:
    """The prompt with the oldest messages dropped, the system message among the first."""
    return _with_newest(prompt, (), window_tokens)


def _head(prompt: Prompt) -> tuple[Block, ...]:
    for index, block in enumerate(prompt.blocks):
        if block.role == "user":
            return prompt.blocks[: index + 1]
    return prompt.blocks[:1]


def _with_newest(prompt: Prompt, head: tuple[Block, ...], window_tokens: int) -> Prompt:
    fixed = _count(head) + sum(segment.count_tokens() for segment in prompt.opening)
    budget = max(window_tokens - window_tokens // _ANSWER_SHARE, fixed + 1)
    kept: list[Block] = []
    remaining = budget - fixed
    for block in reversed(prompt.blocks[len(head) :]):
        size = block.count_tokens()
        if size > remaining:
            if not kept:
                kept.append(_end_of(block, remaining))
            break
        kept.append(block)
        remaining -= size
    return Prompt((*head, *reversed(kept)), prompt.opening)


def _end_of(block: Block, limit_tokens: int) -> Block:
    *body, closing = block.segments[1:]
    room_tokens = max(0, limit_tokens - closing.count_tokens())
    tokens = [token for segment in body if not segment.is_image for token in segment.tokens()]
    text = decode(array("I", tokens[len(tokens) - room_tokens :] if room_tokens < len(tokens) else tokens))
    # A cut inside a character or before a space can add a token, so the front gives way until it fits.
    while text and Segment(text).count_tokens() > room_tokens:
        text = text[1:]
    return Block(block.role, (Segment(text), closing), text)


def _count(blocks: tuple[Block, ...]) -> int:
    return sum(block.count_tokens() for block in blocks)
