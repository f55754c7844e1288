"""One SQLite file, opened and kept usable: rights, schema version, damage, disappearance, other writers.

Called by `sqlite.py`, in the thread that is here as well, so that no event loop waits for a disk. Of the content this
module knows only the migrations that it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import logging
import math
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from litellm_compaction.errors import StoreError
from litellm_compaction.places import make_private

logger = logging.getLogger("litellm_compaction")

# Another process holds the lock for well under a millisecond a write; a request waits no longer than this.
_BUSY_S = 1.0
# A file that could not be opened or written is left alone for so long: a waiting request each time would be worse.
_RETRY_S = 10.0
_DAMAGED_SCHEMA = ("Could not decode", "no such table", "no such column", "has no column", "malformed database schema")
_COPIES = ".corrupt-"
# "lmcs" in ASCII; file(1) shows it, and it tells another program's database from an empty one of ours.
_APPLICATION_ID = 0x6C6D6373
# Up to this version a file is of a build before the first release: it is set aside as a damaged one is.
_UNRELEASED = 5

Connect = Callable[..., sqlite3.Connection]
Work = Callable[[sqlite3.Connection], "_Result"]
_Result = TypeVar("_Result")


class SqliteFile:
    """A database file that is opened on first use; all methods block, and may be called from any thread.

    A damaged or deleted file is replaced by a fresh one; the damaged one is set aside. Any other trouble in a call is a
    `StoreError`: text of a damaged file can make the driver raise anything.

    Args:
        path: need not exist; it and its folder are made for this user alone.
        migrations: the statements of each step; each leads to the next version.
        create: whether to make and repair the file; if not, its faults are errors.
    """

    def __init__(
        self,
        path: Path,
        migrations: Sequence[Sequence[str]],
        *,
        create: bool,
        connect: Connect = sqlite3.connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._migrations = migrations
        self._create = create
        self._connect = connect
        self._clock = clock
        # Reentrant: the collector may end an abandoned store in the middle of a call, in the same thread.
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._is_closed = False
        self._refused_until_s, self._refusal = -math.inf, ""

    def read(self, job: Work[_Result]) -> _Result:
        with self._lock:
            return self._do(job, writes=False)

    def write(self, job: Work[_Result]) -> _Result:
        """Returns the result of `job`, in one transaction; raises if a write has failed a moment ago."""

        def transaction(connection: sqlite3.Connection) -> _Result:
            with _transaction(connection):
                return job(connection)

        with self._lock:
            self._refuse_again()
            return self._do(transaction, writes=True)

    def erase_journal(self) -> bool:
        """Empties the journal, in which deleted or replaced text still stands; False if another process reads."""

        def checkpoint(connection: sqlite3.Connection) -> bool:
            is_busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            return not is_busy

        with self._lock:
            return self._do(checkpoint, writes=False)

    def delete_copies(self, *, before_s: float | None = None) -> None:
        """Deletes the copies that were set aside, of before a time (since 1970) or all; of a link only the link."""
        for copy in list(self.path.parent.glob(f"{glob.escape(self.path.name)}{_COPIES}*")):
            # Another process may be faster.
            with contextlib.suppress(FileNotFoundError):
                if before_s is None or copy.lstat().st_mtime < before_s:
                    copy.unlink()

    def close(self) -> None:
        """Ends it: closes the file, and refuses every later call."""
        # A call that hangs keeps the lock; the caller that ends the process must not hang with it.
        if self._lock.acquire(timeout=_BUSY_S):
            try:
                self._is_closed = True
                self._let_go()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _do(self, job: Work[_Result], *, writes: bool) -> _Result:
        try:
            try:
                return job(self._opened())
            except (sqlite3.Error, UnicodeDecodeError) as error:
                if not self._can_repair(error):
                    raise
            self._set_aside()
            return job(self._opened())
        except StoreError:
            raise
        except Exception as exc:
            # A store that raises must never decide about a request. A decoding error quotes what it read.
            said = type(exc).__name__ if isinstance(exc, UnicodeError) else str(exc)
            refusal = StoreError(f"store {self.path} cannot be used: {said}")
            if self._connection is None or (writes and isinstance(exc, (sqlite3.OperationalError, OSError))):
                self._refused_until_s, self._refusal = self._clock() + _RETRY_S, str(refusal)
            if "I/O" in str(exc):
                self._let_go()
            raise refusal from exc

    def _refuse_again(self) -> None:
        if self._clock() < self._refused_until_s:
            raise StoreError(self._refusal)

    def _opened(self) -> sqlite3.Connection:
        if self._is_closed:
            raise StoreError(f"store {self.path} is closed")
        if self._connection is not None and _identity(self.path) != self._identity:
            logger.warning("store_file_replaced path=%s; it was deleted or moved while in use", self.path)
            self._let_go()
        if self._connection is None:
            self._refuse_again()
            try:
                self._connection = self._open()
            except (sqlite3.Error, UnicodeDecodeError) as error:
                if not self._can_repair(error):
                    raise
                self._set_aside()
                self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        if self._create:
            _make_private(self.path)
        elif not self.path.is_file():
            raise StoreError(f"there is no store at {self.path} yet; a proxy makes it with its first compaction")
        self._identity = _identity(self.path)
        connection = self._connect(str(self.path), timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            if self._needs_migration(connection):
                _use_wal(connection)
                with _transaction(connection):
                    self._migrate(connection)
            # In WAL mode a commit then costs no fsync, and a crash loses the last commits but no file
            # (sqlite.org/pragma.html#pragma_synchronous).
            connection.execute("PRAGMA synchronous=NORMAL")
            # Deleted text is overwritten, not only unlinked.
            connection.execute("PRAGMA secure_delete=ON").close()
            connection.execute("PRAGMA journal_size_limit=4194304").close()
        except BaseException:
            # No other code knows the connection yet; Ctrl-C included.
            connection.close()
            raise
        return connection

    def _needs_migration(self, connection: sqlite3.Connection) -> bool:
        # Of one moment: another process may make the same file right now.
        connection.execute("BEGIN")
        try:
            version, application = _number(connection, "user_version"), _number(connection, "application_id")
            is_empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        finally:
            connection.execute("ROLLBACK")
        if application != _APPLICATION_ID and not (is_empty and application == 0):
            raise StoreError(f"{self.path} is a database of another program; name another file in `store`")
        newest = _UNRELEASED + len(self._migrations)
        if 0 < version <= _UNRELEASED:
            raise sqlite3.DatabaseError(f"its schema version {version} is of a build before the first release")
        if version > newest:
            raise StoreError(
                f"store {self.path} has schema version {version} and this version of litellm_compaction knows "
                f"{newest}: update it, or name another file in `store`"
            )
        return version < newest

    def _migrate(self, connection: sqlite3.Connection) -> None:
        # Read again under the lock: another process may have been faster.
        for step in self._migrations[max(_number(connection, "user_version") - _UNRELEASED, 0) :]:
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={_UNRELEASED + len(self._migrations)}")

    def _can_repair(self, error: sqlite3.Error | UnicodeDecodeError) -> bool:
        # CORRUPT and NOTADB are raised as DatabaseError itself, all other trouble as a subclass (CPython,
        # Modules/_sqlite/util.c), text that is no UTF-8 as either; of a schema of ours nothing is missing.
        is_damage = type(error) is sqlite3.DatabaseError or isinstance(error, UnicodeDecodeError)
        return self._create and (is_damage or any(map(str(error).__contains__, _DAMAGED_SCHEMA)))

    def _set_aside(self) -> None:
        """Renames the damaged file, unless another process has done so already."""
        is_same = _identity(self.path) == self._identity
        self._let_go()
        if not is_same:
            return
        aside = f"{self.path}{_COPIES}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        # The journal first: it must never meet the fresh file.
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").replace(f"{aside}{suffix}")
        logger.warning("store_corrupt path=%s; set aside as %s, a fresh one is made", self.path, aside)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _make_private(path: Path) -> None:
    """Makes the file if it is missing, for this user alone; SQLite gives -wal and -shm the same mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    if os.name == "posix":
        for suffix in ("", "-wal", "-shm"):
            # Also if a link has been put in its place: its target is not ours to close.
            with contextlib.suppress(OSError):
                make_private(Path(f"{path}{suffix}"))


