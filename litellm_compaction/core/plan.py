"""Decides about a request: leave it, reuse an earlier compaction, make a new one, or say that it cannot fit.

Pure: the engine brings the sizes, the budget and the stored compactions, and carries the decision out. Decisions are
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from litellm_compaction.core.budget import Budget
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.conversation import Conversation, applied_tokens, is_undone, usable
from litellm_compaction.core.cut_points import answered_round
from litellm_compaction.core.steps import CompactionOptions, Planner, Step, gains


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Send the messages as they are; `is_undone` if the owner has undone their compaction."""

    is_undone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Apply a compaction that was made for the beginning of this very conversation."""

    compaction: Compaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """Make a new compaction, by the first of these steps whose result does.

    A second record is made, without a model, if the first one's summary is not written.
    """

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The protected messages alone are too large."""


Plan: TypeAlias = Keep | Reuse | Compact | Refuse


def plan(conversation: Conversation, budget: Budget, options: CompactionOptions, stored: Sequence[Compaction]) -> Plan:
    """Decides about a conversation: the first candidate that does, those that change the least and cost nothing first.

    Args:
        conversation: as the client sent it.
        budget: of the window that it has to fit.
        options: how deep to compact.
        stored: compactions found under this conversation's hashes, longest first.
    """
    if budget.rules.keeps_what_fits:
        return _plan_client_summary(conversation, budget, options, stored)
    if not budget.is_wanted and budget.own.fits(conversation.tokens) and is_undone(conversation, stored):
        return Keep(is_undone=True)
    known = usable(conversation, stored)
    conversation, budget = _with_answered_round(conversation, budget, known)
    is_voluntary = not budget.own.triggers(conversation.tokens)
    if is_voluntary and not budget.is_wanted:
        return _lasting(budget, known)
    current = _in_effect(conversation, budget, known)
    if current.compaction and _goes_on(conversation, budget, current.tokens):
        return Reuse(compaction=current.compaction)
    now_tokens = min(conversation.tokens, current.tokens)
    for each in known if not budget.is_wanted else ():
        # A record written ahead is for now.
        tokens = applied_tokens(conversation, each) if each.ahead else now_tokens
        if gains(tokens, now_tokens) and not budget.triggers(tokens):
            return Reuse(compaction=each)
    rich = next((each for each in known if not each.provisional), None)
    planner = Planner(conversation=conversation, budget=budget, options=options, base=rich)
    records = planner.records() if budget.fits(conversation.floor_tokens) else ()
    if records and records[0].question == "none" and is_voluntary:
        # Without room for a summary the conversation itself says more.
        records = ()
    is_worth_it = bool(records) and gains(records[0].predicted_tokens, now_tokens)
    if records and not is_worth_it and now_tokens > budget.latest_start_tokens:
        # Its answer would be stopped at once, so less gain will do; for that no model is asked.
        records = planner.records(asks=False)
        is_worth_it = records[0].predicted_tokens <= budget.latest_start_tokens
    if is_worth_it:
        pruning = planner.prune(records[0], now_tokens) if options.strategy.chooses else None
        return Compact(steps=tuple(filter(None, (planner.edit(), pruning, *records))))
    # No cut gains enough to be worth a model call: send what fits.
    if current.compaction and budget.fits(current.tokens):
        return Reuse(compaction=current.compaction)
    return _kept_or(records, conversation, budget)


def _lasting(budget: Budget, known: Sequence[Compaction]) -> Keep | Reuse:
    """What is sent below the trigger.

    A compacted prompt stays compacted, although the count has settled a little lower since: the same bytes, and the
    server's cache stays warm. A window that has grown is worth a fresh start.
    """
    lasting = (each for each in known if not each.ahead and each.window_tokens >= budget.window_tokens)
    found = next(lasting, None)
    return Keep() if found is None else Reuse(compaction=found)


class _Current(NamedTuple):
    """The compaction in effect, None for none, and the tokens of the prompt with it."""

    compaction: Compaction | None
    tokens: int


def _in_effect(conversation: Conversation, budget: Budget, known: Sequence[Compaction]) -> _Current:
    """The first compaction in effect below the trigger, else the one that leaves the least."""
    found: list[_Current] = []
    for each in known:
        if not each.ahead:
            # One by one: of fifty rounds the newest does nearly always.
            found.append(_Current(each, applied_tokens(conversation, each)))
            if not budget.is_wanted and not budget.triggers(found[-1].tokens):
                return found[-1]
    return min(found, key=lambda each: each.tokens, default=_Current(None, conversation.tokens))


def _goes_on(conversation: Conversation, budget: Budget, tokens: int) -> bool:
    """Returns True if no new compaction is due after one that leaves so many tokens."""
    if not budget.is_wanted and not budget.triggers(tokens):
        return True
    return budget.may_wait(tokens) and not conversation.messages[-1].is_synthetic


def _kept_or(records: tuple[Step, ...], conversation: Conversation, budget: Budget) -> Plan:
    """The conversation as it is if it fits, else the records, else a refusal."""
    if budget.own.fits(conversation.tokens):
        return Keep()
    return Compact(steps=records) if records else Refuse()


def _with_answered_round(
    conversation: Conversation, budget: Budget, known: Sequence[Compaction]
) -> tuple[Conversation, Budget]:
    """Both with the tool round that is answered by the answer which is carried over, if it fits beside the usual room.

    Messages that a record stands for already do not come back.
    """
    staying = answered_round(conversation.messages)
    gone = {at for each in known for at in range(each.replaced_messages) if at not in each.pinned}
    if not staying or any(at - conversation.prefix in gone for at in staying):
        return conversation, budget
    held = replace(budget, floor_tokens=budget.floor_tokens + sum(conversation.sizes[index] for index in staying))
    if held.least_target_tokens > held.early_start_tokens:
        return conversation, budget
    return replace(conversation, staying=staying), held


def _plan_client_summary(
    conversation: Conversation, budget: Budget, options: CompactionOptions, stored: Sequence[Compaction]
) -> Plan:
    """Decides about a request for a summary that the client goes on with in place of its history.

    A request that fits beside the room for that summary stays as it is. Else the known record of the oldest part stands
    for as much of it as has to go, whole and without a model call; without one the oldest results become stubs.
    """
    if not budget.own.triggers(conversation.tokens):
        return Keep()
    base = next((each for each in usable(conversation, stored) if each.segments and not each.provisional), None)
    planner = Planner(conversation=conversation, budget=budget, options=options, base=base)
    filled = planner.copied() if budget.fits(conversation.floor_tokens) else None
    if filled and filled.predicted_tokens < conversation.tokens:
        edit = planner.edit() if base is None else None
        return Compact(steps=(edit, filled) if edit else (filled,))
    return _kept_or((filled,) if filled else (), conversation, budget)
