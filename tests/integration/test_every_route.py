"""Every route that takes a conversation, whole and streamed: untouched, compacted, reused.

What is refused on each: `test_refusals.py`; what is carried over: `test_restart_stream.py`.
"""

from __future__ import annotations

import pytest

from tests.builders import ONE_ROUND, answered, talk
from tests.integration.bench import Bench
from tests.integration.forms import END, ROUTES, TALKS, ask, streams
from tests.integration.validity import text_of
from tests.lmstudio_double import ChatCall, Reply, numbered_words

_NOTHING_TOLD = {"user-agent": "program"}


@streams
@pytest.mark.parametrize("route", ROUTES)
def test_a_short_conversation_goes_as_it_came(guarded: Bench, route: str, stream: bool) -> None:
    """Only a bound is added: the client's own where it fits, and what the window leaves where it has none."""
    watch = guarded.watch("local")
    messages = talk(f"short {route} {stream}", 500)
    said = ask(guarded, route, "local", messages, stream=stream, headers=_NOTHING_TOLD)
    assert (said.status, said.text, said.thoughts, said.ends) == (200, "Understood.", "", [END[route]])
    assert said.headers["x-litellm-compaction"] == "none"
    sent = [text_of(each) for each in watch.sent()]
    assert "\n\n".join(sent) == "\n\n".join(each["content"] for each in messages)
    assert watch.bodies[0]["max_tokens"] == (400 if route == "messages" else pytest.approx(7500, abs=400))
    assert ask(guarded, route, "local", messages, stream=stream, limit=77).status == 200
    assert watch.bodies[1]["max_tokens"] == 77
    assert watch.summaries == []


@streams
@pytest.mark.parametrize("route", TALKS)
def test_a_long_conversation_is_compacted_once(guarded: Bench, route: str, stream: bool) -> None:
    """Inside the window, with all that is protected; the next turn begins with the same bytes, without a summary."""
    watch = guarded.watch("local")
    messages = talk(f"long {route} {stream}", ONE_ROUND)
    said = ask(guarded, route, "local", messages, stream=stream, limit=300, headers=_NOTHING_TOLD)
    assert (said.status, said.text, said.ends) == (200, "Understood.", [END[route]])
    assert said.headers["x-litellm-compaction"] == "compacted"
    assert watch.problems(messages) == []
    assert len(watch.sent()) < len(messages)
    assert watch.bodies[0]["max_tokens"] == 300
    first, summaries = watch.sent(), len(watch.summaries)
    later = ask(guarded, route, "local", answered(messages, "Understood.", "Go on."), stream=stream)
    assert (later.text, later.headers["x-litellm-compaction"]) == ("Understood.", "reused")
    assert watch.sent()[: len(first)] == first
    assert len(watch.summaries) == summaries > 0


def test_thinking_budget_of_gemini_is_read(guarded: Bench) -> None:
    """`thinkingBudget` ends a thought in the place of the setting."""

    def thinks(call: ChatCall) -> Reply:
        return Reply("Four.", reasoning="" if "answer now" in call.prompt_text else numbered_words(700))

    watch = guarded.watch("local", thinks)
    question = [{"role": "user", "content": "Two and two?"}]
    budget = {"generationConfig": {"thinkingConfig": {"thinkingBudget": 700}}}
    assert ask(guarded, "generateContent", "local", question, stream=True, **budget).text.endswith("Four.")
    assert len(watch.chats) == 2
    assert ask(guarded, "generateContent", "local", question, stream=True).text.endswith("Four.")
    assert len(watch.chats) == 3
