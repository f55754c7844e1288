"""Plans what to have ready for a conversation's next turn while no client waits: a record, and the server's cache.

Pure, as `plan`; asked by the engine's background after an answer has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from litellm_compaction.core.budget import Budget
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.conversation import Conversation, applied_tokens, grown, usable
from litellm_compaction.core.messages import Message, parse_message, user_message
from litellm_compaction.core.plan import Compact, Keep, Plan, Reuse, plan
from litellm_compaction.core.steps import CompactionOptions, Planner, Step

# So much of what clients have added lies within the expected step; of seven recorded conversations at 4k to 16k no
# larger share foresees more crossings.
_EXPECTED_SHARE = 0.90
_LATEST_TURNS, _LEAST_ALIKE = 20, 3
# A sentence or two, if nothing is known of a conversation's turns yet.
_USUAL_GROWTH_RATIO = 0.02


def turn_ended(messages: Sequence[Message], answer: str) -> tuple[Message, ...]:
    """A conversation as its next turn will begin with it.

    Args:
        messages: the answered conversation.
        answer: its text; "" if the model has called tools, whose results belong to the same round.
    """
    if not answer:
        return (*messages, parse_message({"role": "assistant", "content": ""}))
    # The user's message is empty: the person's last request stays the last.
    return (*messages, parse_message({"role": "assistant", "content": answer}), user_message(""))


def plan_ahead(
    conversation: Conversation, budget: Budget, options: CompactionOptions, stored: Sequence[Compaction]
) -> Step | None:
    """Plans the summary that a conversation of `turn_ended` will need at its trigger; arguments as `plan`.

    It covers every message, since the server's cache holds that. None if a record exists, stubs suffice, or it
    would not go deep enough: a compaction that gains half as much comes twice as often.
    """
    known = usable(conversation, stored)
    base = next((each for each in known if not each.provisional and not each.ahead), None)
    covered = base.covered_messages if base else 0
    if options.strategy.chooses or any(each.ahead and each.covered_messages > covered for each in known):
        return None
    now_tokens = min([conversation.tokens, *(applied_tokens(conversation, each) for each in known)])
    trigger_tokens = budget.trigger_tokens
    growth_tokens = max(trigger_tokens - now_tokens, 0)
    planner = Planner(conversation=conversation, budget=budget, options=options, base=base)
    fresh = planner.summary(growth_tokens=growth_tokens)
    if fresh is None or fresh.question == "none" or fresh.draft.covered_messages <= covered:
        return None
    later_tokens = fresh.predicted_tokens + growth_tokens
    if later_tokens > (planner.target_tokens(trigger_tokens) + trigger_tokens) // 2:
        return None
    if planner.edit() is not None:
        return None
    return replace(fresh, draft=replace(fresh.draft, ahead=True))


def plan_reading(
    conversation: Conversation, budget: Budget, options: CompactionOptions, stored: Sequence[Compaction]
) -> Reuse | Step | None:
    """Plans what the server reads for the turn after `turn_ended`; None if its cache holds the next prompt.

    It is a record that was written ahead, or an edit to make: with it the next turn will be sent.

    If the client's usual addition would cross the trigger, that turn would wait until the server has read the
    compacted conversation. Its cache holds one of the two, so what it has read is sent, even if that turn turns out
    too small for it.
    """
    now = plan(conversation, budget, options, stored)
    new = _new(now)
    if new is not None:
        return new
    if options.rereads:
        # After the text that it was made to read the server cannot go on with another ending: it would read all again.
        return None
    if isinstance(now, Keep):
        left_tokens = budget.own.trigger_tokens - conversation.tokens
    elif isinstance(now, Reuse):
        left_tokens = budget.trigger_tokens - applied_tokens(conversation, now.compaction)
    else:
        return None
    if expected_growth_tokens(conversation, budget.window_tokens) <= left_tokens:
        return None
    later = grown(conversation, max(left_tokens + 1, 0))
    return _new(plan(later, replace(budget, floor_tokens=later.floor_tokens), options, stored))


def _new(decision: Plan) -> Reuse | Step | None:
    """Returns the decision if it changes what is sent and needs no model for it, else None."""
    if isinstance(decision, Compact):
        return decision.steps[0] if decision.steps[0].is_edit else None
    return decision if isinstance(decision, Reuse) and decision.compaction.ahead else None


def expected_growth_tokens(conversation: Conversation, window_tokens: int) -> int:
    """The tokens that the next turn will add to a conversation of `turn_ended`.

    By the steps between its latest answers, those after a call if the last answer has called tools. A few large steps
    cause most crossings: the expected step is one beyond which a tenth of all growth reaches.
    """
    steps = [(is_call, tokens) for is_call, tokens in _steps(conversation) if tokens]
    ends_in_call = conversation.messages[-1].role == "assistant"
    alike = [tokens for is_call, tokens in steps if is_call == ends_in_call]
    chosen = sorted((alike if len(alike) >= _LEAST_ALIKE else [tokens for _, tokens in steps])[-_LATEST_TURNS:])
    if not chosen:
        return math.ceil(_USUAL_GROWTH_RATIO * window_tokens)
    beyond_tokens = (1 - _EXPECTED_SHARE) * sum(chosen)
    return next(step for step in chosen if sum(max(each - step, 0) for each in chosen) <= beyond_tokens)


def _steps(conversation: Conversation) -> Iterator[tuple[bool, int]]:
    """The steps between two answers: if the first one called tools, and the tokens with its own calls."""
    step: int | None = None
    is_call = False
    for message, size in zip(conversation.messages, conversation.sizes, strict=True):
        if message.role != "assistant":
            step = None if step is None else step + size
            continue
        if step is not None:
            yield is_call, step
        is_call = bool(message.calls)
        step = size if is_call else 0
