"""Runs hostile work in a child process that the system ends: what is measured is processor time, never the clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

resource = pytest.importorskip("resource", reason="limits on a process need a POSIX system")

ROOT = Path(__file__).resolve().parents[2]
_PREAMBLE = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({cpu_s}, {cpu_s} + 1))
resource.setrlimit(resource.RLIMIT_AS, ({memory_bytes}, {memory_bytes}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
given = json.loads(sys.stdin.read())
"""


def in_child(code: str, given: Any, *, cpu_s: int) -> Any:
    """What `code` prints as JSON; it finds `given` under that name. Fails the test where it uses more than allowed."""
    preamble = _PREAMBLE.format(cpu_s=cpu_s, memory_bytes=2 * 2**30)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", preamble + code],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=environ,
        check=False,
        # For a child that sleeps; one that works is ended by its limit.
        timeout=600,
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout)
