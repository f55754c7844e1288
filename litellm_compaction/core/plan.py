"""Decides about a request: send it, perhaps with an earlier compaction, make a new one by steps, or refuse it.

And what may be shorter of what no compaction covers, and what to have ready for the next turn while no client waits: a
record, and the server's cache.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Literal, TypeAlias

from litellm_compaction.core.budget import ROOM_ABOVE_FLOOR_RATIO, Budget, CompactionOptions, gained_tokens
from litellm_compaction.core.compaction import Compaction, applied_tokens, is_undone, usable
from litellm_compaction.core.forms import ImagePlace, common_level, excerpt, in_order, lines_for, with_shorter_data
from litellm_compaction.core.messages import Message, parse_message, user_message, with_text
from litellm_compaction.core.transcripts import rendered_in
from litellm_compaction.core.view import RECORD_TOKENS, View, answered_round

# A summary may have the second share if the first is too small for a good one; below the least it says too little.
_SUMMARY_SHARE, _SUMMARY_MOST_SHARE, _GOOD_SUMMARY_TOKENS, _LEAST_SUMMARY_TOKENS = 0.20, 0.40, 150, 96
_LEDGER_SHARE, _EDIT_LEDGER_SHARE, _IMAGES_SHARE = 0.55, 0.15, 0.50
# The user's own words: of the target, the person's first ones of the window; and the marks of their lines.
_WORDS_TARGET_RATIO, TASK_WINDOW_RATIO, _WORDS_HEAD_TOKENS = 0.25, 0.1, 12
# Of the target, if all that stays is read again and every change costs that.
_DEEP_RATIO = 0.65
_STAYING_RATIO = 0.85  # Of the trigger, up to which recent messages stay where a caller wants that.
# What the next turn adds: the most of so many before it; a sentence or two if there were none yet.
_LATEST_STEPS, _USUAL_GROWTH_RATIO = 3, 0.02
_LEAST_EXCERPT_TOKENS = 64
_NONE_TOKENS = -1  # Of a candidate that never does.


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A new compaction to make."""

    draft: Compaction  # Still without its ledger and without a model's words.
    question: Literal["none", "choice", "summary"]  # A choice is of messages that may go.
    base: Compaction | None = None  # Its summary goes on, merged with what is new.
    summary_tokens: int = 0  # Bound on the model's words, or on the base's summary.
    ledger_tokens: int
    ledger_min_tokens: int = 0  # If a summary is longer than planned.
    now_tokens: int = 0  # The prompt without it, for a model that chooses.
    predicted_tokens: int  # The most that it leaves.

    @property
    def is_edit(self) -> bool:
        """Old results become lines, without a model, and that alone reaches the target."""
        return self.question == "none" and not self.draft.is_record


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
    view: View, budget: Budget, options: CompactionOptions, earlier: Sequence[Compaction]
) -> Iterator[tuple[Plan, int, int]]:
    """What may be done, in the order of its cost; what it leaves; and the most that it may leave.

    For a summary that the client goes on with in place of its history no model is asked, and no more goes than has to:
    the known record stands for the oldest part.
    """
    own, keeps_what_fits = budget.own, budget.rules.keeps_what_fits
    reusable = () if keeps_what_fits else earlier
    in_effect = [each for each in reusable if each.state != "ready"]
    # A compacted prompt stays so, although the count has settled a little lower: the cache is warm. A window that has
    # grown is worth a fresh start.
    lasting = next((each for each in in_effect if each.window_tokens >= budget.window_tokens), None)
    yield Send(compaction=lasting), view.tokens, _NONE_TOKENS if budget.is_wanted else own.trigger_tokens
    view, budget = _with_answered_round(view, budget, earlier)
    trigger_tokens = _NONE_TOKENS if budget.is_wanted else budget.trigger_tokens
    current, current_tokens = None, view.tokens
    for each in in_effect:
        tokens = applied_tokens(view, each)
        yield Send(compaction=each), tokens, trigger_tokens
        if current is None or tokens < current_tokens:
            current, current_tokens = each, tokens
    if current is not None and not view.messages[-1].is_synthetic:
        yield Send(compaction=current), current_tokens, budget.waiting_tokens
    now_tokens = min(view.tokens, current_tokens)
    most_tokens = now_tokens - 1 if keeps_what_fits else gained_tokens(now_tokens)
    for each in (each for each in reusable if each.state == "ready"):
        yield Send(compaction=each), applied_tokens(view, each), min(most_tokens, trigger_tokens)
    bases = (each for each in earlier if each.state != "provisional" and (each.summary or not keeps_what_fits))
    base, copied = next(bases, None), tuple[Step, ...]()
    # What was written ahead would never be used if the next request had other messages in its place.
    last_cuts = view.steady_cuts if options.covers_all else view.cuts
    limits = {view.steady_cuts: min(most_tokens, trigger_tokens), last_cuts: most_tokens}
    for cuts, limit_tokens in limits.items() if budget.fits(view.floor_tokens) else ():
        planner = _Planner(view, budget, options, base, cuts)
        if copied := planner.records(asks=False):
            records, edits = copied if keeps_what_fits else planner.records(asks=True), planner.edits()
            steps = (*edits, *planner.choices(records[0], now_tokens), *records)
            yield Make(steps=steps), records[0].predicted_tokens, limit_tokens
    if copied:
        # An answer would be stopped at once, so less gain will do; for that no model is asked.
        most_tokens = budget.latest_start_tokens if now_tokens > budget.latest_start_tokens else _NONE_TOKENS
        yield Make(steps=(*edits, *copied)), copied[0].predicted_tokens, most_tokens
    # No cut gains enough to be worth a model call: what fits is sent.
    if current is not None:
        yield Send(compaction=current), current_tokens, budget.prompt_limit_tokens
    yield Send(), view.tokens, own.prompt_limit_tokens
    yield Make(steps=copied) if copied else Refuse(), 0, 0


