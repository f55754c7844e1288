"""A real model looks up what its conversation lost: the loop of calls on llama.cpp's own prompts, counts and cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from tests.integration.harness import NOTHING_AHEAD, Proxy, lm_studio, proxy, write_config
from tests.real_engine.engine import running
from tests.real_engine.shim import Exchange, Shim, serve
from tests.real_engine.weights import what_is_missing, write_fast_file

_WINDOW_TOKENS = 2048
_QUESTION = "Which harbor does the walrus swim to?"
_ANSWER = "Kandrazur"
# The model is too small to call a tool by itself: it writes the call under this.
_QUERY = 'root ::= "{\\"query\\": \\"" [a-z ]{0,12} "walrus harbor" "\\"}"'
_TOOL = {
    "type": "function",
    "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}


class Bench(NamedTuple):
    proxy: Proxy
    shim: Shim

    def asked(self) -> list[Exchange]:
        return self.shim.answers("talk")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A proxy that keeps originals, before an engine whose template renders tools."""
    if missing := what_is_missing():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("recall")
    weights = write_fast_file(folder, knows_tools=True)
    with ExitStack() as stack:
        engine = stack.enter_context(running(weights, _WINDOW_TOKENS))
        shim = stack.enter_context(serve({"talk": engine}))
        shim.calls[_QUESTION] = ("recall", _QUERY)
        settings = {"tokenizer": str(weights), "max_summary_calls": 0, "keep_originals": "compacted", **NOTHING_AHEAD}
        config = write_config(folder, [lm_studio("talk", "talk", shim.base_url)], settings)
        yield Bench(stack.enter_context(proxy(config)), shim)


def _conversation(name: str) -> list[dict[str, Any]]:
    """One and a half windows, in whose middle a long answer says the one thing by the way."""
    said: list[dict[str, Any]] = [{"role": "system", "content": "You are helpful."}]
    for number in range(12):
        chat = " ".join(f"We went on about ponds and weather, part {number}, line {line}." for line in range(6))
        word = f" by the way the walrus swims to the harbor of {_ANSWER.lower()} each year." if number == 3 else ""
        said += [
            {"role": "user", "content": f"And then, {name}? {chat}"},
            {"role": "assistant", "content": f"{chat}{word} {chat[:200]}"},
        ]
    return [*said, {"role": "user", "content": "Go on."}]


@pytest.mark.parametrize("stream", [True, False])
def test_what_was_compacted_is_looked_up_within_the_answer(bench: Bench, stream: bool) -> None:
    """The engine reads what was found behind the prompt that it has in its cache; the client reads one answer."""
    conversation = _conversation("Anna" if stream else "Bert")
    bench.proxy.chat("talk", conversation, tools=[_TOOL], max_tokens=8, temperature=0).raise_for_status()
    compacted = bench.asked()[-1]
    assert _ANSWER.lower() not in str(compacted.body["messages"])
    messages = [*conversation, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": _QUESTION}]
    body = {"tools": [_TOOL], "max_tokens": 24, "temperature": 0}
    if stream:
        answer = bench.proxy.stream("talk", messages, **body)
        assert not any(delta.get("tool_calls") for delta in answer.deltas)
        text, raw = answer.text, answer.raw.decode()
    else:
        answered = bench.proxy.chat("talk", messages, **body).raise_for_status()
        choice = answered.json()["choices"][0]
        assert not choice["message"].get("tool_calls")
        assert answered.json()["usage"]["compaction"]["lookups"] == 1
        text, raw = choice["message"]["content"], answered.text
    assert text
    assert "recall" not in raw
    *_, called, went_on = bench.asked()
    assert called.finish_reason == "tool_calls"
    *before, call, result = went_on.body["messages"]
    assert before == called.body["messages"]
    assert "walrus harbor" in call["tool_calls"][0]["function"]["arguments"]
    assert _ANSWER.lower() in result["content"]
    # The call is rendered anew, and read as the model wrote it or not; nothing before it is read again.
    assert went_on.cached_tokens >= called.prompt_tokens - 1
    for each in (called, went_on):
        assert each.error == ""
        assert each.total_tokens <= _WINDOW_TOKENS
