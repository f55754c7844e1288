"""Tells if a later sentence gives another value to the thing of which an earlier one speaks.

By form alone: both say mostly the same, but for one number or id. A name that changes is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from litellm_compaction.recall.terms import sought

_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])|\n")
_HOLDS_VALUE = re.compile(r"\d|\w[_@\\/]\w")
# What tells of more values is a list, in which each row has its own.
_MOST_VALUES, _MOST_SENTENCES = 3, 12
_LEAST_COMMON, _COMMON_RATIO = 2, 0.4


class Statement(NamedTuple):
    """A sentence: its words, and the numbers and ids in it."""

    words: frozenset[str]
    values: frozenset[str]


def statements(text: str, asked: Collection[str]) -> list[Statement]:
    """Returns the sentences of a text that have a value and one of the terms of the question."""
    wanted = frozenset(asked)
    found = map(_read, filter(_HOLDS_VALUE.search, _SENTENCE_END.split(text)[:_MOST_SENTENCES]))
    return [each for each in found if 0 < len(each.values) <= _MOST_VALUES and not each.words.isdisjoint(wanted)]


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
