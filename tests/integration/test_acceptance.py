"""The specification's twenty acceptance scenarios, through LiteLLM's own application.

Each test asks as a client does, and looks at both ends: what the simulated LM Studio was sent, what the client got.
Their first lines read as the specification. The last three run in a second proxy, started over the first one's data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli import main
from litellm_compaction.core.messages import ATTEMPTS_NOTICE, DONE_NOTICE, START_NOTICE
from tests.builders import ONE_ROUND, answered, prose, talk, tool_round, tools
from tests.integration.app import serve
from tests.integration.bench import (
    AUTH,
    SUMMARY,
    Bench,
    Group,
    answers,
    edit_plan,
    is_question,
    is_summary_call,
    open_bench,
)
from tests.integration.harness import entry, lm_studio
from tests.integration.plain_server import PlainServer, plain_entries, serve_plain
from tests.integration.restart_bench import LONG, TEXTS, Teller, asked, group, shut, stream_problems, without_restarts
from tests.integration.validity import text_of
from tests.lmstudio_double import ChatCall, Fault, Model, Reply, Simulator

WINDOW = 8192
_NOTICES = f"{START_NOTICE}\n\n{DONE_NOTICE}\n\n"
_SAID = "Step 3 was settled with everybody in the office."
# Architecture and name as LM Studio tells them, and the family by which the page says that prompts are counted.
_FAMILIES = {
    "meta-llama-3.1-8b-instruct": ("llama", "llama3"),
    "llama-2-7b-chat": ("llama", "llama2"),
    "mistral-7b-instruct-v0.3": ("llama", "mistral"),
    "mixtral-8x7b-instruct-v0.1": ("llama", "mixtral"),
    "gpt-oss-20b": ("gpt-oss", "gpt"),
    "qwen3-8b": ("qwen3", "qwen"),
    "qwen2.5-vl-7b": ("qwen2vl", "qwen"),
    "my-own-finetune": ("gemma3", "gemma"),
}
_SETTINGS = {"window_cache_s": 600, "summary_timeout_s": 60}
_GROUPS = [
    Group("local"),
    Group("shared"),
    group("story"),
    group("middle", 4096),
    Group("pruner"),
    Group("pruned", compaction={"pruning_model": "pruner"}),
    *(Group(strategy, compaction={"strategy": strategy}) for strategy in ("summary", "prune", "handoff")),
    Group("observed", 4096, compaction={"mode": "observe"}, guarded=False),
    Group("off", 4096, compaction={"mode": "off"}, guarded=False),
    Group("opted out", 4096, guarded=False),
]


@dataclass
class Office:
    """The two proxies, one after the other, over the same data."""

    folder: Path
    plain: PlainServer
    families: str
    stack: ExitStack = field(default_factory=ExitStack)

    def open(self, settings: Mapping[str, Any]) -> Bench:
        """A proxy; the one before it has to be closed."""
        plain, opted = self.plain.base_url, {"enabled": True, "context_length": 4096}
        entries = [
            *plain_entries(plain),
            entry("opted", "openai/opted", f"{plain}/v1", compaction=opted),
            lm_studio("deaf", "deaf", plain),
            lm_studio("lm_studio/*", "*", self.families),
        ]
        bench = open_bench(self.folder, _GROUPS, settings, entries=entries, general_settings=AUTH)
        return self.stack.enter_context(bench)


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    simulator = Simulator([Model(name, architecture=known[0]) for name, known in _FAMILIES.items()])
    for name in _FAMILIES:
        simulator.load(name, 4096)
    with serve_plain() as plain, serve(simulator) as address:
        made = Office(tmp_path_factory.mktemp("acceptance"), plain, address.base_url)
        with made.stack:
            yield made


@pytest.fixture(scope="module")
def bench(office: Office) -> Bench:
    """The first proxy, with the defaults but for time limits."""
    return office.open(_SETTINGS)


@pytest.fixture(scope="module")
def kept(bench: Bench) -> dict[str, Any]:
    """What the first proxy has compacted and sent before it ended."""
    watch = bench.watch("shared")
    messages = talk("kept over night", ONE_ROUND)
    answer = bench.proxy.chat("shared", messages)
    assert answer.headers["x-litellm-compaction"] == "compacted"
    return {"messages": messages, "sent": watch.sent()}


@pytest.fixture(scope="module")
def later(office: Office, bench: Bench, kept: dict[str, Any]) -> Bench:
    """The second proxy, in which the operator allows what the defaults leave closed."""
    assert not bench.findings()
    office.stack.pop_all().close()
    return office.open({**_SETTINGS, "oversized_tool_result": "excerpt", "allow_opt_out": True})


def test_01_prompt_above_eighty_percent_is_compacted(bench: Bench) -> None:
    """A prompt that would fill more than 80 % of the window is compacted before it is sent.

    System, task and newest message stay; the client sees the notice and then the answer.
    """
    watch = bench.watch("local")
    # Above 80 % by itself, without the room for an answer: the server is asked for the exact number.
    messages = talk("first", ONE_ROUND + 600)
    answer = bench.proxy.stream("local", messages)
    (record,) = watch.chats
    assert len(watch.summaries) == 1
    assert watch.problems(messages) == []
    assert (
        record.prompt_tokens < 0.5 * WINDOW < 0.8 * WINDOW < int(answer.headers["x-litellm-compaction-tokens-before"])
    )
    assert SUMMARY in text_of(watch.sent()[1])
    assert "Let us work on first." in text_of(watch.sent()[1])
    assert answer.text == f"{_NOTICES}Understood."
    assert answer.headers["x-litellm-compaction"] == "compacted"


def test_02_below_the_trigger_nothing_is_changed(bench: Bench) -> None:
    """Below the trigger messages and tools are sent as they came.

    Only the answer is bounded.
    """
    watch = bench.watch("local")
    messages, schemas = [*talk("short", 2500), *tool_round("tool_0", "fine")], tools(3)
    answer = bench.proxy.chat("local", messages, tools=schemas, temperature=0.2)
    (body,) = watch.bodies
    assert (body["messages"], body["tools"], body["temperature"]) == (messages, schemas, 0.2)
    assert set(body) == {"model", "messages", "tools", "temperature", "max_tokens"}
    assert watch.chats[0].prompt_tokens + body["max_tokens"] <= WINDOW
    assert answer.json()["choices"][0]["message"]["content"] == "Understood."
    assert answer.headers["x-litellm-compaction"] == "none"


def test_03_tool_results_that_overflow_are_kept(bench: Bench) -> None:
    """Tool results that do not fit beside the history stay whole, with their calls, and the history is compacted."""
    watch = bench.watch("local")
    history = talk("tool overflow", 4500)
    round_ = tool_round("read_file", prose("file", 2600), "000000001")
    second = tool_round("list_files", prose("list", 600), "000000002")
    round_[0]["tool_calls"] += second[0]["tool_calls"]
    messages = [*history, *round_, second[1]]
    answer = bench.proxy.chat("local", messages)
    assert (answer.status_code, answer.headers["x-litellm-compaction"]) == (200, "compacted")
    assert watch.sent()[-3:] == messages[-3:]
    assert watch.problems(messages) == []


def test_04_one_result_too_large_is_refused(bench: Bench) -> None:
    """One tool result larger than what can fit is refused with the tool's name, tokens, window and remedy."""
    watch = bench.watch("local")
    messages = [*talk("too large", 900), *tool_round("read_file", prose("huge", 12_000))]
    answer = bench.proxy.post({"model": "local", "messages": messages, "stream": True})
    said = answer.json()["error"]["message"]
    assert answer.status_code == 400
    for part in (r"result of tool read_file \d+ tokens", "maximum context length is 8192", "oversized_tool_result"):
        assert re.search(part, said), said
    assert re.search(r"context length of at least \d+ tokens", said)
    assert (watch.chats, watch.summaries) == ([], [])


