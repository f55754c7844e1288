"""Room that the hooks hold for a request: given back however its task or its stream ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal

import pytest
from litellm.exceptions import Timeout

from litellm_compaction.engine import Reservation
from litellm_compaction.errors import CompactionError, DoesNotFit, Overloaded
from litellm_compaction.proxy.answer.hooks import prepared_in_room
from litellm_compaction.windows.windows import Target, Window
from tests.builders import prose, talk
from tests.engine.bench import settled, usage
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
    room.release()
    assert await _is_free(scene)
    del stream
    room.release()
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


@pytest.mark.parametrize(("answers", "prompts"), [(1, 1), (3, 1), (8, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("is_watched", [True, False])
@pytest.mark.parametrize("asked_tokens", [None, 40])
async def test_several_answers_fit_the_context_together(
    answers: int, prompts: int, is_watched: bool, asked_tokens: int | None
) -> None:
    """A server writes `n` answers at once: each gets its part of the window, and all are seated."""
    scene = Scene([{"role": "user", "content": prose("several", 300)}], [], settings=SHARED, window_tokens=4096)
    prepared, limit, room = await prepared_in_room(
        scene.compactor,
        scene.request,
        scene.context,
        asked_tokens,
        is_watched=is_watched,
        answers=answers,
        prompts=prompts,
    )
    written_tokens = answers * prompts * limit
    assert prompts * prepared.count.tokens + written_tokens <= 4096
    assert limit == 40 or written_tokens > 0.6 * 4096
    (pool,) = scene.compactor._admission._pools
    assert usage(scene.compactor._admission, pool).used_tokens >= prompts * prepared.count.tokens + written_tokens
    room.release()


@pytest.mark.parametrize(("answers", "prompts"), [(20, 1), (1, 20), (10**18, 1)])
async def test_more_answers_than_can_fit_are_refused(answers: int, prompts: int) -> None:
    """At once, with who needs how much, and not by an overflow for everybody."""
    scene = Scene([{"role": "user", "content": prose("several", 300)}], [], settings=SHARED, window_tokens=4096)
    with pytest.raises(DoesNotFit, match=f"you asked for {answers * prompts} answers") as raised:
        await prepared_in_room(
            scene.compactor, scene.request, scene.context, None, is_watched=False, answers=answers, prompts=prompts
        )
    assert sum(share.tokens for share in raised.value.shares) == raised.value.needed_tokens > 4096
    assert not scene.compactor._admission._pools


async def test_a_prompt_of_token_ids_takes_room_like_any_other() -> None:
    """By the hooks, too: it is bounded, seated, and refused where it cannot fit."""
    scene = Scene([{"role": "user", "content": "Hello."}], [], settings=SHARED, window_tokens=4096)
    prepared, limit, room = await prepared_in_room(scene.compactor, 1000, scene.context, None, is_watched=False)
    assert (prepared.count.tokens, prepared.messages, limit) == (1000, None, 4096 - 1000 - 64)
    room.release()
    with pytest.raises(DoesNotFit, match="4000 tokens that cannot be compacted"):
        await prepared_in_room(scene.compactor, 4000, scene.context, None, is_watched=False)


async def test_a_request_that_waited_fits_the_window_of_its_turn() -> None:
    """The model has been loaded with a smaller one meanwhile."""
    scene = _scene(admission_timeout_s=600)
    stream = await asyncio.ensure_future(_response(scene, "stream"))
    windows, loaded = scene.compactor.windows, [2048]
    resolve = windows.resolve

    async def reloaded(target: Target, *, fresh: bool = False) -> Window:
        return replace(await resolve(target, fresh=fresh), tokens=loaded[0])

    windows.resolve = reloaded  # type: ignore[method-assign]
    asking = prepared_in_room(scene.compactor, scene.request, scene.context, None, is_watched=True)
    waiting = asyncio.ensure_future(asking)
    await settled()
    loaded[0] = 1600
    del stream
    gc.collect()
    prepared, limit, _ = await asyncio.wait_for(waiting, 60)
    assert prepared.window.tokens == 1600
    assert prepared.count.tokens + limit <= 1600


@pytest.mark.parametrize("ending", ["hang", "timeout"])
async def test_a_plain_answer_that_nobody_reads_holds_its_room_until_its_server_has_ended(ending: Ending) -> None:
    """Its client has left, or would not wait: the server writes it to its bound all the same."""
    scene = _scene()
    asking = asyncio.ensure_future(_response(scene, ending, asked_tokens=4))
    if ending == "hang":
        await asyncio.wait_for(scene.server.hanging.wait(), 60)
        asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    (pool,) = scene.compactor._admission._pools
    assert usage(scene.compactor._admission, pool).used_tokens > 0
    other = Scene([{"role": "user", "content": prose("next", 1100)}], [], settings={"admission": "pool"})
    other.compactor = scene.compactor
    await asyncio.wait_for(_response(other, "whole"), 60)
    assert not scene.compactor._admission._pools
