"""Keeps the proxy process alive on Python before 3.12, where setting a context variable can crash the interpreter.

Until 3.12 the garbage collector runs inside any allocation, also inside `ContextVar.set`. If it then ends a generator
whose `finally` sets or resets a variable, the map that is being copied is freed under the copy (CPython 3.11,
Python/context.c `contextvar_set`: `ctx->ctx_vars` is borrowed), and the process dies with a segmentation fault. A stock
LiteLLM 1.106.2, which resets variables in such generators, died after some hundred streamed requests.
Since 3.12 the collector runs between bytecodes only (What's New in Python 3.12, "gc").
"""

from __future__ import annotations

import contextvars
import gc
import sys
from typing import Any

_held: contextvars.Context | None = None


def hold_contexts() -> None:
    """Makes every collection hold the context that is current, and so the map that may be in use; idempotent."""
    if sys.version_info < (3, 12) and _hold not in gc.callbacks:
        gc.callbacks.append(_hold)


def _hold(phase: str, _info: dict[str, Any]) -> None:
    """A reference until the next collection: one that ended with this one would be gone before the copy is made."""
    global _held
    if phase == "start":
        _held = contextvars.copy_context()