def _with_answered_round(view: View, budget: Budget, known: Sequence[Compaction]) -> tuple[View, Budget]:
    """Both with the round that an answer is about which is carried over, if it fits, and no record stands for it."""
    staying = answered_round(view.messages)
    gone = {view.prefix + at for each in known for at in each.gone if at < each.start}
    floor_tokens = budget.floor_tokens + sum(view.sizes[index] for index in staying)
    held = replace(budget, floor=lambda: floor_tokens)
    if not gone.isdisjoint(staying) or held.target_tokens(0) > held.early_start_tokens or not staying:
        return view, budget
    return replace(view, pins=(*view.pins, *staying)), held


class _Planner:
    """Makes the steps for a conversation, going on from `base` if there is one."""

    def __init__(
        self, view: View, budget: Budget, options: CompactionOptions, base: Compaction | None, cuts: Sequence[int]
    ) -> None:
        self._view, self._budget, self._options, self._base, self._cuts = view, budget, options, base, cuts
        self._start = base.start if base else 0
        # Less for a record if the server reads all of it again after every change.
        self._target_tokens = budget.target_tokens(view.tokens, _DEEP_RATIO if options.rereads else 1.0)
        room = max(self._target_tokens - budget.floor_tokens, 0)
        # What has to stay beside a record takes half of its room at most.
        staying = view.kept_tokens(cuts[-1]) - view.kept_tokens(view.cuts[-1]) if cuts else 0
        self._room_tokens = max(room - staying, room // 2)
        self._keeps_what_fits = budget.rules.keeps_what_fits
        self._most_tokens = min(max(budget.trigger_tokens, budget.floor_tokens), budget.prompt_limit_tokens)
        self._recent_start = len(view.rest) - options.keep_recent_messages
        new = [cut for cut in cuts if cut > (base.covered_messages if base else 0)]
        # The last cut before the recent messages, which are spared if that is enough; and the last one of all.
        self._edit_cuts = sorted({*[cut for cut in new if cut <= self._recent_start][-1:], *new[-1:]})

    def records(self, *, asks: bool) -> tuple[Step, ...]:
        """The record of the strategy; after one in place of all comes what to make if no model writes it."""
        keeping = self._record(asks=asks, keeps_recent=True)
        whole = None if self._options.strategy.keeps_recent else self._record(asks=asks, keeps_recent=False)
        return tuple(filter(None, (whole if whole and whole.question != "none" else None, keeping)))

    def _record(self, *, asks: bool, keeps_recent: bool) -> Step | None:
        """The record that reaches the target by a model's words, or else by copied text; None if nothing may go."""
        view, base, options, target = self._view, self._base, self._options, self._target_tokens
        last_cut, strategy = max(self._cuts, default=0), options.strategy
        words, images = self._words_tokens(last_cut), self._images(last_cut)
        text_room = self._room_tokens - words - view.image_tokens(images)
        summary = int(max(_SUMMARY_SHARE * text_room, min(_GOOD_SUMMARY_TOKENS, _SUMMARY_MOST_SHARE * text_room)))
        summary = min(options.summary_max_tokens, summary)
        asks = asks and summary >= min(_LEAST_SUMMARY_TOKENS, options.summary_max_tokens)
        # With nothing new the base's summary is written anew: the window shrank, or the record has to.
        cuts = [cut for cut in self._cuts if cut >= self._start][-1 if options.covers_all or not keeps_recent else 0 :]
        if not cuts:
            return None
        summary = summary if asks else int((1 - _LEDGER_SHARE) * text_room)
        ledger = words + int(_LEDGER_SHARE * max(text_room, 0))
        text_tokens = RECORD_TOKENS + summary + ledger
        cut, kept_tokens = self._cut(cuts, images, text_tokens)
        # The ledger may have the room that a coarse cut leaves up to the target: a little prefill and no decoding.
        spare = max(target - kept_tokens - text_tokens, 0) if asks and not options.writes_whole_records else 0
        draft = self._draft(cut, strategy.writer or strategy.name, images, start=cut)
        return Step(
            draft=replace(draft, state="applied" if asks else "provisional"),
            question="summary" if asks else "none",
            base=base,
            summary_tokens=summary,
            ledger_tokens=ledger + min(spare, ledger),
            ledger_min_tokens=words,
            predicted_tokens=kept_tokens + text_tokens + min(spare, ledger),
        )

    def _cut(self, cuts: Sequence[int], images: Sequence[ImagePlace], text_tokens: int) -> tuple[int, int]:
        """The first cut with which a record of so many tokens leaves little enough, else the last; and what stays."""
        view, goal_tokens = self._view, self._most_tokens if self._keeps_what_fits else self._target_tokens
        if self._options.writes_whole_records and self._budget.is_wanted:
            # The recent messages stay where nothing has to be compacted again at once.
            cuts = cuts[max(bisect_right(cuts, self._recent_start) - 1, 0) :]
            goal_tokens = max(goal_tokens, int(_STAYING_RATIO * self._budget.trigger_tokens))

        def kept_tokens(cut: int) -> int:
            return view.kept_tokens(cut) + view.image_tokens(place for place in images if place[0] < cut)

        # The kept part never grows with the cut; one look at each of 40,000 messages' cuts would add them all up.
        at = bisect_left(cuts, True, key=lambda each: kept_tokens(each) + text_tokens <= goal_tokens)
        cut = cuts[min(at, len(cuts) - 1)]
        return cut, kept_tokens(cut)

    def edits(self) -> tuple[Step, ...]:
        """The edit that reaches the target with as few lines as possible, with images if that is enough; or ()."""
        cuts = self._edit_cuts if self._options.edits else ()
        edits = (self._edit(cut, most_images) for most_images in (self._options.keep_images, 0) for cut in cuts)
        return tuple(islice(filter(None, edits), 1))

    def _edit(self, cut: int, most_images: int) -> Step | None:
        view, start, count = self._view, self._start, self._view.count_text
        target = self._most_tokens if self._keeps_what_fits else self._budget.target_tokens(view.tokens)
        draft = self._draft(cut, "edit", self._images(cut)[:most_images], start=start)
        ledger_tokens = self._edit_ledger_tokens(start)
        tokens = applied_tokens(view, draft) + RECORD_TOKENS + ledger_tokens
        covered, forms = view.rest[start:cut], dict(draft.forms)
        for at, line in lines_for(covered).items():
            if tokens <= target and not self._options.rereads:
                break
            if start + at not in forms:
                forms[start + at] = "line"
                tokens -= count(covered[at].text) - count(line)
        if tokens > target:
            return None
        draft, ledger_tokens = replace(draft, forms=in_order(forms)), ledger_tokens + target - tokens
        return Step(draft=draft, question="none", ledger_tokens=ledger_tokens, predicted_tokens=target)

    def choices(self, fresh: Step, now_tokens: int) -> tuple[Step, ...]:
        """The question for a pruning model before `fresh` is made; () if even the best answer leaves too much.

        Not while an answer goes on: its client waits, and our messages are not to be judged.
        """
        view, strategy = self._view, self._options.strategy
        if not strategy.writer or fresh.question == "none" or view.messages[-1].is_synthetic:
            return ()
        summary_tokens = view.count_text(self._base.summary) if self._base else 0
        for cut in self._edit_cuts:
            ledger_tokens = self._edit_ledger_tokens(cut)
            record_tokens = RECORD_TOKENS + fresh.summary_tokens + ledger_tokens + summary_tokens
            if view.kept_tokens(cut) + record_tokens <= min(gained_tokens(now_tokens), self._budget.trigger_tokens):
                draft = self._draft(cut, strategy.name, self._images(cut), start=self._start)
                asked = replace(fresh, draft=draft, question="choice", ledger_tokens=ledger_tokens)
                return (replace(asked, now_tokens=now_tokens, predicted_tokens=self._target_tokens),)
        return ()

    def _draft(self, covered_messages: int, level: str, images: Sequence[ImagePlace], *, start: int) -> Compaction:
        """What so many messages become, before a model's words and a ledger; what is gone stays so, for the cache."""
        view, base = self._view, self._base
        forms = dict(view.pinned_forms(covered_messages))
        if level == "edit":
            forms = dict.fromkeys(forms, "whole")
        before = base if start < covered_messages else None
        for at, how in before.forms if before else ():
            if at in forms:
                forms[at] = "words" if how == "words" else forms[at]
            elif at >= start and how != "whole":
                # Words that are no request any more are old ones.
                forms[at] = "line" if how == "words" else how
            elif at < start and view.rest[at].role != "user":
                forms[at] = how
        whole = {at for at, how in forms.items() if how in ("whole", "words")}
        if before:
            images = [place for place in images if place[0] >= before.covered_messages or place in before.images]
        return Compaction(
            covered_messages=covered_messages,
            covered_hash=view.hashes[covered_messages],
            start=start,
            forms=in_order(forms),
            round=base.round + 1 if base else 1,
            summary=base.summary if base else "",
            summarized_messages=base.summarized_messages if base else 0,
            level=level,
            window_tokens=self._budget.window_tokens,
            covered_part=before.covered_part if before else None,
            images=tuple(at for at in images if at[0] < covered_messages and at[0] not in whole),
        )

    def _images(self, covered_messages: int) -> tuple[ImagePlace, ...]:
        most_tokens = int(_IMAGES_SHARE * self._room_tokens)
        return self._view.newest_images(covered_messages, most=self._options.keep_images, most_tokens=most_tokens)

    def _edit_ledger_tokens(self, covered_messages: int) -> int:
        words_tokens = self._words_tokens(covered_messages)
        return words_tokens + int(_EDIT_LEDGER_SHARE * (self._room_tokens - words_tokens))

    def _words_tokens(self, covered_messages: int) -> int:
        """The room for the user's own words: up to a quarter of the target, for the task a tenth of the window."""
        view, room = self._view, self._room_tokens
        needed = view.own_words_tokens(range(covered_messages))
        task = view.own_words_tokens(at for at in (view.task,) if at is not None and at < covered_messages)
        task_tokens = min(task + task // 10, int(TASK_WINDOW_RATIO * self._budget.window_tokens))
        most = max(min(int(_WORDS_TARGET_RATIO * self._target_tokens), room // 2), task_tokens)
        summary_room = int(_LEAST_SUMMARY_TOKENS / _SUMMARY_MOST_SHARE) + 1
        left = room - summary_room if summary_room <= room else room
        return min(min(needed, most) + _WORDS_HEAD_TOKENS, left) if needed else 0


def turn_ended(messages: Sequence[Message], answer: str) -> tuple[Message, ...]:
    """A conversation as its next turn will begin with it, after an answer of that text; "" if it has called tools."""
    said = parse_message({"role": "assistant", "content": answer})
    # The user's message is empty: the person's last request stays the last. Results belong to the same round.
    return (*messages, said, user_message("")) if answer else (*messages, said)


def plan_next(
    view: View, budget: Budget, options: CompactionOptions, stored: Sequence[Compaction], *, is_expected: bool
) -> Compaction | Step | None:
    """Plans for the turn after `turn_ended` as if it went just beyond the trigger, or only if that `is_expected`.

    A record to write now, an edit to make, or what was written ahead; None if the prompt will be what is cached, or a
    record would gain too little: half as much comes twice as often.
    """
    growth_tokens = expected_growth_tokens(view, budget.window_tokens) if is_expected else budget.window_tokens
    # After what it was made to read a server that rereads cannot go on with another ending.
    growth_tokens = 0 if is_expected and options.rereads else growth_tokens
    options = replace(options, covers_all=True)
    decision = plan(view, budget, options, stored)
    sent = decision.compaction if isinstance(decision, Send) else None
    if isinstance(decision, Send) and not (sent and sent.state == "ready"):
        limits = budget if sent else budget.own
        left_tokens = limits.trigger_tokens - (applied_tokens(view, sent) if sent else view.tokens)
        if growth_tokens <= left_tokens:
            return None
        later = view.grown(max(left_tokens + 1, 0))
        decision = plan(later, replace(budget, floor=lambda: later.floor_tokens), options, stored)
    if not isinstance(decision, Make):
        sent = decision.compaction if isinstance(decision, Send) else None
        return sent if sent and sent.state == "ready" else None
    step, trigger_tokens = decision.steps[0], budget.trigger_tokens
    most_tokens = (budget.target_tokens(trigger_tokens) + trigger_tokens) // 2
    if step.question == "summary" and step.predicted_tokens <= most_tokens:
        return replace(step, draft=replace(step.draft, state="ready"))
    return step if step.is_edit else None


def expected_growth_tokens(view: View, window_tokens: int) -> int:
    """The tokens that the next turn will add to a conversation of `turn_ended`: the most between its last answers."""
    answers = [at for at, each in enumerate(view.messages) if each.role == "assistant"]
    # A call counts with its results.
    steps = [sum(view.sizes[at + (not view.messages[at].calls) : end]) for at, end in pairwise(answers)]
    return max(steps[-_LATEST_STEPS:], default=math.ceil(_USUAL_GROWTH_RATIO * window_tokens))


def shortened(view: View, budget: Budget, *, tool_results: bool, user_message: bool) -> tuple[Message, ...] | None:
    """The messages with all protected texts above one common level cut to head and tail; None if even that is too much.

    Results in the open tool round may be cut, or unanswered user messages and the requests, or both.
    """
    changed, sizes, count = list(view.messages), view.sizes, view.count_text
    may_change = {"tool": tool_results, "user": user_message}
    open_ones = sorted({*view.requests, *view.tail})
    candidates = [at for at in open_ones if may_change.get(changed[at].role) and not changed[at].is_synthetic]
    room = budget.prompt_limit_tokens - budget.floor_tokens + sum(sizes[index] for index in candidates)
    # If there is history to record, a summary and a ledger need room besides the excerpts.
    room -= min(room // 2, int(ROOM_ABOVE_FLOOR_RATIO * budget.window_tokens)) if view.cuts else 0
    level = common_level([sizes[index] for index in candidates], [1] * len(candidates), room)
    if level < _LEAST_EXCERPT_TOKENS:
        return None
    for index in (index for index in candidates if sizes[index] > level):
        text = changed[index].text
        changed[index] = with_text(changed[index], excerpt(text, level - max(sizes[index] - count(text), 0), count))
    return tuple(changed)


def with_less_data(view: View, budget: Budget, limit_tokens: int) -> tuple[Message, ...] | None:
    """The messages with less of the data that is attached to unanswered ones; None if all may stay.

    One into which a conversation is rendered is cut to its head and tail, where its instruction stands; else, if the
    protected messages take more than `limit_tokens`, data goes, the oldest first, the last of it to its head and tail.
    """
    changed, count = list(view.messages), view.count_text
    # Below the trigger, and with room for a record of the history.
    record_tokens = int(ROOM_ABOVE_FLOOR_RATIO * budget.window_tokens) if view.cuts else 0
    excess_tokens = budget.floor_tokens - min(limit_tokens, budget.trigger_tokens - record_tokens)

    def shorten(data: str) -> str | None:
        nonlocal excess_tokens
        if excess_tokens <= 0:
            return None
        size = count(data)
        keep_tokens = size - excess_tokens
        shown = excerpt(data, keep_tokens, count) if keep_tokens >= _LEAST_EXCERPT_TOKENS else ""
        # The line in place of data has fewer than the least excerpt.
        excess_tokens -= size - max(count(shown), _LEAST_EXCERPT_TOKENS)
        return shown

    if budget.rules.keeps_what_fits and (at := rendered_in(view.messages)) is not None:
        if budget.own.triggers(view.tokens):
            text, over_tokens = changed[at].text, view.tokens - budget.trigger_tokens
            shown = excerpt(text, max(count(text) - over_tokens, _LEAST_EXCERPT_TOKENS), count)
            changed[at] = with_text(changed[at], shown)
    elif budget.floor_tokens > limit_tokens:
        for index in view.tail:
            changed[index] = with_shorter_data(changed[index], shorten)
    return None if all(map(operator.is_, changed, view.messages)) else tuple(changed)