def _use_wal(connection: sqlite3.Connection) -> None:
    # The switch needs the file alone and does not always wait for it (sqlite.org/wal.html, 2.2 and 8): several
    # workers that start together would meet here. Once made, it is kept by the file.
    deadline_s = time.monotonic() + _BUSY_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode=WAL").close()
            return
        time.sleep(0.01)
    raise sqlite3.OperationalError("database is locked")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # Ctrl-C included: an open transaction would lock the file for all. A full disk has rolled back already
        # (sqlite.org/lang_transaction.html, "Response To Errors").
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise


class FileThread:
    """Runs calls on a file one after the other, for several event loops; closes it, also if it is never ended."""

    def __init__(self, file: SqliteFile, *, limit_s: float) -> None:
        self._file = file
        self._limit_s = limit_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="litellm-compaction-store")
        self._hanging: Future[object] | None = None
        self._end = weakref.finalize(self, _end, self._thread, file)

    def submit(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):
            self._thread.submit(_attempt, call)

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """The result of `call` in the thread; a caller that is cancelled or tired of waiting does not stop it."""
        if self._hanging is not None and not self._hanging.done():
            raise StoreError(f"store {self._file.path} still hangs")
        try:
            job = self._thread.submit(_attempt, call)
        except RuntimeError as exc:
            raise StoreError(f"store {self._file.path} is closed") from exc
        answered = asyncio.wrap_future(job)
        done, _ = await asyncio.wait({answered}, timeout=self._limit_s)
        if not done:
            self._hanging = job  # type: ignore[assignment] # whatever it will give
            raise StoreError(f"store {self._file.path} did not answer in {self._limit_s:g} s")
        result = answered.result()
        if isinstance(result, StoreError):
            raise result
        return result

    async def aclose(self) -> None:
        with contextlib.suppress(StoreError):
            await self.run(self._file.close)
        self._end()


def _attempt(call: Callable[[], _Result]) -> _Result | StoreError:
    # A value, so that asyncio does not complain about an error without a waiter.
    try:
        return call()
    except StoreError as error:
        return error
    except OSError as error:
        return StoreError(f"a copy that was set aside because it was damaged cannot be deleted: {error}")


def _end(thread: ThreadPoolExecutor, file: SqliteFile) -> None:
    thread.shutdown(wait=False)
    file.close()
