"""Short notes by which processes tell each other what they are doing right now: one protocol, and one in memory.

The processes that share a store share a board. `engine/` keeps there which process holds how much of a shared context,
and who is making which summary. A note lives for seconds unless it is renewed, so that nothing of a process that was
killed stays; no conversation's text is ever in one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

_Result = TypeVar("_Result")

# Longer than any lease: what ends later than this was written by a clock that has been set back, or before a restart.
MAX_LEASE_S = 60.0
# A note that says nothing new is written again when so much of its life is over.
RENEWED_RATIO = 0.2

# Gets the others' notes, and gives the own new one, None for none, with what it means.
Decide: TypeAlias = "Callable[[Sequence[bytes]], tuple[bytes | None, _Result]]"


class Board(Protocol):
    """Notes by topic, each under its writer's name."""

    async def update(self, topic: str, name: str, decide: Decide[_Result], *, lease_s: float) -> _Result:
        """Reads what others have written under a topic and replaces one's own note, as one step of all processes.

        Args:
            topic: what the notes are about.
            name: of the writer; nobody else's note is changed.
            decide: may be called more than once, from any thread, and only the last counts. A note has a byte at least.
            lease_s: how long the note lives if it is not renewed, up to `MAX_LEASE_S`.

        Returns:
            What `decide` gave beside the note.

        Raises:
            StoreError: the board cannot be reached; whether the note was written is not known.
        """

    async def aclose(self) -> None:
        """Ends it; any number of times."""


class _Note(NamedTuple):
    body: bytes
    until_s: float


class MemoryBoard:
    """A board for those who share a process.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._topics: dict[str, dict[str, _Note]] = {}

    async def update(self, topic: str, name: str, decide: Decide[_Result], *, lease_s: float) -> _Result:
        """Reads what others have written, and replaces one's own note."""
        now_s = self._clock()
        notes = {
            each: note for each, note in self._topics.get(topic, {}).items() if now_s < note.until_s or each == name
        }
        mine, result = decide([note.body for each, note in notes.items() if each != name])
        notes.pop(name, None)
        if mine is not None:
            notes[name] = _Note(mine, now_s + lease_s)
        self._topics[topic] = notes
        if not notes:
            del self._topics[topic]
        return result

    async def aclose(self) -> None:
        """Nothing is open."""
