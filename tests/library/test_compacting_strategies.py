"""The library's strategies: what each of them leaves of a conversation, and what becomes of answers that do not do."""

from __future__ import annotations

from litellm_compaction import compact, select_messages
from litellm_compaction.core.prompts import FRAME_END
from tests.builders import chat
from tests.integration.bench import edit_plan
from tests.library.scripted import SUMMARY, FakeCompletion, config

LAST_REQUEST = "Last request from user was: "
SAID = "The first steps are done; src/parser.py:42 was fixed."
REFUSAL = "I'm sorry, but I can't help with that."


def plan(prompt: str) -> str:
    """An edit plan where one is asked for, else a summary."""
    return edit_plan(prompt, SAID) or SUMMARY


async def test_a_hand_off_leaves_the_last_request_alone_behind_it() -> None:
    """System and one user message: the hand-over, then the request, word for word."""
    raw = chat(20)
    completions = FakeCompletion(["### 7. Immediate next step\nRun the tests. Then answer the last question."])
    done = await compact(raw, config(strategy="handoff"), completions)
    assert (done.strategy, done.round, done.summarized_messages) == ("handoff", 1, len(raw) - 2)
    assert [message["role"] for message in done.messages] == ["system", "user"]
    text = done.messages[1]["content"]
    assert text.startswith("## Session Summary (round 1)\n")
    assert "Run the tests." in text
    assert text.endswith(f"{FRAME_END}\n\n{LAST_REQUEST}{raw[-1]['content']}")
    assert "### 7. Immediate next step" in completions.prompts[0]
    assert select_messages(raw, config(strategy="handoff")).to_keep == raw[-1:]
