"""A connection to Redis or Valkey that never holds a request up: one thread, time limits, a breaker.

Called by `redis.py` and by whatever else processes share through the same server. All traffic goes through one thread
with an event loop of its own, so that callers may live in any event loop, and so that a busy loop of the proxy is not
taken for a slow server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any, TypeAlias, TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import TimeoutError as NoAnswer

from litellm_compaction.errors import StoreError
from litellm_compaction.redis_address import RedisAddress
from litellm_compaction.stores.patience import WAIT_S, Patience, attentive_wait

Client: TypeAlias = "Redis | RedisCluster"
_Result = TypeVar("_Result")

# After which a call fails; whoever makes it for a request waits for far less (`patience`). Redis answers within a
# millisecond or a few; a fork for its snapshot or a script of somebody else holds it for some ten.
LIMIT_S = 0.25
# An operator who lists or deletes waits longer than a request does.
PATIENT_LIMIT_S = 5.0
# How a resting connection looks whether the server is back: soon, then ever less often. The spread keeps processes
# apart that lost it in the same moment.
_FIRST_LOOK_S, _LAST_LOOK_S, _LOOK_LIMIT_S = 0.25, 5.0, 2.0
_SPREAD = (0.5, 1.5)
# A server whose answers all come late, but within the limit, would cost each request that much: this share of the
# limit, so often in a row and for so long.
_SLOW_RATIO, _SLOW_TIMES, _SLOW_FOR_S = 0.4, 5, 1.0
_MOST_AT_ONCE = 32
_KEYS_PER_STEP = 1000
# After a failover the master's name may lead to another server: idle connections are given up, but not all the time.
_RENEW_EVERY_S = 1.0
_JOIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, which the server knows by its digest after the first run."""

    text: str

    @property
    def digest(self) -> str:
        """SHA-1, as EVALSHA wants it."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


@cache
def script(name: str) -> Script:
    """The script in `stores/scripts/NAME.lua`."""
    return Script((files(__package__) / "scripts" / f"{name}.lua").read_text(encoding="utf-8"))


class RedisConnection:
    """Runs commands on a server and says within a time limit that it cannot; may be used from several event loops.

    After an answer that did not come, or several that came late, all calls fail at once until the server was seen to
    answer in time: a look every few seconds, in the background. What the server refuses (full, read-only, no right)
    fails by itself, without a wait.

    Args:
        rests: whether to fail at once after a failure; otherwise each call tries anew, as an operator's command does.
        limit_s: seconds after which a call is no longer waited for, connecting included.
    """

    def __init__(self, address: RedisAddress, *, rests: bool = True, limit_s: float = LIMIT_S) -> None:
        self.address = address
        self.patience = Patience(WAIT_S)
        self._rests = rests
        self._limit_s = limit_s
        self._thread = _Thread()
        self._client: Client | None = None
        self._closing: list[Callable[[], Awaitable[object]]] = []
        self._slots: asyncio.Semaphore | None = None
        self._look: asyncio.Task[None] | None = None
        self._failure: StoreError | None = None
        self._renewed_s = 0.0
        self._slow_times, self._slow_since_s = 0, 0.0
        self._is_closed = False
        # For a process that ends without having closed its stores.
        self._end = weakref.finalize(self, self._thread.end)

    @property
    def is_resting(self) -> bool:
        """Whether calls fail at once now, because the server did not answer a moment ago."""
        return self._failure is not None

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[str | bytes | int | float] = (),
        *,
        limit_s: float | None = None,
    ) -> Any:
        """What a script returns: integers, bytes, None, and lists of these.

        Args:
            keys: all that the script touches, one at least; in a cluster all have the same hash tag.

        Raises:
            StoreError: the server does not answer, or refuses.
        """

        async def evaluate(client: Client) -> Any:
            rest = (len(keys), *keys, *arguments)
            try:
                return await client.execute_command("EVALSHA", script.digest, *rest)
            except NoScriptError:
                return await client.execute_command("EVAL", script.text, *rest)

        return await self.call(evaluate, key=keys[0], limit_s=limit_s)

    async def command(self, *parts: str | bytes | int | float, limit_s: float | None = None) -> Any:
        """What one command returns, as redis-py parses it; its second part is a key.

        Raises:
            StoreError: the server does not answer, or refuses.
        """
        return await self.call(lambda client: client.execute_command(*parts), key=str(parts[1]), limit_s=limit_s)

    async def keys(self, pattern: str, *, limit_s: float | None = None) -> list[str]:
        """The keys on all servers that match, found step by step, so that nobody else waits for long.

        Args:
            limit_s: seconds for each step.

        Raises:
            StoreError: a server does not answer, or refuses.
        """
        found: dict[str, None] = {}
        for target in await self.call(_targets, key=pattern, limit_s=limit_s):
            cursor: int | None = None
            while cursor != 0:
                step = partial(_scan, target=target, cursor=cursor or 0, pattern=pattern)
                cursor, names = await self.call(step, key=pattern, limit_s=limit_s)
                # A cursor may show a key twice.
                found.update((name.decode("utf-8", "replace"), None) for name in names)
        return list(found)

    async def call(
        self, work: Callable[[Client], Awaitable[_Result]], *, key: str, limit_s: float | None = None
    ) -> _Result:
        """What `work` makes of the client, in the thread of the connection; a cancelled caller does not stop it.

        Args:
            key: one that is touched: by it is looked whether the server is back.

        Raises:
            StoreError: the server does not answer, or refuses.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise StoreError(f"store {self.address} is closed")
        result = await self._thread.run(self._attempt(work, key, self._limit_s if limit_s is None else limit_s))
        if isinstance(result, StoreError):
            raise result
        return result

    async def aclose(self) -> None:
        """Ends it; any number of times."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.is_running:
            await self._thread.run(self._close())
        self._end()

    async def _attempt(
        self, work: Callable[[Client], Awaitable[_Result]], key: str, limit_s: float
    ) -> _Result | StoreError:
        task = asyncio.ensure_future(self._do(work))
        waited_s = await attentive_wait(task, limit_s)
        if waited_s is None:
            task.cancel()
            return self._rest(StoreError(f"store {self.address} did not answer in {limit_s:g} s"), key)
        error = task.exception()
        if error is not None:
            return await self._refused(error, key)
        if limit_s == self._limit_s:
            self._note_time(waited_s, key)
        return task.result()

    def _note_time(self, waited_s: float, key: str) -> None:
        if waited_s < _SLOW_RATIO * self._limit_s:
            self._slow_times = 0
            return
        now_s = asyncio.get_running_loop().time()
        if self._slow_times == 0:
            self._slow_since_s = now_s - waited_s
        self._slow_times += 1
        # In one moment many may have waited for the same.
        if self._slow_times >= _SLOW_TIMES and now_s - self._slow_since_s >= _SLOW_FOR_S:
            self._slow_times = 0
            self._rest(StoreError(f"store {self.address} answers late, in {1000 * waited_s:.0f} ms"), key)

    async def _do(self, work: Callable[[Client], Awaitable[_Result]]) -> _Result:
        if self._client is None:
            self._client = self._connect()
        if self._slots is None:
            self._slots = asyncio.Semaphore(_MOST_AT_ONCE)
        async with self._slots:
            return await work(self._client)

    async def _refused(self, error: BaseException, key: str) -> StoreError:
        if isinstance(error, StoreError):
            return error
        if not isinstance(error, (RedisError, OSError, ValueError)):
            raise error
        failure = StoreError(f"store {self.address} {_said(error)}")
        if isinstance(error, ReadOnlyError):
            await self._renew()
            return failure
        is_answer = isinstance(error, ResponseError) and not isinstance(error, (ClusterDownError, MasterDownError))
        return failure if is_answer else self._rest(failure, key)

    def _rest(self, failure: StoreError, key: str) -> StoreError:
        """Has calls fail at once from now on, until the server is seen to answer."""
        if self._rests and self._look is None and not self._is_closed:
            self._failure = StoreError(str(failure))
            self._look = asyncio.ensure_future(self._look_until_it_is_back(key))
        return failure

    async def _look_until_it_is_back(self, key: str) -> None:
        pause_s = _FIRST_LOOK_S
        while True:
            await asyncio.sleep(pause_s * random.uniform(*_SPREAD))  # noqa: S311 - no secret
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
            # To connect may take longer than an answer.
            if await self._is_there(key, _LOOK_LIMIT_S) and await self._is_there(key, _SLOW_RATIO * self._limit_s):
                break
        self._look = self._failure = None

    async def _is_there(self, key: str, limit_s: float) -> bool:
        look = asyncio.ensure_future(self._do(lambda client: client.execute_command("EXISTS", key)))
        try:
            if await attentive_wait(look, limit_s) is None:
                return False
            look.result()
        except (RedisError, OSError, ValueError):
            return False
        finally:
            look.cancel()
        return True

    async def _renew(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._renewed_s + _RENEW_EVERY_S or not isinstance(self._client, Redis):
            return
        self._renewed_s = now_s
        with contextlib.suppress(RedisError, OSError):
            await self._client.connection_pool.disconnect(inuse_connections=False)

    def _connect(self) -> Client:
        """A client; it connects with its first command."""
        address = self.address
        options: dict[str, Any] = {
            "username": address.username,
            "password": address.password,
            # Limits are ours; these end what nobody waits for any more.
            "socket_timeout": PATIENT_LIMIT_S,
            "socket_connect_timeout": _LOOK_LIMIT_S,
            # Whoever fails has the memory of its process; the look in the background is the retry.
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if address.is_tls:
            options |= {"ssl": True, **dict(address.tls)}
        if address.kind == "cluster":
            nodes = [ClusterNode(node.host, node.port) for node in address.nodes]
            cluster: Client = RedisCluster(startup_nodes=nodes, **options)
            self._closing = [cluster.aclose]
            return cluster
        if address.kind == "sentinel":
            asked = {
                **options,
                "username": address.sentinel_username,
                "password": address.sentinel_password,
                # Asked one after the other: one that is gone must not use up the time of the others.
                "socket_timeout": LIMIT_S / 2,
                "socket_connect_timeout": LIMIT_S / 2,
            }
            untyped: Any = Sentinel
            sentinel = untyped([tuple(node) for node in address.nodes], sentinel_kwargs=asked, **options)
            master: Client = sentinel.master_for(address.service, db=address.db)
            self._closing = [master.aclose, *(each.aclose for each in sentinel.sentinels)]
            return master
        [node] = address.nodes
        client: Client = Redis(host=node.host, port=node.port, db=address.db, **options)
        self._closing = [client.aclose]
        return client

    async def _close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        for close in self._closing:
            with contextlib.suppress(RedisError, OSError):
                await close()


async def _targets(client: Client) -> list[Any]:
    """Where keys are: the masters of a cluster, or the one server, which needs no name."""
    if isinstance(client, Redis):
        return [None]
    await client.initialize()
    return list(client.get_primaries())


async def _scan(client: Client, *, target: Any, cursor: int, pattern: str) -> tuple[int, list[bytes]]:
    where = {} if target is None else {"target_nodes": target}
    step = ("SCAN", cursor, "MATCH", pattern, "COUNT", _KEYS_PER_STEP)
    at, names = await client.execute_command(*step, **where)
    if isinstance(at, dict):
        # By node where one is named.
        [at] = at.values()
    return int(at), names


class _Thread:
    """An event loop in a thread, started by the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._loop is not None

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of `work` in the thread; whoever is cancelled does not stop it."""
        here = asyncio.get_running_loop()
        answered: asyncio.Future[_Result] = here.create_future()

        def answer(job: Future[_Result]) -> None:
            # The loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                here.call_soon_threadsafe(_settle, answered, job)

        try:
            asyncio.run_coroutine_threadsafe(work, self._started()).add_done_callback(answer)
        except RuntimeError as exc:
            work.close()
            raise StoreError("the store is closed") from exc
        return await answered

    def end(self) -> None:
        """Stops the loop, and with it what is under way."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="litellm-compaction-redis", daemon=True
                )
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    # What was closed a moment ago lets its socket go in the loop's next step.
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def _settle(answered: asyncio.Future[_Result], job: Future[_Result]) -> None:
    if answered.done():
        return
    if job.cancelled():
        answered.set_exception(StoreError("the store is closed"))
    elif (error := job.exception()) is not None:
        answered.set_exception(error)
    else:
        answered.set_result(job.result())


