"""A conversation that another tool, or the library, has compacted before it came to the proxy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from litellm_compaction.core.ledger import WORDS_HEAD
from litellm_compaction.core.messages import Message
from litellm_compaction.core.record import Record, write_record
from litellm_compaction.errors import SummaryFailed
from tests.builders import (
    JsonDict,
    agent_run,
    assistant,
    broken_promises,
    calls,
    chat,
    parsed,
    result,
    system,
    user,
)
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


def in_a_run(record: JsonDict) -> list[JsonDict]:
    """An agent's run with such a record, whose old results alone are worth a compaction."""
    first = [record] if record["role"] == "user" else [user("Hello."), record, user("Port it.")]
    return [system(), *first, assistant("Understood."), *agent_run(30, words=600)[1:]]


@pytest.mark.parametrize("strategy", ["summary", "prune", "handoff"])
@pytest.mark.parametrize("record", [user(FOREIGN), assistant(FOREIGN)])
async def test_where_stubs_alone_do_it_is_merged_too(record: JsonDict, strategy: str) -> None:
    """No model is asked: what it says stands in the one record that is sent, of the next round."""
    bench = Bench()
    raw = in_a_run(record)
    guarded = await bench.guard(raw, 16_384, strategy=strategy)
    messages = sent(raw, guarded)
    assert bench.ask.prompts == []
    assert broken_promises(parsed(raw), messages) == []
    assert bench.last.round == 5
    assert one_record(messages, "round 5")
    assert [at for at, message in enumerate(messages) if "the port is 9143" in message.text] == [1]
    # Nobody said it: it is no one's own words.
    assert "- ## Session" not in messages[1].text
    later = [*raw, assistant("Done."), user("Thanks. Go on.")]
    again = await bench.guard(later, 16_384, strategy=strategy)
    assert again.action == "reused"
    assert sent(later, again)[: len(messages)] == messages


def one_record(messages: Sequence[Message], number: str) -> bool:
    """Whether there is one record, of that round."""
    shown = "\n".join(message.text for message in messages)
    return shown.count("## Session Summary") == 1 and f"## Session Summary ({number})" in shown


@pytest.mark.parametrize("record", [user(FOREIGN), assistant(FOREIGN)])
async def test_a_pruning_merges_it_and_a_later_summary_reads_it(record: JsonDict) -> None:
    """Beside what the model says of the messages that go; never offered, so that nobody can throw it away."""
    bench = Bench(ask=FakeAsk('{"drop": ["1-110"], "summary": "Settled: the parser."}'))
    raw = carrying(record) if record["role"] == "user" else [system(), user("Hello."), *carrying(record)[1:]]
    messages = sent(raw, await bench.guard(raw, WINDOW, strategy="prune"))
    assert broken_promises(parsed(raw), messages) == []
    assert len(bench.ask.prompts) == 1
    assert one_record(messages, "round 5")
    assert "the port is 9143" in messages[1].text
    assert "Settled: the parser." in messages[1].text
    assert '"content": "## Session' not in bench.ask.prompts[0]
    bench.ask.answer = SUMMARY
    later = [*raw, *chat(60, words=60)[1:]]
    again = sent(later, await bench.guard(later, WINDOW))
    assert one_record(again, "round 6")
    assert any("The parser lives in src/parse.rs" in prompt for prompt in bench.ask.prompts[1:])


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
