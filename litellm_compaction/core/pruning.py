"""What a pruning model may do to a conversation: its wishes, held against the original.

Pure. A message may be left out or shortened to pieces of itself, nothing else: no wish can add a role, a call, an id
or a word. Rounds stay whole, user and assistant keep alternating, and what is sacred is never offered. Called by the
engine with what `pruning_answers` read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from litellm_compaction.core.chain import normal_text
from litellm_compaction.core.edits import stubs
from litellm_compaction.core.messages import Message, round_end
from litellm_compaction.core.pruned import GAP, Shortened, spans_of

# Below this nothing is gained that is worth a marker.
_LEAST_SAVED_CHARS = 80
# What may stand next to each other, as 31 chat templates want it (llama.cpp's collection, 2026-11).
_NEIGHBORS = frozenset({("user", "assistant"), ("tool", "assistant"), ("assistant", "user")})
_FOLLOWERS = {"user": ("assistant",), "assistant": ("user",)}
_ANYONE = ("user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a pruning model would leave out, by position after the lead.

    Attributes:
        dropped: to be left out.
        shortened: the text to be shown instead, an excerpt or not.
        summary: what of it still matters, in the model's words.
    """

    dropped: frozenset[int] = frozenset()
    shortened: Mapping[int, str] = field(default_factory=dict)
    summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What is done: positions after the lead, ascending."""

    dropped: tuple[int, ...]
    stubbed: tuple[int, ...]
    shortened: tuple[Shortened, ...]


def offered(rest: Sequence[Message], span: range, *, pinned: Collection[int], dropped: Collection[int]) -> list[int]:
    """The positions that a pruning model may choose from.

    Args:
        rest: the messages after the leading system ones.
        span: the positions that are covered and not replaced.
        pinned: those among them that stay verbatim.
        dropped: what an earlier pruning has left out.
    """
    stays = {*pinned, *dropped}
    return [at for at in span if at not in stays and not (rest[at].is_system or rest[at].is_ours)]


def verified(
    rest: Sequence[Message], span: range, choices: Collection[int], wishes: Wishes, before: Pruning
) -> Pruning:
    """As much of the wishes as leaves a valid conversation, on top of an earlier pruning.

    A call goes together with all its results or not at all; a result alone becomes a stub. Where leaving something out
    would put two of the same role next to each other, a stub stays in its place.

    Args:
        rest: the messages after the leading system ones.
        span: the positions that are covered and not replaced.
        choices: what was offered.
        wishes: what a model said.
        before: what was done already.
    """
    wanted = {*before.dropped, *wishes.dropped.intersection(choices)}
    whole, single = _whole_rounds(rest, span, wanted)
    kept_in_place, dropped = _repaired(rest, span, whole)
    shrinking = {span.start + at for at in stubs(rest[span.start : span.stop])}
    empty = {at for at, text in wishes.shortened.items() if not text.strip() and rest[at].role == "tool"}
    results = single | empty.intersection(choices) | {at for at in whole - dropped if rest[at].role == "tool"}
    stubbed = ({*before.stubbed} | (results & shrinking)) - dropped
    shortened = {each.position: each for each in before.shortened}
    for at, text in wishes.shortened.items():
        if at in choices and at not in stubbed and (each := _shortened(rest[at], at, text)) is not None:
            shortened[at] = each
    shortened.update((at, Shortened(position=at, spans=())) for at in kept_in_place)
    return Pruning(
        dropped=tuple(sorted(dropped)),
        stubbed=tuple(sorted(stubbed)),
        shortened=tuple(shortened[at] for at in sorted(shortened) if at not in dropped and at not in stubbed),
    )


def _whole_rounds(rest: Sequence[Message], span: range, wanted: set[int]) -> tuple[set[int], set[int]]:
    """What may go, as far as calls and results stay together, and the results that were to go alone."""
    whole: set[int] = set()
    single: set[int] = set()
    at = span.start
    while at < span.stop:
        members = range(at, min(round_end(rest, at), span.stop))
        if rest[at].role != "tool" and wanted.issuperset(members):
            whole.update(members)
        else:
            single.update(each for each in members if each in wanted and rest[each].role == "tool")
        at = members.stop
    return whole, single


def _repaired(rest: Sequence[Message], span: range, whole: Set[int]) -> tuple[set[int], set[int]]:
    """The positions at which a stub stays, and those that go."""
    stays: set[int] = set()
    goes: set[int] = set()
    for run in _runs(span, whole):
        if _may_close(rest, span, run):
            goes.update(run)
            continue
        filler = next((at for at in reversed(run) if _closes(rest, span, run, at)), None)
        if filler is not None:
            stays.add(filler)
            goes.update(at for at in run if at != filler)
    return stays, goes


def _runs(span: range, whole: Set[int]) -> Iterator[range]:
    """The stretches that go."""
    begin = None
    for at in (*span, span.stop):
        if at in whole and begin is None:
            begin = at
        elif at not in whole and begin is not None:
            yield range(begin, at)
            begin = None


def _may_close(rest: Sequence[Message], span: range, run: range) -> bool:
    """Whether the neighbors of a stretch may stand next to each other."""
    following = _following(rest, span, run)
    if run.start == span.start:
        # The record stands before it, in a user message of its own or in the one that follows.
        return set(following) <= {*_ANYONE}
    before, last = rest[run.start - 1].role, rest[run.stop - 1].role
    return before == last or all((before, after) in _NEIGHBORS for after in following)


def _closes(rest: Sequence[Message], span: range, run: range, at: int) -> bool:
    """Whether a stub for one message of a stretch fits between the stretch's neighbors."""
    role, calls = rest[at].role, rest[at].calls
    if calls or role not in _ANYONE:
        return False
    opens = run.start == span.start or (rest[run.start - 1].role, role) in _NEIGHBORS
    return opens and (at == run.stop - 1 or all((role, after) in _NEIGHBORS for after in _following(rest, span, run)))


def _following(rest: Sequence[Message], span: range, run: range) -> tuple[str, ...]:
    """The roles that may come behind a stretch: what follows the covered part may be edited by its client."""
    if run.stop < span.stop:
        return (rest[run.stop].role,)
    return _FOLLOWERS.get(rest[run.stop - 1].role, _ANYONE)


def _shortened(message: Message, position: int, wanted: str) -> Shortened | None:
    """The message cut to what a model would show of it; None where that saves nothing, or there is more than text."""
    if message.other_parts:
        return None
    text = normal_text(message)
    spans = spans_of(text, wanted) if wanted.strip() else ()
    shown = sum(end - begin + len(GAP) + 2 for begin, end in spans)
    if len(text) - shown < _LEAST_SAVED_CHARS:
        return None
    return Shortened(position=position, spans=spans)
