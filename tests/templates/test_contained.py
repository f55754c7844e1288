"""A process for strangers' work: replaced where it ended, and ended where it hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from litellm_compaction.templates.contained import Contained, Died
from litellm_compaction.templates.template import StrangersTemplate
from tests.security.test_files import CHATML, MESSAGES


@pytest.fixture
def process() -> Iterator[Contained]:
    made = Contained()
    yield made
    made.end()


def test_a_process_that_was_ended_is_replaced(process: Contained) -> None:
    """By whatever ended it between two requests."""
    box = StrangersTemplate(CHATML, process)
    first = box.parts(MESSAGES, [])
    number = int(process.run("tests.templates.test_contained:number", b""))
    os.kill(number, signal.SIGKILL)
    os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)
    assert box.parts(MESSAGES, []) == first
    assert int(process.run("tests.templates.test_contained:number", b"")) != number


def test_a_process_that_does_nothing_is_ended_by_the_clock() -> None:
    """Whatever limits the system has."""
    process = Contained(wall_s=0.3)
    with pytest.raises(Died):
        process.run("time:sleep", b"")
    with pytest.raises(Died):
        process.run("tests.templates.test_contained:sleeps", b"")


def number(_: bytes) -> bytes:
    """The process that does the work."""
    return str(os.getpid()).encode()


def sleeps(_: bytes) -> bytes:
    """Work without end that takes no processor time."""
    time.sleep(600)
    return b""
