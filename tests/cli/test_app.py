"""The command line: options, exit codes, and what is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from litellm_compaction import __version__
from litellm_compaction.cli import main


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["up", "--port", "65536"],
        ["up", "--port", "-1"],
        ["up", "--simulator", "--lm-studio", "http://127.0.0.1:1234"],
        ["up", "--port", "²"],
        ["demo", "--turns", "0"],
        ["demo", "--context", "100"],
        ["doctor", "extra"],
        ["compact", "conversation.json", "--model", "qwen"],
        ["compact", "conversation.json", "--window", "8192"],
        ["compact", "conversation.json", "--model", "qwen", "--window", "100"],
        ["compact", "conversation.json", "--model", "qwen", "--window", "8192", "--strategy", "magic"],
        ["compact", "conversation.json", "--model", "qwen", "--window", "8192", "--keep-recent", "0"],
        ["compact", "--model", "qwen", "--window", "8192"],
        ["events", "--last", "0"],
        ["events", "--store", "sqlite://", "--config", "config.yaml"],
        ["store"],
        ["store", "show"],
        ["store", "purge", "--older-than", "a while"],
    ],
)
def test_wrong_arguments_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A line of usage and what is wrong, on the standard error."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: litellm-compaction" in captured.err
    assert "Error: " in captured.err


@pytest.mark.parametrize(
    "command", [[], ["up"], ["demo"], ["doctor"], ["compact"], ["events"], ["store"], ["store", "purge"]]
)
def test_help_is_there(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each command explains itself."""
    assert main([*command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(" ".join(("Usage: litellm-compaction", *command)))


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints it."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"litellm-compaction {__version__}"


def test_a_terminal_is_sent_no_command_of_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    """An argument with an escape sequence comes back readable in the error."""
    assert main(["\x1b[2Jevil"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_our_errors_become_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback: a message on stderr and exit code 1."""
    assert main(["doctor", "--config", str(tmp_path / "missing.yaml")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("litellm-compaction: ")
    assert "missing.yaml cannot be read" in captured.err


def test_a_removed_option_says_what_replaces_it(capsys: pytest.CaptureFixture[str]) -> None:
    """As the changelog does; no help shows it."""
    assert main(["demo", "--unguarded"]) == 2
    assert "--unguarded was removed: demo shows both sides" in capsys.readouterr().err
    assert main(["demo", "--help"]) == 0
    assert "unguarded" not in capsys.readouterr().out
    assert "`demo --unguarded`: `demo` shows" in (Path(__file__).parents[2] / "CHANGELOG.md").read_text("utf-8")
