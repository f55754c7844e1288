"""Keeps compactions, facts, settings and events, in one way over the rows and logs of all stores.

A compaction becomes bytes that survive upgrades, field by field as in the dataclasses: missing fields take defaults,
unknown ones go.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from litellm_compaction.core.compaction import Compaction, State, compaction_id, is_sound
from litellm_compaction.errors import StoreError
from litellm_compaction.master_key import Box, is_locked
from litellm_compaction.stores.rows import SETTINGS, Line, Row, Rows

logger = logging.getLogger("litellm_compaction")

MAX_EVENTS = 10_000
_EVENTS = "events"
# A name leads from a tenant to a compaction of its own; words lead from what was said to all compactions of it.
_COMPACTION, _FACT, _NAME, _WORDS = "c:", "f:", "n:", "w:"
# Compactions of the same words and other data.
_MOST_OF_WORDS = 4
# In place of more: which of them is meant cannot be told.
_TOO_MANY = "*"


class StoredCompaction(NamedTuple):
    """A compaction and the store's facts about it; times are seconds since 1970."""

    scope: str
    compaction: Compaction
    created_s: float
    used_s: float
    size_bytes: int  # Its share of the store's bound.

    @property
    def id(self) -> str:
        """Its name in events and on the command line."""
        return compaction_id(self.scope, self.compaction.covered_hash)


