"""Room in a shared context for requests that LiteLLM's hooks carry: taken before they go out, given back in any case.

The transport knows when its answer ends. The hooks are told of most ends, but not of all: LiteLLM calls none where a
client leaves before its stream is read, or while a whole answer is being written. So the task that asks the
deployment is watched too, and the stream that it gives.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import Any

from litellm.exceptions import Timeout

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import Case, Compactor, Guarded, Pending, Room


async def compacted(compactor: Compactor, prepared: Guarded | Pending, room: Room) -> Guarded:
    """What to send; a summary that it takes is made in room of its own.

    Raises:
        DoesNotFit: as the engine.
        Overloaded: there was no room in time.
    """
    if isinstance(prepared, Guarded):
        return prepared
    return await compactor.finish(prepared, room)


async def guarded_in_room(
    compactor: Compactor,
    request: Request | int,
    case: Case,
    asked_tokens: int | None,
    *,
    is_watched: bool,
    is_stream: bool = True,
    answers: int = 1,
    prompts: int = 1,
) -> tuple[Guarded, int, Room]:
    """What to send, the bound on its answer, and the room that it holds until its task or stream ends.

    Args:
        compactor: decides.
        request: the conversation, or the number of token ids in a prompt that consists of them.
        case: of the request.
        asked_tokens: the client's bound on the answer.
        is_watched: whether the answer comes in pieces, and can go on where it was stopped.
        is_stream: whether its server hears when nobody reads it any more; a plain answer is written to its end.
        answers: how many the client wants to each prompt.
        prompts: how many of those the server answers.

    Raises:
        DoesNotFit, WindowUnknown, ModelNotLoaded: as the engine.
        Overloaded: there was no room in time.
    """
    room = compactor.room(case)
    try:
        while True:
            if isinstance(request, int):
                guarded = await compactor.bound(request, case)
            else:
                guarded = await compacted(compactor, await compactor.prepare(request, case), room)
            limit = guarded.max_output_tokens(asked_tokens)
            limit = await room.take(guarded, limit, is_watched=is_watched, answers=answers, prompts=prompts)
            if not await compactor.has_shrunk(case, guarded):
                # Else the model has been loaded with a smaller window while it waited for its turn.
                break
    except BaseException:
        # A client that leaves during the summary, too: nothing else would end what it holds.
        room.leave()
        raise
    task = asyncio.current_task()
    if task is not None:
        task.add_done_callback(partial(_asked, room, is_stream))
    return guarded, limit, room


def _asked(room: Room, is_stream: bool, task: asyncio.Task[Any]) -> None:
    """The task that asked the deployment has ended: with a stream, which is still open, or for good."""
    if not is_stream and (task.cancelled() or isinstance(task.exception(), Timeout)):
        room.abandon()
        return
    stream = None if task.cancelled() or task.exception() is not None else task.result()
    if not hasattr(stream, "__aiter__"):
        room.leave()
        return
    try:
        # Whoever reads it gives the room back at its end; a stream that nobody reads is just dropped.
        weakref.finalize(stream, room.leave).atexit = False
    except TypeError:
        room.leave()
