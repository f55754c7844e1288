"""Decides about a request: send it, perhaps with an earlier compaction, make a new one by steps, or refuse it.

And what to have ready for the next turn while no client waits: a record, and the server's cache. The engine brings the
sizes, the budget and the stored compactions, and carries the decision out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.core.budget import Budget, CompactionOptions, gains
from litellm_compaction.core.compaction import Compaction, applied_tokens, is_undone, usable
from litellm_compaction.core.forms import Form, ImagePlace, lines_for, size_of
from litellm_compaction.core.messages import Message, parse_message, user_message
from litellm_compaction.core.view import RECORD_TOKENS, View, answered_round

# A summary costs the most of what stays, and says the least of what the next step needs. It may have the second share
# if the first is too small for a good one; one below the least says too little for its cost.
_SUMMARY_SHARE, _SUMMARY_MOST_SHARE = 0.20, 0.40
_GOOD_SUMMARY_TOKENS, _LEAST_SUMMARY_TOKENS, _SUMMARY_ROOM_SHARE = 150, 96, 0.75
_LEDGER_SHARE, _EDIT_LEDGER_SHARE = 0.55, 0.15
# The user's own words: of the target, the person's first ones of the window; and the marks of their lines.
_WORDS_TARGET_RATIO, _WORDS_HEAD_TOKENS = 0.25, 12
TASK_WINDOW_RATIO, _TASK_ROOM_RATIO = 0.1, 1.1
# Of frozen summaries; and of the target, if all that stays is read again and every change costs that.
_FROZEN_TARGET_RATIO, _DEEP_RATIO = 0.25, 0.65
# Of images beside a record; and of the trigger's line, up to which recent messages stay where a caller wants that.
_IMAGES_SHARE, _STAYING_RATIO = 0.50, 0.85
# "Last request from user was: " in any vocabulary.
_LEAD_IN_TOKENS = 12
# What the next turn adds: the most of so many before it; a sentence or two if there were none yet.
_LATEST_STEPS, _USUAL_GROWTH_RATIO = 3, 0.02

Question: TypeAlias = Literal["none", "choice", "summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A new compaction to make.

    Attributes:
        draft: what it will be, still without its ledger and without a model's words.
        question: what a model is asked for: a summary, which messages may go or become shorter, or nothing.
        base: the compaction whose summaries it continues; rewritten into one if it `integrates` them.
        summary_tokens: bound on the model's words, or on the base's summary, which goes on.
        ledger_tokens: bound on the ledger; at least `ledger_min_tokens` if a summary is longer than planned.
        now_tokens: the prompt without it, and afterwards at most `predicted_tokens`, if a model chooses about that.
    """

    draft: Compaction
    question: Question
    base: Compaction | None = None
    integrates: bool = False
    summary_tokens: int = 0
    ledger_tokens: int
    ledger_min_tokens: int = 0
    now_tokens: int = 0
    predicted_tokens: int

    @property
    def is_record(self) -> bool:
        """No other step leaves less."""
        return self.draft.is_record

    @property
    def is_edit(self) -> bool:
        """Old results become lines, without a model, and that alone reaches the target."""
        return self.question == "none" and not self.is_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send the messages with a compaction, or as they are; `is_undone` if its owner has undone that."""

    compaction: Compaction | None = None
    is_undone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """Make a new compaction, by the first of these steps whose result does; a second record if no model writes one."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The protected messages alone are too large."""


Plan: TypeAlias = Send | Make | Refuse


