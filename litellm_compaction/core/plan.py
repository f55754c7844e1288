"""Decides about a request: leave it, reuse an earlier compaction, make a new one, or say that it cannot fit.

Pure: the engine brings the sizes, the budget and the stored compactions, and carries the decision out. Decisions are
values.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import TypeAlias

from litellm_compaction.core.budget import Budget
from litellm_compaction.core.clearing import ImagePlace, stubs, with_data
from litellm_compaction.core.compaction import Compaction, Shown, as_stubs
from litellm_compaction.core.conversation import (
    RECORD_TOKENS,
    Conversation,
    applied_tokens,
    image_tokens_of,
    images_of_the_user,
    is_undone,
    kept_tokens,
    newest_images,
    usable,
    without_oldest_images,
)
from litellm_compaction.core.cut_points import answered_round
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Send the messages as they are; `is_undone` if the owner has undone their compaction."""

    is_undone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Apply a compaction that was made for the beginning of this very conversation."""

    compaction: Compaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Summarize:
    """Make a new compaction.

    Attributes:
        covered_messages: how many messages after the leading system ones it will replace.
        pinned: positions of those among them that stay verbatim.
        base: the compaction whose summaries it continues.
        integrates: True if the base's segments are rewritten into one, because they outgrew their share.
        provisional: True if there is no room for a new summary; the base's goes on, shortened.
        summary_tokens: bound on the new segment, or on the one that goes on.
        ledger_tokens: bound on the ledger.
        ledger_min_tokens: the ledger's least if a summary is longer than planned.
        predicted_tokens: the prompt afterwards, at most.
        ahead: True if it is written before it is needed.
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
        compaction: the one to make, still without its ledger.
        ledger_tokens: bound on the ledger of messages that are not shown any more.
        predicted_tokens: the prompt afterwards, at most.
    """

    compaction: Compaction
    ledger_tokens: int
    predicted_tokens: int

    @property
    def round(self) -> int:
        """Of the compaction that will be made."""
        return self.compaction.round


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Ask a model which of the covered messages may go or become shorter.

    Attributes:
        compaction: the one to make, still without the model's words and without its ledger.
        base: the compaction that it continues.
        now_tokens: the prompt without it.
        summary_tokens: bound on the words about the messages that go.
        ledger_tokens: bound on their ledger.
        predicted_tokens: the prompt that is aimed at.
    """

    compaction: Compaction
    base: Compaction | None
    now_tokens: int
    summary_tokens: int
    ledger_tokens: int
    predicted_tokens: int
    strategy: str = "prune"

    @property
    def round(self) -> int:
        """Of the compaction that will be made."""
        return self.compaction.round


