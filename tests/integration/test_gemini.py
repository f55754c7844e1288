"""Gemini's `generateContent`, whole and streamed, which LiteLLM bridges to a chat: guarded like any other route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from litellm_compaction.simulator import ChatCall, Reply, numbered_words
from tests.builders import prose, talk
from tests.integration.bench import Bench, Group, open_bench
from tests.integration.restart_bench import TEXTS, WINDOW, Carrier, Teller, asked

_WINDOW = 4096
_SYSTEM = "You help with one task."
_WHOLE, _STREAM = "generateContent", "streamGenerateContent?alt=sse"
_METHODS = pytest.mark.parametrize("method", [_WHOLE, _STREAM], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def gemini(carrier: Carrier, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bench, Carrier]]:
    """A proxy for each carrier."""
    settings = {"carrier": carrier, "background": "off", "notices": "off"}
    groups = [Group("local", _WINDOW), Group("small", WINDOW)]
    with open_bench(tmp_path_factory.mktemp("gemini"), groups, settings) as bench:
        yield bench, carrier


def _contents(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    roles = {"assistant": "model", "user": "user"}
    return [
        {"role": roles[message["role"]], "parts": [{"text": message["content"]}]}
        for message in messages
        if message["role"] in roles
    ]


def _ask(
    bench: Bench, method: str, messages: list[dict[str, Any]], group: str = "local", **generation: Any
) -> tuple[str, list[str]]:
    """The text of an answer, and its reasons to end."""
    body: dict[str, Any] = {"contents": _contents(messages), "systemInstruction": {"parts": [{"text": _SYSTEM}]}}
    if generation:
        body["generationConfig"] = generation
    path = f"/v1beta/models/{group}:{method}"
    if method == _STREAM:
        streamed = bench.proxy.stream_body(body, path)
        assert streamed.status == 200, streamed.raw[:500]
        answers = streamed.chunks
    else:
        answer = bench.proxy.post(body, path)
        assert answer.status_code == 200, answer.text
        answers = [answer.json()]
    candidates = [candidate for each in answers for candidate in each.get("candidates") or ()]
    parts = [part for candidate in candidates for part in candidate["content"]["parts"]]
    ends = [candidate["finishReason"] for candidate in candidates if candidate.get("finishReason")]
    return "".join(part.get("text") or "" for part in parts if not part.get("thought")), ends


@_METHODS
def test_a_long_conversation_is_compacted(gemini: tuple[Bench, Carrier], method: str) -> None:
    """The system instruction and the newest message stay, nothing is cut, and the answer is bounded."""
    bench, carrier = gemini
    watch = bench.watch("local")
    messages = talk(f"gemini {carrier} {method}", 6000)
    assert _ask(bench, method, messages, maxOutputTokens=300) == ("Understood.", ["STOP"])
    (chat,) = watch.chats
    sent = watch.sent()
    assert sent[0] == {"role": "system", "content": _SYSTEM}
    assert sent[-1]["content"] == messages[-1]["content"]
    assert len(sent) < len(messages)
    assert not chat.truncated
    assert chat.prompt_tokens < 0.8 * _WINDOW
    assert watch.bodies[0]["max_tokens"] == 300
    # The next turn finds the record.
    later = [*messages, {"role": "assistant", "content": "Understood."}, {"role": "user", "content": "Go on."}]
    before = len(watch.summaries)
    _ask(bench, method, later)
    assert len(watch.summaries) == before


@_METHODS
def test_an_answer_goes_on_past_the_window(gemini: tuple[Bench, Carrier], method: str) -> None:
    """Over several requests, as one text with one end; by hooks it is bounded, since they carry chats only."""
    bench, carrier = gemini
    text = TEXTS["prose"]
    watch = bench.watch("small", Teller(Reply(text)))
    _, question = asked(f"gemini {method} {carrier}")
    said, ends = _ask(bench, method, [question], "small")
    if carrier == "auto":
        assert (said, ends) == (text, ["STOP"])
        assert len(watch.records_of("/v1/completions") + watch.chats) > 1
    else:
        assert text.startswith(said)
        assert ends == ["MAX_TOKENS"]
    assert not any(record.truncated for record in watch.records)


@_METHODS
def test_what_cannot_fit_is_refused_in_words_that_can_be_read(gemini: tuple[Bench, Carrier], method: str) -> None:
    """A 400 before anything is streamed, with the numbers and the remedy."""
    bench, carrier = gemini
    watch = bench.watch("local")
    body = {"contents": _contents([{"role": "user", "content": prose(f"giant {carrier} {method}", 6000)}])}
    answer = bench.proxy.post(body, f"/v1beta/models/local:{method}")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 4096 tokens.")
    assert watch.chats == []


@_METHODS
def test_a_clients_thinking_budget_is_read(gemini: tuple[Bench, Carrier], method: str) -> None:
    """`thinkingBudget` ends a thought in the place of the setting; by hooks on chats only."""
    bench, carrier = gemini
    if carrier == "hooks":
        pytest.skip("LiteLLM's hooks carry chat completions only")
    thought = numbered_words(700)

    def thinks(call: ChatCall) -> Reply:
        return Reply("Four.") if "answer now" in call.prompt_text else Reply("Four.", reasoning=thought)

    watch = bench.watch("local", thinks)
    question = [{"role": "user", "content": f"Two and two? {method}"}]
    assert _ask(bench, method, question, thinkingConfig={"thinkingBudget": 700})[0].endswith("Four.")
    assert len(watch.chats) == 2
    assert _ask(bench, method, question)[0].endswith("Four.")
    assert len(watch.chats) == 3
