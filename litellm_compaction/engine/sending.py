"""What was last sent upstream for a conversation, so that a server's prefix cache can be reckoned with.

LM Studio keeps the KV cache of a slot's last prompt (facts of LM Studio 0.3 and 0.4: prefix reuse in both engines) and
reports no cached tokens, so the engine remembers what it sent. Noted by `outgoing.py`, asked when a summary is made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from litellm_compaction.core.compaction import Compaction

_MAX_ENTRIES = 4096


class Sent(NamedTuple):
    """A prompt that was sent.

    Attributes:
        covered_hash: of the compaction that was applied, "" for none.
        messages: how many messages after the lead the conversation had.
    """

    covered_hash: str
    messages: int


class SentPrompts:
    """The newest prompts by conversation; used between two awaits only, so it needs no lock."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str, str], Sent] = OrderedDict()

    def note(self, scope: str, target_key: str, hashes: Sequence[str], compaction: Compaction | None) -> None:
        """Remembers that a conversation was sent with `compaction` applied.

        Args:
            scope: who may know of it.
            target_key: the deployment.
            hashes: the conversation's chain, entry 0 for the empty one.
            compaction: None for the messages as they were.
        """
        key = (scope, target_key, hashes[-1])
        self._entries[key] = Sent(compaction.covered_hash if compaction else "", len(hashes) - 1)
        self._entries.move_to_end(key)
        if len(self._entries) > _MAX_ENTRIES:
            self._entries.popitem(last=False)

    def last(self, scope: str, target_key: str, hashes: Sequence[str]) -> Sent | None:
        """The longest prompt of this conversation that was sent before; None where none is known."""
        for covered_hash in reversed(hashes[1:]):
            found = self._entries.get((scope, target_key, covered_hash))
            if found is not None:
                return found
        return None
