"""Notes on a board; that two connections change a row one after the other stands in `test_store.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.engine.bench import Clock
from tests.stores.made import MemoryBoard

LEASE_S = 10.0


def says(body: bytes | None) -> Callable[[Sequence[bytes]], tuple[bytes | None, list[bytes]]]:
    """Leaves a note, and tells what the others' notes are."""
    return lambda others: (body, sorted(others))


async def test_each_sees_the_notes_of_the_others() -> None:
    """Under the same topic, and never its own; a note is taken back by its writer alone."""
    board = MemoryBoard(clock=Clock())
    for topic, name, note, others in (
        ("pool", "a", b"1", []),
        ("pool", "b", b"2", [b"1"]),
        ("pool", "a", b"3", [b"2"]),
        ("pool", "c", None, [b"2", b"3"]),
        ("other", "b", b"4", []),
        ("pool", "b", None, [b"3"]),
        ("pool", "b", None, [b"3"]),
        ("pool", "a", None, []),
    ):
        assert await board.update(topic, name, says(note), lease_s=LEASE_S) == others
    assert board.topics == ["other"]


async def test_a_note_lives_for_its_lease() -> None:
    """From when it was last renewed, whether or not it said anything new."""
    clock = Clock()
    board = MemoryBoard(clock=clock)
    await board.update("pool", "a", says(b"1"), lease_s=LEASE_S)
    clock.now_s += 8
    await board.update("pool", "a", says(b"1"), lease_s=LEASE_S)
    clock.now_s += 9
    assert await board.update("pool", "b", says(None), lease_s=LEASE_S) == [b"1"]
    await board.update("pool", "a", says(b"1"), lease_s=1)
    clock.now_s += 1.1
    assert await board.update("pool", "b", says(None), lease_s=LEASE_S) == []
