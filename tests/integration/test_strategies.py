"""The three strategies through a real proxy, one deployment each, with pruning models that answer well or badly."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from litellm_compaction.simulator import ChatCall, Fault, Reply
from tests.integration.bench import Bench, Group, is_summary_call, open_bench
from tests.integration.conversations import ONE_ROUND, answered, talk, tool_round
from tests.integration.validity import text_of

pytestmark = pytest.mark.proxy

STRATEGIES = ["summary", "prune", "handoff"]
KINDS = ["good", "fenced", "invalid", "empty", "500"]
RECORD = "### Current state\nStep 3 was settled in src/parser.py:42."


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One proxy; the strategy is each deployment's own, the prompt of one of them the operator's."""
    folder = tmp_path_factory.mktemp("strategies")
    prompt = folder / "handoff.txt"
    prompt.write_text("You write the record that the OPERATOR wants, in {words} words.", encoding="utf-8")
    groups = [Group(strategy, compaction={"strategy": strategy}) for strategy in STRATEGIES]
    groups.append(Group("recounted", compaction={"count": "probe"}, factor=1.15))
    with open_bench(
        folder,
        groups,
        {"window_cache_s": 0.2, "summary_timeout_s": 5, "prompt_file": {"handoff": str(prompt)}},
        router_settings={"num_retries": 0, "disable_cooldowns": True},
    ) as opened:
        yield opened


def pruner(kind: str, call: ChatCall) -> Reply | None:
    if not is_summary_call(call.body):
        return Reply("Understood.")
    prompt = str(call.messages[-1]["content"])
    shown = [json.loads(line) for line in prompt.splitlines() if line.startswith('{"n": ')]
    drop = [each["n"] for each in shown[: len(shown) * 6 // 10]]
    good = json.dumps({"drop": drop, "summary": RECORD}) if shown else RECORD
    texts = {"good": good, "fenced": f"```json\n{good}\n```", "invalid": "I'm sorry, but I can't help with that."}
    return Reply(fault=Fault("500")) if kind == "500" else Reply(texts.get(kind, ""))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_keeps_the_promises(bench: Bench, strategy: str, kind: str) -> None:
    """Fits, valid, the newest words verbatim; the next turn costs no call and begins with the same messages."""
    watch = bench.watch(strategy, lambda call: pruner(kind, call))
    messages = talk(f"{strategy} {kind}", ONE_ROUND)
    answer = bench.proxy.chat(strategy, messages)
    assert (answer.status_code, answer.headers["x-litellm-compaction"]) == (200, "compacted")
    assert watch.problems(messages) == []
    first = watch.sent()
    calls = len(watch.summaries)
    assert 1 <= calls <= 4
    if kind in ("good", "fenced"):
        assert calls == 1
        assert RECORD.splitlines()[1] in text_of(first[1])
    else:
        assert bench.proxy.expect_logged(rf"fallback model={strategy} .* reason=\w+")
    if strategy == "handoff" and kind in ("good", "fenced"):
        assert [message["role"] for message in first] == ["system", "user"]
        assert text_of(first[1]).endswith(f"Last request from user was: {text_of(messages[-1])}")
        assert "OPERATOR" in str(watch.summaries[0].body)
    if strategy == "prune" and kind in ("good", "fenced"):
        assert first[-5:] == messages[-5:]
        assert {text_of(each) for each in first[2:]} <= {text_of(each) for each in messages}
    later = answered(messages, "Understood.", "Go on then.")
    reused = bench.proxy.chat(strategy, later)
    assert (reused.status_code, reused.headers["x-litellm-compaction"]) == (200, "reused")
    assert watch.sent()[: len(first)] == first
    assert len(watch.summaries) == calls


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_open_tool_round_stays_verbatim(bench: Bench, strategy: str) -> None:
    """Calls and results that nobody has answered yet are behind whatever the strategy makes."""
    watch = bench.watch(strategy, lambda call: pruner("good", call))
    messages = [*talk(f"tools {strategy}", ONE_ROUND), *tool_round("open", "the result " * 20)]
    answer = bench.proxy.chat(strategy, messages)
    assert (answer.status_code, answer.headers["x-litellm-compaction"]) == (200, "compacted")
    assert watch.problems(messages) == []
    if strategy == "handoff":
        assert [message["role"] for message in watch.sent()] == ["system", "user", "assistant", "tool"]


def test_what_is_sent_has_been_counted_by_the_server(bench: Bench) -> None:
    """`count: probe`: the same messages and tools go upstream twice, first for 16 tokens; not in the next turn."""
    watch = bench.watch("recounted", lambda call: pruner("good", call))
    messages = talk("recounted", ONE_ROUND)
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]
    answer = bench.proxy.chat("recounted", messages, tools=tools)
    assert (answer.status_code, answer.headers["x-litellm-compaction"]) == (200, "compacted")
    probe, real = watch.bodies
    assert probe["max_tokens"] == 16 < real["max_tokens"]
    assert (probe["messages"], probe["tools"]) == (real["messages"], real["tools"])
    # The rest of the window is the answer's, but for 2 %: an estimate keeps far more of it.
    counted = watch.chats[0].prompt_tokens
    assert 8192 - 1.04 * counted - 64 <= real["max_tokens"] <= 8192 - counted
    again = bench.proxy.chat("recounted", answered(messages, "Understood.", "And now?"), tools=tools)
    assert (again.status_code, len(watch.chats), len(watch.summaries)) == (200, 3, 1)
