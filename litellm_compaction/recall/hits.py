"""Finds what was said: ids as they are written first, then by words, and what no term finds as it stands.

A query is never passed on to anything: its runs of letters and digits are looked up, whatever stands between them.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from litellm_compaction.errors import CompactionError
from litellm_compaction.recall.index import PASSAGE_CHARS, Index, Original
from litellm_compaction.recall.terms import Sought, sought

# What somebody asks for. A person's whole message, which is looked up unasked, may be longer; of the terms those that
# stand in the fewest passages count.
MOST_QUERY_CHARS, _MOST_QUESTION_CHARS, _MOST_TERMS = 400, 4_000, 24
# In more passages an id is no answer but a subject.
_MOST_EXACT = 12
_LEAST_PIECE_CHARS = 40
# Of tiny messages.
_MOST_PARTS = 16
# Among so many hits for each that is wanted a newer value is looked for.
_POOL = 2
# For what no term finds: over all passages, the newest first.
_LITERAL_LIMIT_S = 0.02
GAP = "…"


class Piece(NamedTuple):
    """A part of a message, with a mark at the end at which it goes on."""

    role: str
    text: str
    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A passage that was found, with what stands around it.

    Attributes:
        original: the message that it is from.
        pieces: the passage and what was said before and after it, 600 characters at most, oldest first.
        share: its score, of that of a passage that says nothing but the query; 1.0 for what stands there as it was
            asked for.
        later: of a message that says the same with a newer value, or is a newer result of the same call: its handle;
            "" for none.
    """

    original: Original
    pieces: tuple[Piece, ...]
    share: float
    later: str = ""


class Found(NamedTuple):
    """The hits, the best first, and the words that were searched for, as they were written.

    `missing` are the entries of messages that could not be searched, among those that might have been found.
    """

    hits: Sequence[Hit]
    words: Sequence[str]
    missing: Collection[str] = ()


class QueryTooLong(CompactionError, ValueError):
    """A query has more than `MOST_QUERY_CHARS` characters; the text is for whoever asks, and says what to change."""


def checked(query: str) -> str:
    """Returns a query that somebody asks.

    Raises:
        QueryTooLong: it is too long to be one.
    """
    if len(query) > MOST_QUERY_CHARS:
        raise QueryTooLong(
            f"The query has {len(query):,} characters, and at most {MOST_QUERY_CHARS} are searched: "
            "ask with a few words, an id or a handle."
        )
    return query


def search(
    index: Index,
    query: str,
    *,
    visible: Collection[str] = (),
    within: Collection[str] | None = None,
    limit: int = 5,
    least_share: float = 0.0,
) -> Found:
    """Searches what was added to an index.

    Args:
        index: of what its caller may see.
        query: words, ids, a handle, code, in any script.
        visible: entries of the hash chain, of messages that stand in the prompt; they are not found.
        within: entries of those that may be found, or None for all.
        limit: as many hits at most.
        least_share: hits with a lower `share` are left out. Of questions about another chat .1 silences two thirds
            (LoCoMo) or a third (BEAM), of hits that answer it loses 5 in 100 (2026-11-27).
    """
    allowed = index.allowed(within, visible)
    # Nothing that is redacted stands in the index, and the words are shown again.
    query = index.redact(query[:_MOST_QUESTION_CHARS]).strip()
    asked = sought(query)
    words = [each.written for each in asked]
    wanted = dict.fromkeys(term for each in asked for term in each.terms)
    weights = {term: index.weight(term) for term in index.telling(wanted)[:_MOST_TERMS]}
    exact = _exact(index, asked, allowed)
    best = index.best_score(wanted) or 1.0
    by_score = [
        (1.0 if passage in exact else min(score / best, 1.0), passage)
        for score, passage in index.ranked(weights, allowed, exact)
    ]
    # Sorted by score already.
    by_score.sort(key=lambda scored: (scored[1] not in exact, exact.get(scored[1], (0, 0))))
    ranked = [(share, passage) for share, passage in by_score if share >= least_share]
    if not ranked and not least_share:
        # A part of a word, or signs alone.
        ranked = [(1.0, passage) for passage in _holding(index, query, allowed, limit)]
    hits = _chosen(index, ranked, allowed, _POOL * limit)
    return Found(_newest_first(index, hits, list(weights), exact)[:limit], words)


