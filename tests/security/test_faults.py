"""Threat: a fault of our own. Whatever raises, a prompt that has been counted over its window is never sent (P8)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import litellm_compaction
from litellm_compaction.engine.measure import RequestMeasurer
from tests.security.hooks import Client, Scene, conversation, use_router

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*`ReadOnly` qualifier:UserWarning",
    # What was to be awaited where a fault is raised instead.
    "ignore:.*was never awaited:RuntimeWarning",
)
_PACKAGE = str(Path(litellm_compaction.__file__).parent)
# About 1,600 tokens for a window of 1,200.
_LONG = conversation("a", 8)


class Fault(Exception):
    """Raised where nothing should."""


class Calls:
    """Follows the calls of the package's functions from the moment on at which the request was first counted.

    Args:
        fault: this function raises, once in each step of the event loop; None for nothing.

    Attributes:
        seen: every function that was called, in their order.
    """

    def __init__(self, fault: CodeType | None = None) -> None:
        self.seen: dict[CodeType, None] = {}
        self.is_counted = False
        self._fault = fault

    def follow(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not self.is_counted or not code.co_filename.startswith(_PACKAGE):
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


async def _sent(group: str, *, stream: bool, calls: Calls) -> tuple[Client, list[dict[str, Any]]]:
    """A long request through all hooks, and every body that left for its server."""
    # What runs behind a request may fail, too; nobody waits for it.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    scene = Scene()
    with pytest.MonkeyPatch.context() as patch:
        use_router(patch, scene.router)
        weigh = RequestMeasurer.measure

        async def weighed(*arguments: Any) -> Any:
            try:
                return await weigh(*arguments)
            finally:
                calls.is_counted = True

        patch.setattr(RequestMeasurer, "measure", weighed)
        client = Client(scene, "sk-alice", _LONG, attempts=(group,), stream=stream)
        with followed(calls):
            await client.send()
    bodies = scene.server.bodies if group == "carried" else client.sent
    await scene.handler.aclose()
    return client, bodies


def _is_too_long(body: dict[str, Any]) -> bool:
    """Whether the conversation leaves as it came: what a compaction leaves is less than half of it."""
    return len(json.dumps(body["messages"])) > len(json.dumps(_LONG)) // 2


def test_no_fault_between_the_count_and_the_send_lets_a_long_prompt_pass() -> None:
    """Each function that is called after the count fails in turn: shortened, or refused, never sent as it came.

    By both carriers, streamed and not; a function that is called by several ways fails on the first of them.
    """
    tried: set[CodeType] = set()
    passed = []
    for group, stream in (("carried", True), ("carried", False), ("hooked", True), ("hooked", False)):
        calls = Calls()
        client, bodies = asyncio.run(_sent(group, stream=stream, calls=calls))
        assert client.error is None
        assert [_is_too_long(body) for body in bodies] == [False]
        assert len(calls.seen) > 200, "this follows nothing any more"
        for code in calls.seen.keys() - tried:
            _, bodies = asyncio.run(_sent(group, stream=stream, calls=Calls(fault=code)))
            if any(map(_is_too_long, bodies)):
                passed.append(f"{Path(code.co_filename).name}:{code.co_name}, {group}")
        tried |= calls.seen.keys()
    assert passed == []
