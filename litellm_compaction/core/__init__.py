"""The pure core: messages in, messages out. No clock, log, await or randomness."""

from __future__ import annotations

import sys
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def table(name: str) -> dict[str, Any]:
    """The data of one of this package's TOML files."""
    text = resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = tomllib.loads(text)
    return loaded