def test_05_stream_is_restarted_at_ninety_percent(bench: Bench) -> None:
    """An answer that fills the window to 90 % is stopped, compacted and continued in the same response."""
    # Behind the limit the server waits until it is stopped, however late that comes on a busy machine.
    watch = bench.watch("middle", Teller(Reply(LONG, gate=shut(), gate_after_tokens=3800)))
    messages = asked("a long answer")
    answer = bench.proxy.stream("middle", messages)
    assert stream_problems(answer) == []
    assert without_restarts(answer.text) == LONG
    restarts = answer.text.count(START_NOTICE)
    assert restarts == answer.text.count(DONE_NOTICE) == len(watch.chats) - 1 >= 1
    stopped = watch.chats[0]
    assert stopped.outcome == "disconnected"
    # By our count, which errs high for this family; the server's own is a little lower.
    assert 0.75 * 4096 <= stopped.prompt_tokens + stopped.completion_tokens <= 0.96 * 4096
    assert [watch.problems(messages, index) for index in range(len(watch.chats))] == [[]] * len(watch.chats)


def test_06_restarts_end_with_a_notice(bench: Bench) -> None:
    """An answer without end is restarted three times, and then ends with the notice of that."""
    endless = "\n".join(f"{n}: {prose(f'endless {n}', 12)}" for n in range(900))
    watch = bench.watch("story", Teller(Reply(endless)))
    answer = bench.proxy.stream("story", asked("endless"))
    assert stream_problems(answer) == []
    assert (len(watch.chats), answer.finish_reasons) == (4, ["length"])
    whole, _, rest = without_restarts(answer.text).partition(f"\n\n{ATTEMPTS_NOTICE}")
    assert rest == ""
    assert endless.startswith(whole)


