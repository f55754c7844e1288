"""What to do with a request: leave it, reuse an earlier compaction, edit, summarize, or say that it cannot fit.

Pure: the engine brings the sizes, the budget and what the store knows, and carries the decision out. Decisions are
values.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeGuard

from litellm_compaction.core import images
from litellm_compaction.core.budget import Budget
from litellm_compaction.core.clearing import ImagePlace, stubs, with_data
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.conversation import (
    RECORD_TOKENS,
    Conversation,
    applied_tokens,
    carried_image_tokens,
    grown,
    kept_tokens,
    usable,
)
from litellm_compaction.core.cut_points import answered_round
from litellm_compaction.core.messages import Message, parse_message, user_message
from litellm_compaction.core.strategies import STRATEGIES, Strategy, writer_of
from litellm_compaction.core.stretches import own_words

MIN_GAIN_RATIO = 0.10
# Of the window: with a high floor each compaction gains little over the one before it, so that no model would ever be
# asked; a summary is worth its call by what it stands for. At a quarter a tenth more calls, and as much is kept of
# conversations that nothing was tuned on (2026-11-24).
_WORTH_SAYING_RATIO = 0.50
# A summary costs the most of what stays, and says the least of what the next step needs (benchmarks, 2026-11-23).
_SUMMARY_WINDOW_RATIO = 0.08
_SUMMARY_SHARE = 0.20
# Where those shares are too small for any summary: requests of a fifth of a window, restarts in small ones.
_SUMMARY_MOST_WINDOW_RATIO, _SUMMARY_MOST_SHARE = 0.15, 0.40
_LEDGER_SHARE = 0.55
_EDIT_LEDGER_SHARE = 0.15
# Of the ledger's lines, to messages that are recent enough to stay.
_GIVES_WAY_SHARE = 0.60
_WORDS_TARGET_RATIO = 0.25
_WORDS_SHARE = 0.50
_WORDS_HEAD_TOKENS = 12
_FROZEN_TARGET_RATIO = 0.25
# Of the target, where all that stays is read again and every change costs that: a quarter of the window by default.
_DEEP_RATIO = 0.65
# Of images beside a record; the rest is for what was said.
_IMAGES_SHARE = 0.50
# A summary shorter than this says too little for what it costs; the earlier record, shortened, says more.
_GOOD_SUMMARY_TOKENS = 150
# In a small window a twentieth of it has to do, three headings and some sixty words: restarts at 2,048 had no room for
# more (2026-11).
_LEAST_SUMMARY_WINDOW_RATIO, _LEAST_SUMMARY_TOKENS = 0.05, 96
# So much of what clients have added lies within the expected step; of seven recorded conversations at 4k to 16k no
# larger share foresees more crossings (2026-11-23).
_EXPECTED_SHARE = 0.90
_LATEST_TURNS, _LEAST_ALIKE = 20, 3
# A sentence or two, where nothing is known of a conversation's turns yet.
_USUAL_GROWTH_RATIO = 0.02
# "Last request from user was: " in any vocabulary, however the words around it are counted.
_LEAD_IN_TOKENS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Send the messages as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Apply a compaction that was made for the beginning of this very conversation."""

    compaction: Compaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Summarize:
    """Make a new compaction.

    Attributes:
        covered_messages: how many messages after the lead it will replace.
        pinned: positions of those among them that stay verbatim.
        base: the compaction whose summaries it continues, or None.
        integrates: whether the base's segments are rewritten into one, because they outgrew their share.
        provisional: whether there is no room for a new summary; the base's is carried on, shortened.
        fallback: where all but the protected tail is covered, what to make without a summary; else None.
        summary_tokens: bound on the new segment, or on the carried one.
        ledger_tokens: bound on the ledger.
        ledger_min_tokens: what the ledger keeps where a summary is longer than it was to be.
        ledger_max_tokens: what the ledger may grow to where the summary leaves room; None is all of that room.
        predicted_tokens: the prompt afterwards, at most.
        strategy: the name of the one that writes the record.
        ahead: whether it is written before it is needed.
        images: of the covered messages, those that travel with the record.
    """

    covered_messages: int
    pinned: tuple[int, ...] = ()
    base: Compaction | None
    integrates: bool
    provisional: bool
    summary_tokens: int
    ledger_tokens: int
    ledger_min_tokens: int
    predicted_tokens: int
    fallback: Summarize | None = None
    ledger_max_tokens: int | None = None
    strategy: str = "summary"
    ahead: bool = False
    images: tuple[ImagePlace, ...] = ()

    @property
    def round(self) -> int:
        """Of the compaction that will be made."""
        return (self.base.round if self.base else 0) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Make a compaction without a model: old results become stubs, and that alone reaches the target (rung 1).

    Attributes:
        compaction: what is to be made, still without its ledger.
        ledger_tokens: bound on the ledger of what is not shown any more.
        predicted_tokens: the prompt afterwards, at most.
        otherwise: what to make instead where the edit, counted as it is sent, does not do.
    """

    compaction: Compaction
    ledger_tokens: int
    predicted_tokens: int
    otherwise: Prune | Summarize

    @property
    def round(self) -> int:
        """Of the compaction that will be made."""
        return self.compaction.round


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Ask a model which of the covered messages may go or become shorter.

    Attributes:
        compaction: what is to be made, still without what the model says and without its ledger.
        base: the compaction that it continues, or None.
        now_tokens: the prompt without it.
        summary_tokens: bound on what is said of the messages that go.
        carried_tokens: of an earlier record, which is said besides.
        ledger_tokens: bound on their ledger.
        predicted_tokens: the prompt that is aimed at.
        otherwise: what to make instead where the model's answer does not do.
        strategy: the name of the one that asks.
    """

    compaction: Compaction
    base: Compaction | None
    now_tokens: int
    summary_tokens: int
    ledger_tokens: int
    predicted_tokens: int
    otherwise: Summarize
    carried_tokens: int = 0
    strategy: str = "prune"

    @property
    def round(self) -> int:
        """Of the compaction that will be made."""
        return self.compaction.round


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The protected messages alone are too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the server reads while nobody waits.

    Attributes:
        decision: with what the next turn will be sent: a record that was written ahead, or an edit that has to be made.
        is_certain: whether it is so in any case; else a record has to be put into effect.
    """

    decision: Reuse | Edit
    is_certain: bool


Making: TypeAlias = Edit | Prune | Summarize
Plan: TypeAlias = Keep | Reuse | Making | Refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOptions:
    """The operator's wishes about a compaction's depth.

    Attributes:
        keep_recent_messages: at the end, where they fit.
        summary_max_tokens: bound on a summary.
        edits: whether rung 1 may do alone.
        strategy: how what is covered is condensed.
        rereads: whether the server reads all of a prompt again after any change of it, so that changes are to be rare
            and an edit may as well take all that it can.
        keep_images: how many images stay where there is room for them, those of the kept messages among them.
    """

    keep_recent_messages: int
    summary_max_tokens: int
    keep_images: int = 0
    rereads: bool = False
    edits: bool = True
    strategy: Strategy = STRATEGIES["summary"]


def plan(conversation: Conversation, budget: Budget, depth: CompactionOptions, stored: Sequence[Compaction]) -> Plan:
    """What to do with a conversation.

    Args:
        conversation: as the client sent it.
        budget: of the window that it has to fit.
        depth: how deep to compact.
        stored: compactions found under this conversation's hashes, longest first.
    """
    if budget.rules.keeps_what_fits:
        return _plan_client_summary(conversation, budget, depth, stored)
    known = usable(conversation, stored)
    conversation, budget = _with_answered_round(conversation, budget, known)
    shallow, budget = budget, _deep(budget) if depth.rereads else budget
    applied = [each for each in known if not each.ahead]
    if not budget.is_wanted and not budget.own.triggers(conversation.tokens):
        # What was compacted stays compacted, although the count has settled a little lower since: the same bytes,
        # and the server's cache stays warm. A window that has grown is worth a fresh start.
        lasting = next((each for each in applied if each.window_tokens >= budget.window_tokens), None)
        return Keep() if lasting is None else Reuse(compaction=lasting)
    after: list[int] = []
    for each in applied:
        # One by one: of fifty rounds the newest does nearly always.
        after.append(applied_tokens(conversation, each))
        if not budget.is_wanted and not budget.triggers(after[-1]):
            return Reuse(compaction=each)
    reused_tokens, base = min(zip(after, applied, strict=True), key=lambda pair: pair[0], default=(None, None))
    if base and reused_tokens is not None and budget.may_wait(reused_tokens) and not conversation.messages[-1].is_ours:
        return Reuse(compaction=base)
    now_tokens = conversation.tokens if reused_tokens is None else min(conversation.tokens, reused_tokens)
    for each in known if not budget.is_wanted else ():
        # What was written ahead is for now.
        tokens = applied_tokens(conversation, each) if each.ahead else now_tokens
        if tokens <= now_tokens * (1 - MIN_GAIN_RATIO) and not budget.triggers(tokens):
            return Reuse(compaction=each)
    rich = next((each for each in known if not each.provisional), None)
    fits_at_all = budget.fits(conversation.floor_tokens)
    fresh = _fresh(conversation, budget, depth, rich) if fits_at_all else None
    if fresh is not None and fresh.provisional and budget.is_wanted and not budget.own.triggers(conversation.tokens):
        # Without room for a summary the conversation itself says more.
        fresh = None
    is_worth_a_call = fresh is not None and fresh.predicted_tokens <= now_tokens * (1 - MIN_GAIN_RATIO)
    if fresh is not None and not is_worth_a_call and now_tokens > budget.latest_start_tokens:
        # Its answer would be stopped at once, so less gain will do. A model is asked where there is much to say.
        is_worth_a_call = not fresh.provisional and (
            _new_tokens(conversation, rich, fresh) >= _WORTH_SAYING_RATIO * budget.window_tokens
        )
        if not is_worth_a_call:
            fresh = _fresh(conversation, budget, depth, rich, asks=False)
    is_early = fresh is not None and fresh.predicted_tokens <= budget.latest_start_tokens < now_tokens
    if fresh is not None and (is_worth_a_call or is_early):
        is_chosen = is_worth_a_call and depth.strategy.chooses
        making = _prune(conversation, budget, depth, rich, fresh, now_tokens) if is_chosen else None
        edit = _edit(conversation, shallow, depth, rich, making or fresh) if depth.edits else None
        return edit or making or fresh
    # No cut gains enough to be worth a model call: send what fits.
    if base and reused_tokens is not None and budget.fits(reused_tokens):
        return Reuse(compaction=base)
    if budget.own.fits(conversation.tokens):
        return Keep()
    return Refuse() if fresh is None else fresh


def _new_tokens(conversation: Conversation, base: Compaction | None, fresh: Summarize) -> int:
    """What a new summary would stand for besides what the one before it says, in tokens as the client sent it."""
    return conversation.span_tokens(base.covered_messages if base else 0, fresh.covered_messages)


def _with_answered_round(
    conversation: Conversation, budget: Budget, known: Sequence[Compaction]
) -> tuple[Conversation, Budget]:
    """Both with the round that an answer answers which is carried over, where it fits beside the usual room.

    What a record stands for already does not come back.
    """
    staying = answered_round(conversation.messages)
    gone = {at for each in known for at in range(each.replaced_messages) if at not in each.pinned}
    tokens = sum(conversation.sizes[index] for index in staying)
    held = replace(budget, floor_tokens=budget.floor_tokens + tokens)
    if (
        not staying
        or held.least_target_tokens > held.early_start_tokens
        or any(at - conversation.prefix in gone for at in staying)
    ):
        return conversation, budget
    return replace(conversation, staying=staying), held


def _plan_client_summary(
    conversation: Conversation, budget: Budget, depth: CompactionOptions, stored: Sequence[Compaction]
) -> Plan:
    """Decides about a request for a summary that the client goes on with in place of its history.

    What fits beside the room for that summary stays as it is. Else what is known of the oldest part stands for as much
    of it as has to go, whole and without a model call; where nothing is known, the oldest results become stubs.
    """
    if not budget.own.triggers(conversation.tokens):
        return Keep()
    known = usable(conversation, stored)
    base = next((each for each in known if each.segments and not each.provisional), None)
    fits_at_all = budget.fits(conversation.floor_tokens)
    filled = _filled(conversation, budget, base) if fits_at_all else None
    if filled is not None and filled.predicted_tokens < conversation.tokens:
        may_edit = base is None and depth.edits
        return (_edit(conversation, budget, depth, None, filled) if may_edit else None) or filled
    return Keep() if budget.own.fits(conversation.tokens) else Refuse() if filled is None else filled


def _filled(conversation: Conversation, budget: Budget, base: Compaction | None) -> Summarize | None:
    """A record without a new summary that covers as little as it can; None without a legal cut.

    Args:
        conversation: as the client sent it.
        budget: with `keeps_what_fits`.
        base: its summaries are carried on whole; it may cover more than has to go now.
    """
    cuts, count = conversation.cuts, conversation.count_text
    if not cuts:
        return None
    most_tokens = budget.target_tokens(conversation.tokens)
    # The record is as long as for any other request; what is free beyond it is for the newest messages.
    usual = replace(budget, rules=replace(budget.rules, keeps_what_fits=False))
    target = min(usual.target_tokens(conversation.tokens), most_tokens)
    room = max(target - budget.floor_tokens, 0)
    summary_tokens = min(count(base.summary) if base else 0, room)
    words_tokens = _words_tokens(conversation, cuts[-1], budget, target, room - summary_tokens)
    ledger_tokens = words_tokens + int(_LEDGER_SHARE * max(room - summary_tokens - words_tokens, 0))
    if base is not None:
        # As long as it has been; what it does not need is the newest messages'.
        ledger_tokens = min(ledger_tokens, count(base.ledger))

    def total(cut: int) -> int:
        kept = kept_tokens(conversation, cut, conversation.pinned(cut))
        return kept + RECORD_TOKENS + summary_tokens + ledger_tokens

    cut = cuts[min(bisect_left(cuts, True, key=lambda cut: total(cut) <= most_tokens), len(cuts) - 1)]
    return Summarize(
        covered_messages=cut,
        pinned=conversation.pinned(cut),
        base=base,
        integrates=True,
        provisional=True,
        summary_tokens=summary_tokens,
        ledger_tokens=ledger_tokens,
        ledger_min_tokens=words_tokens,
        predicted_tokens=total(cut),
    )


def turn_ended(messages: Sequence[Message], answer: str) -> tuple[Message, ...]:
    """A conversation as its next turn will begin with it.

    Args:
        messages: what was answered.
        answer: its text; "" where the model has called tools, whose results belong to the same round.
    """
    if not answer:
        return (*messages, parse_message({"role": "assistant", "content": ""}))
    # Nobody's words: the person's last request stays the last.
    return (*messages, parse_message({"role": "assistant", "content": answer}), user_message(""))


def plan_ahead(
    conversation: Conversation, budget: Budget, depth: CompactionOptions, stored: Sequence[Compaction]
) -> Summarize | None:
    """What to write now for the compaction that the conversation will need when it has grown to the trigger.

    It covers all that is there, which is what a server's cache holds: the next turns stay verbatim behind it. None
    where it is there already, where stubs will do without a model, and where it would not go deep enough: a compaction
    that gains half as much comes twice as often.

    Arguments as `plan`; the conversation is one of `turn_ended`.
    """
    budget = _deep(budget) if depth.rereads else budget
    known = usable(conversation, stored)
    base = next((each for each in known if not each.provisional and not each.ahead), None)
    covered = base.covered_messages if base else 0
    if depth.strategy.chooses or any(each.ahead and each.covered_messages > covered for each in known):
        return None
    now_tokens = min([conversation.tokens, *(applied_tokens(conversation, each) for each in known)])
    trigger_tokens = budget.trigger_tokens
    growth_tokens = max(trigger_tokens - now_tokens, 0)
    fresh = _summarize(conversation, budget, depth, base, growth_tokens=growth_tokens)
    if fresh is None or fresh.provisional or fresh.covered_messages <= covered:
        return None
    later_tokens = fresh.predicted_tokens + growth_tokens
    if later_tokens > (budget.target_tokens(trigger_tokens) + trigger_tokens) // 2:
        return None
    if depth.edits and _edit(conversation, budget, depth, base, fresh) is not None:
        return None
    return replace(fresh, ahead=True)


def plan_reading(
    conversation: Conversation, budget: Budget, depth: CompactionOptions, stored: Sequence[Compaction]
) -> Reading | None:
    """What the server is best made to read for the next turn; None where its cache holds what will be sent.

    Where what the client usually adds would cross the trigger, the turn that crosses it waits until the server has read
    the compacted conversation, unless it has done so before. Its cache holds one of the two, so what it was made to
    read has to be sent, though the turn may end just below the trigger.

    Arguments as `plan`; the conversation is one of `turn_ended`.
    """
    now = plan(conversation, budget, depth, stored)
    if _is_new(now):
        return Reading(decision=now, is_certain=True)
    if isinstance(now, Keep):
        left_tokens = budget.own.trigger_tokens - conversation.tokens
    elif isinstance(now, Reuse):
        left_tokens = budget.trigger_tokens - applied_tokens(conversation, now.compaction)
    else:
        return None
    if expected_growth_tokens(conversation, budget.window_tokens) <= left_tokens:
        return None
    later = grown(conversation, max(left_tokens + 1, 0))
    then = plan(later, replace(budget, floor_tokens=later.floor_tokens), depth, stored)
    return Reading(decision=then, is_certain=False) if _is_new(then) else None


def _is_new(decision: Plan) -> TypeGuard[Reuse | Edit]:
    """Whether a decision changes what is sent, and needs no model for it."""
    return isinstance(decision, Edit) or (isinstance(decision, Reuse) and decision.compaction.ahead)


def expected_growth_tokens(conversation: Conversation, window_tokens: int) -> int:
    """What will have been added to a conversation of `turn_ended` when its next turn begins.

    By what was added between its latest answers, and of these by those alike: with the call, where the last answer has
    called tools. A few large steps are most of what a conversation grows by, and so most of what crosses a line: the
    expected step is one beyond which a tenth of all growth reaches. What begins a conversation is no such step.
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
    """What stands between two answers: whether the first one called tools, and the tokens; its own calls included."""
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


