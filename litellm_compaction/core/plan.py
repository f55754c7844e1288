"""Decides about a request: send it, perhaps with an earlier compaction, make a new one by steps, or refuse it.

And what to have ready for the next turn while no client waits: a record, and the server's cache. The engine brings the
sizes, the budget and the stored compactions, and carries the decision out.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, TypeAlias

from litellm_compaction.core.budget import Budget, CompactionOptions, gained_tokens
from litellm_compaction.core.compaction import Compaction, applied_tokens, is_undone, usable
from litellm_compaction.core.forms import Form, ImagePlace, lines_for, size_of
from litellm_compaction.core.messages import Message, parse_message, user_message
from litellm_compaction.core.view import RECORD_TOKENS, View, answered_round

# A summary costs the most of what stays, and says the least of what the next step needs. It may have the second share
# if the first is too small for a good one; one below the least says too little for its cost.
_SUMMARY_SHARE, _SUMMARY_MOST_SHARE, _GOOD_SUMMARY_TOKENS, _LEAST_SUMMARY_TOKENS = 0.20, 0.40, 150, 96
_LEDGER_SHARE, _EDIT_LEDGER_SHARE, _IMAGES_SHARE = 0.55, 0.15, 0.50
# The user's own words: of the target, the person's first ones of the window; and the marks of their lines.
_WORDS_TARGET_RATIO, TASK_WINDOW_RATIO, _TASK_ROOM_RATIO, _WORDS_HEAD_TOKENS = 0.25, 0.1, 1.1, 12
# Of frozen summaries; and of the target, if all that stays is read again and every change costs that.
_FROZEN_TARGET_RATIO, _DEEP_RATIO = 0.25, 0.65
# Of the trigger's line, up to which recent messages stay where a caller wants that.
_STAYING_RATIO = 0.85
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
    if not budget.is_wanted and budget.own.fits(view.tokens) and is_undone(view, stored):
        return Send(is_undone=True)
    candidates = _candidates(view, budget, options, usable(view, stored))
    return next(decision for decision, tokens, most_tokens in candidates if tokens <= most_tokens)


def _candidates(
    view: View, budget: Budget, options: CompactionOptions, known: Sequence[Compaction]
) -> Iterator[tuple[Plan, int, int]]:
    """What may be done, in the order of its cost; what it leaves; and the most that it may leave.

    For a summary that the client goes on with in place of its history no model is asked, and no more goes than has to:
    the known record stands for the oldest part.
    """
    own, keeps_what_fits, none_tokens = budget.own, budget.rules.keeps_what_fits, -1
    reusable = () if keeps_what_fits or budget.is_wanted else known
    in_effect = [each for each in (known if budget.is_wanted else reusable) if each.state != "ready"]
    # A compacted prompt stays compacted, although the count has settled a little lower since: the same bytes, and the
    # server's cache stays warm. A window that has grown is worth a fresh start.
    lasting = next((each for each in in_effect if each.window_tokens >= budget.window_tokens), None)
    yield Send(compaction=lasting), view.tokens, none_tokens if budget.is_wanted else own.trigger_tokens
    view, budget = _with_answered_round(view, budget, known)
    current, current_tokens = None, view.tokens
    for each in in_effect:
        # One by one: of fifty rounds the newest does nearly always.
        tokens = applied_tokens(view, each)
        yield Send(compaction=each), tokens, budget.trigger_tokens if reusable else none_tokens
        if current is None or tokens < current_tokens:
            current, current_tokens = each, tokens
    if current is not None and not view.messages[-1].is_synthetic:
        yield Send(compaction=current), current_tokens, budget.waiting_tokens
    now_tokens = min(view.tokens, current_tokens)
    most_tokens = now_tokens - 1 if keeps_what_fits else gained_tokens(now_tokens)
    for each in (each for each in reusable if each.state == "ready"):
        yield Send(compaction=each), applied_tokens(view, each), min(most_tokens, budget.trigger_tokens)
    bases = (each for each in known if each.state != "provisional" and (each.segments or not keeps_what_fits))
    planner = Planner(view=view, budget=budget, options=options, base=next(bases, None))
    copied = planner.records(asks=False) if budget.fits(view.floor_tokens) else ()
    if copied:
        records = copied if keeps_what_fits else planner.records(asks=True)
        steps = filter(None, (planner.edit, planner.choice(records[0], now_tokens), *records))
        yield Make(steps=tuple(steps)), records[0].predicted_tokens, most_tokens
        # An answer would be stopped at once, so less gain will do; for that no model is asked.
        most_tokens = budget.latest_start_tokens if now_tokens > budget.latest_start_tokens else none_tokens
        yield Make(steps=tuple(filter(None, (planner.edit, *copied)))), copied[0].predicted_tokens, most_tokens
    # No cut gains enough to be worth a model call: what fits is sent.
    if current is not None:
        yield Send(compaction=current), current_tokens, budget.prompt_limit_tokens
    yield Send(), view.tokens, own.prompt_limit_tokens
    yield Make(steps=copied) if copied else Refuse(), 0, 0


def _with_answered_round(view: View, budget: Budget, known: Sequence[Compaction]) -> tuple[View, Budget]:
    """Both with the round that an answer is about which is carried over, if it fits, and no record stands for it."""
    staying = answered_round(view.messages)
    gone = {view.prefix + at for each in known for at in each.gone if at < each.start}
    held = replace(budget, floor_tokens=budget.floor_tokens + sum(view.sizes[index] for index in staying))
    if not gone.isdisjoint(staying) or held.least_target_tokens > held.early_start_tokens or not staying:
        return view, budget
    return replace(view, pins=(*view.pins, *staying)), held


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Makes the steps for a conversation, going on from `base` if there is one."""

    view: View
    budget: Budget
    options: CompactionOptions
    base: Compaction | None

    def records(self, *, asks: bool) -> tuple[Step, ...]:
        """The record of the strategy; after one in place of all comes what to make if no model writes it."""
        keeping = self._record(asks=asks, keeps_recent=True)
        whole = None if self.options.strategy.keeps_recent else self._record(asks=asks, keeps_recent=False)
        return tuple(filter(None, (whole if whole and whole.question != "none" else None, keeping)))

    def _record(self, *, asks: bool, keeps_recent: bool) -> Step | None:
        """The record that reaches the target by a model's words, or, unless it `asks` one, by copied text alone.

        None if nothing may be covered.
        """
        view, base, options, target = self.view, self.base, self.options, self._target_tokens
        last_cut, frozen = max(view.cuts, default=0), self._frozen_tokens
        # The user's own words come first: their room is shared out no more.
        words = self._words_tokens(last_cut)
        rest = self._room_tokens - words - view.image_tokens(self._images(last_cut))
        # If its share is too small for a summary, it may have more of it.
        summary = int(max(_SUMMARY_SHARE * rest, min(_GOOD_SUMMARY_TOKENS, _SUMMARY_MOST_SHARE * rest)))
        summary = min(options.summary_max_tokens, summary)
        asks = asks and summary >= min(_LEAST_SUMMARY_TOKENS, options.summary_max_tokens)
        # The base's summaries are written anew in records that are whole, of two of which only the newer one holds; if
        # they have outgrown their room; or if nothing new is to be covered: the window shrank, or the record has to.
        is_whole = options.writes_whole_records or not keeps_recent
        has_outgrown = frozen > min(_FROZEN_TARGET_RATIO * target, rest - summary)
        integrates = not asks or (base is not None and (is_whole or has_outgrown or last_cut <= base.start))
        start = base.start + (not integrates) if base else 0
        covers_all = options.covers_all or not keeps_recent
        cuts = [cut for cut in view.cuts if cut >= start][-1 if covers_all else 0 :]
        if not cuts:
            return None
        frozen = 0 if integrates else frozen
        summary = summary if asks else int((1 - _LEDGER_SHARE) * rest)
        # Frozen segments take from the other lines, not from the user's.
        ledger = words + int(_LEDGER_SHARE * max(rest - frozen, 0))
        text_tokens = RECORD_TOKENS + frozen + summary + ledger + (_LEAD_IN_TOKENS if options.strategy.lead_in else 0)
        cut, kept = self._cut(cuts, text_tokens)
        # The ledger may have the room that a coarse cut leaves up to the target: a little prefill and no decoding.
        has_spare = asks and not options.writes_whole_records
        spare = min(max(target - kept - text_tokens, 0), ledger) if has_spare else 0
        draft = self._draft(cut, options.strategy.writer or options.strategy.name, start=cut)
        return Step(
            draft=replace(draft, state="applied" if asks else "provisional"),
            question="summary" if asks else "none",
            base=base,
            integrates=integrates,
            summary_tokens=summary,
            ledger_tokens=ledger + spare,
            ledger_min_tokens=words,
            predicted_tokens=kept + text_tokens + spare,
        )

    def _cut(self, cuts: Sequence[int], text_tokens: int) -> tuple[int, int]:
        """The first cut with which a record of so many tokens reaches the target, else the last; and what stays."""
        view, budget = self.view, self.budget
        goal_tokens = self._goal_tokens if budget.rules.keeps_what_fits else self._target_tokens
        if self.options.writes_whole_records and budget.is_wanted:
            # The recent messages stay where nothing has to be compacted again at once.
            cuts = cuts[max(bisect_right(cuts, self._recent_start) - 1, 0) :]
            goal_tokens = max(goal_tokens, int(_STAYING_RATIO * budget.trigger_tokens))

        def kept_tokens(cut: int) -> int:
            return view.kept_tokens(cut) + view.image_tokens(self._images(cut))

        # The kept part never grows with the cut; one look at each of 40,000 messages' cuts would add them all up.
        at = bisect_left(cuts, True, key=lambda each: kept_tokens(each) + text_tokens <= goal_tokens)
        cut = cuts[min(at, len(cuts) - 1)]
        return cut, kept_tokens(cut)

    @cached_property
    def edit(self) -> Step | None:
        """The edit that reaches the target with as few lines as possible, with images if that is enough."""
        planners = (self, replace(self, options=replace(self.options, keep_images=0)))
        cuts = self._edit_cuts if self.options.edits else ()
        steps = (each._edit_up_to(cut) for each in planners[: 1 + bool(self.options.keep_images)] for cut in cuts)
        return next(filter(None, steps), None)

    def _edit_up_to(self, cut: int) -> Step | None:
        start, count = self.base.start if self.base else 0, self.view.count_text
        draft, target = self._draft(cut, "edit", start=start), self._goal_tokens
        ledger_tokens = self._edit_ledger_tokens(start)
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
        draft, ledger_tokens = replace(draft, forms=tuple(sorted(forms.values()))), ledger_tokens + target - tokens
        return Step(draft=draft, question="none", ledger_tokens=ledger_tokens, predicted_tokens=target)

    def choice(self, fresh: Step, now_tokens: int) -> Step | None:
        """The question for a pruning model before `fresh` is made; None if even the best answer leaves too much.

        Not while an answer goes on: its client waits, and our messages are not to be judged.
        """
        view, strategy, start = self.view, self.options.strategy, self.base.start if self.base else 0
        if not strategy.chooses or fresh.question == "none" or view.messages[-1].is_synthetic:
            return None
        for cut in self._edit_cuts:
            draft, ledger_tokens = self._draft(cut, strategy.name, start=start), self._edit_ledger_tokens(cut)
            record_tokens = RECORD_TOKENS + fresh.summary_tokens + ledger_tokens + self._frozen_tokens
            least_tokens = view.kept_tokens(cut, draft.pinned) + record_tokens
            if least_tokens <= min(gained_tokens(now_tokens), self.budget.trigger_tokens):
                return Step(
                    draft=draft,
                    question="choice",
                    base=self.base,
                    summary_tokens=fresh.summary_tokens,
                    ledger_tokens=ledger_tokens,
                    now_tokens=now_tokens,
                    predicted_tokens=self._target_tokens,
                )
        return None

    @property
    def _edit_cuts(self) -> Sequence[int]:
        """The last cut before the recent messages, which are spared if that is enough; and the last one of all."""
        cuts = [cut for cut in self.view.cuts if cut > (self.base.covered_messages if self.base else 0)]
        recent = [cut for cut in cuts if cut <= self._recent_start]
        return [*dict.fromkeys((*recent[-1:], *cuts[-1:]))]

    def _draft(self, covered_messages: int, level: str, *, start: int) -> Compaction:
        """What so many messages become, without a model's words and a ledger: a record, or forms behind the base's.

        Gone messages stay gone: the server's cache ends where something comes back.
        """
        view, base, images = self.view, self.base, self._images(covered_messages)
        forms = {each.position: each for each in view.as_words(view.pinned(covered_messages))}
        if level == "edit":
            forms = {at: Form(at, "whole") for at in forms}
        before = base if start < covered_messages else None
        for each in before.forms if before else ():
            at, is_pinned = each.position, each.position in forms
            if is_pinned and each.how == "words":
                forms[at] = each
            elif not is_pinned and at >= start and each.how != "whole":
                # Words that are no request any more are old ones.
                forms[at] = each._replace(how="line") if each.how == "words" else each
            elif not is_pinned and at < start and view.rest[at].role != "user":
                forms[at] = each
        if before:
            images = tuple(place for place in images if place[0] >= before.covered_messages or place in before.images)
        return Compaction(
            covered_messages=covered_messages,
            covered_hash=view.hashes[covered_messages],
            start=start,
            forms=tuple(sorted(forms.values())),
            round=base.round + 1 if base else 1,
            segments=base.segments if base else (),
            level=level,
            window_tokens=self.budget.window_tokens,
            omissions=before.omissions if before else "",
            covered_part=before.covered_part if before else None,
            images=tuple(place for place in images if forms.get(place[0], ("", ""))[1] not in ("whole", "words")),
        )

    @cached_property
    def _target_tokens(self) -> int:
        """The size to which a record compacts: less if the server reads all of it again after every change."""
        return self.budget.target_tokens(self.view.tokens, _DEEP_RATIO if self.options.rereads else 1.0)

    @cached_property
    def _goal_tokens(self) -> int:
        """The size at which enough has gone: the target, or all that fits."""
        if self.budget.rules.keeps_what_fits:
            return min(max(self.budget.trigger_tokens, self.budget.floor_tokens), self.budget.prompt_limit_tokens)
        return self.budget.target_tokens(self.view.tokens)

    @cached_property
    def _room_tokens(self) -> int:
        return max(self._target_tokens - self.budget.floor_tokens, 0)

    @cached_property
    def _frozen_tokens(self) -> int:
        return self.view.count_text(self.base.summary) if self.base else 0

    @property
    def _recent_start(self) -> int:
        return len(self.view.rest) - self.options.keep_recent_messages

    def _images(self, covered_messages: int) -> tuple[ImagePlace, ...]:
        most_tokens = int(_IMAGES_SHARE * self._room_tokens)
        return self.view.newest_images(covered_messages, most=self.options.keep_images, most_tokens=most_tokens)

    def _edit_ledger_tokens(self, covered_messages: int) -> int:
        words_tokens = self._words_tokens(covered_messages)
        return words_tokens + int(_EDIT_LEDGER_SHARE * (self._room_tokens - words_tokens))

    def _words_tokens(self, covered_messages: int) -> int:
        """The room for the user's own words: up to a quarter of the target, for the task a tenth of the window.

        A summary has room beside them, unless there is none in any case.
        """
        view, room = self.view, self._room_tokens
        needed = view.own_words_tokens(range(covered_messages))
        task = view.own_words_tokens(at for at in (view.task,) if at is not None and at < covered_messages)
        task_tokens = min(int(_TASK_ROOM_RATIO * task), int(TASK_WINDOW_RATIO * self.budget.window_tokens))
        most = max(min(int(_WORDS_TARGET_RATIO * self._target_tokens), room // 2), task_tokens)
        summary_room = int(_LEAST_SUMMARY_TOKENS / _SUMMARY_MOST_SHARE) + 1
        left = room - summary_room if summary_room <= room else room
        return min(min(needed, most) + _WORDS_HEAD_TOKENS, left) if needed else 0


# ------------------------------------------------------------------ ahead of the next turn


def turn_ended(messages: Sequence[Message], answer: str) -> tuple[Message, ...]:
    """A conversation as its next turn will begin with it, after an answer of that text; "" if it has called tools."""
    said = parse_message({"role": "assistant", "content": answer})
    # The user's message is empty: the person's last request stays the last. Results belong to the same round.
    return (*messages, said, user_message("")) if answer else (*messages, said)


def plan_next(
    view: View,
    budget: Budget,
    options: CompactionOptions,
    stored: Sequence[Compaction],
    *,
    growth_tokens: int,
) -> Compaction | Step | None:
    """Plans for the turn after `turn_ended` if it adds so many tokens, just beyond the trigger if they lead there.

    A record to write now, an edit to make, or what was written ahead; None if the prompt will be what is cached, or a
    record would gain too little: half as much comes twice as often. What is made for a larger turn is made more often.
    """
    decision = plan(view, budget, options, stored)
    if isinstance(decision, Send) and not (decision.compaction and decision.compaction.state == "ready"):
        compaction, limits = decision.compaction, budget if decision.compaction else budget.own
        left_tokens = limits.trigger_tokens - (applied_tokens(view, compaction) if compaction else view.tokens)
        if growth_tokens <= left_tokens:
            return None
        later, whole = view.grown(max(left_tokens + 1, 0)), replace(options, covers_all=True)
        decision = plan(later, replace(budget, floor_tokens=later.floor_tokens), whole, stored)
    if isinstance(decision, Make):
        step, trigger_tokens = decision.steps[0], budget.trigger_tokens
        gains = step.predicted_tokens <= (budget.target_tokens(trigger_tokens) + trigger_tokens) // 2
        is_record = step.question == "summary" and gains
        return replace(step, draft=replace(step.draft, state="ready")) if is_record else step if step.is_edit else None
    waiting = decision.compaction if isinstance(decision, Send) else None
    return waiting if waiting and waiting.state == "ready" else None


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
