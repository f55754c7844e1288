"""The promises on a real engine: what a simulator takes for granted is what llama.cpp itself says here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import pytest

from litellm_compaction.core.messages import without_notices
from litellm_compaction.tokenizers.registry import vocabulary
from tests.builders import assistant, user
from tests.integration.harness import Proxy
from tests.real_engine.bench import IS_LONG, LLAMA_CPP, Bench
from tests.real_engine.shim import Exchange

_TEXTS = (
    "Hi.",
    "  two  spaces,\ttabs\n\n\nand lines  ",
    'def f(x):\n    return {"a": [x, 1.5e-3], "b": None}  # 100 %',
    "Größe, naïve café, Ελληνικά, русский текст, 日本語の文章, 한국어, العربية, 👩‍👩‍👧 🇪🇺",
    "the user wrote <|im_end|> and <|im_start|>system in the middle of a sentence",
    "/srv/data/2026-11-22/part-00017.parquet 9f86d081884c7d659a2feaa0c55ad015 +49 30 1234567",
)


async def test_texts_are_counted_as_the_engine_reads_them(bench: Bench) -> None:
    """By the tokenizer.json that the operator has named, control tokens in texts included."""
    words = vocabulary(f"file:{bench.tokenizer}")
    async with httpx.AsyncClient(base_url=bench.engines["talk"].base_url, timeout=60) as engine:
        for text in (*_TEXTS, " ".join(_TEXTS), "x" * 300):
            asked = {"content": text, "add_special": False, "parse_special": True}
            counted = len((await engine.post("/tokenize", json=asked)).json()["tokens"])
            assert words.lengths([text]) == [counted], text


class Turns(NamedTuple):
    """A conversation's answers, and in which of its turns it was compacted."""

    asked: list[Exchange]
    compacted: list[int]


def _thirty_turns(bench: Bench) -> Turns:
    """One and a half times the window."""
    messages: list[dict[str, Any]] = []
    compacted: list[int] = []
    begun = len(bench.shim.exchanges)
    for turn in range(30):
        fact = f"Item {turn} lies in box {turn * 37 % 101}, shelf {turn * 53 % 97}. "
        messages.append(user(fact * 4 + "Where does it lie?"))
        answer = bench.proxy.chat("talk", messages, max_tokens=6, temperature=0)
        assert answer.status_code == 200, answer.text
        if answer.headers["x-litellm-compaction"] == "compacted":
            compacted.append(turn)
        messages.append(assistant(answer.json()["choices"][0]["message"]["content"]))
    answers = bench.shim.answers("talk", since=begun)
    # Without summaries, and readings ahead.
    return Turns([each for each in answers if each.body.get("max_tokens") == 6], compacted)


@pytest.fixture(scope="module")
def turns(bench: Bench) -> Iterator[Future[Turns]]:
    """A conversation that goes on beside the other tests, on an engine and a core of its own: it takes the longest."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(_thirty_turns, bench)


@pytest.fixture(scope="module", autouse=True)
def _begin_early(request: pytest.FixtureRequest) -> None:
    """The conversation begins before the first test, where a test that is run looks at it."""
    if any("turns" in item.fixturenames for item in request.session.items if isinstance(item, pytest.Function)):
        request.getfixturevalue("turns")


# Fills two thirds of the window, so that a restart comes soon; the same for all routes, so that it is read once.
_NOTES = "\n".join(f"{n}. On day {n} the ship made {n * 37 % 90 + 40} miles." for n in range(1, 18))
_TASK = "Write a long story about this ship and its crew."
_TALK = [user(f"These are notes of a voyage:\n{_NOTES}"), assistant("I have read them."), user(_TASK)]
_ANSWER_TOKENS = 135


def _chat(proxy: Proxy) -> tuple[str, str]:
    answer = proxy.stream("small", _TALK, max_tokens=_ANSWER_TOKENS, temperature=0)
    assert answer.status == 200, answer.raw
    assert len({chunk["id"] for chunk in answer.chunks}) == 1
    (reason,) = answer.finish_reasons
    return answer.text, reason


def _whole_chat(proxy: Proxy) -> tuple[str, str]:
    answer = proxy.chat("small", _TALK, max_tokens=_ANSWER_TOKENS, temperature=0).json()
    return answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]


@pytest.mark.parametrize("ask", [_chat, _whole_chat])
def test_an_answer_goes_on_past_the_window(bench: Bench, ask: Any) -> None:
    """What the engine said in several answers is one text, to the client's own limit and not further."""
    begun = len(bench.shim.exchanges)
    answer, reason = ask(bench.proxy)
    # The first prompt of a model that is not known is asked about: one token of answer.
    exchanges = [each for each in bench.shim.answers("small", since=begun) if each.body.get("max_tokens") != 1]
    # Its template is none of ours, so it goes on behind the answer's end as the last message.
    assert len(exchanges) >= 2
    assert [exchange.error for exchange in exchanges] == [""] * len(exchanges)
    assert all(exchange.total_tokens <= bench.engines["small"].window_tokens for exchange in exchanges)
    assert reason == "length"
    text = without_notices(answer)
    assert text.startswith(exchanges[0].text.rsplit(None, 1)[0])
    assert text.endswith(exchanges[-1].text[-40:])


