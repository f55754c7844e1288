"""A model looks up what its conversation lost, through a real proxy: the client sees one answer, no tool of ours."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.bench import SUMMARY, Group, is_summary_call, open_bench
from tests.integration.harness import Proxy
from tests.integration.restart_bench import Carrier
from tests.lmstudio_double import ChatCall, Reply, RequestRecord, Simulator, numbered_words

_ANIMALS = [f"{size} {kind}" for size in ("small", "large", "old", "young") for kind in (
    "walrus", "otter", "seal", "crab", "heron", "turtle", "newt", "ray", "eel", "toad", "gull", "shrimp", "squid",
)]  # fmt: skip
# By animal, each said once, between much else.
_NUMBERS = itertools.count()
NAMES = {each: "".join(reversed(each.replace(" ", ""))) for each in _ANIMALS}
# Programs get no notice in the text.
PROGRAM = {"user-agent": "program"}
TOOL = {
    "type": "function",
    "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}


def question(animal: str) -> str:
    return f"What is the {animal} called?"


def script(call: ChatCall) -> Reply:
    """A model that looks up a name that it does not see, and then gives it."""
    if is_summary_call(call.body):
        return Reply(SUMMARY)
    asked = re.findall(r"What is the ([a-z ]+) called\?", call.prompt_text)
    if not asked:
        return Reply("Understood.")
    name = NAMES[asked[-1]]
    names = [tool["function"]["name"] for tool in call.body.get("tools") or ()]
    if "recall" in names and name not in call.prompt_text:
        return Reply("Let me look.", tool_calls=[("recall", json.dumps({"query": question(asked[-1])}))])
    return Reply(f"It is {name}." if name in call.prompt_text else "I do not know.")


@dataclass
class Running:
    proxy: Proxy
    simulator: Simulator

    def asked(self) -> list[RequestRecord]:
        return [each for each in self.simulator.requests if each.body and not is_summary_call(each.body)]

    def compacted(self, **body: Any) -> tuple[list[dict[str, Any]], str, str]:
        """A conversation that has just been compacted, and two animals whose names the model does not see any more."""
        messages = conversation()
        self.proxy.chat("small", messages, **body).raise_for_status()
        seen = json.dumps((self.asked()[-1].body or {})["messages"])
        gone = [animal for animal, name in NAMES.items() if name not in seen]
        assert len(gone) > 9, "all of it was kept"
        return [*messages, {"role": "assistant", "content": "Understood."}], gone[0], gone[9]


@pytest.fixture(scope="module")
def opened(carrier: Carrier, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = {"keep_originals": "compacted", "carrier": carrier}
    with open_bench(tmp_path_factory.mktemp("recall"), [Group("small")], settings) as bench:
        yield Running(bench.proxy, bench.simulators["small"])


@pytest.fixture
def running(opened: Running) -> Running:
    """One that the test before has left as it was."""
    opened.simulator.script, opened.simulator.chunk_tokens = script, Simulator([]).chunk_tokens
    opened.simulator.requests.clear()
    opened.proxy.lines.clear()
    return opened


def conversation() -> list[dict[str, Any]]:
    """Of many exchanges, with one name in each; no other test has it."""
    said: list[dict[str, Any]] = [{"role": "system", "content": "You are helpful."}]
    asked = f"And then, {next(_NUMBERS)}?"
    for number, (animal, name) in enumerate(NAMES.items()):
        chat = " ".join(f"We went on about ponds and weather, part {number} of it, line {line}." for line in range(14))
        said += [
            {"role": "user", "content": f"{asked} {chat}"},
            {"role": "assistant", "content": f"{chat} by the way the {animal} is called {name.lower()} by all. {chat}"},
        ]
    return [*said, {"role": "user", "content": "Go on."}]


def test_our_tool_is_part_of_what_the_server_counts(running: Running) -> None:
    """Without it the answer's number would not be the one that LM Studio has told, and it would not be asked again."""
    messages, animal, _ = running.compacted(tools=[TOOL])
    for number in range(2):
        messages += [{"role": "user", "content": f"{question(animal)} Part {number}."}]
        running.proxy.chat("small", messages, tools=[TOOL]).raise_for_status()
        messages += [{"role": "assistant", "content": "Understood."}]
    told = running.simulator.sdk.parameters("applyPromptTemplate")
    names = {tool["function"]["name"] for each in told for tool in each["opts"].get("toolDefinitions", ())}
    assert names == {"read_file", "recall"}
    assert running.proxy.logged("count alone") == []


