"""Two real proxies that share one store, in front of the same models: one summary, one context."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import httpx
import pytest

from tests.builders import ONE_ROUND, prose, talk
from tests.integration.bench import SUMMARY, Bench, Group, Watch, is_summary_call, open_bench
from tests.integration.harness import CHAT, Proxy, Streamed, proxy, until
from tests.integration.restart_bench import shut, stream_problems, without_restarts
from tests.lmstudio_double import ChatCall, Gate, Reply, RequestRecord
from tests.stores.servers import Server, any_program, running

pytestmark = pytest.mark.proxy

_WINDOW = 4096
# In the middle of a rolling restart: contexts that answers share, and models whose conversations are compacted.
_POOLS = tuple(f"rolling-pool-{number}" for number in range(2))
_LONG = tuple(f"rolling-long-{number}" for number in range(2))
_GROUPS = [
    # Far ahead of a busy proxy that reads four answers.
    Group("pool", _WINDOW, simulator={"tokens_per_second": 1000.0, "chunk_tokens": 4}),
    Group("alike", 8192),
    *(Group(name, _WINDOW, simulator={"chunk_tokens": 48}) for name in _POOLS),
    *(Group(name, 8192, slots=1, simulator={"chunk_tokens": 48}) for name in _LONG),
]


TAGS = ("alpha", "beta", "gamma", "delta")
_WORDS = 600


def words(tag: str) -> list[str]:
    return [f"{tag}{number}" for number in range(1, _WORDS + 1)]


def counting(call: ChatCall) -> Reply:
    """Counts in the client's own words, and goes on after the last word that it sees."""
    if is_summary_call(call.body):
        return Reply(SUMMARY)
    tag = re.findall(r"count (\w+)", call.sent_text)[0]
    done = re.findall(rf"{tag}(\d+)", call.sent_text)
    return Reply(" ".join(words(tag)[int(done[-1]) if done else 0 :]))


def held_tokens(records: Sequence[RequestRecord], at_s: float) -> int:
    """What the prompts and bounds of all that ran at a time could have come to together."""
    running = [each for each in records if each.started_s <= at_s < (each.ended_s or inf)]
    return sum(each.prompt_tokens + (each.body or {})["max_tokens"] for each in running)


@dataclass
class Fleet:
    """Two proxies with the same configuration and the same data folder."""

    bench: Bench
    proxies: tuple[Proxy, Proxy]
    redis: Server | None

    def leases_s(self) -> list[float]:
        """For how long the processes hold what they hold right now, of a fleet with a Redis.

        For what one has read of a server, a digest, nobody waits.
        """
        assert self.redis is not None
        keys = re.findall(rb"compaction:\S+:board", self.redis.says("KEYS", "*:board"))
        ends_ms = [re.findall(rb"\n(\d{13}) (?![0-9a-f]{64} )", self.redis.says("HVALS", key.decode())) for key in keys]
        return [int(end_ms) / 1000 - time.time() for note in ends_ms for end_ms in note]


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Both ended by their own handles."""
    settings: dict[str, Any] = {"summary_timeout_s": 300, "admission_timeout_s": 300}
    with ExitStack() as stack:
        redis = stack.enter_context(running(any_program())) if request.param == "redis" else None
        if redis is not None:
            settings["store"] = redis.url
        folder = tmp_path_factory.mktemp("fleet")
        bench = stack.enter_context(open_bench(folder, _GROUPS, settings, process=True))
        second = stack.enter_context(proxy(folder / "config.yaml"))
        yield Fleet(bench, (bench.proxy, second), redis)


@dataclass(frozen=True)
class _Conversation:
    """One client's, in the middle of a rolling restart."""

    group: str
    tag: str
    messages: list[dict[str, Any]]

    @property
    def is_long(self) -> bool:
        return self.group in _LONG

    def problems(self, answer: Streamed) -> list[str]:
        """Why an answer is not whole, as one that just ends would not be."""
        text = without_restarts(answer.text)
        is_whole = text.endswith("Fine.") if self.is_long else text.split() == words(self.tag)
        return [*stream_problems(answer), *([] if is_whole else [f"{self.tag}: {text[-200:]!r}"])]


def _conversations() -> list[_Conversation]:
    counted = [(group, f"c{at}x{number}") for at, group in enumerate(_POOLS) for number in range(4)]
    talked = [(group, f"{group}-{number}") for group in _LONG for number in range(4)]
    return [
        *(_Conversation(group, tag, [{"role": "user", "content": f"count {tag}"}]) for group, tag in counted),
        *(_Conversation(group, tag, talk(tag, ONE_ROUND)) for group, tag in talked),
    ]


