"""Thoughts that run away, through the real proxy: ended by llama.cpp in the same stream, by a stop elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from litellm_compaction.simulator import ChatCall, Gate, Reply, RequestRecord, Simulator, numbered_words
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from tests.integration.bench import Bench, Group, open_bench
from tests.integration.restart_bench import Carrier

_WINDOW = 4096
_BUDGET = _WINDOW // 2
# The proxy's count of a begun answer may be too low.
_MOST = _BUDGET * 11 // 10
_CONTROL = "/v1/chat/completions/control"
# More than the window holds.
_RUNAWAY = numbered_words(2500)
_OPTED_IN = {"enabled": True}
_LLAMA: dict[str, Any] = {"provider": "openai", "compaction": _OPTED_IN}
_CHAT = "/v1/chat/completions"
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def thinking(carrier: Carrier, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A proxy for each carrier, before LM Studio and llama.cpp."""
    groups = [
        Group("studio", _WINDOW),
        Group("llama", _WINDOW, **_LLAMA, simulator={"api": "llama.cpp"}),
        Group("older", _WINDOW, **_LLAMA, simulator={"api": "llama.cpp", "thought_control": "absent"}),
        Group("deaf", _WINDOW, **_LLAMA, simulator={"api": "llama.cpp", "thought_control": "ignores"}),
        # Its template, which is known here, shows how a thought is closed; the simulator's own shows no thoughts.
        Group("qwen", _WINDOW, key="qwen/qwen3-8b", architecture="qwen3", speaks=False),
        Group("off", _WINDOW, compaction={"reasoning_budget_ratio": 0}),
    ]
    settings = {"carrier": carrier, "background": "off"}
    with open_bench(
        tmp_path_factory.mktemp("thoughts"),
        groups,
        settings,
        litellm_settings={"drop_params": True},
        router_settings={"num_retries": 0, "disable_cooldowns": True},
    ) as bench:
        bench.carrier = carrier  # type: ignore[attr-defined]
        yield bench


class _Told(Gate):
    """Holds a thought a little past its budget until the server has said that it ends it, or its reader has gone."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()
        self._simulator = simulator
        self._since = len(simulator.requests)

    def is_set(self) -> bool:
        new = self._simulator.requests[self._since :]
        return any(record.path == _CONTROL and record.status == 200 for record in new)


def _thinks(simulator: Simulator, *, answers_when_told: bool = True) -> Any:
    """A model that thinks without end until it is told to answer."""
    gate = _Told(simulator)

    def script(call: ChatCall) -> Reply:
        if answers_when_told and ("answer now" in call.prompt_text or call.prompt_text.endswith("</think>\n\n")):
            return Reply("It is four.")
        return Reply("It is four.", reasoning=_RUNAWAY, gate=gate, gate_after_tokens=_MOST)

    return script


def _ask(bench: Bench, group: str, path: str, *, stream: bool, **extra: Any) -> tuple[str, str]:
    """The answer's JSON, and its visible text."""
    question = {"role": "user", "content": f"Two and two? {group} {path} {stream} {sorted(extra)}"}
    body: dict[str, Any] = {"model": group, "stream": stream, **extra}
    body |= {"input": question["content"]} if path.endswith("/responses") else {"messages": [question]}
    if path.endswith("/messages"):
        body["max_tokens"] = 8000
    if stream:
        told = bench.proxy.stream_body(body, path)
        assert told.status == 200, told.raw[:500]
        return json.dumps(told.chunks), _streamed_text(told.chunks)
    answer = bench.proxy.post(body, path)
    assert answer.status_code == 200, answer.text
    return answer.text, _whole_text(answer.json())


def _streamed_text(events: list[dict[str, Any]]) -> str:
    said = []
    for event in events:
        said += [choice["delta"].get("content") or "" for choice in event.get("choices") or ()]
        delta = event.get("delta")
        if event.get("type") == "content_block_delta":
            said.append(delta.get("text") or "")
        elif event.get("type") == "response.output_text.delta":
            said.append(delta)
    return "".join(said)


