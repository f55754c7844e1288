"""Opens the store by its URL; originals, and notes between processes, are parts of the same file or server."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.master_key import Box
from litellm_compaction.places import DEFAULT_PREFIX, PROXYS_OWN, data_folder, is_redis, parse_redis
from litellm_compaction.stores.originals import Covered, Originals
from litellm_compaction.stores.rows import Rows, SteadyRows
from litellm_compaction.stores.sqlite import MemoryRows, SqliteFile, SqliteRows
from litellm_compaction.stores.store import Store, StoredCompaction, digest

__all__ = [
    "Covered",
    "Originals",
    "Store",
    "StoredCompaction",
    "board_of",
    "digest",
    "open_store",
    "originals_of",
    "sqlite_path",
]

if TYPE_CHECKING:
    from litellm_compaction.stores.redis import Client

logger = logging.getLogger("litellm_compaction")

_FILE_NAME = "store.sqlite3"
# The purpose of the key that encrypts compactions.
_RECORDS = b"records"
# Notes live for seconds.
_BOARD_TTL_S, _BOARD_BYTES = 120.0, 64 * 2**20


def open_store(
    url: str,
    *,
    ttl_s: float,
    max_bytes: int,
    environ: Mapping[str, str] = os.environ,
    redis: Callable[[], Client] | None = None,
    secret: Callable[[], str | None] = lambda: None,
    is_proxy: bool = True,
) -> Store:
    """The store that `url` names.

    Args:
        redis: gives the client of the proxy's own Redis in the running event loop, or raises `StoreError`.
        secret: gives the proxy's master key, with which compactions are encrypted; None if there is none.
        is_proxy: goes on in memory if a file or a server cannot be used. Otherwise it is an operator's look, which
            makes, repairs and replaces nothing, and waits longer for a server.

    Raises:
        ConfigError: for an operator: the user has no home folder.
        StoreError: the scheme is not known; for an operator: the store lives in a proxy's memory.
    """
    memory = MemoryRows(ttl_s=ttl_s, max_bytes=max_bytes)
    if url.startswith("memory://"):
        if is_proxy:
            return Store(memory)
        raise StoreError(
            f"{url} lives in the proxy's process and ends with it, so it cannot be seen from here. "
            "Set `store: sqlite://` to keep it in a file."
        )
    try:
        if is_redis(url):
            durable: Rows = _redis_rows(url, ttl_s=ttl_s, redis=redis, is_proxy=is_proxy)
        else:
            file = SqliteFile(sqlite_path(url, environ), create=is_proxy)
            durable = SqliteRows(file, ttl_s=ttl_s, max_bytes=max_bytes)
    except ConfigError as error:
        if not is_proxy:
            raise
        logger.warning("store_failed %s; requests go on with the memory of this process", error)
        return Store(memory)
    return Store(SteadyRows(durable, memory) if is_proxy else durable, Box(secret, _RECORDS))


def _redis_rows(url: str, *, ttl_s: float, redis: Callable[[], Client] | None, is_proxy: bool) -> Rows:
    # Here: its client takes a tenth of a second to import.
    from litellm_compaction.stores.redis import LIMIT_S, PATIENT_LIMIT_S, RedisRows, RedisServer, client_of

    limit_s = LIMIT_S if is_proxy else PATIENT_LIMIT_S
    if url == PROXYS_OWN:
        if redis is None:
            raise StoreError(f"store: {PROXYS_OWN} is the proxy's own Redis, and there is no proxy")
        server = RedisServer(redis, "redis", owns=not is_proxy, limit_s=limit_s)
        return RedisRows(server, prefix=DEFAULT_PREFIX, ttl_s=ttl_s)
    try:
        address = parse_redis(url)
    except ValueError as error:
        raise StoreError(f"store: {error}") from None
    server = RedisServer(lambda: client_of(address.url), address.place, owns=True, limit_s=limit_s)
    return RedisRows(server, prefix=address.prefix, ttl_s=ttl_s)


def board_of(store: Store) -> Rows | None:
    """The rows by which processes that share a store tell each other their state; None if it is not shared."""
    if isinstance(store.rows, MemoryRows):
        return None
    return store.rows.beside("board", ttl_s=_BOARD_TTL_S, max_bytes=_BOARD_BYTES)


def originals_of(store: Store, *, ttl_s: float, max_bytes: int, secret: Callable[[], str | None]) -> Originals:
    """The originals beside what is in a store, with a bound and a time to live of their own."""
    return Originals(store.rows.beside("originals", ttl_s=ttl_s, max_bytes=max_bytes), secret=secret)


def sqlite_path(url: str, environ: Mapping[str, str]) -> Path:
    """The file that a `sqlite:` URL names.

    `sqlite:///name` lies in the current folder, `sqlite:////name` is absolute (as SQLAlchemy has it), `sqlite:///~/name`
    begins in the home folder, and `sqlite://` alone is the file in the user's data folder; anything else is a
    StoreError. A ConfigError says that the user has no home folder.
    """
    if url == "sqlite://":
        return data_folder(environ) / _FILE_NAME
    name = url.removeprefix("sqlite:///")
    if name in ("", url):
        raise StoreError(f"store {url!r}: there are memory://, sqlite://, sqlite:///relative/file and sqlite:////file")
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError as exc:
        raise ConfigError(f"store {url!r}: there is no home folder") from exc
