"""How an error of ours is told when a request goes on in spite of it (promise P8)."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

logger = logging.getLogger("litellm_compaction")
_LOGGED_FRAMES = 4


def log_failed_open(place: str, error: Exception) -> None:
    """Logs an error with the lines that it came from, and without its message: that may quote a conversation (P9)."""
    frames = traceback.extract_tb(error.__traceback__)[: -_LOGGED_FRAMES - 1 : -1]
    lines = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    logger.error("failed_open hook=%s error=%s at=%s", place, type(error).__name__, lines)
