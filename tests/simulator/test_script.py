"""What a script is told, what it may answer, and what it holds back."""

from __future__ import annotations

from litellm_compaction.simulator import summary_of_facts
from tests.simulator.bench import Bench, user


def test_a_request_for_a_summary_gets_one_of_what_was_shown(served: Bench) -> None:
    """Behind the conversation, or with a transcript of it; a newcomer's log has no junk, and says nothing of it."""
    behind = served.chat(user("The port is 4812."), user("You write the record of a conversation."))
    assert behind.json()["choices"][0]["message"]["content"] == "### What the user said\n- The port is 4812."
    transcript = "You write the record.\n\nCONVERSATION TO CONDENSE:\nUSER:\nThe port is 4812.\n\nASSISTANT:\nFine."
    alone = served.chat(user(transcript))
    assert alone.json()["choices"][0]["message"]["content"] == "### What the user said\n- The port is 4812."


def test_parts_of_a_summary_are_merged(served: Bench) -> None:
    """Into one that has the lines of each, as a long conversation's own summaries are; none is lost for nothing."""
    heading = "### What the user said"
    parts = f"You write the record.\n\nPART 1:\n{heading}\n- First.\n\nPART 2:\n{heading}\n- Second."
    assert served.chat(user(parts)).json()["choices"][0]["message"]["content"] == f"{heading}\n- First.\n- Second."


def test_summary_keeps_the_facts_that_occur() -> None:
    """A summary holds the facts that stand in the text, or a stable share of them, within its bound."""
    facts = [f"src/module_{number}.py:{number}" for number in range(100)]
    text = " ".join(facts[:80])
    ideal = summary_of_facts(text, facts)
    assert [fact in ideal for fact in facts] == [True] * 80 + [False] * 20
    lossy = summary_of_facts(text, facts, keep_ratio=0.5)
    assert 20 < sum(f"- {fact}\n" in lossy for fact in facts) < 60
    assert lossy == summary_of_facts(text, facts, keep_ratio=0.5)
    assert len(summary_of_facts(text, facts, max_chars=600)) <= 600