def _deep(budget: Budget) -> Budget:
    """The same with a lower target: less is read again, and less often."""
    rules = budget.rules
    return replace(budget, rules=replace(rules, target_ratio=_DEEP_RATIO * rules.target_ratio))


def _fresh(
    conversation: Conversation,
    budget: Budget,
    depth: CompactionOptions,
    base: Compaction | None,
    *,
    asks: bool = True,
) -> Summarize | None:
    """The compaction that reaches the target by a model's words, or by what is copied alone."""
    fresh = _summarize(conversation, budget, depth, base, asks=asks)
    if fresh is None or depth.strategy.keeps_recent:
        return fresh
    keeping = replace(depth, strategy=replace(depth.strategy, keeps_recent=True, lead_in=""))
    return _with_fallback(fresh, _summarize(conversation, budget, keeping, base, asks=asks))


def _with_fallback(whole: Summarize, keeping: Summarize | None) -> Summarize:
    """A record in place of all that knows what to make where no model writes it; without room for it, that at once."""
    if keeping is None:
        return whole
    return keeping if whole.provisional else replace(whole, fallback=keeping)


def _summarize(
    conversation: Conversation,
    budget: Budget,
    depth: CompactionOptions,
    base: Compaction | None,
    *,
    growth_tokens: int | None = None,
    asks: bool = True,
) -> Summarize | None:
    """The summary that reaches the target; one that covers all there is, where so much is still to come behind it.

    Unless it `asks` a model, it is provisional.
    """
    target, count = budget.target_tokens(conversation.tokens), conversation.count_text
    if growth_tokens is not None:
        target = min(max(target - growth_tokens, budget.least_target_tokens), target)
    room = max(target - budget.floor_tokens, 0)
    cuts = conversation.cuts
    last = cuts[-1] if cuts else 0
    # The user's own words come first: what they take is shared out no more.
    words_tokens = _words_tokens(conversation, last, budget, target, room)
    kept_images = _kept_images(conversation, depth, last, int(_IMAGES_SHARE * room))
    rest = room - words_tokens - carried_image_tokens(conversation, kept_images)
    summary_tokens = _summary_tokens(depth, budget.window_tokens, rest)
    frozen_tokens = count(base.summary) if base else 0
    integrates = frozen_tokens > min(_FROZEN_TARGET_RATIO * target, rest - summary_tokens)
    if base is not None:
        beyond = tuple(cut for cut in cuts if cut > base.replaced_messages)
        # Nothing new to cover, and yet too large: the window shrank, or the record itself has to.
        integrates = integrates or not beyond
        cuts = tuple(cut for cut in cuts if cut >= base.replaced_messages) if integrates else beyond
    if not cuts:
        return None
    if not depth.strategy.keeps_recent:
        # Each such record is whole: of two next steps only the newer one holds.
        integrates, cuts = base is not None, cuts[-1:]
    elif growth_tokens is not None:
        cuts = cuts[-1:]
    provisional = not asks or summary_tokens < min(
        _least_summary_tokens(budget.window_tokens), depth.summary_max_tokens
    )
    if provisional:
        integrates, summary_tokens = True, int((1 - _LEDGER_SHARE) * rest)
    # Frozen segments take from the other lines, not from the user's.
    ledger_tokens = words_tokens + int(_LEDGER_SHARE * max(rest if integrates else rest - frozen_tokens, 0))
    lead_in = depth.strategy.lead_in
    lead_in_tokens = max(count(lead_in), _LEAD_IN_TOKENS) if lead_in else 0
    record_tokens = (
        RECORD_TOKENS + lead_in_tokens + summary_tokens + ledger_tokens + (0 if integrates else frozen_tokens)
    )
    doubted: tuple[int, ...] = ()

    def total(cut: int) -> int:
        carried = (place for place in kept_images if place[0] < cut)
        beside = record_tokens + carried_image_tokens(conversation, carried)
        return kept_tokens(conversation, cut, conversation.pinned(cut, *doubted)) + beside

    at = conversation.doubted
    if at is not None and total(cuts[-1]) + conversation.sizes[at] <= target:
        doubted = (at,)
    # What is kept never grows with the cut; one look at each of 40,000 messages' cuts would add them all up every time.
    first = bisect_left(cuts, True, key=lambda cut: total(cut) <= target)
    cut = cuts[min(first, len(cuts) - 1)]
    recent = max((each for each in cuts if each <= len(conversation.rest) - depth.keep_recent_messages), default=cut)
    # For the recent messages the ledger's lines may give way, never the target: depth is what makes it rare.
    over = total(recent) - target
    if recent < cut and over <= int(_GIVES_WAY_SHARE * (ledger_tokens - words_tokens)):
        cut, ledger_tokens, record_tokens = recent, ledger_tokens - over, record_tokens - over
    # What a coarse cut leaves free up to the target, the ledger may have: it costs a little prefill and no decoding.
    spare = min(max(target - total(cut), 0), ledger_tokens) if not provisional else 0
    pinned = conversation.pinned(cut, *doubted)
    return Summarize(
        strategy=writer_of(depth.strategy.name),
        covered_messages=cut,
        pinned=pinned,
        base=base,
        integrates=integrates,
        provisional=provisional,
        summary_tokens=summary_tokens,
        ledger_tokens=ledger_tokens + spare,
        ledger_min_tokens=max(words_tokens, min(int(_WORDS_TARGET_RATIO * target), int(_WORDS_SHARE * ledger_tokens))),
        predicted_tokens=total(cut) + spare,
        images=tuple(place for place in kept_images if place[0] < cut and place[0] not in pinned),
    )


