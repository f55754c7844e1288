"""What is found in five conversations, a line a question, and at each bound: a change of any number is felt.

`GOLDENS=write pytest tests/goldens -n 0` writes the file anew; its diff belongs into the commit that changes it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from litellm_compaction.core.messages import chain
from litellm_compaction.recall import Beside, Found, Index, beside, search, told
from tests.builders import count, parsed
from tests.goldens.tellers import TELLS, Teller, recorded
from tests.recall.test_index import made, talk

_FILE = Path(__file__).parent / "searches.txt"
_NUMBERS = [str(number) for number in range(10, 99)]
# A bound, and with it conversations and a query that are just inside it.
_BOUNDS: Mapping[str, tuple[int, Callable[[int], tuple[Sequence[Sequence[str]], str]]]] = {
    "words of an empty answer": (20, lambda n: ([], " ".join(_NUMBERS[:n]))),
    "characters of its words": (60, lambda n: ([], "x" * n)),
    "characters of a query": (4_000, lambda n: ([["ord77x"]], "ord77x".rjust(n, "-"))),
    "terms of a query": (24, lambda n: ([[word] for word in _NUMBERS[:n]], " ".join(_NUMBERS[:n]))),
    "passages with an id": (12, lambda n: ([[f"ord77x is {word}"] for word in _NUMBERS[:n]], "ord77x")),
    "digits of an id": (4, lambda n: ([["7" * n]], "7" * n)),
    "letters of an id": (4, lambda n: ([["7".rjust(n, "x")]], "7".rjust(n, "x"))),
    "parts of an id": (12, lambda n: ([["_".join(_NUMBERS[:n])]], _NUMBERS[n - 1])),
    "characters of a run": (202, lambda n: ([["7".rjust(n, "x")]], "7")),
    "words that nobody said": (1, lambda n: ([["zebra"], ["oboe"]], " ".join(["zebra", *_NUMBERS[:n]]))),
    "times that a text is said": (1, lambda n: ([[word, "A zebra sleeps."] for word in _NUMBERS[:n]], "zebra")),
    "times that a word is said": (12, lambda n: ([["zebra " * n]], "zebra")),
    "characters of a passage": (600, lambda n: ([["zebra".rjust(n, "-")]], "zebra")),
    "characters of a message": (400_000, lambda n: ([["ord77x".rjust(n, "-")]], "ord77x")),
    "passages beside each other": (6, lambda n: ([["zebra", *"a" * (n - 1), "a zebra"]], "zebra")),
    "messages in an excerpt": (16, lambda n: ([["ok"] * n], "ok")),
    "room for another message": (560, lambda n: ([["zebra".ljust(n, "-"), "b" * 99]], "zebra")),
    "values of a sentence": (3, lambda n: ([[f"Rome: {' '.join(_NUMBERS[1:n])}, {end}."] for end in (7, 8)], "Rome")),
    "sentences of a passage": (12, lambda n: ([["So. " * (n - 1) + f"Rome has {end}."] for end in (7, 8)], "Rome")),
    "passages of an index": (39, lambda n: ([["b"], *([f"a {word}"] for word in _NUMBERS[: n - 1])], "a b")),
    "passages with a word": (20, lambda n: ([["b"], *([f"{'ac'[at >= n]} {at}"] for at in range(39))], "a b")),
    "places that are looked at": (5_999, lambda n: ([["b"], ["a " * n]], "b a")),
}


@pytest.mark.parametrize("name", sorted(TELLS))
def test_the_findings_are_as_recorded(name: str) -> None:
    """By words, by whole messages, by a part of a word, by a handle, and unasked beside a question."""
    lines = [*_lines(name)]
    assert lines == recorded(_FILE, name, lines)


def test_each_bound_is_as_recorded() -> None:
    """Just inside and just outside: how many, the best one's share and messages, the superseded, an answer's least."""
    lines = [f"{name}: {_seen(*row(bound))}; {_seen(*row(bound + 1))}" for name, (bound, row) in _BOUNDS.items()]
    assert lines == recorded(_FILE, "bounds", lines)


def _seen(conversations: Sequence[Sequence[str]], query: str) -> str:
    index = Index()
    for said in conversations:
        index.add(*made(*talk(said)))
    found = search(index, query, limit=99)
    least = bisect_left(range(2_000), 1, key=lambda limit: min(len(told(found, limit_tokens=limit)), 1))
    if not (hits := found.hits):
        return f"nothing from {least}"
    later = sum(bool(hit.later) for hit in hits)
    return f"{len(hits)} of {hits[0].share:.6f} {len(hits[0].pieces)} {later} from {least}"


def _lines(name: str) -> Iterator[str]:
    teller = Teller(name)
    messages = parsed([*itertools.islice((each for each in TELLS[name](teller) if each["role"] != "system"), 180)])
    hashes, index = chain(messages), Index()
    index.add(messages, hashes)
    places = {entry[:12]: at for at, entry in enumerate(hashes[1:])}
    handle_of = {at: handle for handle, at in places.items()}
    yield f"{len(index.originals)} originals, {len(index.passages)} passages"
    for at in range(3, 150, 9):
        words = messages[at].text.split() or ["nothing"]
        unsaid = ["x" * teller.luck.randint(50, 70) for _ in range(24)]
        asked = teller.luck.choice(
            [words[:6], words, words[2:40], [words[-1][1:4]], words[-12:], [handle_of[at]], unsaid]
        )
        question = " ".join(asked) + teller.luck.choice(["", "?"])
        found = search(index, question, visible=hashes[150:], least_share=teller.luck.choice([0.0, 0.1]))
        limit_tokens = teller.luck.randint(60, 900)
        quoted = told(found, limit_tokens=limit_tokens, count=count)
        excerpts, least_turn = _beside(index, hashes, question, limit_tokens)
        yield f"{at}: {_hits(found, places)}; told {len(quoted)}; beside {excerpts} from {least_turn}"


def _beside(index: Index, hashes: tuple[str, ...], question: str, limit_tokens: int) -> tuple[str, int]:
    """The excerpts beside a question, with or without shown ones, and from which power of 1.05 a turn is worth them."""

    def quoted(power: int) -> Beside:
        return beside(
            index,
            question,
            visible=hashes[80 : 80 + 60 * (limit_tokens % 2)],
            within=hashes[1:80],
            limit_tokens=limit_tokens,
            count=count,
            turn_tokens=1.05**power,
            again_tokens=10,
        )

    least_turn = bisect_left(range(256), 1, key=lambda power: min(quoted(power).excerpts, 1))
    most = quoted(256)
    return f"{most.excerpts} in {len(most.text)}", least_turn


def _hits(found: Found, places: dict[str, int]) -> str:
    """Where each stands, its share, the characters around it, and the place of what supersedes it."""
    shown = (
        f"{places[hit.original.handle]} {hit.share:.4f} {sum(len(piece.text) for piece in hit.pieces)}"
        + (f" > {places[hit.later]}" if hit.later else "")
        for hit in found.hits
    )
    return ", ".join(shown) or "nothing"
