"""The proxy that `up` runs now: written down by `up`, read by `doctor` and `connect`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from litellm_compaction.errors import ConfigError
from litellm_compaction.places import data_folder

RUNNING_FILE = "up.json"


class Running(NamedTuple):
    """A proxy that `up` has started, and the server behind it; `api_base` is None if the config names its servers."""

    base_url: str
    config: str
    api_base: str | None
    is_simulated: bool


@contextlib.contextmanager
def told(note: Running, environ: Mapping[str, str]) -> Iterator[None]:
    """Keeps a note of what runs while the block does; without it all goes well, too."""
    with contextlib.suppress(OSError, ConfigError):
        path = data_folder(environ) / RUNNING_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"pid": os.getpid(), **note._asdict()}), encoding="utf-8")
    try:
        yield
    finally:
        # Another `up` may have begun since.
        if running_up(environ) == note:
            with contextlib.suppress(OSError, ConfigError):
                (data_folder(environ) / RUNNING_FILE).unlink()


def running_up(environ: Mapping[str, str]) -> Running | None:
    """Returns what an `up` of this user serves now; None if none runs."""
    try:
        said = json.loads((data_folder(environ) / RUNNING_FILE).read_text(encoding="utf-8"))
        # Asks, and sends nothing. Windows has no such question.
        if os.name == "posix":
            os.kill(int(said.pop("pid")), 0)
        return Running(str(said["base_url"]), str(said["config"]), said["api_base"], said["is_simulated"] is True)
    except (OSError, ConfigError, ValueError, LookupError, TypeError, AttributeError):
        return None
