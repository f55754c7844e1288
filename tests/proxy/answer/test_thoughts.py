"""The budget of a thought: ended in the same stream where the server knows how, by a stop elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.simulator import Reply, numbered_words
from litellm_compaction.simulator.rendering import count
from tests.proxy.scripted import Scene, Turn

WINDOW = 8192
SHORT = [{"role": "user", "content": "Count."}]
RUNAWAY = numbered_words(5000)  # more than the window holds
BUDGET = WINDOW // 2


def thinking(*turns: Turn, **changes: Any) -> Scene:
    return Scene(SHORT, turns, **{"window_tokens": WINDOW, **changes})


def llama_cpp(*turns: Turn, **changes: Any) -> Scene:
    """The same at a server that can be told to end a thought."""
    scene = thinking(*turns, **changes)
    target = replace(scene.context.target, context_source="llama.cpp")
    scene.context = replace(scene.context, target=target)
    return scene


def runs_away(**changes: Any) -> Turn:
    return Turn(reply=Reply("", reasoning=RUNAWAY), **changes)


@pytest.mark.parametrize("control", ["refuses", "ignores"])
async def test_a_server_that_does_not_end_it_is_stopped(control: Any) -> None:
    """It is asked once an answer; one that says yes and thinks on has a quarter more."""
    scene = llama_cpp(runs_away(), Turn(reply=Reply("Four.", reasoning="So it is four.")))
    scene.server.thought_control = control
    read = await scene.read()
    assert (read.text, read.finish_reasons) == ("Four.", ["stop"])
    assert len(scene.server.opened) == 2
    assert scene.server.ended == ["chatcmpl-1"]
    assert not scene.server.opened[1].can_end_thoughts
    assert count(read.reasoning) <= BUDGET * 5 // 4 + 32


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
