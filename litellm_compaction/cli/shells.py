"""Writes texts, variables and files as a Unix shell and PowerShell read them, for the commands that print lines."""

from __future__ import annotations

import os
import re
import shlex

IS_WINDOWS = os.name == "nt"


def quoted(text: str, *, powershell: bool) -> str:
    """A text as one word, which the shell takes as it is."""
    # PowerShell takes typographic quotes for plain ones.
    return "'" + re.sub("(['‘’‚‛])", r"\1\1", text) + "'" if powershell else shlex.quote(text)


def variable(name: str, *, powershell: bool) -> str:
    """The value of an environment variable."""
    return f"$env:{name}" if powershell else f"${name}"


def content_of(path: str, *, powershell: bool) -> str:
    """The content of a file of one line."""
    return f"$({'Get-Content' if powershell else 'cat'} {quoted(path, powershell=powershell)})"
