"""One object for an agent loop: given configuration and model once, called before each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from litellm_compaction.core.messages import JsonObject, JsonValue
from litellm_compaction.library.compacting import CompactionResult, safe_compact
from litellm_compaction.library.config import CompactionConfig
from litellm_compaction.library.context import Completion


@dataclass(frozen=True, slots=True)
class Compactor:
    """Counts a conversation, and compacts it if it is above the trigger. Holds no conversation; serves any number.

    Attributes:
        config: window, model, trigger, how much is kept.
        acompletion: writes the summaries; called with `model=, messages=, max_tokens=, temperature=`.
    """

    config: CompactionConfig
    acompletion: Completion = field(repr=False)

    async def __call__(
        self, messages: Sequence[JsonObject], *, tools: Sequence[JsonValue] = (), focus: str = ""
    ) -> CompactionResult:
        """What to send next: as `safe_compact`, with `reason` "below_trigger" for a prompt that needs nothing.

        Args:
            messages: n, oldest first; neither the list nor a dict in it is changed.
            tools: schemas that are sent with the messages; only counted.
            focus: a topic that is kept in more detail, "" for none.
        """
        return await safe_compact(
            messages, self.config, self.acompletion, tools=tools, focus=focus, above_trigger_only=True
        )
