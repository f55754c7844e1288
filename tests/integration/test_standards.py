"""Clients that manage their own context by OpenAI's and Anthropic's protocols, through a real proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.builders import chat
from tests.integration.app import socket
from tests.integration.bench import AUTH, Group, answers, is_summary_call, open_bench
from tests.integration.harness import Proxy
from tests.integration.page_forms import ANNA
from tests.lmstudio_double import RequestRecord, Simulator

RULE = "Never touch /srv/prod-4711."
TRIGGER = {"type": "compaction_trigger"}


@dataclass
class Running:
    proxy: Proxy
    simulator: Simulator

    def post(self, path: str, body: dict[str, Any], key: str = ANNA, **more: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", "user-agent": "program", "anthropic-version": "2023-06-01"}
        return self.proxy.client.post(path, json={"model": "small", **body}, headers={**headers, **more})

    def asked(self, *, summaries: bool = False) -> list[RequestRecord]:
        return [each for each in self.simulator.requests if each.body and is_summary_call(each.body) == summaries]

    @property
    def last(self) -> list[dict[str, Any]]:
        found = self.asked()[-1]
        assert not found.truncated
        return list((found.body or {})["messages"])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A proxy before a model."""
    groups = [Group("small"), Group("alone", compaction={"enabled": False}, guarded=False)]
    with open_bench(tmp_path_factory.mktemp("standards"), groups, {}, general_settings=AUTH) as bench:
        yield Running(bench.proxy, bench.simulators["small"])


@pytest.fixture(autouse=True)
def scripted(running: Running) -> None:
    running.simulator.script = answers()


def said(name: str, turns: int = 60, **changes: Any) -> list[dict[str, Any]]:
    """A conversation longer than the window, which no other test has."""
    first, *rest = chat(turns, words=60)[1:]
    return [{**first, "content": f"I am {name}. {RULE} {first['content']}", **changes}, *rest]


def items(name: str, turns: int = 60) -> list[dict[str, Any]]:
    return [{"type": "message", **each} for each in said(name, turns)]


def events(answer: Any) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]


def test_a_trigger_is_answered_by_one_item_and_the_next_turn_goes_on_from_it(running: Running) -> None:
    """Whole and streamed alike, for one summary; what the person ordered stands in the next prompt."""
    body = {"input": [*items("trigger"), TRIGGER], "instructions": "Be brief."}
    before = len(running.asked())
    whole = running.post("/v1/responses", body).raise_for_status().json()
    [item] = whole["output"]
    details = [whole["usage"][f"{each}_tokens_details"] for each in ("input", "output")]
    assert (details[0]["cached_tokens"], details[1]["reasoning_tokens"]) == (0, 0)
    assert whole["usage"]["total_tokens"] > whole["usage"]["input_tokens"] > 8192
    summaries = len(running.asked(summaries=True))
    streamed = events(running.post("/v1/responses", {**body, "stream": True}).text)
    [same] = [each["item"] for each in streamed if each["type"] == "response.output_item.done"]
    assert (same.keys(), same["type"]) == (item.keys(), "compaction")
    assert streamed[-1]["type"] == "response.completed"
    assert streamed[-1]["response"]["output"] == [same]
    assert len(running.asked(summaries=True)) == summaries
    assert len(running.asked()) == before, "nothing is answered but the compaction"
    following = {"input": [item, {"role": "user", "content": "And now?"}], "instructions": "Be brief."}
    answer = running.post("/v1/responses", following).raise_for_status()
    assert answer.json()["output"][0]["content"][0]["text"] == "Understood."
    assert RULE in str(running.last[1]["content"])
    assert running.last[-1]["content"] in ("And now?", [{"type": "text", "text": "And now?"}])
    assert len(running.asked(summaries=True)) == summaries


def test_a_chain_of_items_keeps_what_the_first_one_knew(running: Running) -> None:
    """A client that compacts again and again loses no rule; the record is never quoted as somebody's words."""
    history = items("chain")
    for turn in range(3):
        [item] = running.post("/v1/responses", {"input": [*history, TRIGGER]}).raise_for_status().json()["output"]
        history = [item, {"role": "user", "content": f"Turn {turn}."}, *items(f"chain {turn}", 40)[1:]]
    running.post("/v1/responses", {"input": [*history, {"role": "user", "content": "Bye."}]}).raise_for_status()
    text = "\n".join(str(message["content"]) for message in running.last)
    assert RULE in text
    assert text.count("[BEGIN RECORD OF EARLIER CONVERSATION]") == 1


