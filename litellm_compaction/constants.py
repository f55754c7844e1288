"""The numbers that no operator has to choose, with unit and reason; a test may put others in their place.

`Settings.constants` hands them to whoever needs them, so one object says how a request is treated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """All of them, each a default that held for every machine and model that was measured."""

    # Those of settings that are read from now on.
    current: ClassVar[Constants]

    # Set aside for the answer: a share of the remaining window, and so much at least, but 10 % of the window at most.
    output_buffer_ratio: float = 0.20
    output_buffer_min_tokens: int = 1000
    # A request that leaves less room for an answer is refused; the second is for models that think first.
    answer_min_tokens: int = 256
    reasoning_answer_min_tokens: int = 1024
    # Share of the window for the thinking before one answer. Windows of 8,192 tokens and more leave thoughts of 500 to
    # 4,000 alone; at 0.25 only those of 16,000 would; above 0.5 the streaming limit comes first.
    reasoning_budget_ratio: float = 0.50
    keep_images: int = 3
    clear_tool_results: bool = True
    # Longest summary; also about a twelfth of the window at most.
    summary_max_tokens: int = 800
    # Summary jobs for one client request; 0 compacts without a model.
    max_summary_calls: int = 4
    # LM Studio may take so long to load a model; a stream that waits for a compaction is silent so long at most.
    warm_up_timeout_s: float = 600.0
    heartbeat_s: float = 10.0
    window_cache_s: float = 5.0
    # LM Studio is asked by the protocol of its own SDKs; after a slow answer not for a while.
    ask_server: bool = True
    ask_server_timeout_s: float = 1.0
    # A request may queue so long for context that others share.
    admission_timeout_s: float = 300.0


Constants.current = Constants()
