"""What the plots remember: turns of conversations, told apart without keeping a word of them."""

from __future__ import annotations

from litellm_compaction.core.messages import parse_message
from litellm_compaction.engine import Guarded
from litellm_compaction.proxy.turns import Drop, Turns
from tests.engine.bench import Bench


async def _guarded(bench: Bench, *texts: str, window: int = 8192) -> tuple[list, Guarded]:
    raw = [{"role": "user" if index % 2 == 0 else "assistant", "content": text} for index, text in enumerate(texts)]
    return [parse_message(each) for each in raw], await bench.guard(raw, window)


async def test_a_conversation_is_followed_by_how_it_begins() -> None:
    """Turns of one conversation come together, others stay apart, and no text is kept."""
    bench, turns = Bench(), Turns(lambda: 5.0)
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
    again = Guarded(
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
    bench, turns = Bench(), Turns(lambda: 9.0)
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
