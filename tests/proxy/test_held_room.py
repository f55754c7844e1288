"""Room that the hooks hold for a request: given back however its task or its stream ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Literal

import pytest

from litellm_compaction.engine import Guarded, Room
from litellm_compaction.errors import CompactionError, DoesNotFit, Overloaded
from litellm_compaction.proxy.held_room import guarded_in_room
from tests.integration.conversations import prose, talk
from tests.proxy.scripted import Scene

SHARED = {"admission": "pool", "admission_timeout_s": 0.05}


class _Stream:
    """What LiteLLM gives for a streamed answer."""

    async def __aiter__(self) -> AsyncIterator[str]:
        yield "a word"


def _scene(**settings: Any) -> Scene:
    return Scene([{"role": "user", "content": prose("held", 1100)}], [], settings={**SHARED, **settings})


async def _asked(scene: Scene, ending: Literal["stream", "whole", "error", "hang"]) -> tuple[Any, Room]:
    """A deployment is asked, as LiteLLM does it: in the task in which its hook has run."""
    _, limit, room = await guarded_in_room(scene.compactor, scene.request, scene.case, None, can_grow=True)
    assert limit > 0
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
        *_, room = await guarded_in_room(scene.compactor, scene.request, scene.case, None, can_grow=True)
    except Overloaded:
        return False
    room.leave()
    return True


async def _response(scene: Scene, ending: Literal["stream", "whole", "error", "hang"]) -> Any:
    response, _ = await _asked(scene, ending)
    return response


async def test_an_open_stream_holds_its_room() -> None:
    """As long as somebody may read it; dropped unread, it holds nothing."""
    scene = _scene()
    stream = await asyncio.ensure_future(_response(scene, "stream"))
    assert not await _is_free(scene)
    del stream
    gc.collect()
    assert await _is_free(scene)


async def test_whoever_reads_a_stream_gives_its_room_back() -> None:
    """Before the stream itself is gone, and again is no change."""
    scene = _scene()
    stream, room = await asyncio.ensure_future(_asked(scene, "stream"))
    room.leave()
    assert await _is_free(scene)
    del stream
    room.leave()
    assert await _is_free(scene)


@pytest.mark.parametrize("ending", ["whole", "error"])
async def test_a_task_that_ends_gives_its_room_back(ending: Literal["whole", "error"]) -> None:
    """A whole answer is there, or there is none."""
    scene = _scene()
    await asyncio.gather(asyncio.ensure_future(_response(scene, ending)), return_exceptions=True)
    assert await _is_free(scene)


async def test_a_cancelled_task_gives_its_room_back() -> None:
    """A client that leaves while the deployment is asked, of which no hook is told."""
    scene = _scene()
    asking = asyncio.ensure_future(_response(scene, "hang"))
    await asyncio.wait_for(scene.server.hanging.wait(), 60)
    assert not await _is_free(scene)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await _is_free(scene)


@pytest.mark.parametrize("kind", [DoesNotFit, Overloaded])
async def test_a_refusal_holds_nothing(kind: type[CompactionError]) -> None:
    """Neither where the request cannot fit nor where its turn did not come."""
    scene = _scene()
    content = prose("too much", 2500 if kind is DoesNotFit else 1100)
    refused = Scene([{"role": "user", "content": content}], [], settings=SHARED)
    refused.compactor = scene.compactor
    stream = await asyncio.ensure_future(_response(scene, "stream")) if kind is Overloaded else None
    with pytest.raises(kind):
        await _response(refused, "whole")
    del stream
    gc.collect()
    assert await _is_free(scene)


async def test_a_summary_is_made_in_room_of_its_own() -> None:
    """While another request fills the context, its compaction does not begin."""
    scene = _scene()
    stream = await asyncio.ensure_future(_response(scene, "stream"))
    asked: list[int] = []

    async def ask(messages: Any, **options: Any) -> Any:
        asked.append(len(messages))
        raise AssertionError

    other = Scene(talk("summarized", 1800), [], settings=SHARED, ask=ask)
    other.compactor = scene.compactor
    with pytest.raises(Overloaded):
        await _response(other, "whole")
    assert asked == []
    del stream


async def test_a_client_that_leaves_while_its_summary_is_made_gives_its_room_back() -> None:
    """Nothing has gone out for it yet, so that no task or stream ends that could."""
    asked = asyncio.Event()

    async def ask(messages: Any, **options: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    scene = _scene()
    leaving = Scene(talk("left", 1800), [], settings=SHARED, ask=ask)
    leaving.compactor = scene.compactor
    task = asyncio.ensure_future(_response(leaving, "whole"))
    await asyncio.wait_for(asked.wait(), 60)
    assert not await _is_free(scene)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await _is_free(scene)


async def _beside_as_many_as_fit(limit_tokens: int) -> tuple[Guarded, Room]:
    """What one answer in a full context was sent, and its room."""
    scene = Scene([{"role": "user", "content": "Hello."}], [], settings=SHARED, window_tokens=4096)
    guarded = await scene.guarded()
    room = scene.compactor.room(scene.case)
    await room.take(guarded, limit_tokens, can_grow=True)
    with suppress(Overloaded):
        for _ in range(100):
            await scene.compactor.room(scene.case).take(guarded, 4000, can_grow=True)
    return guarded, room


async def test_an_answer_in_a_full_context_stops_before_its_room_ends() -> None:
    """The server is ahead of what has been read of it: what it generates until it hears of the stop has its room."""
    guarded, room = await _beside_as_many_as_fit(4000)
    generated = next(tokens for tokens in range(4096) if not room.covers(guarded, tokens))
    assert generated > 100
    assert room.covers(guarded, generated + 50, can_be_cut=False)


async def test_an_answer_that_the_server_ends_within_its_room_is_not_stopped() -> None:
    """A short one holds all of it from the start."""
    guarded, room = await _beside_as_many_as_fit(60)
    assert room.covers(guarded, 60)
