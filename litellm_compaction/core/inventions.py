"""Finds the lines of a summary that hold a rule which no message gives.

Weak models add rules (codegraff issue 738, oh-my-openagent 1483), and one that nobody gave would bind whoever reads the
record. Losing a correct line costs as well: a rule (`inventions.toml` tells it) needs two sentences in a row that have
half of its words, and a negation if it has one. The record holds what a user said verbatim, so a lost paraphrase costs
little. Values and names are not checked: what messages say of them stands verbatim beside the summary.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A summary with more of them is a list: its lines are believed.
_MOST_RULES = 400
_WORD = re.compile(
    r"[^\W\d_\u0e00-\u0eff\u2e80-\uffff]{4,40}|\b[A-Z]{2,3}\b|\d{1,40}|[\u0e00-\u0eff\u2e80-\ud7ff]{2,200}"
)
_WITHOUT_SPACES = "\u0e00"
_STEM_CHARS = 5
# "14. fix the tests" counts itself.
_ORDINAL = re.compile(r"\A\s{0,16}\d{1,3}[.)] ")
_BULLETS = "-*•> \t[]()0123456789."
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])|\n")
# A longer sentence is none.
_SENTENCE_CHARS = 600
# 0.6 keeps 2 in 100 fewer invented rules of a chat of 100,000 tokens and loses 2 in 100 more of its user's.
_SUPPORT_RATIO = 0.5
# Of a word in every sentence.
_LEAST_WEIGHT = 0.1
_DATA = tomllib.loads(resources.files(__package__).joinpath("inventions.toml").read_text(encoding="utf-8"))


def _any_of(words: str) -> str:
    return "|".join(re.escape(word.replace("_", " ")) for word in words.split())


_WORDS = {key: _any_of(words) for key, words in _DATA.items()}
_RULE = re.compile(
    rf"(?<!\w)(?:{_WORDS['anywhere']})(?!\w)|(?:\A|[^\w\s,'’]|\b(?:{_WORDS['before']}))\s{{0,3}}(?:{_WORDS['opening']})(?!\w)"
    rf"|{_WORDS['inside']}",
    re.IGNORECASE,
)
_RULE_WORDS = re.compile(
    rf"(?<!\w)(?:{_WORDS['anywhere']}|{_WORDS['opening']}|{_WORDS['negations']}|users?|assistant)(?!\w)|{_WORDS['inside']}",
    re.IGNORECASE,
)
_NEGATION = re.compile(rf"(?<!\w)(?:{_WORDS['negations']})(?!\w)|n['’]|{_WORDS['negations_inside']}", re.IGNORECASE)


def inventions(lines: Sequence[str], source: Sequence[str]) -> list[bool]:
    """Tells of each line of a summary if one of its rules is not the source's.

    Args:
        lines: "" for those that are believed.
        source: all texts that its writer was shown.
    """
    rules = [_rules(line) for line in lines]
    if not 0 < sum(map(len, rules)) <= _MOST_RULES:
        return [False] * len(lines)
    given = _given((rule for own in rules for rule in own), source)
    return [not given.issuperset(own) for own in rules]


def _rules(line: str) -> list[str]:
    """The sentences of a line that are rules."""
    sentences = _SENTENCE_END.split(_ORDINAL.sub("", line))
    return [rule for each in sentences if _RULE.search(rule := each.lstrip(_BULLETS)[:_SENTENCE_CHARS])]


def _given(rules: Iterable[str], texts: Iterable[str]) -> set[str]:
    """The rules that have a source: two sentences with half of the rule's words by weight, the rarer the more."""
    wanted = {rule: _stems(_RULE_WORDS.sub(" ", rule)) for rule in rules}
    sought = frozenset[str]().union(*wanted.values())
    times: Counter[str] = Counter()
    # The words of two sentences in a row, and if there is a negation in them.
    passages: dict[frozenset[str], bool] = {}
    number = 1
    for text in texts if sought else ():
        before, was_negative = frozenset[str](), False
        for sentence in _SENTENCE_END.split(text):
            number += 1
            found = sought & _stems(sentence)
            is_negative = bool(found) and _NEGATION.search(sentence, 0, _SENTENCE_CHARS) is not None
            times.update(found)
            if both := before | found:
                passages[both] = passages.get(both, False) or was_negative or is_negative
            before, was_negative = found, is_negative
    weights = {stem: math.log(number / max(times[stem], 1)) + _LEAST_WEIGHT for stem in sought}

    def is_given(rule: str) -> bool:
        least = _SUPPORT_RATIO * math.fsum(weights[stem] for stem in wanted[rule])
        is_negative = _NEGATION.search(rule) is not None
        return not wanted[rule] or any(
            math.fsum(weights[stem] for stem in wanted[rule] & words) >= least
            for words, has_negation in passages.items()
            if has_negation or not is_negative
        )

    return {rule for rule in wanted if is_given(rule)}


def _stems(text: str) -> frozenset[str]:
    """The beginnings of a text's words, its numbers, and of scripts without blanks each two signs."""
    words = _WORD.findall(text)
    found = {word[:_STEM_CHARS].casefold() for word in words if word[0] < _WITHOUT_SPACES}
    wide = (word for word in words if word[0] >= _WITHOUT_SPACES)
    return frozenset(found.union(word[at : at + 2] for word in wide for at in range(len(word) - 1)))