# Each fits by itself; together they need a fifth more than the context has.
_BEINGS = ("lighthouse keeper", "robot gardener", "deep sea diver", "mountain guide")
_LOG = [f"{n}. The station noted {n * 53 % 97} birds and {n * 37 % 41} ships." for n in range(1, 61)]
_LOG_LINES, _SHARED_ANSWER_TOKENS = (50, 350) if IS_LONG else (3, 60)


@pytest.mark.full
@pytest.mark.parametrize("model", ["pool", LLAMA_CPP])
def test_four_answers_beside_each_other_are_whole(bench: Bench, model: str) -> None:
    """Over one unified cache, which a full one ends for all: listed by LM Studio, or by llama.cpp's own /props.

    Two of them are streamed, two are not. `TESTS_LONG_ANSWERS=1` has them four times as long.
    """
    window = bench.engines["pool"].window_tokens
    begun = len(bench.shim.exchanges)
    log = "\n".join(_LOG[:_LOG_LINES])

    def ask(being: str) -> Said:
        asked = [user(f"A {being} keeps this log:\n{log}\nWrite a long story about the {being}.")]
        options: dict[str, Any] = {"max_tokens": _SHARED_ANSWER_TOKENS, "temperature": 0}
        if being in _BEINGS[::2]:
            streamed = bench.proxy.stream(model, asked, stream_options={"include_usage": True}, **options)
            return Said(streamed.status, streamed.text, streamed.finish_reasons, streamed.usages[-1])
        answer = bench.proxy.chat(model, asked, **options)
        (choice,) = answer.json()["choices"]
        return Said(answer.status_code, choice["message"]["content"], [choice["finish_reason"]], answer.json()["usage"])

    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(ask, _BEINGS))
    exchanges = bench.shim.answers("pool", since=begun)
    prompt_tokens = min(each.prompt_tokens for each in exchanges if each.prompt_tokens)
    assert 4 * (prompt_tokens + _SHARED_ANSWER_TOKENS) > 1.1 * window
    assert [answer.status for answer in answers] == [200] * 4
    assert [answer.finish_reasons for answer in answers] == [["length"]] * 4
    assert [answer.usage["completion_tokens"] for answer in answers] == [_SHARED_ANSWER_TOKENS] * 4
    # No answer was ended by the cache, and none was made anew.
    assert [exchange.error for exchange in exchanges] == [""] * len(exchanges)
    assert not any("compaction" in answer.usage for answer in answers)
    assert [_parts(answer.text, exchanges) for answer in answers] == [""] * 4


class Said(NamedTuple):
    """An answer as its client has it, streamed or whole."""

    status: int
    text: str
    finish_reasons: list[str]
    usage: dict[str, Any]


def _parts(answer: str, exchanges: Sequence[Exchange]) -> str:
    """What of an answer the engine has not said, in one go or, stopped for others in between, in several."""
    rest = answer
    while rest.strip():
        said = next((each.text for each in exchanges if each.text and rest.startswith(each.text.rstrip())), "")
        if not said:
            break
        rest = rest[len(said.rstrip()) :].lstrip()
    return rest.strip()


@pytest.mark.full
def test_thirty_turns_overflow_nothing_and_keep_the_prompt_cache(bench: Bench, turns: Future[Turns]) -> None:
    """Every turn was answered, nothing cut, and the cache held the last turn."""
    asked, compacted = turns.result()
    assert [exchange.error for exchange in asked if exchange.error] == []
    assert len(asked) == 30
    assert max(exchange.total_tokens for exchange in asked) <= bench.engines["talk"].window_tokens
    assert 2 <= len(compacted) <= 5
    for turn, (before, after) in enumerate(pairwise(asked), 1):
        if turn not in compacted:
            # All of the last prompt and its answer, but for what the template ends an answer with.
            assert after.cached_tokens >= before.total_tokens - 2, turn
