"""A Redis or Valkey that never holds a request up: a time limit for every call, none while it does not answer.

Called by `redis.py`. The client is the proxy's own, or one of a URL; each event loop has its own connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias, TypeVar
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

from litellm_compaction.concurrency import ended
from litellm_compaction.errors import StoreError

Client: TypeAlias = "Redis | RedisCluster"
_Result = TypeVar("_Result")

# Redis answers within a millisecond or a few; a fork for its snapshot or another program's script holds it for some
# ten. The limit is waited for in steps, so that an event loop that was held up itself takes no server for slow: it sees
# the answer in the step after.
LIMIT_S, _STEPS = 0.25, 10
# An operator who lists or deletes waits longer than a request does.
PATIENT_LIMIT_S = 10.0
_CONNECT_LIMIT_S = 2.0
# How it is looked if a server is back: soon, then ever less often. The spread keeps processes apart that lost it in the
# same moment. One that is behind sentinels of which the first is gone is found after redis-py's own retries.
_FIRST_LOOK_S, _LAST_LOOK_S, _LOOK_LIMIT_S = 0.25, 5.0, 10.0
_SPREAD = (0.5, 1.5)
_MOST_CONNECTIONS = 32
_CODE_CHARS = 40
_ERRORS = (RedisError, RedisClusterException, OSError, ValueError)


def client_of(url: str) -> Redis:
    """A client; it connects with its first command."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_MOST_CONNECTIONS,
        timeout=LIMIT_S,
        socket_timeout=PATIENT_LIMIT_S,
        socket_connect_timeout=_CONNECT_LIMIT_S,
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

    After an answer that did not come all calls fail at once until the server was seen to answer: a look every few
    seconds, in the background. What the server refuses (full, read-only, no right) fails by itself, without a wait.

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
        self._running: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def run(
        self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int] = (), *, is_patient: bool = False
    ) -> Any:
        """What the script in `stores/scripts/SCRIPT.lua` returns: integers, bytes, None, and lists of these.

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
        self, work: Callable[[Client], Awaitable[_Result]], *, key: str = "", is_patient: bool = False
    ) -> _Result:
        """What `work` makes of the client; a cancelled caller does not stop it.

        Args:
            key: one that is touched, by which it is looked if its server is back; "" for no one server's.
            is_patient: an operator waits for it.

        Raises:
            StoreError: the server does not answer, or refuses.
        """
        if self._failure:
            raise StoreError(self._failure)
        if self._is_closed:
            raise StoreError(f"store {self.place} is closed")
        limit_s = max(PATIENT_LIMIT_S, self._limit_s) if is_patient else self._limit_s
        task = asyncio.get_running_loop().create_task(self._attempt(work, key))
        # The event loop itself would forget it, and complain of an error that is not waited for.
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        if await is_done(task, limit_s):
            return task.result()
        task.cancel()
        raise self._rest(f"store {self.place} did not answer in {limit_s:g} s", key)

    async def aclose(self) -> None:
        """Ends what is under way; any number of times."""
        self._is_closed = True
        here = asyncio.get_running_loop()
        if running := [task for task in self._running if task.get_loop() is here]:
            await asyncio.wait(running, timeout=self._limit_s)
        tasks = running if self._look is None else [*running, self._look]
        await ended([task for task in tasks if task.get_loop() is here])
        if isinstance(self._clients, OwnClients):
            await self._clients.aclose()

    async def _attempt(self, work: Callable[[Client], Awaitable[_Result]], key: str) -> _Result:
        try:
            return await work(self._clients())
        except _ERRORS as error:
            said = f"store {self.place} {_said(error)}"
            # One that answers is there, whatever it refuses.
            if isinstance(error, ResponseError) and not isinstance(error, (ClusterDownError, MasterDownError)):
                raise StoreError(said) from error
            raise self._rest(said, key) from error

    def _rest(self, said: str, key: str) -> StoreError:
        """Has calls fail at once from now on, until the server is seen to answer."""
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
    """Waits for a task, which runs on; counted is how often this loop could look."""
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
    """What went wrong, by the code or the kind of the error: its words may quote keys, users, and an address."""
    code = str(error)[:_CODE_CHARS].partition(" ")[0]
    if isinstance(error, ResponseError) and code.isascii() and code.isalpha() and code.isupper() and code != "ERR":
        return f"refuses: {code}"
    if type(error) in (NotConnected, RedisClusterException) or isinstance(error, OSError):
        return "cannot be reached"
    return f"fails: {type(error).__name__}"
