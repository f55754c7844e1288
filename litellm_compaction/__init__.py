"""Keeps every LM Studio conversation of a LiteLLM proxy inside the context length that is really loaded.

`config.yaml` names `litellm_compaction.handler`; it is built on first access, so that importing the package
for its pure parts needs no LiteLLM. The other names are the library for agent loops without a proxy; they are loaded
on first access, too, and never need LiteLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from litellm_compaction.errors import ConfigError, DoesNotFit, SummaryFailed, WindowUnknown
    from litellm_compaction.library import (
        CompactionConfig,
        CompactionResult,
        CompactionSelection,
        Compactor,
        compact,
        count_tokens,
        estimate_messages_tokens,
        estimate_tokens,
        generate_summary,
        loaded_window,
        safe_compact,
        select_messages,
        should_compact,
    )
    from litellm_compaction.proxy.callback import CompactionHandler

    handler: CompactionHandler

__version__ = "0.1.0"
__all__ = [
    "CompactionConfig",
    "CompactionResult",
    "CompactionSelection",
    "Compactor",
    "ConfigError",
    "DoesNotFit",
    "SummaryFailed",
    "WindowUnknown",
    "__version__",
    "compact",
    "count_tokens",
    "estimate_messages_tokens",
    "estimate_tokens",
    "generate_summary",
    "handler",
    "loaded_window",
    "safe_compact",
    "select_messages",
    "should_compact",
]

_ERRORS = ("ConfigError", "DoesNotFit", "SummaryFailed", "WindowUnknown")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "handler":
        from litellm_compaction.proxy.callback import load_handler

        loaded: object = load_handler()
    else:
        loaded = getattr(import_module(f"litellm_compaction.{'errors' if name in _ERRORS else 'library'}"), name)
    globals()[name] = loaded
    return loaded


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
