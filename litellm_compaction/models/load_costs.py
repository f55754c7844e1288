"""What loading a vocabulary has cost: time, and memory of the process, for logs and reports.

Noted by whatever loads one, read by `count`, by `doctor` and for the settings page.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("litellm_compaction")
_STATM = Path("/proc/self/statm")


class LoadCost(NamedTuple):
    """The cost of one vocabulary.

    Attributes:
        load_ms: from the first look at the file.
        memory_bytes: by which the process has grown meanwhile, other work included; None where the system does not say.
    """

    load_ms: float
    memory_bytes: int | None


_costs: dict[str, LoadCost] = {}


class Loading:
    """A vocabulary that is being loaded since this was made."""

    def __init__(self) -> None:
        self._begun_s, self._before = time.perf_counter(), _resident_bytes()

    def note(self, name: str) -> None:
        """Notes what the vocabulary has cost, now that it is there."""
        load_ms, after = 1e3 * (time.perf_counter() - self._begun_s), _resident_bytes()
        grown = max(0, after - self._before) if self._before is not None and after is not None else None
        _costs[name] = LoadCost(load_ms, grown)
        words = f"{grown / 2**20:.0f}" if grown is not None else "unknown"
        logger.info("vocabulary_loaded name=%s load_ms=%.0f memory_mb=%s", name, load_ms, words)


def load_cost(name: str) -> LoadCost | None:
    """What a vocabulary has cost; None where it has not been loaded."""
    return _costs.get(name)


def _resident_bytes() -> int | None:
    """Of this process, where the system has a file that says so (Linux)."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