def _whole_text(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    blocks = answer.get("content") or [
        part for item in answer["output"] if item["type"] == "message" for part in item.get("content") or ()
    ]
    return "".join(block.get("text") or "" for block in blocks if block.get("type") in ("text", "output_text"))


def _controls(records: list[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.path == _CONTROL]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_llama_cpp_ends_it_in_the_same_stream(thinking: Bench, stream: bool) -> None:
    """One request, half of the window of thoughts, the answer behind them."""
    if thinking.carrier == "hooks":  # type: ignore[attr-defined]
        pytest.skip("LiteLLM's hooks have no way to tell the server")
    watch = thinking.watch("llama", _thinks(thinking.simulators["llama"]))
    told, text = _ask(thinking, "llama", _CHAT, stream=stream)
    assert text.strip() == "It is four."
    (chat,) = watch.chats
    assert chat.body is not None
    assert chat.body["reasoning_control"] is True
    (control,) = _controls(watch.records)
    assert control.body is not None
    assert control.body["action"] == "reasoning_end"
    assert control.headers["authorization"] == "Bearer k"
    assert 0.9 * _BUDGET <= chat.completion_tokens <= _MOST + 16
    assert chat.finish_reason == "stop"
    assert '"length"' not in told
    assert thinking.proxy.expect_logged("thought_ended model=llama tokens=")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("group", "path"),
    # LiteLLM has a server that it knows as `openai` answer messages and responses by itself.
    [("older", _CHAT), ("studio", _CHAT), ("studio", "/v1/messages"), ("studio", "/v1/responses")],
)
def test_elsewhere_it_is_stopped_and_answered(thinking: Bench, group: str, path: str, stream: bool) -> None:
    """LM Studio, and a llama.cpp that knows no such route: a second request, told to answer, with nothing compacted."""
    if thinking.carrier == "hooks" and (path != _CHAT or not stream):  # type: ignore[attr-defined]
        pytest.skip("the hooks stop streams of chat completions only")
    watch = thinking.watch(group, _thinks(thinking.simulators[group]))
    _, text = _ask(thinking, group, path, stream=stream)
    assert text.strip() == "It is four."
    first, second = watch.chats
    assert first.disconnected_s is not None
    assert watch.summaries == []
    assert second.body is not None
    assert len(second.body["messages"]) == len((first.body or {})["messages"]) + 2
    assert 0.9 * _BUDGET <= first.completion_tokens <= _MOST + 16
    if group == "studio":
        assert (first.body or {}).get("reasoning_control") is None
        assert second.body["reasoning_effort"] == "none"
        assert _controls(watch.records) == []


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", [_CHAT, "/v1/messages", "/v1/responses"])
def test_lm_studio_goes_on_behind_the_closed_thought(thinking: Bench, path: str, stream: bool) -> None:
    """All that was thought stands before the answer, as the model itself would have closed it; nothing is told."""
    if thinking.carrier == "hooks":  # type: ignore[attr-defined]
        pytest.skip("LiteLLM's hooks cannot send a prompt of ours")
    simulator = thinking.simulators["qwen"]
    watch = thinking.watch("qwen", _thinks(simulator))
    _, text = _ask(thinking, "qwen", path, stream=stream)
    assert text.strip() == "It is four."
    (first,), (second,) = watch.chats, watch.records_of("/v1/completions")
    assert watch.summaries == []
    prompt = (second.body or {})["prompt"]
    assert prompt.endswith("\n</think>\n\n")
    assert prompt.count("<think>") == 1
    thoughts = prompt.partition("<think>\n")[2].partition("\n</think>")[0]
    assert _RUNAWAY.startswith(thoughts)
    assert first.disconnected_s is not None
    assert TokenCounter().text_counter("qwen", family_of("qwen3", "qwen3-8b"))(thoughts) >= 0.9 * _BUDGET


@pytest.mark.parametrize("extra", [{"tools": [_TOOL]}, {"response_format": {"type": "json_object"}}], ids=str)
def test_with_tools_or_a_document_it_is_told(thinking: Bench, extra: dict[str, Any]) -> None:
    """A prompt of ours would be without them."""
    watch = thinking.watch("qwen", _thinks(thinking.simulators["qwen"]))
    _, text = _ask(thinking, "qwen", _CHAT, stream=True, **extra)
    assert text.strip() == "It is four."
    assert {each.path for each in watch.chats} == {_CHAT}


def test_one_that_says_yes_and_thinks_on_is_stopped_and_ends_with_a_notice(thinking: Bench) -> None:
    """Never a third request of thoughts alone."""
    watch = thinking.watch("deaf", _thinks(thinking.simulators["deaf"], answers_when_told=False))
    told, _ = _ask(thinking, "deaf", _CHAT, stream=True)
    assert len(watch.chats) == 2
    assert '"finish_reason": "length"' in told
    assert "The model only thought and gave no answer" in told
    assert len(_controls(watch.records)) == (thinking.carrier == "auto")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("group", "extra"),
    [
        ("off", {}),
        ("studio", {"reasoning_effort": "high"}),
        ("studio", {"thinking": {"type": "enabled", "budget_tokens": 3000}}),
    ],
    ids=["off", "effort", "budget"],
)
def test_a_thought_that_may_be_longer_is_left_alone(thinking: Bench, group: str, extra: dict[str, Any]) -> None:
    """2,400 tokens of thoughts and the answer come by one request."""
    thought = numbered_words(1150)
    watch = thinking.watch(group, lambda call: Reply("It is four.", reasoning=thought))
    _, text = _ask(thinking, group, _CHAT, stream=True, **extra)
    assert text == "It is four."
    (chat,) = watch.chats
    assert chat.completion_tokens > _BUDGET + 200


def test_a_clients_smaller_budget_is_kept(thinking: Bench) -> None:
    """Its own number ends the thought."""
    group, thought = "studio", numbered_words(1150)
    watch = thinking.watch(
        group, lambda call: Reply("It is four.", reasoning="" if "answer now" in call.prompt_text else thought)
    )
    _, text = _ask(thinking, group, _CHAT, stream=True, thinking={"type": "enabled", "budget_tokens": 600})
    assert text == "It is four."
    assert len(watch.chats) == 2