Level: TypeAlias = Edit | Prune | Summarize


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """Make a new compaction, at the first of these levels whose result does.

    A second summary is made, without a model, if the first is not written.
    """

    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The protected messages alone are too large."""


Plan: TypeAlias = Keep | Reuse | Compact | Refuse


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
    shallow, budget = budget, deep(budget) if options.rereads else budget
    applied = [each for each in known if not each.ahead]
    is_voluntary = not budget.own.triggers(conversation.tokens)
    if is_voluntary and not budget.is_wanted:
        # A compacted prompt stays compacted, although the count has settled a little lower since: the same bytes,
        # and the server's cache stays warm. A window that has grown is worth a fresh start.
        lasting = next((each for each in applied if each.window_tokens >= budget.window_tokens), None)
        return Keep() if lasting is None else Reuse(compaction=lasting)
    reused: Compaction | None = None
    reused_tokens = now_tokens = conversation.tokens
    for each in applied:
        # One by one: of fifty rounds the newest does nearly always.
        tokens = applied_tokens(conversation, each)
        if not budget.is_wanted and not budget.triggers(tokens):
            return Reuse(compaction=each)
        if reused is None or tokens < reused_tokens:
            reused, reused_tokens = each, tokens
    now_tokens = min(now_tokens, reused_tokens)
    if reused and budget.may_wait(reused_tokens) and not conversation.messages[-1].is_synthetic:
        return Reuse(compaction=reused)
    for each in known if not budget.is_wanted else ():
        # A record written ahead is for now.
        tokens = applied_tokens(conversation, each) if each.ahead else now_tokens
        if tokens <= now_tokens * (1 - MIN_GAIN_RATIO) and not budget.triggers(tokens):
            return Reuse(compaction=each)
    rich = next((each for each in known if not each.provisional), None)
    planner = Planner(conversation=conversation, budget=budget, options=options, base=rich)
    records = planner.records() if budget.fits(conversation.floor_tokens) else ()
    if records and records[0].provisional and is_voluntary:
        # Without room for a summary the conversation itself says more.
        records = ()
    if records:
        fresh = records[0]
        does_gain = fresh.predicted_tokens <= now_tokens * (1 - MIN_GAIN_RATIO)
        if not does_gain and now_tokens > budget.latest_start_tokens:
            # Its answer would be stopped at once, so less gain will do; for that no model is asked.
            records = planner.records(asks=False)
        if does_gain or records[0].predicted_tokens <= budget.latest_start_tokens < now_tokens:
            pruning = planner.prune(fresh, now_tokens) if does_gain and options.strategy.chooses else None
            edit = replace(planner, budget=shallow).edit() if options.edits else None
            return Compact(levels=tuple(level for level in (edit, pruning, *records) if level))
    # No cut gains enough to be worth a model call: send what fits.
    if reused and budget.fits(reused_tokens):
        return Reuse(compaction=reused)
    if budget.own.fits(conversation.tokens):
        return Keep()
    return Compact(levels=records) if records else Refuse()


def _with_answered_round(
    conversation: Conversation, budget: Budget, known: Sequence[Compaction]
) -> tuple[Conversation, Budget]:
    """Both with the round that an answer answers which goes on, if it fits beside the usual room.

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
        edit = planner.edit() if base is None and options.edits else None
        return Compact(levels=(edit, filled) if edit else (filled,))
    if budget.own.fits(conversation.tokens):
        return Keep()
    return Compact(levels=(filled,)) if filled else Refuse()


def deep(budget: Budget) -> Budget:
    """The same with a lower target: less is read again, and less often."""
    rules = budget.rules
    return replace(budget, rules=replace(rules, target_ratio=_DEEP_RATIO * rules.target_ratio))


