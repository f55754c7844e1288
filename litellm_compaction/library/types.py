"""What the library takes and gives: its settings, a division, a result."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, TypeAlias

import pydantic
from pydantic import Field

from litellm_compaction.config import StrategyName
from litellm_compaction.core.budget import RESERVE_MAX_RATIO
from litellm_compaction.core.messages import JsonObject

_Tokens: TypeAlias = Annotated[int, Field(ge=0)]


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config={"strict": True, "extra": "forbid"})
class CompactionConfig:
    """The settings of a compaction; sizes are tokens; a bad value is a ValueError that names it.

    Attributes:
        model_context_limit: the context length with which the model is really loaded, from 1,024.
        system_reserve, output_reserve, safety_buffer: for system messages and tools, for the answer, and free; they
            are added. If they would leave less than a quarter of the window, it is too small for them: none counts.
        threshold_percent: share of the rest at which a conversation is compacted, above 0 and at most 1.
        recent_messages_to_keep: messages at the end that stay verbatim if they fit; a `Compactor` keeps fewer of them
            if the next steps would have no room.
        strategy: as the proxy's setting.
    """

    model_context_limit: Annotated[int, Field(ge=1024)] = 128_000
    system_reserve: _Tokens = 2_000
    output_reserve: _Tokens = 4_000
    safety_buffer: _Tokens = 5_000
    threshold_percent: Annotated[float, Field(gt=0, le=1)] = 0.80
    recent_messages_to_keep: Annotated[int, Field(ge=0)] = 10
    strategy: StrategyName = "summary"

    @property
    def reserved_tokens(self) -> int:
        tokens = self.system_reserve + self.output_reserve + self.safety_buffer
        return tokens if tokens <= RESERVE_MAX_RATIO * self.model_context_limit else 0

    @property
    def threshold_tokens(self) -> int:
        """The size at which a conversation is compacted: 93,600 by default."""
        return math.floor((self.model_context_limit - self.reserved_tokens) * self.threshold_percent)


class CompactionSelection(NamedTuple):
    """A conversation divided; `previous_summary` is "" for none."""

    messages_to_compact: list[JsonObject]
    messages_to_keep: list[JsonObject]
    previous_summary: str


class CompactionEvent(NamedTuple):
    """A compaction: the round of its summary, whole prompts by the engine's count, and the models' text.

    That text includes earlier rounds, and is "" if no model gave a usable one. A message without an `id` is named by
    its position.
    """

    round: int
    tokens_before: int
    tokens_after: int
    summary_content: str
    compacted_message_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """A conversation to go on with.

    Attributes:
        compaction_event: None if nothing changed: the messages are the caller's own.
        replaced: positions in the given messages that are not sent any more, ascending.
        error: why nothing changed, if that failed; after a `DoesNotFit` the messages are longer than the window.
    """

    compacted_messages: list[JsonObject] = field(repr=False)
    compaction_event: CompactionEvent | None = field(default=None, repr=False)
    replaced: tuple[int, ...] = ()
    error: Exception | None = None
