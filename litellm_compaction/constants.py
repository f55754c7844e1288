"""The numbers that no operator has to choose, with unit and reason; a test may put others in their place.

`Settings.constants` hands them to whoever needs them, so one object says how a request is treated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """All of them, each a default that held for every machine and model that was measured.

    Attributes:
        output_buffer_ratio: share of the remaining window that is set aside for the answer.
        output_buffer_min_tokens: least tokens set aside for it; at most 10 % of the window.
        answer_min_tokens: least room for an answer; a request that leaves less is refused.
        reasoning_answer_min_tokens: the same for models that think before they answer.
        reasoning_budget_ratio: share of the window for the thinking before one answer. Windows of 8,192 tokens and
            more leave thoughts of 500 to 4,000 alone. At 0.25 only those of 16,000 would; above 0.5 the streaming
            limit comes first, behind any prompt that was compacted (0.4).
        keep_images: newest images that stay in a compacted prompt if they fit.
        clear_tool_results: old tool results may give way to one line each, if that alone reaches the target.
        summary_max_tokens: longest summary; also about a twelfth of the window at most.
        max_summary_calls: summary jobs for one client request; 0 compacts without a model.
        warm_up_timeout_s: time that LM Studio may take to load a model.
        heartbeat_s: longest silence of a stream that waits for a compaction.
        window_cache_s: age at which a context length is read again from the server.
        ask_server: LM Studio is asked by the protocol of its own SDKs.
        ask_server_timeout_s: time limit of one such question; after a slow answer there is none for a while.
        admission_timeout_s: time that a request may queue for context shared with other requests.
    """

    # Those of settings that are read from now on.
    current: ClassVar[Constants]

    output_buffer_ratio: float = 0.20
    output_buffer_min_tokens: int = 1000
    answer_min_tokens: int = 256
    reasoning_answer_min_tokens: int = 1024
    reasoning_budget_ratio: float = 0.50
    keep_images: int = 3
    clear_tool_results: bool = True
    summary_max_tokens: int = 800
    max_summary_calls: int = 4
    warm_up_timeout_s: float = 600.0
    heartbeat_s: float = 10.0
    window_cache_s: float = 5.0
    ask_server: bool = True
    ask_server_timeout_s: float = 1.0
    admission_timeout_s: float = 300.0


Constants.current = Constants()
