"""Opens the store for compactions, learned facts, settings and the history: rows, by their URL."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.master_key import Box
from litellm_compaction.places import DEFAULT_PREFIX, PROXYS_OWN, data_folder, is_redis, parse_redis
from litellm_compaction.stores.originals import Covered, Originals, Stretch
from litellm_compaction.stores.rows import MemoryRows, Rows, SteadyRows
from litellm_compaction.stores.sqlite import SqliteRows
from litellm_compaction.stores.store import (
    FACTS_SCOPE,
    MAX_LEASE_S,
    Board,
    CompactionStore,
    Decide,
    EventLog,
    Facts,
    Join,
    SettingStore,
    Store,
    StoredCompaction,
    StoredEvent,
    digest,
)

__all__ = [
    "FACTS_SCOPE",
    "Board",
    "CompactionStore",
    "Covered",
    "Decide",
    "EventLog",
    "Facts",
    "Join",
    "Originals",
    "SettingStore",
    "Store",
    "StoredCompaction",
    "StoredEvent",
    "Stretch",
    "digest",
    "memory_store",
    "open_board",
    "open_existing",
    "open_originals",
    "open_store",
    "sqlite_path",
]

if TYPE_CHECKING:
    from litellm_compaction.stores.redis import Client, RedisRows

logger = logging.getLogger("litellm_compaction")

_FILE_NAME = "store.sqlite3"
_BOARD = ".workers"
_ORIGINALS = ".originals"
# The purpose of the key that encrypts compactions.
_RECORDS = b"records"
# Notes live for `MAX_LEASE_S` at most, and their topic for as long again.
_BOARD_TTL_S, _BOARD_BYTES = 2 * MAX_LEASE_S, 64 * 2**20
# It takes well under a millisecond. A request waits once for a disk that hangs, and for less than an overflow delays an
# answer; an overloaded machine needs the time.
_BOARD_LIMIT_S = 3.0
_ONLY_IN_A_PROXY = f"store: {PROXYS_OWN} is the proxy's own Redis, and there is no proxy"


def memory_store(*, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.time) -> Store:
    """A store that ends with this process."""
    return Store(MemoryRows(ttl_s=ttl_s, max_bytes=max_bytes, clock=clock))


def open_store(
    url: str,
    *,
    ttl_s: float,
    max_bytes: int,
    environ: Mapping[str, str] = os.environ,
    redis: Callable[[], Client] | None = None,
    secret: Callable[[], str | None] = lambda: None,
) -> Store:
    """The store that `url` names, for a proxy: it goes on in memory if a file or a server cannot be used.

    Args:
        redis: gives the client of the proxy's own Redis in the running event loop, or raises `StoreError`.
        secret: gives the proxy's master key, with which compactions are encrypted; None if there is none.

    Raises:
        StoreError: the scheme is not known.
    """
    memory = MemoryRows(ttl_s=ttl_s, max_bytes=max_bytes)
    if url.startswith("memory://"):
        return Store(memory)
    box = Box(secret, _RECORDS)
    if is_redis(url):
        return Store(SteadyRows(_redis(url, redis, ttl_s=ttl_s, rests=True), memory), box)
    try:
        path = sqlite_path(url, environ)
    except ConfigError as error:
        logger.warning("store_failed %s; requests go on with the memory of this process", error)
        return Store(memory)
    return Store(SteadyRows(SqliteRows(path, ttl_s=ttl_s, max_bytes=max_bytes), memory), box)


def open_board(
    url: str,
    store: Store,
    environ: Mapping[str, str] = os.environ,
    *,
    secret: Callable[[], str | None] = lambda: None,
) -> Board | None:
    """The board on which processes that share a store tell each other their state; None if the store is not shared.

    A file of its own next to the store's: a write every second must neither wait for a summary that is stored nor wear
    its file out, and damage costs nothing. A server is the store's, which ends it as well.

    Args:
        url: by which `store` was opened.
        secret: gives the proxy's master key, with which notes on a server are signed; None if there is none.

    Raises:
        StoreError: the scheme is not known.
    """
    if url.startswith("memory://"):
        return None
    if is_redis(url):
        from litellm_compaction.stores.redis import RedisRows

        kept = store.rows.durable if isinstance(store.rows, SteadyRows) else store.rows
        assert isinstance(kept, RedisRows), "the store of this URL"  # noqa: S101
        notes = RedisRows(kept.server, prefix=f"{kept.prefix}:board", ttl_s=_BOARD_TTL_S, ends_server=False)
        return Board(notes, Box(secret, b"notes"))
    try:
        path = sqlite_path(url, environ)
    except ConfigError:
        # `open_store` says so.
        return None
    # The clock of all processes is the machine's own (docs.python.org, `time.monotonic`: system-wide since 3.5), which
    # stands still while it sleeps.
    rows = SqliteRows(
        path.with_name(path.name + _BOARD),
        ttl_s=_BOARD_TTL_S,
        max_bytes=_BOARD_BYTES,
        clock=time.monotonic,
        limit_s=_BOARD_LIMIT_S,
    )
    return Board(rows)


def open_originals(
    url: str,
    store: Store,
    *,
    ttl_s: float,
    max_bytes: int,
    environ: Mapping[str, str] = os.environ,
    secret: Callable[[], str | None],
    create: bool = True,
) -> Originals | None:
    """The originals beside a store, in a file of their own or on the store's server; None if there can be none.

    Args:
        url: by which `store` was opened.
        secret: gives the proxy's master key.
        create: False for an operator's look: then no file is made, and without one there are none.

    Raises:
        StoreError: the scheme is not known.
    """
    rows: Rows
    if url.startswith("memory://"):
        rows = MemoryRows(ttl_s=ttl_s, max_bytes=max_bytes)
    elif is_redis(url):
        from litellm_compaction.stores.redis import RedisRows

        kept = store.rows.durable if isinstance(store.rows, SteadyRows) else store.rows
        assert isinstance(kept, RedisRows), "the store of this URL"  # noqa: S101
        rows = RedisRows(kept.server, prefix=f"{kept.prefix}:originals", ttl_s=ttl_s, ends_server=False)
    else:
        try:
            path = sqlite_path(url, environ)
        except ConfigError:
            # `open_store` says so.
            return None
        path = path.with_name(path.name + _ORIGINALS)
        if not create and not path.is_file():
            return None
        rows = SqliteRows(path, ttl_s=ttl_s, max_bytes=max_bytes, create=create)
    return Originals(rows, ttl_s=ttl_s, secret=secret)


def open_existing(
    url: str,
    *,
    ttl_s: float,
    max_bytes: int,
    environ: Mapping[str, str] = os.environ,
    redis: Callable[[], Client] | None = None,
    secret: Callable[[], str | None] = lambda: None,
) -> Store:
    """The store that `url` names, for an operator's look: without making, repairing or replacing anything.

    Args:
        redis: makes a client of the proxy's own Redis.
        secret: as for `open_store`.

    Raises:
        ConfigError: the user has no home folder.
        StoreError: the scheme is not known, or the store lives in a proxy's memory.
    """
    if url.startswith("memory://"):
        raise StoreError(
            f"{url} lives in the proxy's process and ends with it, so it cannot be seen from here. "
            "Set `store: sqlite://` to keep it in a file."
        )
    box = Box(secret, _RECORDS)
    if is_redis(url):
        return Store(_redis(url, redis, ttl_s=ttl_s, rests=False), box)
    return Store(SqliteRows(sqlite_path(url, environ), ttl_s=ttl_s, max_bytes=max_bytes, create=False), box)


def _redis(url: str, redis: Callable[[], Client] | None, *, ttl_s: float, rests: bool) -> RedisRows:
    # Here: its client takes a tenth of a second to import.
    from litellm_compaction.stores.redis import LIMIT_S, PATIENT_LIMIT_S, OwnClients, RedisRows, RedisServer, client_of

    place, prefix = "redis", DEFAULT_PREFIX
    clients = redis
    if url != PROXYS_OWN:
        try:
            address = parse_redis(url)
        except ValueError as error:
            raise StoreError(f"store: {error}") from None
        place, prefix, clients = address.place, address.prefix, OwnClients(lambda: client_of(address.url))
    elif clients is None:
        raise StoreError(_ONLY_IN_A_PROXY)
    elif not rests:
        clients = OwnClients(clients)
    server = RedisServer(clients, place, rests=rests, limit_s=LIMIT_S if rests else PATIENT_LIMIT_S)
    return RedisRows(server, prefix=prefix, ttl_s=ttl_s)


def sqlite_path(url: str, environ: Mapping[str, str]) -> Path:
    """The file that a `sqlite:` URL names.

    `sqlite:///name` lies in the current folder, `sqlite:////name` is absolute (as SQLAlchemy has it), `sqlite:///~/name`
    begins in the home folder, and `sqlite://` alone is the file in the user's data folder.

    Raises:
        ConfigError: the user has no home folder.
        StoreError: the URL is none of these.
    """
    if url == "sqlite://":
        return data_folder(environ) / _FILE_NAME
    name = url.removeprefix("sqlite:///")
    if name in ("", url):
        raise StoreError(
            f"store {url!r}: memory://, sqlite://, sqlite:///relative/file and sqlite:////file are built in"
        )
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError as exc:
        raise ConfigError(f"store {url!r}: there is no home folder") from exc