def test_07_answer_that_is_not_streamed_is_continued(bench: Bench) -> None:
    """An answer that is not streamed and stops at the window comes back whole, as one answer."""
    watch = bench.watch("story", Teller(Reply(TEXTS["table"])))
    body = bench.proxy.chat("story", asked("a whole answer")).json()
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXTS["table"], "stop")
    assert [record.finish_reason for record in watch.chats] == ["length"] * (len(watch.chats) - 1) + ["stop"]
    assert body["usage"]["compaction"]["restarts"] == len(watch.chats) - 1 >= 1
    assert body["usage"]["prompt_tokens"] == watch.chats[0].prompt_tokens


def test_08_pruning_model_and_its_failure(bench: Bench) -> None:
    """The configured pruning model writes the summary; if it fails, the same model; if that fails too, no model."""
    fails = answers(Reply(fault=Fault("500")))
    found = []
    for topic, pruner_script, own_script in (
        ("other model", answers(), answers()),
        ("other model fails", fails, answers()),
        ("every model fails", fails, fails),
    ):
        pruner, own = bench.watch("pruner", pruner_script), bench.watch("pruned", own_script)
        messages = talk(topic, ONE_ROUND)
        answer = bench.proxy.chat("pruned", messages)
        assert (answer.status_code, answer.headers["x-litellm-compaction"]) == (200, "compacted")
        assert own.problems(messages) == []
        assert f"Let us work on {topic}." in text_of(own.sent()[1])
        found.append((len(pruner.summaries), len(own.summaries), SUMMARY in text_of(own.sent()[1])))
    # A model that has told no number yet may be shown the first text in parts.
    assert found in ([(first, 0, True), (1, 1, True), (1, 1, False)] for first in (1, 2, 3))
    assert bench.proxy.expect_logged(r"WARNING: compacted model=pruned .* pruning_model=pruned .* reason=error")
    assert bench.proxy.expect_logged(r"WARNING: fallback model=pruned .* reason=error")


def test_09_three_strategies(bench: Bench) -> None:
    """Each of the three strategies sends what it is documented to send."""

    def script(call: ChatCall) -> Reply:
        wrote = edit_plan(text_of(call.messages[-1]), _SAID) or f"### Current state\n{_SAID}"
        return Reply(wrote if is_summary_call(call.body) else "Understood.")

    shapes = {}
    for strategy in ("summary", "prune", "handoff"):
        watch = bench.watch(strategy, script)
        messages = talk(f"by {strategy}", ONE_ROUND)
        assert bench.proxy.chat(strategy, messages).headers["x-litellm-compaction"] == "compacted"
        assert watch.problems(messages) == []
        assert bench.proxy.expect_logged(rf"INFO: compacted model={strategy} .* calls=1 ")
        sent = watch.sent()
        assert _SAID in text_of(sent[1])
        if strategy == "handoff":
            assert [message["role"] for message in sent] == ["system", "user"]
            assert text_of(sent[1]).endswith(f"Last request from user was: {text_of(messages[-1])}")
        else:
            assert sent[-5:] == messages[-5:]
        if strategy == "prune":
            # Shortened ones show pieces of themselves.
            whole = "\n".join(map(text_of, messages))
            assert all(piece.strip() in whole for each in sent[2:] for piece in text_of(each).split("[…]"))
        shapes[strategy] = len(sent)
    assert shapes["handoff"] < shapes["summary"] < shapes["prune"]


def test_10_families(bench: Bench) -> None:
    """A model's family is known by its architecture and name, and says by which vocabulary prompts are counted."""
    told = bench.proxy.client.get("/compaction/deployments", headers=bench.proxy.headers).json()["deployments"]
    counting = {row[name]: row["facts"].get("counting", "") for row in told for name in ("model_name", "model")}
    for name, (_, family) in _FAMILIES.items():
        assert counting[name].startswith(f"as {family}"), (name, counting[name])