def _holding(index: Index, query: str, allowed: bytearray, limit: int) -> list[int]:
    """The newest passages that hold a text as it stands but for its case, as far as the time suffices."""
    folded, end_s = query.casefold(), time.monotonic() + _LITERAL_LIMIT_S
    found: list[int] = []
    for passage in range(len(index.passages) - 1 if folded else -1, -1, -1):
        if len(found) == _POOL * limit or time.monotonic() > end_s:
            break
        if allowed[passage] and folded in index.text(passage).casefold():
            found.append(passage)
    return found


def _exact(index: Index, asked: Sequence[Sought], allowed: bytearray) -> dict[int, tuple[int, int]]:
    """The passages that hold an id of a query as it is written, or are called by their handle, and their rank.

    Of several ids the one that stands in the fewest passages says most, then how many of them a passage holds.
    """
    ranks: dict[int, tuple[int, int]] = {}
    for each in asked:
        start, end = index.span(each.written)
        handled = [start] if start < end and allowed[start] else []
        held = index.with_term(each.terms[0], _MOST_EXACT) if each.is_id and not handled else handled
        places = [at for at in held if allowed[at]]
        for at in places:
            fewest, number = ranks.get(at, (len(places), 0))
            ranks[at] = min(fewest, len(places)), number - 1
    return ranks


def _chosen(index: Index, ranked: Iterable[tuple[float, int]], allowed: bytearray, most: int) -> dict[int, Hit]:
    """The best passages, each with what stands around it, without those that others show already."""
    hits: dict[int, Hit] = {}
    shown: set[int] = set()
    texts: set[str] = set()
    for share, passage in ranked:
        text = index.text(passage)
        if len(hits) == most:
            break
        if passage in shown or text in texts:
            continue
        parts = _around(index, passage, allowed)
        shown.update(parts)
        texts.add(text)
        original = index.originals[index.passages[passage].original]
        hits[passage] = Hit(original=original, pieces=_pieces(index, passage, parts), share=share)
    return hits


def _chars(index: Index, passage: int) -> int:
    _, start, end = index.passages[passage]
    return end - start


def _around(index: Index, passage: int, allowed: bytearray) -> dict[int, float]:
    """A passage and its neighbours, by turns, as far as there is room; which part of each."""
    room = PASSAGE_CHARS - _chars(index, passage)
    parts = {passage: 1.0}
    before, after = passage - 1, passage + 1
    while room >= _LEAST_PIECE_CHARS and len(parts) < _MOST_PARTS:
        is_before = index.follows(before, before + 1) and allowed[before]
        is_after = index.follows(after - 1, after) and allowed[after]
        if not is_before and not is_after:
            break
        if is_before and (not is_after or passage - before <= after - passage):
            at, before = before, before - 1
        else:
            at, after = after, after + 1
        parts[at] = min(1.0, room / max(_chars(index, at), 1))
        room -= _chars(index, at)
    return parts


def _pieces(index: Index, passage: int, parts: dict[int, float]) -> tuple[Piece, ...]:
    """The parts as texts, those of one original as one."""
    spans: dict[int, tuple[int, int]] = {}
    for at in sorted(parts):
        original, start, end = index.passages[at]
        kept = int(parts[at] * (end - start))
        start, end = (end - kept, end) if at < passage else (start, start + kept)
        spans[original] = (spans[original][0], end) if original in spans else (start, end)
    return tuple(_piece(index.originals[original], *span) for original, span in spans.items())


def _piece(original: Original, start: int, end: int) -> Piece:
    text = original.text
    before, after = GAP if start else "", GAP if end < len(text) else ""
    return Piece(original.role, before + text[start:end].strip() + after, original.handle)


