"""What the caller of the library decides, checked when it is written down."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from litellm_compaction.core.budget import RESERVES_MAX_RATIO
from litellm_compaction.core.strategies import STRATEGIES
from litellm_compaction.errors import ConfigError

# As the proxy bounds its summaries (core/plan.py): in a small window the record may not crowd out the conversation.
_RECORD_WINDOW_RATIO = 0.15
# For recent messages the ledger gives way, as in the proxy, but the user's own words stand in it.
_LEAST_LEDGER_RATIO = 0.25
_RESERVES = ("system_reserve_tokens", "output_reserve_tokens", "safety_buffer_tokens")
# Smaller windows do not hold a summariser's instruction and the text that it is about.
_LEAST_WINDOW_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionConfig:
    """How conversations are compacted.

    Attributes:
        model: that the conversation is sent to; its family says how tokens are counted.
        context_window_tokens: with which that model is really loaded or served. There is no default: a guess would
            let a server cut silently.
        trigger_ratio: share of the window above which `should_compact` says so.
        target_ratio: share of the window, and at most half of the prompt, that a prompt above the trigger is compacted
            to, as in the proxy.
        keep_recent_messages: messages at the end that stay as they are; a few more where a tool call would lose its
            results, and of a prompt above the trigger only those that fit below the target. A hand-off keeps only the
            newest request, or the tool round that nobody has answered yet.
        summary_model: that writes summaries; None is `model`.
        summary_window_tokens: the context length of `summary_model`; None is `context_window_tokens`.
        summary_max_tokens: longest summary; also at most 15 % of the window.
        ledger_max_tokens: longest verbatim record beside it; also at most 15 % of the window; 0 is none.
        strategy: how the older part is condensed, as the proxy's setting: `summary` writes a record of it, `prune`
            lets the model choose what goes or becomes shorter, `handoff` writes a hand-over that leaves the last
            request alone behind it. Where a pruning cannot be used, a summary is made.
        temperature: of the summariser.
        system_reserve_tokens: part of the window for system messages and tools; with any reserve both ratios are of
            what all reserves leave, at least a quarter of the window, as in the proxy.
        output_reserve_tokens: part of the window for the answer.
        safety_buffer_tokens: part of the window that stays free.
        timeout_s: seconds after which a summary is given up, its parts and what merges them included.

    Raises:
        ConfigError: a bad value; names the field, the value and what is allowed. (An unknown field is a TypeError.)
    """

    model: str
    context_window_tokens: int
    trigger_ratio: float = 0.80
    target_ratio: float = 0.40
    keep_recent_messages: int = 10
    summary_model: str | None = None
    summary_window_tokens: int | None = None
    summary_max_tokens: int = 800
    ledger_max_tokens: int = 800
    strategy: str = "summary"
    temperature: float = 0.3
    timeout_s: float = 120.0
    system_reserve_tokens: int = 0
    output_reserve_tokens: int = 0
    safety_buffer_tokens: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, getattr(self, field.name))

    @property
    def trigger_tokens(self) -> int:
        """A prompt above this should be compacted."""
        return math.floor(self.trigger_ratio * self._usable_tokens)

    def target_tokens(self, prompt_tokens: int) -> int:
        """To how many tokens a prompt above the trigger is compacted: recent messages are kept only up to this."""
        return min(math.floor(self.target_ratio * self._usable_tokens), prompt_tokens // 2)

    @property
    def summary_tokens(self) -> int:
        """The bound on a summary in this window."""
        return min(self.summary_max_tokens, math.floor(_RECORD_WINDOW_RATIO * self.context_window_tokens))

    @property
    def ledger_tokens(self) -> int:
        """The bound on the ledger in this window."""
        return min(self.ledger_max_tokens, math.floor(_RECORD_WINDOW_RATIO * self.context_window_tokens))

    @property
    def least_ledger_tokens(self) -> int:
        """What recent messages leave to the ledger below the target."""
        return math.floor(_LEAST_LEDGER_RATIO * self.ledger_tokens)

    @property
    def _usable_tokens(self) -> int:
        """What the reserves leave of the window."""
        reserves = self.system_reserve_tokens + self.output_reserve_tokens + self.safety_buffer_tokens
        return self.context_window_tokens - min(reserves, math.floor(RESERVES_MAX_RATIO * self.context_window_tokens))

    def _check(self, name: str, value: object) -> None:
        allowed = _problem(name, value)
        if allowed:
            raise ConfigError(f"CompactionConfig.{name} = {value!r}: allowed is {allowed}")


def _problem(name: str, value: object) -> str:
    """What would be allowed for a field, "" where the value is fine."""
    if name == "strategy":
        return "" if value in tuple(STRATEGIES) else " or ".join(map(repr, STRATEGIES))
    if name in ("model", "summary_model"):
        optional = name == "summary_model" and value is None
        return "" if optional or (isinstance(value, str) and value.strip()) else "the name of a model"
    if name.endswith("_window_tokens"):
        if value is None and name == "summary_window_tokens":
            return ""
        return "" if _is_whole(value, _LEAST_WINDOW_TOKENS) else f"a number of tokens from {_LEAST_WINDOW_TOKENS}"
    if name == "summary_max_tokens":
        return "" if _is_whole(value, 1) else "a number of tokens from 1"
    if name in ("ledger_max_tokens", "keep_recent_messages") or name in _RESERVES:
        return "" if _is_whole(value, 0) else "a whole number from 0"
    low, high, text = {
        "trigger_ratio": (0.0, 1.0, "a share of the window, above 0 and at most 1"),
        "target_ratio": (0.0, 1.0, "a share of the window, above 0 and at most 1"),
        "temperature": (-1e-9, 2.0, "a number from 0 to 2"),
        "timeout_s": (0.0, 86_400.0, "a number of seconds above 0, at most 86400"),
    }[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if is_number and low < float(str(value)) <= high else text


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
