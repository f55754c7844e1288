"""The anchor ledger: what survives a compaction verbatim, without any model.

First the user's own words, because a constraint cannot be recognised by signal words (summaries keep 17 % of
side constraints, arXiv 2608.11242); then the lines that name paths, ids, numbers, commands and errors, which
summaries lose first (paths 9.8 %, numbers 1.9 % survive, deja-vu 543). Deterministic, bounded, any language.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from litellm_compaction.core.anchor_lines import SCANNED_CHARS, SCANNED_PER_MESSAGE_CHARS, Line, candidates
from litellm_compaction.core.excerpts import common_level, condensed
from litellm_compaction.core.injections import is_injected
from litellm_compaction.core.messages import Message
from litellm_compaction.core.secrets import Redact, redacted, without_secrets
from litellm_compaction.core.supersession import latest_values, marked

WORDS_HEAD = "The user's own words, oldest first; where two disagree the later holds:"
ANCHORS_HEAD = "Paths, ids, numbers, commands and errors, oldest first; where two disagree the later holds:"

# An excerpt of a shorter message would save less than its marker costs.
_WHOLE_TOKENS = 64
# A dash, a line break, and now and then a value that came later.
_ITEM_TOKENS = 6
# What a piece costs beside its text: a dash, a line break, and the eye that has to find the place again.
_PIECE_COST_CHARS = 40
# A dash, a word and a line break.
_LEAST_QUOTATION_TOKENS = 3
# Behind so many that found no room hardly any will.
_MOST_MISSES = 200
_LEAST_WORDS_TOKENS, _LEAST_ROOM_TOKENS, _LEAST_LINE_TOKENS = 32, 24, 12
# An anchor that stands in 0, 1, 2, … of the assistant's messages: what is come back to matters more, up to a point.
_USE = tuple(1 + 0.5 * math.log1p(times) for times in range(21))
_OLDEST_RATIO, _NEWEST_RATIO = 0.75, 1.25
_REPEATED_ROW_RATIO = 0.7
_DIGITS = str.maketrans("123456789", "000000000")


def ledger(
    messages: Sequence[Message],
    *,
    budget_tokens: int,
    words_tokens: int,
    count: Callable[[str], int],
    known: str = "",
    newer: Sequence[Message] = (),
    redact: Redact = redacted,
) -> str:
    """The verbatim record of `messages` in at most `budget_tokens`; "" when there is nothing or no room.

    Args:
        messages: the covered part, oldest first, without what is kept verbatim elsewhere.
        budget_tokens: bound on the whole ledger.
        words_tokens: bound on the user's own words, counted inside the budget.
        count: tokens of a text.
        known: what stays visible beside the ledger, and need not be repeated in it.
        newer: the messages behind the covered part; what a summary says changes no value, since it may be wrong.
        redact: takes secrets out of what is read, before it is cut into lines; `plain` keeps them.
    """
    messages = [without_secrets(message, redact) for message in messages]
    newer = [without_secrets(message, redact) for message in newer]
    # Our requests to go on are nobody's words.
    messages = [message for message in messages if not message.asks_to_go_on]
    latest = latest_values(_stated((*messages, *newer)))
    users = [
        position
        for position, message in enumerate(messages)
        if message.role == "user" and message.text.strip() and not is_injected(message)
    ]
    texts = [messages[position].text.strip() for position in users]
    quoted = _users_words(texts, min(words_tokens, budget_tokens), count, latest)
    words = "\n".join((WORDS_HEAD, *(quoted[index] for index in sorted(quoted)))) if quoted else ""
    room_tokens = max(budget_tokens - (count(words) if words else 0), 0)
    # What of the user's words found no room is read like the others' lines.
    shown = {users[index] for index in quoted}
    read = [message for position, message in enumerate(messages) if position not in shown]
    lines = _anchor_lines(read, room_tokens, words + known, count, latest)
    return "\n".join(section for section in (words, lines) if section)


def _stated(messages: Sequence[Message]) -> Iterator[str]:
    """What people and assistants said, oldest first, as far back as lines are read."""
    texts = [message.text[:SCANNED_PER_MESSAGE_CHARS] for message in messages if message.role in ("user", "assistant")]
    total = itertools.accumulate(map(len, reversed(texts)))
    recent = sum(chars <= SCANNED_CHARS for chars in total)
    yield from texts[len(texts) - recent :]


def _users_words(
    texts: Sequence[str], budget_tokens: int, count: Callable[[str], int], latest: Mapping[str, str]
) -> dict[int, str]:
    """The user's messages as quotations while they fit, by their number; long ones shortened, the middle ones left out.

    Args:
        texts: n, oldest first.
        budget_tokens: bound on the quotations under their head.
        count: tokens of a text.
        latest: values that hold now.
    """
    if not texts or budget_tokens < _LEAST_WORDS_TOKENS:
        return {}
    room = budget_tokens - count(WORDS_HEAD)
    # All to one common level: pasted bulk gives way first, a sentence stays whole. The task has twice the level.
    shared = room - _ITEM_TOKENS * len(texts)
    level = _WHOLE_TOKENS
    if shared > 0:
        sizes = [count(text) for text in texts]
        level = max(common_level(sizes, [2, *(1 for _ in texts[1:])], shared), level)
    quoted: dict[int, str] = {}
    misses = 0
    for index in (0, *range(len(texts) - 1, 0, -1)):
        # Of 40,000 messages only those are counted that may find room.
        if room < _LEAST_QUOTATION_TOKENS or misses > _MOST_MISSES:
            break
        text, most = texts[index], level * (1 if index else 2)
        shown = "- " + (marked(text, latest) if count(text) <= most else condensed(text, most, count))
        size = count(shown) + 1
        if size <= room:
            quoted[index] = shown
            room -= size
        else:
            misses += 1
    return quoted


def _anchor_lines(
    messages: Sequence[Message],
    budget_tokens: int,
    known: str,
    count: Callable[[str], int],
    latest: Mapping[str, str],
) -> str:
    """The lines with the most new anchors for their size, in the order of the conversation."""
    room = budget_tokens - count(ANCHORS_HEAD)
    if room < _LEAST_ROOM_TOKENS:
        return ""
    lines, used = candidates(messages)
    chooser = _Chooser(lines, used, known)
    chosen: dict[int, str] = {}
    while room >= _LEAST_LINE_TOKENS:
        index = chooser.best()
        if index is None:
            break
        text = marked(lines[index].text, latest) if lines[index].is_stated else lines[index].text
        size = count(text) + 2
        if size <= room:
            room -= size
            chosen[index] = text
            chooser.take(index)
    return "\n".join([ANCHORS_HEAD, *(f"- {chosen[index]}" for index in sorted(chosen))]) if chosen else ""


class _Chooser:
    """Gives the line that adds most for its size, again and again.

    What a line adds only shrinks as others are taken, so it is weighed anew when it comes up, and no sooner.
    """

    def __init__(self, lines: Sequence[Line], used: Mapping[str, int], known: str) -> None:
        self._lines = lines
        self._known = known
        self._seen: dict[str, bool] = {}
        self._ratios = _ratios(lines)
        # The best place where an anchor stands sets its worth; what the assistant came back to matters more.
        self._values: dict[str, float] = {}
        for line in lines:
            for anchor, weight in line.anchors.items():
                self._values[anchor] = max(self._values.get(anchor, 0.0), weight)
        for anchor, value in self._values.items():
            self._values[anchor] = value * _USE[min(used.get(anchor, 0), len(_USE) - 1)]
        self._waiting = [(-self._worth(index, self._values), index) for index in range(len(lines))]
        heapq.heapify(self._waiting)

    def best(self) -> int | None:
        """The next line, in no more than it adds beside those that were taken; None where none adds anything."""
        while self._waiting:
            _, index = heapq.heappop(self._waiting)
            worth = self._fresh_worth(index)
            if worth <= 0:
                continue
            if not self._waiting or worth >= -self._waiting[0][0]:
                return index
            heapq.heappush(self._waiting, (-worth, index))
        return None

    def take(self, index: int) -> None:
        """Notes that this line stands in the ledger."""
        self._seen.update(dict.fromkeys(self._lines[index].anchors, True))

    def _fresh_worth(self, index: int) -> float:
        line = self._lines[index]
        fresh = {anchor: self._values[anchor] for anchor in line.anchors if not self._is_seen(anchor)}
        if not fresh and line.weight <= 1:
            return 0.0
        return self._worth(index, fresh)

    def _worth(self, index: int, values: Mapping[str, float]) -> float:
        line = self._lines[index]
        value = sum(values[anchor] for anchor in line.anchors if anchor in values)
        return (value + line.weight) * self._ratios[index] / (_PIECE_COST_CHARS + len(line.text))

    def _is_seen(self, anchor: str) -> bool:
        is_seen = self._seen.get(anchor)
        if is_seen is None:
            is_seen = self._seen[anchor] = anchor in self._known
        return is_seen


def _ratios(lines: Sequence[Line]) -> list[float]:
    """How much each line counts for its place: later ones more, and of rows that differ in digits only each less."""
    rows: Counter[str] = Counter()
    found: list[float] = []
    for index in range(len(lines) - 1, -1, -1):
        row = lines[index].text.translate(_DIGITS)
        recency = _OLDEST_RATIO + (_NEWEST_RATIO - _OLDEST_RATIO) * index / len(lines)
        found.append(recency * _REPEATED_ROW_RATIO ** rows[row])
        rows[row] += 1
    found.reverse()
    return found
