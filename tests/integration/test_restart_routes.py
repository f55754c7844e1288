"""Restarts on the routes beside chat, what is passed on to a continuation, and what is announced and counted."""

from __future__ import annotations

import pytest

from tests.integration.forms import END, ROUTES, ask
from tests.integration.restart_bench import (
    TEXTS,
    Restarting,
    Teller,
    asked,
    without_restarts,
)
from tests.lmstudio_double import Reply

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
