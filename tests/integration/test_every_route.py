"""Every route that takes a conversation, whole and streamed: compacted, reused.

What goes as it came: `tests/goldens`; what is refused: `test_refusals.py`; carried over: `test_restart_stream.py`.
"""

from __future__ import annotations

import pytest

from tests.builders import ONE_ROUND, answered, talk
from tests.integration.bench import Bench
from tests.integration.forms import END, TALKS, ask, streams
from tests.lmstudio_double import ChatCall, Reply, numbered_words

_NOTHING_TOLD = {"user-agent": "program"}


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
