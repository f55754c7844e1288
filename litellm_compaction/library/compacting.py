"""The library's front door: a conversation in, the same or a shorter one out; or a summary alone.

`selection` decides which messages are recent; the engine condenses the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, cast

from litellm_compaction.concurrency import off_loop
from litellm_compaction.core.budget import itemized
from litellm_compaction.core.clearing import edited, superseded_reads
from litellm_compaction.core.compaction import Compaction, Segment, apply
from litellm_compaction.core.conversation import RECORD_TOKENS, kept_tokens
from litellm_compaction.core.excerpts import excerpt
from litellm_compaction.core.messages import JsonObject, JsonValue, Message
from litellm_compaction.core.plan import MIN_GAIN_RATIO, Level, Prune, Summarize
from litellm_compaction.core.prompts import one_line_topic
from litellm_compaction.core.record import Record, taken_out, write_record
from litellm_compaction.core.refusal import protected_shares
from litellm_compaction.core.strategies import STRATEGIES, chooses, lead_in, strategy_of, writer_of
from litellm_compaction.engine.ask import REQUEST_TOKENS
from litellm_compaction.engine.context import Effort, MeasuredRequest
from litellm_compaction.errors import CompactionError, DoesNotFit, ServerUnavailable, Share, SummaryFailed
from litellm_compaction.library.config import CompactionConfig
from litellm_compaction.library.context import Call, Completion, begin
from litellm_compaction.library.selection import Selected, Unselected, select
from litellm_compaction.library.tokens import parsed, prompt_tokens
from litellm_compaction.summarizer import SummaryJob

logger = logging.getLogger("litellm_compaction")

# A pruning aims at half of the prompt, as in the proxy.
_PRUNED_SHARE = 0.5
_LEAST_SUMMARY_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """A conversation to go on with, and how it was made.

    Attributes:
        messages: to be sent; the caller's own dicts unless `compacted`.
        reason: why nothing changed, else "": as `CompactionSelection.reason`, `no_gain` if less than 10 % would
            have been saved, `below_trigger` (if asked for), or `error` (`safe_compact` and `Compactor`).
        strategy: the one that made it, "" if nothing changed: the configured one, `summary` after a pruning that
            could not be used, or `truncate` if no model's text could be: the ledger stands alone.
        round: of the summary in front, 0 for none.
        summary: the model's text, without secrets, "" if it was not asked; a pruning's follows what earlier ones said.
        summarized_messages: the number of messages that are not sent any more, without those of earlier rounds.
        replaced: the positions in the given messages that the record stands for, ascending; a message that was an
            earlier record and nothing else is one of them.
        tokens_before: of the prompt as it came, tools included; 0 if it was not counted (`empty`, `error`).
        tokens_after: of the prompt with `messages`.
        error: of `safe_compact` and `Compactor`; with `truncate` the reason for it.
    """

    messages: list[dict[str, JsonValue]] = field(repr=False)
    compacted: bool
    reason: Unselected | Literal["below_trigger", "no_gain", "error"] = ""
    strategy: str = ""
    round: int = 0
    summary: str = field(default="", repr=False)
    summarized_messages: int = 0
    replaced: tuple[int, ...] = ()
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
    above_trigger_only: bool = False,
) -> CompactionResult:
    """Condenses everything but system messages and the recent messages, as `config.strategy` says.

    It compacts whenever there is something to condense; `should_compact` says when that is worth it. The record stands
    in the first user message, framed as data: the heading `## Session Summary (round N)`, the model's text, and, copied
    without a model, the user's own words, paths, numbers, commands and errors. A record that the messages carry already
    is integrated (a pruning goes on from it), and its round counted up. What comes back fits the window. Above the
    trigger a summary that fails is done without.

    Args:
        messages: n, oldest first, as in a chat completion request; neither the list nor a dict in it is changed.
        acompletion: writes the summary; called with `model=, messages=, max_tokens=, temperature=`.
        tools: schemas that are sent with the messages; only counted.
        focus: a topic that is kept in more detail, "" for none; the model gets it as data.
        above_trigger_only: leaves a prompt that is not above the trigger as it is, with `reason` "below_trigger".

    Raises:
        DoesNotFit: what no compaction changes is longer than the window; says what takes how many tokens.
        SummaryFailed: the summariser gave nothing usable, and the prompt is not above the trigger.
        ValueError: an entry is not a message, or `focus` has more than 500 characters.
    """
    topic = one_line_topic(focus)
    conversation = parsed(messages)
    if not conversation:
        return CompactionResult(messages=[], compacted=False, reason="empty")
    tokens_before = await prompt_tokens(conversation, config.model, tools)
    selected = select(conversation, config, tokens=tokens_before, tools=tools)

    def unchanged(reason: Unselected | Literal["below_trigger", "no_gain"]) -> CompactionResult:
        return CompactionResult(
            messages=_own(messages),
            compacted=False,
            reason=reason,
            round=selected.earlier.round if selected.earlier else 0,
            tokens_before=tokens_before,
            tokens_after=tokens_before,
        )

    if above_trigger_only and tokens_before <= config.trigger_tokens:
        return unchanged("below_trigger")
    is_too_long = tokens_before > config.limit_tokens
    if selected.reason and not is_too_long:
        return unchanged(selected.reason)
    call = await begin(selected.messages, config, acompletion, tools=tools, focus=topic, earlier=selected.earlier)
    # A prompt that is too long has to fit; another has to gain.
    enough_tokens = max(int(tokens_before * (1 - MIN_GAIN_RATIO)), config.limit_tokens if is_too_long else 0)
    if selected.reason or tokens_before - _best_gain_tokens(selected, call.measured) > enough_tokens:
        # No model is asked for what could not be used: an agent would ask again in every step.
        if is_too_long:
            raise _does_not_fit(config, call.measured, tokens_before)
        return unchanged("no_gain")
    levels = await off_loop(selected.messages, lambda: _levels(selected, config, call.measured, tokens_before))
    built = await _built(call, levels, selected)
    tokens_after = await prompt_tokens(built.messages, config.model, tools)
    is_chosen = chooses(built.compaction.level)
    if isinstance(levels[0], Prune) and is_chosen and tokens_after > min(enough_tokens, config.trigger_tokens):
        # Counted as it is sent it saves too little, or leaves too much: the summary's turn, as in the proxy.
        built = await _built(call, levels[1:], selected)
        tokens_after = await prompt_tokens(built.messages, config.model, tools)
    if built.failure is not None and tokens_before <= config.trigger_tokens:
        # The caller's messages say more than a record without a summary, and may stay.
        raise built.failure
    if tokens_after > config.limit_tokens:
        built = await _without_words(built, selected)
        tokens_after = await prompt_tokens(built.messages, config.model, tools)
        if tokens_after > config.limit_tokens:
            raise _does_not_fit(config, call.measured, tokens_before)
    if tokens_after > enough_tokens:
        return unchanged("no_gain")
    compaction = built.compaction
    logger.info(
        "library_compaction model=%s strategy=%s round=%d messages=%d tokens_before=%d tokens_after=%d",
        config.model,
        compaction.level,
        compaction.round,
        len(built.gone),
        tokens_before,
        tokens_after,
    )
    return CompactionResult(
        messages=[dict(message.raw) for message in built.messages],
        compacted=True,
        strategy=compaction.level,
        round=compaction.round,
        summary=compaction.model_text,
        summarized_messages=len(built.gone),
        replaced=selected.replaced(built.gone),
        tokens_before=tokens_before,
        tokens_after=tokens_after,
        error=built.failure,
    )


async def safe_compact(
    messages: Sequence[JsonObject],
    config: CompactionConfig,
    acompletion: Completion,
    *,
    tools: Sequence[JsonValue] = (),
    focus: str = "",
    above_trigger_only: bool = False,
) -> CompactionResult:
    """As `compact`, but never raises: on any error the messages come back unchanged, with `reason` "error".

    Cancellation passes through. `result.error` says what went wrong, and a warning names its type in the log.
    """
    try:
        return await compact(
            messages, config, acompletion, tools=tools, focus=focus, above_trigger_only=above_trigger_only
        )
    except Exception as error:  # noqa: BLE001 - an agent goes on without a compaction rather than not at all
        logger.warning(
            "library_compaction_failed model=%s reason=%s error=%s cause=%s",
            config.model,
            error.reason if isinstance(error, SummaryFailed) else "error",
            type(error).__name__,
            type(error.__cause__ or error).__name__,
        )
        return CompactionResult(messages=_own(messages), compacted=False, reason="error", error=error)


@dataclass(frozen=True, slots=True)
class Compactor:
    """Counts a conversation, and compacts it if it is above the trigger. Holds no conversation; serves any number."""

    config: CompactionConfig
    acompletion: Completion = field(repr=False)

    async def __call__(
        self, messages: Sequence[JsonObject], *, tools: Sequence[JsonValue] = (), focus: str = ""
    ) -> CompactionResult:
        """As `safe_compact`, with `reason` "below_trigger" for a prompt that needs nothing."""
        return await safe_compact(
            messages, self.config, self.acompletion, tools=tools, focus=focus, above_trigger_only=True
        )


async def generate_summary(
    messages: Sequence[JsonObject],
    config: CompactionConfig,
    acompletion: Completion,
    *,
    earlier: str = "",
    request: str = "",
    round_number: int = 1,
    focus: str = "",
) -> str:
    """A summary of the messages, without any framing; one call, or several if they do not fit the window at once.

    Args:
        messages, config, acompletion, focus: as of `compact`.
        earlier: a summary that the new one integrates, "" for none.
        request: the user's present request, for orientation, "" for none.
        round_number: of the compaction, from 1.

    Raises:
        SummaryFailed: no usable summary; `reason` says why in one word, and `__cause__` what `acompletion` raised.
        ValueError: an entry is not a message, or `focus` has more than 500 characters.
    """
    topic = one_line_topic(focus)
    conversation = parsed(messages)
    call = await begin(conversation, config, acompletion, focus=topic)

    def job() -> SummaryJob:
        # Of repeated reads the newest says all: the room is better spent on the rest.
        earlier_quotes, fresh = taken_out(edited(conversation, superseded_reads(conversation)))
        strategy = strategy_of(writer_of(config.strategy))
        return SummaryJob(
            messages=strategy.history(fresh),
            earlier="\n\n".join(filter(None, (earlier, earlier_quotes.summary if earlier_quotes else ""))),
            request=excerpt(request, REQUEST_TOKENS, call.measured.count_text),
            summary_tokens=config.summary_tokens,
            prompt_limit_tokens=0,
            round_number=round_number,
            strategy=strategy,
            focus=topic,
        )

    effort = Effort()
    summary = await call.summary_client.written(call.measured, await off_loop(conversation, job), effort)
    if not summary:
        raise effort.failure or SummaryFailed(effort.reason)
    return summary


def _best_gain_tokens(selected: Selected, measured: MeasuredRequest) -> int:
    """The gain of the shortest summary; an earlier record makes room for the new one."""
    sizes = measured.conversation.sizes[len(selected.system) :]
    return sum(sizes[position] for position in selected.fresh_at) - (0 if selected.earlier else RECORD_TOKENS)


def _levels(
    selected: Selected, config: CompactionConfig, measured: MeasuredRequest, tokens_before: int
) -> tuple[Level, ...]:
    """The engine's order: the planner weighs budgets (`core.plan`), here the caller's bounds decide."""
    earlier = selected.earlier
    covered_messages = len(selected.covered)
    kept = kept_tokens(measured.conversation, covered_messages, selected.pinned)
    room_tokens = max(config.limit_tokens - kept - RECORD_TOKENS, 0)
    summary_tokens, ledger_tokens = min(config.summary_tokens, room_tokens), config.ledger_tokens
    if tokens_before > config.trigger_tokens:
        spare_tokens = config.target_tokens(tokens_before) - kept - RECORD_TOKENS - summary_tokens
        ledger_tokens = min(ledger_tokens, max(spare_tokens, config.least_ledger_tokens))
    ledger_tokens = min(ledger_tokens, room_tokens - summary_tokens)
    summarize = Summarize(
        covered_messages=covered_messages,
        pinned=selected.pinned,
        base=_base(earlier, measured) if earlier else None,
        integrates=earlier is not None,
        # A summary of a few words says nothing.
        provisional=summary_tokens < _LEAST_SUMMARY_TOKENS,
        summary_tokens=summary_tokens,
        ledger_tokens=ledger_tokens,
        ledger_max_tokens=ledger_tokens,
        ledger_min_tokens=ledger_tokens // 2,
        predicted_tokens=kept + RECORD_TOKENS + summary_tokens + ledger_tokens,
        strategy=writer_of(config.strategy),
    )
    said_tokens = measured.count_text(earlier.summary) if earlier else 0
    if not STRATEGIES[config.strategy].chooses or said_tokens > config.summary_tokens:
        # A record that has grown over its bound becomes a summary.
        return (summarize,)
    prune = Prune(
        compaction=Compaction(
            covered_messages=covered_messages,
            covered_hash=measured.conversation.hashes[covered_messages],
            pinned=selected.pinned,
            round=summarize.round,
            segments=(),
            ledger="",
            level=config.strategy,
            window_tokens=config.context_window_tokens,
            edited_from=0,
            omissions=earlier.summary if earlier else "",
        ),
        base=None,
        now_tokens=tokens_before,
        summary_tokens=config.summary_tokens,
        earlier_tokens=said_tokens,
        ledger_tokens=config.ledger_tokens,
        predicted_tokens=int(_PRUNED_SHARE * tokens_before),
        strategy=config.strategy,
    )
    return (prune, summarize)


def _base(earlier: Record, measured: MeasuredRequest) -> Compaction:
    """The record that the caller's messages carried, as the compaction that a new summary goes on from."""
    return Compaction(
        covered_messages=0,
        covered_hash=measured.conversation.hashes[0],
        pinned=(),
        round=earlier.round,
        segments=(Segment(text=earlier.summary, round=earlier.round, covered_messages=0),),
        ledger=earlier.ledger,
        level="summary",
    )


