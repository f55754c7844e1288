"""The budget of a thought: ended in the same stream where the server knows how, by a stop elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.proxy.answer.one_answer import Progress
from litellm_compaction.proxy.answer.protocol import SILENT, Asked
from litellm_compaction.proxy.answer.relay import LegBound, Relay
from litellm_compaction.proxy.answer.thoughts import Thoughts
from tests.lmstudio_double import Reply, numbered_words
from tests.lmstudio_double.rendering import count
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


async def test_a_first_word_that_is_held_back_is_no_thought() -> None:
    """Beside other answers no text goes out that ends inside a word; the answer has begun all the same."""
    scene = thinking(runs_away())
    asked = Asked(request=scene.request, output_tokens=None, is_json=False, notices=SILENT, wants_usage=False)
    relay = Relay(
        Progress(), await scene.prepared(), asked, LegBound(1000), streaming_ratio=0.9, most_thoughts_tokens=4
    )
    relay.has_company = True
    for delta in ({"reasoning_content": "So it is"}, {"content": "incomprehensibilities"}):
        relay.take({"choices": [{"delta": delta}]})
    assert relay.generated_tokens >= 4
    assert relay.end is None


async def test_thoughts_before_an_interruption_count() -> None:
    """An answer that was stopped for others goes on with what its budget leaves, and a closed one has no other."""
    scene = llama_cpp(runs_away())
    prepared = await scene.prepared()
    asked = Asked(request=scene.request, output_tokens=None, is_json=False, notices=SILENT, wants_usage=False)
    progress = Progress(completion_tokens=1100, lost_tokens=100)
    thoughts = Thoughts(scene.context, asked, progress, scene.server)
    assert thoughts.most_tokens(prepared) == BUDGET - 1000
    assert thoughts.can_end(prepared)
    assert not thoughts.can_end(replace(prepared, closing={}))
    progress.completion_tokens += BUDGET
    assert thoughts.most_tokens(prepared) == 1
