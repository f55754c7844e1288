"""Compaction for agent loops without our proxy: messages in, messages out; no store, no LiteLLM."""

from litellm_compaction.library.compacting import CompactionResult, Compactor, compact, generate_summary, safe_compact
from litellm_compaction.library.config import CompactionConfig
from litellm_compaction.library.selection import CompactionSelection, select_messages
from litellm_compaction.library.tokens import (
    count_tokens,
    estimate_messages_tokens,
    estimate_tokens,
    loaded_window,
    should_compact,
)

__all__ = [
    "CompactionConfig",
    "CompactionResult",
    "CompactionSelection",
    "Compactor",
    "compact",
    "count_tokens",
    "estimate_messages_tokens",
    "estimate_tokens",
    "generate_summary",
    "loaded_window",
    "safe_compact",
    "select_messages",
    "should_compact",
]
