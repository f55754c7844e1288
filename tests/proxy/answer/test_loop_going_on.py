"""How servers are made to go on with an answer: the best way that each takes, learned, and paid for by nobody twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.core.messages import Message
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.proxy.answer.sse import UpstreamDropped, UpstreamError
from litellm_compaction.windows.windows import Source, Target
from tests.builders import prose, talk
from tests.lmstudio_double import Reply, numbered_words
from tests.proxy.scripted import RESTARTED, Scene, Turn, goes_on, summarized

SHORT = [{"role": "user", "content": "Count."}]
WORDS = numbered_words(1100)
REFUSED = Turn(refusal=UpstreamError("unexpected endpoint or method"))


def scene(*turns: Turn, source: Source = "operator", model: str = "llama-3.1-8b-instruct", **changes: Any) -> Scene:
    """A scene before an LM Studio, or before a server that says its window by another API."""
    made = Scene(SHORT, turns, **changes)
    target = Target(
        key="k",
        model=model,
        api_base=None,
        api_key=None,
        context_length=made.window_tokens,
        context_source=source,
        is_lmstudio=source == "operator",
    )
    made.context = replace(made.context, target=target)
    return made


def ways(made: Scene) -> list[str]:
    return [str(opened.goes_on.continuation.way) for opened in made.server.opened if opened.goes_on is not None]


async def test_without_a_known_template_the_answer_is_the_last_message() -> None:
    """The server renders it; of one that goes on nowhere we ask in the user's place, as before."""
    made = scene(Turn(reply=goes_on(WORDS)), model="unknown-7b")
    assert (await made.read()).text == WORDS
    assert set(ways(made)) == {"prefill"}
    made = scene(Turn(reply=goes_on(WORDS)), model="unknown-7b", source="ollama")
    assert (await made.read()).text == WORDS
    assert set(ways(made)) == {"turn"}


