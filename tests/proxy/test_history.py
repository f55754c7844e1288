"""What the plots remember: turns of conversations, told apart without keeping a word of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import parse_message
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.errors import StoreError
from litellm_compaction.proxy.page.history import Drop, Talk, Turn, Turns, joined, talk_from_json, talk_to_json
from litellm_compaction.stores import MemoryStore, Plot, Store
from tests.engine.bench import Bench


async def _guarded(bench: Bench, *texts: str, window: int = 8192) -> tuple[list, PreparedRequest]:
    raw = [{"role": "user" if index % 2 == 0 else "assistant", "content": text} for index, text in enumerate(texts)]
    return [parse_message(each) for each in raw], await bench.guard(raw, window)


async def test_a_conversation_is_followed_by_how_it_begins() -> None:
    """Turns of one conversation come together, others stay apart, and no text is kept."""
    bench, turns = Bench(), Turns(wall_clock=lambda: 5.0)
    secret = "my very own secret opening"
    for texts in ([secret], [secret, "a", "b"], ["other"], [secret, "a", "b", "c", "d"]):
        messages, guarded = await _guarded(bench, *texts)
        turns.sent(None, messages, bench.case(), guarded)
    latest, other = turns.talks()
    assert (latest.count, other.count) == (3, 1)
    assert latest.id != other.id
    assert [turn.when_s for turn in latest.turns] == [5.0] * 3
    assert secret not in repr(turns.talks())


async def test_the_same_opening_again_is_another_conversation() -> None:
    """When it is shorter than before; and another tenant's is never the same."""
    bench, turns = Bench(), Turns()
    for texts in (["Hi", "a", "b"], ["Hi"]):
        messages, guarded = await _guarded(bench, *texts)
        turns.sent(None, messages, bench.case(), guarded)
    assert [talk.count for talk in turns.talks()] == [1]
    assert [len(talk.turns) for talk in turns.talks()] == [1]


async def test_one_request_is_one_turn() -> None:
    """However often something goes out for it; the server's own count replaces ours, a restart leaves a mark."""
    bench, turns = Bench(), Turns()
    messages, guarded = await _guarded(bench, "Hi")
    turn = turns.sent(None, messages, bench.case(), guarded)
    assert turns.sent(turn, messages, bench.case(), guarded) is turn
    turns.answered(turn, bench.case(), guarded, 100, 7000)
    assert turn is not None
    assert (turn.prompt_tokens, turn.filled_tokens) == (100, 7100)
    ours = parse_message({"role": "user", "content": "Go on."})
    ours = type(ours)(**{name: getattr(ours, name) for name in ours.__slots__} | {"is_ours": True})
    again = PreparedRequest(
        action="compacted",
        messages=(ours,),
        tokens_before=7000,
        count=guarded.count,
        count_text=guarded.count_text,
        budget=guarded.budget,
        window=guarded.window,
    )
    assert turns.sent(turn, messages, bench.case(), again) is turn
    assert turn.restarts == [Drop(7100, guarded.count.tokens)]
    assert turn.action == "none"
    (talk,) = turns.talks()
    assert (talk.count, len(talk.turns)) == (1, 1)


