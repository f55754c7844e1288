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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from litellm_compaction.core.directives import RULE_WORDS, Sentence, Talk, sentences
from litellm_compaction.core.forms import state_calls, state_texts
from litellm_compaction.core.messages import Message, render_arguments, without_notices
from litellm_compaction.core.secrets import Redact, redactor
from litellm_compaction.core.stretches import divided

WORDS_HEAD = "The user's own words, oldest first; where two disagree the later holds:"
OPERATOR_HEAD = "Instructions of system messages, oldest first; where the user's words disagree these hold:"
NAMES_HEAD = "Names and values that were in use, the latest last:"
ANCHORS_HEAD = "Paths, ids, numbers, commands and errors, oldest first; where two disagree the later holds:"
_HEADS = {"user": WORDS_HEAD, "system": OPERATOR_HEAD, "developer": OPERATOR_HEAD}
_RANKS = {"user": 2, "system": 1, "developer": 1}
_REDACTOR = redactor(())
# In place of what is left out of a user's message.
_GAP = "[…]"
_LEAST_ROOM_TOKENS = 32
# Of one giant message the two ends are read; of all messages the newest, up to so much.
_READ_PER_MESSAGE_CHARS, _READ_PER_WORDS_CHARS, _READ_CHARS = 12_000, 40_000, 400_000
# In UTF-8, so that a piece holds about as many tokens in any script.
_CLAUSE_BYTES, _LINE_BYTES = 120, 160
_SEPARATORS = (". ", "。", "; ", "}, ", "], ", ", ", "，", "、", " ")
# A piece's cost to its reader apart from its text.
_PIECE_COST_BYTES, _ITEM_TOKENS = 60, 3
# By writer. Long answers and results count less in all that they say.
_USER, _RESULT, _ASSISTANT, _CALL, _PASTED = 3.0, 3.0, 2.0, 1.0, 0.5
_SHORT_CHARS, _LEAST_BREVITY = 400, 0.05
# Of the room, for sentences that rule something; of the rest for bare names, with tools and in chats.
_RULES_SHARE, _NAMES_SHARE, _CHAT_NAMES_SHARE = 0.35, 0.6, 0.1
# Each piece taken of a message halves what its others count by so much of it.
_FAIR_BYTES = 160
# How much more a thing counts for being taken up, and how likely a name is then needed again; a bare figure and a plain
# word are less likely, and what was named in the last few messages up to seven times as likely.
_TAKEN_UP, _AGAIN = 2.0, (1.0, 10.0, 15.0)
_NUMBER_RATIO, _PLAIN_RATIO = 0.5, 0.3
_FRESH, _FRESH_MESSAGES, _NAME_COST_CHARS = 6.0, 5, 8
# After so many that found no room hardly any will.
_MOST_MISSES, _MOST_NAMES = 200, 2_000

_ID, _NUMBER, _PATH, _IDENTIFIER, _NAME = 3.0, 2.5, 2.0, 1.5, 1.0
_MOST_WORD_CHARS = 120
_WORD = re.compile(r"[^\s\"`“”„«»「」『』,;(){}\[\]<>|=*…、，；：（）【】《》]+")
_AROUND, _SENTENCE_ENDS = "'’‘.:!?。！？-–—#&~+\\/", ".!?:。！？"
_IDENTIFIER_SIGN = re.compile(r"[^\W_]_\w|\w[/\\]\w|[a-z][A-Z]|\w\.[^\W\d]\w|::|^_\w|^\.{0,2}/\w|^--?\w\w|@\w")
_SPAN = re.compile(r"`([^`\n]{2,60})`|\*\*([^*\n]{2,60})\*\*|\"([^\"\n]{2,60})\"|“([^”\n]{2,60})”|「([^」\n]{2,60})」")
# Scripts that set no words apart; in Japanese, loanwords and foreign names are written in katakana.
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u9fff]")
_IN_UNSPACED = re.compile(
    r"[\u30a1-\u30fa\u30fc]{3,20}|[^\W\d_]{0,2}\d[\d.,:/-]{0,20}[^\W\d_]{0,2}|[A-Za-z0-9_./:@+-]{3,80}"
)


class _Piece(NamedTuple):
    """A piece of the message at `message`, the one at `place` there, and the weights of what it names."""

    message: int
    place: int
    role: str
    text: str
    names: Mapping[str, float]
    # How much it counts for its writer, its value apart from its names, and that of a sentence that rules something.
    ratio: float
    base: float = 0.0
    rule: float = 0.0
    opens_line: bool = True

    @property
    def cost_bytes(self) -> int:
        return _bytes(self.text) + _PIECE_COST_BYTES