class _Built(NamedTuple):
    """A compaction, the conversation with it, and the positions of covered messages that are not sent any more.

    `failure` says why it has no model's text.
    """

    compaction: Compaction
    messages: tuple[Message, ...]
    gone: Collection[int]
    failure: CompactionError | None = None


async def _built(call: Call, levels: Sequence[Level], selected: Selected) -> _Built:
    compaction, _, effort = await call.builder.make(call.measured, levels)
    failure = None
    if compaction.level == "truncate":
        failure = effort.failure or SummaryFailed(effort.reason)
        if isinstance(failure, ServerUnavailable):
            # To be put right, not to be gone round.
            raise failure
    if isinstance(levels[0], Prune) and not chooses(compaction.level) and effort.reason != "no_gain":
        logger.warning(
            "library_pruning_failed model=%s reason=%s; a summary is made", effort.pruning_model, effort.reason
        )
    gone = compaction.dropped if chooses(compaction.level) else selected.fresh_at
    messages = await off_loop(selected.messages, lambda: _sent(selected, compaction))
    return _Built(compaction, messages, gone, failure)


async def _without_words(built: _Built, selected: Selected) -> _Built:
    """The same with a record that says nothing: all that may go is gone."""
    bare = replace(built.compaction, segments=(), ledger="", level="truncate")
    messages = await off_loop(selected.messages, lambda: _sent(selected, bare))
    return _Built(bare, messages, selected.fresh_at, built.failure or SummaryFailed("no_room"))