@pytest.mark.parametrize("carrier", ["hooks"], indirect=True, scope="module")
def test_the_model_looks_up_a_lost_name_by_hooks(running: Running) -> None:
    messages, animal, _ = running.compacted(tools=[TOOL])
    answer = running.proxy.stream("small", [*messages, {"role": "user", "content": question(animal)}], tools=[TOOL])
    assert (answer.text, answer.finish_reasons) == (f"Let me look.\n\nIt is {NAMES[animal]}.", ["stop"])


@pytest.mark.parametrize("stream", [True, False])
def test_the_model_looks_it_up_in_the_same_answer(running: Running, stream: bool) -> None:
    """The client reads one answer; call, result and tool are the server's and ours."""
    messages, animal, _ = running.compacted(tools=[TOOL])
    messages = [*messages, {"role": "user", "content": question(animal)}]
    said = f"Let me look.\n\nIt is {NAMES[animal]}."
    if stream:
        answer = running.proxy.stream("small", messages, tools=[TOOL], stream_options={"include_usage": True})
        assert answer.text == said
        assert answer.finish_reasons == ["stop"]
        assert not any(delta.get("tool_calls") for delta in answer.deltas)
        [usage] = answer.usages
        raw = answer.raw.decode()
    else:
        answered = running.proxy.chat("small", messages, tools=[TOOL]).raise_for_status()
        choice = answered.json()["choices"][0]
        assert choice["message"]["content"] == said
        assert not choice["message"].get("tool_calls")
        assert choice["finish_reason"] == "stop"
        usage, raw = answered.json()["usage"], answered.text
    assert "recall" not in raw
    *_, first, second = running.asked()
    assert usage["completion_tokens"] == first.completion_tokens + second.completion_tokens
    assert not first.truncated
    assert not second.truncated
    assert first.body is not None
    assert second.body is not None
    assert [tool["function"]["name"] for tool in second.body["tools"]] == ["read_file", "recall"]
    assert second.body["tools"] == first.body["tools"]
    shown = second.body["messages"]
    assert shown[: len(first.body["messages"])] == first.body["messages"], "the server reads nothing again"
    assert [message["role"] for message in shown[len(first.body["messages"]) :]] == ["assistant", "tool"]
    assert NAMES[animal] in shown[-1]["content"]
    running.proxy.expect_logged("recall model=small lookups=1")
    assert not running.proxy.logged(f"{NAMES[animal]}|{animal}|failed_open")
    # In the next turn it still stands there.
    again = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Thanks."}]
    running.proxy.chat("small", again, tools=[TOOL]).raise_for_status()
    third = running.asked()[-1]
    assert third.body is not None
    assert third.body["messages"][: len(shown)] == shown


def test_an_answer_that_fills_the_window_after_a_look_up_is_whole(running: Running) -> None:
    """The words before the look-up and all after it, none of them twice, over a restart."""
    messages, animal, _ = running.compacted(tools=[TOOL])
    messages = [*messages, {"role": "user", "content": question(animal)}]
    words = 2_200

    def telling(call: ChatCall) -> Reply:
        if is_summary_call(call.body):
            return Reply(SUMMARY)
        told = [int(number) for number in re.findall(r"\bword(\d+)", call.prompt_text)]
        if told:
            return Reply(f" {numbered_words(words - max(told), max(told) + 1)}" if max(told) < words else "")
        if call.messages[-1]["role"] == "tool":
            return Reply(numbered_words(words))
        return script(call)

    running.simulator.script, running.simulator.chunk_tokens = telling, 16
    before = len(running.asked())
    body = {"tools": [TOOL], "max_tokens": 20_000}
    answer = running.proxy.stream_body({"model": "small", "messages": messages, "stream": True, **body}, **PROGRAM)
    assert answer.text == f"Let me look.\n\n{numbered_words(words)}"
    assert answer.finish_reasons == ["stop"]
    assert len(running.asked()) - before >= 3, "it was not restarted"
    assert not any(each.truncated for each in running.asked())
