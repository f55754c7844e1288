"""What the other processes that share a store have just read of a server, told between them by the board.

Asked by `windows/cache.py` before a server's models are listed again, and told when they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from math import isfinite, nan

from litellm_compaction.engine.coordination import Coordination
from litellm_compaction.engine.shared_pool import shared_name
from litellm_compaction.errors import StoreError
from litellm_compaction.stores.board import MAX_LEASE_S, Look
from litellm_compaction.stores.patience import attentive_wait
from litellm_compaction.windows.cache import Heard

# Nobody waits longer than the server's own answer takes, as far as that can be told on a busy machine; a board that is
# late is not asked for other servers' sake in the same moment.
_LEAST_WAIT_S, _MOST_WAIT_S, _LATE_S = 0.005, 0.02, 2.0


class SharedReads:
    """Notes by server, which say what was read of it, and when it was begun by the board's clock.

    Args:
        coordination: with the other processes.
        clock: seconds, monotonic.
    """

    def __init__(self, coordination: Coordination, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._coordination = coordination
        self._clock = clock
        self._late_until_s = -1.0

    async def heard(self, root: str, *, limit_s: float) -> Heard | None:
        """What others have read of a server of late; None where the board does not say so at once.

        Args:
            root: of the server.
            limit_s: how long its own answer takes.
        """
        if self._coordination.is_silent or self._clock() < self._late_until_s:
            return None
        look = asyncio.ensure_future(self._coordination.look(_topic(root)))
        if await attentive_wait(look, min(_MOST_WAIT_S, max(_LEAST_WAIT_S, limit_s))) is None:
            self._late_until_s = self._clock() + _LATE_S
            self._coordination.behind(_ended(look))
            return None
        try:
            now_s, notes = look.result()
        except StoreError:
            return None
        return Heard(now_s, _parsed(notes, now_s))

    def tell(self, root: str, digest: str, began_s: float, *, lease_s: float) -> None:
        """Tells the others what was read, when nobody waits for it.

        Args:
            root: of the server.
            digest: of what it said.
            began_s: no later than the reading began, by the board's clock (`Heard.now_s`).
            lease_s: how long it is of use.
        """
        # Rounded, it must not be later.
        note = f"{digest} {began_s - 0.001:.3f}".encode()
        self._coordination.behind(self._tell(root, note, min(lease_s, MAX_LEASE_S)))

    async def _tell(self, root: str, note: bytes, lease_s: float) -> None:
        with contextlib.suppress(StoreError):
            await self._coordination.update(_topic(root), lambda _: (note, None), lease_s=lease_s)


async def _ended(look: asyncio.Task[Look]) -> None:
    with contextlib.suppress(StoreError):
        await look


def _topic(root: str) -> str:
    return f"listing {shared_name(root)}"


def _parsed(notes: Sequence[bytes], now_s: float) -> list[tuple[str, float]]:
    """Digest and age of each; another version's notes say something else, and so count as such."""
    parsed = []
    for note in notes:
        digest, _, began_s = note.decode("utf-8", "replace").partition(" ")
        try:
            age_s = now_s - float(began_s)
        except ValueError:
            age_s = nan
        parsed.append((digest, age_s) if isfinite(age_s) else ("", 0.0))
    return parsed
