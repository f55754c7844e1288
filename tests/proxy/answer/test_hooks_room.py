"""Room that the hooks hold for a request: given back however its task or its stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from litellm.exceptions import Timeout

from litellm_compaction.engine import Reservation
from litellm_compaction.errors import Overloaded
from litellm_compaction.proxy.answer.hooks import prepared_in_room
from tests.builders import prose
from tests.engine.bench import usage
from tests.proxy.scripted import Scene

SHARED = {"admission": "pool", "admission_timeout_s": 0.05}


class _Stream:
    """What LiteLLM gives for a streamed answer."""

    async def __aiter__(self) -> AsyncIterator[str]:
        yield "a word"


def _scene(**settings: Any) -> Scene:
    return Scene([{"role": "user", "content": prose("held", 1100)}], [], settings={**SHARED, **settings})


Ending = Literal["stream", "whole", "error", "timeout", "hang"]


async def _asked(scene: Scene, ending: Ending, asked_tokens: int | None = None) -> tuple[Any, Reservation]:
    """A deployment is asked, as LiteLLM does it: in the task in which its hook has run."""
    is_stream = asked_tokens is None
    _, limit, room = await prepared_in_room(
        scene.compactor, scene.request, scene.context, asked_tokens, is_watched=True, is_stream=is_stream
    )
    assert limit > 0
    if ending == "timeout":
        raise Timeout("too slow", "m", "xinference")
    if ending == "error":
        raise ConnectionError
    if ending == "hang":
        scene.server.hanging.set()
        await asyncio.Event().wait()
    return (_Stream() if ending == "stream" else "an answer"), room


async def _is_free(scene: Scene) -> bool:
    """Whether a second request, which does not fit beside the first, is let in."""
    await asyncio.sleep(0)
    try:
        *_, room = await prepared_in_room(scene.compactor, scene.request, scene.context, None, is_watched=True)
    except Overloaded:
        return False
    room.release()
    return True


async def _response(scene: Scene, ending: Ending, asked_tokens: int | None = None) -> Any:
    response, _ = await _asked(scene, ending, asked_tokens)
    return response


async def test_a_cancelled_task_gives_its_room_back() -> None:
    """A client that leaves while the deployment is asked, of which no hook is told."""
    scene = _scene()
    asking = asyncio.ensure_future(_response(scene, "hang"))
    await asyncio.wait_for(scene.server.hanging.wait(), 60)
    assert not await _is_free(scene)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await _is_free(scene)


@pytest.mark.parametrize("ending", ["hang", "timeout"])
async def test_a_plain_answer_that_nobody_reads_holds_its_room_until_its_server_has_ended(ending: Ending) -> None:
    """Its client has left, or would not wait: the server writes it to its bound all the same."""
    scene = _scene()
    asking = asyncio.ensure_future(_response(scene, ending, asked_tokens=4))
    if ending == "hang":
        await asyncio.wait_for(scene.server.hanging.wait(), 60)
        asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    (pool,) = scene.compactor.admission._pools
    assert usage(scene.compactor.admission, pool).used_tokens > 0
    other = Scene([{"role": "user", "content": prose("next", 1100)}], [], settings={"admission": "pool"})
    other.compactor = scene.compactor
    await asyncio.wait_for(_response(other, "whole"), 60)
    assert not scene.compactor.admission._pools