def test_long_answers_through_both_proxies_never_overflow_the_context(fleet: Fleet) -> None:
    """Four, two through each, streamed and whole: all complete, and at no time could they have outgrown it together."""
    fleet.bench.watch("pool", lambda _: Reply("Warm."))
    for each in fleet.proxies:
        # So that all begin at the same moment.
        assert each.chat("pool", [{"role": "user", "content": "Hello."}], max_tokens=16).status_code == 200
    watch = fleet.bench.watch("pool", counting)

    def answer(at: int) -> str:
        tag, through = TAGS[at], fleet.proxies[at % 2]
        messages = [{"role": "user", "content": f"count {tag}"}]
        if at < 2:
            return without_restarts(through.stream("pool", messages).text)
        content: str = through.chat("pool", messages).json()["choices"][0]["message"]["content"]
        return content

    with ThreadPoolExecutor(len(TAGS)) as clients:
        answers = list(clients.map(answer, range(len(TAGS))))
    assert [text.split() for text in answers] == [words(tag) for tag in TAGS]
    assert "pool_overflow" not in {record.outcome for record in watch.records}
    assert max(held_tokens(watch.chats, at.started_s) for at in watch.chats) <= _WINDOW


@pytest.mark.parametrize("fleet", ["redis"], indirect=True)
def test_a_rolling_restart_in_the_middle_of_16_streams_costs_nobody_anything(fleet: Fleet) -> None:
    """Every client gets its whole answer, nobody new is let in, and the next turns go on with what was stored.

    Nothing of the old proxies is left that others would wait for.
    """
    middle, conversations, sent = Gate(), _conversations(), Counter[str]()

    def script(call: ChatCall) -> Reply:
        reply = counting(call) if "count c" in call.sent_text else Reply("It is. Fine.")
        return reply if is_summary_call(call.body) else replace(reply, gate=middle, gate_after_tokens=2)

    watches = {name: fleet.bench.watch(name, script) for name in (*_POOLS, *_LONG)}
    with ExitStack() as stack:
        old = [stack.enter_context(proxy(fleet.bench.folder / "config.yaml")) for _ in range(2)]
        clients = stack.enter_context(ThreadPoolExecutor(len(conversations)))
        stack.callback(middle.open)
        streams = [clients.submit(_streamed, old[number % 2], each, sent) for number, each in enumerate(conversations)]
        # Of each model's four some are answered, the others wait for room beside them, or for their summary.
        until(lambda: all(_begun(watch) for watch in watches.values()) and sent.total() == len(conversations))
        for each in old:
            # Whatever came before this has arrived, too.
            assert each.client.get("/health/liveliness").is_success
            each.process.terminate()
            each.expect_logged("Waiting for connections to close")
            with pytest.raises(httpx.ConnectError):
                each.chat("alike", [{"role": "user", "content": "Hello."}])
        assert not any(stream.done() for stream in streams)
        middle.open()
        answers = [stream.result() for stream in streams]
        for each in old:
            each.process.wait(60)
            each.expect_logged("Application shutdown complete")
    found = [problem for each, answer in zip(conversations, answers, strict=True) for problem in each.problems(answer)]
    assert found == []
    # Only that a summary has just been made is told a moment longer.
    assert [each for each in fleet.leases_s() if each > 1] == []
    summaries = sum(len(watch.summaries) for watch in watches.values())
    for number, each in enumerate(conversations):
        if each.is_long:
            said = {"role": "assistant", "content": without_restarts(answers[number].text)}
            known_ways = [*each.messages, said, {"role": "user", "content": "Go on."}]
            answer = fleet.proxies[number % 2].stream(each.group, known_ways)
            assert answer.headers["x-litellm-compaction"] == "reused"
            assert each.problems(answer) == []
    assert sum(len(watch.summaries) for watch in watches.values()) == summaries


def _streamed(through: Proxy, conversation: _Conversation, sent: Counter[str]) -> Streamed:
    """The answer; `sent` counts the conversation as soon as it is on its way."""

    def trace(event: str, _info: Any) -> None:
        if event == "http11.send_request_body.complete":
            sent[conversation.tag] = 1

    body = {"model": conversation.group, "messages": conversation.messages, "stream": True}
    options = {"json": body, "headers": through.headers, "extensions": {"trace": trace}}
    with through.client.stream("POST", CHAT, **options) as answer:
        return Streamed(answer.status_code, answer.headers, answer.read())


def _begun(watch: Watch) -> bool:
    """Whether the first words of an answer are there."""
    return any(record.first_delta_s is not None for record in watch.chats)


def test_a_proxy_that_is_killed_stops_the_others_for_seconds_only(fleet: Fleet) -> None:
    """What it held is free when its lease ends; until then nobody comes beside an answer that may still be there."""
    holding = shut()

    def script(call: ChatCall) -> Reply:
        return Reply(prose("held", 300), gate=holding) if "HOLD" in call.sent_text else Reply("Served.")

    watch = fleet.bench.watch("pool", script)

    def held(through: Proxy) -> None:
        # Its client is told: the answer has no end.
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            through.stream("pool", _large("HOLD"))

    with ThreadPoolExecutor(1) as clients:
        with proxy(fleet.bench.folder / "config.yaml") as third:
            holder = clients.submit(held, third)
            assert holding.reached.wait(120)
            third.process.kill()
            answer = fleet.proxies[0].chat("pool", _large("second"), max_tokens=60)
            assert answer.json()["choices"][0]["message"]["content"] == "Served."
        holder.result()
    assert {record.outcome for record in watch.chats} == {"disconnected", "ok"}


def _large(word: str) -> list[dict[str, Any]]:
    """Two of them do not fit beside each other."""
    return [{"role": "user", "content": f"{word} {prose(word, 2200)}"}]
