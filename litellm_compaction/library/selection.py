"""Divides a conversation into messages to keep and messages to summarize: pure, before any model is asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Literal, TypeAlias

from litellm_compaction.core.conversation import RECORD_TOKENS
from litellm_compaction.core.cut_points import doubted_index, legal_cuts, pinned_among, request_indices
from litellm_compaction.core.messages import JsonObject, JsonValue, Message, system_prefix_length
from litellm_compaction.core.record import Record, joined, read_record
from litellm_compaction.core.strategies import STRATEGIES
from litellm_compaction.library.config import CompactionConfig
from litellm_compaction.library.tokens import message_estimate, parsed, tools_estimate

Unselected: TypeAlias = Literal["", "empty", "all_recent", "nothing_new", "too_short"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSelection:
    """A conversation divided; the dicts are shallow copies of the caller's.

    Attributes:
        system: system messages, which stay in front.
        earlier_summary, round: of an earlier compaction; "" and 0 for none.
        to_summarize: oldest first; with `prune`, what the model may choose from.
        to_keep: the recent messages; earlier user messages that they are still about come first.
        reason: why nothing is to be summarized, else "": `empty`, `all_recent`, `nothing_new` since the earlier
            summary, or `too_short` to be worth a record.
    """

    system: list[dict[str, JsonValue]]
    earlier_summary: str
    round: int
    to_summarize: list[dict[str, JsonValue]]
    to_keep: list[dict[str, JsonValue]]
    reason: Unselected


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A conversation, divided: `system + covered + tail` is what a compaction is applied to.

    Attributes:
        earlier: the record that the conversation carried, or None.
        covered: the messages before the cut that are not `system`.
        pinned: positions in `covered` of the user messages that stay verbatim.
        tail: the messages from the cut on.
        sources: for each of `covered` its position in the messages that were divided.
        record_sources: positions of the messages that were an earlier record and nothing else.
    """

    system: tuple[Message, ...]
    tail: tuple[Message, ...]
    reason: Unselected = ""
    earlier: Record | None = None
    covered: tuple[Message, ...] = ()
    pinned: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    record_sources: tuple[int, ...] = ()

    def replaced(self, gone: Collection[int]) -> tuple[int, ...]:
        """Positions in the divided messages that a record stands for if these of `covered` go, ascending."""
        return tuple(sorted({*self.record_sources, *(self.sources[position] for position in gone)}))

    @property
    def fresh_at(self) -> list[int]:
        """Positions in `covered` of the messages that a new record stands for."""
        return [position for position in range(len(self.covered)) if position not in self.pinned]

    @property
    def fresh(self) -> list[Message]:
        return [self.covered[position] for position in self.fresh_at]

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.system, *self.covered, *self.tail)


def select_messages(
    messages: Sequence[JsonObject],
    config: CompactionConfig,
    *,
    tokens: int | None = None,
    tools: Sequence[JsonValue] = (),
) -> CompactionSelection:
    """Divides messages as `compact` would.

    Args:
        messages: n, oldest first; not changed.
        tokens: the prompt's size as `count_tokens` gives it, which `compact` goes by; None takes the estimate.
        tools: schemas that are sent too.

    Raises:
        ValueError: an entry is not a message.
    """
    selected = select(parsed(messages), config, tokens=tokens, tools=tools)
    return CompactionSelection(
        system=_raw(selected.system),
        earlier_summary=selected.earlier.summary if selected.earlier else "",
        round=selected.earlier.round if selected.earlier else 0,
        to_summarize=[] if selected.reason else _raw(selected.fresh),
        to_keep=_raw((*(selected.covered[position] for position in selected.pinned), *selected.tail)),
        reason=selected.reason,
    )


