"""Rows in Redis or Valkey, which serves all proxies and workers that name it.

A row is a hash `compaction:{SCOPE}:KEY`: the scope is the hash tag, so that rows that belong together lie in one slot
of a cluster. The server forgets unused rows; nothing is evicted here, since it may belong to another proxy, and no
other keys are touched. The server's time is the clock of all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import islice
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as NotConnected

from litellm_compaction.concurrency import Tasks, ended
from litellm_compaction.errors import StoreError, TooLargeForStore
from litellm_compaction.stores.rows import LINES_TTL_S, OVERHEAD_BYTES, SETTINGS, Change, Line, Row

_Item = TypeVar("_Item")

# A larger one is kept by the process alone: the server is one thread, and all others wait while it copies.
VALUE_MAX_BYTES = 4 * 1024 * 1024
# All settings together have some hundred bytes.
_SETTING_MAX_BYTES = 65_536
# The most that one search brings: later compactions of a conversation hold the earlier ones' facts.
_FOUND_BYTES = 1024 * 1024
# The most that one script looks at, so that it holds others up for no more than a millisecond or two.
_KEYS_AT_ONCE = 2000
_LINES_AT_ONCE = 1000
_ROWS_AT_ONCE = 100
# Each attempt fails only because another process has changed the same row meanwhile.
_MOST_ATTEMPTS = 40
_MOST_PAUSE_S = 0.02
# To join facts of this length takes about 2 ms.
_THREAD_BYTES = 10_000


class RedisRows:
    """Hashes with a time to live, streams for logs, and small scripts that are atomic on the server.

    May be used from several event loops.

    Args:
        prefix: of every key.
        ends_server: whether it ends with these rows; other rows may be there too.
        ttl_s: seconds after which an unused row is forgotten.
        clock: seconds, in place of the server's.
    """

    def __init__(
        self,
        server: RedisServer,
        *,
        prefix: str,
        ttl_s: float,
        ends_server: bool = True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.server = server
        self.prefix = prefix
        self._ttl_s = min(ttl_s, 1e11)
        self._ends_server = ends_server
        self._clock = clock

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        """Of very much text the first rows come, as many as fit a megabyte."""
        found: list[Row] = []
        for some in _chunks(keys, _KEYS_AT_ONCE):
            found += await self._rows(scope, some, most_bytes=_FOUND_BYTES)
        return found

    async def put(self, scope: str, key: str, body: bytes) -> None:
        await self.server.run("swap", [self._name(scope, key)], (*self._terms(scope), "put", self._bounded(body)))

    async def change(self, scope: str, key: str, change: Change) -> None:
        name, terms = [self._name(scope, key)], self._terms(scope)
        found = await self.server.run("swap", name, (*terms, "look"))
        for attempt in range(_MOST_ATTEMPTS):
            now_s, kept = float(found[0]), found[1] or None
            is_long = kept is not None and len(kept) > _THREAD_BYTES
            after = await asyncio.to_thread(change, kept, now_s) if is_long else change(kept, now_s)
            if after == kept:
                return
            body = b"" if after is None else self._bounded(after)
            found = await self.server.run("swap", name, (*terms, "swap", body, kept or b""))
            if found is None:
                return
            await asyncio.sleep(random.uniform(0, min(_MOST_PAUSE_S, 0.001 * 2**attempt)))  # noqa: S311 - no secret
        raise StoreError(f"store {self.server.place} is written by too many at the same time")

    async def scan(self) -> list[Row]:
        found: list[Row] = []
        for scope, keys in (await self._names(None)).items():
            for some in _chunks(keys, _ROWS_AT_ONCE):
                found += await self._rows(scope, some, most_bytes=_ROWS_AT_ONCE * VALUE_MAX_BYTES, is_use=False)
        return sorted(found, key=lambda row: -row.used_s)

    async def delete(
        self, *, scope: str | None = None, before_s: float | None = None, key: str | None = None
    ) -> list[str]:
        """Deletes rows but those used meanwhile; a server's copy on a disk holds the rest until it saves anew."""
        deleted: list[str] = []
        names = await self._names(scope) if key is None else {scope or "": [key]}
        for owner, keys in names.items():
            for some in _chunks(keys, _ROWS_AT_ONCE):
                arguments = ("" if before_s is None else repr(before_s),)
                rows = [self._name(owner, each) for each in some]
                indices = await self.server.run("delete", rows, arguments, is_patient=key is None)
                deleted += [some[index - 1] for index in indices]
        if scope is None and key is None:
            await self._delete_lines(before_s)
        return deleted

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        await self.server.run("append", self._log(log), (repr(when_s), body, most, round(LINES_TTL_S * 1000)))

    async def tail(self, log: str, *, after: int = 0, most: int, containing: bytes = b"") -> list[Line]:
        since_s = (time.time() if self._clock is None else self._clock()) - LINES_TTL_S
        return await self._tail(self._log(log), after=after, most=most, containing=containing, since_s=since_s)

    async def aclose(self) -> None:
        if self._ends_server:
            await self.server.aclose()

    async def _rows(self, scope: str, keys: Sequence[str], *, most_bytes: int, is_use: bool = True) -> list[Row]:
        now, ttl, most = self._terms(scope)
        beginning = self._name(scope, "")
        names = [beginning + _quoted(key) for key in keys]
        found = await self.server.run("find", names, (now, ttl, most_bytes, most, int(is_use)), is_patient=not is_use)
        return [
            Row(scope, keys[index - 1], body, float(created_s), float(used_s), len(body) + OVERHEAD_BYTES)
            for index, body, created_s, used_s in zip(*(iter(found),) * 4, strict=True)
        ]

    async def _tail(
        self, log: Sequence[str], *, after: int = 0, most: int, containing: bytes = b"", since_s: float = 0.0
    ) -> list[Line]:
        found: list[Line] = []
        highest = "+"
        while len(found) < most:
            at_once = _LINES_AT_ONCE if containing else min(most - len(found), _LINES_AT_ONCE)
            arguments = (highest, f"{after + 1}-0", at_once, repr(since_s), containing)
            lowest, *fields = await self.server.run("tail", log[:1], arguments)
            for number, when_s, body in zip(*(iter(fields),) * 3, strict=True):
                found.append(Line(_number(number), float(when_s), body))
            if lowest is None:
                break
            highest = f"{_number(lowest) - 1}-0"
        return found[:most][::-1]

    async def _delete_lines(self, before_s: float | None) -> None:
        """Numbers go on."""
        for stream in await self._keys(f"{self.prefix}:log:*:lines"):
            if before_s is None:
                await self._command("DEL", stream)
                continue
            lines = await self._tail([stream], most=1_000_000)
            for some in _chunks((f"{line.number}-0" for line in lines if line.when_s < before_s), _LINES_AT_ONCE):
                await self._command("XDEL", stream, *some)

    async def _command(self, *words: str) -> None:
        await self.server.call(lambda client: client.execute_command(*words), is_patient=True)

    async def _names(self, scope: str | None) -> dict[str, list[str]]:
        """The keys of all possible rows but settings, by scope."""
        names: dict[str, list[str]] = {}
        for name in await self._keys(self._name("*" if scope is None else _quoted(scope), "*", is_quoted=True)):
            tag, _, key = name.removeprefix(f"{self.prefix}:{{").partition("}:")
            owner = unquote(tag, errors="surrogatepass")
            if owner != SETTINGS:
                names.setdefault(owner, []).append(unquote(key, errors="surrogatepass"))
        return names

    async def _keys(self, pattern: str) -> list[str]:
        """The keys of all servers that match; a cursor goes through each a step at a time."""

        async def scan(client: Client) -> list[str]:
            found = {name async for name in client.scan_iter(match=pattern, count=_KEYS_AT_ONCE)}
            return [name if isinstance(name, str) else name.decode("utf-8", "replace") for name in found]

        return await self.server.call(scan, is_patient=True)

    def _terms(self, scope: str) -> tuple[str, str, int]:
        """now_s, ttl_s and the bound of a body, as scripts want them."""
        now = "" if self._clock is None else repr(self._clock())
        return (now, "", _SETTING_MAX_BYTES) if scope == SETTINGS else (now, repr(self._ttl_s), VALUE_MAX_BYTES)

    def _name(self, scope: str, key: str, *, is_quoted: bool = False) -> str:
        # Hexadecimal digests stay as they are; anything else must neither end the hash tag nor be taken for a pattern.
        scope, key = (scope, key) if is_quoted else (_quoted(scope), _quoted(key))
        return f"{self.prefix}:{{{scope}}}:{key}"

    def _log(self, log: str) -> tuple[str, str]:
        return f"{self.prefix}:log:{{{log}}}:lines", f"{self.prefix}:log:{{{log}}}:number"

    def _bounded(self, body: bytes) -> bytes:
        if len(body) > VALUE_MAX_BYTES:
            raise TooLargeForStore(
                f"store {self.server.place} takes {VALUE_MAX_BYTES:,} bytes at most, and this has {len(body):,}"
            )
        return body


