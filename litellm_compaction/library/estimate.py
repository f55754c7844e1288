"""The settings of a compaction, and all that they decide without a model: an estimate, a threshold, a division."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import pydantic
from pydantic import Field, NonNegativeInt

from litellm_compaction.config import StrategyName
from litellm_compaction.core.budget import RESERVE_MAX_RATIO
from litellm_compaction.core.messages import JsonObject, Message, parse_message, system_prefix_length
from litellm_compaction.core.portable import read_record
from litellm_compaction.core.view import legal_cuts

# The second for an image, a sound, a file: what OpenAI's vision models take for a large picture, rounded up.
_ROLE_TOKENS, _PART_TOKENS = 2, 1200


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config={"strict": True, "extra": "forbid"})
class CompactionConfig:
    """The settings of a compaction; sizes are tokens; a bad value is a ValueError that names it.

    Attributes:
        model_context_limit: the context length with which the model is really loaded, from 1,024.
        system_reserve, output_reserve, safety_buffer: are added; none counts if less than a quarter would be left.
        threshold_percent: share of the rest at which a conversation is compacted, above 0 and at most 1.
        recent_messages_to_keep: stay verbatim if they, and the next steps, fit.
    """

    model_context_limit: Annotated[int, Field(ge=1024)] = 128_000
    system_reserve: NonNegativeInt = 2_000
    output_reserve: NonNegativeInt = 4_000
    safety_buffer: NonNegativeInt = 5_000
    threshold_percent: Annotated[float, Field(gt=0, le=1)] = 0.80
    recent_messages_to_keep: NonNegativeInt = 10
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


def estimate_tokens(text: object) -> int:
    """ceil(characters / 4), 0 for anything that is no text; about 30 % too low for code and numbers."""
    return -(-len(text) // 4) if isinstance(text, str) else 0


def estimate_messages_tokens(messages: Sequence[JsonObject]) -> int:
    """For each message 2 for its role, its text, its calls and results (as JSON); 1,200 for any other part."""
    return sum(map(_message_tokens, parsed(messages)))


def should_compact(messages: Sequence[JsonObject], config: CompactionConfig) -> bool:
    """Returns True from `config.threshold_tokens` on; False for no more than `recent_messages_to_keep + 1` messages."""
    is_short = len(messages) <= config.recent_messages_to_keep + 1
    return not is_short and estimate_messages_tokens(messages) >= config.threshold_tokens


def select_messages_to_compact(messages: Sequence[JsonObject], keep_last: int = 10) -> CompactionSelection:
    """Divides a conversation before its last `keep_last` messages, or further back, behind what opens it."""
    conversation = parsed(messages)
    record, start = read_record(conversation), system_prefix_length(conversation)
    if record is not None and record.at == start and record.rest is None:
        start += 1
    newest = len(conversation) - keep_last
    cut = max((each for each in legal_cuts(conversation) if start < each <= newest), default=start)
    kept = [*messages[:start], *messages[cut:]]
    return CompactionSelection([*messages[start:cut]], kept, record.base.summary if record else "")


def parsed(messages: Sequence[JsonObject]) -> tuple[Message, ...]:
    """The messages as the core knows them; a ValueError says which entry is none."""
    for index, raw in enumerate(messages):
        if not isinstance(raw, Mapping) or not isinstance(raw.get("role"), str):
            raise ValueError(f"messages[{index}]: expected an object with a role")  # noqa: TRY004 - as all bad shapes
    return tuple(map(parse_message, messages))


def _message_tokens(message: Message) -> int:
    content = message.raw.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    said = [part for part in parts if part.get("type") in ("tool-call", "tool-result")]
    said += [{"name": call.name, "arguments": call.arguments} for call in message.calls]
    texts = [message.text, message.reasoning, *(json.dumps(each, ensure_ascii=False, default=str) for each in said)]
    others = sum(kind not in ("tool-call", "tool-result") for kind in message.other_parts)
    return _ROLE_TOKENS + sum(map(estimate_tokens, texts)) + _PART_TOKENS * others
