"""Single flight: one run for everybody, which ends with its last waiter; memory with a bound, and with a life."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.concurrency import Bounded, Flights, Kept, Rests, Tasks, ended, is_long, off_loop
from tests.builders import parsed, user
from tests.virtual_time import Clock, Complaints, settled


class Work:
    """A run that starts when it is told and ends when its gate opens."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.running = asyncio.Event()
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def run(self) -> int:
        self.started += 1
        self.running.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.started


async def _waiting(flights: Flights[int], work: Work, count: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(flights.join("key", work.run)) for _ in range(count)]
    await work.running.wait()
    await settled()
    return tasks


@pytest.mark.parametrize(("leaving", "ends"), [([0], False), ([1, 2], False), ([0, 1, 2], True)])
async def test_a_run_ends_with_its_last_waiter(leaving: list[int], ends: bool) -> None:
    """One run serves all; the first caller too may leave: the run is not its own."""
    flights, work = Flights[int](), Work()
    tasks = await _waiting(flights, work, 3)
    for at in leaving:
        tasks[at].cancel()
    await asyncio.sleep(0)
    assert flights.is_under_way("key") is not ends, "nobody joins one that is being ended"
    await settled()
    assert work.cancelled == ends
    work.gate.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert ["left" if isinstance(each, asyncio.CancelledError) else each for each in found] == [
        "left" if at in leaving else 1 for at in range(3)
    ]
    assert work.started == 1


async def test_an_error_reaches_every_waiter() -> None:
    """And the next caller may try again; one that nobody waits for any more leaves the loop nothing to complain of."""
    flights, work, complaints = Flights[int](), Work(), Complaints()
    work.error = RuntimeError("down")
    tasks = await _waiting(flights, work, 2)
    work.gate.set()
    assert [str(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == ["down", "down"]

    async def fails_at_its_end() -> int:
        try:
            return await asyncio.Event().wait()
        finally:
            raise RuntimeError("while cleaning up")

    left = asyncio.create_task(flights.join("key", fails_at_its_end))
    await settled()
    left.cancel()
    await settled()
    del left
    assert complaints.heard() == []
    work.error = None
    assert await flights.join("key", work.run) == 2


@given(
    st.integers(1, 5), st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(["set", "default", "update"])))
)
def test_a_bounded_dict_forgets_what_was_written_longest_ago(most: int, writes: list[tuple[str, str]]) -> None:
    """Whatever way an entry is written; reading changes nothing, and an entry that is there is no news to a default."""
    bounded: Bounded[str, int] = Bounded(most)
    expected: list[str] = []
    for number, (key, way) in enumerate(writes):
        is_news = way != "default" or key not in bounded
        if way == "set":
            bounded[key] = number
        elif way == "default":
            bounded.setdefault(key, number)
        else:
            bounded.update({key: number})
        if is_news:
            expected = [*(each for each in expected if each != key), key][-most:]
            assert bounded[key] == number
        assert list(bounded) == expected
        assert bounded.get("missing") is None


async def test_tasks_end_that_miss_being_cancelled() -> None:
    """As `asyncio.wait_for` does before Python 3.12 where a result comes in the same moment; their errors are seen."""
    missed = asyncio.Event()

    async def misses_one() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            missed.set()
        await asyncio.Event().wait()

    async def fails() -> None:
        raise ValueError("seen")

    tasks = Tasks()
    for work in (misses_one(), fails()):
        tasks.begin(work)
    await asyncio.sleep(0)
    await asyncio.wait_for(ended(tasks), 30)
    assert missed.is_set()
    assert not tasks


def test_a_rest_doubles_with_each_failure_in_a_row() -> None:
    """Up to a bound; several failures together are one, a success ends it, and the first ever is worth a warning."""
    clock = Clock()
    rests = Rests[str](1.0, 5.0, clock)
    assert rests.is_over("key")
    for number, rest_s in enumerate((1.0, 2.0, 4.0, 5.0, 5.0)):
        assert [rests.begin("key"), rests.begin("key")] == [number == 0, False]
        clock.now_s += rest_s - 0.5
        assert not rests.is_over("key")
        clock.now_s += 0.5
        assert rests.is_over("key")
    rests.end("key")
    assert not rests.begin("key")
    clock.now_s += 1.0
    assert rests.is_over("key")


