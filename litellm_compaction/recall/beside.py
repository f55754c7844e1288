"""The excerpts beside a person's question: what was said about it earlier and is not shown any more, as quotations.

For a model that cannot ask for them. They stand in front of the question's words, so that nothing before it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from litellm_compaction.core.secrets import Redact, plain
from litellm_compaction.recall.answer import written
from litellm_compaction.recall.hits import QUESTION_MARKS, Hit, search
from litellm_compaction.recall.index import Index

# `core.prompts.defused` breaks these words in what was said, whose lines are set in besides.
BEGIN = "[BEGIN RECORD OF EARLIER WORDS]"
END = "[END RECORD OF EARLIER WORDS]"
_FRAME = f"{BEGIN}\n{{}}\n{END}\n\n"
_HITS = 5
# See `search`.
_LEAST_SHARE = 0.1
# Most of what is said is about what is shown, and needs no excerpts. So the share of the best one counts the more, the
# less the best of what is shown reaches, and the fifth one; each up to so many times.
_MOST_TIMES = 4
_QUESTION_TIMES = 2
# Of that, for excerpts that cost as much work as a usual turn, in proportion for others. Answers of a usual length pass
# (BEAM 1 to 12). In talk of thirty tokens a turn it decides: with 0 the work is 1.36 times that without excerpts, with
# 0.8 1.06, with 1.0 1.04, with 1.2 1.02, and .86, .80, .77 and .73 of the evidence stand in the prompt, .28 without any
# (LoCoMo 1 to 5, 8,192 tokens).
_LEAST_GAIN = 1.0


class Beside(NamedTuple):
    """A frame of excerpts with a blank line after it, and how many are in it; "" and 0 for none."""

    text: str
    excerpts: int


def beside(
    index: Index,
    question: str,
    *,
    visible: Collection[str],
    within: Collection[str],
    limit_tokens: int,
    count: Callable[[str], int],
    turn_tokens: float,
    again_tokens: float,
    defuse: Redact = plain,
) -> Beside:
    """Returns what the earlier conversation says of a question, if it is worth its price.

    Args:
        index: of the conversation.
        question: a person's newest words.
        visible: entries of the hash chain, of messages that stand in the prompt before it; they are not quoted.
        within: entries of those that may be quoted.
        limit_tokens: of the whole frame.
        count: tokens of a text.
        turn_tokens: the work of a usual turn of this conversation.
        again_tokens: the work that any excerpts add to the next turn.
        defuse: breaks the control tokens of a model in what was said.
    """
    found = search(index, question, visible=visible, within=within, limit=_HITS, least_share=_LEAST_SHARE)
    if not (hits := found.hits):
        return Beside("", 0)
    room_tokens = limit_tokens - count(_FRAME.format(""))
    quoted = written(found, limit_tokens=room_tokens, count=count, has_handles=False, defuse=defuse)
    text = _FRAME.format(quoted) if quoted else ""
    tokens = count(text)
    # Tokens of parts do not quite add up to those of the whole.
    if not text or tokens > limit_tokens:
        return Beside("", 0)
    price = min((tokens + again_tokens) / max(turn_tokens, 1.0), 1.0)
    shown = search(index, question, within=visible, limit=1, least_share=_LEAST_SHARE / _MOST_TIMES).hits
    if _gain(question, hits, shown[0].share if shown else 0.0) < _LEAST_GAIN * price:
        return Beside("", 0)
    return Beside(text, sum(line.startswith("[") for line in quoted.splitlines()))


def _gain(question: str, hits: Sequence[Hit], shown: float) -> float:
    shares = [hit.share for hit in hits]
    best = max(shares)
    fifth = min(shares) if len(shares) == _HITS else _LEAST_SHARE
    gain = best * best / max(shown, best / _MOST_TIMES) * min(best / fifth, _MOST_TIMES)
    return gain * _QUESTION_TIMES if any(mark in question for mark in QUESTION_MARKS) else gain