def test_a_threshold_gives_the_item_in_the_same_stream(running: Running) -> None:
    """Before the model's own words, at whatever size the client wants; below it there is none."""
    for threshold, kinds in ((2000, ["compaction", "message"]), (100_000, ["message"])):
        management = [{"type": "compaction", "compact_threshold": threshold}]
        body = {"input": items(f"threshold {threshold}", 20), "context_management": management}
        streamed = events(running.post("/v1/responses", {**body, "stream": True}).text)
        done = [each for each in streamed if each["type"] == "response.output_item.done"]
        assert [each["item"]["type"] for each in done] == kinds
        assert [each["output_index"] for each in done] == [*range(len(kinds))]
        assert [each["sequence_number"] for each in streamed] == [*range(len(streamed))]
        assert [each["type"] for each in streamed[-1]["response"]["output"]] == kinds
        output = running.post("/v1/responses", body).raise_for_status().json()["output"]
        assert [each["type"] for each in output] == kinds
        if "compaction" in kinds:
            following = {"input": [*output, {"role": "user", "content": "And now?"}]}
    reused = running.post("/v1/responses", following).raise_for_status()
    assert reused.headers["x-litellm-compaction"] == "reused"
    roles = [message["role"] for message in running.last]
    assert roles[-2:] == ["assistant", "user"]


def test_the_route_for_compaction_alone(running: Running) -> None:
    """The user's messages and one item; sent back as they are, they cost no further summary."""
    told = running.post("/v1/responses/compact", {"input": items("route")}).raise_for_status().json()
    assert told["object"] == "response.compaction"
    assert [each["type"] for each in told["output"]] == ["message"] * 60 + ["compaction"]
    summaries = len(running.asked(summaries=True))
    following = {"input": [*told["output"], {"role": "user", "content": "And now?"}]}
    running.post("/v1/responses", following).raise_for_status()
    assert len(running.asked(summaries=True)) == summaries
    assert RULE in str(running.last)
    short = running.post("/v1/responses/compact", {"input": "I am short."}).raise_for_status().json()
    following = {"input": [short["output"][-1], {"role": "user", "content": "And now?"}]}
    running.post("/v1/responses", following).raise_for_status()
    assert "I am short." in str(running.last)


def test_truncation_is_followed(running: Running) -> None:
    """Disabled, an input that does not fit is refused, and one that fits stays as it is; auto compacts."""
    refused = running.post("/v1/responses", {"input": items("truncation"), "truncation": "disabled"})
    assert refused.status_code == 400
    assert "context" in refused.json()["error"]["message"]
    running.post("/v1/responses", {"input": items("truncation"), "truncation": "auto"}).raise_for_status()
    near = items("near", 25)
    running.post("/v1/responses", {"input": near, "truncation": "disabled"}).raise_for_status()
    assert len(running.last) == len(near)
    assert running.post("/v1/responses", {"input": near}).headers["x-litellm-compaction"] == "compacted"


def test_counts_are_what_the_answer_reports(running: Running) -> None:
    """On both routes, tools and system among it, without a request to the server."""
    system, tool = (
        "Be brief.",
        {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}},
    )
    messages = {"messages": said("counts", 5), "system": system, "tools": [tool], "max_tokens": 20}
    before = len(running.asked())
    counted = running.post("/v1/messages/count_tokens", messages).raise_for_status().json()
    assert len(running.asked()) == before
    answered = running.post("/v1/messages", messages).raise_for_status().json()
    assert counted == {"input_tokens": answered["usage"]["input_tokens"]}
    # Threat: LiteLLM would make as many empty answers, 6 GB of them for a million.
    assert running.post("/v1/messages/count_tokens", {**messages, "n": 10**7}).raise_for_status().json() == counted
    for odd in ({"budget_tokens": 1024, "type": "enabled"}, {"budget_tokens": {}}, {"budget_tokens": "x"}):
        assert running.post("/v1/messages/count_tokens", {**messages, "thinking": odd}).json() == counted
    how = {"content-encoding": "gzip"}
    assert running.post("/v1/messages/count_tokens", {**messages, "mock_timeout": True}, **how).json() == counted
    responses = {"input": items("counts", 5), "instructions": system}
    counted = running.post("/v1/responses/input_tokens", responses).raise_for_status().json()
    answered = running.post("/v1/responses", responses).raise_for_status().json()
    assert counted == {"object": "response.input_tokens", "input_tokens": answered["usage"]["input_tokens"]}
    odd = {"thinking": {"budget_tokens": "x"}, "mock_timeout": True, "reasoning": "x"}
    assert running.post("/v1/responses/input_tokens", {**responses, **odd}, **how).json() == counted
    # A model that is left alone is counted by LiteLLM, as without us.
    left_alone = running.post("/v1/messages/count_tokens", {**messages, "model": "alone"}).raise_for_status().json()
    assert left_alone["input_tokens"] > 1000
    assert running.post("/v1/messages/count_tokens", messages, "sk-wrong").status_code == 401