def plan(view: View, budget: Budget, options: CompactionOptions, stored: Sequence[Compaction]) -> Plan:
    """Decides about a conversation: the first candidate that does, what changes the least and costs nothing first."""
    is_wanted, known = budget.is_wanted, usable(view, stored)
    if budget.rules.keeps_what_fits:
        return _plan_client_summary(view, budget, options, known)
    if not is_wanted and budget.own.fits(view.tokens) and is_undone(view, stored):
        return Send(is_undone=True)
    if not is_wanted and not budget.own.triggers(view.tokens):
        # A compacted prompt stays compacted, although the count has settled a little lower since: the same bytes, and
        # the server's cache stays warm. A window that has grown is worth a fresh start.
        lasting = (each for each in known if each.state != "ready" and each.window_tokens >= budget.window_tokens)
        return Send(compaction=next(lasting, None))
    view, budget = _with_answered_round(view, budget, known)
    current, current_tokens = _in_effect(view, budget, known)
    is_due = is_wanted or budget.triggers(current_tokens)
    if current and (not is_due or (budget.may_wait(current_tokens) and not view.messages[-1].is_synthetic)):
        return Send(compaction=current)
    now_tokens = min(view.tokens, current_tokens)
    for each in (each for each in known if each.state == "ready" and not is_wanted):
        if gains(tokens := applied_tokens(view, each), now_tokens) and not budget.triggers(tokens):
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
    for each in (each for each in known if each.state != "ready"):
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
    """Both with the round that an answer is about which is carried over, if it fits, and no record stands for it."""
    staying = answered_round(view.messages)
    gone = {view.prefix + at for each in known for at in each.gone if at < each.start}
    held = replace(budget, floor_tokens=budget.floor_tokens + sum(view.sizes[index] for index in staying))
    if not gone.isdisjoint(staying) or held.least_target_tokens > held.early_start_tokens or not staying:
        return view, budget
    return replace(view, pins=(*view.pins, *staying)), held


def _plan_client_summary(view: View, budget: Budget, options: CompactionOptions, known: Sequence[Compaction]) -> Plan:
    """Decides about a request for a summary that the client goes on with in place of its history.

    If it is too long, the known record of the oldest part stands for as much of it as has to go, without a model call;
    without one the oldest results become lines.
    """
    if not budget.own.triggers(view.tokens):
        return Send()
    base = next((each for each in known if each.segments and each.state != "provisional"), None)
    planner = Planner(view=view, budget=budget, options=options, base=base)
    record = planner.record(asks=False) if budget.fits(view.floor_tokens) else None
    if record and record.predicted_tokens < view.tokens:
        return Make(steps=tuple(filter(None, (planner.edit() if base is None else None, record))))
    return _sent_or_made(view, budget, (record,) if record else ())


