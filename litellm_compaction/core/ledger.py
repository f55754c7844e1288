"""The ledger: text that survives a compaction word for word, without any model.

Messages are divided into pieces of at most a line. A piece is worth what it names (numbers, ids, paths, identifiers,
names, what is set off) that neither the prompt nor the ledger shows already, and more if it is the user's. The task is
quoted first. A third of the room is for sentences that rule something; bare names that were in use come last, many of
them if tools are called. Deterministic, in any language (names are known by their form), in time bounded by the room.
"""

from __future__ import annotations

import heapq
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from litellm_compaction.core.directives import RULE_WORTH, RULES, Sentence, news, sentences, worth
from litellm_compaction.core.forms import ends
from litellm_compaction.core.messages import Message, render_arguments, without_notices
from litellm_compaction.core.secrets import Redact, redacted
from litellm_compaction.core.stretches import divided

WORDS_HEAD = "The user's own words, oldest first; where two disagree the later holds:"
OPERATOR_HEAD = "Instructions of system messages, oldest first; where the user's words disagree these hold:"
ANCHORS_HEAD = "Paths, ids, numbers, commands and errors, oldest first; where two disagree the later holds:"
NAMES_HEAD = "Names and values that were in use, the latest last:"
_HEADS = {"user": WORDS_HEAD, "system": OPERATOR_HEAD, "developer": OPERATOR_HEAD}
# In place of what is left out of a user's message.
_GAP = "[…]"
_LEAST_ROOM_TOKENS, _ITEM_TOKENS = 32, 3
# Of a giant message the two ends are read; of all messages the newest, up to so much, and the task.
_MESSAGE_CHARS, _READ_CHARS = 20_000, 400_000
_CLAUSE_CHARS, _LINE_CHARS, _SHORT_CHARS = 120, 160, 400
_SEPARATORS = (". ", "。", "; ", "}, ", "], ", ", ", "，", "、", " ")
# What a piece costs its reader apart from its text; each better one of its message makes it count less.
_COST_CHARS, _FAIR_CHARS = 60, 160
_PASTED, _CALL, _TAKEN_UP = 0.5, 1.0, 2.0
# A name of the last few messages is up to seven times as likely as an old one.
_FRESH, _FRESH_MESSAGES, _NAME_COST_CHARS = 6.0, 5, 8
# How much more an operator's rule counts than a person's.
_ABOVE = 1e6
# Of the room, for sentences that rule something; of the rest for bare names, with tools and in chats.
_RULES_SHARE, _NAMES_SHARE, _CHAT_NAMES_SHARE = 0.35, 0.6, 0.1
# After so many that found no room hardly any will.
_MOST_MISSES, _MOST_NAMES = 200, 2_000

_WORD = re.compile(r"[^\s\"`“”„«»「」『』,;(){}\[\]<>|=*…、，；：（）【】《》]+")
_AROUND, _SENTENCE_ENDS = "'’‘.:!?。！？-–—#&~+\\/", ".!?:。！？"
_IDENTIFIER = re.compile(r"[^\W_]_\w|\w[/\\]\w|[a-z][A-Z]|\w\.[^\W\d]\w|::|^_\w|^\.{0,2}/\w|^--?\w\w|@\w")
_SPAN = re.compile(r"`([^`\n]{2,60})`|\*\*([^*\n]{2,60})\*\*|\"([^\"\n]{2,60})\"|“([^”\n]{2,60})”|「([^」\n]{2,60})」")
# Scripts that set no words apart; in Japanese, loanwords and foreign names are written in katakana.
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u9fff]")
_IN_UNSPACED = re.compile(
    r"[\u30a1-\u30fa\u30fc]{3,20}|[^\W\d_]{0,2}\d[\d.,:/-]{0,20}[^\W\d_]{0,2}|[A-Za-z0-9_./:@+-]{3,80}"
)


