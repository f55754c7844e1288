"""How the library calls the model that writes summaries, and reads what it answers."""

from __future__ import annotations

from litellm_compaction import (
    compact,
)
from tests.builders import (
    chat,
)
from tests.library.scripted import FakeCompletion, config


async def test_the_summariser_is_called_like_acompletion() -> None:
    """With model, messages, max_tokens and temperature, and nothing else; another model where one is named."""
    completions = FakeCompletion()
    await compact(chat(20), config(summary_model="small", summary_max_tokens=300, temperature=0.1), completions)
    [asked] = completions.asked
    assert sorted(asked) == ["max_tokens", "messages", "model", "temperature"]
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("small", 300, 0.1)
    assert [message["role"] for message in asked["messages"]] == ["user"]
    assert "Question 3." in completions.prompts[0]
    # The request is shown for orientation, the other recent messages are not.
    assert "Question 19." in completions.prompts[0]
    assert "Question 18." not in completions.prompts[0]
