"""Finds what was said: ids as they are written first, then by words; or by a regular expression between slashes.

A query is never passed on to anything: its runs of letters and digits are looked up, whatever stands between them.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeAlias

import regex

from litellm_compaction.errors import CompactionError
from litellm_compaction.recall.index import PASSAGE_CHARS, Index, Original
from litellm_compaction.recall.terms import Sought, sought

# What somebody asks for. A person's whole message, which is looked up unasked, may be longer; of the terms those that
# stand in the fewest passages count.
MOST_QUERY_CHARS, _MOST_QUESTION_CHARS, _MOST_TERMS = 400, 4_000, 24
# In more passages an id is no answer but a subject.
_MOST_EXACT = 12
# An excerpt that is mostly shown already is none.
_MOST_SHOWN_RATIO = 0.5
_LEAST_PIECE_CHARS = 40
# Of tiny messages.
_MOST_PARTS = 16
# Among so many hits for each that is wanted a newer value is looked for.
_POOL = 2
# For a regular expression, and for what no term finds: over all texts, the newest first.
_REGEX_LIMIT_S, _LITERAL_LIMIT_S = 0.2, 0.02
# A longer one, or one that counts higher, takes more memory to be read than there is: a{1000} in a group of {1000}.
_MOST_EXPRESSION_CHARS, _MOST_TIMES = 300, 10_000
_TIMES = re.compile(r"(?<=[{,])\s{0,9}(\d{1,9})(?=\s{0,9}[,}])")
GAP = "…"
# The place of what is looked for in a text, -1 for none; it is given the seconds that are left, and may end with a
# TimeoutError.
_Find: TypeAlias = Callable[[str, float], int]


class Piece(NamedTuple):
    """A part of a message, with a mark at the end at which it goes on."""

    role: str
    text: str


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
        query: words, ids, a handle, code, in any script; or `/a regular expression/`.
        visible: entries of the hash chain, of messages that stand in the prompt; they are not found.
        within: entries of those that may be found, or None for all.
        limit: as many hits at most.
        least_share: hits with a lower `share` are left out. Of questions about another chat .1 silences two thirds
            (LoCoMo) or a third (BEAM), of hits that answer it loses 5 in 100 (2026-11-27).
    """
    allowed = index.allowed(within, visible)
    # Nothing that is redacted stands in the index, and the words are shown again.
    query = index.redact(query[:_MOST_QUESTION_CHARS]).strip()
    expression = _expression(query)
    if expression is not None:
        return Found(_matching(index, _place_of_match(expression), allowed, limit, _REGEX_LIMIT_S), [query])
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
    if not ranked and query and not least_share:
        # A part of a word, or signs alone.
        return Found(_matching(index, _place_of_text(query), allowed, limit, _LITERAL_LIMIT_S), words)
    pool = _chosen(index, ranked, weights, allowed, _POOL * limit)
    return Found(_newest_first(index, pool, list(weights), exact)[:limit], words)


def _expression(query: str) -> regex.Pattern[str] | None:
    """The regular expression between two slashes; None for words, and for one that cannot be read."""
    if not 3 <= len(query) <= _MOST_EXPRESSION_CHARS or query[0] != "/" or query[-1] != "/":
        return None
    times = math.prod(max(int(each), 1) for each in _TIMES.findall(query))
    if query.count("/") > 2 + query.count(r"\/") or times > _MOST_TIMES:
        return None
    try:
        return regex.compile(query[1:-1], regex.IGNORECASE | regex.MULTILINE)
    except (regex.error, RecursionError, OverflowError):
        return None


def _place_of_match(expression: regex.Pattern[str]) -> _Find:
    def find(text: str, left_s: float) -> int:
        match = expression.search(text, concurrent=True, timeout=left_s)
        return -1 if match is None else match.start()

    return find


def _place_of_text(sought: str) -> _Find:
    folded = sought.casefold()
    return lambda text, _: folded_place(text, text.casefold().find(folded))


def folded_place(text: str, at: int) -> int:
    """Returns the position in a text of the character that stands at `at` in its case-folded form, which may be longer.

    Each character is folded by itself (Unicode, 3.13, toCasefold), so halves have the lengths of the whole.
    """
    first, end = 0, len(text)
    while at >= 0 and end - first > 1:
        middle = (first + end) // 2
        chars = len(text[first:middle].casefold())
        if at < chars:
            end = middle
        else:
            first, at = middle, at - chars
    return first if at >= 0 else at


def _matching(index: Index, find: _Find, allowed: bytearray, limit: int, limit_s: float) -> list[Hit]:
    found = ((1.0, passage) for passage in _matches(index, find, allowed, limit_s))
    return [hit for _, hit in _chosen(index, found, {}, allowed, limit)]


def _matches(index: Index, find: _Find, allowed: bytearray, limit_s: float) -> Iterator[int]:
    """The passages in which a message's first match begins, the newest first, as far as the time suffices."""
    end_s = time.monotonic() + limit_s
    for at in range(len(index.originals) - 1, -1, -1):
        original = index.originals[at]
        first, end = index.span(original.handle)
        if first == end or not allowed[first]:
            continue
        try:
            place = find(original.text, max(end_s - time.monotonic(), 0.001))
        except TimeoutError:
            return
        if place >= 0:
            parts = (each for each in range(end - 1, first - 1, -1) if index.passages[each].original == at)
            yield next((each for each in parts if index.passages[each].start <= place), first)
        if time.monotonic() > end_s:
            return


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


