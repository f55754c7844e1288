"""What is written while nobody waits, on a real engine with one slot: its cache, and who comes meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.builders import prose
from tests.integration.harness import Proxy, lm_studio, proxy, write_config
from tests.real_engine.engine import Engine
from tests.real_engine.shim import Exchange, Shim, serve

_WINDOW = 2048
_TURNS, _WORDS = 6, 88
_INSTRUCTION = "You write the record"
# One that is used: what the model would write by itself is rejected now and then.
_RECORD = r'root ::= "### Current state\n- Every question so far was answered in one word."'
# What the template puts around a message, and words that are two tokens.
_AROUND = 30
_LIMIT_S = 300.0


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[tuple[Proxy, Shim]]:
    """A proxy that writes ahead, in front of an engine whose summaries are short."""
    settings = {
        "background": "idle",
        "tokenizer": str(weights),
        "summary_max_tokens": 64,
        "answer_min_tokens": 48,
        "summary_timeout_s": _LIMIT_S,
    }
    engine = Engine(weights, _WINDOW)
    with ExitStack() as stack:
        stack.callback(engine.kill)
        engine.start()
        shim = stack.enter_context(serve({"talk": engine}))
        router = {"num_retries": 0, "disable_cooldowns": True}
        folder = tmp_path_factory.mktemp("idle")
        config = write_config(folder, [lm_studio("talk", "talk", shim.base_url)], settings, router_settings=router)
        yield stack.enter_context(proxy(config)), shim


def _talk(topic: str, words: int = _WORDS) -> list[dict[str, Any]]:
    """Some 65 % of the window, less with fewer words at its end: each is a token.

    Only the end is of the topic, so that the rest is read once.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer in one word."}]
    for turn in range(_TURNS):
        messages += [
            {"role": "user", "content": f"Question {turn}: {prose(f'q{turn}', _WORDS)}"},
            {"role": "assistant", "content": f"Yes, {prose(f'a{turn}', _WORDS)}"},
        ]
    return [*messages, {"role": "user", "content": prose(f"{topic} end", words)}]


def _ask(proxy: Proxy, messages: list[dict[str, Any]], action: str = "none") -> str:
    answer = proxy.chat("talk", messages, temperature=0, max_tokens=16)
    assert answer.status_code == 200
    assert answer.headers["x-litellm-compaction"] == action
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def _summary(shim: Shim, since: int) -> Exchange | None:
    return next((each for each in shim.exchanges[since:] if each.asked_text.startswith(_INSTRUCTION)), None)


def _until(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < limit_s, "it never happened"
        # The engine's process works: there is nothing to wait for but the next look.
        time.sleep(0.02)


def _next(messages: list[dict[str, Any]], answer: str, text: str) -> list[dict[str, Any]]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": text}]


def test_no_turn_reads_more_than_what_is_new(idle: tuple[Proxy, Shim], monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary reads its instruction alone, and the turn after it what is new: the chat's cache survives it.

    The one after that crosses the trigger as its like were expected to, and finds the compacted prompt read.
    """
    running, shim = idle
    monkeypatch.setitem(shim.grammars, _INSTRUCTION, _RECORD)
    messages = _talk("kept", 40)
    answer = _ask(running, messages)
    # Behind what the first prompt of a model that is not known is asked about.
    since = len(shim.exchanges) - 1
    running.expect_logged("prepared model=talk ")
    messages = _next(messages, answer, prose("near", 70))
    answer = _ask(running, messages)
    _until(lambda: len(shim.exchanges) == since + 4 and shim.exchanges[-1].ended.is_set())
    _ask(running, _next(messages, answer, prose("over", _WORDS)), "reused")
    first, summary, after, reading, over = shim.answers("talk", since=since)
    assert summary.cached_tokens >= first.prompt_tokens
    assert after.prompt_tokens - after.cached_tokens <= 70 + _AROUND
    assert "Every question so far" in summary.text
    assert reading.body["max_tokens"] == 1
    assert over.prompt_tokens < 0.7 * after.prompt_tokens
    assert over.prompt_tokens - over.cached_tokens <= _WORDS + _AROUND


def test_who_comes_has_the_engine(idle: tuple[Proxy, Shim]) -> None:
    """The call behind an answer is closed, so that the only slot is free: the next answer does not wait for its end."""
    running, shim = idle
    since = len(shim.exchanges)
    _ask(running, _talk("ended"))
    _until(lambda: _summary(shim, since) is not None)
    _ask(running, [{"role": "user", "content": "Hello."}])
    summary = _summary(shim, since)
    assert summary is not None
    assert summary.ended.wait(_LIMIT_S)
    assert not summary.is_whole
