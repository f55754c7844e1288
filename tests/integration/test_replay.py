"""An agent's run and a person's chat through a proxy, turn by turn: nothing cut or invalid, and the facts still there.

That any foreign tokenizer keeps the promises: `test_properties.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.builders import prose, tool_round, tools
from tests.integration.bench import Bench, Group, is_summary_call, open_bench
from tests.integration.validity import searchable, text_of
from tests.lmstudio_double import ChatCall, Fault, Reply, summary_of_facts

_CLEARED = "Call the tool again if it is needed."
# LiteLLM takes 3 ms of processor time for a chunk: a summary in some chunks proves as much.
_FAST = {"chunk_tokens": 64}
# Each with the least mean share of facts that survives.
_CELLS = [
    (Group("x1.2", 8192, factor=1.2, simulator=_FAST), 0.95),
    (Group("dead", 8192, factor=0.8, simulator=_FAST), 0.50),
    (Group("foreign", 4096, factor=1.3, speaks=False, simulator=_FAST), 0.50),
]


class Transcript(NamedTuple):
    """A conversation, and the facts in it by the number of the message that tells them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    facts: dict[int, str]


def _agents_run() -> Transcript:
    """Forty tool rounds of an agent; every fifth result has something to remember."""
    system = {"role": "system", "content": "You repair a warehouse's software. Never write to /etc/warehouse."}
    messages: list[dict[str, Any]] = [system, {"role": "user", "content": "Find out why ports are skipped."}]
    facts = {}
    for number in range(40):
        fact = f"port_{number} is skipped because of ticket WH-{4000 + number * 7}"
        found = f"{prose(f'log {number}', 260)}\n{fact if number % 5 == 0 else 'nothing of note'}"
        messages += tool_round("read_log", found, f"call_{number:05}")
        if number % 5 == 0:
            facts[len(messages) - 1] = f"WH-{4000 + number * 7}"
    return Transcript(messages, tools(3), facts)


def _persons_chat() -> Transcript:
    """Sixty turns of a person who plans a journey and says now and then what must not be forgotten."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Help me to plan a journey by train."}]
    facts = {}
    for number in range(60):
        messages.append({"role": "assistant", "content": f"Day {number}: {prose(f'day {number}', 110)}."})
        wish = f"On day {number} I stay at Pension {1200 + number * 11}."
        messages.append({"role": "user", "content": wish if number % 6 == 0 else f"Go on with day {number + 1}."})
        if number % 6 == 0:
            facts[len(messages) - 1] = f"Pension {1200 + number * 11}"
    return Transcript([*messages, {"role": "assistant", "content": "All is planned."}], [], facts)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A proxy in front of a server of each kind."""
    with open_bench(
        tmp_path_factory.mktemp("replay"), [group for group, _ in _CELLS], {"ask_server_timeout_s": 30}
    ) as opened:
        yield opened


@pytest.mark.parametrize(("group", "least"), _CELLS, ids=[group.name for group, _ in _CELLS])
@pytest.mark.parametrize("made", [_agents_run, _persons_chat])
def test_replay(bench: Bench, group: Group, least: float, made: Callable[[], Transcript]) -> None:
    """Every third request of its client: a valid list that holds the facts; an ideal summariser, and one that fails."""
    transcript = made()

    def script(call: ChatCall) -> Reply:
        if not is_summary_call(call.body):
            return Reply("Understood.")
        if group.name == "dead":
            return Reply(fault=Fault("500", "before_first_delta"))
        return Reply(summary_of_facts(call.prompt_text, transcript.facts.values()))

    watch, kept = bench.watch(group.name, script), []
    asked = [at for at, message in enumerate(transcript.messages) if message["role"] == "assistant" and at > 1]
    for at in asked[::3]:
        sent = transcript.messages[:at]
        body = {"model": group.name, "messages": sent, "stream": at % 2 == 0, "tools": transcript.tools or None}
        answer = bench.proxy.post({key: value for key, value in body.items() if value is not None})
        assert answer.status_code == 200, answer.text
        if answer.headers["x-litellm-compaction"] != "none":
            assert watch.problems(sent) == []
            # A result that gave way to a line can be read again by its own call, as the line says.
            upstream = watch.sent()
            cleared = {m["tool_call_id"] for m in upstream if m["role"] == "tool" and _CLEARED in text_of(m)}
            due = [
                fact for n, fact in transcript.facts.items() if n < at and sent[n].get("tool_call_id") not in cleared
            ]
            kept += [sum(fact in searchable(upstream) for fact in due) / len(due)] if due else []
    assert sum(kept) / len(kept) >= least
    assert len(watch.questions) <= len(asked)
