"""What is found in five conversations, a line a question: where a change of any number of the search is felt.

`GOLDENS=write pytest tests/goldens -n 0` writes the file anew; its diff belongs into the commit that changes it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import pytest

from litellm_compaction.core.messages import chain
from litellm_compaction.recall import Beside, Found, Index, beside, search, told
from tests.builders import count, parsed
from tests.goldens.tellers import TELLS, Teller, recorded

_FILE = Path(__file__).parent / "searches.txt"


@pytest.mark.parametrize("name", sorted(TELLS))
def test_the_findings_are_as_recorded(name: str) -> None:
    """By words, by whole messages, by a part of a word, by a handle, and unasked beside a question."""
    lines = [*_lines(name)]
    assert lines == recorded(_FILE, name, lines)


def _lines(name: str) -> Iterator[str]:
    teller = Teller(name)
    messages = parsed([*itertools.islice((each for each in TELLS[name](teller) if each["role"] != "system"), 180)])
    hashes, index = chain(messages), Index()
    index.add(messages, hashes)
    places = {entry[:12]: at for at, entry in enumerate(hashes[1:])}
    handle_of = {at: handle for handle, at in places.items()}
    yield f"{len(index.originals)} originals, {len(index.passages)} passages"
    for at in range(3, 150, 7):
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
    """The excerpts beside a question, and the power of 1.05 of a turn's tokens from which on they are worth it."""

    def quoted(power: int) -> Beside:
        return beside(
            index,
            question,
            visible=hashes[80:],
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
