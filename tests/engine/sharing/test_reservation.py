"""Room of an answer in a shared context: bounded beside others, called back, and doubled where it was too little."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from litellm_compaction.errors import Overloaded
from tests.builders import user
from tests.engine.bench import answers, settled
from tests.proxy.scripted import Scene

SHARED = {"admission": "pool", "admission_timeout_s": 0.05}


def shared(**settings: object) -> Scene:
    return Scene([user("Hello.")], [], settings={**SHARED, **settings}, window_tokens=4096)


async def test_answers_in_one_context_are_bounded_so_that_they_fit_together() -> None:
    """Whatever the server generates before anybody looks: prompts and bounds are never more than the window."""
    scene = shared()
    prepared = await scene.prepared()
    # A seat is held as long as its room is.
    rooms, limits = [scene.compactor.room(scene.context)], [60]
    assert await rooms[0].acquire(prepared, 60, is_watched=True) == 60
    with pytest.raises(Overloaded):  # noqa: PT012
        while len(rooms) < 100:
            rooms.append(scene.compactor.room(scene.context))
            limits.append(await rooms[-1].acquire(prepared, 4000, is_watched=True))
    assert len(limits) > 2
    assert len(limits) * prepared.count.tokens + sum(limits) <= 4096
    assert min(limits[1:]) >= 400


async def test_an_answer_alone_is_called_back_when_another_comes() -> None:
    """It had all the rest: what it does not need to go on is asked for, as long as that lets the other one in."""
    scene = shared()
    prepared = await scene.prepared()
    room = scene.compactor.room(scene.context)
    limit = prepared.max_output_tokens(None)
    assert await room.acquire(prepared, limit, is_watched=True) == limit
    assert not room.is_called_back(prepared, 100, can_be_cut=True)
    other = scene.compactor.room(scene.context)
    patient = replace(scene.context.settings.constants, admission_timeout_s=600)
    other._context = replace(scene.context, settings=scene.context.settings.with_constants(patient))
    waiting = asyncio.ensure_future(other.acquire(prepared, limit, is_watched=True))
    await settled()
    assert not room.is_called_back(prepared, 100, can_be_cut=False)
    assert not room.is_called_back(prepared, 3500, can_be_cut=True)
    assert room.is_called_back(prepared, 100, can_be_cut=True)
    room.was_cut(is_spent=False)
    assert not waiting.done()
    again = await room.acquire(prepared, limit, is_watched=True)
    both = again + await asyncio.wait_for(waiting, 60)
    assert 2 * prepared.count.tokens + both <= 4096
    assert again >= 400


async def test_answers_that_share_nothing_are_there_and_hold_nothing() -> None:
    """Each has the whole bound, and none holds words back for another; one that is lost has left a moment later."""
    scene = shared(admission="off")
    prepared, admission = await scene.prepared(), scene.compactor.admission
    admission.stopping_s = 0.0
    rooms = [scene.compactor.room(scene.context) for _ in range(2)]
    assert [await room.acquire(prepared, 3000, is_watched=True) for room in rooms] == [3000, 3000]
    assert (answers(admission), rooms[0].beside(prepared.window)) == (2, 1)
    assert not rooms[0].has_company
    del rooms[1:]
    await settled()
    assert answers(admission) == 1
    rooms[0].release()
    assert answers(admission) == 0
