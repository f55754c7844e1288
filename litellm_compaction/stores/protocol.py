"""What every store does, whatever it is made of, and what it hands out besides compactions.

The engine finds and puts, the history observer adds events, the command line lists and deletes. A compaction becomes
bytes that survive upgrades, field by field as the dataclasses say, so a new field needs no change here: where it is
missing it takes its default, and one that is not known is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from pydantic import TypeAdapter, ValidationError

from litellm_compaction.core.compaction import Compaction, compaction_id, is_sound
from litellm_compaction.core.strategies import is_rung

MAX_EVENTS = 10_000
# Turns of all conversations; each has some 300 bytes.
MAX_PLOTS = 2000
EVENTS_TTL_S = 30 * 86_400.0

# Makes one fact of what is kept and what is new. The order must not matter, nor how often the same comes: a write whose
# answer was lost is made again. It gets whatever text anybody has kept, raises nothing, and may be called more than
# once, from any thread.
Join: TypeAlias = Callable[[str, str], str]

# The scope of what is known of models, and of no tenant: theirs are hashes.
FACTS_SCOPE = "models"


class StoredCompaction(NamedTuple):
    """A compaction and what the store knows about it.

    Attributes:
        created_s, used_s: wall clock, seconds since 1970.
        size_bytes: what it takes of the store's bound.
    """

    scope: str
    compaction: Compaction
    created_s: float
    used_s: float
    size_bytes: int

    @property
    def id(self) -> str:
        """Its name in events and on the command line."""
        return compaction_id(self.scope, self.compaction.covered_hash)


class StoredEvent(NamedTuple):
    """One line of the history.

    Attributes:
        number: grows with every event, also across the processes that share a store.
        when_s: wall clock, seconds since 1970.
        text: JSON, as `events.py` wrote it.
    """

    number: int
    when_s: float
    text: str


class Plot(NamedTuple):
    """How full a conversation's context was with one turn.

    Attributes:
        key: a newer row takes an older one's place.
        when_s: wall clock of the turn, seconds since 1970.
        text: JSON, as `proxy/page/turns.py` wrote it.
    """

    key: str
    when_s: float
    text: str


class Store(Protocol):
    """Where compactions, learned facts, the history and the page's plots are kept.

    Compactions and facts share one time to live, which begins anew with every use, and one bound in bytes, beyond
    which the scope that has most loses its least recently used ones. Events and plots are bounded by number and age.
    Every method may raise `StoreError`, and nothing else; what a cancelled call has begun is finished.
    """

    async def find(self, scope: str, hashes: Sequence[str]) -> list[Compaction]:
        """Those in `scope` whose covered hash is one of `hashes`, the one that covers most first.

        Args:
            hashes: chain entries of a conversation, shortest prefix first; may be thousands.
        """

    async def put(self, scope: str, compaction: Compaction) -> None:
        """Keeps one, in place of an earlier one that covers the same messages."""

    async def get_fact(self, scope: str, key: str) -> str | None:
        """What was last put under `key`: something learned, which may be forgotten at any time."""

    async def put_fact(self, scope: str, key: str, text: str) -> None:
        """Keeps a fact, in place of an earlier one under the same key."""

    async def merge_fact(self, scope: str, key: str, text: str, join: Join) -> str:
        """Adds to a fact, as one step of all processes, so that nobody's part is lost.

        Returns:
            What is kept now: what was there and `text`, joined; `text` where nothing was there.
        """

    async def get_setting(self, key: str) -> str | None:
        """What an operator chose under `key`: kept until it is replaced, whatever becomes of the rest."""

    async def put_setting(self, key: str, text: str) -> None:
        """Keeps a choice; no time to live, no bound, and `delete` leaves it alone."""

    async def add_event(self, when_s: float, text: str) -> None:
        """Adds a line to the history; the oldest goes where there are too many."""

    async def events(self, *, after: int = 0, limit: int = MAX_EVENTS, containing: str = "") -> list[StoredEvent]:
        """The newest `limit` events with a number above `after` and these characters in their text, oldest first."""

    async def put_plots(self, plots: Sequence[Plot]) -> None:
        """Keeps plots, each in place of an earlier one under the same key; the oldest go where there are too many."""

    async def plots(self, *, containing: str = "") -> list[str]:
        """The texts of those with these characters in them, the newest first."""

    async def compactions(self) -> list[StoredCompaction]:
        """All that are alive, the most recently used first; looking is no use."""

    async def delete(
        self, *, scope: str | None = None, unused_since_s: float | None = None, covered_hash: str | None = None
    ) -> int:
        """Forgets compactions and facts: of one scope, or all; last used before a time, or at any.

        With `covered_hash` only the one compaction in `scope` that covers exactly these messages.

        Events and plots have no scope: they are forgotten where `scope` is None, those before the time.

        Returns:
            How many compactions there were among them.
        """

    async def aclose(self) -> None:
        """Ends it; any number of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Envelope:
    version: Literal[1]
    compaction: Compaction


_ADAPTER = TypeAdapter(_Envelope)


def encode(compaction: Compaction) -> bytes:
    """JSON in UTF-8, which holds half surrogate pairs too: clients do send them."""
    fields = _ADAPTER.dump_python(_Envelope(version=1, compaction=compaction), mode="json", warnings=False)
    return encode_text(json.dumps(fields, ensure_ascii=False, separators=(",", ":")))


def decode(data: bytes) -> Compaction | None:
    """The compaction that `encode` wrote, in whatever version; None if it cannot be read or fits no conversation."""
    try:
        compaction = _ADAPTER.validate_python(_as_now(json.loads(decode_text(data)))).compaction
    except (ValidationError, ValueError, RecursionError):
        return None
    return compaction if is_rung(compaction.rung) and is_sound(compaction) else None


def encode_text(text: str) -> bytes:
    """Any string of Python's."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """The string that `encode_text` wrote.

    Raises:
        ValueError: it did not write this.
    """
    return data.decode("utf-8", "surrogatepass")


def _as_now(fields: object) -> object:
    """What was written before several messages could be pinned: one position, or null."""
    compaction = fields.get("compaction") if isinstance(fields, dict) else None
    if isinstance(compaction, dict) and not isinstance(pinned := compaction.get("pinned"), list):
        compaction["pinned"] = [] if pinned is None else [pinned]
    return fields