def ledger(
    messages: Sequence[Message],
    *,
    budget_tokens: int,
    count: Callable[[str], int],
    known: str = "",
    redact: Redact = _REDACTOR,
    task: int | None = None,
    task_tokens: int = 0,
) -> str:
    """The text of `messages` that is to survive, in at most `budget_tokens`; "" if nothing is to, or without room.

    Args:
        messages: the covered part, oldest first, without text that is kept verbatim elsewhere.
        budget_tokens: bound on all of it together.
        count: tokens of a text.
        known: stays visible in the prompt, and need not be repeated.
        redact: takes secrets out of the read text; `plain` keeps them.
        task: the place of the message with the user's first words; None if it stays visible.
        task_tokens: bound on those words, which come before all else.
    """
    parts: list[Message] = []
    task_part: int | None = None
    for at, message in enumerate(messages):
        # Our requests to go on are no words of the user's, and a client's additions to those are a tool's.
        if not message.asks_to_go_on:
            parts += divided(message)
            task_part = len(parts) - 1 if at == task and parts[-1].role == "user" else task_part
    if budget_tokens < _LEAST_ROOM_TOKENS or not parts:
        return ""
    selection = _Selection(_pieces(parts, redact, task_part), known, count)
    selection.fill(budget_tokens, task_part, task_tokens, has_tools=any(message.calls for message in parts))
    return selection.text()


class _Selection:
    """Takes pieces, those first that add most for their size to those taken before."""

    def __init__(self, pieces: Sequence[_Piece], known: str, count: Callable[[str], int]) -> None:
        self._pieces = pieces
        self._known = known
        self._count = count
        self._seen = set(named(known))
        self._taken: dict[int, _Piece] = {}
        self._taken_bytes: Counter[int] = Counter()
        self._names: list[str] = []
        said = [piece for piece in pieces if piece.role == "assistant"]
        # How often the assistant took a name up, and how much that says: in a short message more.
        self._times = Counter(name for piece in said for name in piece.names)
        self._use: defaultdict[str, float] = defaultdict(float)
        chars: Counter[int] = Counter()
        for piece in said:
            chars[piece.message] += len(piece.text)
        for piece in said:
            for name in piece.names:
                self._use[name] += min(1.0, _SHORT_CHARS / chars[piece.message])

    def fill(self, budget_tokens: int, task: int | None, task_tokens: int, *, has_tools: bool) -> None:
        room = budget_tokens - self._count(WORDS_HEAD) - self._count(ANCHORS_HEAD)
        room -= self._take_task(task, min(task_tokens, room))
        rules_room = left = int(_RULES_SHARE * room)
        left = self._take(left, lambda piece: 0.0 if piece.role == "user" else piece.rule)
        left = self._take(left, lambda piece: piece.rule)
        room -= rules_room - left
        names_room = int((_NAMES_SHARE if has_tools else _CHAT_NAMES_SHARE) * room)
        room = self._take(room - names_room, self._news)
        self._take_names(names_room + room)
        # Room reckoned for marks and names, and not needed.
        self._take(budget_tokens - self._count(self.text()), self._news)
        # A section that opened last brought its head.
        while self._taken and self._count(self.text()) > budget_tokens:
            self._taken.popitem()

    def text(self) -> str:
        """The chosen lines, in the order of the conversation; the user's words as one item for each message."""
        items: dict[str, list[str]] = {WORDS_HEAD: [], OPERATOR_HEAD: [], ANCHORS_HEAD: []}
        words: defaultdict[int, list[_Piece]] = defaultdict(list)
        for _, piece in sorted(self._taken.items()):
            if piece.role == "user":
                words[piece.message].append(piece)
            else:
                items[_HEADS.get(piece.role, ANCHORS_HEAD)].append(f"- {piece.text}")
        last = {piece.message: piece.place for piece in self._pieces if piece.role == "user"}
        items[WORDS_HEAD] = [_quotation(pieces, last[message]) for message, pieces in words.items()]
        items[NAMES_HEAD] = [f"- {', '.join(self._names)}"] if self._names else []
        return "\n".join("\n".join((head, *lines)) for head, lines in items.items() if lines)

    def _take_task(self, task: int | None, room: int) -> int:
        """Takes the task from its beginning, as far as there is room, and returns the tokens of that."""
        used = 0
        for at, piece in enumerate(self._pieces):
            if piece.message == task:
                # They are quoted in one, each new line with a mark.
                tokens = self._count(f"\n  {piece.text}")
                if used + tokens > room:
                    break
                used += tokens
                self._taken[at] = piece
                self._seen.update(piece.names)
        return used

    def _take(self, room: int, value: Callable[[_Piece], float]) -> int:
        """Takes the pieces that are worth most for their size, and returns the tokens that they leave of the room.

        A piece's value only shrinks as others are taken, so it is weighed anew when it comes up.
        """

        def worth(piece: _Piece) -> float:
            return value(piece) / (1 + self._taken_bytes[piece.message] / _FAIR_BYTES) / piece.cost_bytes

        waiting = [(-worth(piece), at) for at, piece in enumerate(self._pieces) if at not in self._taken]
        heapq.heapify(waiting)
        misses = 0
        while waiting and room > _ITEM_TOKENS and misses < _MOST_MISSES:
            before, at = heapq.heappop(waiting)
            piece = self._pieces[at]
            now = worth(piece)
            if now <= 0 or piece.text in self._known:
                continue
            if now < -before:
                heapq.heappush(waiting, (-now, at))
                continue
            tokens = self._count(piece.text) + _ITEM_TOKENS
            if tokens > room:
                misses += 1
                continue
            room -= tokens
            self._taken[at] = piece
            self._taken_bytes[piece.message] += piece.cost_bytes
            self._seen.update(piece.names)
        return room

    def _news(self, piece: _Piece) -> float:
        """The value of the things that a piece alone says."""
        new = math.fsum(
            weight * (1 + _TAKEN_UP * math.log1p(self._use.get(name, 0.0)))
            for name, weight in piece.names.items()
            if name not in self._seen
        )
        is_old = not new and piece.names and piece.role != "user"
        return 0.0 if is_old else piece.ratio * (new + piece.base)

    def _take_names(self, room: int) -> None:
        """Takes the names that are most likely needed again and stand nowhere else: taken up, late, and short ones."""
        room -= self._count(NAMES_HEAD) + _ITEM_TOKENS
        latest = {name: piece.message for piece in self._pieces for name in piece.names}
        times, end = self._times, max(latest.values(), default=0)

        def rank(name: str) -> float:
            # A plain word is a person's name, or in German any noun.
            is_plain = name.isalpha() and name[1:] == name[1:].lower()
            ratio = _PLAIN_RATIO if is_plain else 1.0 if any(map(str.isalpha, name)) else _NUMBER_RATIO
            freshness = 1 + _FRESH / (1 + ((end - latest[name]) / _FRESH_MESSAGES) ** 2)
            return ratio * _AGAIN[min(times[name], 2)] * freshness / (_NAME_COST_CHARS + len(name))

        # A bare figure that was not taken up says nothing, what is set off in several words is no name, and "ALWAYS"
        # and "can/cannot" would order something that nobody said.
        names = [
            name
            for name in latest.keys() - self._seen
            if (name in times or any(map(str.isalpha, name)))
            and " " not in name
            and RULE_WORDS.isdisjoint(name.casefold().split("/"))
        ]
        for name in heapq.nsmallest(_MOST_NAMES, names, key=lambda name: (-rank(name), name)):
            tokens = self._count(name) + 2
            if tokens <= room:
                room -= tokens
                self._names.append(name)
        self._names.sort(key=lambda name: (latest[name], name))
        self._seen.update(self._names)


