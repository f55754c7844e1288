"""The proxies that `up` runs now: each written down by its `up`, read by `doctor` and `connect`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from litellm_compaction.errors import ConfigError
from litellm_compaction.places import data_folder


class Running(NamedTuple):
    """A proxy that `up` has started, and the server behind it; `api_base` is None if the config names its servers."""

    base_url: str
    config: str
    api_base: str | None
    is_simulated: bool


@contextlib.contextmanager
def told(note: Running, environ: Mapping[str, str]) -> Iterator[None]:
    """Keeps a note of what runs while the block does; without it all goes well, too."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ConfigError):
            path = _folder(environ) / f"{os.getpid()}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(note._asdict()), encoding="utf-8")
            stack.callback(path.unlink, missing_ok=True)
        yield


def running_ups(environ: Mapping[str, str]) -> list[Running]:
    """Returns what each `up` of this user serves now, the newest first."""
    try:
        paths = sorted(_folder(environ).glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    except (OSError, ConfigError):
        return []
    return [note for path in paths if (note := _read(path)) is not None]


def _folder(environ: Mapping[str, str]) -> Path:
    return data_folder(environ) / "up"


def _read(path: Path) -> Running | None:
    try:
        # Asks, and sends nothing. Windows has no such question.
        if os.name == "posix":
            os.kill(int(path.stem), 0)
        said = json.loads(path.read_text(encoding="utf-8"))
        return Running(str(said["base_url"]), str(said["config"]), said["api_base"], said["is_simulated"] is True)
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None