def _summary_tokens(depth: CompactionOptions, window_tokens: int, rest: int) -> int:
    """How long a summary may be; where its share is too small for one, it may have more of it."""
    share = min(_SUMMARY_WINDOW_RATIO * window_tokens, _SUMMARY_SHARE * rest)
    most = min(_SUMMARY_MOST_WINDOW_RATIO * window_tokens, _SUMMARY_MOST_SHARE * rest)
    return min(depth.summary_max_tokens, math.floor(max(share, min(_GOOD_SUMMARY_TOKENS, most))))


def _least_summary_tokens(window_tokens: int) -> int:
    """The shortest summary that is worth asking for."""
    return min(max(int(_LEAST_SUMMARY_WINDOW_RATIO * window_tokens), _LEAST_SUMMARY_TOKENS), _GOOD_SUMMARY_TOKENS)


def _kept_images(
    conversation: Conversation,
    depth: CompactionOptions,
    last_cut: int,
    most_tokens: int,
) -> tuple[ImagePlace, ...]:
    """The images that stay although their messages may be covered, ascending."""
    stays = {index - conversation.prefix for index in conversation.requests}
    may_go = [position for position in range(last_cut) if position not in stays]
    return images.staying(conversation, may_go, keep_images=depth.keep_images, most_tokens=most_tokens)


