"""The steps that could be taken to make a conversation fit: what each leaves, and what has to be asked for it.

Pure, as `plan.py`, which chooses among them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import starmap
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.core.budget import Budget
from litellm_compaction.core.clearing import ImagePlace, stubs, with_data
from litellm_compaction.core.compaction import Compaction, Shown, as_stubs
from litellm_compaction.core.conversation import (
    RECORD_TOKENS,
    Conversation,
    applied_tokens,
    image_tokens_of,
    kept_tokens,
    newest_images,
)
from litellm_compaction.core.strategies import STRATEGIES, Strategy, writer_of

MIN_GAIN_RATIO = 0.10
# A summary costs the most of what stays, and says the least of what the next step needs (benchmarks).
_SUMMARY_WINDOW_RATIO = 0.08
_SUMMARY_SHARE = 0.20
# If those shares are too small for any summary: requests of a fifth of a window, restarts in small ones.
_SUMMARY_MOST_WINDOW_RATIO, _SUMMARY_MOST_SHARE = 0.15, 0.40
_LEDGER_SHARE = 0.55
_EDIT_LEDGER_SHARE = 0.15
_WORDS_TARGET_RATIO = 0.25
# The person's first words, and the marks of their lines.
TASK_WINDOW_RATIO, _TASK_ROOM_RATIO = 0.1, 1.1
_WORDS_SHARE = 0.50
_WORDS_HEAD_TOKENS = 12
_FROZEN_TARGET_RATIO = 0.25
# Of the target, if all that stays is read again and every change costs that: a quarter of the window by default.
_DEEP_RATIO = 0.65
# Of images beside a record; the rest is for what was said.
_IMAGES_SHARE = 0.50
# A summary shorter than this says too little for what it costs; the earlier record, shortened, says more.
_GOOD_SUMMARY_TOKENS = 150
# In a small window a twentieth of it has to do, three headings and some sixty words: restarts at 2,048 had no room for
# more.
_LEAST_SUMMARY_WINDOW_RATIO, _LEAST_SUMMARY_TOKENS = 0.05, 96
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
        base: the compaction whose summaries it continues.
        integrates: True if the base's segments are rewritten into one, because they outgrew their share.
        summary_tokens: bound on the model's words; without a question on the base's summary, which goes on.
        ledger_tokens: bound on the ledger.
        ledger_min_tokens: the ledger's least if a summary is longer than planned.
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
        """The record stands for all that is covered: no other step leaves less."""
        return self.draft.edited_from is None

    @property
    def is_edit(self) -> bool:
        """Old results become stubs, without a model, and that alone reaches the target (rung 1)."""
        return self.question == "none" and not self.is_record


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOptions:
    """The operator's wishes about a compaction's depth.

    Attributes:
        keep_recent_messages: at the end, if they fit.
        edits: True if rung 1 may do alone.
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


class _Record(NamedTuple):
    """A record before it is known how many messages it covers; tokens.

    Attributes:
        summary: of the new one, or of the base's that goes on shortened.
        ledger: with the user's own words.
        words: of these.
        frozen: of the base's segments that go on as they are.
        lead_in: of the words between the record and the request.
        integrates: the base's segments do not go on as they are.
        provisional: no model is asked.
        beside: indices of messages that stay verbatim beside the requests.
        images: that travel with it if their messages are covered.
    """

    summary: int
    ledger: int
    words: int
    frozen: int = 0
    lead_in: int = 0
    integrates: bool = True
    provisional: bool = True
    beside: tuple[int, ...] = ()
    images: tuple[ImagePlace, ...] = ()

    def after_tokens(self, conversation: Conversation, covered_messages: int) -> int:
        """The prompt if it stands for so many messages."""
        images = (place for place in self.images if place[0] < covered_messages)
        kept = kept_tokens(conversation, covered_messages, conversation.pinned(covered_messages, *self.beside))
        text_tokens = self.lead_in + self.summary + self.ledger + self.frozen
        return kept + RECORD_TOKENS + text_tokens + image_tokens_of(conversation, images)

    def first_cut(self, conversation: Conversation, cuts: Sequence[int], target: int) -> int:
        """The first cut with which the prompt is not above `target`, else the last."""

        def does(cut: int) -> bool:
            return self.after_tokens(conversation, cut) <= target

        # The kept part never grows with the cut; one look at each of 40,000 messages' cuts would add them all up.
        return cuts[min(bisect_left(cuts, True, key=does), len(cuts) - 1)]


