"""`demo`: its picture, its script, and real runs that the server cuts or refuses without the plug-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from litellm_compaction.cli import up
from litellm_compaction.cli.demo import WIDTH, Answer, Conversation, Filling, Look, ask, scripted_summary, step_of
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.simulator import rendering

PLAIN = Look(window_tokens=8192, color=False, unicode=False)


def test_a_cut_prompt_is_a_bar_with_a_gap() -> None:
    """The gap is as wide as the share that is lost, half of it here, and its tokens stand beside it in capitals."""
    assert PLAIN.turn(18, "search", Filling(10_000, 5_000), Filling(0, has_failed=True)).rstrip() == (
        "turn  18 search     ######xxxxxxxxxxxx######  10,000 CUT -5,000   ........................       0 FAILED"
    )


@pytest.mark.parametrize("look", [PLAIN, Look(window_tokens=8192, color=False, unicode=True)])
def test_lines_fit_into_100_columns(look: Look) -> None:
    """With the longest numbers of a window of 8,192 tokens, and errors of any length."""
    lines = [
        *look.opening().splitlines(),
        look.turn(41, "read_file", Filling(99_999, 88_888), Filling(8_192)),
        look.event("compaction 12", 12_345, 2_345, " (2 summary calls)"),
        look.failure("without the plug-in", "word\n" * 100),
    ]
    assert max(len(line.rstrip()) for line in lines) <= WIDTH < 100
    assert all(line.isprintable() for line in lines)
    assert all(line.isascii() for line in lines) != look.unicode


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


def test_every_call_of_the_script_gets_its_result() -> None:
    """A history as real clients keep it: no orphan, user and assistant in turn."""
    conversation = Conversation(8192)
    for turn in range(12):
        step = step_of(turn)
        calls = [{"id": f"c{turn}", "type": "function", "function": {"name": step.call[0]}}] if step.call else []
        conversation.add_answer(turn, step.text, calls)
    roles = [message["role"] for message in conversation.messages]
    assert roles[:9] == ["system", "user", *["assistant", "tool"] * 3, "assistant"]
    called = [call["id"] for message in conversation.messages for call in message.get("tool_calls", ())]
    assert called == [message["tool_call_id"] for message in conversation.messages if message["role"] == "tool"]


def test_the_scripted_summary_names_what_was_seen() -> None:
    """It invents no file."""
    assert "| ledger/totals.py |" in scripted_summary("… ledger/totals.py …")
    assert "ledger/export.py" not in scripted_summary("… ledger/totals.py …")


@pytest.fixture
def own_vocabulary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulators of other tests in this process keep theirs."""
    monkeypatch.setattr(rendering, "_load_other", None)
    rendering.load_vocabulary.cache_clear()
    rendering.encode.cache_clear()
    yield
    rendering.load_vocabulary.cache_clear()
    rendering.encode.cache_clear()


@pytest.mark.usefixtures("own_vocabulary")
def test_the_simulated_model_counts_as_its_family() -> None:
    """A number has a token for each digit in Qwen's vocabulary, and one for three in o200k_base."""
    up.simulated(4096)
    assert rendering.count("128903") == 6
