"""A conversation that another tool, or the library, has compacted before it came to the proxy: its record is text."""

from __future__ import annotations

import pytest

from litellm_compaction.core.ledger import WORDS_HEAD
from litellm_compaction.core.record import Record, write_record
from tests.builders import JsonDict, assistant, broken_promises, calls, chat, parsed, result, system, user
from tests.engine.bench import Bench, sent

WINDOW = 8192
FOREIGN = "## Session Summary (round 4)\nThe parser lives in src/parse.rs; the port is 9143."
OURS = write_record(Record(summary="The port is 9143.", ledger=f"{WORDS_HEAD}\n- Never touch /etc/passwd.", round=4))


@pytest.mark.parametrize("strategy", ["summary", "prune", "handoff"])
@pytest.mark.parametrize("record", [user(FOREIGN), assistant(FOREIGN), user(f"{OURS}Go on with the port.")])
async def test_a_carried_record_is_summarized_like_any_text(record: JsonDict, strategy: str) -> None:
    """The model that writes gets it; the promises hold."""
    first = [record] if record["role"] == "user" else [user("Hello."), record, user("Port it.")]
    raw = [system(), *first, assistant("Understood."), *chat(60, words=60)[1:]]
    bench = Bench()
    messages = sent(raw, await bench.guard(raw, WINDOW, strategy=strategy))
    assert broken_promises(parsed(raw), messages) == []
    assert any("## Session Summary (round 4)" in prompt for prompt in bench.ask.prompts)


async def test_a_record_is_not_the_persons_request() -> None:
    """In a run that goes on without the person's words it may be covered, and its task is another one's."""
    raw = [system(), user("Port it."), assistant("On it."), user(FOREIGN)]
    raw += [each for n in range(30) for each in (calls(f"c{n}"), result(f"c{n}", f"row {n}\n" * 200))]
    messages = sent(raw, await Bench().guard(raw, WINDOW, clear_tool_results=False))
    assert "Port it." in messages[1].text
