"""The library's settings, checked when they are written down."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from litellm_compaction.config import StrategyName
from litellm_compaction.core.budget import RESERVES_MAX_RATIO
from litellm_compaction.core.strategies import STRATEGIES
from litellm_compaction.errors import ConfigError

# As the proxy bounds its summaries (core/plan.py): in a small window the record may not crowd out the conversation.
_RECORD_WINDOW_RATIO = 0.15
# For recent messages the ledger gives way, as in the proxy, but the user's own words stand in it.
_LEAST_LEDGER_RATIO = 0.25
# Smaller windows do not hold a summariser's instruction and the text that it is about.
_Window: TypeAlias = Annotated[int, Field(ge=1024, description="a number of tokens from 1024")]
_ModelName: TypeAlias = Annotated[str, Field(pattern=r"\S", description="the name of a model")]
_Share: TypeAlias = Annotated[float, Field(gt=0, le=1, description="a share of the window, above 0 and at most 1")]
_Count: TypeAlias = Annotated[int, Field(ge=0, description="a whole number from 0")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionConfig:
    """The library's settings for a compaction.

    Attributes:
        model: gets the conversation; its family says how tokens are counted.
        context_window_tokens: with which that model is really loaded or served. There is no default: a guess would
            let a server cut silently.
        trigger_ratio: share of the window above which `should_compact` says so.
        target_ratio: share of the window, and at most half of the prompt, that a prompt above the trigger is compacted
            to, as in the proxy.
        keep_recent_messages: messages at the end that stay as they are; more if a tool call would lose its results,
            fewer if they would not fit below the target. A hand-off keeps the newest request or open tool round only.
        summary_model: writes summaries; None is `model`.
        summary_window_tokens: the context length of `summary_model`; None is `context_window_tokens`.
        summary_max_tokens: longest summary; also at most 15 % of the window.
        ledger_max_tokens: longest verbatim record that goes with it; also at most 15 % of the window; 0 is none.
        strategy: as the proxy's setting; if a pruning cannot be used, a summary is made.
        temperature: of the summariser.
        system_reserve_tokens, output_reserve_tokens, safety_buffer_tokens: parts of the window for system messages and
            tools, for the answer, and free; with any of them both ratios are of what they leave, at least a quarter
            of the window, as in the proxy.
        timeout_s: seconds after which a summary is given up, its parts and what merges them included.

    Raises:
        ConfigError: a bad value; names the field, the value and what is allowed. (An unknown field is a TypeError.)
    """

    model: _ModelName
    context_window_tokens: _Window
    trigger_ratio: _Share = 0.80
    target_ratio: _Share = 0.40
    keep_recent_messages: _Count = 10
    summary_model: _ModelName | None = None
    summary_window_tokens: _Window | None = None
    summary_max_tokens: Annotated[int, Field(ge=1, description="a number of tokens from 1")] = 800
    ledger_max_tokens: _Count = 800
    strategy: Annotated[StrategyName, Field(description=" or ".join(map(repr, STRATEGIES)))] = "summary"
    temperature: Annotated[float, Field(ge=0, le=2, description="a number from 0 to 2")] = 0.3
    timeout_s: Annotated[float, Field(gt=0, le=86_400, description="a number of seconds above 0, at most 86400")] = (
        120.0
    )
    system_reserve_tokens: _Count = 0
    output_reserve_tokens: _Count = 0
    safety_buffer_tokens: _Count = 0

    def __post_init__(self) -> None:
        for name, (kind, allowed) in _kinds().items():
            value = getattr(self, name)
            try:
                kind.validate_python(value, strict=True)
            except ValidationError:
                raise ConfigError(f"CompactionConfig.{name} = {value!r}: allowed is {allowed}") from None

    @property
    def trigger_tokens(self) -> int:
        return math.floor(self.trigger_ratio * self._usable_tokens)

    @property
    def limit_tokens(self) -> int:
        """The longest prompt: the window without what is reserved for the answer and kept free."""
        reserves = self.output_reserve_tokens + self.safety_buffer_tokens
        return self.context_window_tokens - self._reserved(reserves)

    def target_tokens(self, prompt_tokens: int) -> int:
        """The bound to which a prompt above the trigger is compacted."""
        return min(math.floor(self.target_ratio * self._usable_tokens), prompt_tokens // 2)

    @property
    def summary_tokens(self) -> int:
        return min(self.summary_max_tokens, math.floor(_RECORD_WINDOW_RATIO * self.context_window_tokens))

    @property
    def ledger_tokens(self) -> int:
        return min(self.ledger_max_tokens, math.floor(_RECORD_WINDOW_RATIO * self.context_window_tokens))

    @property
    def least_ledger_tokens(self) -> int:
        """The part of the ledger that recent messages leave it below the target."""
        return math.floor(_LEAST_LEDGER_RATIO * self.ledger_tokens)

    @property
    def _usable_tokens(self) -> int:
        reserves = self.system_reserve_tokens + self.output_reserve_tokens + self.safety_buffer_tokens
        return self.context_window_tokens - self._reserved(reserves)

    def _reserved(self, tokens: int) -> int:
        return min(tokens, math.floor(RESERVES_MAX_RATIO * self.context_window_tokens))


@functools.cache
def _kinds() -> dict[str, tuple[TypeAdapter[object], str]]:
    hints = get_type_hints(CompactionConfig, include_extras=True)
    return {name: (TypeAdapter(hint), _allowed(hint)) for name, hint in hints.items()}


def _allowed(hint: Any) -> str:
    # The first of `… | None` has it.
    limits = getattr(hint, "__metadata__", None) or get_args(hint)[0].__metadata__
    return next(str(found) for limit in limits if (found := getattr(limit, "description", None)))
