"""Restarts on the routes beside chat, what is passed on to a continuation, and what is announced and counted."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from tests.builders import prose
from tests.integration.forms import END, ROUTES, ask
from tests.integration.restart_bench import (
    LONG,
    TEXTS,
    Restarting,
    Teller,
    asked,
    without_restarts,
)
from tests.lmstudio_double import Reply

_numbers = itertools.count()
_streams = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@_streams
@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_is_carried_over(restarting: Restarting, route: str, stream: bool) -> None:
    """One text with the model's own end, over several requests, of which none outgrows the window."""
    watch = restarting.watch("local", Teller(Reply(TEXTS["prose"])))
    messages = asked(f"carried {route} {stream}")
    said = ask(restarting, route, "local", messages, stream=stream, limit=8000)
    assert (without_restarts(said.text), said.ends) == (TEXTS["prose"], [END[route]])
    assert len(watch.chats) > 1
    assert not any(record.truncated for record in watch.records)


@pytest.mark.parametrize("limit", [8000, 40])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_anthropics_clients_are_told_where_the_window_ends(restarting: Restarting, stream: bool, limit: int) -> None:
    """In Anthropic's own word for it, which is not that for the client's own limit; read by its own client."""
    restarting.watch("local", Teller(Reply(TEXTS["prose"])))
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")
    asking: dict[str, Any] = {"model": "local", "max_tokens": limit}
    # It leaves no room for a continuation.
    asking["messages"] = [{"role": "user", "content": prose(f"sacred {stream} {limit}", 1450)}]
    with anthropic.Anthropic(base_url=restarting.proxy.base_url, api_key=restarting.proxy.key, max_retries=0) as client:
        if stream:
            with client.messages.stream(**asking) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asking)
    assert message.stop_reason == ("max_tokens" if limit == 40 else "model_context_window_exceeded")
    said = "".join(block.text for block in message.content if block.type == "text")
    assert TEXTS["prose"].startswith(said.partition("\n\n⚠️")[0])
    assert message.usage.output_tokens >= 40


def test_every_token_counts_against_the_key(restarting: Restarting) -> None:
    """A key with 7,000 tokens: answer and summary together are more, so that its next request is refused."""
    key = {"Authorization": f"Bearer sk-few-{next(_numbers)}"}
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
