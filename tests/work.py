"""How much work code does, counted in Python's own instructions: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(run: Callable[[], object]) -> int:
    """The bytecode instructions that `run` executes in this thread; what it calls in C is one each."""
    done = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal done
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            done += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return done


def grows_linearly(work: Callable[[int], Callable[[], object]], size: int) -> bool:
    """Whether twice the size costs at most 2.5 times the work; quadratic work would cost four times as much.

    `work` prepares a run of a size, which is not counted, and gives the run, which is.
    """
    work(1)()
    return instructions(work(2 * size)) <= 2.5 * instructions(work(size))
