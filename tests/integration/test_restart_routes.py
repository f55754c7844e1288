"""Restarts on the routes beside chat, what is passed on to a continuation, and what is announced and counted."""

from __future__ import annotations

import itertools
import time

import pytest

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
