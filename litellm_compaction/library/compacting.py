"""The library's front door: a conversation in, the same or a shorter one out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from litellm_compaction.core.conversation import RECORD_TOKENS
from litellm_compaction.core.messages import JsonObject, JsonValue
from litellm_compaction.core.plan import MIN_GAIN_RATIO
from litellm_compaction.core.prompts import one_line_topic
from litellm_compaction.core.strategies import STRATEGIES
from litellm_compaction.library.config import CompactionConfig
from litellm_compaction.library.making import Made, pruned, summarized
from litellm_compaction.library.selection import Selected, Unselected, select
from litellm_compaction.library.summaries import Completion
from litellm_compaction.library.tokens import parsed, prompt_tokens

logger = logging.getLogger("litellm_compaction")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """What to send, and what was done.

    Attributes:
        messages: the conversation to go on with; where `compacted` is false, the caller's own dicts.
        compacted: whether anything changed.
        reason: why nothing changed, else "": as `CompactionSelection.reason`, `no_gain` where less than 10 % would
            have been saved, or `error` (`safe_compact` only).
        strategy: that made it, "" where nothing changed: the configured one, or `summary` after a pruning that could
            not be used.
        round: of the summary in front, 0 for none.
        summary: what the model wrote, "" where it was not asked; after a pruning, behind what earlier ones said.
        summarized_messages: how many messages are not sent any more, without those of earlier rounds.
        tokens_before: of the prompt as it came, tools included; 0 where it was not counted (`empty`, `error`).
        tokens_after: of the prompt with `messages`.
        error: what went wrong (`safe_compact` only).
    """

    messages: list[dict[str, JsonValue]] = field(repr=False)
    compacted: bool
    reason: Unselected | Literal["no_gain", "error"] = ""
    strategy: str = ""
    round: int = 0
    summary: str = field(default="", repr=False)
    summarized_messages: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    error: Exception | None = None


async def compact(
    messages: Sequence[JsonObject],
    config: CompactionConfig,
    acompletion: Completion,
    *,
    tools: Sequence[JsonValue] = (),
    focus: str = "",
) -> CompactionResult:
    """The conversation with one summary in place of everything but system messages and the recent messages.

    So `strategy` `summary` does; `prune` leaves of the older messages what its model wants to keep, `handoff` keeps
    only the last request and the tool round that is still open. It compacts whenever there is something to condense;
    `should_compact` says when that is worth it. The record stands in the first user message, framed as data: the
    heading `## Session Summary (round N)`, what the model wrote, and beside it, copied without a model, the user's own
    words, paths, numbers, commands and errors. A record that the messages carry already is integrated (a pruning goes
    on from it), and its round counted up.

    Args:
        messages: n, oldest first, as in a chat completion request; neither the list nor a dict in it is changed.
        config: window, model, how much is kept.
        acompletion: writes the summary; called with `model=, messages=, max_tokens=, temperature=`.
        tools: schemas that are sent with the messages; only counted.
        focus: a topic that is kept in more detail, "" for none; the model gets it as data.

    Raises:
        SummaryFailed: the summariser gave nothing usable.
        ValueError: an entry is not a message, or `focus` has more than 500 characters.
    """
    topic = one_line_topic(focus)
    conversation = parsed(messages)
    selected = select(conversation, config)
    carried = selected.earlier.round if selected.earlier else 0
    if selected.reason == "empty":
        return CompactionResult(messages=[], compacted=False, reason="empty")
    tokens_before = await prompt_tokens(conversation, config.model, tools)
    if selected.reason:
        return _unchanged(messages, selected.reason, carried, tokens_before)
    if await _best_gain_tokens(selected, config) < tokens_before * MIN_GAIN_RATIO:
        # Nobody is asked for what could not be used: an agent would ask again in every step.
        return _unchanged(messages, "no_gain", carried, tokens_before)
    enough_tokens = int(tokens_before * (1 - MIN_GAIN_RATIO))
    made: Made | None = None
    if STRATEGIES[config.strategy].chooses:
        made = await pruned(selected, config, acompletion, tokens_before=tokens_before, focus=topic)
        tokens_after = await prompt_tokens(made.messages, config.model, tools) if made else 0
        if tokens_after > min(enough_tokens, config.trigger_tokens):
            # As in the proxy: what saves too little, or leaves too much, is followed by a summary.
            made = None
    if made is None:
        made = await summarized(selected, config, acompletion, focus=topic)
        tokens_after = await prompt_tokens(made.messages, config.model, tools)
    if tokens_after > enough_tokens:
        return _unchanged(messages, "no_gain", carried, tokens_before)
    logger.info(
        "library_compaction model=%s strategy=%s round=%d messages=%d tokens_before=%d tokens_after=%d",
        config.model,
        made.strategy,
        carried + 1,
        made.gone,
        tokens_before,
        tokens_after,
    )
    return CompactionResult(
        messages=[dict(message.raw) for message in made.messages],
        compacted=True,
        strategy=made.strategy,
        round=carried + 1,
        summary=made.summary,
        summarized_messages=made.gone,
        tokens_before=tokens_before,
        tokens_after=tokens_after,
    )


async def safe_compact(
    messages: Sequence[JsonObject],
    config: CompactionConfig,
    acompletion: Completion,
    *,
    tools: Sequence[JsonValue] = (),
    focus: str = "",
) -> CompactionResult:
    """As `compact`, but never raises: on any error the messages come back unchanged, with `reason` "error".

    Cancellation passes through. `result.error` says what went wrong, and a warning names its type in the log.
    """
    try:
        return await compact(messages, config, acompletion, tools=tools, focus=focus)
    except Exception as error:  # noqa: BLE001 - an agent goes on without a compaction rather than not at all
        logger.warning("library_compaction_failed model=%s error=%s", config.model, type(error).__name__)
        return CompactionResult(messages=_own(messages), compacted=False, reason="error", error=error)


async def _best_gain_tokens(selected: Selected, config: CompactionConfig) -> int:
    """What the shortest summary would save; an earlier record makes room for the new one."""
    left = (*selected.system, *selected.kept, *selected.tail)
    fresh_tokens = await prompt_tokens(selected.messages, config.model, ()) - await prompt_tokens(
        left, config.model, ()
    )
    return fresh_tokens - (0 if selected.earlier else RECORD_TOKENS)


def _unchanged(
    messages: Sequence[JsonObject], reason: Unselected | Literal["no_gain"], carried: int, tokens: int
) -> CompactionResult:
    return CompactionResult(
        messages=_own(messages),
        compacted=False,
        reason=reason,
        round=carried,
        tokens_before=tokens,
        tokens_after=tokens,
    )


def _own(messages: Sequence[JsonObject]) -> list[dict[str, JsonValue]]:
    """The caller's messages in a list of their own; what is no mapping stays what it is."""
    return cast("list[dict[str, JsonValue]]", [_dict(message) for message in messages])


def _dict(message: object) -> object:
    return dict(message) if isinstance(message, Mapping) and not isinstance(message, dict) else message
