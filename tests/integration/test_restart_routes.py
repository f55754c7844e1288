"""Restarts on the routes beside chat, what is passed on to a continuation, and what is announced and counted."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest

from litellm_compaction.core.messages import START_NOTICE
from litellm_compaction.simulator import Gate, Reply, numbered_words
from tests.builders import prose, talk
from tests.integration.bench import SUMMARY
from tests.integration.restart_bench import (
    LONG,
    TEXTS,
    WINDOW,
    Restarting,
    Teller,
    asked,
    shared,
    without_restarts,
)

_numbers = itertools.count()


@pytest.fixture(scope="module")
def carried(request: pytest.FixtureRequest) -> Restarting:
    """The transport: only it serves every route, and speaks before a summary is made."""
    return shared(request, "auto")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_text_completions_are_carried_over(carried: Restarting, stream: bool) -> None:
    """The older route gets the whole text too."""
    watch = carried.watch("local", Teller(Reply(TEXTS["prose"])))
    body = {"model": "local", "prompt": asked(f"completions {stream}")[1]["content"], "stream": stream}
    if stream:
        chunks = carried.proxy.stream_body(body, "/v1/completions").chunks
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        choices = carried.proxy.post(body, "/v1/completions").json()["choices"]
    assert without_restarts("".join(choice.get("text") or "" for choice in choices)) == TEXTS["prose"]
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == ["stop"]
    assert len(watch.chats) > 1


def test_whole_messages_are_carried_over(carried: Restarting) -> None:
    """Anthropic's route without a stream: one text, all generated tokens, the model's own end."""
    watch = carried.watch("local", Teller(Reply(TEXTS["prose"])))
    system, user = asked("whole messages")
    body = {"model": "local", "max_tokens": 8000, "system": system["content"], "messages": [user]}
    answer = carried.proxy.post(body, "/v1/messages").json()
    assert "".join(block["text"] for block in answer["content"]) == TEXTS["prose"]
    assert answer["stop_reason"] == "end_turn"
    assert answer["usage"]["output_tokens"] == sum(record.completion_tokens for record in watch.chats)
    assert len(watch.chats) > 1


@pytest.mark.parametrize("limit", [8000, 40])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_anthropics_clients_are_told_where_the_window_ends(carried: Restarting, stream: bool, limit: int) -> None:
    """In Anthropic's own word for it, which is not that for the client's own limit; read by its own client."""
    carried.watch("local", Teller(Reply(TEXTS["prose"])))
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")
    asking: dict[str, Any] = {"model": "local", "max_tokens": limit}
    # It leaves no room for a continuation.
    asking["messages"] = [{"role": "user", "content": prose(f"sacred {stream} {limit}", 1450)}]
    with anthropic.Anthropic(base_url=carried.proxy.base_url, api_key=carried.proxy.key, max_retries=0) as client:
        if stream:
            with client.messages.stream(**asking) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asking)
    assert message.stop_reason == ("max_tokens" if limit == 40 else "model_context_window_exceeded")
    said = "".join(block.text for block in message.content if block.type == "text")
    assert TEXTS["prose"].startswith(said.partition("\n\n⚠️")[0])
    assert message.usage.output_tokens >= 40


@pytest.mark.parametrize("closes", [True, False], ids=["answers", "thinks on"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_thoughts_that_fill_the_window_are_closed_once(
    restarting: Restarting, path: str, stream: bool, closes: bool
) -> None:
    """The server is told to think no more, on every route; a model that does all the same ends with `length`."""
    if restarting.carrier == "hooks" and path != "/v1/chat/completions":
        pytest.skip("the hooks carry chat completions")
    about = f"thoughts {path} {stream} {closes}"
    first = Reply("", reasoning=numbered_words(1400))
    watch = restarting.watch("local", Teller(first, later=(Reply("It is four.") if closes else first,)))
    system, user = asked(about)
    body: dict[str, Any] = {
        "/v1/messages": {"max_tokens": 8000, "system": system["content"], "messages": [user]},
        "/v1/responses": {"instructions": system["content"], "input": user["content"]},
    }.get(path, {"messages": [system, user]})
    body = {"model": "local", "stream": stream, **body}
    if stream:
        told = json.dumps(restarting.proxy.stream_body(body, path).chunks)
    else:
        told = json.dumps(restarting.proxy.post(body, path).json())
    assert len(watch.chats) == 2
    sent = [sent for sent in watch.bodies if "messages" in sent][1]
    assert sent["reasoning_effort"] == "none"
    assert "answer now" in sent["messages"][-1]["content"]
    ends = ('"length"', '"max_tokens"', '"model_context_window_exceeded"', '"incomplete"')
    assert any(end in told for end in ends) is not closes
    if closes and not stream:
        assert "It is four." in told


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_what_shapes_the_sampling_is_passed_on(restarting: Restarting, stream: bool) -> None:
    """A continuation is asked for under the same seed, bias, temperature and stop strings."""
    options: dict[str, Any] = {"seed": 7, "logit_bias": {"42": 1}, "temperature": 0.5, "stop": ["NEVER SAID"]}
    watch = restarting.watch("local", Teller(Reply(TEXTS["prose"])))
    body = {"model": "local", "messages": asked(f"sampling {stream}"), "stream": stream, **options}
    answer = restarting.proxy.stream_body(body) if stream else restarting.proxy.post(body)
    assert (answer.status if stream else answer.status_code) == 200
    bodies = [json.loads(json.dumps(sent)) for sent, _ in zip(watch.bodies, watch.chats, strict=False)]
    assert len(bodies) > 1
    assert [{key: sent.get(key) for key in options} for sent in bodies] == [options] * len(bodies)


@pytest.mark.parametrize("options", [{"logprobs": True}, {"n": 2}], ids=["logprobs", "choices"])
def test_what_cannot_be_joined_streams_as_it_comes(restarting: Restarting, options: dict[str, Any]) -> None:
    """Log probabilities and several choices: one request, bounded by the window, no restart."""
    watch = restarting.watch("local", Teller(Reply(TEXTS["prose"])))
    answer = restarting.proxy.stream("local", asked(f"not joined {options}"), **options)
    assert answer.status == 200
    assert set(answer.finish_reasons) == {"length"}
    assert len(watch.chats) == 1
    assert watch.chats[0].prompt_tokens + watch.bodies[0]["max_tokens"] <= WINDOW


def test_start_notice_comes_before_the_summary(carried: Restarting) -> None:
    """A request that has to be compacted is told so while the model is still at its record."""
    gate = Gate()
    watch = carried.watch("middle", Teller(Reply("Fine."), summary=Reply(SUMMARY, gate=gate)))
    body = {"model": "middle", "messages": talk("at once", 3600), "stream": True}
    headers = carried.proxy.headers
    with carried.proxy.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        assert any(START_NOTICE in line for line in lines)
        assert gate.reached.wait(60)
        assert {record.outcome for record in watch.summaries} == {"running"}
        gate.open()
        assert [line for line in lines if "Fine." in line]
    assert {record.outcome for record in watch.summaries} == {"ok"}


def test_every_token_counts_against_the_key(restarting: Restarting) -> None:
    """A key with 7,000 tokens: answer and summary together are more, so that its next request is refused."""
    key = {"Authorization": f"Bearer sk-few-{next(_numbers)}-{restarting.carrier}"}
    watch = restarting.watch("middle", Teller(Reply(LONG)))
    body = {"model": "middle", "messages": asked("counted"), "stream": True}
    assert without_restarts(restarting.proxy.stream_body(body, **key).text) == LONG
    answer = sum(record.completion_tokens for record in watch.chats) + watch.chats[0].prompt_tokens
    assert answer < 7000 < answer + sum(record.prompt_tokens + record.completion_tokens for record in watch.summaries)
    small = {"model": "local", "messages": [{"role": "user", "content": "Hi."}]}
    deadline_s = time.monotonic() + 60
    while (again := restarting.proxy.post(small, headers=key)).status_code == 200 and time.monotonic() < deadline_s:
        # LiteLLM counts in the proxy's process, after the answer: there is nothing to wait for but the next try.
        time.sleep(0.1)
    assert again.status_code == 429, again.text
