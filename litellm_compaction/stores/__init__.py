"""Where compactions, learned facts, the history and plots are kept: one protocol, and what opens a store by its URL."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.master_key import Seal
from litellm_compaction.paths import data_folder
from litellm_compaction.redis_address import is_redis, parse
from litellm_compaction.stores.board import Board
from litellm_compaction.stores.fallback import SteadyStore
from litellm_compaction.stores.memory import MemoryStore
from litellm_compaction.stores.protocol import FACTS_SCOPE, Join, Plot, Store, StoredCompaction, StoredEvent
from litellm_compaction.stores.sqlite import SqliteStore
from litellm_compaction.stores.sqlite_board import SqliteBoard

__all__ = [
    "FACTS_SCOPE",
    "Board",
    "Join",
    "MemoryStore",
    "Plot",
    "SqliteStore",
    "SteadyStore",
    "Store",
    "StoredCompaction",
    "StoredEvent",
    "is_late",
    "open_board",
    "open_existing",
    "open_store",
    "redis_of",
    "sqlite_path",
]

if TYPE_CHECKING:
    from litellm_compaction.stores.redis import RedisStore
    from litellm_compaction.stores.redis_connection import RedisConnection

logger = logging.getLogger("litellm_compaction")

_FILE_NAME = "store.sqlite3"
_BOARD = ".workers"
_REDIS = "litellm_compaction.stores.redis"


def open_store(url: str, *, ttl_s: float, max_bytes: int, environ: Mapping[str, str] = os.environ) -> Store:
    """The store that `url` names, for a proxy: it goes on in memory where a file or a server cannot be used.

    Raises:
        StoreError: the scheme is not known.
    """
    memory = MemoryStore(ttl_s=ttl_s, max_bytes=max_bytes)
    if url.startswith("memory://"):
        return memory
    if is_redis(url):
        durable = _redis(url, ttl_s=ttl_s, rests=True)
        return SteadyStore(durable, memory, patience=durable.connection.patience)
    try:
        path = sqlite_path(url, environ)
    except ConfigError as error:
        logger.warning("store_failed %s; requests go on with the memory of this process", error)
        return memory
    return SteadyStore(SqliteStore(path, ttl_s=ttl_s, max_bytes=max_bytes), memory)


def open_board(
    url: str,
    store: Store,
    environ: Mapping[str, str] = os.environ,
    *,
    secret: Callable[[], str | None] = lambda: None,
) -> Board | None:
    """Where the processes that share a store tell each other what they do; None where nobody shares it.

    Args:
        url: by which `store` was opened.
        store: ends the connection that a board may share with it.
        secret: gives the proxy's master key, with which notes on a server are signed; None where there is none.

    Raises:
        StoreError: the scheme is not known.
    """
    if url.startswith("memory://"):
        return None
    if (connection := redis_of(store)) is not None:
        from litellm_compaction.stores.redis_board import RedisBoard

        return RedisBoard(connection, Seal(secret, b"notes"))
    try:
        path = sqlite_path(url, environ)
    except ConfigError:
        # `open_store` says so.
        return None
    return SqliteBoard(path.with_name(path.name + _BOARD))


def open_existing(url: str, *, ttl_s: float, max_bytes: int, environ: Mapping[str, str] = os.environ) -> Store:
    """The store that `url` names, for an operator's look: nothing is made, repaired or replaced by memory.

    Raises:
        ConfigError: the user has no home folder.
        StoreError: the scheme is not known, or the store lives in a proxy's memory.
    """
    if url.startswith("memory://"):
        raise StoreError(
            f"{url} lives in the proxy's process and ends with it, so it cannot be seen from here. "
            "Set `store: sqlite://` to keep it in a file."
        )
    if is_redis(url):
        return _redis(url, ttl_s=ttl_s, rests=False)
    return SqliteStore(sqlite_path(url, environ), ttl_s=ttl_s, max_bytes=max_bytes, create=False)


def is_late(store: Store, scope: str, hashes: Sequence[str]) -> bool:
    """Whether a store did not answer a `find` in time and is about to: another one waits for it."""
    return isinstance(store, SteadyStore) and store.is_late(scope, hashes)


def redis_of(store: Store) -> RedisConnection | None:
    """The connection behind a store that processes of several machines share; None where there is none."""
    if _REDIS not in sys.modules:
        # Nobody has opened one, and its client takes a tenth of a second to import.
        return None
    from litellm_compaction.stores.redis import RedisStore

    durable = store.durable if isinstance(store, SteadyStore) else store
    return durable.connection if isinstance(durable, RedisStore) else None


def _redis(url: str, *, ttl_s: float, rests: bool) -> RedisStore:
    # Here: its client takes a tenth of a second to import.
    from litellm_compaction.stores.redis import RedisStore
    from litellm_compaction.stores.redis_connection import PATIENT_LIMIT_S, RedisConnection

    try:
        address = parse(url)
    except ValueError as error:
        raise StoreError(f"store: {error}") from None
    connection = RedisConnection(address) if rests else RedisConnection(address, rests=False, limit_s=PATIENT_LIMIT_S)
    return RedisStore(connection, ttl_s=ttl_s)


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