class _Piece(NamedTuple):
    """A piece of the message at `message`, and the weights of what it names."""

    message: int
    role: str
    text: str
    names: Mapping[str, float]
    ratio: float = 3.0
    base: float = 0.0  # Its value apart from its names.
    rule: float = 0.0  # That of a sentence that rules something.
    opens_line: bool = True

    @property
    def cost(self) -> int:
        return len(self.text) + _COST_CHARS


def ledger(
    messages: Sequence[Message],
    *,
    budget_tokens: int,
    count: Callable[[str], int],
    known: str = "",
    redact: Redact = redacted,
    task: int | None = None,
    task_tokens: int = 0,
) -> str:
    """The text of `messages` that is to survive, in at most `budget_tokens`; "" if nothing is to, or without room.

    Args:
        messages: the covered part, oldest first, without text that is kept verbatim elsewhere.
        budget_tokens: bound on all of it together, counted by `count`.
        known: stays visible in the prompt, and need not be repeated.
        redact: takes secrets out of the read text; `str` keeps them.
        task: the place of the message with the user's first words, which come before all else up to `task_tokens`; None
            if it stays visible.
    """
    # Our requests to go on are no words of the user's, and a client's additions to those are a tool's.
    asked = ((at, message) for at, message in enumerate(messages) if not message.asks_to_go_on)
    parts = [(at, part) for at, message in asked for part in divided(message)]
    if budget_tokens < _LEAST_ROOM_TOKENS or not parts:
        return ""
    task_part = next((place for place, (at, part) in enumerate(parts) if at == task and part.role == "user"), None)
    record = _Record(_pieces([part for _, part in parts], redact, task_part), known, count)
    room = budget_tokens - count(WORDS_HEAD) - count(ANCHORS_HEAD)
    room -= record.take_task(task_part, min(task_tokens, room))
    rules_room = int(_RULES_SHARE * room)
    room -= rules_room - record.take(rules_room, lambda piece: piece.rule)
    names_room = int((_NAMES_SHARE if any(part.calls for _, part in parts) else _CHAT_NAMES_SHARE) * room)
    record.take_names(names_room + record.take(room - names_room, record.news))
    # Room reckoned for marks and names, and not needed.
    record.take(budget_tokens - count(record.text()), record.news)
    # A section that opened last brought its head.
    while record.taken and count(record.text()) > budget_tokens:
        record.taken.popitem()
    return record.text()