def test_11_window_that_nobody_knows(bench: Bench, office: Office) -> None:
    """Without a known window a request is refused with the text of the specification."""
    since = len(office.plain.requests)
    answer = bench.proxy.chat("deaf", talk("deaf", 300))
    said = "Context limit not available for deaf. Please ensure model metadata is correct."
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert bench.proxy.expect_logged(f"ERROR.*{re.escape(said)}")
    assert office.plain.posts(since) == []


def test_12_other_providers_are_untouched(bench: Bench, office: Office) -> None:
    """A provider that is not guarded gets the client's own request, however long, and its answer comes as it is.

    Byte for byte beside a proxy without the plug-in: `test_untouched.py`.
    """
    messages = talk("untouched", 30_000)
    bench.proxy.chat("plain", messages[:2])
    since = len(office.plain.requests)
    answer = bench.proxy.chat("plain", messages, temperature=0.5)
    (request,) = office.plain.posts(since)
    assert request.json == {"model": "plain-model", "messages": messages, "temperature": 0.5}
    assert answer.json()["choices"][0]["message"]["content"] == "Four plain words here."
    assert not [name for name in answer.headers if name.startswith("x-litellm-compaction")]


def test_13_other_provider_opts_in(bench: Bench, office: Office) -> None:
    """Another provider is guarded where its deployment opts in."""
    messages = talk("opting in", ONE_ROUND)
    since = len(office.plain.requests)
    answer = bench.proxy.chat("opted", messages)
    assert answer.headers["x-litellm-compaction"] == "compacted"
    assert answer.headers["x-litellm-compaction-window"] == "4096"
    calls = [request.json for request in office.plain.posts(since)]
    (body,) = [call for call in calls if not is_summary_call(call) and not is_question(call)]
    assert len(body["messages"]) < len(messages)
    assert text_of(body["messages"][-1]).endswith(text_of(messages[-1]))
    assert 256 <= body["max_tokens"] < 4096


def test_14_next_turn_reuses_the_compaction(bench: Bench) -> None:
    """The next turns cost no second summary: the same bytes, and LM Studio's cache stays warm."""
    watch = bench.watch("local")
    messages = talk("reuse", ONE_ROUND)
    actions = []
    for turn in range(4):
        actions.append(bench.proxy.chat("local", messages).headers["x-litellm-compaction"])
        messages = answered(messages, "Understood.", f"Go on with {turn}.")
    assert actions == ["compacted", "reused", "reused", "reused"]
    assert len(watch.summaries) == 1
    first = watch.sent(0)
    assert all(watch.sent(index)[: len(first)] == first for index in range(4))
    cached = watch.chats[-1].cached_tokens / watch.chats[-1].prompt_tokens
    assert cached > 0.9


def test_15_notices_are_shown_and_stripped(bench: Bench) -> None:
    """What a client sends back of our notices, it alone has seen: the model reads its own words."""
    watch = bench.watch("local", answers(reply=Reply("The answer is 4.")))
    messages = talk("notices", ONE_ROUND)
    shown = bench.proxy.stream("local", messages).text
    assert shown == f"{_NOTICES}The answer is 4."
    again = bench.proxy.stream("local", answered(messages, shown, "And now?"))
    assert again.text == "The answer is 4."
    assert watch.sent()[-2] == {"role": "assistant", "content": "The answer is 4."}
    assert not re.search("Compacting conversation|Context compacted", str(watch.bodies))


def test_16_calls_and_results_stay_together(bench: Bench) -> None:
    """No tool call is ever separated from its results, over an agent's twenty turns."""
    watch = bench.watch("local")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read all of it."}]
    actions = []
    for turn in range(20):
        round_ = tool_round("read_file", prose(f"file {turn}", 420), f"{2 * turn:09d}")
        other = tool_round("read_file", prose(f"other {turn}", 60), f"{2 * turn + 1:09d}")
        round_[0]["tool_calls"] += other[0]["tool_calls"]
        messages += [*round_, other[1]]
        answer = bench.proxy.chat("local", messages)
        assert answer.status_code == 200
        assert watch.problems(messages) == []
        actions.append(answer.headers["x-litellm-compaction"])
    assert actions.count("compacted") >= 2
    assert actions[0] == "none"


