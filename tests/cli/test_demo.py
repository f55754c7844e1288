"""`demo`: its picture, its script, and one real run with and without the plug-in."""

from __future__ import annotations

import pytest

from litellm_compaction.cli.demo import Conversation, Look, demo, scripted_summary, step_of
from tests.cli import copied

PLAIN = Look(trigger_ratio=0.8, color=False, unicode=False)


def test_a_turn_is_one_line_with_a_marked_bar() -> None:
    """Bar, X/Y tokens, percent; the mark stands at 80 %."""
    assert PLAIN.turn(7, 4096, 8192, "reads") == (
        "turn   7  ####################............|........   4,096/8,192   50%  reads"
    )


def test_a_bar_never_overflows() -> None:
    """More than the window is a full bar and more than 100 %."""
    assert PLAIN.turn(7, 9000, 8192, "reads") == (
        "turn   7  ################################|########   9,000/8,192  110%  reads"
    )


def test_a_compaction_is_before_and_after_with_its_round() -> None:
    """And how it was made."""
    assert PLAIN.compaction(2, 6740, 2725, 1, is_announced=True).strip() == (
        "* round 2: 6,740 -> 2,725 tokens (1 summary call, announced in the stream)"
    )


def test_plain_lines_are_ascii_without_escapes() -> None:
    """What a log file or an old terminal shows."""
    lines = [PLAIN.turn(1, 1, 2, "x"), PLAIN.compaction(1, 2, 1, 0, is_announced=False), PLAIN.legend(8192)]
    lines.append(PLAIN.truncation(2, 1))
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_color_surrounds_the_bar_only() -> None:
    """A full window is red."""
    look = Look(trigger_ratio=0.8, color=True, unicode=True)
    assert "\x1b[31m" in look.turn(1, 99, 100, "x")
    assert look.turn(1, 99, 100, "x").endswith("99%  x")


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
def copying(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which a demo's proxy is a copy; `test_up.py` starts one by the very same command."""
    environ = copied.environment(environ)
    monkeypatch.setattr("litellm_compaction.cli.demo.proxy_command", lambda *asked: copied.replaced(environ, *asked))
    return environ


@pytest.mark.proxy
def test_the_guarded_conversation_is_never_cut(copying: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Compactions happen, each shrinks, nothing is truncated, a long answer comes out whole, exit code 0."""
    assert demo(turns=24, context_tokens=4096, fast=True, color=False, guarded=True, environ=copying) == 0
    text = capsys.readouterr().out
    assert "25 turns, " in text
    assert "restart 1 in mid-answer" in text
    assert "in one answer: each once" in text
    assert " 0 truncations" in text
    assert "round 2: " in text
    assert "announced in the stream" in text


@pytest.mark.proxy
def test_the_same_conversation_without_the_plugin_is_cut(
    copying: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo shows a real difference: the server cuts, exit code 1."""
    assert demo(turns=18, context_tokens=4096, fast=True, color=False, guarded=False, environ=copying) == 1
    assert "the server cut the prompt" in capsys.readouterr().out
