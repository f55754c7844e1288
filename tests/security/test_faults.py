"""Threat: a fault of our own. Whatever raises, a prompt that has been counted over its window is never sent (P8)."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import pytest

import litellm_compaction
from litellm_compaction.engine.measure import RequestMeasurer
from tests.integration.app import in_loop
from tests.integration.bench import Bench
from tests.security.office import ask, body_of, conversation, forget_failures, send

pytestmark = pytest.mark.filterwarnings(
    # What was to be awaited where a fault is raised instead.
    "ignore:.*was never awaited:RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
_PACKAGE = str(Path(litellm_compaction.__file__).parent)
_SIMULATOR = f"{_PACKAGE}/simulator"
# One of so many functions fails where not all of them are asked for.
_EACH = 40


class Fault(Exception):
    """Raised where nothing should."""


class Calls:
    """Follows the calls of the package's functions from the moment on at which the request was first counted.

    The function `fault` raises, once in each step of the event loop; `seen` are all that were called, in their order.
    """

    def __init__(self, fault: CodeType | None = None) -> None:
        self.seen: dict[CodeType, None] = {}
        self.is_counted = False
        self._fault = fault

    def follow(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if (
            event != "call"
            or not self.is_counted
            or not code.co_filename.startswith(_PACKAGE)
            or code.co_filename.startswith(_SIMULATOR)
        ):
            return
        self.seen[code] = None
        if code is self._fault:
            # The interpreter ends following where this raises.
            asyncio.get_running_loop().call_soon(sys.settrace, self.follow)
            raise Fault


@contextmanager
def followed(calls: Calls) -> Iterator[None]:
    """Within the context calls are followed, in this thread."""
    before = sys.gettrace()
    sys.settrace(calls.follow)
    try:
        yield
    finally:
        sys.settrace(before)
        calls.is_counted = False


def _failing(office: Bench, group: str, topic: str, calls: Calls, *, stream: bool) -> httpx.Response:
    """A request that has to be compacted, whose prompt has been counted before calls are followed."""

    async def followed_one() -> httpx.Response:
        # What runs behind a request may fail, too; nobody waits for it.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        try:
            with followed(calls):
                return await send(
                    office, f"sk-other-key.{topic}", body_of(group, conversation(topic, 20), stream=stream)
                )
        finally:
            asyncio.get_running_loop().set_exception_handler(None)

    weigh = RequestMeasurer.measure

    async def weighed(*arguments: Any) -> Any:
        try:
            return await weigh(*arguments)
        finally:
            calls.is_counted = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestMeasurer, "measure", weighed)
        return in_loop(followed_one())


@pytest.mark.parametrize("each", [pytest.param(_EACH, id="some"), pytest.param(1, id="all", marks=pytest.mark.full)])
@pytest.mark.parametrize(("group", "stream"), [("small", True), ("foreign-hooked", False)])
def test_no_fault_between_the_count_and_the_send_lets_a_long_prompt_pass(
    office: Bench, group: str, stream: bool, each: int
) -> None:
    """Each function that is called after the count fails in turn: shortened, or refused, never sent as it came."""
    office.watch(group)
    calls = Calls()
    assert ask(office, "sk-bob", body_of(group, conversation("warm", 1))).status_code == 200
    assert _failing(office, group, f"none{each}", calls, stream=stream).headers["x-litellm-compaction"] == "compacted"
    assert len(calls.seen) > 200, "this follows nothing any more"
    passed = []
    for number, code in enumerate(list(calls.seen)[::each]):
        # One that passes the answer on breaks it.
        with suppress(httpx.RemoteProtocolError):
            _failing(office, group, f"{each}-{number}", Calls(fault=code), stream=stream)
        if office.findings():
            passed.append(f"{Path(code.co_filename).name}:{code.co_name}, {group}")
    forget_failures(office)
    # Here, where it is not told: what was to be awaited.
    gc.collect()
    assert passed == []
    # None of them has broken what serves the next.
    assert (
        _failing(office, group, f"after{each}", Calls(), stream=stream).headers["x-litellm-compaction"] == "compacted"
    )