class Source:
    """Numbers its answers; each is given once its gate opens."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.kept: Kept[str, int] = Kept(self.answer, lambda _: 10.0, most=2, clock=lambda: self.now_s)

    async def answer(self, _: str) -> int:
        self.asked += 1
        number = self.asked
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return number


async def test_a_value_is_obtained_once_for_all_and_again_at_the_end_of_its_life() -> None:
    """Ten at a time share one; for ten seconds nothing is asked; a key more than there is room for is forgotten."""
    source = Source()
    assert await asyncio.gather(*(source.kept.get("a") for _ in range(10))) == [1] * 10
    for source.now_s, number in ((9.9, 1), (10.0, 2)):
        assert await source.kept.get("a") == number
    await source.kept.get("b")
    await source.kept.get("c")
    assert (source.kept.last("a"), source.kept.has("a"), source.kept.last("c")) == (None, False, 4)


async def test_a_fresh_value_is_one_whose_obtaining_begins_later() -> None:
    """All who want one at the same time share it; one that was under way is older, and not kept, however late it is."""
    source = Source()
    held = source.gate
    held.clear()
    early = asyncio.create_task(source.kept.get("a"))
    await settled()
    source.gate = asyncio.Event()
    late = [asyncio.create_task(source.kept.get("a", fresh=True)) for _ in range(5)]
    await settled()
    source.gate.set()
    assert [await task for task in late] == [2] * 5
    held.set()
    assert await early == 1
    assert (source.asked, source.kept.last("a"), await source.kept.get("a")) == (2, 2, 2)
    source.kept.invalidate("a")
    assert (source.kept.last("a"), await source.kept.get("a")) == (2, 3)


async def test_the_value_before_serves_while_a_new_one_takes_long() -> None:
    """Nothing where there is none; each run is waited for from its beginning, by all together."""
    source = Source()
    source.gate.clear()
    assert await source.kept.soon("a", wait_s=0.0) is None
    source.gate.set()
    assert await source.kept.soon("a", wait_s=60.0) == 1
    source.now_s = 20.0
    source.gate.clear()
    assert await source.kept.soon("a", wait_s=0.0) == 1
    source.now_s = 25.0
    assert await source.kept.soon("a", wait_s=5.0) == 1, "5 s from its beginning are over"
    source.gate.set()
    assert await source.kept.soon("a", wait_s=6.0) == 2
    assert source.asked == 2


async def test_an_error_reaches_those_who_wait_and_is_not_kept() -> None:
    """Nobody is left without a value for ever; where all have left it, nothing complains."""
    source, complaints = Source(), Complaints()
    source.error = RuntimeError("of a client that was closed")
    for ask in (source.kept.get("a"), source.kept.soon("a", wait_s=60.0)):
        with pytest.raises(RuntimeError, match="was closed"):
            await ask
    source.gate.clear()
    assert await source.kept.soon("a", wait_s=0.0) is None
    source.gate.set()
    await settled()
    source.error = None
    assert await source.kept.soon("a", wait_s=60.0) == 4
    assert complaints.heard() == []


async def test_one_cancelled_waiter_takes_nothing_away_and_closing_takes_all() -> None:
    """The others get the value; whoever waits for one that is ended is cancelled."""
    source = Source()
    source.gate.clear()
    first, second = (asyncio.create_task(source.kept.get("a")) for _ in range(2))
    third = asyncio.create_task(source.kept.soon("a", wait_s=60.0))
    await settled()
    first.cancel()
    await settled()
    source.gate.set()
    assert (await second, await third) == (1, 1)
    source.gate.clear()
    waiting = asyncio.create_task(source.kept.get("b"))
    await settled()
    await source.kept.aclose()
    with pytest.raises(asyncio.CancelledError):
        await waiting


_CALLS = [{"role": "assistant", "content": None, "tool_calls": [{"id": f"{at}"} for at in range(500)]}]


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (([{**user("a"), "name": None}] * 400,), False),
        (([user("a")] * 401,), True),
        (([user("a")] * 200, [{"type": "function"}] * 201), True),
        (([user("a" * 100_000)],), True),
        (([user([{"type": "text", "text": "a" * 100_000}])],), True),
        (([user([{"type": "image_url", "image_url": {"url": "a" * 100_000}}])],), True),
        (([user([{"x": [""] * 400}] * 300)],), True),
        ((_CALLS,), True),
        ((None, "text " * 1_000_000, 3), False),
    ],
)
def test_a_list_is_long_by_all_that_is_in_it(lists: tuple[object, ...], expected: bool) -> None:
    """Messages, tools, parts, calls and texts; what is no list takes no walk."""
    assert is_long(*lists) is expected


@pytest.mark.parametrize(("chars", "stays"), [(19_999, True), (20_000, False)])
async def test_a_long_walk_runs_in_a_thread(chars: int, stays: bool) -> None:
    """A short one at once, where it costs no switch."""
    ran_in = await off_loop(parsed([user("a" * chars)]), threading.current_thread)
    assert (ran_in is threading.current_thread()) is stays