def _quotation(pieces: Sequence[_Piece], last: int) -> str:
    shown = [f"- {pieces[0].text}" if pieces[0].place == 0 else f"- {_GAP} {pieces[0].text}"]
    for before, piece in pairwise(pieces):
        is_next, is_spaced = piece.place == before.place + 1, before.text[-1:].isascii()
        shown += ("\n  " if piece.opens_line else f" {_GAP} " if not is_next else " " if is_spaced else "", piece.text)
    return "".join((*shown, f" {_GAP}" if pieces[-1].place < last else ""))


def _pieces(messages: Sequence[Message], redact: Redact, task: int | None) -> list[_Piece]:
    """The pieces of the read text, oldest first; of a repeat the user's stays, then an operator's, the last of them."""
    states = state_calls(messages)
    # They say again what their call says.
    echoes = {messages[at].calls[place].id for at, place in states}
    read = [
        (at, _cleaned(messages[at], redact))
        for at in _read(messages, task)
        if messages[at].role != "tool" or messages[at].call_id not in echoes
    ]
    said = {
        at: list(sentences(_ends(message.text, _READ_PER_WORDS_CHARS)))
        for at, message in read
        if message.role in _HEADS
    }
    talk = Talk(each.text for at, message in read if message.role == "user" for each in said[at] if not each.pasted)
    pieces = [
        piece
        for at, message in read
        for piece in (_clauses(at, message, said[at], talk) if at in said else _lines(at, message, states))
    ]
    ranked = sorted(pieces, key=lambda piece: (piece.message == task, _RANKS.get(piece.role, 0)))
    last = {piece.text.casefold(): piece for piece in ranked}
    # The task stays whole, whatever it says twice.
    return [piece for piece in pieces if piece.message == task or last[piece.text.casefold()] is piece]


def _cleaned(message: Message, redact: Redact) -> Message:
    text = without_notices(message.text) if message.role == "assistant" else message.text
    calls = (replace(call, arguments=redact(call.arguments)) for call in message.calls)
    return replace(message, text=redact(text), calls=tuple(calls))