def _number(stream_id: bytes) -> int:
    return int(stream_id.partition(b"-")[0])


def _quoted(name: str) -> str:
    # Digests need none, and a long conversation has a thousand of them.
    return name if name.isascii() and name.isalnum() else quote(name, safe=":", errors="surrogatepass")


def _chunks(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


Client: TypeAlias = "Redis | RedisCluster"
_Result = TypeVar("_Result")

# Redis answers within a millisecond or a few; a fork for its snapshot or another program's script holds it for some
# ten. The wait goes in steps, so that an event loop that was held up itself does not take the server for slow: it sees
# the answer in the next step.
LIMIT_S, _STEPS = 0.25, 10
# An operator's listing or deletion waits longer than a request does.
PATIENT_LIMIT_S = 10.0
_CONNECT_LIMIT_S = 2.0
# The pauses between looks for a server: short at first, then longer. The spread keeps processes apart that lost it in
# the same moment. If the first of its sentinels is gone, it is found after redis-py's own retries.
_FIRST_LOOK_S, _LAST_LOOK_S, _LOOK_LIMIT_S = 0.25, 5.0, 10.0
_SPREAD = (0.5, 1.5)
_MOST_CONNECTIONS = 32
_CODE_CHARS = 40
_ERRORS = (RedisError, RedisClusterException, OSError, ValueError)


def client_of(url: str, *, limit_s: float = LIMIT_S) -> Redis:
    """Returns a client, which connects with its first command; of many calls at once each waits `limit_s` at most."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_MOST_CONNECTIONS,
        timeout=limit_s,
        socket_timeout=PATIENT_LIMIT_S,
        socket_connect_timeout=max(_CONNECT_LIMIT_S, limit_s),
        # A caller that fails has the memory of its process; the look in the background is the retry.
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return Redis.from_pool(pool)


class OwnClients:
    """The client of each event loop, which ends with the store; the proxy's own does not."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = WeakKeyDictionary()

    def __call__(self) -> Client:
        loop = asyncio.get_running_loop()
        if (client := self._by_loop.get(loop)) is None:
            self._by_loop[loop] = client = self._make()
        return client

    async def aclose(self) -> None:
        """Ends the connections of this event loop."""
        client = self._by_loop.pop(asyncio.get_running_loop(), None)
        if client is None:
            return
        # redis-py leaves open those to the sentinels.
        manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
        for each in (client, *getattr(manager, "sentinels", ())):
            with contextlib.suppress(*_ERRORS):
                await each.aclose()


class RedisServer:
    """Runs commands on a server or cluster, and says within a time limit that it cannot.

    After a missing answer all calls fail at once until the server is seen to answer: a look every few seconds, in the
    background. A command that the server refuses (full, read-only, no right) fails by itself, without a wait.

    Args:
        clients: gives the client of the running event loop.
        place: the server, for people, without credentials.
        rests: whether to fail at once after a failure; if not, each call tries anew, as an operator's command does.
        limit_s: seconds after which a call is no longer waited for, connecting included.
    """

    def __init__(
        self, clients: Callable[[], Client], place: str, *, rests: bool = True, limit_s: float = LIMIT_S
    ) -> None:
        self.place = place
        self._clients = clients
        self._rests = rests
        self._limit_s = limit_s
        self._failure = ""
        self._look: asyncio.Task[None] | None = None
        self._running = Tasks()
        self._is_closed = False

    async def run(
        self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int] = (), *, is_patient: bool = False
    ) -> Any:
        """Returns the result of the script in `stores/scripts/SCRIPT.lua`: integers, bytes, None, and lists of these.

        Args:
            keys: all that the script touches, one at least; in a cluster all have the same hash tag.
            is_patient: an operator waits for it.

        Raises:
            StoreError: the server does not answer, or refuses.
        """
        text, digest = _script(script)

        async def evaluate(client: Client) -> Any:
            rest = (len(keys), *keys, *arguments)
            try:
                return await client.execute_command("EVALSHA", digest, *rest, NEVER_DECODE=True)
            except NoScriptError:
                return await client.execute_command("EVAL", text, *rest, NEVER_DECODE=True)

        return await self.call(evaluate, key=keys[0], is_patient=is_patient)

    async def call(
        self, job: Callable[[Client], Awaitable[_Result]], *, key: str = "", is_patient: bool = False
    ) -> _Result:
        """Returns the result of `job` on the client; a cancelled caller does not stop it.

        Args:
            key: one that is touched, to look if its server is back; "" for no one server's.
            is_patient: an operator waits for it.

        Raises:
            StoreError: the server does not answer, or refuses.
        """
        if self._failure:
            raise StoreError(self._failure)
        if self._is_closed:
            raise StoreError(f"store {self.place} is closed")
        limit_s = max(PATIENT_LIMIT_S, self._limit_s) if is_patient else self._limit_s
        task = self._running.begin(self._attempt(job, key))
        # The event loop would complain of an error that is not waited for.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        if await is_done(task, limit_s):
            return task.result()
        task.cancel()
        raise self._rest(f"store {self.place} did not answer in {limit_s:g} s", key)

    async def aclose(self) -> None:
        """Ends running commands; any number of times."""
        self._is_closed = True
        here = asyncio.get_running_loop()
        if running := [task for task in self._running if task.get_loop() is here]:
            await asyncio.wait(running, timeout=self._limit_s)
        tasks = running if self._look is None else [*running, self._look]
        await ended([task for task in tasks if task.get_loop() is here])
        if isinstance(self._clients, OwnClients):
            await self._clients.aclose()

    async def _attempt(self, job: Callable[[Client], Awaitable[_Result]], key: str) -> _Result:
        try:
            return await job(self._clients())
        except _ERRORS as error:
            said = f"store {self.place} {_said(error)}"
            # One that answers is there, whatever it refuses.
            if isinstance(error, ResponseError) and not isinstance(error, (ClusterDownError, MasterDownError)):
                raise StoreError(said) from error
            raise self._rest(said, key) from error

    def _rest(self, said: str, key: str) -> StoreError:
        """Makes calls fail at once from now on, until the server is seen to answer."""
        if self._rests and not self._failure and not self._is_closed:
            self._failure = said
            self._look = asyncio.ensure_future(self._look_until_it_is_back(key))
        return StoreError(said)

    async def _look_until_it_is_back(self, key: str) -> None:
        pause_s, is_back = _FIRST_LOOK_S, False
        try:
            while not is_back:
                await asyncio.sleep(pause_s * random.uniform(*_SPREAD))  # noqa: S311 - no secret
                pause_s = min(2 * pause_s, _LAST_LOOK_S)
                with contextlib.suppress(*_ERRORS, StoreError, asyncio.TimeoutError):
                    look = ("EXISTS", key) if key else ("PING",)
                    await asyncio.wait_for(self._clients().execute_command(*look), _LOOK_LIMIT_S)
                    is_back = True
        finally:
            # Also if its event loop ends: another one's calls find out for themselves.
            self._failure = ""


async def is_done(task: asyncio.Future[Any], limit_s: float) -> bool:
    """Waits for a task, which runs on; the limit counts how often this loop could look."""
    for _ in range(_STEPS):
        done, _ = await asyncio.wait({task}, timeout=limit_s / _STEPS)
        if done:
            return True
    return False


@cache
def _script(name: str) -> tuple[str, str]:
    """A script and its SHA-1, by which the server knows it after the first run."""
    text = (files(__package__) / "scripts" / f"{name}.lua").read_text(encoding="utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _said(error: BaseException) -> str:
    """An error in words, by its code or its kind: its own words may quote keys, users, and an address."""
    code = str(error)[:_CODE_CHARS].partition(" ")[0]
    if isinstance(error, ResponseError) and code.isascii() and code.isalpha() and code.isupper() and code != "ERR":
        return f"refuses: {code}"
    if type(error) in (NotConnected, RedisClusterException) or isinstance(error, OSError):
        return "cannot be reached"
    return f"fails: {type(error).__name__}"
