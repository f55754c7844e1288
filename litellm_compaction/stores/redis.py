"""A store in Redis or Valkey, which serves all proxies and workers that name it.

Keys begin with a prefix and the scope as the hash tag, so that what belongs together lies in one slot of a cluster:
`compaction:{SCOPE}:c:HASH` is a compaction, `compaction:{SCOPE}:f:KEY` a fact. What nobody uses is forgotten by the
server; nothing is evicted here, since it may belong to another proxy, and nobody's keys are touched but these.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote, unquote

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.errors import StoreError, TooLargeForStore
from litellm_compaction.redis_address import RedisAddress
from litellm_compaction.stores.protocol import (
    EVENTS_TTL_S,
    MAX_EVENTS,
    MAX_PLOTS,
    Join,
    Plot,
    StoredCompaction,
    StoredEvent,
    decode,
    decode_text,
    encode,
    encode_text,
)
from litellm_compaction.stores.redis_connection import PATIENT_LIMIT_S, RedisConnection, script

_Kind: TypeAlias = Literal["c", "f"]
_Item = TypeVar("_Item")

# A larger one is kept by the process alone: the server is one thread, and everybody waits while it copies.
VALUE_MAX_BYTES = 4 * 1024 * 1024
# All settings together have some hundred bytes.
_SETTING_MAX_BYTES = 65_536
# What one search brings: later compactions of a conversation hold what the earlier ones said.
_FOUND_BYTES = 1024 * 1024
# What one script looks at, so that nobody else waits for it longer than a millisecond or two.
_HASHES_AT_ONCE = 2000
_EVENTS_AT_ONCE = 1000
_ENTRIES_AT_ONCE = 100
# Each fails only because another process has added to the same fact meanwhile.
_MOST_ATTEMPTS = 20
# To join facts of this length takes about 2 ms.
_THREAD_CHARS = 10_000
# What the server keeps around an entry's body: key, fields, expiry (MEMORY USAGE of Redis 7.0, measured 2026-11-23).
OVERHEAD_BYTES = 300


class ServerFacts(NamedTuple):
    """What a server says about itself.

    Attributes:
        policy: what it does when it is full: `maxmemory-policy`.
    """

    version: str
    is_replica: bool
    policy: str

    @property
    def is_too_old(self) -> bool:
        """Whether it lacks streams, which came with Redis 5."""
        major = self.version.partition(".")[0]
        return major.isdigit() and int(major) < 5


class RedisStore:
    """Hashes with a time to live, a stream of events, and small scripts that are atomic on the server.

    May be used from several event loops.

    Args:
        ttl_s: seconds after which an entry that nobody used is forgotten.
        clock: wall clock, seconds since 1970.
        limit_s: seconds after which a listing or deleting step is no longer waited for.
    """

    def __init__(
        self,
        connection: RedisConnection,
        *,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
        limit_s: float = PATIENT_LIMIT_S,
    ) -> None:
        self.connection = connection
        self._ttl_s = ttl_s
        self._clock = clock
        self._limit_s = limit_s
        prefix = connection.address.prefix
        self._prefix = prefix
        self._settings = f"{prefix}:{{settings}}"
        self._events = (f"{prefix}:{{history}}:events", f"{prefix}:{{history}}:number")
        self._plots = (f"{prefix}:{{plots}}:bodies", f"{prefix}:{{plots}}:times")

    async def find(self, scope: str, hashes: Sequence[str]) -> list[Compaction]:
        """The compactions in `scope` whose covered hash is one of `hashes`, the one that covers most first.

        Of very much text the longest come, as many as fit a megabyte.
        """
        found: list[Compaction] = []
        for some in _chunks(reversed(hashes), _HASHES_AT_ONCE):
            found += filter(None, map(decode, await self._use("c", scope, some)))
        return found

    async def put(self, scope: str, compaction: Compaction) -> None:
        """Keeps `compaction`, in place of an earlier one that covers the same messages."""
        await self._put("c", scope, compaction.covered_hash, encode(compaction))

    async def get_fact(self, scope: str, key: str) -> str | None:
        """What was last put under `key`."""
        bodies = await self._use("f", scope, [key])
        return _text(bodies[0]) if bodies else None

    async def put_fact(self, scope: str, key: str, text: str) -> None:
        """Keeps `text`, in place of an earlier one under the same key."""
        await self._put("f", scope, key, encode_text(text))

    async def merge_fact(self, scope: str, key: str, text: str, join: Join) -> str:
        """Adds `text` to what is kept under `key`, if nobody has since it was read, else anew; gives both together."""
        name, (kept, *_) = self._key("f", scope, key), [*await self._use("f", scope, [key]), b""]
        for _ in range(_MOST_ATTEMPTS):
            known = _text(kept) if kept else None
            if known is None:
                both = text
            elif len(known) + len(text) > _THREAD_CHARS:
                both = await asyncio.to_thread(join, known, text)
            else:
                both = join(known, text)
            body, now_s = _bounded(encode_text(both), self.connection.address), self._clock()
            arguments = (repr(now_s), repr(now_s - self._ttl_s), _ms(self._ttl_s), kept, body, VALUE_MAX_BYTES)
            found: bytes | None = await self.connection.run(script("merge_entry"), [name], arguments)
            if found is None:
                return both
            kept = found
        raise StoreError(f"store {self.connection.address} is written by too many at the same time")

    async def get_setting(self, key: str) -> str | None:
        """What an operator chose under `key`."""
        arguments = (encode_text(key), _SETTING_MAX_BYTES)
        body: bytes | int | None = await self.connection.run(script("get_setting"), [self._settings], arguments)
        if isinstance(body, int):
            raise StoreError(
                f"store {self.connection.address} holds {body:,} bytes of settings, which nobody here wrote"
            )
        return None if body is None else _text(body)

    async def put_setting(self, key: str, text: str) -> None:
        """Keeps a choice until it is replaced: it has no time to live."""
        await self.connection.command("HSET", self._settings, encode_text(key), encode_text(text))

    async def add_event(self, when_s: float, text: str) -> None:
        """Adds a line to the history of all processes."""
        arguments = (repr(when_s), encode_text(text), MAX_EVENTS, _ms(EVENTS_TTL_S))
        await self.connection.run(script("add_event"), self._events, arguments)

    async def events(self, *, after: int = 0, limit: int = MAX_EVENTS, containing: str = "") -> list[StoredEvent]:
        """The newest `limit` events with a number above `after` and these characters in them, oldest first."""
        since_s, part = repr(self._clock() - EVENTS_TTL_S), encode_text(containing)
        found: list[StoredEvent] = []
        highest = "+"
        while len(found) < limit:
            at_once = _EVENTS_AT_ONCE if part else min(limit - len(found), _EVENTS_AT_ONCE)
            arguments = (highest, f"{after + 1}-0", at_once, since_s, part)
            lowest, *fields = await self.connection.run(script("find_events"), self._events[:1], arguments)
            for number, when_s, body in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
                if (text := _text(body)) is not None:
                    found.append(StoredEvent(_number(number), float(when_s), text))
            if lowest is None:
                break
            highest = f"{_number(lowest) - 1}-0"
        return found[:limit][::-1] if limit > 0 else []

    async def put_plots(self, plots: Sequence[Plot]) -> None:
        """Keeps plots, in place of earlier ones under the same keys."""
        fields: list[str | bytes | int] = [repr(self._clock() - EVENTS_TTL_S), MAX_PLOTS, _ms(EVENTS_TTL_S)]
        for plot in plots:
            fields += (encode_text(plot.key), repr(plot.when_s), encode_text(plot.text))
        await self.connection.run(script("put_plots"), self._plots, fields)

    async def plots(self, *, containing: str = "") -> list[str]:
        """The texts with these characters in them, the newest first."""
        arguments = (repr(self._clock() - EVENTS_TTL_S), encode_text(containing), VALUE_MAX_BYTES)
        bodies = await self.connection.run(script("find_plots"), self._plots, arguments)
        return [text for body in bodies if (text := _text(body)) is not None]

    async def compactions(self) -> list[StoredCompaction]:
        """All that are alive, the most recently used first."""
        alive_since_s = self._clock() - self._ttl_s
        found: list[StoredCompaction] = []
        for scope, keys in (await self._scan(None)).items():
            for some in _chunks(keys["c"], _ENTRIES_AT_ONCE):
                rows = await self.connection.run(
                    script("list_entries"), some, (VALUE_MAX_BYTES,), limit_s=self._limit_s
                )
                for body, created_s, used_s in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
                    stored = _stored(scope, body, created_s, used_s)
                    if stored is not None and stored.used_s >= alive_since_s:
                        found.append(stored)
        return sorted(found, key=lambda stored: -stored.used_s)

    async def delete(
        self, *, scope: str | None = None, unused_since_s: float | None = None, covered_hash: str | None = None
    ) -> int:
        """Forgets what matches; how many compactions there were among it.

        What is used meanwhile stays. A server that saves to a disk has the rest there until it saves anew.
        """
        if covered_hash is not None:
            only = [self._key("c", scope or "", covered_hash)]
            deleted: int = await self.connection.run(script("delete_entries"), only, ("", 1))
            return deleted
        count = 0
        before_s = "" if unused_since_s is None else repr(unused_since_s)
        for keys in (await self._scan(scope)).values():
            for kind, counted in (("c", _ENTRIES_AT_ONCE), ("f", 0)):
                for some in _chunks(keys[kind], _ENTRIES_AT_ONCE):
                    arguments = (before_s, counted)
                    count += await self.connection.run(script("delete_entries"), some, arguments, limit_s=self._limit_s)
        if scope is None:
            await self._delete_history(unused_since_s)
        return count

    async def about(self) -> ServerFacts:
        """What the server says about itself.

        Raises:
            StoreError: it does not answer.
        """
        said = await self.connection.call(
            lambda client: client.execute_command("INFO"), key=self._settings, limit_s=self._limit_s
        )
        if said and all(isinstance(each, dict) for each in said.values()):
            # Of each server of a cluster.
            said = next(iter(said.values()))
        # Valkey says which Redis it is compatible with, 7.2.4 since its first version.
        return ServerFacts(
            str(said.get("redis_version", "")), said.get("role") == "slave", str(said.get("maxmemory_policy", ""))
        )

    async def aclose(self) -> None:
        """Ends the connection."""
        await self.connection.aclose()

    async def _delete_history(self, before_s: float | None) -> None:
        """Forgets events and plots; the numbers of events go on."""
        if before_s is None:
            await self.connection.command("DEL", self._events[0], limit_s=self._limit_s)
            await self.connection.command("DEL", *self._plots, limit_s=self._limit_s)
            return
        lowest: str | None = "-"
        while lowest is not None:
            arguments = (lowest, _EVENTS_AT_ONCE, repr(before_s))
            seen = await self.connection.run(
                script("delete_events"), self._events[:1], arguments, limit_s=self._limit_s
            )
            lowest = None if seen is None else f"{_number(seen) + 1}-0"
        kept = (repr(before_s), MAX_PLOTS, _ms(EVENTS_TTL_S))
        await self.connection.run(script("put_plots"), self._plots, kept, limit_s=self._limit_s)

    async def _use(self, kind: _Kind, scope: str, names: Sequence[str]) -> list[bytes]:
        now_s = self._clock()
        beginning = self._key(kind, scope, "")
        keys = [beginning + _quoted(name) for name in names]
        if not keys:
            return []
        arguments = (repr(now_s), repr(now_s - self._ttl_s), _ms(self._ttl_s), _FOUND_BYTES, VALUE_MAX_BYTES)
        bodies: list[bytes] = await self.connection.run(script("find_entries"), keys, arguments)
        return bodies

    async def _put(self, kind: _Kind, scope: str, name: str, body: bytes) -> None:
        arguments = (repr(self._clock()), _ms(self._ttl_s), _bounded(body, self.connection.address))
        await self.connection.run(script("put_entry"), [self._key(kind, scope, name)], arguments)

    def _key(self, kind: _Kind, scope: str, name: str) -> str:
        # Hexadecimal digests stay as they are; anything else must neither end the hash tag nor be taken for a pattern.
        return f"{self._prefix}:{{{_quoted(scope)}}}:{kind}:{_quoted(name)}"

    async def _scan(self, scope: str | None) -> Mapping[str, Mapping[str, list[str]]]:
        """The keys of entries, by scope and kind; a cursor goes through the server a step at a time."""
        pattern = f"{self._prefix}:{{{'*' if scope is None else _quoted(scope)}}}:[cf]:*"
        found: dict[str, dict[str, list[str]]] = defaultdict(lambda: {"c": [], "f": []})
        for key in await self.connection.keys(pattern, limit_s=self._limit_s):
            tag, _, rest = key.removeprefix(f"{self._prefix}:{{").partition("}:")
            found[unquote(tag, errors="surrogatepass")][rest[:1]].append(key)
        return found


def _stored(scope: str, body: bytes | None, created_s: bytes | None, used_s: bytes | None) -> StoredCompaction | None:
    if body is None or created_s is None or used_s is None or (compaction := decode(body)) is None:
        return None
    try:
        return StoredCompaction(scope, compaction, float(created_s), float(used_s), len(body) + OVERHEAD_BYTES)
    except ValueError:
        return None


def _bounded(body: bytes, address: RedisAddress) -> bytes:
    if len(body) > VALUE_MAX_BYTES:
        raise TooLargeForStore(f"store {address} takes {VALUE_MAX_BYTES:,} bytes at most, and this has {len(body):,}")
    return body


def _text(body: bytes) -> str | None:
    try:
        return decode_text(body)
    except ValueError:
        return None


def _number(stream_id: bytes) -> int:
    return int(stream_id.partition(b"-")[0])


def _ms(seconds: float) -> int:
    return max(1, round(min(seconds, 1e11) * 1000))


def _quoted(name: str) -> str:
    # Digests need none, and a long conversation has a thousand of them.
    return name if name.isascii() and name.isalnum() else quote(name, safe="", errors="surrogatepass")


def _chunks(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
