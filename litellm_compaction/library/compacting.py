"""Compacts a conversation by the engine's own compactor; the record travels in the messages, so any call goes on."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TypeAlias

from litellm_compaction import engine
from litellm_compaction.config import Settings, settings_from
from litellm_compaction.core.compaction import apply
from litellm_compaction.core.excerpts import excerpt
from litellm_compaction.core.messages import JsonObject, JsonValue, Message, Request, system_prefix_length
from litellm_compaction.core.record import headed, read_record
from litellm_compaction.core.strategies import STRATEGIES
from litellm_compaction.engine.ask import REQUEST_TOKENS
from litellm_compaction.engine.context import PreparedRequest
from litellm_compaction.library.model import Model
from litellm_compaction.library.tokens import parsed, select_messages_to_compact
from litellm_compaction.library.types import CompactionConfig, CompactionEvent, CompactionResult
from litellm_compaction.stores import memory_store
from litellm_compaction.summarizer import SummaryJob, summarize
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Windows

logger = logging.getLogger("litellm_compaction")

Messages: TypeAlias = Sequence[JsonObject]
Tools: TypeAlias = Sequence[JsonValue]

# How much too high the tokens of such a family are counted; by the middle they may be as much too low.
_UNKNOWN, _ERRS_HIGH = "unknown", 1.2
_STORE_S, _STORE_BYTES = 86_400.0, 1 << 24


class Compactor:
    """Keeps a session's conversation inside the window: below the threshold it stays as it is.

    The caller goes on with what comes back, or sends the whole history again: that gets the same compaction again.
    """

    def __init__(self, model: Model, config: CompactionConfig, *, session_id: str = "") -> None:
        self._model, self._config, self._session_id = model, config, session_id
        # The second counter never learns.
        self._family, self._estimates = family_of("", model.name), TokenCounter()
        store = memory_store(ttl_s=_STORE_S, max_bytes=_STORE_BYTES)
        self._engine = engine.Compactor(windows=Windows(cache_s=_STORE_S), counter=TokenCounter(), store=store)

    async def __call__(self, messages: Messages, *, tools: Tools = ()) -> CompactionResult:
        """As `safe_compact`, if the conversation is above the threshold by the engine's own count."""
        return await _safely(messages, self.compact(messages, tools=tools, is_wanted=False))

    async def compact(self, messages: Messages, *, tools: Tools = (), is_wanted: bool = True) -> CompactionResult:
        """As the function `compact`; what is not `is_wanted` happens only above the threshold."""
        if len(conversation := parsed(messages)) < 2:
            return CompactionResult(compacted_messages=[*messages])
        found, config = read_record(conversation), self._config
        own, places = found.unfolded(conversation) if found else ([*conversation], [*range(len(conversation))])
        division = select_messages_to_compact(messages, config.recent_messages_to_keep)
        context = replace(
            self._model.context(config.model_context_limit, _settings(config, self._family.name)),
            scope=self._session_id,
            now=is_wanted and bool(division.messages_to_compact),
            portable=(found.base,) if found else (),
            measure=self._measured if self._family.name == _UNKNOWN else None,
            writes_whole_records=True,
        )
        prepared = await self._engine.guard(Request(messages=tuple(own), tools=tuple(tools)), context)
        record = prepared.compaction
        # The record that came with the messages may stand for what it has stood for, and nothing else has changed.
        is_known = found and record and record.record == found.base.record
        if prepared.messages is None or (
            is_known and record and _texts(prepared.messages) == _texts(apply(own, record))
        ):
            return CompactionResult(compacted_messages=[*messages])
        return _result(messages, prepared, own, places)

    async def _measured(self, request: Request, *, answer_tokens: int = 1) -> int:
        """What a server would be asked for: of a model that is not known the middle of our estimate."""
        return math.ceil((await self._estimates.count("", self._family, request)).tokens / _ERRS_HIGH)

    async def aclose(self) -> None:
        """Forgets the session."""
        await self._engine.aclose()


async def compact(
    messages: Messages, session_id: str, model: Model, config: CompactionConfig, *, tools: Tools = ()
) -> CompactionResult:
    """Condenses everything but system messages and the recent ones; `should_compact` says when that is worth it.

    The summary stands in the first user message, with what is copied without a model. One that the messages carry is
    integrated. Above the threshold a summary that fails is done without; below it nothing changes then, or if little
    would be gained. `tools` are only counted; the caller's list and dicts are never changed.

    Raises:
        DoesNotFit: what no compaction changes is longer than the window; says what takes how many tokens.
        ValueError: an entry is not a message.
    """
    compactor = Compactor(model, config, session_id=session_id)
    try:
        return await compactor.compact(messages, tools=tools)
    finally:
        await compactor.aclose()


