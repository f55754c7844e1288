"""The user's files: their folder, and their privacy."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from litellm_compaction.errors import ConfigError

FOLDER_VARIABLE = "LITELLM_COMPACTION_HOME"
_FOLDER_NAME = "litellm_compaction"


def make_private(path: Path) -> None:
    """Closes a file to other users; one that has become a link is left alone, since its target is another's choice.

    Raises:
        OSError: it is missing, a link, or another user's.
    """
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def data_folder(environ: Mapping[str, str]) -> Path:
    """The folder for the user's files; it need not exist yet.

    `LITELLM_COMPACTION_HOME`, else the platform's place for application data: `XDG_DATA_HOME` or `~/.local/share`,
    `~/Library/Application Support` on macOS, `%LOCALAPPDATA%` on Windows.

    Raises:
        ConfigError: the user has no home folder.
    """
    own = environ.get(FOLDER_VARIABLE, "").strip()
    if own:
        return Path(own).expanduser().absolute()
    if sys.platform == "win32" and environ.get("LOCALAPPDATA"):
        return Path(environ["LOCALAPPDATA"]) / _FOLDER_NAME
    # XDG Base Directory Specification 0.8: relative paths must be ignored.
    shared = environ.get("XDG_DATA_HOME", "")
    if shared and Path(shared).is_absolute():
        return Path(shared) / _FOLDER_NAME
    try:
        home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    except RuntimeError as exc:
        raise ConfigError(f"There is no home folder. Set {FOLDER_VARIABLE} to a folder that can be written.") from exc
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / _FOLDER_NAME
    return home / ".local" / "share" / _FOLDER_NAME
