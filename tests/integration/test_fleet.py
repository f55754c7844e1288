"""Two real proxies that share one store, in front of the same models: one summary, one context."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from threading import Event
from typing import Any

import httpx
import pytest

from litellm_compaction.simulator import ChatCall, Reply
from tests.builders import ONE_ROUND, prose, talk
from tests.integration.bench import SUMMARY, Bench, Group, Watch, is_summary_call, open_bench
from tests.integration.harness import Proxy, proxy
from tests.integration.restart_bench import shut, without_restarts
from tests.stores.servers import any_program, running

pytestmark = pytest.mark.proxy

_WINDOW = 4096
_GROUPS = [
    # Far ahead of a busy proxy that reads four answers.
    Group("pool", _WINDOW, simulator={"tokens_per_second": 1000.0, "chunk_tokens": 4}),
    Group("alike", 8192),
]
_TAGS = ("alpha", "beta", "gamma", "delta")
_WORDS = 600


@dataclass
class Fleet:
    """Two proxies with the same configuration and the same data folder."""

    bench: Bench
    proxies: tuple[Proxy, Proxy]


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Both ended by their own handles."""
    settings: dict[str, Any] = {"summary_timeout_s": 300, "admission_timeout_s": 300}
    with ExitStack() as stack:
        if request.param == "redis":
            settings["store"] = stack.enter_context(running(any_program())).url
        folder = tmp_path_factory.mktemp("fleet")
        router = {"num_retries": 0, "disable_cooldowns": True}
        bench = stack.enter_context(open_bench(folder, _GROUPS, settings, router_settings=router))
        second = stack.enter_context(proxy(folder / "config.yaml"))
        yield Fleet(bench, (bench.proxy, second))


def _words(tag: str) -> list[str]:
    return [f"{tag}{number}" for number in range(1, _WORDS + 1)]


def _counting(call: ChatCall) -> Reply:
    """Counts in the client's own words, and goes on after the last word that it sees."""
    if is_summary_call(call.body):
        return Reply(SUMMARY)
    tag = re.findall(r"count (\w+)", call.sent_text)[0]
    done = re.findall(rf"{tag}(\d+)", call.sent_text)
    return Reply(" ".join(_words(tag)[int(done[-1]) if done else 0 :]))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_long_answers_through_both_proxies_never_overflow_the_context(fleet: Fleet, stream: bool) -> None:
    """Four, two through each, together more than the window: all complete, and at no time could they have outgrown it.

    When each proxy knew of its own only, all four were ended by an overflow and begun again (2026-11-23).
    """
    fleet.bench.watch("pool", lambda _: Reply("Warm."))
    for each in fleet.proxies:
        # So that all begin at the same moment.
        assert each.chat("pool", [{"role": "user", "content": "Hello."}], max_tokens=16).status_code == 200
    watch = fleet.bench.watch("pool", _counting)

    def answer(at: int) -> str:
        tag, through = _TAGS[at], fleet.proxies[at % 2]
        messages = [{"role": "user", "content": f"count {tag}"}]
        if stream:
            return without_restarts(through.stream("pool", messages).text)
        content: str = through.chat("pool", messages).json()["choices"][0]["message"]["content"]
        return content

    with ThreadPoolExecutor(len(_TAGS)) as clients:
        answers = list(clients.map(answer, range(len(_TAGS))))
    assert [text.split() for text in answers] == [_words(tag) for tag in _TAGS]
    assert "pool_overflow" not in {record.outcome for record in watch.records}
    assert max(_held_tokens(watch, at.started_s) for at in watch.chats) <= _WINDOW


def _held_tokens(watch: Watch, at_s: float) -> int:
    """What the prompts and bounds of all that ran at a time could have come to together."""
    running = [each for each in watch.chats if each.started_s <= at_s < (each.ended_s or inf)]
    return sum(each.prompt_tokens + (each.body or {})["max_tokens"] for each in running)


def test_the_same_request_through_both_proxies_makes_one_summary(fleet: Fleet) -> None:
    """The second waits for the first one's, and both go on with the same bytes."""
    writing = shut()

    def script(call: ChatCall) -> Reply:
        return Reply(SUMMARY, gate=writing) if is_summary_call(call.body) else Reply("Fine.")

    watch = fleet.bench.watch("alike", script)
    messages = talk("fleet", ONE_ROUND)
    with ThreadPoolExecutor(2) as clients:
        first = clients.submit(fleet.proxies[0].stream, "alike", messages)
        assert writing.reached.wait(120)
        waits = Event()
        second = clients.submit(_read, fleet.proxies[1], messages, waits)
        assert waits.wait(120)
        assert len(watch.summaries) == 1
        writing.open()
        texts = [first.result().text, second.result()]
    assert all(text.endswith("Fine.") for text in texts)
    assert len(watch.summaries) == 1
    asked = [record.body for record in watch.chats if record.body and not is_summary_call(record.body)]
    assert len(asked) == 2
    assert asked[0]["messages"] == asked[1]["messages"]


def test_a_proxy_that_is_killed_stops_the_others_for_seconds_only(fleet: Fleet) -> None:
    """What it held is free when its lease ends; until then nobody comes beside an answer that may still be there."""
    holding = shut()

    def script(call: ChatCall) -> Reply:
        return Reply(prose("held", 300), gate=holding) if "HOLD" in call.sent_text else Reply("Served.")

    watch = fleet.bench.watch("pool", script)

    def held(through: Proxy) -> None:
        with contextlib.suppress(httpx.HTTPError):
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


def _read(through: Proxy, messages: Any, begun: Event) -> str:
    """The text of an answer; `begun` when its first words are there, which is when it has to wait."""
    body = {"model": "alike", "messages": messages, "stream": True}
    with through.client.stream("POST", "/v1/chat/completions", json=body, headers=through.headers) as answer:
        lines: list[str] = []
        for line in answer.iter_lines():
            lines.append(line)
            if line.startswith("data:"):
                begun.set()
    return _text(lines)


def _text(lines: list[str]) -> str:
    return "".join(re.findall(r'"content":"((?:[^"\\]|\\.)*)"', "\n".join(lines)))
