"""`demo`: its picture, its script, and real runs that the server cuts or refuses without the plug-in."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from litellm_compaction.cli.demo import Answer, Filling, Look, ask
from litellm_compaction.errors import ServerUnavailable

PLAIN = Look(window_tokens=8192, color=False, unicode=False)


def test_a_cut_prompt_is_a_bar_with_a_gap() -> None:
    """The gap is as wide as the share that is lost, half of it here, and its tokens stand beside it in capitals."""
    assert PLAIN.turn(18, "search", Filling(10_000, 5_000), Filling(0, has_failed=True)).rstrip() == (
        "turn  18 search     ######xxxxxxxxxxxx######  10,000 CUT -5,000   ........................       0 FAILED"
    )


def _asked(answered: Callable[[httpx.Request], httpx.Response]) -> Answer:
    with httpx.Client(base_url="http://proxy", transport=httpx.MockTransport(answered)) as http:
        return ask(http, "key", "model", [])


def test_a_stream_that_breaks_off_keeps_its_text() -> None:
    """With the error that the stream names."""
    chunks = 'data: {"choices": [{"delta": {"content": "word"}}]}\n\ndata: {"error": "gone"}\n\n'
    assert _asked(lambda _: httpx.Response(200, text=chunks)) == Answer("word", [], "gone")


def test_a_lost_connection_is_an_error_of_the_answer() -> None:
    """But a proxy that is gone ends the demo."""

    def raising(error: Exception) -> Callable[[httpx.Request], httpx.Response]:
        def answered(_: httpx.Request) -> httpx.Response:
            raise error

        return answered

    assert _asked(raising(httpx.ReadError("reset"))) == Answer("", [], "ReadError: reset")
    with pytest.raises(ServerUnavailable):
        _asked(raising(httpx.ConnectError("refused")))
