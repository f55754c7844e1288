"""The interpreter's crash that `hold_contexts` prevents, brought about on purpose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Garbage that sets a context variable when it is collected, while a context variable is being set.
_PROVOKE = """
import contextvars, gc, random
variables = [contextvars.ContextVar("v") for i in range(12)]
def in_a_cycle():
    me = yield
    try:
        yield me
    finally:
        variables[0].set(object())
random.seed({seed})
for i in range(60_000):
    if i % 50 == 0:
        gc.set_threshold(random.randint(3, 40), 1000, 1000)
    generator = in_a_cycle()
    next(generator)
    generator.send(generator)
    del generator
    variables[i % 12].set(object())
"""
_HOLD = "from litellm_compaction.proxy.litellm_api import hold_contexts\nhold_contexts()\n"


def _ends(script: str) -> int:
    # Freed memory is overwritten, so that its use always shows.
    environ = {**os.environ, "PYTHONMALLOC": "debug"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, check=False)
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_with_it_the_interpreter_lives(seed: int) -> None:
    """However often the collector meets a variable that is being set."""
    assert _ends(_HOLD + _PROVOKE.replace("{seed}", str(seed))) == 0