async def safe_compact(
    messages: Messages, session_id: str, model: Model, config: CompactionConfig, *, tools: Tools = ()
) -> CompactionResult:
    """As `compact`, but any failure is logged, and the messages come back unchanged; cancellation passes through."""
    return await _safely(messages, compact(messages, session_id, model, config, tools=tools))


async def generate_summary(
    messages: Messages,
    previous_summary: str,
    original_task: str,
    round: int,  # noqa: A002 - the name of its specification
    model: Model,
    *,
    window_tokens: int = 128_000,
) -> str:
    """A summary of the messages; one call, or several if they do not fit the window at once.

    `previous_summary` ("" for none) is integrated, not repeated; `original_task` is the request being worked on.

    Raises:
        SummaryFailed: no usable summary; `reason` says why in one word, `__cause__` what the model's function raised.
    """
    strategy, settings = STRATEGIES["summary"], settings_from(None)
    count, tokens = (
        TokenCounter().text_counter(model.name, family_of("", model.name)),
        settings.constants.summary_max_tokens,
    )
    job = SummaryJob(
        messages=strategy.history(parsed(messages)),
        earlier=previous_summary,
        request=excerpt(original_task, REQUEST_TOKENS, count),
        summary_tokens=tokens,
        prompt_limit_tokens=max(window_tokens - 2 * tokens, window_tokens // 2),
        round_number=round,
        strategy=strategy,
    )
    text = await summarize(job, model.ask, count, timeout_s=settings.summary_timeout_s)
    return f"### Session Summary (Compaction Round {round})\n\n{text}"


def _settings(config: CompactionConfig, family: str) -> Settings:
    defaults = settings_from(None)
    doubt_tokens = math.ceil(config.model_context_limit * (1 - 1 / _ERRS_HIGH)) if family == _UNKNOWN else 0
    answer_tokens = max(defaults.constants.answer_min_tokens, doubt_tokens)
    update: dict[str, object] = {
        "pre_request_ratio": config.threshold_percent,
        "target_ratio": min(defaults.target_ratio, config.threshold_percent / 2),
        "reserve_tokens": config.reserved_tokens,
        "keep_recent_messages": config.recent_messages_to_keep,
        "strategy": config.strategy,
    }
    return defaults.model_copy(update=update).with_constants(
        replace(
            defaults.constants,
            # Room for the answer is what the caller reserves.
            output_buffer_ratio=0.0,
            output_buffer_min_tokens=0,
            answer_min_tokens=answer_tokens,
            reasoning_answer_min_tokens=answer_tokens,
            # The messages are all there is: of a stub no later summary could read the result.
            clear_tool_results=False,
        )
    )


def _texts(messages: Sequence[Message]) -> list[str]:
    return [message.text for message in messages]


def _result(
    messages: Messages, prepared: PreparedRequest, own: Sequence[Message], places: Sequence[int]
) -> CompactionResult:
    sent, record, prefix = prepared.messages or (), prepared.compaction, system_prefix_length(own)
    raw: list[JsonObject] = [each.raw for each in sent]
    raw[prefix : prefix + 1] = [headed(each, prepared.round).raw for each in sent[prefix : prefix + 1]]
    for behind, (theirs, ours) in enumerate(zip(reversed(own), reversed(sent), strict=False), 1):
        if (theirs.role, theirs.text, theirs.calls) != (ours.role, ours.text, ours.calls):
            break
        # Also with `null` content, as it came.
        raw[-behind] = theirs.raw
    if record is not None:
        gone = {prefix + at for at in record.gone}
    else:
        # The hardest compaction, which no store keeps, covers all but the user's words and the conversation's end.
        covered = range(prefix, prefix + len(own) - len(sent) + 1 if prepared.round else prefix)
        gone = {at for at in covered if own[at].role != "user" or own[at].text not in sent[prefix].text}
    replaced = tuple(sorted({places[at] for at in gone} - {place for at, place in enumerate(places) if at not in gone}))
    event = CompactionEvent(
        round=prepared.round,
        tokens_before=prepared.tokens_before,
        tokens_after=prepared.count.tokens,
        summary_content=record.model_text if record else "",
        compacted_message_ids=tuple(str(messages[at].get("id", at)) for at in replaced),
    )
    return CompactionResult(compacted_messages=raw, compaction_event=event, replaced=replaced)


async def _safely(messages: Messages, compacting: Awaitable[CompactionResult]) -> CompactionResult:
    try:
        return await compacting
    except Exception as error:  # noqa: BLE001 - an agent goes on without a compaction rather than not at all
        cause = type(error.__cause__ or error).__name__
        logger.warning("library_compaction_failed error=%s cause=%s", type(error).__name__, cause)
        return CompactionResult(compacted_messages=[*messages], error=error)