def _newest_first(index: Index, hits: Mapping[int, Hit], asked: Sequence[str], exact: Collection[int]) -> list[Hit]:
    """The hits in their order, but each newer value directly before the older one, which is marked."""
    said = {at: _statements(index.text(at), asked) for at, hit in hits.items() if hit.original.role != "tool"}
    weight = cache(index.weight)

    def is_newer(new: int, old: int) -> bool:
        late, early = hits[new].original, hits[old].original
        if late.role == early.role == "tool":
            # A later result of the same call, as far as the call is known in full.
            return late.call == early.call != "" and "…" not in late.call and late.handle != early.handle
        values = itertools.product(said.get(new, ()), said.get(old, ())) if late.role in ("user", early.role) else ()
        return any(_supersedes(now, before, asked, weight) for now, before in values)

    later = {old: new for old, new in itertools.combinations(sorted(hits), 2) if is_newer(new, old)}
    order: dict[int, Hit] = {}
    for passage in hits:
        chain = [passage]
        # What was asked for as it is written stays where it is.
        while chain[-1] in later and chain[-1] not in exact:
            chain.append(later[chain[-1]])
        for at in reversed(chain):
            handle = hits[later[at]].original.handle if at in later else ""
            order.setdefault(at, replace(hits[at], later=handle))
    return list(order.values())


_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])|\n")
# A question says nothing of a value, whatever numbers are in it.
_TELLS_VALUE = re.compile(r"(?=.*(?:\d|\w[_@\\/]\w))(?!.*[?？؟]\W*\Z)")
# What tells of more values is a list, in which each row has its own.
_MOST_VALUES, _MOST_SENTENCES = 3, 12
_LEAST_COMMON, _COMMON_RATIO = 2, 0.4
QUESTION_MARKS = "?？؟"
# A term of the question that says less than this part of the heaviest one may be missing later.
_LIGHT_RATIO = 0.5


class _Statement(NamedTuple):
    """A sentence: its words, and the numbers and ids in it."""

    words: frozenset[str]
    values: frozenset[str]


def _statements(text: str, asked: Sequence[str]) -> list[_Statement]:
    """The sentences of a text that have a value and one of the terms of the question."""
    found = map(_read, filter(_TELLS_VALUE.match, _SENTENCE_END.split(text)[:_MOST_SENTENCES]))
    return [each for each in found if 0 < len(each.values) <= _MOST_VALUES and not each.words.isdisjoint(asked)]


def _read(sentence: str) -> _Statement:
    words: set[str] = set()
    values: set[str] = set()
    for run in sought(sentence):
        if run.is_id:
            values.add(run.terms[0])
            words.update(term for term in run.terms[1:] if term.isalpha() and len(term) > 1)
        else:
            for term in run.terms:
                (values if any(map(str.isdigit, term)) else words).add(term)
    return _Statement(frozenset(words), frozenset(values))


def _supersedes(newer: _Statement, older: _Statement, asked: Collection[str], weight: Callable[[str], float]) -> bool:
    """Returns True if what was said later has another value in place of one that what was said before has.

    Both have a term of the question; who asks for the older value means it. `weight` says how much a term says.
    """
    gone, come, common = older.values - newer.values, newer.values - older.values, newer.words & older.words
    if len(gone) != 1 or len(come) != 1 or not gone.isdisjoint(asked):
        return False
    if len(common) < _LEAST_COMMON or common.isdisjoint(asked):
        return False
    # Of many things that are told in the same words, the one that was asked for is named by the words that differ.
    named = {term: weight(term) for term in older.words.intersection(asked)}
    if any(named[term] >= _LIGHT_RATIO * max(named.values()) for term in named.keys() - newer.words):
        return False
    least = min(sum(map(weight, newer.words)), sum(map(weight, older.words)))
    return sum(map(weight, common)) >= _COMMON_RATIO * least
