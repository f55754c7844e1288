"""Keeps every LM Studio conversation behind a LiteLLM proxy inside the context length that is really loaded.

`config.yaml` names `litellm_compaction.handler`; it is built on first access, so that importing the package
for its pure parts needs no LiteLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from litellm_compaction.proxy.callback import CompactionHandler

    handler: CompactionHandler

__version__ = "0.1.0"
__all__ = ["__version__", "handler"]


def __getattr__(name: str) -> object:
    if name == "handler":
        from litellm_compaction.proxy.callback import load_handler

        loaded = load_handler()
        globals()["handler"] = loaded
        return loaded
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