class _Shares(NamedTuple):
    """The tokens of a record's texts; `fixed` are there already, the user's own `words` are part of the ledger."""

    summary: int
    ledger: int
    words: int
    fixed: int
    integrates: bool
    asks: bool


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Makes the steps for a conversation, going on from `base` if there is one."""

    view: View
    budget: Budget
    options: CompactionOptions
    base: Compaction | None

    def target_tokens(self, prompt_tokens: int) -> int:
        """The size to which a record compacts a prompt: less if the server reads all of it again after every change."""
        target_ratio = self.budget.rules.target_ratio * (_DEEP_RATIO if self.options.rereads else 1)
        rules = replace(self.budget.rules, keeps_what_fits=False, target_ratio=target_ratio)
        return replace(self.budget, rules=rules).target_tokens(prompt_tokens)

    def records(self, *, asks: bool = True) -> tuple[Step, ...]:
        """The record of the strategy; after one in place of all comes what to make if no model writes it."""
        whole, strategy = self.record(asks=asks), self.options.strategy
        if whole is None or strategy.keeps_recent:
            return () if whole is None else (whole,)
        options = replace(self.options, strategy=replace(strategy, keeps_recent=True, lead_in=""))
        keeping = replace(self, options=options).record(asks=asks)
        return tuple(filter(None, (None if keeping and whole.question == "none" else whole, keeping)))

    def record(self, *, growth_tokens: int | None = None, asks: bool = True) -> Step | None:
        """The record that reaches the target by a model's words, or, unless it `asks` one, by copied text alone.

        It covers all there is if `growth_tokens` are still to come after it. If only what does not fit has to go, it
        covers no more than that. None if nothing may be covered.
        """
        view, options, target = self.view, self.options, self.target_tokens(self.view.tokens)
        if growth_tokens is not None:
            target = min(max(target - growth_tokens, self.budget.least_target_tokens), target)
        images = self._images(self._last_cut, target)
        shares = self._shares(target, view.image_tokens(images), asks=asks)
        start = self.base.start + (not shares.integrates) if self.base else 0
        cuts = [cut for cut in view.cuts if cut >= start]
        if growth_tokens is not None or not options.strategy.keeps_recent:
            cuts = cuts[-1:]
        if not cuts:
            return None

        def after_tokens(cut: int) -> int:
            image_tokens = view.image_tokens(place for place in images if place[0] < cut)
            return view.kept_tokens(cut) + shares.summary + shares.ledger + shares.fixed + image_tokens

        cut = self._cut(cuts, target, after_tokens)
        predicted_tokens = after_tokens(cut)
        # The ledger may have the room that a coarse cut leaves up to the target: a little prefill and no decoding.
        has_spare = shares.asks and not options.writes_whole_records
        spare = min(max(target - predicted_tokens, 0), shares.ledger) if has_spare else 0
        draft = self._draft(
            cut, options.strategy.writer or options.strategy.name, images, view.as_words(view.pinned(cut))
        )
        return Step(
            draft=replace(draft, state="applied" if shares.asks else "provisional"),
            question="summary" if shares.asks else "none",
            base=self.base,
            integrates=shares.integrates or not shares.asks,
            summary_tokens=shares.summary,
            ledger_tokens=shares.ledger + spare,
            ledger_min_tokens=shares.words,
            predicted_tokens=predicted_tokens + spare,
        )

    def _shares(self, target: int, images_tokens: int, *, asks: bool) -> _Shares:
        options, frozen = self.options, self._frozen_tokens
        # The user's own words come first: their room is shared out no more.
        words = self._words_tokens(self._last_cut, target)
        rest = self._room_tokens(target) - words - images_tokens
        # If its share is too small for a summary, it may have more of it.
        summary = int(max(_SUMMARY_SHARE * rest, min(_GOOD_SUMMARY_TOKENS, _SUMMARY_MOST_SHARE * rest)))
        summary = min(options.summary_max_tokens, summary)
        # The base's summaries are written anew in records that are whole, of two of which only the newer one holds; if
        # they have outgrown their room; or if nothing new is to be covered: the window shrank, or the record has to.
        is_whole = options.writes_whole_records or not options.strategy.keeps_recent
        has_outgrown = frozen > min(_FROZEN_TARGET_RATIO * target, rest - summary)
        integrates = self.base is not None and (is_whole or has_outgrown or self._last_cut <= self.base.start)
        asks = asks and summary >= min(_LEAST_SUMMARY_TOKENS, options.summary_max_tokens)
        frozen = frozen if asks and not integrates else 0
        return _Shares(
            summary=summary if asks else int((1 - _LEDGER_SHARE) * rest),
            # Frozen segments take from the other lines, not from the user's.
            ledger=words + int(_LEDGER_SHARE * max(rest - frozen, 0)),
            words=words,
            fixed=RECORD_TOKENS + frozen + (_LEAD_IN_TOKENS if options.strategy.lead_in else 0),
            integrates=integrates,
            asks=asks,
        )

    def _cut(self, cuts: Sequence[int], target: int, after_tokens: Callable[[int], int]) -> int:
        """The first cut with which the prompt is not above `target`, else the last."""
        budget = self.budget
        if budget.rules.keeps_what_fits:
            target = budget.target_tokens(self.view.tokens)
        if self.options.writes_whole_records and budget.is_wanted:
            # The recent messages stay where nothing has to be compacted again at once.
            recent = [each for each in cuts if each <= self._recent_start][-1:]
            if recent and after_tokens(recent[0]) <= max(target, int(_STAYING_RATIO * budget.line_tokens)):
                return recent[0]
        # The kept part never grows with the cut; one look at each of 40,000 messages' cuts would add them all up.
        return cuts[min(bisect_left(cuts, True, key=lambda each: after_tokens(each) <= target), len(cuts) - 1)]

    def edit(self) -> Step | None:
        """The edit that reaches the target with as few lines as possible, with images if that is enough."""
        without_images = replace(self, options=replace(self.options, keep_images=0))
        planners = (self, without_images) if self.options.keep_images else (self,)
        cuts, target = self._edit_cuts if self.options.edits else (), self.budget.target_tokens(self.view.tokens)
        return next(filter(None, (each._edit_up_to(cut, target) for each in planners for cut in cuts)), None)

    def _edit_up_to(self, cut: int, target: int) -> Step | None:
        start, count = self.base.start if self.base else 0, self.view.count_text
        draft = self._editing(cut, target, "edit")
        ledger_tokens = self._edit_ledger_tokens(start, target)
        tokens = applied_tokens(self.view, draft) + RECORD_TOKENS + ledger_tokens
        covered = self.view.rest[start:cut]
        forms = {each.position: each for each in draft.forms}
        for at, line in lines_for(covered).items():
            if tokens <= target and not self.options.rereads:
                break
            if start + at not in forms:
                size = size_of(covered[at]) if covered[at].role == "tool" else ""
                forms[start + at] = Form(start + at, "line", size)
                tokens -= count(covered[at].text) - count(line)
        if tokens > target:
            return None
        draft = replace(draft, forms=tuple(sorted(forms.values())))
        return Step(
            draft=draft, question="none", ledger_tokens=ledger_tokens + target - tokens, predicted_tokens=target
        )

    def choice(self, fresh: Step, now_tokens: int) -> Step | None:
        """The question for a pruning model before `fresh` is made; None if even the best answer leaves too much.

        Not while an answer goes on: its client waits, and our messages are not to be judged.
        """
        view, strategy = self.view, self.options.strategy
        if not strategy.chooses or fresh.question == "none" or view.messages[-1].is_synthetic:
            return None
        target = self.target_tokens(view.tokens)
        for cut in self._edit_cuts:
            draft, ledger_tokens = self._editing(cut, target, strategy.name), self._edit_ledger_tokens(cut, target)
            record_tokens = RECORD_TOKENS + fresh.summary_tokens + ledger_tokens + self._frozen_tokens
            least_tokens = view.kept_tokens(cut, draft.pinned) + record_tokens
            if gains(least_tokens, now_tokens) and not self.budget.triggers(least_tokens):
                asked = replace(fresh, draft=draft, question="choice", integrates=False, ledger_min_tokens=0)
                return replace(asked, now_tokens=now_tokens, ledger_tokens=ledger_tokens, predicted_tokens=target)
        return None

    @property
    def _edit_cuts(self) -> Sequence[int]:
        """The last cut before the recent messages, which are spared if that is enough; and the last one of all."""
        cuts = [cut for cut in self.view.cuts if cut > (self.base.covered_messages if self.base else 0)]
        recent = [cut for cut in cuts if cut <= self._recent_start]
        return [*dict.fromkeys((*recent[-1:], *cuts[-1:]))]

    def _editing(self, covered_messages: int, target: int, level: str) -> Compaction:
        """A compaction of the forms that the base had, and of the newly covered messages; still without a ledger.

        Gone messages stay gone: the server's cache ends where something comes back.
        """
        view, base = self.view, self.base
        images = self._images(covered_messages, target)
        stay = [at for at in base.pinned if at < base.start and view.rest[at].role != "user"] if base else []
        pinned = tuple(sorted({*view.pinned(covered_messages), *stay}))
        forms = {at: Form(at, "whole") for at in pinned}
        if level != "edit":
            # A model chooses among messages, and none of it is the person's request.
            forms.update((each.position, each) for each in view.as_words(pinned))
        if base is None:
            return replace(self._draft(covered_messages, level, images, forms.values()), start=0)
        for each in base.forms:
            if each.position in forms:
                forms[each.position] = each if each.how == "words" else forms[each.position]
            elif each.position >= base.start and each.how != "whole":
                # Words that are no request any more are old ones.
                forms[each.position] = each._replace(how="line") if each.how == "words" else each
        places = [at for at in images if at[0] >= base.covered_messages or at in base.images]
        draft = self._draft(covered_messages, level, places, forms.values())
        return replace(draft, start=base.start, omissions=base.omissions, covered_part=base.covered_part)

    def _edit_ledger_tokens(self, covered_messages: int, target: int) -> int:
        words_tokens = self._words_tokens(covered_messages, target)
        return words_tokens + int(_EDIT_LEDGER_SHARE * (self._room_tokens(target) - words_tokens))

    def _draft(
        self, covered_messages: int, level: str, images: Collection[ImagePlace], forms: Collection[Form]
    ) -> Compaction:
        """What so many messages become after the base, without a model's words and a ledger."""
        base, whole = self.base, {each.position for each in forms if each.how in ("whole", "words")}
        return Compaction(
            covered_messages=covered_messages,
            covered_hash=self.view.hashes[covered_messages],
            start=covered_messages,
            forms=tuple(sorted(forms)),
            round=base.round + 1 if base else 1,
            segments=base.segments if base else (),
            level=level,
            window_tokens=self.budget.window_tokens,
            images=tuple(sorted(at for at in images if at[0] < covered_messages and at[0] not in whole)),
        )

    @cached_property
    def _frozen_tokens(self) -> int:
        return self.view.count_text(self.base.summary) if self.base else 0

    @property
    def _recent_start(self) -> int:
        return len(self.view.rest) - self.options.keep_recent_messages

    @property
    def _last_cut(self) -> int:
        return max(self.view.cuts, default=0)

    def _room_tokens(self, target: int) -> int:
        return max(target - self.budget.floor_tokens, 0)

    def _images(self, last_cut: int, target: int) -> tuple[ImagePlace, ...]:
        most_tokens = int(_IMAGES_SHARE * self._room_tokens(target))
        return self.view.newest_images(last_cut, most=self.options.keep_images, most_tokens=most_tokens)

    def _words_tokens(self, covered_messages: int, target: int) -> int:
        """The room for the user's own words: up to a quarter of the target, for the task a tenth of the window."""
        view, room = self.view, self._room_tokens(target)
        needed = view.own_words_tokens(range(covered_messages))
        task = [at for at in (view.task,) if at is not None and at < covered_messages]
        task_tokens = int(_TASK_ROOM_RATIO * view.own_words_tokens(task))
        task_tokens = min(task_tokens, int(TASK_WINDOW_RATIO * self.budget.window_tokens)) + _WORDS_HEAD_TOKENS
        least, good = (int(each / _SUMMARY_MOST_SHARE) + 1 for each in (_LEAST_SUMMARY_TOKENS, _GOOD_SUMMARY_TOKENS))
        kept = min(good, max(least, int(_SUMMARY_ROOM_SHARE * room)))
        left = room - kept if kept <= room else room
        most = min(max(min(int(_WORDS_TARGET_RATIO * target), room // 2), task_tokens), left)
        return min(needed + _WORDS_HEAD_TOKENS, most) if needed else 0


# ------------------------------------------------------------------ ahead of the next turn


def turn_ended(messages: Sequence[Message], answer: str) -> tuple[Message, ...]:
    """A conversation as its next turn will begin with it, after an answer of that text; "" if it has called tools."""
    said = parse_message({"role": "assistant", "content": answer})
    # The user's message is empty: the person's last request stays the last. Results belong to the same round.
    return (*messages, said, user_message("")) if answer else (*messages, said)


def plan_ahead(view: View, budget: Budget, options: CompactionOptions, stored: Sequence[Compaction]) -> Step | None:
    """Plans the summary of all that the server's cache holds, which a conversation of `turn_ended` will need.

    None if a record exists, lines suffice, or it would gain too little: half as much comes twice as often.
    """
    known, trigger_tokens = usable(view, stored), budget.trigger_tokens
    base = next((each for each in known if each.state not in ("provisional", "ready")), None)
    covered = base.covered_messages if base else 0
    if options.strategy.chooses or any(each.state == "ready" and each.covered_messages > covered for each in known):
        return None
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

    It is a record that was written ahead, or an edit to make, if the client's usual addition would cross the trigger.
    What the server has read is sent, even if the turn turns out too small for it.
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
