"""The library's front door: a conversation in, the same or a shorter one out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from litellm_compaction.core.anchors import ledger
from litellm_compaction.core.compaction import Compaction, apply
from litellm_compaction.core.messages import JsonObject, JsonValue, Message, newest_user_index, visible_text
from litellm_compaction.core.plan import MIN_GAIN_RATIO
from litellm_compaction.core.records import Record, ledger_messages, listable, write_record
from litellm_compaction.core.weights import RECORD_TOKENS
from litellm_compaction.library.config import CompactionConfig
from litellm_compaction.library.selection import Selected, Unselected, select
from litellm_compaction.library.summaries import Completion, summary_of
from litellm_compaction.library.tokens import parsed, prompt_tokens, text_counter

logger = logging.getLogger("litellm_compaction")

# Of the ledger the user's own words may take so much, as in the proxy (core/plan.py).
_WORDS_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """What to send, and what was done.

    Attributes:
        messages: the conversation to go on with; where `compacted` is false, the caller's own dicts.
        compacted: whether anything changed.
        reason: why nothing changed, else "": as `CompactionSelection.reason`, `no_gain` where less than 10 % would
            have been saved, or `error` (`safe_compact` only).
        round: of the summary in front, 0 for none.
        summary: what the model wrote, "" where it was not asked.
        summarized_messages: how many messages the summary stands for, without those of earlier rounds.
        tokens_before: of the prompt as it came, tools included; 0 where it was not counted (`empty`, `error`).
        tokens_after: of the prompt with `messages`.
        error: what went wrong (`safe_compact` only).
    """

    messages: list[dict[str, JsonValue]] = field(repr=False)
    compacted: bool
    reason: Unselected | Literal["no_gain", "error"] = ""
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
) -> CompactionResult:
    """The conversation with one summary in place of everything but system messages and the recent messages.

    It compacts whenever there is something to summarize; `should_compact` says when that is worth it. The record
    stands in the first user message, framed as data: the heading `## Session Summary (round N)`, the summary, and
    beside it, copied without a model, the user's own words, paths, numbers, commands and errors. A record that the
    messages carry already is integrated, and its round counted up.

    Args:
        messages: n, oldest first, as in a chat completion request; neither the list nor a dict in it is changed.
        config: window, model, how much is kept.
        acompletion: writes the summary; called with `model=, messages=, max_tokens=, temperature=`.
        tools: schemas that are sent with the messages; only counted.

    Raises:
        SummaryFailed: the summariser gave nothing usable.
        ValueError: an entry is not a message.
    """
    conversation = parsed(messages)
    selected = select(conversation, config.keep_recent_messages)
    carried = selected.earlier.round if selected.earlier else 0
    if selected.reason == "empty":
        return CompactionResult(messages=[], compacted=False, reason="empty")
    tokens_before = await prompt_tokens(conversation, config.model, tools)
    if selected.reason:
        return _unchanged(messages, selected.reason, carried, tokens_before)
    if await _best_gain_tokens(selected, config) < tokens_before * MIN_GAIN_RATIO:
        # Nobody is asked for what could not be used: an agent would ask again in every step.
        return _unchanged(messages, "no_gain", carried, tokens_before)
    newest = newest_user_index(selected.messages)
    summary = await summary_of(
        selected.fresh,
        config,
        acompletion,
        earlier=selected.earlier.summary if selected.earlier else "",
        request="" if newest is None else selected.messages[newest].text,
        round_number=carried + 1,
    )
    verbatim = await asyncio.to_thread(_ledger, selected, summary, config)
    record = Record(summary=summary, ledger=verbatim, round=carried + 1)
    shown = _shown(selected, record)
    tokens_after = await prompt_tokens(shown, config.model, tools)
    if tokens_after > tokens_before * (1 - MIN_GAIN_RATIO):
        return _unchanged(messages, "no_gain", carried, tokens_before)
    logger.info(
        "library_compaction model=%s round=%d messages=%d tokens_before=%d tokens_after=%d",
        config.model,
        record.round,
        len(selected.fresh),
        tokens_before,
        tokens_after,
    )
    return CompactionResult(
        messages=[dict(message.raw) for message in shown],
        compacted=True,
        round=record.round,
        summary=summary,
        summarized_messages=len(selected.fresh),
        tokens_before=tokens_before,
        tokens_after=tokens_after,
    )


async def safe_compact(
    messages: Sequence[JsonObject],
    config: CompactionConfig,
    acompletion: Completion,
    *,
    tools: Sequence[JsonValue] = (),
) -> CompactionResult:
    """As `compact`, but never raises: on any error the messages come back unchanged, with `reason` "error".

    Cancellation passes through. `result.error` says what went wrong, and a warning names its type in the log.
    """
    try:
        return await compact(messages, config, acompletion, tools=tools)
    except Exception as error:  # noqa: BLE001 - an agent goes on without a compaction rather than not at all
        logger.warning("library_compaction_failed model=%s error=%s", config.model, type(error).__name__)
        return CompactionResult(messages=_own(messages), compacted=False, reason="error", error=error)


async def _best_gain_tokens(selected: Selected, config: CompactionConfig) -> int:
    """What the shortest summary would save; an earlier record makes room for the new one."""
    pinned = () if selected.pinned is None else (selected.covered[selected.pinned],)
    left = (*selected.system, *pinned, *selected.tail)
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


def _ledger(selected: Selected, summary: str, config: CompactionConfig) -> str:
    """What the record quotes: of the earlier ledger and of what is newly covered."""
    earlier = ledger_messages(selected.earlier.ledger) if selected.earlier else []
    kept = [*selected.tail, *(selected.covered[at] for at in (selected.pinned,) if at is not None)]
    return ledger(
        [*earlier, *map(listable, selected.fresh)],
        budget_tokens=config.ledger_tokens,
        words_tokens=int(_WORDS_SHARE * config.ledger_tokens),
        count=text_counter(config.model),
        known="\n".join((summary, *map(visible_text, kept))),
        newer=selected.tail,
    )


def _shown(selected: Selected, record: Record) -> tuple[Message, ...]:
    """The shorter conversation; what is kept stays as it came, `null` content included."""
    compaction = Compaction(
        covered_messages=len(selected.covered),
        covered_hash="",
        pinned=selected.pinned,
        round=record.round,
        segments=(),
        ledger="",
        rung="summary",
    )
    shown = apply(selected.messages, compaction, record=write_record(record))
    # A user message that opens the tail carries the record; the others are put back as they were.
    as_they_came = selected.tail[1:] if selected.tail[0].role == "user" else selected.tail
    return (*shown[: len(shown) - len(as_they_came)], *as_they_came)
