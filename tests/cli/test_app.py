"""The command line: options, exit codes, and what is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from litellm_compaction import __version__
from litellm_compaction.cli import main
from litellm_compaction.cli.app import _COMMANDS, _REMOVED


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["up", "--port", "65536"],
        ["up", "--port", "-1"],
        ["up", "--port", "²"],
        ["demo", "--turns", "0"],
        ["demo", "--context", "100"],
        ["doctor", "extra"],
        ["count", "conversation.json"],
        ["events", "--last", "0"],
        ["purge", "--older-than", "a while"],
        ["purge", "--older-than", "-1"],
        ["purge", "--older-than", "nan"],
    ],
)
def test_wrong_arguments_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A line of usage and what is wrong, on the standard error."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: litellm-compaction" in captured.err
    assert "Error: " in captured.err


@pytest.mark.parametrize("command", [[], *([name] for name in _COMMANDS)])
def test_help_is_there(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each command explains itself, as the list of commands does."""
    assert main([*command, "--help"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(" ".join(("Usage: litellm-compaction", *command)))
    assert not command or _COMMANDS[command[0]] in told


def test_help_loads_no_command() -> None:
    """Nor pydantic, nor LiteLLM: it is there at once."""
    code = "import sys; from litellm_compaction.cli import main; main(['--help']); print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"pydantic", "httpx", "litellm", "asyncio", "yaml"}.isdisjoint(told.stdout.split())


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints it."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"litellm-compaction {__version__}"


def test_a_terminal_is_sent_no_command_of_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    """An argument with an escape sequence comes back readable in the error."""
    assert main(["\x1b[2Jevil"]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("removed", _REMOVED)
def test_a_removed_command_says_what_replaces_it(removed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As the changelog does."""
    assert main([removed, "x"]) == 2
    assert f"{removed} was removed: {_REMOVED[removed]}" in capsys.readouterr().err
    assert f"`{removed}" in (Path(__file__).parents[2] / "CHANGELOG.md").read_text("utf-8")
