"""The budget of a thought, which a stop ends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from litellm_compaction.proxy.answer.client import SILENT, Asked, OneAnswer
from litellm_compaction.proxy.answer.legs import Leg
from litellm_compaction.proxy.answer.relay import Relay
from tests.lmstudio_double import Reply, numbered_words
from tests.lmstudio_double.rendering import count
from tests.proxy.scripted import Scene, Turn

WINDOW = 8192
SHORT = [{"role": "user", "content": "Count."}]
RUNAWAY = numbered_words(5000)  # more than the window holds


def thinking(*turns: Turn, **changes: Any) -> Scene:
    return Scene(SHORT, turns, **{"window_tokens": WINDOW, **changes})


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"thoughts_tokens": 500}, 532),
        ({"thoughts_tokens": 6000}, 6032),
        ({"thoughts_tokens": math.inf}, WINDOW),
        ({"settings": {"reasoning_budget_ratio": 0}}, WINDOW),
        ({"settings": {"reasoning_budget_ratio": 0}, "thoughts_tokens": 500}, WINDOW),
        ({"settings": {"reasoning_budget_ratio": 0.1}}, WINDOW // 10 + 32),
    ],
    ids=["less", "more", "high effort", "off", "off for all", "operator's"],
)
async def test_the_clients_word_goes_before_the_setting(changes: dict[str, Any], most: int) -> None:
    """Its own number of tokens, less or more, or none for high effort; 0 switches all of it off."""
    scene = thinking(Turn(reply=Reply("Four.", reasoning=RUNAWAY)), Turn(reply=Reply("Four.")), **changes)
    read = await scene.read()
    assert most - 64 <= count(read.reasoning) <= most or most == WINDOW
    if most == WINDOW:
        assert count(read.reasoning) >= 0.85 * WINDOW


async def test_a_first_word_that_is_held_back_is_no_thought() -> None:
    """Beside other answers no text goes out that ends inside a word; the answer has begun all the same."""
    scene = thinking(Turn(reply=Reply("", reasoning=RUNAWAY)))
    asked = Asked(request=scene.request, output_tokens=None, is_json=False, notices=SILENT, wants_usage=False)
    leg = Leg(prepared=await scene.prepared(), max_tokens=1000, thoughts_tokens=4)
    relay = Relay(leg, OneAnswer(asked))
    relay.has_company = True
    for delta in ({"reasoning_content": "So it is"}, {"content": "incomprehensibilities"}):
        relay.take({"choices": [{"delta": delta}]})
    assert relay.generated.tokens >= 4
    assert relay.end is None
