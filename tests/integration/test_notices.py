"""What programs read of a compaction on every route, and that a stream which waits is never silent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from litellm_compaction.core.messages import DONE_NOTICE, START_NOTICE
from tests.builders import talk
from tests.integration.bench import SUMMARY, is_summary_call
from tests.integration.forms import form, read
from tests.integration.restart_bench import Restarting, Teller
from tests.lmstudio_double import Gate, Reply

TOLD = f"{START_NOTICE}\n\n{DONE_NOTICE}\n\n"
PROGRAM = {"user-agent": "OpenAI/Python 3.3.0"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# What asks for structured output.
STRUCTURED = {
    "chat": {"response_format": {"type": "json_object"}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
}
_numbers = itertools.count()


def _long(name: str) -> list[dict[str, Any]]:
    """A conversation that has to be compacted, anew each time."""
    return talk(f"notices {name} {next(_numbers)}", 3600)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("chat", "program"), ("chat", "structured"), ("messages", "program"), ("responses", "structured")],
)
def test_stream_that_waits_opens_at_once_and_beats(restarting: Restarting, name: str, kind: str) -> None:
    """While the summary is written a client hears of the answer, and then again and again, whatever it is told.

    Nobody has asked the model for an answer by then: what is heard is no part of one. The request may be tried again,
    as LiteLLM does by default: its router then keeps what opens a stream until some of the answer has come.
    """
    gate = Gate()
    watch = restarting.watch("middle", Teller(Reply('{"a": 1}'), summary=Reply(SUMMARY, gate=gate)))
    extra = STRUCTURED[name] if kind == "structured" else {}
    path, body = form(name, "middle", _long(f"beat {kind} {name}"), stream=True)
    body |= {"num_retries": 2, **extra}
    headers = {**restarting.proxy.headers, **PROGRAM}
    with restarting.proxy.client.stream("POST", path, json=body, headers=headers) as answer:
        lines = (line for line in answer.iter_lines() if line)
        try:
            early = [next(lines)]
            assert gate.reached.wait(60)
            # Some of these are beats: what opens an answer is at most four events of two lines.
            early += [next(lines) for _ in range(14)]
            assert [record.outcome for record in watch.records if is_summary_call(record.body)] == ["running"]
            assert watch.chats == []
        finally:
            gate.open()
        seen = [*early, *lines]
    answered = read(name, "\n".join(seen))
    assert (answered.text, answered.thoughts) == ('{"a": 1}', TOLD if kind == "program" else "")