def _does_not_fit(config: CompactionConfig, measured: MeasuredRequest, tokens_before: int) -> DoesNotFit:
    shares = protected_shares(measured.conversation, measured.count.tools_tokens)
    tokens = sum(share.tokens for share in shares)
    if tokens <= config.limit_tokens:
        # Too little else has come for a new record.
        shares = (*shares, Share("earlier record and short messages", tokens_before - tokens))
        tokens = tokens_before
    reserved_tokens = config.context_window_tokens - config.limit_tokens
    needed_tokens = math.ceil((tokens + reserved_tokens) / 256) * 256
    return DoesNotFit(
        f"{config.model}'s context length is {config.context_window_tokens} tokens, of which a prompt may have "
        f"{config.limit_tokens}, and {tokens} tokens of the messages cannot be compacted (context_length_exceeded). "
        f"They are: {itemized(shares)}. Shorten them, or load the model with {needed_tokens} tokens or more.",
        shares=shares,
        window_tokens=config.context_window_tokens,
        needed_tokens=needed_tokens,
    )


def _sent(selected: Selected, compaction: Compaction) -> tuple[Message, ...]:
    """The shorter conversation, with a record that a later compaction reads back: there is no store.

    Recent messages stay as they came, `null` content included.
    """
    record = Record(summary=compaction.model_text, ledger=compaction.ledger, round=compaction.round)
    shown = apply(selected.messages, compaction, record=write_record(record, lead_in=lead_in(compaction.level)))
    # A user message that opens the tail may carry the record.
    as_they_came = selected.tail[1:] if selected.tail[0].role == "user" else selected.tail
    return (*shown[: len(shown) - len(as_they_came)], *as_they_came)


def _own(messages: Sequence[JsonObject]) -> list[dict[str, JsonValue]]:
    """The caller's messages in a list of their own; an entry that is no mapping stays as it is."""
    own = (dict(each) if isinstance(each, Mapping) and not isinstance(each, dict) else each for each in messages)
    return cast("list[dict[str, JsonValue]]", list(own))