def test_17_conversations_and_tenants_never_meet(bench: Bench) -> None:
    """Conversations at the same time, and the same one of another tenant, never share a word or a summary."""
    names = [f"CANARY-{name}" for name in ("ash", "birch", "cedar", "elm", "fir", "oak")]
    keys = ("sk-anna", "sk-bert", "sk-carl")

    def script(call: ChatCall) -> Reply | None:
        seen = sorted(set(re.findall("CANARY-[a-z]+", call.sent_text)))
        return Reply(f"### Current state\n{seen}") if is_summary_call(call.body) else Reply(f"{seen}")

    watch = bench.watch("shared", script)

    def ask(number: int) -> str:
        messages = talk(names[number], ONE_ROUND, system=names[number])
        answer = bench.proxy.by(keys[number % 3]).chat("shared", messages)
        assert answer.headers["x-litellm-compaction"] == "compacted"
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(ask, range(6)))
    assert said == [f"['{name}']" for name in names]
    asked = [str(record.body) for record in watch.records if record.body is not None]
    assert {len(set(re.findall("CANARY-[a-z]+", body))) for body in asked} == {1}
    calls = len(watch.summaries)
    same = talk(names[0], ONE_ROUND, system=names[0])
    answers = [bench.proxy.by(key).chat("shared", same) for key in ("sk-anna", "sk-arno", "sk-bert", "sk-carl")]
    done = [answer.headers["x-litellm-compaction"] for answer in answers]
    # Anna and Arno are of one team.
    assert done == ["reused", "reused", "compacted", "compacted"]
    assert len(watch.summaries) == calls + 2


def test_18_compactions_outlive_the_proxy(later: Bench, kept: dict[str, Any], capsys: Any) -> None:
    """After a restart of the proxy compactions are reused, and its history is still there."""
    watch = later.watch("shared")
    answer = later.proxy.chat("shared", kept["messages"])
    assert answer.headers["x-litellm-compaction"] == "reused"
    assert (watch.sent(), watch.summaries) == (kept["sent"], [])
    store = f"sqlite:///{later.folder / 'litellm_compaction' / 'store.sqlite3'}"
    capsys.readouterr()
    assert main(["events", "--json", "--last", "500", "--store", store]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    outcomes = {event.get("outcome") for event in events}
    assert {"compacted", "reused"} <= outcomes
    assert "kept over night" not in str(events)


def test_19_oversized_result_as_an_excerpt(later: Bench) -> None:
    """Where the operator allows it, a result that cannot fit is sent as its head and its tail."""
    watch = later.watch("local")
    huge = f"HEAD {prose('huge', 12_000)} TAIL"
    messages = [*talk("excerpt", 900), *tool_round("read_file", huge)]
    answer = later.proxy.chat("local", messages)
    assert answer.status_code == 200
    sent = watch.sent()[-1]
    assert (sent["role"], sent["tool_call_id"]) == ("tool", messages[-1]["tool_call_id"])
    assert sent["content"].startswith("HEAD")
    assert sent["content"].endswith("TAIL")
    left_out = re.search(r"\[… (\d+) tokens left out …\]", sent["content"])
    assert left_out is not None


def test_20_observe_off_and_opting_out(bench: Bench, later: Bench, office: Office) -> None:
    """Modes observe and off, and a request that may opt out and does, leave the request as it is."""
    messages = talk("left alone", 3700)
    for name in ("observed", "off", "opted out"):
        watch = later.watch(name)
        answer = later.proxy.chat(name, messages, metadata={"compaction": "off"} if name == "opted out" else {})
        assert answer.status_code == 200
        assert watch.sent() == messages
        assert "max_tokens" not in watch.bodies[0]
        assert watch.summaries == []
    # What LiteLLM makes a chat of as well, although it leaves the conversation before it out.
    asked = {"model": "opted out", "input": "Go on.", "conversation": {"id": "conv_abc"}}
    for more, status in (({}, 400), ({"metadata": {"compaction": "off"}}, 200)):
        assert later.proxy.stream_body({**asked, **more, "stream": False}, "/v1/responses").status == status
    # By each route it is the call of a deployment that is not guarded.
    off: dict[str, Any] = {"metadata": {"compaction": "off"}, "extra_body": {"stream": False}, "stream": False}
    for path, asked in (("/v1/chat/completions", {"messages": messages}), ("/v1/responses", {"input": "Go on."})):
        for name in ("plain", "opted"):
            later.proxy.post({**asked, **off, "model": name}, path)
        plain, opted = office.plain.posts()[-2:]
        assert (opted.path, {**opted.json, "model": 0}) == (plain.path, {**plain.json, "model": 0})
    assert later.proxy.expect_logged(r"observed model=observed .*reason=summary")