class _Record:
    """Takes pieces, those first that add most for their size to those taken before."""

    def __init__(self, pieces: Sequence[_Piece], known: str, count: Callable[[str], int]) -> None:
        self._pieces, self._known, self._count = pieces, known, count
        self._seen, self._texts = set(named(known)), set[str]()
        # How often the assistant took a name up.
        self._times = Counter(name for piece in pieces if piece.role == "assistant" for name in piece.names)
        self._names: list[str] = []
        self.taken: dict[int, _Piece] = {}

    def take_task(self, task: int | None, room: int) -> int:
        """Takes the task from its beginning, as far as there is room, and returns the tokens of that."""
        own = [(at, piece) for at, piece in enumerate(self._pieces) if piece.message == task]
        # They are quoted in one, each new line with a mark.
        used = [0, *accumulate(self._count(f"\n  {piece.text}") for _, piece in own)]
        most = max(bisect_right(used, room) - 1, 0)
        for at, piece in own[:most]:
            self._take(at, piece)
        return used[most]

    def _take(self, at: int, piece: _Piece) -> None:
        self.taken[at] = piece
        self._texts.add(piece.text.casefold())
        self._seen.update(piece.names)

    def take(self, room: int, value: Callable[[_Piece], float]) -> int:
        """Takes the pieces that are worth most for their size, and returns the tokens that they leave of the room.

        A piece is worth less behind better ones of its message; of a repeat the last is taken. A value only shrinks as
        others are taken, so it is weighed anew when its piece comes up.
        """
        chars: Counter[int] = Counter()
        for piece in self.taken.values():
            chars[piece.message] += piece.cost
        left = [(value(piece) / piece.cost, at) for at, piece in enumerate(self._pieces) if at not in self.taken]
        waiting: list[tuple[float, int, float]] = []
        for density, at in sorted(left, reverse=True):
            piece = self._pieces[at]
            share = 1 + chars[piece.message] / _FAIR_CHARS
            waiting.append((-density / share, -at, piece.cost * share))
            chars[piece.message] += piece.cost if density else 0
        heapq.heapify(waiting)
        misses = 0
        while waiting and room > _ITEM_TOKENS and misses < _MOST_MISSES:
            before, place, cost = heapq.heappop(waiting)
            piece = self._pieces[-place]
            now = -value(piece) / cost
            if before < now < 0:
                heapq.heappush(waiting, (now, place, cost))
            elif now == 0 or piece.text in self._known or piece.text.casefold() in self._texts:
                pass
            elif (tokens := self._count(piece.text) + _ITEM_TOKENS) > room:
                misses += 1
            else:
                room -= tokens
                self._take(-place, piece)
        return room

    def news(self, piece: _Piece) -> float:
        """The value of the things that a piece alone says, more if they were taken up."""
        new = math.fsum(
            weight * (1 + _TAKEN_UP * math.log1p(self._times[name]))
            for name, weight in piece.names.items()
            if name not in self._seen
        )
        return piece.ratio * (new + piece.base) if new or not piece.names or piece.role == "user" else 0.0

    def take_names(self, room: int) -> None:
        """Takes the names that are most likely needed again and stand nowhere else: taken up, late, and short ones."""
        room -= self._count(NAMES_HEAD) + _ITEM_TOKENS
        latest = {name: piece.message for piece in self._pieces for name in piece.names}
        times, end = self._times, max(latest.values(), default=0)

        def rank(name: str) -> float:
            # A plain word is a person's name, or in German any noun; a bare figure says less.
            ratio = 0.3 if name.isalpha() and name[1:].islower() else 1.0 if any(map(str.isalpha, name)) else 0.5
            again = (1.0, 10.0, 15.0)[min(times[name], 2)]
            freshness = 1 + _FRESH / (1 + ((end - latest[name]) / _FRESH_MESSAGES) ** 2)
            return ratio * again * freshness / (_NAME_COST_CHARS + len(name))

        # A bare figure that was not taken up says nothing, what is set off in several words is no name, and "ALWAYS"
        # and "can/cannot" would order something that nobody said.
        names = (
            name
            for name in latest.keys() - self._seen
            if (name in times or any(map(str.isalpha, name)))
            and not (" " in name or any(map(RULES.fullmatch, name.casefold().split("/"))))
        )
        for name in heapq.nsmallest(_MOST_NAMES, names, key=lambda name: (-rank(name), name)):
            if (tokens := self._count(name) + 2) <= room:
                room -= tokens
                self._names.append(name)
        self._names.sort(key=lambda name: (latest[name], name))
        self._seen.update(self._names)

    def text(self) -> str:
        """The chosen lines, in the order of the conversation; the user's words as one item for each message."""
        items: dict[str, list[str]] = {WORDS_HEAD: [], OPERATOR_HEAD: [], ANCHORS_HEAD: []}
        quoted = {piece.message: "-" for _, piece in sorted(self.taken.items()) if piece.role == "user"}
        for at, piece in enumerate(self._pieces):
            text = quoted.get(piece.message, "") if piece.role == "user" else ""
            if at in self.taken and not text:
                items[_HEADS.get(piece.role, ANCHORS_HEAD)].append(f"- {piece.text}")
            elif at in self.taken:
                is_begun, is_wide = len(text) > 1 and not text.endswith(_GAP), not text[-1].isascii()
                between = "\n  " if is_begun and piece.opens_line else "" if is_begun and is_wide else " "
                quoted[piece.message] = f"{text}{between}{piece.text}"
            elif text and not text.endswith(_GAP):
                quoted[piece.message] = f"{text} {_GAP}"
        items[WORDS_HEAD] = [*quoted.values()]
        items[NAMES_HEAD] = [f"- {', '.join(self._names)}"] if self._names else []
        return "\n".join("\n".join((head, *lines)) for head, lines in items.items() if lines)


