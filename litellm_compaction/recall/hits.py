"""Finds what was said: ids as they are written first, then by words, and what no term finds as it stands.

A query is never passed on to anything: its runs of letters and digits are looked up, whatever stands between them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from litellm_compaction.recall.index import PASSAGE_CHARS, Index, Original, Sought, sought

# Of a query, which may be a person's whole message; of its terms those that stand in the fewest passages count.
_MOST_QUERY_CHARS, _MOST_TERMS = 4_000, 24
# In more passages an id is no answer but a subject.
_MOST_EXACT = 12
_LEAST_PIECE_CHARS = 40
# Of tiny messages.
_MOST_PARTS = 16
# Among so many hits for each that is wanted a newer value is looked for.
_POOL = 2
GAP = "…"


class Piece(NamedTuple):
    """A part of a message, with a mark at the end at which it goes on."""

    role: str
    text: str
    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A passage that was found, with what stands around it."""

    original: Original
    pieces: tuple[Piece, ...]  # With what was said before and after it, 600 characters at most, oldest first.
    share: float  # Its score, of that of a passage that says nothing but the query; 1.0 for a literal.
    later: str = ""  # The handle of a message with a newer value, or a newer result of the same call.


class Found(NamedTuple):
    """The hits, the best first, and the words that were searched for, as they were written."""

    hits: Sequence[Hit]
    words: Sequence[str]


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
        least_share: hits with a lower `share` are left out; .1 silences most questions about another chat.
    """
    allowed = index.allowed(within, visible)
    # Nothing that is redacted stands in the index, and the words are shown again.
    query = index.redact(query[:_MOST_QUERY_CHARS]).strip()
    runs = sought(query)
    words = [each.written for each in runs]
    wanted = dict.fromkeys(term for each in runs for term in each.terms)
    weights = {term: index.weight(term) for term in index.telling(wanted)[:_MOST_TERMS]}
    exact, best = _exact(index, runs, allowed), index.best_score(wanted)
    by_score = index.ranked(weights, allowed, exact)
    shares = [(1.0 if passage in exact else min(score / best, 1.0), passage) for score, passage in by_score]
    ranked = sorted((each for each in shares if each[0] >= least_share), key=lambda each: each[1] not in exact)
    if not ranked and not least_share:
        # A part of a word, or signs alone.
        ranked = [(1.0, passage) for passage in _holding(index, query, allowed, limit)]
    hits = _chosen(index, ranked, allowed, _POOL * limit)
    return Found(_newest_first(index, hits, list(weights), exact)[:limit], words)


def _holding(index: Index, query: str, allowed: bytearray, limit: int) -> list[int]:
    """The newest passages that hold a text as it stands but for its case."""
    folded = query.casefold()
    newest = reversed(range(len(index.passages) if folded else 0))
    held = (at for at in newest if allowed[at] and folded in index.text(at).casefold())
    return list(itertools.islice(held, _POOL * limit))


def _exact(index: Index, asked: Sequence[Sought], allowed: bytearray) -> set[int]:
    """The passages that hold an id of a query as it is written, or are called by their handle."""
    exact: set[int] = set()
    for run in asked:
        start, end = index.span(run.written)
        exact.update([start] if start < end else index.with_term(run.terms[0], _MOST_EXACT) if run.is_id else ())
    return {passage for passage in exact if allowed[passage]}


def _chosen(index: Index, ranked: Iterable[tuple[float, int]], allowed: bytearray, most: int) -> dict[int, Hit]:
    """The best passages, each with what stands around it, without those that others show already."""
    hits: dict[int, Hit] = {}
    shown: set[int] = set()
    texts: set[str] = set()
    for share, passage in ranked:
        if len(hits) == most:
            break
        if passage not in shown and (text := index.text(passage)) not in texts:
            spans = _around(index, passage, allowed)
            shown.update(spans)
            texts.add(text)
            original = index.originals[index.passages[passage].original]
            hits[passage] = Hit(original=original, pieces=_pieces(index, spans), share=share)
    return hits


def _beside(index: Index, passage: int, step: int, allowed: bytearray) -> Iterator[int]:
    """The passages before (-1) or behind (1) one in its conversation, the nearest first."""
    while index.follows(*sorted((passage, passage + step))) and allowed[passage + step]:
        passage += step
        yield passage


def _around(index: Index, passage: int, allowed: bytearray) -> dict[int, tuple[int, int]]:
    """A passage and its neighbours, by turns, as far as there is room; which characters of each."""
    _, first, last = index.passages[passage]
    spans, room = {passage: (first, last)}, PASSAGE_CHARS - (last - first)
    for pair in itertools.zip_longest(*(_beside(index, passage, step, allowed) for step in (-1, 1))):
        for at in pair:
            if room < _LEAST_PIECE_CHARS or len(spans) == _MOST_PARTS:
                return spans
            if at is not None:
                _, start, end = index.passages[at]
                spans[at] = (max(start, end - room), end) if at < passage else (start, min(end, start + room))
                room -= end - start
    return spans


def _pieces(index: Index, spans: Mapping[int, tuple[int, int]]) -> tuple[Piece, ...]:
    """The spans as texts, those of one original as one."""
    joined: dict[int, tuple[int, int]] = {}
    for at, (start, end) in sorted(spans.items()):
        original = index.passages[at].original
        joined[original] = joined.get(original, (start, end))[0], end
    return tuple(_piece(index.originals[original], *span) for original, span in joined.items())


def _piece(original: Original, start: int, end: int) -> Piece:
    before, after = GAP if start else "", GAP if end < len(original.text) else ""
    return Piece(original.role, before + original.text[start:end].strip() + after, original.handle)


def _newest_first(index: Index, hits: Mapping[int, Hit], asked: Sequence[str], exact: Collection[int]) -> list[Hit]:
    """The hits in their order, but each newer value directly before the older one, which is marked."""
    weight = cache(index.weight)
    said = {at: [*_statements(index.text(at), asked)] for at, hit in hits.items() if hit.original.role != "tool"}

    def is_newer(new: int, old: int) -> bool:
        late, early = hits[new].original, hits[old].original
        if late.role == early.role == "tool":
            # A later result of the same call, as far as the call is known in full.
            return late.call == early.call != "" and GAP not in late.call and late.handle != early.handle
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
_COMMON_RATIO = 0.4
QUESTION_MARKS = "?？؟"
# A term of the question that says less than this part of the heaviest one may be missing later.
_LIGHT_RATIO = 0.5


class _Statement(NamedTuple):
    """A sentence: its words, and the numbers and ids in it."""

    words: set[str]
    values: set[str]


def _statements(text: str, asked: Sequence[str]) -> Iterator[_Statement]:
    """The sentences of a text that have a value and one of the terms of the question."""
    for sentence in filter(_TELLS_VALUE.match, _SENTENCE_END.split(text)[:_MOST_SENTENCES]):
        said = _Statement(set(), set())
        for run in sought(sentence):
            values = {run.terms[0]} if run.is_id else {term for term in run.terms if any(map(str.isdigit, term))}
            said.values.update(values)
            said.words.update(term for term in run.terms if term.isalpha() and term not in values)
        if 0 < len(said.values) <= _MOST_VALUES and not said.words.isdisjoint(asked):
            yield said


def _supersedes(newer: _Statement, older: _Statement, asked: Collection[str], weight: Callable[[str], float]) -> bool:
    """Returns True if what was said later has another value in place of the one that was said before.

    Of many things that are told in the same words, the one that was asked for is named by the words that differ.
    """
    gone, come = older.values - newer.values, newer.values - older.values
    if len(gone) != 1 or len(come) != 1 or not gone.isdisjoint(asked):
        return False
    named = {term: weight(term) for term in older.words.intersection(asked)}
    is_named = all(term in newer.words or named[term] < _LIGHT_RATIO * max(named.values()) for term in named)
    common, old, new = (sum(map(weight, words)) for words in (older.words & newer.words, older.words, newer.words))
    return is_named and common >= _COMMON_RATIO * min(old, new)
