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
    from litellm_compaction.library.compacting import (
        CompactionConfig,
        CompactionEvent,
        CompactionResult,
        CompactionSelection,
        Compactor,
        Model,
        compact,
        estimate_messages_tokens,
        estimate_tokens,
        generate_summary,
        safe_compact,
        select_messages_to_compact,
        should_compact,
    )
    from litellm_compaction.proxy.callback import CompactionHandler

    handler: CompactionHandler

__version__ = "0.1.0"
__all__ = [
    "CompactionConfig",
    "CompactionEvent",
    "CompactionResult",
    "CompactionSelection",
    "Compactor",
    "ConfigError",
    "DoesNotFit",
    "Model",
    "SummaryFailed",
    "WindowUnknown",
    "__version__",
    "compact",
    "estimate_messages_tokens",
    "estimate_tokens",
    "generate_summary",
    "handler",
    "safe_compact",
    "select_messages_to_compact",
    "should_compact",
]

# The names above are theirs; one is loaded no earlier than it is asked for.
_HOMES = ("errors", "library.compacting")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "handler":
        from litellm_compaction.proxy.callback import load_handler

        loaded: object = load_handler()
    else:
        homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
        loaded = next(getattr(home, name) for home in homes if hasattr(home, name))
    globals()[name] = loaded
    return loaded


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
