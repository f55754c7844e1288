"""Lines to paste, as a Unix shell and as PowerShell read them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from litellm_compaction.cli.shells import content_of, quoted, variable


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell reads the lines")
def test_a_unix_shell_reads_back_what_was_meant(tmp_path: Path) -> None:
    """Blanks, quotes and dollars included."""
    text, file = 'it\'s $HOME `a` "b"', tmp_path / "a b's key"
    file.write_text("sk-1\n", encoding="utf-8")
    line = f'printf "%s|" {quoted(text, powershell=False)} "{variable("K", powershell=False)}"'
    line += f' "{content_of(str(file), powershell=False)}"'
    told = subprocess.run(["/bin/sh", "-c", line], env={"K": "v"}, capture_output=True, text=True, check=True)
    assert told.stdout == f"{text}|v|sk-1|"


def test_powershell_doubles_its_quotes() -> None:
    """Typographic ones as well, which it takes for plain ones; nothing else means anything between them."""
    assert quoted("it's ’$x", powershell=True) == "'it''s ’’$x'"
    assert variable("K", powershell=True) == "$env:K"
    assert content_of(r"C:\a b\key", powershell=True) == r"$(Get-Content 'C:\a b\key')"