@pytest.mark.parametrize(("factor", "restarts"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("is_whole", [False, True])
async def test_an_answer_that_ends_at_a_doubted_bound_goes_on_by_the_told_number(
    factor: int, restarts: int, is_whole: bool
) -> None:
    """Nothing is compacted, counted or announced unless the server's own number leaves no room for more."""
    text, window = numbered_words(2100), 8192
    turns = [Turn(reply=goes_on(text), prompt_tokens=factor * 1700), Turn(reply=goes_on(text))]
    made = Scene(talk("doubt", 1700), turns, window_tokens=window, is_whole=is_whole)
    read = await made.read()
    assert (read.text, read.finish_reasons, read.shape_problems()) == (text, ["stop"], [])
    first, *others = made.server.opened
    assert 2 * first.prompt_tokens + first.max_tokens <= window
    assert first.completion_tokens == first.max_tokens >= window // 2
    assert len(others) == 1
    assert read.usages[-1].get("compaction", {}).get("restarts", 0) == restarts
    assert read.raw_text.count(RESTARTED) == (0 if is_whole else restarts)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("usage", [False, True])
async def test_a_call_that_a_doubted_bound_cuts_is_asked_for_once_more(usage: bool, is_whole: bool) -> None:
    """The client has nothing of it yet; a server that tells no number does not cut it again and again."""
    arguments = json.dumps({"text": prose("doubt", 1370)})
    turns = [Turn(reply=Reply("", tool_calls=[("write", arguments)]), usage=usage)]
    made = Scene(talk("doubted call", 400), turns, window_tokens=2048, is_whole=is_whole)
    read = await made.read()
    assert (read.calls, read.finish_reasons, read.raw_text) == ([("write", arguments)], ["tool_calls"], "")
    assert len(made.server.opened) == 2


@pytest.mark.parametrize(
    ("refusals", "model", "tried"),
    [
        (1, "llama-3.1-8b-instruct", ["raw", "prefill"]),
        (2, "llama-3.1-8b-instruct", ["raw", "prefill", "turn"]),
        (1, "unknown-7b", ["prefill", "turn"]),
    ],
)
async def test_one_restart_makes_one_summary(refusals: int, model: str, tried: list[str]) -> None:
    """What a server refuses is sent again in another way with the record that is there."""
    asked: list[Sequence[Message]] = []

    async def ask(messages: Sequence[Message], **options: Any) -> SummaryAnswer:
        asked.append(messages)
        return await summarized(messages, **options)

    told = Turn(reply=goes_on(WORDS))
    made = scene(told, *[REFUSED] * refusals, told, model=model, ask=ask)
    read = await made.read()
    assert read.text == WORDS
    assert ways(made)[: refusals + 1] == tried
    assert len(asked) == read.usages[-1]["compaction"]["restarts"]  # type: ignore[index]
    refused, taken = made.server.opened[refusals], made.server.opened[refusals + 1]
    assert refused.messages is not None
    assert taken.messages is not None
    assert [each.text for each in taken.messages[: len(refused.messages)]] == [each.text for each in refused.messages]


@pytest.mark.parametrize(
    "status", [200, 404, *(pytest.param(each, marks=pytest.mark.slow) for each in (400, 405, 422, 501, None))]
)
async def test_a_refusal_is_remembered_for_a_day(status: int | None) -> None:
    """LM Studio refuses a path with 200 and an error; whoever has no such path, with 404, 405 or 501."""
    refused = Turn(refusal=UpstreamError("unexpected endpoint or method", status=status))
    made = scene(Turn(reply=goes_on(WORDS)), refused, Turn(reply=goes_on(WORDS)))
    assert (await made.read()).text == WORDS
    assert (await asked_later(made, 3600)) == ["prefill"]
    assert (await asked_later(made, 24 * 3600)) == ["raw"]


FAILURES = {
    "500": Turn(refusal=UpstreamError("Internal error", status=500)),
    "503": Turn(refusal=UpstreamError("Loading model", status=503)),
    "429": Turn(refusal=UpstreamError("Too many requests", status=429)),
    "crash in 200": Turn(refusal=UpstreamError("The model has crashed without additional information.", status=200)),
    "connection": Turn(refusal=UpstreamDropped("")),
    "error event": Turn(end="error"),
    "broken stream": Turn(end="drop"),
}


@pytest.mark.parametrize(
    "failure", ["500", *(pytest.param(each, marks=pytest.mark.slow) for each in list(FAILURES)[1:])]
)
async def test_a_failure_of_the_moment_teaches_nothing(failure: str) -> None:
    """The next way carries this answer; the next answer is asked for in the best way again."""
    made = scene(Turn(reply=goes_on(WORDS)), FAILURES[failure], Turn(reply=goes_on(WORDS)))
    assert (await made.read()).text == WORDS
    assert ways(made) == ["raw", "prefill"]
    assert (await asked_later(made, 0)) == ["raw"]


async def asked_later(made: Scene, seconds: float) -> list[str]:
    """By which ways the same answer is gone on with after some time, by a server that does as it is told."""
    made.server.opened.clear()
    made.server.turns = [Turn(reply=goes_on(WORDS))]
    made.clock.now_s += seconds
    assert (await made.read()).text == WORDS
    return ways(made)


async def test_a_server_that_begins_anew_is_asked_otherwise() -> None:
    """What it repeats is taken out of this answer; the next one is asked for in another way."""
    again = Turn(
        reply=lambda messages: Reply(f"Sure, here is the rest:\n\n{goes_on(WORDS)(messages).content.lstrip()}")
    )
    made = scene(Turn(reply=goes_on(WORDS)), again)
    assert (await made.read()).text == WORDS
    assert ways(made) == ["raw"]
    made.server.opened.clear()
    made.server.turns = [Turn(reply=goes_on(WORDS))]
    assert (await made.read()).text == WORDS
    assert ways(made) == ["prefill"]
