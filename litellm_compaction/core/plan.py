"""Decides about a request: send it, perhaps with an earlier compaction, make a new one by steps, or refuse it.

And what to have ready for the next turn while no client waits: a record, and the server's cache. Pure: the engine
brings the sizes, the budget and the stored compactions, and carries the decision out. Decisions are values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from litellm_compaction.core.budget import Budget
from litellm_compaction.core.compaction import Compaction, applied_tokens, is_undone, usable
from litellm_compaction.core.messages import Message, parse_message, user_message
from litellm_compaction.core.steps import CompactionOptions, Planner, Step, gains
from litellm_compaction.core.view import View, answered_round

# What the next turn adds: the most of so many before it; a sentence or two if there were none yet.
_LATEST_STEPS, _USUAL_GROWTH_RATIO = 3, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send the messages, with a compaction that was made for the beginning of this very conversation, or as they are.

    `is_undone` if the owner has undone that.
    """

    compaction: Compaction | None = None
    is_undone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """Make a new compaction, by the first of these steps whose result does.

    A second record is made, without a model, if the first one's summary is not written.
    """

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The protected messages alone are too large."""


Plan: TypeAlias = Send | Make | Refuse


def plan(view: View, budget: Budget, options: CompactionOptions, stored: Sequence[Compaction]) -> Plan:
    """Decides about a conversation: the first candidate that does, those that change the least and cost nothing first.

    Args:
        view: the conversation as the client sent it.
        budget: of the window that it has to fit.
        options: how deep to compact.
        stored: compactions found under this conversation's hashes, longest first.
    """
    if budget.rules.keeps_what_fits:
        return _plan_client_summary(view, budget, options, stored)
    if not budget.is_wanted and budget.own.fits(view.tokens) and is_undone(view, stored):
        return Send(is_undone=True)
    known = usable(view, stored)
    if not budget.is_wanted and not budget.own.triggers(view.tokens):
        # A compacted prompt stays compacted, although the count has settled a little lower since: the same bytes, and
        # the server's cache stays warm. A window that has grown is worth a fresh start.
        lasting = (each for each in known if each.state != "ready" and each.window_tokens >= budget.window_tokens)
        return Send(compaction=next(lasting, None))
    view, budget = _with_answered_round(view, budget, known)
    current, current_tokens = _in_effect(view, budget, known)
    is_due = budget.is_wanted or budget.triggers(current_tokens)
    if current and (not is_due or (budget.may_wait(current_tokens) and not view.messages[-1].is_synthetic)):
        return Send(compaction=current)
    now_tokens = min(view.tokens, current_tokens)
    for each in known if not budget.is_wanted else ():
        if each.state == "ready":
            tokens = applied_tokens(view, each)
            if gains(tokens, now_tokens) and not budget.triggers(tokens):
                return Send(compaction=each)
    rich = next((each for each in known if each.state != "provisional"), None)
    planner = Planner(view=view, budget=budget, options=options, base=rich)
    records = planner.records() if budget.fits(view.floor_tokens) else ()
    is_worth_it = bool(records) and gains(records[0].predicted_tokens, now_tokens)
    if records and not is_worth_it and now_tokens > budget.latest_start_tokens:
        # Its answer would be stopped at once, so less gain will do; for that no model is asked.
        records = planner.records(asks=False)
        is_worth_it = records[0].predicted_tokens <= budget.latest_start_tokens
    if is_worth_it:
        return Make(steps=(*filter(None, (planner.edit(), planner.choice(records[0], now_tokens))), *records))
    # No cut gains enough to be worth a model call: send what fits.
    if current and budget.fits(current_tokens):
        return Send(compaction=current)
    return _sent_or_made(view, budget, records)


def _in_effect(view: View, budget: Budget, known: Sequence[Compaction]) -> tuple[Compaction | None, int]:
    """The first compaction in effect below the trigger, else the one that leaves the least; and what it leaves."""
    found: list[tuple[Compaction | None, int]] = []
    for each in known:
        if each.state != "ready":
            # One by one: of fifty rounds the newest does nearly always.
            found.append((each, applied_tokens(view, each)))
            if not budget.is_wanted and not budget.triggers(found[-1][1]):
                return found[-1]
    return min(found, key=lambda each: each[1], default=(None, view.tokens))


def _sent_or_made(view: View, budget: Budget, records: tuple[Step, ...]) -> Plan:
    """The conversation as it is if it fits, else the records, else a refusal."""
    if budget.own.fits(view.tokens):
        return Send()
    return Make(steps=records) if records else Refuse()


def _with_answered_round(view: View, budget: Budget, known: Sequence[Compaction]) -> tuple[View, Budget]:
    """Both with the tool round that is answered by the answer which is carried over, if it fits beside the usual room.

    Messages that a record stands for already do not come back.
    """
    staying = answered_round(view.messages)
    gone = {view.prefix + at for each in known for at in each.gone if at < each.start}
    if not staying or not gone.isdisjoint(staying):
        return view, budget
    held = replace(budget, floor_tokens=budget.floor_tokens + sum(view.sizes[index] for index in staying))
    if held.least_target_tokens > held.early_start_tokens:
        return view, budget
    return replace(view, pins=(*view.pins, *staying)), held


def _plan_client_summary(view: View, budget: Budget, options: CompactionOptions, stored: Sequence[Compaction]) -> Plan:
    """Decides about a request for a summary that the client goes on with in place of its history, and that is too long.

    The known record of the oldest part stands for as much of it as has to go, without a model call; without one the
    oldest results become lines.
    """
    if not budget.own.triggers(view.tokens):
        return Send()
    base = next((each for each in usable(view, stored) if each.segments and each.state != "provisional"), None)
    planner = Planner(view=view, budget=budget, options=options, base=base)
    record = planner.record(asks=False) if budget.fits(view.floor_tokens) else None
    if record and record.predicted_tokens < view.tokens:
        return Make(steps=tuple(filter(None, (planner.edit() if base is None else None, record))))
    return _sent_or_made(view, budget, (record,) if record else ())


# ------------------------------------------------------------------ ahead of the next turn


def turn_ended(messages: Sequence[Message], answer: str) -> tuple[Message, ...]:
    """A conversation as its next turn will begin with it.

    Args:
        messages: the answered conversation.
        answer: its text; "" if the model has called tools, whose results belong to the same round.
    """
    said = parse_message({"role": "assistant", "content": answer})
    # The user's message is empty: the person's last request stays the last.
    return (*messages, said, user_message("")) if answer else (*messages, said)


def plan_ahead(view: View, budget: Budget, options: CompactionOptions, stored: Sequence[Compaction]) -> Step | None:
    """Plans the summary that a conversation of `turn_ended` will need at its trigger; arguments as `plan`.

    It covers every message, since the server's cache holds that. None if a record exists, lines suffice, or it
    would not go deep enough: a compaction that gains half as much comes twice as often.
    """
    known = usable(view, stored)
    base = next((each for each in known if each.state not in ("provisional", "ready")), None)
    covered = base.covered_messages if base else 0
    if options.strategy.chooses or any(each.state == "ready" and each.covered_messages > covered for each in known):
        return None
    trigger_tokens = budget.trigger_tokens
    now_tokens = min([view.tokens, *(applied_tokens(view, each) for each in known)])
    growth_tokens = max(trigger_tokens - now_tokens, 0)
    planner = Planner(view=view, budget=budget, options=options, base=base)
    fresh = planner.record(growth_tokens=growth_tokens)
    if fresh is None or fresh.question == "none" or fresh.draft.covered_messages <= covered:
        return None
    most_tokens = (planner.target_tokens(trigger_tokens) + trigger_tokens) // 2
    if fresh.predicted_tokens + growth_tokens > most_tokens or planner.edit() is not None:
        return None
    return replace(fresh, draft=replace(fresh.draft, state="ready"))


def plan_reading(
    view: View, budget: Budget, options: CompactionOptions, stored: Sequence[Compaction]
) -> Compaction | Step | None:
    """Plans what the server reads for the turn after `turn_ended`; None if its cache holds the next prompt.

    It is a record that was written ahead, or an edit to make, if the client's usual addition would cross the trigger:
    that turn would wait until the server has read the compacted conversation. What it has read is sent, even if the
    turn turns out too small for it.
    """
    now = plan(view, budget, options, stored)
    new = _new(now)
    if new is not None or options.rereads or not isinstance(now, Send):
        # After the text that it was made to read some servers cannot go on with another ending: they read all again.
        return new
    sent_tokens = applied_tokens(view, now.compaction) if now.compaction else view.tokens
    left_tokens = (budget if now.compaction else budget.own).trigger_tokens - sent_tokens
    if expected_growth_tokens(view, budget.window_tokens) <= left_tokens:
        return None
    # Just beyond the trigger: what is made for a larger turn is made more often.
    later = view.grown(max(left_tokens + 1, 0))
    return _new(plan(later, replace(budget, floor_tokens=later.floor_tokens), options, stored))


def _new(decision: Plan) -> Compaction | Step | None:
    """Returns what a decision changes of what is sent, if it needs no model for it, else None."""
    if isinstance(decision, Make):
        return decision.steps[0] if decision.steps[0].is_edit else None
    sent = decision.compaction if isinstance(decision, Send) else None
    return sent if sent and sent.state == "ready" else None


def expected_growth_tokens(view: View, window_tokens: int) -> int:
    """The tokens that the next turn will add to a conversation of `turn_ended`.

    The largest of the last steps between two answers, of those after a call if the last answer has called tools.
    """
    messages, usual = view.messages, math.ceil(_USUAL_GROWTH_RATIO * window_tokens)
    answers = [at for at, each in enumerate(messages) if each.role == "assistant"]
    # A call counts with its results.
    steps = {at: sum(view.sizes[at + (not messages[at].calls) : end]) for at, end in pairwise(answers)}
    ends_in_call = messages[-1].role == "assistant"
    alike = [tokens for at, tokens in steps.items() if bool(messages[at].calls) == ends_in_call]
    return max((alike if len(alike) >= _LATEST_STEPS else [*steps.values()])[-_LATEST_STEPS:], default=usual)
