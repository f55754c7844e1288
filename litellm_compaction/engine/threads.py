"""Where work over a whole conversation runs, so that the event loop is never held up for long.

A thread that runs Python lets the loop's go on every 5 ms. One call into C does not (`json`, `re`, a copy): what it is
given has to be cut into slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from litellm_compaction.core.messages import Message

# Work over more text than this leaves the event loop: the ledger takes about 0.3 ms for 1,000 characters.
_OFF_LOOP_CHARS = 20_000
# Reading this many messages, parts or calls takes 2 to 3 ms, as does looking through so much text.
_OFF_LOOP_ITEMS, _CHARS_OF_AN_ITEM = 400, 2_000
_Result = TypeVar("_Result")


async def off_loop(messages: Sequence[Message], run: Callable[[], _Result]) -> _Result:
    """Returns what `run`, a walk over `messages`, does; in a thread if it would hold up the event loop."""
    if not is_long(messages) and sum(len(message.text) for message in messages) < _OFF_LOOP_CHARS:
        return run()
    return await asyncio.to_thread(run)


async def off_loop_if(is_long: bool, run: Callable[[], _Result]) -> _Result:
    return await asyncio.to_thread(run) if is_long else run()


def is_long(*lists: object) -> bool:
    """Returns True if lists of JSON, such as `messages` and `tools`, hold so much that a walk takes some ms."""
    left = _OFF_LOOP_ITEMS
    for each in lists:
        if not isinstance(each, Sequence) or isinstance(each, str):
            continue
        left -= len(each)
        if left < 0:
            return True
        for value in each:
            left -= _items(value)
        if left < 0:
            return True
    return False


def _items(value: object) -> int:
    """What a message or a tool counts for besides itself: the lists in it, and its texts.

    What JSON is made of is asked for first: an abstract class takes ten times as long to answer, and each message of a
    conversation is looked at several times in a request.
    """
    if isinstance(value, Message):
        value = value.raw
    if isinstance(value, (dict, Mapping)):
        return sum(_size(part) for part in value.values() if part is not None)
    return _size(value)


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value) // _CHARS_OF_AN_ITEM
    return len(value) if isinstance(value, (list, dict, tuple, Sequence, Mapping)) else 0
