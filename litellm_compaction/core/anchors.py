"""The anchor ledger: what survives a compaction verbatim, without any model.

First the user's own words, because a constraint cannot be recognised by signal words (summaries keep 17 % of
side constraints, arXiv 2608.11242); then the lines that name paths, ids, numbers, commands and errors, which
summaries lose first (paths 9.8 %, numbers 1.9 % survive, deja-vu 543). Deterministic, bounded, any language.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from litellm_compaction.core.excerpts import common_level, condensed
from litellm_compaction.core.messages import Message, render_arguments, without_notices
from litellm_compaction.core.supersession import latest_values, marked

WORDS_HEAD = "The user's own words, oldest first; where two disagree the later holds:"
ANCHORS_HEAD = "Paths, ids, numbers, commands and errors, oldest first; where two disagree the later holds:"

_PIECE_CHARS = 160
# Anchors per 1,000 characters are many in logs: what is older than this many characters has only its user's words.
_SCANNED_CHARS = 120_000
# Of one giant result the two ends say what it was and how it came out; the rest must not hide older messages.
_SCANNED_PER_MESSAGE_CHARS = 12_000
_ANCHORS_PER_PIECE = 24
# A shorter line without an anchor ("So the plan is:") states nothing.
_LEAST_STATEMENT_CHARS = 30
# An excerpt of a shorter message would save less than its marker costs.
_WHOLE_TOKENS = 64
# A dash, a line break, and now and then a value that came later.
_ITEM_TOKENS = 6
# What a piece costs beside its text: a dash, a line break, and the eye that has to find the place again.
_PIECE_COST_CHARS = 40

# What makes a piece worth keeping, best first where two begin at the same place. Every repetition is bounded, so that
# hostile text costs linear time.
_KINDS: tuple[tuple[str, float], ...] = (
    (r"\b[\w.]{0,60}(?:Error|Exception|Warning|Fault|Failure|Panic)\b(?::[^\n]{0,80})?", 3.0),
    (r"\bhttps?://[^\s\"'<>)\]]{1,200}", 2.0),
    (r"(?:[\w.@~-]{0,60}/){1,16}[\w.@-]{1,80}\.\w{1,8}\b(?::\d{1,9})?", 2.5),
    (r"(?<![\w/.])/(?:[\w.@-]{1,60}/){1,16}[\w.@-]{1,80}", 2.0),
    (
        r"\b[\w-]{1,80}\.(?:py|js|ts|tsx|c|h|cc|cpp|rs|go|java|md|json|ya?ml|toml|txt|sh|sql|html|css|pony)\b",
        2.0,
    ),
    (r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2})?)?", 0.8),
    (r"\"[\w-]{1,40}\": ?-?\d[\d.,]{0,20}\d\b", 1.2),
    (r"\b(?=[A-Z0-9]{0,40}\d)(?=[A-Z0-9]{0,40}[A-Z])[A-Z0-9]{5,40}\b", 3.0),
    (r"\b(?=[0-9a-f]{0,40}[a-f])(?=[0-9a-f]{0,40}\d)[0-9a-f]{7,40}\b", 1.5),
    (r"\b[a-zA-Z]\w{0,40}_\w{1,60}(?:\(\))?", 1.2),
    (r"\b[a-z]{1,40}(?:[A-Z][a-z0-9]{1,40}){1,8}\b", 1.0),
    (r"\$ ?\d[\d,]{0,20}(?:\.\d{1,6})?|\b\d[\d,]{0,20}(?:\.\d{1,6})?\s?(?:%|[kKMG]i?B\b|ms\b|s\b)?", 0.8),
)
_ANCHOR = re.compile("|".join(f"({pattern})" for pattern, _ in _KINDS))
_WEIGHTS = tuple(weight for _, weight in _KINDS)
# Where a long line is divided: behind a sentence, an item, a word.
_SEPARATORS = (". ", "。", "; ", "}, ", "], ", ", ", " ")
# Who says it: an assistant's words tell what mattered, a listing names everything.
_ASSISTANT, _CALL, _RESULT = 1.6, 1.2, 0.6
_FAILURE = re.compile(
    r"\b(?:error|failed|failure|fatal|traceback|segfault|assert\w*|cannot|could not|denied)\b", re.IGNORECASE
)
_DECISION = re.compile(
    r"\b(?:decid\w+|instead|because|therefore|must|should|will use|let'?s|need to|fix(?:ed|es)?|root cause|"
    r"the (?:issue|problem|bug)|conclu\w+|plan)\b|决定|因为|必须|应该|错误|计划|准备",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    anchors: dict[str, float]
    weight: float
    is_stated: bool


def ledger(
    messages: Sequence[Message],
    *,
    budget_tokens: int,
    words_tokens: int,
    count: Callable[[str], int],
    known: str = "",
) -> str:
    """The verbatim record of `messages` in at most `budget_tokens`; "" when there is nothing or no room.

    Args:
        messages: the covered part, oldest first, without what is kept verbatim elsewhere.
        budget_tokens: bound on the whole ledger.
        words_tokens: bound on the user's own words, counted inside the budget.
        count: tokens of a text.
        known: what stays visible beside the ledger, and need not be repeated in it.
    """
    latest = latest_values(_stated(messages, known))
    words = _users_words(messages, min(words_tokens, budget_tokens), count, latest)
    used = count(words) if words else 0
    lines = _anchor_lines(messages, max(budget_tokens - used, 0), words + known, count, latest)
    return "\n".join(section for section in (words, lines) if section)


def _stated(messages: Sequence[Message], known: str) -> Iterator[str]:
    """What people and assistants said in the covered part, and all that stays beside it, which is newer."""
    for message in messages:
        if message.role in ("user", "assistant"):
            yield message.text[:_SCANNED_PER_MESSAGE_CHARS]
    yield known[:_SCANNED_PER_MESSAGE_CHARS]


def _users_words(
    messages: Sequence[Message], budget_tokens: int, count: Callable[[str], int], latest: Mapping[str, str]
) -> str:
    """Every user message, oldest first, while they fit; long ones shortened, the middle ones left out first."""
    texts = [text for message in messages if message.role == "user" and (text := message.text.strip())]
    if not texts or budget_tokens < 32:
        return ""
    head = WORDS_HEAD
    room = budget_tokens - count(head)
    # All to one common level: pasted bulk gives way first, a sentence stays whole. The task has twice the level.
    weights = [2, *(1 for _ in texts[1:])]
    sizes = [count(text) for text in texts]
    level = max(common_level(sizes, weights, room - _ITEM_TOKENS * len(texts)), _WHOLE_TOKENS)
    quoted = [
        "- " + (marked(text, latest) if size <= level * weight else condensed(text, level * weight, count))
        for text, size, weight in zip(texts, sizes, weights, strict=True)
    ]
    sizes = [count(line) + 1 for line in quoted]
    kept = {0} if sizes[0] <= room else set()
    room -= sizes[0] if kept else 0
    for index in range(len(quoted) - 1, 0, -1):
        if sizes[index] <= room:
            kept.add(index)
            room -= sizes[index]
    lines = [quoted[index] for index in sorted(kept)]
    return "\n".join([head, *lines]) if lines else ""


def _anchor_lines(
    messages: Sequence[Message],
    budget_tokens: int,
    known: str,
    count: Callable[[str], int],
    latest: Mapping[str, str],
) -> str:
    """The lines with the most new anchors for their size, in the order of the conversation."""
    head = ANCHORS_HEAD
    room = budget_tokens - count(head)
    if room < 24:
        return ""
    lines = _candidates(messages)
    spread = Counter(anchor for line in lines for anchor in line.anchors)
    # An anchor that comes back matters more, up to a point; the best place where it stands sets its worth.
    values: dict[str, float] = {}
    for line in lines:
        for anchor, weight in line.anchors.items():
            values[anchor] = max(values.get(anchor, 0.0), weight)
    for anchor, times in spread.items():
        values[anchor] *= 1 + 0.3 * math.log(min(times, 20))
    seen = {anchor for anchor in spread if anchor in known}

    def worth(index: int) -> float:
        line = lines[index]
        fresh = [anchor for anchor in line.anchors if anchor not in seen]
        if not fresh and line.weight <= 1:
            return 0.0
        value = sum(values[anchor] for anchor in fresh)
        recency = 0.75 + 0.5 * index / len(lines)
        return (value + line.weight) * recency / (_PIECE_COST_CHARS + len(line.text))

    chosen: dict[int, str] = {}
    for index in sorted(range(len(lines)), key=lambda index: (-worth(index), index)):
        if room < 12:
            break
        text = marked(lines[index].text, latest) if lines[index].is_stated else lines[index].text
        size = count(text) + 2
        if size <= room and worth(index) > 0.0:
            room -= size
            chosen[index] = text
            seen.update(lines[index].anchors)
    return "\n".join([head, *(f"- {chosen[index]}" for index in sorted(chosen))]) if chosen else ""


def _candidates(messages: Sequence[Message]) -> list[_Line]:
    found: list[_Line] = []
    scanned = 0
    seen: set[str] = set()
    # Newest first, so that the bound on scanned text drops the oldest and a repeated line keeps its latest place.
    for message in reversed(messages):
        for text, role_weight in reversed(list(_lines(message))):
            scanned += len(text)
            if scanned > _SCANNED_CHARS:
                break
            shown = " ".join(text.split())
            if len(shown) < 4 or shown in seen:
                continue
            seen.add(shown)
            anchors = _anchors_in(shown, role_weight)
            signal = (1.5 if _FAILURE.search(shown) else 0.0) + (role_weight if _DECISION.search(shown) else 0.0)
            if anchors or (signal > 1 and len(shown) >= _LEAST_STATEMENT_CHARS):
                found.append(_Line(shown, anchors, signal * role_weight, message.role == "assistant"))
    found.reverse()
    return found


def _lines(message: Message) -> Iterator[tuple[str, float]]:
    """The pieces of a message with the weight of who said them; the user's words have their own section."""
    if message.role == "assistant":
        yield from ((piece, _ASSISTANT) for piece in _pieces(without_notices(message.text)))
        for call in message.calls:
            yield from ((piece, _CALL) for piece in _pieces(f"{call.name}({render_arguments(call.arguments)})"))
    elif message.role != "user":
        yield from ((piece, _RESULT) for piece in _pieces(message.text))


def _pieces(text: str) -> Iterator[str]:
    """The lines of a text, long ones divided where a sentence, an item or at least a word ends."""
    if len(text) > _SCANNED_PER_MESSAGE_CHARS:
        half = _SCANNED_PER_MESSAGE_CHARS // 2
        text = f"{text[:half]}\n{text[-half:]}"
    for line in text.splitlines():
        start = 0
        while len(line) - start > _PIECE_CHARS:
            end = start + _PIECE_CHARS
            for separator in _SEPARATORS:
                at = line.rfind(separator, start + _PIECE_CHARS // 3, end)
                if at >= 0:
                    end = at + len(separator)
                    break
            yield line[start:end]
            start = end
        yield line[start:]


def _anchors_in(piece: str, role_weight: float) -> dict[str, float]:
    """The anchors of a piece with their weights."""
    found: dict[str, float] = {}
    for match in _ANCHOR.finditer(piece):
        anchor = match[0]
        if len(anchor) >= 2 and match.lastindex is not None:
            found[anchor] = _WEIGHTS[match.lastindex - 1] * role_weight
            if len(found) >= _ANCHORS_PER_PIECE:
                break
    return found
