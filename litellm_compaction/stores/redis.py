"""Rows in Redis or Valkey, which serves all proxies and workers that name it.

A row is a value `compaction:{SCOPE}:KEY`: the scope is the hash tag, so that rows that belong together lie in one slot
of a cluster. The server forgets unused rows; nothing is evicted here, since it may belong to another proxy, and no
other keys are touched. All is done by plain commands but the last step of `change`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, MasterDownError, RedisClusterException, RedisError, ResponseError
from redis.exceptions import ConnectionError as NotConnected

from litellm_compaction.concurrency import Tasks, ended
from litellm_compaction.errors import StoreError, TooLargeForStore
from litellm_compaction.stores.rows import LINES_TTL_S, OVERHEAD_BYTES, SETTINGS, Change, Line, Row

Client: TypeAlias = "Redis | RedisCluster"
_Result = TypeVar("_Result")

# A larger one is kept by the process alone: the server is one thread, and all others wait while it copies.
VALUE_MAX_BYTES = 4 * 1024 * 1024
# All settings together have some hundred bytes.
_SETTING_MAX_BYTES = 65_536
# Of a command and of a step of a cursor, so that others wait for a few milliseconds; no log has more lines.
_KEYS_AT_ONCE, _NAMES_AT_ONCE, _LINES_AT_ONCE = 64, 2000, 100_000
# Each attempt fails only because another process has changed the same row meanwhile.
_MOST_ATTEMPTS, _MOST_PAUSE_S = 40, 0.02
# In front of a body: when it was put, and when it was last used, in seconds.
_HEAD, _USED = struct.Struct(">dd"), struct.Struct(">d")
# The clock of all processes, asked where the row lies.
_TIME = "local time = redis.call('TIME'); return time[1] .. '.' .. string.format('%06d', time[2])"
# Replaces a row that is still as it was read: WATCH needs a connection of its own, which redis-py has for no cluster
# before 6. KEYS: the row. ARGV: the value that was read, the last byte that is; the new value or "", its life in ms.
_SWAP = """
local value = redis.pcall('GETRANGE', KEYS[1], 0, ARGV[2])
if (type(value) == 'string' and value or '') ~= ARGV[1] then return 0 end
if ARGV[3] == '' then return redis.call('DEL', KEYS[1]) end
return redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
"""


class RedisRows:
    """Values with a time to live, and streams for logs; may be used from several event loops.

    `prefix` is that of every key, `clock` in place of the server's for `change`, too.
    """

    def __init__(
        self, server: RedisServer, *, prefix: str, ttl_s: float, clock: Callable[[], float] | None = None
    ) -> None:
        self.server, self.prefix, self._clock, self._renews = server, prefix, clock, True
        self._ttl_s, self._lives_ms = ttl_s, int(1000 * min(ttl_s, 1e11))

    def beside(self, part: str, *, ttl_s: float, max_bytes: int) -> RedisRows:
        rows = RedisRows(self.server, prefix=f"{self.prefix}:{part}", ttl_s=ttl_s, clock=self._clock)
        rows._renews = False
        return rows

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        return await self._rows(scope, keys, is_use=scope != SETTINGS)

    async def put(self, scope: str, key: str, body: bytes) -> None:
        ending = () if scope == SETTINGS else ("PX", self._lives_ms)
        await self._all([("SET", self._name(scope, key), self._value(body, self._now_s()), *ending)])

    async def change(self, scope: str, key: str, change: Change) -> None:
        name, last = self._name(scope, key), _HEAD.size + VALUE_MAX_BYTES
        for _ in range(_MOST_ATTEMPTS):
            now, value = await self._all([("EVAL", _TIME, 1, name), ("GETRANGE", name, 0, last)])
            now_s = float(now) if self._clock is None else self._clock()
            row = _row(scope, key, value)
            before = row.body if row is not None and self._is_alive(row, now_s) else None
            after = change(before, now_s)
            if after == before:
                return
            new = b"" if after is None else self._value(after, now_s)
            [is_done] = await self._all([("EVAL", _SWAP, 1, name, value or b"", last, new, self._lives_ms)])
            if is_done:
                return
            await asyncio.sleep(random.random() * _MOST_PAUSE_S)  # noqa: S311 - no secret
        raise StoreError(f"store {self.server.place} is written by too many at the same time")

    async def scan(self) -> list[Row]:
        return await self._scanned(None)

    async def delete(
        self, *, scope: str | None = None, before_s: float | None = None, key: str | None = None
    ) -> list[str]:
        """Deletes rows; a server's copy on a disk holds them until it saves anew."""
        rows = await self._scanned(scope) if key is None else await self._rows(scope or "", [key], is_use=True)
        doomed = [row for row in rows if before_s is None or row.used_s < before_s]
        await self._all([("DEL", self._name(row.scope, row.key)) for row in doomed], is_patient=key is None)
        for stream in await self._keys(f"{self.prefix}:log:*:lines") if scope is None and key is None else ():
            lines = await self._lines(stream, _LINES_AT_ONCE)
            old = [
                f"{line.number // 1000}-{line.number % 1000}"
                for line in lines
                if before_s is None or line.when_s < before_s
            ]
            await self._all([("XDEL", stream, *old)] if old else [], is_patient=True)
        return [row.key for row in doomed]

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        stream = f"{self.prefix}:log:{{{log}}}:lines"
        added = ("XADD", stream, "MAXLEN", most, "*", "when_s", repr(when_s), "body", body)
        await self._all([added, ("PEXPIRE", stream, round(LINES_TTL_S * 1000))])

    async def tail(self, log: str, *, most: int, containing: bytes = b"") -> list[Line]:
        since_s, stream = self._now_s() - LINES_TTL_S, f"{self.prefix}:log:{{{log}}}:lines"
        lines = await self._lines(stream, _LINES_AT_ONCE if containing else most)
        return [line for line in lines if line.when_s >= since_s and containing in line.body][-most:]

    async def aclose(self) -> None:
        await self.server.aclose()

    async def _rows(self, scope: str, keys: Sequence[str], *, is_use: bool) -> list[Row]:
        """The rows that are alive; one that is larger than any that is written here is deleted."""
        now_s = self._now_s()
        names = [self._name(scope, key) for key in keys]
        asked = [("MGET", *names[at : at + _KEYS_AT_ONCE]) for at in range(0, len(names), _KEYS_AT_ONCE)]
        values = itertools.chain(*await self._all(asked, is_patient=not is_use))
        rows = [row for key, value in zip(keys, values, strict=True) if (row := _row(scope, key, value)) is not None]
        alive = [row for row in rows if self._is_alive(row, now_s)]
        after: list[tuple[Any, ...]] = [("DEL", self._name(scope, row.key)) for row in rows if row not in alive]
        for row in alive if is_use and self._renews else ():
            name, used = self._name(scope, row.key), _USED.pack(max(now_s, row.used_s))
            after += [("SETRANGE", name, _USED.size, used), ("PEXPIRE", name, self._lives_ms)]
        # A server that is full or read-only refuses to note the use, and still finds.
        await self._all(after, may_refuse=True)
        return alive

    async def _all(
        self, commands: Sequence[tuple[Any, ...]], *, is_patient: bool = False, may_refuse: bool = False
    ) -> list[Any]:
        """The answers to commands that touch one scope or log; None for what is another program's kind of value."""
        if not commands:
            return []

        async def send(client: Client) -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command, NEVER_DECODE=True)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
            for at, answer in enumerate(answers):
                if isinstance(answer, ResponseError) and (may_refuse or str(answer).startswith("WRONGTYPE")):
                    answers[at] = None
                elif isinstance(answer, Exception):
                    raise answer
            return answers

        return await self.server.call(send, is_patient=is_patient)

    async def _lines(self, stream: str, most: int) -> list[Line]:
        """The newest lines, oldest first; another program's are left out."""
        [entries] = await self._all([("XREVRANGE", stream, "+", "-", "COUNT", most)])
        lines: list[Line] = []
        for line_id, fields in reversed(entries or ()):
            ms, number = map(int, line_id.split(b"-"))
            with contextlib.suppress(KeyError, ValueError):
                lines.append(Line(ms * 1000 + number, float(fields[b"when_s"]), fields[b"body"]))
        return lines

    async def _scanned(self, scope: str | None) -> list[Row]:
        """All rows that are alive but settings, of one scope or all, the last used first."""
        keys: dict[str, list[str]] = {}
        for name in await self._keys(f"{self.prefix}:{{{'*' if scope is None else _quoted(scope)}}}:*"):
            tag, _, key = name.removeprefix(f"{self.prefix}:{{").partition("}:")
            keys.setdefault(unquote(tag, errors="surrogatepass"), []).append(unquote(key, errors="surrogatepass"))
        rows = [await self._rows(owner, some, is_use=False) for owner, some in keys.items() if owner != SETTINGS]
        return sorted(itertools.chain(*rows), key=lambda row: -row.used_s)

    async def _keys(self, pattern: str) -> list[str]:
        """The keys of all servers that match; a cursor goes through each a step at a time."""

        async def scan(client: Client) -> list[str]:
            names = {name async for name in client.scan_iter(match=pattern, count=_NAMES_AT_ONCE)}
            return [name if isinstance(name, str) else name.decode("utf-8", "replace") for name in names]

        return await self.server.call(scan, is_patient=True)

    def _now_s(self) -> float:
        return time.time() if self._clock is None else self._clock()

    def _is_alive(self, row: Row, now_s: float) -> bool:
        if row.scope == SETTINGS:
            return len(row.body) <= _SETTING_MAX_BYTES
        return len(row.body) <= VALUE_MAX_BYTES and row.used_s >= now_s - self._ttl_s

    def _name(self, scope: str, key: str) -> str:
        # Hexadecimal digests stay as they are; anything else must neither end the hash tag nor be taken for a pattern.
        return f"{self.prefix}:{{{_quoted(scope)}}}:{_quoted(key)}"

    def _value(self, body: bytes, now_s: float) -> bytes:
        if len(body) > VALUE_MAX_BYTES:
            raise TooLargeForStore(
                f"store {self.server.place} takes {VALUE_MAX_BYTES:,} bytes at most, and this has {len(body):,}"
            )
        return _HEAD.pack(now_s, now_s) + body