def select(
    messages: Sequence[Message],
    config: CompactionConfig,
    *,
    tokens: int | None = None,
    tools: Sequence[JsonValue] = (),
) -> Selected:
    """Divides a conversation at the last legal cut before the recent messages; for a hand-off at the last cut.

    Above the trigger, recent messages stay only up to the target, at the first later cut that reaches it, else at the
    last one: with more of them the next step would be above the trigger again.

    The cuts are the proxy's (`core/cut_points.py`). A system message that opens with `## Session Summary` is an
    earlier summary like any other, not an instruction.
    """
    prefix = system_prefix_length(messages)
    if prefix == len(messages):
        return _whole(messages, prefix, "all_recent" if messages else "empty")
    cut = _cut(messages, config, tokens, tools)
    if cut is None:
        return _whole(messages, prefix, "all_recent")
    system: list[Message] = []
    covered: list[Message] = []
    records: list[Record] = []
    sources: list[int] = []
    record_sources: list[int] = []
    for index, message in enumerate(messages[:cut]):
        found = read_record(message)
        rest = message if found is None else found.rest
        if found is not None:
            records.append(found.record)
        if rest is None:
            record_sources.append(index)
        elif rest.is_system:
            system.append(rest)
        else:
            covered.append(rest)
            sources.append(index)
    tail = tuple(messages[cut:])
    divided = (*system, *covered, *tail)
    doubted = doubted_index(divided)
    requests = {*request_indices(divided), *([] if doubted is None else [doubted])}
    pinned = pinned_among(requests, system_prefix_length(divided), len(covered))
    earlier = joined(records)
    selected = Selected(
        system=tuple(system),
        earlier=earlier,
        covered=tuple(covered),
        pinned=pinned,
        tail=tail,
        sources=tuple(sources),
        record_sources=tuple(record_sources),
    )
    if selected.fresh and sum(map(message_estimate, selected.fresh)) >= RECORD_TOKENS:
        return selected
    # Less than a record's own markers: the conversation stays as it is, an earlier record in its place.
    return replace(_whole(messages, prefix, "too_short" if selected.fresh else "nothing_new"), earlier=earlier)


def _cut(
    messages: Sequence[Message], config: CompactionConfig, tokens: int | None, tools: Sequence[JsonValue]
) -> int | None:
    """The position of the first message that stays for being recent; None if all of them are."""
    cuts = legal_cuts(messages)
    keeps_recent = STRATEGIES[config.strategy].keeps_recent
    newest_first = len(messages) - (config.keep_recent_messages if keeps_recent else 0)
    is_short = keeps_recent and len(messages) <= config.keep_recent_messages + 1
    usual = next((cut for cut in reversed(cuts) if cut <= newest_first and not is_short), None)
    sizes = [message_estimate(message) for message in messages]
    schemas_tokens = tools_estimate(tools)
    estimated_tokens = sum(sizes) + schemas_tokens
    counted_tokens = estimated_tokens if tokens is None else tokens
    if not cuts or counted_tokens <= config.trigger_tokens:
        return usual
    target_tokens = config.target_tokens(counted_tokens)
    record_tokens = RECORD_TOKENS + config.summary_tokens + config.least_ledger_tokens
    # An estimate is the wrong size, but nearly equally wrong for all messages of a conversation.
    room_tokens = (target_tokens - record_tokens) * estimated_tokens // counted_tokens - schemas_tokens
    requests = {*request_indices(messages), doubted_index(messages)}
    later = [cut for cut in cuts if usual is None or cut >= usual]

    def staying_tokens(cut: int) -> int:
        staying = (index >= cut or each.is_system or index in requests for index, each in enumerate(messages))
        return sum(compress(sizes, staying))

    return next((cut for cut in later if staying_tokens(cut) <= room_tokens), later[-1])


def _whole(messages: Sequence[Message], prefix: int, reason: Unselected) -> Selected:
    return Selected(system=tuple(messages[:prefix]), tail=tuple(messages[prefix:]), reason=reason)


def _raw(messages: Sequence[Message]) -> list[dict[str, JsonValue]]:
    return [dict(message.raw) for message in messages]