def _words_tokens(conversation: Conversation, covered_messages: int, budget: Budget, target: int, room: int) -> int:
    """What the user's own words in the covered part may take: all they need, up to a quarter of the target.

    Never so much that no summary has room, which is given up only where there was none anyway.
    """
    needed = sum(
        conversation.sizes[index] * len(words) // max(len(message.text), 1) + 2
        for index, message in enumerate(conversation.rest[:covered_messages], conversation.prefix)
        if message.role == "user"
        and index not in conversation.requests
        and not message.is_ours
        and (words := own_words(message))
    )
    most = min(int(_WORDS_TARGET_RATIO * target), int(_WORDS_SHARE * room))
    for summary_tokens in (_GOOD_SUMMARY_TOKENS, _least_summary_tokens(budget.window_tokens)):
        summary_room = int(summary_tokens / _SUMMARY_MOST_SHARE) + 1
        if room >= summary_room:
            most = min(most, room - summary_room)
            break
    return max(min(needed + _WORDS_HEAD_TOKENS if needed else 0, most), 0)


def _edit(
    conversation: Conversation,
    budget: Budget,
    depth: CompactionOptions,
    base: Compaction | None,
    otherwise: Prune | Summarize,
) -> Edit | None:
    """The edit that reaches the target with as few stubs as possible, or None when none does.

    Only if it reaches the target: an edit that gains a little would be followed by another one a turn later.
    """
    cuts = [cut for cut in conversation.cuts if cut > (base.covered_messages if base else 0)]
    recent = [cut for cut in cuts if cut <= len(conversation.rest) - depth.keep_recent_messages]
    # The recent messages are spared where that is enough; only the protected tail is spared whatever happens.
    target = budget.target_tokens(conversation.tokens)
    # Where one turn could fill what is left, an edit goes deeper if it can: a stub costs nothing.
    targets = (min(target, budget.narrow_target_tokens), target) if budget.is_narrow else (target,)
    for target_tokens in dict.fromkeys(targets):
        for cut in dict.fromkeys((*recent[-1:], *cuts[-1:])):
            edit = _edit_up_to(conversation, cut, budget, depth, base, otherwise, target_tokens)
            if edit is not None:
                return edit
    return None


