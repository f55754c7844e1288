"""How much of a prompt an instance has already computed: slots with the token sequences of earlier requests.

Called when a request starts (which slot, how many tokens are reused) and when it ends (what the slot then
holds). A slot is chosen as llama.cpp is reported to do (llama.cpp#22746: LCP or LRU): the longest common
prefix where it is a real share of the prompt, else the least recently used one. The share is our choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .rendering import Segment

_MINIMUM_SIMILARITY_RATIO = 0.1


@dataclass(eq=False)
class Slot:
    """One sequence in the KV cache; `busy` while a request computes in it."""

    segments: tuple[Segment, ...] = ()
    last_used: int = 0
    busy: bool = False


class Reuse(NamedTuple):
    """The slot of a request and how many of its prompt's tokens (unscaled) it already holds."""

    slot: Slot
    cached_tokens: int


class KvCache:
    """The slots of one instance."""

    def __init__(self, parallel: int) -> None:
        self._slots = [Slot() for _ in range(parallel)]
        self._clock = 0

    def take(self, segments: tuple[Segment, ...], prompt_tokens: int) -> Reuse:
        """The slot for a prompt, marked busy; the caller makes sure that one of them is free."""
        free = [slot for slot in self._slots if not slot.busy]
        shared = [(common_prefix_tokens(slot.segments, segments), slot) for slot in free]
        cached_tokens, slot = max(shared, key=lambda item: item[0])
        if cached_tokens < _MINIMUM_SIMILARITY_RATIO * prompt_tokens:
            cached_tokens, slot = min(shared, key=lambda item: item[1].last_used)
        slot.busy = True
        slot.segments = segments
        self._touch(slot)
        return Reuse(slot, cached_tokens)

    def give_back(self, slot: Slot, segments: tuple[Segment, ...]) -> None:
        """Free the slot, which now holds prompt and answer."""
        slot.segments = segments
        slot.busy = False
        self._touch(slot)

    def clear(self) -> None:
        """Forget everything, as after a crash."""
        for slot in self._slots:
            slot.segments = ()

    def free_all(self) -> None:
        """Free every slot, when the requests that used them are gone."""
        for slot in self._slots:
            slot.busy = False

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock


def common_prefix_tokens(first: Sequence[Segment], second: Sequence[Segment]) -> int:
    """How many leading tokens two sequences share; only the first difference is looked at by token."""
    shared = 0
    index = 0
    limit = min(len(first), len(second))
    while index < limit and first[index] == second[index]:
        shared += first[index].count_tokens()
        index += 1
    if index < limit and not (first[index].is_image or second[index].is_image):
        for left, right in zip(first[index].tokens(), second[index].tokens(), strict=False):
            if left != right:
                break
            shared += 1
    return shared
