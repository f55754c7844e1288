"""The one thread in which a SQLite file is read and written, so that no event loop waits for a disk.

Used by `sqlite.py` and `sqlite_board.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from litellm_compaction.errors import StoreError
from litellm_compaction.stores.sqlite_file import SqliteFile

_Result = TypeVar("_Result")


class FileThread:
    """Runs calls on a file one after the other; may be used from several event loops.

    Args:
        file: closed at the end, also of a process that has not closed it.
        limit_s: seconds after which a call is no longer waited for.
    """

    def __init__(self, file: SqliteFile, *, limit_s: float) -> None:
        self._file = file
        self._limit_s = limit_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="litellm-compaction-store")
        self._hanging: Future[object] | None = None
        self._is_closed = False
        self._end = weakref.finalize(self, _end, self._thread, file)

    def submit(self, call: Callable[[], object]) -> None:
        """Has something done when nobody waits for it."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(_attempt, call)

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """The result of `call` in the thread; a caller that is cancelled or tired of waiting does not stop it.

        Raises:
            StoreError: it is closed, it hangs, or what `call` raises.
        """
        if self._is_closed:
            raise StoreError(f"store {self._file.path} is closed")
        if self._hanging is not None and not self._hanging.done():
            raise StoreError(f"store {self._file.path} still hangs")
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[_Result | StoreError] = loop.create_future()

        def answer(job: Future[_Result | StoreError]) -> None:
            # The loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, answered, job)

        try:
            job = self._thread.submit(_attempt, call)
        except RuntimeError as exc:
            raise StoreError(f"store {self._file.path} is closed") from exc
        job.add_done_callback(answer)
        try:
            result = await asyncio.wait_for(answered, self._limit_s)
        except asyncio.TimeoutError as exc:
            self._hanging = job  # type: ignore[assignment] # whatever it will give
            raise StoreError(f"store {self._file.path} did not answer in {self._limit_s:g} s") from exc
        if isinstance(result, StoreError):
            raise result
        return result

    async def aclose(self) -> None:
        """Finishes what has begun and closes the file; any number of times."""
        if self._is_closed:
            return
        with contextlib.suppress(StoreError):
            await self.run(self._file.close)
        self._is_closed = True
        self._end()


def _attempt(call: Callable[[], _Result]) -> _Result | StoreError:
    try:
        return call()
    except StoreError as error:
        return error


def _settle(answered: asyncio.Future[_Result], job: Future[_Result]) -> None:
    if answered.done():
        return
    error = job.exception()
    if error is None:
        answered.set_result(job.result())
    else:
        answered.set_exception(error)


def _end(thread: ThreadPoolExecutor, file: SqliteFile) -> None:
    thread.shutdown(wait=False)
    file.close()
