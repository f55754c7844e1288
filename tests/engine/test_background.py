"""What is written while nobody waits, who ends it, and when it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import PreparedRequest, RequestContext
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.events import CompactionEvent
from tests.builders import JsonDict, assistant, chat, count, image, parsed, user
from tests.engine.bench import Bench, FakeAsk
from tests.virtual_time import in_virtual_time, settled

WINDOW = 8192
# Over 60 % of the window, under the trigger; LATER is over it.
FILLED = chat(30, words=72)
ANSWER = "It is done."
LATER = [*FILLED, assistant(ANSWER), user("Go on."), assistant("more " * 1200), user("And then?")]


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


class Scene:
    """A tenant's conversation with a model whose server nobody else uses."""

    def __init__(self, ask: FakeAsk | None = None, **bench: Any) -> None:
        self.bench = Bench(ask=ask or FakeAsk(), **bench)

    def context(self, **changes: Any) -> RequestContext:
        return self.bench.context(WINDOW, **{"background": "idle", "may_write_ahead": yes, **changes})

    async def turn(self, raw: Sequence[JsonDict] = FILLED, **context: Any) -> PreparedRequest:
        """A request and its answer, behind the one before it: a new conversation may be sent otherwise each time."""
        before = Request(messages=parsed(context.pop("before", raw[:-2] or raw)))
        request, surroundings = Request(messages=parsed(raw)), self.context(**context)
        await self.bench.compactor.prepare(before, surroundings)
        prepared = await self.bench.compactor.guard(request, surroundings)
        used_tokens = prepared.count.tokens + count(ANSWER)
        self.bench.compactor.background.answered(
            request, surroundings, prepared, answer=ANSWER, used_tokens=used_tokens
        )
        return prepared

    async def rested(self) -> None:
        """Returns when what was begun has come to its end; long texts are looked at in threads."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(event.outcome, event.reason) for event in self.bench.events if isinstance(event, CompactionEvent)]


@pytest.mark.parametrize(
    "context",
    [
        {"background": "off"},
        {"may_write_ahead": None},
        {"may_write_ahead": no},
        {"max_summary_calls": 0},
        {"strategy": "prune"},
    ],
)
async def test_nobody_is_asked_who_may_not_be(context: dict[str, Any]) -> None:
    """Not where it is off, where nobody knows the pool, where the key may not, and where no model writes records."""
    scene = Scene()
    await scene.turn(**context)
    await scene.rested()
    assert scene.bench.ask.prompts == []
    assert scene.told == []


async def test_what_a_client_sends_otherwise_each_time_is_not_written_about() -> None:
    """All of it, if it leaves out the first messages; else its last words of now, and what comes behind them."""
    scene = Scene()
    await scene.turn(FILLED[5:], before=FILLED[3:-2])
    await scene.rested()
    shown = user([{"type": "text", "text": FILLED[-3]["content"]}, image()])
    await scene.turn(before=[*FILLED[:-3], shown])
    await scene.rested()
    assert [each.covered_messages for _, each in scene.bench.store.kept] == [len(FILLED[1:]) - 1]


async def test_of_two_answers_that_ran_at_once_the_later_ones_conversation_is_taken() -> None:
    """It is the one that the cache holds, on its own tenant's account."""
    scene = Scene()
    other = [user("Another topic."), *FILLED[1:]]
    request, context = Request(messages=parsed(other)), scene.context(scope="two")
    prepared = await scene.turn(other, scope="two", background="off")
    await scene.turn(scope="one")
    ahead, used_tokens = scene.bench.compactor.background, prepared.count.tokens
    ahead.answered(request, context, prepared, answer=ANSWER, used_tokens=used_tokens)
    await scene.rested()
    assert [scope for scope, _ in scene.bench.store.kept] == ["two"]
    assert len(scene.bench.ask.prompts) == 1


@in_virtual_time
async def test_a_server_that_has_been_quiet_is_asked_and_left_at_once() -> None:
    """After a second; a request that comes waits until the call is closed, not for its end."""
    clock, asked_s = asyncio.get_running_loop().time, list[float]()

    class Closing(FakeAsk):
        async def __call__(self, *given: Any, **options: Any) -> SummaryAnswer:
            asked_s.append(clock())
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.4)
            return await super().__call__(*given, **options)

    scene = Scene(Closing(), quiet={})
    await scene.turn()
    await asyncio.sleep(5)
    await scene.turn(background="off")
    assert (asked_s, clock()) == ([1.0], pytest.approx(5.4))


async def test_a_request_beside_the_conversation_only_delays_it() -> None:
    """A title that is asked for meanwhile ends the wait or the call, and its own end begins the wait anew."""
    scene, title = Scene(FakeAsk(gate=asyncio.Event())), user("Title?")
    await scene.turn([*FILLED[:-2], assistant(ANSWER), title], is_client_summary=True, is_beside=True)
    await scene.turn()
    await scene.turn([title], is_client_summary=True, is_beside=True)
    await scene.bench.ask.asked.wait()
    scene.bench.ask.asked.clear()
    await scene.turn([title], is_client_summary=True, is_beside=True)
    await scene.bench.ask.asked.wait()
    assert scene.bench.ask.gate is not None
    scene.bench.ask.gate.set()
    await scene.rested()
    assert scene.told == [("given_up", "arrived"), ("prepared", "")]
    assert scene.bench.store.kept[0][1].covered_messages == len(FILLED)
    assert (await scene.turn(LATER)).action == "reused"
    await scene.turn([title], is_client_summary=True, is_beside=True)
    await scene.rested()
    assert len(scene.bench.ask.prompts) == 2


async def test_a_request_beside_the_conversation_comes_after_what_runs() -> None:
    """On a server of one slot, and before what comes later; an answer that goes on in its room waits for nothing."""
    scene = Scene()
    prepared = await scene.bench.guard([user("Hello.")], WINDOW)
    running = scene.bench.compactor.room(scene.context())
    await running.acquire(prepared, 100, is_watched=True)
    beside = scene.bench.compactor.room(scene.context(is_client_summary=True, is_beside=True))
    waiting = asyncio.ensure_future(beside.acquire(prepared, 100, is_watched=True))
    await settled()
    assert not waiting.done()
    await running.acquire(prepared, 100, is_watched=True)
    later = scene.bench.compactor.room(scene.context())
    await later.acquire(prepared, 100, is_watched=True)
    running.release()
    assert await waiting == await beside.acquire(prepared, 100, is_watched=True) == 100
    for room in (beside, later):
        room.release()
