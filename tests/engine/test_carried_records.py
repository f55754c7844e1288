"""A conversation that another tool, or the library, has compacted before it came to the proxy."""

from __future__ import annotations

import pytest

from litellm_compaction.core.anchors import WORDS_HEAD
from litellm_compaction.core.records import Record, write_record
from litellm_compaction.errors import SummaryFailed
from tests.core.conversations import JsonDict, assistant, calls, chat, result, system, user
from tests.engine.bench import SUMMARY, Bench, FakeAsk, sent

WINDOW = 8192
FOREIGN = "## Session Summary (round 4)\nThe parser lives in src/parse.rs; the port is 9143."
OURS = write_record(Record(summary="The port is 9143.", ledger=f"{WORDS_HEAD}\n- Never touch /etc/passwd.", round=4))


def carrying(record: JsonDict) -> list[JsonDict]:
    """A long conversation that begins with such a record."""
    return [system(), record, assistant("Understood."), *chat(60, words=60)[1:]]


@pytest.mark.parametrize("record", [user(FOREIGN), assistant(FOREIGN), user(f"{OURS}Go on with the port.")])
async def test_a_carried_record_is_merged_and_its_round_counted_up(record: JsonDict) -> None:
    """The summariser gets it as the record so far; what is sent holds one record, of the next round."""
    bench = Bench()
    raw = carrying(record) if record["role"] == "user" else [system(), user("Hello."), *carrying(record)[1:]]
    messages = sent(raw, await bench.guard(raw, WINDOW))
    assert "the port is 9143" in bench.ask.prompts[0].lower()
    assert "RECORD SO FAR" in bench.ask.prompts[0] or "goes: merge" in bench.ask.prompts[0]
    assert bench.last.round == 5
    shown = "\n".join(message.text for message in messages)
    assert shown.count("## Session Summary") == 1
    assert "## Session Summary (round 5)" in shown


async def test_its_quotations_stay_verbatim() -> None:
    """What the library's record has kept word for word is kept on."""
    raw = carrying(user(f"{OURS}Go on with the port."))
    messages = sent(raw, await Bench().guard(raw, WINDOW))
    assert "- Never touch /etc/passwd." in messages[1].text


async def test_without_a_summary_it_stays_what_it_says() -> None:
    """The model fails: what another one has written before is carried on."""
    bench = Bench(ask=FakeAsk(SummaryFailed("error")))
    raw = carrying(user(FOREIGN))
    messages = sent(raw, await bench.guard(raw, WINDOW))
    assert "The parser lives in src/parse.rs; the port is 9143." in messages[1].text
    assert SUMMARY not in messages[1].text


async def test_a_record_is_not_the_persons_request() -> None:
    """In a run that goes on without the person's words it may be covered, and its task is another one's."""
    raw = [system(), user("Port it."), assistant("On it."), user(FOREIGN)]
    raw += [each for n in range(30) for each in (calls(f"c{n}"), result(f"c{n}", f"row {n}\n" * 200))]
    messages = sent(raw, await Bench().guard(raw, WINDOW, clear_tool_results=False))
    assert "Port it." in messages[1].text
