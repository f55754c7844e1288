"""Chunks of an answer, taken as they come."""

from __future__ import annotations

import pytest

from litellm_compaction.core.continuation.text import settled_length
from litellm_compaction.proxy.answer import relay
from tests.proxy.answer.wired import Body, Wire, choice_of, chunk, sse


async def test_white_space_blank_by_blank_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the window's end a word is held until the next begins; what stands behind it was read with each blank."""
    looked = [0]

    def counting(text: str) -> int:
        looked[0] += len(text)
        return settled_length(text)

    monkeypatch.setattr(relay, "settled_length", counting)
    pieces = ["word " * 1_400, *[" "] * 4_000, "last"]
    wire = Wire([lambda: sse(*map(said, pieces), chunk({}, "stop"))], window_tokens=2048)
    answer = await wire.ask()
    assert choice_of(answer)["message"]["content"] == "".join(pieces)
    assert 0 < looked[0] < 20_000


def said(text: str) -> Body:
    return chunk({"content": text})
