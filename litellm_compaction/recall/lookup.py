"""Looks up originals for people: an index for each tenant, made in memory of what is kept when it is first asked for.

An index grows with what is kept meanwhile. It never shows what is kept no more: what a hit is from is read again
before it is shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Message, visible_text
from litellm_compaction.recall.hits import Found, search
from litellm_compaction.recall.index import HANDLE_CHARS, Index, Original

_Result = TypeVar("_Result")
# The scope of a stretch, and its key in there.
Name: TypeAlias = tuple[str, str]

_MOST_TENANTS = 8
# An index takes about twice its text in memory; of more text the older half is forgotten.
_MOST_CHARS, _STRETCHES_AT_ONCE = 20_000_000, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Messages in a row that were kept together."""

    scope: str
    tenant: str
    messages: tuple[Message, ...]
    hashes: tuple[str, ...]  # Their hash chain: one entry more than there are messages.
    kept_s: float  # Seconds since 1970.

    @property
    def name(self) -> Name:
        return self.scope, self.hashes[-1]


class Source(Protocol):
    """Originals by tenant."""

    async def names(self, tenant: str) -> Sequence[Name]: ...
    async def read(self, tenant: str, names: Sequence[Name]) -> Sequence[Stretch]: ...


def indexed(stretches: Iterable[Stretch], index: Index | None = None) -> Index:
    """Returns an index of stretches, oldest first, each behind the one that it goes on from; or adds them to one."""
    # Secrets were left out when they were kept, by the settings of then.
    index = Index(str) if index is None else index
    chains: dict[str, list[Stretch]] = {}
    for stretch in stretches:
        chain = chains.pop(stretch.hashes[0], [])
        chains[stretch.hashes[-1]] = [*chains.get(stretch.hashes[-1], ()), *chain, stretch]
    for chain in chains.values():
        for stretch in chain:
            index.add(stretch.messages, stretch.hashes)
    return index


class Lookup:
    """Searches a tenant's originals, and finds their messages by handle."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._tenants: Bounded[str, _Tenant] = Bounded(_MOST_TENANTS)

    async def search(self, tenant: str, query: str, *, limit: int) -> Found:
        """Returns what is found for a query in what is kept of a tenant's conversations; arguments as `search`."""
        return await self._asked(
            tenant,
            lambda index: search(index, query, limit=limit),
            lambda found: {piece.handle for hit in found.hits for piece in hit.pieces},
        )

    async def find(self, tenant: str, handle: str) -> Sequence[Original]:
        """Returns the parts of a message; none for a handle that is no tenant's, another one's, or expired."""
        return await self._asked(
            tenant, lambda index: index.find(handle), lambda parts: {part.handle for part in parts}
        )

    async def _asked(
        self, tenant: str, ask: Callable[[Index], _Result], handles: Callable[[_Result], Collection[str]]
    ) -> _Result:
        """Asks a tenant's index; once more, anew, if anything of what it says is kept no more."""
        own = self._tenants[tenant] = self._tenants.get(tenant) or _Tenant(self._source, tenant)
        async with own.lock:
            await own.refresh()
            result = await asyncio.to_thread(ask, own.index)
            if not await own.are_kept(handles(result)):
                own.forget()
                await own.refresh()
                result = await asyncio.to_thread(ask, own.index)
            return result


class _Tenant:
    """The index of what is kept of one tenant, and the stretch that each message is from."""

    def __init__(self, source: Source, tenant: str) -> None:
        self.lock = asyncio.Lock()
        self._source, self._tenant = source, tenant
        self.forget()

    def forget(self) -> None:
        self.index = Index(str)
        self._names: set[Name] = set()
        self._chars = 0
        self._stretches: dict[str, Name] = {}

    async def refresh(self) -> None:
        """Adds what is new."""
        listed = await self._source.names(self._tenant)
        stretches = await self._newest([name for name in listed if name not in self._names], _MOST_CHARS)
        if self._chars + sum(map(_chars, stretches)) > _MOST_CHARS:
            self.forget()
            stretches = await self._newest(listed, _MOST_CHARS // 2)
        self._names = {*listed}
        self._chars += sum(map(_chars, stretches))
        for stretch in stretches:
            for entry in stretch.hashes[1:]:
                self._stretches.setdefault(entry[:HANDLE_CHARS], stretch.name)
        # Last: a search that is cancelled ends here, and the thread goes on.
        await asyncio.to_thread(indexed, stretches, self.index)

    async def are_kept(self, handles: Collection[str]) -> bool:
        """Returns True if what some messages are from is still there."""
        names = list({self._stretches[handle] for handle in handles})
        return {stretch.name for stretch in await self._source.read(self._tenant, names)} == set(names)

    async def _newest(self, names: Sequence[Name], most_chars: int) -> list[Stretch]:
        """The last of some stretches, so many characters of them, in their order."""
        newest: list[Stretch] = []
        for end in range(len(names), 0, -_STRETCHES_AT_ONCE):
            for stretch in reversed(
                await self._source.read(self._tenant, names[max(end - _STRETCHES_AT_ONCE, 0) : end])
            ):
                most_chars -= _chars(stretch)
                if most_chars < 0:
                    return newest[::-1]
                newest.append(stretch)
        return newest[::-1]


def _chars(stretch: Stretch) -> int:
    return sum(len(visible_text(message)) for message in stretch.messages)