def _row(scope: str, key: str, value: bytes | None) -> Row | None:
    """None for what was not written here: nothing that was has an empty body, or no time."""
    if value is None or len(value) <= _HEAD.size:
        return None
    created_s, used_s = _HEAD.unpack_from(value)
    body = value[_HEAD.size :]
    is_ours = created_s > 0 and math.isfinite(created_s) and math.isfinite(used_s)
    return Row(scope, key, body, created_s, used_s, len(body) + OVERHEAD_BYTES) if is_ours else None


def _quoted(name: str) -> str:
    # Digests need none, and a long conversation has a thousand of them.
    return name if name.isascii() and name.isalnum() else quote(name, safe=":", errors="surrogatepass")


# A server answers within a few milliseconds, or some ten while it forks. The wait goes in steps: an event loop that was
# held up itself sees the answer in the next one.
LIMIT_S, _STEPS = 0.25, 10
# An operator's listing or deletion waits longer than a request does.
PATIENT_LIMIT_S = 10.0
_CONNECT_LIMIT_S = 2.0
# A server that cannot be reached is left alone for so long.
_REST_S = 1.0
_MOST_CONNECTIONS = 32
_ERRORS = (RedisError, RedisClusterException, OSError, ValueError, asyncio.TimeoutError)


def client_of(url: str, *, limit_s: float = LIMIT_S) -> Redis:
    """Returns a client, which connects with its first command; of many calls at once each waits `limit_s` at most."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_MOST_CONNECTIONS,
        timeout=limit_s,
        socket_timeout=PATIENT_LIMIT_S,
        socket_connect_timeout=max(_CONNECT_LIMIT_S, limit_s),
        # A caller that fails has the memory of its process; the next call is the retry.
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return Redis.from_pool(pool)


class RedisServer:
    """Runs commands on a server or cluster, and says within a time limit that it cannot.

    After a missing answer all calls fail at once, until that answer comes after all or a while has gone by. A command
    that the server refuses (full, read-only, no right) fails by itself.

    Args:
        clients: gives a client of the running event loop, which ends with the store if the store `owns` it.
        place: the server, for people, without credentials.
        limit_s: seconds after which a call is no longer waited for, connecting included.
    """

    def __init__(self, clients: Callable[[], Client], place: str, *, owns: bool, limit_s: float = LIMIT_S) -> None:
        self.place = place
        self._clients, self._owns, self._limit_s = clients, owns, limit_s
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = WeakKeyDictionary()
        self._failure, self._rests_until_s = "", -math.inf
        self._running = Tasks()

    async def call(self, job: Callable[[Client], Awaitable[_Result]], *, is_patient: bool) -> _Result:
        """Returns the result of `job` on the client; a cancelled caller does not stop it.

        `is_patient`: an operator waits for it. A StoreError says that the server does not answer, or refuses.
        """
        if time.monotonic() < self._rests_until_s:
            raise StoreError(self._failure)
        limit_s = max(PATIENT_LIMIT_S, self._limit_s) if is_patient else self._limit_s
        task = self._running.begin(self._attempt(job))
        # The event loop would complain of an error that is not waited for.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        if await is_done(task, limit_s):
            return task.result()
        # It goes on: if the first of its sentinels is gone, a server is found after redis-py's own retries.
        raise self._rest(f"store {self.place} did not answer in {limit_s:g} s", PATIENT_LIMIT_S)

    async def aclose(self) -> None:
        """Ends running commands and own connections of this event loop; any number of times."""
        here = asyncio.get_running_loop()
        if running := [task for task in self._running if task.get_loop() is here]:
            await asyncio.wait(running, timeout=self._limit_s)
        await ended(running)
        self._rest(f"store {self.place} is closed", math.inf)
        if (client := self._by_loop.pop(here, None)) is not None:
            with contextlib.suppress(*_ERRORS):
                await client.aclose()

    async def _attempt(self, job: Callable[[Client], Awaitable[_Result]]) -> _Result:
        loop = asyncio.get_running_loop()
        try:
            client = self._by_loop.get(loop) or self._clients()
            if self._owns:
                self._by_loop[loop] = client
            result = await asyncio.wait_for(job(client), max(PATIENT_LIMIT_S, self._limit_s))
        except _ERRORS as error:
            said = f"store {self.place} {_said(error)}"
            # One that answers is there, whatever it refuses.
            if isinstance(error, ResponseError) and not isinstance(error, (ClusterDownError, MasterDownError)):
                raise StoreError(said) from error
            raise self._rest(said, _REST_S) from error
        self._rests_until_s = -math.inf
        return result

    def _rest(self, said: str, pause_s: float) -> StoreError:
        """Makes calls fail at once for a while."""
        self._failure, self._rests_until_s = said, time.monotonic() + pause_s
        return StoreError(said)


async def is_done(task: asyncio.Future[Any], limit_s: float) -> bool:
    """Waits for a task, which runs on; the limit counts how often this loop could look."""
    for _ in range(_STEPS):
        done, _ = await asyncio.wait({task}, timeout=limit_s / _STEPS)
        if done:
            return True
    return False


def _said(error: BaseException) -> str:
    """An error in words, by its code or its kind: its own words may quote keys, users, and an address."""
    code = str(error).partition(" ")[0]
    if isinstance(error, ResponseError) and code.isascii() and code.isalpha() and code.isupper() and code != "ERR":
        return f"refuses: {code}"
    if type(error) in (NotConnected, RedisClusterException) or isinstance(error, OSError):
        return "cannot be reached"
    return f"fails: {type(error).__name__}"
