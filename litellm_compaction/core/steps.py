"""The steps that could be taken to make a conversation fit: what each leaves, and what has to be asked for it.

Pure, as `plan.py`, which chooses among them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.core.budget import Budget
from litellm_compaction.core.compaction import Compaction, applied_tokens
from litellm_compaction.core.forms import Form, ImagePlace, lines_for, size_of
from litellm_compaction.core.prompts import STRATEGIES, Strategy
from litellm_compaction.core.view import RECORD_TOKENS, View

MIN_GAIN_RATIO = 0.10
# A summary costs the most of what stays, and says the least of what the next step needs (benchmarks). It may have the
# second share if the first is too small for a good one; one below the least says too little for its cost.
_SUMMARY_SHARE, _SUMMARY_MOST_SHARE = 0.20, 0.40
_GOOD_SUMMARY_TOKENS, _LEAST_SUMMARY_TOKENS, _SUMMARY_ROOM_SHARE = 150, 96, 0.75
_LEDGER_SHARE, _EDIT_LEDGER_SHARE = 0.55, 0.15
# The user's own words: of the target, or half of the room; the person's first words of the window; their lines' marks.
_WORDS_TARGET_RATIO, _WORDS_HEAD_TOKENS = 0.25, 12
TASK_WINDOW_RATIO, _TASK_ROOM_RATIO = 0.1, 1.1
_FROZEN_TARGET_RATIO = 0.25
# Of the target, if all that stays is read again and every change costs that: a quarter of the window by default.
_DEEP_RATIO = 0.65
# Of images beside a record; the rest is for what was said.
_IMAGES_SHARE = 0.50
# Recent messages may stay up to this share of the trigger's line where the caller says when to compact.
_STAYING_RATIO = 0.85
# "Last request from user was: " in any vocabulary, however the words around it are counted.
_LEAD_IN_TOKENS = 12

Question: TypeAlias = Literal["none", "choice", "summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A new compaction to make.

    Attributes:
        draft: what it will be, still without its ledger and without a model's words.
        question: what a model is asked for: a summary, which messages may go or become shorter, or nothing.
        base: the compaction whose summaries it continues; rewritten into one if it `integrates` them.
        summary_tokens: bound on the model's words; without a question on the base's summary, which goes on.
        ledger_tokens: bound on the ledger; at least `ledger_min_tokens` if a summary is longer than planned.
        now_tokens: the prompt without it; told where a model chooses.
        predicted_tokens: the prompt afterwards, at most; the one that is aimed at where a model chooses.
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
class CompactionOptions:
    """The operator's wishes about a compaction's depth.

    Attributes:
        keep_recent_messages: at the end, if they fit.
        edits: True if an edit may do alone.
        rereads: True if the server reads all of a prompt again after any change of it, so that changes are to be rare
            and an edit may as well take all that it can.
        keep_images: how many images stay if there is room for them, those of the kept messages among them.
        writes_whole_records: an earlier record is written anew with what is new; a compaction that is wanted covers
            everything before the recent messages if what stays then is below the trigger.
    """

    keep_recent_messages: int
    summary_max_tokens: int
    keep_images: int = 0
    rereads: bool = False
    edits: bool = True
    strategy: Strategy = STRATEGIES["summary"]
    writes_whole_records: bool = False


def gains(tokens: int, now_tokens: int) -> bool:
    """Returns True if a change from `now_tokens` to so many tokens is worth it."""
    return tokens <= now_tokens * (1 - MIN_GAIN_RATIO)


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
        rules = replace(self.budget.rules, keeps_what_fits=False)
        if self.options.rereads:
            rules = replace(rules, target_ratio=_DEEP_RATIO * rules.target_ratio)
        return replace(self.budget, rules=rules).target_tokens(prompt_tokens)

    # ------------------------------------------------------------------ records

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
        predicted_tokens, pinned = after_tokens(cut), view.pinned(cut)
        # The ledger may have the room that a coarse cut leaves up to the target: a little prefill and no decoding.
        has_spare = shares.asks and not options.writes_whole_records
        spare = min(max(target - predicted_tokens, 0), shares.ledger) if has_spare else 0
        draft = self._draft(cut, options.strategy.writer or options.strategy.name, images, view.as_words(pinned))
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
        # The user's own words come first: their room is shared out no more.
        words_tokens = self._words_tokens(self._last_cut, target)
        rest = self._room_tokens(target) - words_tokens - images_tokens
        integrates, summary_tokens = self._integrates(target, rest), self._summary_tokens(rest)
        asks = asks and summary_tokens >= min(_LEAST_SUMMARY_TOKENS, self.options.summary_max_tokens)
        frozen_tokens = self._frozen_tokens if asks and not integrates else 0
        lead_in = self.options.strategy.lead_in
        lead_in_tokens = max(self.view.count_text(lead_in), _LEAD_IN_TOKENS) if lead_in else 0
        return _Shares(
            summary=summary_tokens if asks else int((1 - _LEDGER_SHARE) * rest),
            # Frozen segments take from the other lines, not from the user's.
            ledger=words_tokens + int(_LEDGER_SHARE * max(rest - frozen_tokens, 0)),
            words=words_tokens,
            fixed=RECORD_TOKENS + frozen_tokens + lead_in_tokens,
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

    def _integrates(self, target: int, rest: int) -> bool:
        """Returns True if the base's summaries are to be written anew in a record with so much room for text."""
        # Each such record is whole: of two only the newer one holds.
        is_whole = self.options.writes_whole_records or not self.options.strategy.keeps_recent
        has_outgrown = self._frozen_tokens > min(_FROZEN_TARGET_RATIO * target, rest - self._summary_tokens(rest))
        # Or nothing new is to be covered: the window shrank, or the record itself has to.
        return self.base is not None and (is_whole or has_outgrown or self._last_cut <= self.base.start)

    def _summary_tokens(self, rest: int) -> int:
        """The bound of a summary; if its share is too small for one, it may have more of it."""
        tokens = max(_SUMMARY_SHARE * rest, min(_GOOD_SUMMARY_TOKENS, _SUMMARY_MOST_SHARE * rest))
        return min(self.options.summary_max_tokens, int(tokens))

    @cached_property
    def _frozen_tokens(self) -> int:
        return self.view.count_text(self.base.summary) if self.base else 0

    # ------------------------------------------------------------------ edits and choices

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
        return Step(
            draft=replace(draft, forms=tuple(sorted(forms.values()))),
            question="none",
            ledger_tokens=ledger_tokens + target - tokens,
            predicted_tokens=target,
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
                return Step(
                    draft=draft,
                    question="choice",
                    base=self.base,
                    now_tokens=now_tokens,
                    summary_tokens=fresh.summary_tokens,
                    ledger_tokens=ledger_tokens,
                    predicted_tokens=target,
                )
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
        start, before = (base.start, base.pinned) if base else (0, ())
        stay = (at for at in before if at < start and view.rest[at].role != "user")
        pinned = tuple(sorted({*view.pinned(covered_messages), *stay}))
        forms = {at: Form(at, "whole") for at in pinned}
        for each in base.forms if base else ():
            if each.position not in forms and each.position >= start and each.how != "whole":
                # Words that are no request any more are old ones.
                forms[each.position] = each._replace(how="line") if each.how == "words" else each
            elif each.position in forms and each.how == "words":
                forms[each.position] = each
        if level != "edit":
            # A model chooses among messages, and none of it is the person's request.
            forms.update((each.position, each) for each in view.as_words(pinned) if each.how == "words")
        images = self._images(covered_messages, target)
        places = [at for at in images if base is None or at[0] >= base.covered_messages or at in base.images]
        draft = replace(self._draft(covered_messages, level, places, forms.values()), start=start)
        return replace(draft, omissions=base.omissions, covered_part=base.covered_part) if base else draft

    def _edit_ledger_tokens(self, covered_messages: int, target: int) -> int:
        words_tokens = self._words_tokens(covered_messages, target)
        return words_tokens + int(_EDIT_LEDGER_SHARE * (self._room_tokens(target) - words_tokens))

    # ------------------------------------------------------------------ both

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

    @property
    def _recent_start(self) -> int:
        return len(self.view.rest) - self.options.keep_recent_messages

    @property
    def _last_cut(self) -> int:
        return self.view.cuts[-1] if self.view.cuts else 0

    def _room_tokens(self, target: int) -> int:
        return max(target - self.budget.floor_tokens, 0)

    def _images(self, last_cut: int, target: int) -> tuple[ImagePlace, ...]:
        most_tokens = int(_IMAGES_SHARE * self._room_tokens(target))
        return self.view.newest_images(last_cut, most=self.options.keep_images, most_tokens=most_tokens)

    def _words_tokens(self, covered_messages: int, target: int) -> int:
        """The room for the user's own words in the covered part: all they need, up to a quarter of the target.

        For the task up to a tenth of the window. A summary keeps its room.
        """
        view, room = self.view, self._room_tokens(target)
        needed = view.own_words_tokens(range(covered_messages))
        task = [at for at in (view.task,) if at is not None and at < covered_messages]
        task_tokens = int(_TASK_ROOM_RATIO * view.own_words_tokens(task))
        task_tokens = min(task_tokens, int(TASK_WINDOW_RATIO * self.budget.window_tokens)) + _WORDS_HEAD_TOKENS
        least, good = (
            int(tokens / _SUMMARY_MOST_SHARE) + 1 for tokens in (_LEAST_SUMMARY_TOKENS, _GOOD_SUMMARY_TOKENS)
        )
        kept = min(good, max(least, int(_SUMMARY_ROOM_SHARE * room)))
        left = room - kept if kept <= room else room
        most = min(max(min(int(_WORDS_TARGET_RATIO * target), room // 2), task_tokens), left)
        return min(needed + _WORDS_HEAD_TOKENS, most) if needed else 0


def bare(view: View) -> Compaction | None:
    """The hardest compaction: everything that may go goes, and the record says no more than that."""
    if not view.cuts:
        return None
    covered = view.cuts[-1]
    forms = view.as_words(view.pinned(covered))
    return Compaction(covered_messages=covered, covered_hash=view.hashes[covered], start=covered, forms=forms)
