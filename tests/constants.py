"""Settings of tests, which may have other constants than users; a proxy of the tests reads them beside config.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from litellm_compaction.config import Constants, Settings, settings_from

_NAMES = frozenset(field.name for field in fields(Constants))
_FILE = "constants.json"


def settings_of(**values: Any) -> Settings:
    """Settings with these values; a name of `Constants` replaces that."""
    written, constants = _divided(values)
    return settings_from(written).with_constants(replace(Constants(), **constants))


def written_beside(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings among `values`; the constants go into a file of the folder."""
    written, constants = _divided(values)
    if constants:
        (folder / _FILE).write_text(json.dumps(constants))
    else:
        (folder / _FILE).unlink(missing_ok=True)
    return written


def read_beside(folder: Path) -> None:
    """Puts the constants of a folder in force in this process."""
    file = folder / _FILE
    Constants.current = Constants(**(json.loads(file.read_text()) if file.exists() else {}))


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """The constants of a folder while the block lasts."""
    read_beside(folder)
    try:
        yield
    finally:
        Constants.current = Constants()


def _divided(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    constants = {name: value for name, value in values.items() if name in _NAMES}
    return {name: value for name, value in values.items() if name not in _NAMES}, constants