def _edit_up_to(
    conversation: Conversation,
    covered_messages: int,
    budget: Budget,
    depth: CompactionOptions,
    base: Compaction | None,
    otherwise: Prune | Summarize,
    target: int,
) -> Edit | None:
    start, count = base.replaced_messages if base else 0, conversation.count_text
    room = max(target - budget.floor_tokens, 0)
    kept_images = _kept_images(conversation, depth, covered_messages, target)
    # A tool can be called again, so its text goes before the images that a person sent.
    own_images = images.of_the_user(conversation, range(start, covered_messages))
    compaction = _editing(conversation, covered_messages, budget, base, "edit", {*kept_images, *own_images})
    words_tokens = _words_tokens(conversation, start, budget, target, room)
    ledger_tokens = words_tokens + int(_EDIT_LEDGER_SHARE * (room - words_tokens))
    tokens = applied_tokens(conversation, compaction) + RECORD_TOKENS + ledger_tokens
    covered = conversation.rest[start:covered_messages]
    chosen = set(compaction.stubbed)
    shortened = (each.position for each in compaction.shortened)
    gone = {*compaction.stubbed, *compaction.dropped, *shortened, *compaction.pinned}
    for position, line in stubs(covered).items():
        if tokens <= target and not depth.rereads:
            break
        if start + position not in gone:
            chosen.add(start + position)
            tokens -= count(covered[position].text) - count(line)
    left_images, over = images.without_first(conversation, compaction.images, tokens - target)
    tokens = target + over
    if tokens > target:
        return None
    return Edit(
        compaction=replace(compaction, stubbed=tuple(sorted(chosen)), images=left_images),
        ledger_tokens=ledger_tokens + target - tokens,
        predicted_tokens=target,
        otherwise=otherwise,
    )