@dataclass(frozen=True, kw_only=True)
class Planner:
    """The compactions that could be made of a conversation, going on from `base` if there is one."""

    conversation: Conversation
    budget: Budget
    options: CompactionOptions
    base: Compaction | None

    def target_tokens(self, prompt_tokens: int) -> int:
        """The size to which a model's record compacts a prompt of so many tokens.

        Less if the server reads all of it again after every change, so that changes are fewer.
        """
        budget = self.budget
        if self.options.rereads:
            rules = budget.rules
            budget = replace(budget, rules=replace(rules, target_ratio=_DEEP_RATIO * rules.target_ratio))
        return budget.target_tokens(prompt_tokens)

    def records(self, *, asks: bool = True) -> tuple[Step, ...]:
        """The record that reaches the target by a model's words, or, unless it `asks` one, by copied text alone.

        After one in place of all comes what to make if no model writes it; without room for it, that alone. Empty if
        nothing may be covered.
        """
        whole = self.summary(asks=asks)
        strategy = self.options.strategy
        if whole is None or strategy.keeps_recent:
            return () if whole is None else (whole,)
        options = replace(self.options, strategy=replace(strategy, keeps_recent=True, lead_in=""))
        keeping = replace(self, options=options).summary(asks=asks)
        if keeping is None:
            return (whole,)
        return (keeping,) if whole.question == "none" else (whole, keeping)

    def summary(self, *, growth_tokens: int | None = None, asks: bool = True) -> Step | None:
        """The summary that reaches the target; one that covers all there is, if so much is still to come after it.

        Unless it `asks` a model, it is provisional.
        """
        target = self.target_tokens(self.conversation.tokens)
        if growth_tokens is not None:
            target = min(max(target - growth_tokens, self.budget.least_target_tokens), target)
        images = self._kept_images(self._last_cut, target)
        room = self._room_tokens(target)
        # The user's own words come first: their room is shared out no more.
        words_tokens = self._words_tokens(self._last_cut, target, room)
        rest = room - words_tokens - image_tokens_of(self.conversation, images)
        integrates = self._integrates(target, rest)
        cuts = self._cuts_beyond_base(integrates=integrates)
        if not cuts:
            return None
        if growth_tokens is not None or not self.options.strategy.keeps_recent:
            cuts = cuts[-1:]
        record = self._shared_out(rest, words_tokens, integrates=integrates, asks=asks)._replace(images=images)
        record, cut = self._covering(cuts, target, record)
        step = self._step(record, cut)
        # The ledger may have the room that a coarse cut leaves up to the target: a little prefill and no decoding.
        has_spare = not (record.provisional or self.options.writes_whole_records)
        spare = min(max(target - step.predicted_tokens, 0), record.ledger) if has_spare else 0
        least_ledger_tokens = min(int(_WORDS_TARGET_RATIO * target), int(_WORDS_SHARE * record.ledger))
        return replace(
            step,
            ledger_tokens=record.ledger + spare,
            ledger_min_tokens=max(words_tokens, least_ledger_tokens),
            predicted_tokens=step.predicted_tokens + spare,
        )

    def copied(self) -> Step | None:
        """A record without a new summary that covers as little as it can; None without a legal cut.

        For a budget that keeps what fits. The base's summaries go on whole; it may cover more than has to go now.
        """
        conversation, budget, base = self.conversation, self.budget, self.base
        if not conversation.cuts:
            return None
        most_tokens = budget.target_tokens(conversation.tokens)
        # The record is as long as for any other request; room beyond it is for the newest messages.
        usual = replace(budget, rules=replace(budget.rules, keeps_what_fits=False))
        target = min(usual.target_tokens(conversation.tokens), most_tokens)
        room = self._room_tokens(target)
        summary_tokens = min(self._frozen_tokens, room)
        words_tokens = self._words_tokens(self._last_cut, target, room - summary_tokens)
        ledger_tokens = words_tokens + int(_LEDGER_SHARE * max(room - summary_tokens - words_tokens, 0))
        if base is not None:
            # As long as it has been; the rest is the newest messages'.
            ledger_tokens = min(ledger_tokens, conversation.count_text(base.ledger))
        record = _Record(summary=summary_tokens, ledger=ledger_tokens, words=words_tokens)
        return self._step(record, record.first_cut(conversation, conversation.cuts, most_tokens))

    @cached_property
    def _last_cut(self) -> int:
        return self.conversation.cuts[-1] if self.conversation.cuts else 0

    @cached_property
    def _frozen_tokens(self) -> int:
        return self.conversation.count_text(self.base.summary) if self.base else 0

    def _integrates(self, target: int, rest: int) -> bool:
        """Returns True if the base's summaries are to be written anew in a record with so much room for text."""
        base, options = self.base, self.options
        if base is None:
            return False
        if options.writes_whole_records or not options.strategy.keeps_recent:
            # Each such record is whole: of two only the newer one holds.
            return True
        if self._frozen_tokens > min(_FROZEN_TARGET_RATIO * target, rest - self._summary_tokens(rest)):
            return True
        # Nothing new to cover, and yet too large: the window shrank, or the record itself has to.
        return self._last_cut <= base.replaced_messages

    def _cuts_beyond_base(self, *, integrates: bool) -> tuple[int, ...]:
        """The legal cuts after what the base's record stands for, or at its end if that is written anew."""
        start = self.base.replaced_messages + (0 if integrates else 1) if self.base else 0
        return tuple(cut for cut in self.conversation.cuts if cut >= start)

    def _shared_out(self, rest: int, words_tokens: int, *, integrates: bool, asks: bool) -> _Record:
        """A record in the room for the user's own words, and in `rest`."""
        summary_tokens, lead_in = self._summary_tokens(rest), self.options.strategy.lead_in
        least_tokens = min(_least_summary_tokens(self.budget.window_tokens), self.options.summary_max_tokens)
        provisional = not asks or summary_tokens < least_tokens
        frozen_tokens = 0 if integrates or provisional else self._frozen_tokens
        return _Record(
            summary=int((1 - _LEDGER_SHARE) * rest) if provisional else summary_tokens,
            # Frozen segments take from the other lines, not from the user's.
            ledger=words_tokens + int(_LEDGER_SHARE * max(rest - frozen_tokens, 0)),
            words=words_tokens,
            frozen=frozen_tokens,
            lead_in=max(self.conversation.count_text(lead_in), _LEAD_IN_TOKENS) if lead_in else 0,
            integrates=integrates or provisional,
            provisional=provisional,
        )

    def _covering(self, cuts: Sequence[int], target: int, record: _Record) -> tuple[_Record, int]:
        """The record, with the message in doubt beside it if there is room; and the least that it has to cover."""
        conversation, doubted = self.conversation, self.conversation.doubted
        if doubted is not None:
            tokens = record.after_tokens(conversation, cuts[-1]) + conversation.sizes[doubted]
            record = record._replace(beside=(doubted,)) if tokens <= target else record
        if self.options.writes_whole_records and self.budget.is_wanted:
            # The recent messages stay where nothing has to be compacted again at once.
            recent = [each for each in cuts if each <= self._recent_start][-1:]
            most_tokens = max(target, int(_STAYING_RATIO * self.budget.line_tokens))
            if recent and record.after_tokens(conversation, recent[0]) <= most_tokens:
                return record, recent[0]
        return record, record.first_cut(conversation, cuts, target)

    def _step(self, record: _Record, cut: int) -> Step:
        conversation = self.conversation
        pinned = conversation.pinned(cut, *record.beside)
        draft = replace(
            self._draft(cut, pinned, record.images),
            level=writer_of(self.options.strategy.name),
            provisional=record.provisional,
        )
        return Step(
            draft=draft,
            question="none" if record.provisional else "summary",
            base=self.base,
            integrates=record.integrates,
            summary_tokens=record.summary,
            ledger_tokens=record.ledger,
            ledger_min_tokens=record.words,
            predicted_tokens=record.after_tokens(conversation, cut),
        )

    def _draft(self, cut: int, pinned: tuple[int, ...], images: Iterable[ImagePlace]) -> Compaction:
        """What so many messages become after the base, without a model's words and a ledger."""
        base = self.base
        return replace(
            covering(self.conversation, cut, pinned),
            round=(base.round if base else 0) + 1,
            segments=base.segments if base else (),
            window_tokens=self.budget.window_tokens,
            images=tuple(sorted(place for place in images if place[0] < cut and place[0] not in pinned)),
        )

    def edit(self) -> Step | None:
        """The edit that reaches the target with as few stubs as possible; less would be followed by another edit."""
        if not self.options.edits:
            return None
        target = self.budget.target_tokens(self.conversation.tokens)
        # If one turn could fill the rest, an edit goes deeper if it can: a stub costs nothing.
        targets = (min(target, self.budget.narrow_target_tokens), target) if self.budget.is_narrow else (target,)
        edits = (
            self._edit_up_to(cut, each, images)
            for each in dict.fromkeys(targets)
            for cut in self._edit_cuts()
            for images in dict.fromkeys((self._kept_images(cut, each), ()))
        )
        return next(filter(None, edits), None)

    def _edit_up_to(self, cut: int, target: int, images: Collection[ImagePlace]) -> Step | None:
        conversation, base = self.conversation, self.base
        start, count = base.replaced_messages if base else 0, conversation.count_text
        draft = self._editing(cut, "edit", images)
        ledger_tokens = self._edit_ledger_tokens(start, target)
        tokens = applied_tokens(conversation, draft) + RECORD_TOKENS + ledger_tokens
        covered = conversation.rest[start:cut]
        shown = dict(draft.shown)
        for position, line in stubs(covered).items():
            if tokens <= target and not self.options.rereads:
                break
            if start + position not in shown and start + position not in draft.pinned:
                shown[start + position] = "stub"
                tokens -= count(covered[position].text) - count(line)
        if tokens > target:
            return None
        return Step(
            draft=replace(draft, shown=tuple(starmap(Shown, sorted(shown.items())))),
            question="none",
            ledger_tokens=ledger_tokens + target - tokens,
            predicted_tokens=target,
        )

    def prune(self, fresh: Step, now_tokens: int) -> Step | None:
        """The question for a pruning model before `fresh` is made; None if even the best answer leaves too much.

        Not while an answer goes on: its client waits, and our messages are not to be judged.
        """
        conversation, budget, name = self.conversation, self.budget, self.options.strategy.name
        if fresh.question == "none" or conversation.messages[-1].is_synthetic:
            return None
        target = self.target_tokens(conversation.tokens)
        for cut in self._edit_cuts():
            draft = self._editing(cut, name, self._kept_images(cut, target))
            step = Step(
                draft=draft,
                question="choice",
                base=self.base,
                now_tokens=now_tokens,
                summary_tokens=fresh.summary_tokens,
                ledger_tokens=self._edit_ledger_tokens(cut, target),
                predicted_tokens=target,
            )
            record_tokens = RECORD_TOKENS + step.summary_tokens + step.ledger_tokens + self._frozen_tokens
            least_tokens = kept_tokens(conversation, cut, draft.pinned) + record_tokens
            if gains(least_tokens, now_tokens) and not budget.triggers(least_tokens):
                return step
        return None

    @property
    def _recent_start(self) -> int:
        return len(self.conversation.rest) - self.options.keep_recent_messages

    def _edit_cuts(self) -> Collection[int]:
        """The last cut before the recent messages, which are spared if that is enough; and the last one of all."""
        cuts = [cut for cut in self.conversation.cuts if cut > (self.base.covered_messages if self.base else 0)]
        recent = [cut for cut in cuts if cut <= self._recent_start]
        return dict.fromkeys((*recent[-1:], *cuts[-1:]))

    def _editing(self, covered_messages: int, level: str, kept_images: Collection[ImagePlace]) -> Compaction:
        """A compaction of the edits that the base had, and of the newly covered messages; still without a ledger.

        Gone messages stay gone: the server's cache ends where something comes back.
        """
        conversation, base = self.conversation, self.base
        rest, prefix, start = conversation.rest, conversation.prefix, base.replaced_messages if base else 0
        before = base.pinned if base else ()
        stay = {prefix + at for at in before if at < start and rest[at].role != "user"}
        doubted = conversation.doubted
        if doubted is not None and (doubted - prefix >= start or doubted - prefix in before):
            stay.add(doubted)
        pinned = conversation.pinned(covered_messages, *stay)
        images = [at for at in kept_images if base is None or at[0] >= base.covered_messages or at in base.images]
        shown = set(base.shown if base else ())
        if level != "edit":
            # A model chooses among messages, and none of it is the person's request.
            shown.update(as_stubs(with_data(rest, pinned)))
        return replace(
            self._draft(covered_messages, pinned, images),
            level=level,
            edited_from=start,
            shown=tuple(sorted(shown, key=lambda each: each.position)),
            stub_sizes=base.stub_sizes if base else (),
            omissions=base.omissions if base else "",
            covered_part=base.covered_part if base else None,
        )

    def _room_tokens(self, target: int) -> int:
        return max(target - self.budget.floor_tokens, 0)

    def _summary_tokens(self, rest: int) -> int:
        """The bound of a summary; if its share is too small for one, it may have more of it."""
        window_tokens = self.budget.window_tokens
        share = min(_SUMMARY_WINDOW_RATIO * window_tokens, _SUMMARY_SHARE * rest)
        most = min(_SUMMARY_MOST_WINDOW_RATIO * window_tokens, _SUMMARY_MOST_SHARE * rest)
        return min(self.options.summary_max_tokens, math.floor(max(share, min(_GOOD_SUMMARY_TOKENS, most))))

    def _edit_ledger_tokens(self, covered_messages: int, target: int) -> int:
        room = self._room_tokens(target)
        words_tokens = self._words_tokens(covered_messages, target, room)
        return words_tokens + int(_EDIT_LEDGER_SHARE * (room - words_tokens))

    def _words_tokens(self, covered_messages: int, target: int, room: int) -> int:
        """The room for the user's own words in the covered part: all they need, up to a quarter of the target.

        For the task up to a tenth of the window. Never so much that no summary has room, which is given up only if
        there was none anyway.
        """
        needed = self.conversation.own_words_tokens(covered_messages)
        task_tokens = min(
            int(_TASK_ROOM_RATIO * self.conversation.task_tokens(covered_messages)),
            int(TASK_WINDOW_RATIO * self.budget.window_tokens),
        )
        most = max(min(int(_WORDS_TARGET_RATIO * target), int(_WORDS_SHARE * room)), task_tokens + _WORDS_HEAD_TOKENS)
        most = min(most, room)
        for summary_tokens in (_GOOD_SUMMARY_TOKENS, _least_summary_tokens(self.budget.window_tokens)):
            summary_room = int(summary_tokens / _SUMMARY_MOST_SHARE) + 1
            if room >= summary_room:
                most = min(most, room - summary_room)
                break
        return max(min(needed + _WORDS_HEAD_TOKENS if needed else 0, most), 0)

    def _kept_images(self, last_cut: int, target: int) -> tuple[ImagePlace, ...]:
        most_tokens = int(_IMAGES_SHARE * self._room_tokens(target))
        return newest_images(self.conversation, last_cut, most=self.options.keep_images, most_tokens=most_tokens)


def covering(conversation: Conversation, covered_messages: int, pinned: tuple[int, ...]) -> Compaction:
    """The hardest compaction: so many messages go but the pinned ones, and the record says no more than that."""
    return Compaction(
        covered_messages=covered_messages,
        covered_hash=conversation.hashes[covered_messages],
        pinned=pinned,
        shown=as_stubs(with_data(conversation.rest, pinned)),
        round=1,
        segments=(),
        ledger="",
        level="truncate",
    )


def _least_summary_tokens(window_tokens: int) -> int:
    return min(max(int(_LEAST_SUMMARY_WINDOW_RATIO * window_tokens), _LEAST_SUMMARY_TOKENS), _GOOD_SUMMARY_TOKENS)
