"""The benchmark runs on a conversation of its own, and its yardsticks say what they should."""

from __future__ import annotations

from benchmarks import methods
from benchmarks.constraints import EXPLICIT, planted
from benchmarks.measuring import Slot, Transcript, replay, row
from benchmarks.superseded import CHANGES, changing, is_clear
from tests.builders import assistant, calls, result, system, user


def transcript() -> Transcript:
    messages = [system(), user("Port src/parser.py, and keep the port at 8080.")]
    for number in range(30):
        text = f"looked at src/file_{number}.py\n" + "some output of the tool\n" * 60
        messages += [calls(f"c{number}", content="", arguments=f'{{"n": {number}}}'), result(f"c{number}", text)]
    return Transcript("made", [*messages, assistant("Done.")], [], [{"text": "8080", "msg": 1}])


async def test_our_row_cuts_nothing_and_keeps_the_fact() -> None:
    """No truncation, all valid, less work than the server's own cut."""
    made = transcript()
    ours = row([await replay(made, 4096, methods.ours("dead", made, 4096))])
    assert (ours.truncated, ours.valid_ratio, ours.facts) == (0, 1.0, 1.0)
    stock = row([await replay(made, 4096, methods.stock(made, 4096))])
    assert stock.truncated > 0
    assert ours.stability > stock.stability


def test_a_slot_reads_only_what_it_does_not_hold() -> None:
    """A prompt that goes on where the last one ended costs its new part."""
    slot = Slot()
    slot.run((), [user("word " * 100)], "")
    first = slot.work
    slot.run((), [user("word " * 100)], "")
    assert slot.work - first < 5


def test_a_constraint_is_planted_once_and_nothing_else_changes() -> None:
    """In every place the sentence stands in one message of the user."""
    made = transcript()
    for place in ("top", "middle", "late"):
        changed = planted(made, place, EXPLICIT[0])
        assert changed is not None
        holders = [message for message in changed.messages if EXPLICIT[0] in str(message["content"])]
        assert [message["role"] for message in holders] == ["user"]


def test_a_superseded_value_is_clear_where_the_newest_comes_last() -> None:
    """Or where the older line says itself what came later; an older value alone, or behind the newest, is not."""
    change = CHANGES[0]
    older, newer = user(change.older), user(change.newer)
    assert is_clear(change, [older, newer])
    assert is_clear(change, [newer])
    assert is_clear(change, [newer, user(f"{change.older} (later: port {change.new_value})")])
    assert not is_clear(change, [newer, older])
    assert not is_clear(change, [older])


def test_a_change_is_said_twice_in_its_order() -> None:
    """Both sentences are the user's, the newer one later."""
    changed = changing(transcript(), CHANGES[1])
    assert changed is not None
    texts = [str(message["content"]) for message in changed.messages if message["role"] == "user"]
    said = [at for at, text in enumerate(texts) for each in CHANGES[1][:2] if each in text]
    assert said == [1, 2]