def _read(messages: Sequence[Message], task: int | None) -> list[int]:
    """The newest messages, up to so much text, and the task."""
    chars, start = 0, len(messages)
    while start > 0 and chars <= _READ_CHARS:
        start -= 1
        message = messages[start]
        most_chars = _READ_PER_WORDS_CHARS if message.role == "user" else _READ_PER_MESSAGE_CHARS
        chars += min(len(message.text) + sum(len(call.arguments) for call in message.calls), most_chars)
    return [*([task] if task is not None and task < start else []), *range(start, len(messages))]


def _clauses(at: int, message: Message, parts: Sequence[Sentence], talk: Talk) -> Iterator[_Piece]:
    """The pieces of a person's or an operator's words."""
    is_order = message.is_system and len(message.text) <= _SHORT_CHARS
    talk = Talk() if message.is_system else talk
    place = 0
    for sentence in parts:
        for number, text in enumerate(filter(None, _divided(sentence.text, _CLAUSE_BYTES))):
            worth, is_rule = (0.0, False) if sentence.pasted else talk.weight(text)
            ratio = _PASTED if sentence.pasted else _USER
            rule = worth if is_rule or is_order else 0.0
            opens_line = sentence.opens_line and not number
            yield _Piece(at, place, message.role, text, named(text), ratio, worth, rule, opens_line)
            place += 1


def _lines(at: int, message: Message, states: Mapping[tuple[int, int], bool]) -> Iterator[_Piece]:
    """The pieces of an answer and its calls, or of a result."""
    text = _ends(message.text, _READ_PER_MESSAGE_CHARS)
    ratio = _ASSISTANT if message.role == "assistant" else _RESULT
    ratio *= max((_SHORT_CHARS / max(len(message.text), _SHORT_CHARS)) ** 1.5, _LEAST_BREVITY)
    lines = [(part, ratio, 0.0) for line in text.splitlines() for part in _divided(" ".join(line.split()), _LINE_BYTES)]
    for number, call in enumerate(message.calls):
        written = " ".join(f"{call.name}({_ends(render_arguments(call.arguments), _READ_PER_MESSAGE_CHARS)})".split())
        is_newest = states.get((at, number))
        if is_newest is None:
            lines += [(part, _CALL, 0.0) for part in _divided(written, _LINE_BYTES)]
        elif is_newest and len(call.arguments) <= _READ_PER_MESSAGE_CHARS:
            # A part of a state, or an older one, would say what is not so.
            lines.append((written, _RESULT, float(len(state_texts(call)))))
    for place, (line, weight, base) in enumerate(lines):
        if len(line) > len(_GAP):
            yield _Piece(at, place, message.role, line, named(line), weight, base)


def _divided(line: str, most_bytes: int) -> Iterator[str]:
    """The pieces of a line, divided where a sentence, an item or at least a word ends."""
    most = max(most_bytes * len(line) // max(_bytes(line), 1), 1)
    start = 0
    while len(line) - start > most:
        least, end = start + most // 3, start + most
        ends = (at + len(sign) for sign in _SEPARATORS if (at := line.rfind(sign, least, end)) >= 0)
        stop = next(ends, end)
        yield line[start:stop].strip()
        start = stop
    yield line[start:].strip()


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _ends(text: str, most_chars: int) -> str:
    half = most_chars // 2
    return text if len(text) <= most_chars else f"{text[:half]}\n{text[-half:]}"


def named(text: str) -> dict[str, float]:
    """Names and values in a sentence or a line, with the weight of each."""
    words = ["", *_WORD.findall(text)]
    weights: dict[str, float] = {}
    for before, word in pairwise(words):
        # A capital begins a sentence, too.
        opens = before[-1:] in _SENTENCE_ENDS
        weights.update((name, weight) for name, weight in _names_in(word) if weight != _NAME or not opens)
    weights.update((span, _NAME) for spans in _SPAN.findall(text) for span in spans if span)
    return weights


@lru_cache(maxsize=16_384)
def _names_in(word: str) -> tuple[tuple[str, float], ...]:
    """The names in a word, with their weights. Remembered: words come back."""
    bare = word.strip(_AROUND)
    if not bare or len(bare) > _MOST_WORD_CHARS:
        return ()
    if not bare.isascii() and _UNSPACED.search(bare):
        return tuple((name, _PATH) for name in (*_IN_UNSPACED.findall(bare), *([bare] if "/" in bare else [])))
    if any(map(str.isdigit, bare)):
        return ((bare, _ID if len(bare) > 4 and any(map(str.isalpha, bare)) else _NUMBER),)
    if _IDENTIFIER_SIGN.search(word.strip("'’‘.:!?")):
        return ((bare, _PATH if "/" in bare else _IDENTIFIER),)
    return ((bare, _NAME),) if bare[0].isupper() and len(bare) > 2 else ()