def _prune(
    conversation: Conversation,
    budget: Budget,
    depth: CompactionOptions,
    base: Compaction | None,
    otherwise: Summarize,
    now_tokens: int,
) -> Prune | None:
    """What a pruning model may be asked; None where even the best answer would leave too much.

    Not while an answer is carried over: its client waits, and the messages of ours are no one's to judge.
    """
    if otherwise.provisional or conversation.messages[-1].is_ours:
        return None
    count = conversation.count_text
    cuts = [cut for cut in conversation.cuts if cut > (base.covered_messages if base else 0)]
    recent = [cut for cut in cuts if cut <= len(conversation.rest) - depth.keep_recent_messages]
    target = budget.target_tokens(conversation.tokens)
    room = max(target - budget.floor_tokens, 0)
    for cut in dict.fromkeys((*recent[-1:], *cuts[-1:])):
        kept_images = _kept_images(conversation, depth, cut, int(_IMAGES_SHARE * room))
        compaction = _editing(conversation, cut, budget, base, depth.strategy.name, kept_images)
        words_tokens = _words_tokens(conversation, cut, budget, target, room)
        ledger_tokens = words_tokens + int(_EDIT_LEDGER_SHARE * (room - words_tokens))
        record_tokens = RECORD_TOKENS + otherwise.summary_tokens + ledger_tokens + count(compaction.summary)
        least_tokens = kept_tokens(conversation, cut, compaction.pinned) + record_tokens
        if least_tokens > now_tokens * (1 - MIN_GAIN_RATIO) or budget.triggers(least_tokens):
            continue
        return Prune(
            strategy=depth.strategy.name,
            compaction=compaction,
            base=base,
            now_tokens=now_tokens,
            summary_tokens=otherwise.summary_tokens,
            ledger_tokens=ledger_tokens,
            predicted_tokens=target,
            otherwise=otherwise,
        )
    return None