def _pieces(messages: Sequence[Message], redact: Redact, task: int | None) -> list[_Piece]:
    """The pieces of the read text, oldest first."""
    pieces: list[_Piece] = []
    chars = 0
    for at, message in reversed([*enumerate(messages)]):
        if chars < _READ_CHARS or at == task:
            pieces[:0] = _pieces_of(at, message, redact)
        chars += min(len(message.text) + sum(len(call.arguments) for call in message.calls), _MESSAGE_CHARS)
    # What was pasted has no value of its own.
    factor = news([piece.text for piece in pieces if piece.role == "user" and piece.base])
    return [
        piece._replace(base=piece.base * factor(piece.text)) if piece.role == "user" and piece.base else piece
        for piece in pieces
    ]


def _pieces_of(at: int, message: Message, redact: Redact) -> Iterator[_Piece]:
    """The pieces of a message and its calls; of a long answer or result each counts less in all that it says."""
    is_persons, is_order = message.role in _HEADS, message.is_system and len(message.text) <= _SHORT_CHARS
    text = ends(redact(without_notices(message.text)), _MESSAGE_CHARS)
    share = 1.0 if is_persons else (_SHORT_CHARS / max(len(text), _SHORT_CHARS)) ** 1.5
    lines = (Sentence(" ".join(line.split()), False, True) for line in text.splitlines())
    for sentence in sentences(text) if is_persons else lines:
        opens_line = sentence.opens_line
        for part in _divided(sentence.text, _CLAUSE_CHARS if is_persons else _LINE_CHARS):
            base = worth(part) if is_persons and not sentence.pasted else 0.0
            # An operator's rules stand above the person's.
            rule = (base >= RULE_WORTH or is_order) * base * (_ABOVE if message.is_system else 1.0)
            ratio = 2.0 if message.role == "assistant" else _PASTED if is_persons and sentence.pasted else 3.0
            yield _Piece(at, message.role, part, named(part), ratio * share, base, rule, opens_line)
            opens_line = False
    for call in message.calls:
        written = " ".join(f"{call.name}({render_arguments(redact(call.arguments))})".split())
        for part in _divided(ends(written, _MESSAGE_CHARS), _LINE_CHARS):
            yield _Piece(at, message.role, part, named(part), _CALL)


def _divided(line: str, most: int) -> Iterator[str]:
    """The pieces of a line, divided where a sentence, an item or at least a word ends."""
    while len(line) > most:
        stops = (at + len(sign) for sign in _SEPARATORS if (at := line.rfind(sign, most // 3, most)) >= 0)
        stop = next(stops, most)
        yield line[:stop].strip()
        line = line[stop:]
    if line.strip():
        yield line.strip()


def named(text: str) -> dict[str, float]:
    """Names and values in a sentence or a line, with the weight of each."""
    weights: dict[str, float] = {}
    for before, word in pairwise(["", *_WORD.findall(text)]):
        # A capital begins a sentence, too.
        opens = before[-1:] in _SENTENCE_ENDS
        weights.update((name, weight) for name, weight in _names_in(word) if weight > 1 or not opens)
    weights.update((span, 1.0) for spans in _SPAN.findall(text) for span in spans if span)
    return weights


@lru_cache(maxsize=16_384)
def _names_in(word: str) -> tuple[tuple[str, float], ...]:
    """The names in a word, ids before numbers, paths, identifiers and names. Remembered: words come back."""
    bare = word.strip(_AROUND) if len(word) <= _CLAUSE_CHARS else ""
    if not bare.isascii() and _UNSPACED.search(bare):
        return tuple((name, 2.0) for name in (*_IN_UNSPACED.findall(bare), *([bare] if "/" in bare else [])))
    if any(map(str.isdigit, bare)):
        return ((bare, 3.0 if len(bare) > 4 and any(map(str.isalpha, bare)) else 2.5),)
    if _IDENTIFIER.search(word.strip("'’‘.:!?")):
        return ((bare, 2.0 if "/" in bare else 1.5),)
    return ((bare, 1.0),) if bare[:1].isupper() and len(bare) > 2 else ()