class Store:
    """Compactions, facts, settings and the history, over rows.

    Every method may raise `StoreError`, and nothing else; a cancelled call finishes its work. Where there is a master
    key `box` encrypts compactions, their names and settings, and what is not from it counts as not there.
    """

    def __init__(self, rows: Rows, box: Box | None = None) -> None:
        self.rows, self._box = rows, box
        self._has_warned = False

    async def find(self, scope: str, hashes: Sequence[str], words_hashes: Sequence[str] = ()) -> list[Compaction]:
        """Those in `scope` whose covered hash is one of `hashes`, the one that covers most first.

        Args:
            hashes: chain entries of a conversation, shortest prefix first; may be thousands.
            words_hashes: of its words alone. Those under them follow, whatever data they cover, if all that were ever
                kept under such a hash are there.
        """
        keys = [*(_COMPACTION + entry for entry in reversed(hashes)), *(_WORDS + words for words in words_hashes[::-1])]
        rows = await self.rows.find(scope, keys)
        alike = [(_decoded(row.body) or _TOO_MANY).split() for row in rows if row.key.startswith(_WORDS)]
        others = [_COMPACTION + entry for entries in alike for entry in entries if entry not in hashes]
        if others:
            rows += await self.rows.find(scope, others)
        made = {row.key[len(_COMPACTION) :]: row for row in rows if row.key.startswith(_COMPACTION)}
        readable = {
            entry: each for entry, row in made.items() if (each := decode(self._body(row, warns=True))) is not None
        }
        # One that is not there any more may have been the one that is meant.
        sure = {entry for entries in alike if readable.keys() >= set(entries) for entry in entries}
        return [each for entry, each in readable.items() if entry in {*hashes, *sure}]

    async def put(self, scope: str, compaction: Compaction) -> None:
        """Keeps one, in place of an earlier one that covers the same messages."""
        await self._put(scope, _COMPACTION + compaction.covered_hash, encode(compaction))
        if not compaction.words_hash:
            return

        def add(kept: bytes | None, _: float) -> bytes:
            entries = dict.fromkeys([*(_decoded(kept or b"") or "").split(), compaction.covered_hash])
            is_clear = len(entries) <= _MOST_OF_WORDS and _TOO_MANY not in entries
            return encode_text(" ".join(entries) if is_clear else _TOO_MANY)

        key = _WORDS + compaction.words_hash
        try:
            await self.rows.change(scope, key, add)
        except StoreError:
            # In an outage nobody knows which others there are.
            await self.rows.put(scope, key, encode_text(_TOO_MANY))

    async def name(self, owner: str, scope: str, compaction: Compaction) -> None:
        """Lets a tenant find a compaction by its id; the name lives as long as a compaction that is not used."""
        key = _NAME + compaction_id(scope, compaction.covered_hash)
        await self._put(owner, key, encode_text(f"{scope} {compaction.covered_hash}"))

    async def named(self, owner: str, record: str) -> StoredCompaction | None:
        """A tenant's compaction by its id; None for one that is another tenant's, forgotten, or was never there."""
        scope, _, covered_hash = (await self._text(owner, _NAME + record) or "").partition(" ")
        rows = await self.rows.find(scope, [_COMPACTION + covered_hash]) if covered_hash else ()
        return next((found for row in rows if (found := self._stored(row)) is not None and found.id == record), None)

    async def compactions(self) -> list[StoredCompaction]:
        """All that are alive but marks, the most recently used first; looking does not count as use."""
        rows = [row for row in await self.rows.scan() if row.key.startswith(_COMPACTION)]
        return [found for row in rows if (found := self._stored(row)) is not None]

    async def unreadable(self) -> list[Row]:
        """Those compactions and marks that are alive, and not from this box; looking does not count as use."""
        return [row for row in await self.rows.scan() if row.key.startswith(_COMPACTION) and not self._body(row)]

    async def delete(
        self, *, scope: str | None = None, unused_since_s: float | None = None, covered_hash: str | None = None
    ) -> int:
        """Forgets compactions and facts, and events without a scope, last used before a time or at any.

        With `covered_hash` only the one compaction in `scope` that covers exactly these messages. Returns the number of
        compactions among them.
        """
        key = None if covered_hash is None else _COMPACTION + covered_hash
        deleted = await self.rows.delete(scope=scope, before_s=unused_since_s, key=key)
        return sum(each.startswith(_COMPACTION) for each in deleted)

    async def get_fact(self, scope: str, key: str) -> str | None:
        """The fact that was last put under `key`, which may be forgotten at any time."""
        rows = await self.rows.find(scope, [_FACT + key])
        return _decoded(rows[0].body) if rows else None

    async def put_fact(self, scope: str, key: str, text: str) -> None:
        """Keeps a fact, in place of an earlier one under the same key."""
        await self.rows.put(scope, _FACT + key, encode_text(text))

    async def get_setting(self, key: str) -> str | None:
        """The operator's choice under `key`: kept until it is replaced, whatever happens to the rest."""
        return await self._text(SETTINGS, key)

    async def put_setting(self, key: str, text: str) -> None:
        """Keeps a choice; no time to live, no bound, and `delete` leaves it alone."""
        await self._put(SETTINGS, key, encode_text(text))

    async def add_event(self, when_s: float, text: str) -> None:
        """Adds a line to the history; the oldest goes if there are too many."""
        await self.rows.append(_EVENTS, when_s, encode_text(text), most=MAX_EVENTS)

    async def events(self, *, limit: int = MAX_EVENTS, containing: str = "") -> list[Line]:
        """The newest `limit` events with these characters in their text, JSON as `events.py` wrote it, oldest first."""
        if limit <= 0:
            return []
        lines = await self.rows.tail(_EVENTS, most=limit, containing=encode_text(containing))
        return [line for line in lines if _decoded(line.body) is not None]

    async def aclose(self) -> None:
        """Ends it; any number of times."""
        await self.rows.aclose()

    async def _put(self, scope: str, key: str, body: bytes) -> None:
        box = self._box
        await self.rows.put(scope, key, box.locked(body, scope, key) if box and box.has_key else body)

    async def _text(self, scope: str, key: str) -> str | None:
        rows = await self.rows.find(scope, [key])
        return _decoded(body) if rows and (body := self._body(rows[0])) else None

    def _body(self, row: Row, *, warns: bool = False) -> bytes:
        """Opens what was put; b"" if it is not from this box, of which one is warned once."""
        body: bytes | None = b"" if is_locked(row.body) else row.body
        if self._box and self._box.has_key:
            body = self._box.opened(row.body, row.scope, row.key)
        if warns and not body and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "records_unreadable the store holds records that are not encrypted with this proxy's master key; they "
                "count as not there: give workers that share a store the same key, and after a change of it delete "
                "the old ones with `litellm-compaction purge` (logged once)"
            )
        return body or b""

    def _stored(self, row: Row) -> StoredCompaction | None:
        made = decode(self._body(row))
        if made is None or made.undone_messages:
            return None
        return StoredCompaction(row.scope, made, row.created_s, row.used_s, row.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Envelope:
    version: Literal[2]  # The first one had a list of summaries, and is passed over.
    compaction: Compaction


_ADAPTER = TypeAdapter(_Envelope)


def encode(compaction: Compaction) -> bytes:
    """JSON in UTF-8, which holds half surrogate pairs too: clients do send them."""
    return encode_text(json.dumps(_fields(compaction), ensure_ascii=False, separators=(",", ":")))


def digest(compaction: Compaction) -> str:
    """SHA-256 of a compaction's contents, which stays the same when it is put into effect, and in later versions."""
    state: State = "applied" if compaction.is_waiting else compaction.state
    contents = _fields(replace(compaction, state=state, words_hash="", seen=()), exclude_defaults=True)
    return hashlib.sha256(encode_text(json.dumps(contents, ensure_ascii=False, sort_keys=True))).hexdigest()


def _fields(compaction: Compaction, *, exclude_defaults: bool = False) -> Any:
    envelope = _Envelope(version=2, compaction=compaction)
    return _ADAPTER.dump_python(envelope, mode="json", exclude_defaults=exclude_defaults, warnings=False)


def decode(data: bytes) -> Compaction | None:
    """The compaction that `encode` wrote, in whatever version; None if it cannot be read or fits no conversation."""
    try:
        compaction = _ADAPTER.validate_python(json.loads(data.decode("utf-8", "surrogatepass"))).compaction
    except (ValidationError, ValueError, TypeError, RecursionError):
        return None
    return compaction if is_sound(compaction) else None


def encode_text(text: str) -> bytes:
    """Any string of Python's."""
    return text.encode("utf-8", "surrogatepass")


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode("utf-8", "surrogatepass")
    except ValueError:
        return None