@dataclass(frozen=True, kw_only=True)
class Planner:
    """The compactions that could be made of a conversation, going on from `base` if there is one."""

    conversation: Conversation
    budget: Budget
    options: CompactionOptions
    base: Compaction | None

    def records(self, *, asks: bool = True) -> tuple[Summarize, ...]:
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
        return (keeping,) if whole.provisional else (whole, keeping)

    def summary(self, *, growth_tokens: int | None = None, asks: bool = True) -> Summarize | None:
        """The summary that reaches the target; one that covers all there is, if so much is still to come after it.

        Unless it `asks` a model, it is provisional.
        """
        conversation, budget, base, options = self.conversation, self.budget, self.base, self.options
        target, count = budget.target_tokens(conversation.tokens), conversation.count_text
        if growth_tokens is not None:
            target = min(max(target - growth_tokens, budget.least_target_tokens), target)
        room = self._room_tokens(target)
        cuts = conversation.cuts
        last = cuts[-1] if cuts else 0
        # The user's own words come first: their room is shared out no more.
        words_tokens = self._words_tokens(last, target, room)
        kept_images = self._kept_images(last, int(_IMAGES_SHARE * room))
        rest = room - words_tokens - image_tokens_of(conversation, kept_images)
        summary_tokens = self._summary_tokens(rest)
        frozen_tokens = count(base.summary) if base else 0
        integrates = frozen_tokens > min(_FROZEN_TARGET_RATIO * target, rest - summary_tokens)
        integrates = integrates or (options.writes_whole_records and base is not None)
        if base is not None:
            beyond = tuple(cut for cut in cuts if cut > base.replaced_messages)
            # Nothing new to cover, and yet too large: the window shrank, or the record itself has to.
            integrates = integrates or not beyond
            cuts = tuple(cut for cut in cuts if cut >= base.replaced_messages) if integrates else beyond
        if not cuts:
            return None
        if not options.strategy.keeps_recent:
            # Each such record is whole: of two next steps only the newer one holds.
            integrates, cuts = base is not None, cuts[-1:]
        elif growth_tokens is not None:
            cuts = cuts[-1:]
        least_tokens = min(_least_summary_tokens(budget.window_tokens), options.summary_max_tokens)
        provisional = not asks or summary_tokens < least_tokens
        if provisional:
            integrates, summary_tokens = True, int((1 - _LEDGER_SHARE) * rest)
        frozen_tokens = 0 if integrates else frozen_tokens
        # Frozen segments take from the other lines, not from the user's.
        ledger_tokens = words_tokens + int(_LEDGER_SHARE * max(rest - frozen_tokens, 0))
        lead_in = options.strategy.lead_in
        lead_in_tokens = max(count(lead_in), _LEAD_IN_TOKENS) if lead_in else 0
        record_tokens = RECORD_TOKENS + lead_in_tokens + summary_tokens + ledger_tokens + frozen_tokens
        doubted: tuple[int, ...] = ()

        def total(cut: int) -> int:
            beside_it = (place for place in kept_images if place[0] < cut)
            beside = record_tokens + image_tokens_of(conversation, beside_it)
            return kept_tokens(conversation, cut, conversation.pinned(cut, *doubted)) + beside

        at = conversation.doubted
        if at is not None and total(cuts[-1]) + conversation.sizes[at] <= target:
            doubted = (at,)
        # The kept part never grows with the cut; one look at each of 40,000 messages' cuts would add them all up.
        first = bisect_left(cuts, True, key=lambda cut: total(cut) <= target)
        cut = cuts[min(first, len(cuts) - 1)]
        if options.writes_whole_records and budget.is_wanted:
            # The recent messages stay where nothing has to be compacted again at once.
            recent = max((each for each in cuts if each <= self._recent_start), default=cut)
            cut = recent if total(recent) <= max(target, int(_STAYING_RATIO * budget.line_tokens)) else cut
        # The ledger may have the room that a coarse cut leaves up to the target: a little prefill and no decoding.
        has_spare = not (provisional or options.writes_whole_records)
        spare = min(max(target - total(cut), 0), ledger_tokens) if has_spare else 0
        pinned = conversation.pinned(cut, *doubted)
        least_ledger_tokens = min(int(_WORDS_TARGET_RATIO * target), int(_WORDS_SHARE * ledger_tokens))
        return Summarize(
            strategy=writer_of(options.strategy.name),
            covered_messages=cut,
            pinned=pinned,
            base=base,
            integrates=integrates,
            provisional=provisional,
            summary_tokens=summary_tokens,
            ledger_tokens=ledger_tokens + spare,
            ledger_min_tokens=max(words_tokens, least_ledger_tokens),
            predicted_tokens=total(cut) + spare,
            images=tuple(place for place in kept_images if place[0] < cut and place[0] not in pinned),
        )

    def copied(self) -> Summarize | None:
        """A record without a new summary that covers as little as it can; None without a legal cut.

        For a budget that keeps what fits. The base's summaries go on whole; it may cover more than has to go
        now.
        """
        conversation, budget, base = self.conversation, self.budget, self.base
        cuts, count = conversation.cuts, conversation.count_text
        if not cuts:
            return None
        most_tokens = budget.target_tokens(conversation.tokens)
        # The record is as long as for any other request; room beyond it is for the newest messages.
        usual = replace(budget, rules=replace(budget.rules, keeps_what_fits=False))
        target = min(usual.target_tokens(conversation.tokens), most_tokens)
        room = self._room_tokens(target)
        summary_tokens = min(count(base.summary) if base else 0, room)
        words_tokens = self._words_tokens(cuts[-1], target, room - summary_tokens)
        ledger_tokens = words_tokens + int(_LEDGER_SHARE * max(room - summary_tokens - words_tokens, 0))
        if base is not None:
            # As long as it has been; the rest is the newest messages'.
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

    def edit(self) -> Edit | None:
        """The edit that reaches the target with as few stubs as possible; less would be followed by another edit."""
        target = self.budget.target_tokens(self.conversation.tokens)
        # If one turn could fill the rest, an edit goes deeper if it can: a stub costs nothing.
        targets = (min(target, self.budget.narrow_target_tokens), target) if self.budget.is_narrow else (target,)
        edits = (self._edit_up_to(cut, each) for each in dict.fromkeys(targets) for cut in self._edit_cuts())
        return next(filter(None, edits), None)

    def _edit_up_to(self, cut: int, target: int) -> Edit | None:
        conversation, base = self.conversation, self.base
        start, count = base.replaced_messages if base else 0, conversation.count_text
        # A tool can be called again, so its text goes before the images that a person sent.
        own_images = images_of_the_user(conversation, range(start, cut))
        compaction = self._editing(cut, "edit", {*self._kept_images(cut, target), *own_images})
        ledger_tokens = self._edit_ledger_tokens(start, target)
        tokens = applied_tokens(conversation, compaction) + RECORD_TOKENS + ledger_tokens
        covered = conversation.rest[start:cut]
        shown = dict(compaction.shown)
        for position, line in stubs(covered).items():
            if tokens <= target and not self.options.rereads:
                break
            if start + position not in shown and start + position not in compaction.pinned:
                shown[start + position] = "stub"
                tokens -= count(covered[position].text) - count(line)
        left_images, over = without_oldest_images(conversation, compaction.images, tokens - target)
        if over > 0:
            return None
        return Edit(
            compaction=replace(compaction, shown=tuple(starmap(Shown, sorted(shown.items()))), images=left_images),
            ledger_tokens=ledger_tokens - over,
            predicted_tokens=target,
        )

    def prune(self, fresh: Summarize, now_tokens: int) -> Prune | None:
        """The question for a pruning model before `fresh` is made; None if even the best answer leaves too much.

        Not while an answer goes on: its client waits, and our messages are not to be judged.
        """
        conversation, budget, name = self.conversation, self.budget, self.options.strategy.name
        if fresh.provisional or conversation.messages[-1].is_synthetic:
            return None
        target = budget.target_tokens(conversation.tokens)
        for cut in self._edit_cuts():
            kept_images = self._kept_images(cut, int(_IMAGES_SHARE * self._room_tokens(target)))
            compaction = self._editing(cut, name, kept_images)
            ledger_tokens = self._edit_ledger_tokens(cut, target)
            frozen_tokens = conversation.count_text(compaction.summary)
            record_tokens = RECORD_TOKENS + fresh.summary_tokens + ledger_tokens + frozen_tokens
            least_tokens = kept_tokens(conversation, cut, compaction.pinned) + record_tokens
            if least_tokens <= now_tokens * (1 - MIN_GAIN_RATIO) and not budget.triggers(least_tokens):
                return Prune(
                    strategy=name,
                    compaction=compaction,
                    base=self.base,
                    now_tokens=now_tokens,
                    summary_tokens=fresh.summary_tokens,
                    ledger_tokens=ledger_tokens,
                    predicted_tokens=target,
                )
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
        return Compaction(
            covered_messages=covered_messages,
            covered_hash=conversation.hashes[covered_messages],
            pinned=pinned,
            round=(base.round if base else 0) + 1,
            segments=base.segments if base else (),
            ledger="",
            level=level,
            window_tokens=self.budget.window_tokens,
            edited_from=start,
            shown=tuple(sorted(shown, key=lambda each: each.position)),
            stub_sizes=base.stub_sizes if base else (),
            omissions=base.omissions if base else "",
            covered_part=base.covered_part if base else None,
            images=tuple(sorted(place for place in images if place[0] < covered_messages and place[0] not in pinned)),
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

    def _kept_images(self, last_cut: int, most_tokens: int) -> tuple[ImagePlace, ...]:
        stays = {index - self.conversation.prefix for index in self.conversation.requests}
        may_go = [position for position in range(last_cut) if position not in stays]
        return newest_images(self.conversation, may_go, most=self.options.keep_images, most_tokens=most_tokens)


def _least_summary_tokens(window_tokens: int) -> int:
    return min(max(int(_LEAST_SUMMARY_WINDOW_RATIO * window_tokens), _LEAST_SUMMARY_TOKENS), _GOOD_SUMMARY_TOKENS)