def _editing(
    conversation: Conversation,
    covered_messages: int,
    budget: Budget,
    base: Compaction | None,
    rung: str,
    kept_images: Collection[ImagePlace],
) -> Compaction:
    """A compaction that sends edited what the base sent edited, and what is newly covered; still without a ledger."""
    rest, prefix, start = conversation.rest, conversation.prefix, base.replaced_messages if base else 0
    stay = {prefix + at for at in (base.pinned if base else ()) if at < start and rest[at].role != "user"}
    doubted = conversation.doubted
    if doubted is not None and (doubted - prefix >= start or (base and doubted - prefix in base.pinned)):
        stay.add(doubted)
    pinned = conversation.pinned(covered_messages, *stay)
    # What is gone stays gone: the server's cache ends where something comes back.
    known = base.covered_messages if base else 0
    shown = [place for place in kept_images if place[0] >= known or (base and place in base.images)]
    stubbed = base.stubbed if base else ()
    if rung != "edit":
        # A model chooses among messages, and none of it is the person's request.
        stubbed = tuple(sorted({*stubbed, *with_data(rest, pinned)}))
    return Compaction(
        covered_messages=covered_messages,
        covered_hash=conversation.hashes[covered_messages],
        pinned=pinned,
        round=(base.round if base else 0) + 1,
        segments=base.segments if base else (),
        ledger="",
        rung=rung,
        window_tokens=budget.window_tokens,
        edited_from=start,
        stubbed=stubbed,
        dropped=base.dropped if base else (),
        shortened=base.shortened if base else (),
        omissions=base.omissions if base else "",
        begun=base.begun if base else None,
        images=tuple(sorted(place for place in shown if place[0] < covered_messages and place[0] not in pinned)),
    )