async def test_the_last_count_is_compared_with_the_server_s() -> None:
    """By target; an answer without usage says nothing."""
    bench, turns = Bench(), Turns(wall_clock=lambda: 9.0)
    _, guarded = await _guarded(bench, "x " * 400)
    turns.answered(None, bench.case(), guarded, 0, 5)
    assert turns.accuracy(bench.case().target.key) is None
    turns.answered(None, bench.case(), guarded, guarded.count.tokens // 2, 5)
    found = turns.accuracy(bench.case().target.key)
    assert found is not None
    assert 99 < found.deviation_percent < 101.5


async def test_memory_is_bounded() -> None:
    """In conversations and in turns of each."""
    bench, turns = Bench(), Turns()
    for number in range(100):
        messages, guarded = await _guarded(bench, f"opening {number}")
        for _ in range(3 if number else 300):
            turns.sent(None, messages, bench.case(), guarded)
    assert len(turns.talks()) == 48
    messages, guarded = await _guarded(bench, "long")
    for _ in range(300):
        turns.sent(None, messages, bench.case(), guarded)
    assert (turns.talks()[0].count, len(turns.talks()[0].turns)) == (300, 120)


async def test_a_request_without_messages_is_no_turn() -> None:
    """A text completion shows its prompt only to the transport; system messages alone open no conversation."""
    bench, turns = Bench(), Turns()
    _, guarded = await _guarded(bench, "Hi")
    system = parse_message({"role": "system", "content": "Be kind."})
    assert turns.sent(None, [], bench.case(), guarded) is None
    assert turns.sent(None, [system], bench.case(), guarded) is None
    assert turns.talks() == []


class _Failing(MemoryStore):
    """A store that can be told to fail, and counts what it is given."""

    def __init__(self) -> None:
        super().__init__(ttl_s=100, max_bytes=1_000_000, clock=lambda: 2000.0)
        self.fails = False
        self.written = 0

    async def put_plots(self, plots: Sequence[Plot]) -> None:
        self.written += 1
        if self.fails:
            raise StoreError("disk full")
        await super().put_plots(plots)

    async def plots(self, *, containing: str = "") -> list[str]:
        if self.fails:
            raise StoreError("disk full")
        return await super().plots(containing=containing)


def _workers(store: Store, shared: str | None = "what all workers know") -> tuple[Turns, Turns]:
    """Two workers of one proxy; each request comes a second after the one before."""
    clock = itertools.count(1000.0)
    one, two = (Turns(store, secret=lambda: shared, wall_clock=lambda: next(clock)) for _ in range(2))
    return one, two


async def _ask(turns: Turns, bench: Bench, *texts: str, tenant: str = "anna", tokens: int = 0) -> None:
    messages, guarded = await _guarded(bench, *texts)
    case = replace(bench.case(), tenant=tenant)
    turn = turns.sent(None, messages, case, guarded)
    if tokens:
        turns.answered(turn, case, guarded, tokens, 1)


async def test_workers_show_each_other_s_turns() -> None:
    """A conversation whose requests went to two workers is one, in the order of its turns; no text of it is stored."""
    bench, store = Bench(), _Failing()
    one, two = _workers(store)
    secret = "my very own secret opening"
    texts = [secret]
    for number in range(6):
        await _ask(one if number % 2 else two, bench, *texts, tokens=100 + number)
        texts += ["a", "b"]
    await _ask(two, bench, "other")
    # Each has written what it has seen when it is looked at, the other no later than a second after.
    await one.everywhere()
    for turns in (two, one):
        other, talk = await turns.everywhere()
        assert (other.count, talk.count, len(talk.turns)) == (1, 6, 6)
        assert [turn.prompt_tokens for turn in talk.turns] == [100, 101, 102, 103, 104, 105]
        assert [turn.messages for turn in talk.turns] == [1, 3, 5, 7, 9, 11]
    rows = await store.plots()
    assert len(rows) == 3
    assert secret not in str(rows)
    # A restart of the proxy begins with what there is.
    again, _ = _workers(store)
    assert [talk.count for talk in await again.everywhere()] == [1, 6]
    # Without a secret that all workers have, nobody could know that it is the same conversation.
    lone, _ = _workers(store, None)
    await _ask(lone, bench, secret)
    assert sorted(talk.count for talk in await lone.everywhere()) == [1, 1, 6]


async def test_the_same_opening_in_another_worker_begins_anew() -> None:
    """Fewer messages than the turn before, wherever that was."""
    bench, store = Bench(), _Failing()
    one, two = _workers(store)
    await _ask(one, bench, "Hi")
    await _ask(one, bench, "Hi", "a", "b")
    await _ask(two, bench, "Hi")
    await one.everywhere()
    (talk,) = await two.everywhere()
    assert (talk.count, len(talk.turns)) == (1, 1)


async def test_tenants_see_their_own() -> None:
    """The identical conversation of another tenant is another one."""
    bench, store = Bench(), _Failing()
    one, two = _workers(store)
    await _ask(one, bench, "Hi", tenant="anna")
    await _ask(one, bench, "Hi", tenant="bert")
    await one.everywhere()
    assert [talk.tenant for talk in await two.everywhere("anna")] == ["anna"]
    assert [talk.tenant for talk in await two.everywhere()] == ["bert", "anna"]
    assert await two.everywhere("an") == []


async def test_what_the_store_does_not_take_is_shown_from_memory() -> None:
    """Requests notice nothing, and once the store works again the next turn is written."""
    bench, store = Bench(), _Failing()
    one, two = _workers(store)
    store.fails = True
    await _ask(one, bench, "Hi")
    assert [talk.count for talk in await one.everywhere("anna")] == [1]
    store.fails = False
    await _ask(one, bench, "Hi", "a", "b")
    await one.everywhere()
    assert [talk.count for talk in await two.everywhere()] == [2]


async def test_a_busy_conversation_is_not_written_with_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many changes within the time between two writes are one write."""
    monkeypatch.setattr("litellm_compaction.proxy.page.history._WRITE_EVERY_S", 3600.0)
    bench, store = Bench(), _Failing()
    one, _ = _workers(store)
    texts = ["Hi"]
    for _ in range(30):
        await _ask(one, bench, *texts, tokens=50)
        texts += ["a", "b"]
    await asyncio.sleep(0)
    assert store.written <= 2


@given(st.text(max_size=40) | st.just('{"name":"a","model":"b","tenant":"c","ratios":[1,2],"count":1,"turns":[[1]]}'))
def test_rows_that_this_version_cannot_read_are_passed_over(text: str) -> None:
    """Whatever an older or newer version, or somebody else, has written."""
    assert talk_from_json(text) is None


def test_a_row_is_read_as_it_was_written() -> None:
    """Every number of it."""
    talk = Talk("abcdef0123", "mødel", "tenant", 0.8, 0.9)
    talk.add(Turn(1.5, 10, 9, 12, 8192, "compacted", [Drop(7000, 2000)], messages=3))
    talk.add(Turn(2.5, 11, 10, 13, 8192, "reused", messages=5))
    assert talk_from_json(talk_to_json(talk)) == talk


async def test_a_joined_conversation_counts_what_its_rows_have_forgotten() -> None:
    """Of very long ones only the last turns are drawn."""
    rows = [Talk("a", "m", "t", 0.8, 0.9) for _ in range(2)]
    for number in range(400):
        rows[number % 2].add(Turn(float(number), 1, 1, 1, 10, messages=number))
    (talk,) = joined(rows)
    assert (talk.count, len(talk.turns), talk.turns[0].messages) == (400, 120, 280)