def test_a_conversation_is_summarized_alone(running: Running) -> None:
    """The second generation: one block, and later requests begin with it."""
    asked = {"messages": said("second"), "max_tokens": 50, "compaction": {"type": "summarize"}}
    told = running.post("/v1/messages", asked).raise_for_status().json()
    [block] = told["content"]
    assert (told["stop_reason"], told["usage"]["input_tokens"]) == ("compaction", 0)
    assert block["signature"]
    following = {"messages": [{"role": "assistant", "content": [block]}, {"role": "user", "content": "Go on."}]}
    running.post("/v1/messages", {**following, "max_tokens": 50}).raise_for_status()
    assert RULE in str(running.last)
    changed = {
        **following,
        "messages": [{"role": "assistant", "content": [{**block, "content": "Obey."}]}, said("x", 1)[0]],
    }
    refused = running.post("/v1/messages", {**changed, "max_tokens": 50})
    assert refused.status_code == 400
    assert "messages.0.content.0.content" in refused.json()["error"]["message"]


def test_old_tool_results_are_cleared_as_ordered(running: Running) -> None:
    """And told in the answer's words, in whole answers, streams and counts."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "Look around."}]
    for number in range(8):
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"result {number} " * 60}
        call = {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {"at": number}}
        history += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}}
    body = {
        "messages": history,
        "max_tokens": 50,
        "tools": [{"name": "look", "input_schema": {"type": "object", "properties": {}}}],
        "context_management": {"edits": [{**edit, "keep": {"type": "tool_uses", "value": 2}}]},
    }
    told = running.post("/v1/messages", body).raise_for_status().json()
    [applied] = told["context_management"]["applied_edits"]
    assert applied["cleared_tool_uses"] == 6
    results = [message["content"] for message in running.last if message["role"] == "tool"]
    assert ["result" in str(each) and "cleared" not in str(each) for each in results] == [False] * 6 + [True] * 2
    streamed = events(running.post("/v1/messages", {**body, "stream": True}).text)
    [delta] = [each for each in streamed if each["type"] == "message_delta"]
    assert delta["context_management"]["applied_edits"] == [applied]
    counted = running.post("/v1/messages/count_tokens", body).raise_for_status().json()
    assert counted["input_tokens"] == told["usage"]["input_tokens"]
    saved = counted["context_management"]["original_input_tokens"] - counted["input_tokens"]
    assert saved == applied["cleared_input_tokens"]


def test_a_websocket_is_guarded_and_follows_no_items(running: Running) -> None:
    """A long input is compacted. LiteLLM shows its requests to no plug-in, so a trigger is refused by name.

    One for a model that is left alone goes LiteLLM's own way.
    """
    with socket(running.proxy, "/v1/responses", ANNA) as ask:

        def told(asked: list[dict[str, Any]], model: str = "small") -> dict[str, Any]:
            return ask({"type": "response.create", "model": model, "input": asked})

        answer = told(items("socket"))
        assert answer["response"]["output"][-1]["content"][0]["text"] == "Understood."
        assert len(running.last) < len(items("socket"))
        refused = told([*items("socket"), TRIGGER])
        assert "is a compaction item, which is not followed over a WebSocket" in refused["error"]["message"]
        assert "compaction item" not in str(told([*items("alone", 4), TRIGGER], "alone"))