def _chosen(
    index: Index, ranked: Iterable[tuple[float, int]], weights: Mapping[str, float], allowed: bytearray, most: int
) -> list[tuple[int, Hit]]:
    """The best passages, each with what stands around it, without those that others show already.

    A hit is called by the passage in it that says most of the terms, which is not always the one in the middle.
    """
    shown: dict[int, float] = {}
    named: dict[int, Hit] = {}
    texts: set[str] = set()
    for share, middle in ranked:
        if len(named) == most:
            break
        parts = _around(index, middle, allowed)
        chars = sum(part * _chars(index, at) for at, part in parts.items())
        known = sum(min(part, shown.get(at, 0.0)) * _chars(index, at) for at, part in parts.items())
        if known > _MOST_SHOWN_RATIO * chars:
            continue
        for at, part in parts.items():
            shown[at] = max(shown.get(at, 0.0), part)
        passage = index.most_telling((at for at in parts if at not in named), weights, middle)
        text = index.text(passage)
        if passage in named or (text in texts and len(text) > _MOST_SHOWN_RATIO * chars):
            continue
        texts.add(text)
        original = index.originals[index.passages[passage].original]
        named[passage] = Hit(original=original, pieces=_pieces(index, middle, parts), share=share)
    return list(named.items())


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
    return Piece(original.role, before + text[start:end].strip() + after)


def _newest_first(
    index: Index, pool: Sequence[tuple[int, Hit]], asked: Sequence[str], exact: Collection[int]
) -> list[Hit]:
    """The hits in their order, but each newer value directly before the older one, which is marked."""
    hits = dict(pool)
    said = {at: statements(index.text(at), asked) if hit.original.role != "tool" else [] for at, hit in pool}
    weight = cache(index.weight)

    def is_newer(new: int, old: int) -> bool:
        is_later = _is_later(hits[new].original, hits[old].original)
        return is_later or any(
            supersedes(now, before, asked, weight)
            for now in (said[new] if hits[new].original.role in ("user", hits[old].original.role) else ())
            for before in said[old]
        )

    pairs = itertools.combinations(sorted(hits), 2)
    later = {old: new for old, new in pairs if is_newer(new, old)}
    order: dict[int, Hit] = {}
    for passage, _ in pool:
        chain = [passage]
        # What was asked for as it is written stays where it is.
        while chain[-1] in later and chain[-1] not in exact:
            chain.append(later[chain[-1]])
        for at in reversed(chain):
            handle = hits[later[at]].original.handle if at in later else ""
            order.setdefault(at, replace(hits[at], later=handle))
    return list(order.values())


def _is_later(new: Original, old: Original) -> bool:
    """A later result of the same call, as far as the call is known in full."""
    is_same = new.call == old.call != "" and "…" not in new.call
    return is_same and new.role == old.role == "tool" and new.handle != old.handle


_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])|\n")
_HOLDS_VALUE = re.compile(r"\d|\w[_@\\/]\w")
# What tells of more values is a list, in which each row has its own.
_MOST_VALUES, _MOST_SENTENCES = 3, 12
_LEAST_COMMON, _COMMON_RATIO = 2, 0.4
QUESTION_MARKS = "?？؟"
# A term of the question that says less than this part of the heaviest one may be missing later.
_LIGHT_RATIO = 0.5


class Statement(NamedTuple):
    """A sentence: its words, and the numbers and ids in it."""

    words: frozenset[str]
    values: frozenset[str]


def statements(text: str, asked: Collection[str]) -> list[Statement]:
    """Returns the sentences of a text that have a value and one of the terms of the question."""
    wanted = frozenset(asked)
    # A question says nothing of a value, whatever numbers are in it.
    sentences = itertools.filterfalse(_is_question, _SENTENCE_END.split(text)[:_MOST_SENTENCES])
    found = map(_read, filter(_HOLDS_VALUE.search, sentences))
    return [each for each in found if 0 < len(each.values) <= _MOST_VALUES and not each.words.isdisjoint(wanted)]


def _is_question(sentence: str) -> bool:
    """Returns True if a sentence has a question mark behind its last word."""
    behind = itertools.takewhile(lambda sign: not sign.isalnum(), reversed(sentence))
    return any(sign in QUESTION_MARKS for sign in behind)


def supersedes(newer: Statement, older: Statement, asked: Collection[str], weight: Callable[[str], float]) -> bool:
    """Returns True if what was said later has another value in place of one that what was said before has.

    Args:
        newer: what was said later.
        older: what was said before.
        asked: terms of the question, one of which both have; who asks for the older value means it.
        weight: how much a term says.
    """
    gone, come = older.values - newer.values, newer.values - older.values
    common = newer.words & older.words
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


def _read(sentence: str) -> Statement:
    words: set[str] = set()
    values: set[str] = set()
    for run in sought(sentence):
        if run.is_id:
            values.add(run.terms[0])
            words.update(term for term in run.terms[1:] if term.isalpha() and len(term) > 1)
        else:
            for term in run.terms:
                (values if any(map(str.isdigit, term)) else words).add(term)
    return Statement(frozenset(words), frozenset(values))
