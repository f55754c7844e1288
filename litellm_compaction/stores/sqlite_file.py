"""One SQLite file, opened and kept usable: rights, version, damage, disappearance, other writers.

All of it blocks, and runs in the one thread of `sqlite.py`. Of the content this module knows only the schema.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias, TypeVar

from litellm_compaction.errors import StoreError
from litellm_compaction.places import make_private

logger = logging.getLogger("litellm_compaction")
_Result = TypeVar("_Result")
Connect: TypeAlias = "Callable[..., sqlite3.Connection]"
Job: TypeAlias = "Callable[[sqlite3.Connection], _Result]"

# Another process holds the lock for well under a millisecond a write; a request waits no longer than this.
_BUSY_S = 1.0
# A file that could not be opened or written is left alone for so long: a waiting request each time would be worse.
_RETRY_S = 10.0
_COPIES = ".corrupt-"
_DAMAGED_SCHEMA = ("Could not decode", "no such table", "no such column", "has no column", "malformed database schema")
# "lmcs" in ASCII; file(1) shows it, and it tells another program's database from an empty one of ours.
_APPLICATION_ID = 0x6C6D6373
_VERSION = 7


class SqliteFile:
    """The database file, in one thread. A damaged or deleted one is replaced; the damaged one is set aside.

    Any other trouble is a `StoreError`: text of a damaged file can make the driver raise anything.

    Args:
        path: need not exist; it and its folder are made for this user alone.
        schema: statements that make what is missing.
        create: whether to make and repair the file; if not, its faults are errors.
        clock: seconds, for the pause after a write that failed.
    """

    def __init__(self, path: Path, schema: str, *, create: bool, connect: Connect, clock: Callable[[], float]) -> None:
        self.path = path
        # The journal holds text that is gone.
        self.owes_erasing = False
        self._schema = schema
        self._create = create
        self._connect = connect
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._is_closed = False
        self._refused_until_s, self._refusal = -math.inf, ""

    def read(self, job: Job[_Result]) -> _Result:
        return self._do(job, writes=False)

    def write(self, job: Job[_Result]) -> _Result:
        """Returns the result of `job`, in one transaction; raises if a write has failed a moment ago."""

        def transaction(connection: sqlite3.Connection) -> _Result:
            with _transaction(connection):
                return job(connection)

        self._refuse_again()
        return self._do(transaction, writes=True)

    def erase_remains(self) -> None:
        """Empties the journal if it holds text that is gone; while another process reads, the next call does."""
        if self.owes_erasing:
            [is_busy, *_] = self.read(lambda each: each.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
            self.owes_erasing = bool(is_busy)

    def delete_copies(self, *, before_s: float | None = None) -> None:
        """Deletes the copies that were set aside, of before a time (since 1970) or all; of a link only the link."""
        for copy in list(self.path.parent.glob(f"{glob.escape(self.path.name)}{_COPIES}*")):
            # Another process may be faster.
            with contextlib.suppress(FileNotFoundError):
                if before_s is None or copy.lstat().st_mtime < before_s:
                    copy.unlink()

    def close(self) -> None:
        """Closes the file, and refuses every later call."""
        self._is_closed = True
        self._let_go()

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _do(self, job: Job[_Result], *, writes: bool) -> _Result:
        try:
            try:
                return job(self._opened())
            except (sqlite3.Error, UnicodeDecodeError) as error:
                if not self._is_damage(error):
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
                # What stands in the connection's memory may not be what is on the disk any more.
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
            if self._create:
                _make_private(self.path)
            elif not self.path.is_file():
                raise StoreError(f"there is no store at {self.path} yet; a proxy makes it with its first compaction")
            self._identity = _identity(self.path)
            connection = self._connect(str(self.path), timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(connection)
            except BaseException:
                # No other code knows the connection yet; Ctrl-C included.
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version, application = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")
        )
        if application != _APPLICATION_ID and (
            application or connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        ):
            raise StoreError(f"{self.path} is a database of another program; name another file in `store`")
        if version > _VERSION:
            raise StoreError(
                f"store {self.path} has schema version {version} and this version of litellm_compaction knows "
                f"{_VERSION}: update it, or name another file in `store`"
            )
        if 0 < version < _VERSION:
            raise sqlite3.DatabaseError(f"its schema version {version} is of a build before the first release")
        if version < _VERSION:
            _use_wal(connection)
            connection.executescript(
                f"BEGIN IMMEDIATE; {self._schema} PRAGMA application_id={_APPLICATION_ID};"
                f" PRAGMA user_version={_VERSION}; COMMIT;"
            )
        # In WAL mode a commit then costs no fsync, and a crash loses the last commits but no file
        # (sqlite.org/pragma.html#pragma_synchronous). Deleted text is overwritten, not only unlinked.
        for pragma in ("synchronous=NORMAL", "secure_delete=ON", "journal_size_limit=4194304"):
            connection.execute(f"PRAGMA {pragma}").close()

    def _is_damage(self, error: sqlite3.Error | UnicodeDecodeError) -> bool:
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