def _said(error: BaseException) -> str:
    """What went wrong, in our words: the server's may quote keys and users, the client's an address."""
    beginning = str(error)[:_CODE_CHARS]
    for sign, words in _SIGNS.items():
        if sign in beginning:
            return words
    if isinstance(error, AuthenticationError):
        return "refuses the user name or password"
    if isinstance(error, NoPermissionError):
        return _NO_RIGHT
    if isinstance(error, ReadOnlyError):
        return "is a read-only replica; name its master"
    if isinstance(error, NoAnswer):
        return "does not answer"
    if isinstance(error, ResponseError):
        code = beginning.partition(" ")[0]
        return f"refuses: {code}" if code.isascii() and code.isupper() and code.isalpha() else "refuses"
    if isinstance(error, (NotConnected, RedisClusterException, OSError)):
        return "cannot be reached"
    return f"fails: {type(error).__name__}"


_CODE_CHARS = 40
_NO_RIGHT = "does not give this user the right"
# How the server's answers begin; redis-py takes the code away from those that have a class of their own.
_SIGNS = {
    "OOM": "is full (maxmemory)",
    "command not allowed when used memory": "is full (maxmemory)",
    "Authentication required": "wants a password",
    "user executing the script": _NO_RIGHT,
    "ACL failure": _NO_RIGHT,
    "MISCONF": "does not write, because it cannot save to its disk",
    "NOREPLICAS": "does not write, because replicas are missing",
}
