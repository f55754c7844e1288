"""The ledger: text that survives a compaction word for word, without any model.

Messages are divided into pieces of at most a line. A piece is worth what it names (numbers with the words next to them,
ids, paths, identifiers, names, what is set off) that neither the prompt nor the ledger shows already, and more if it is
the user's. Breadth goes before depth: each piece taken of a message makes its others count less. The task
is quoted first, whole if it has room. A third of the room is for sentences that rule or decide something, those of
system messages in mid-conversation before the user's. Names that were in use follow as a bare list, a long one if tools
are called: the next call takes them up again.

Deterministic, in any language (what names something is a matter of its form), in time bounded by the room. Measured by
`benchmarks/quality/compaction.py`, on conversations that nothing was tuned on.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from litellm_compaction.core.directives import RULE_WORDS, Sentence, Talk, sentences
from litellm_compaction.core.forms import state_calls, state_texts
from litellm_compaction.core.messages import Message, render_arguments, without_notices
from litellm_compaction.core.names import NUMBER, is_number, name_of, named
from litellm_compaction.core.secrets import Redact, redactor
from litellm_compaction.core.stretches import divided

WORDS_HEAD = "The user's own words, oldest first; where two disagree the later holds:"
OPERATOR_HEAD = "Instructions of system messages, oldest first; where the user's words disagree these hold:"
NAMES_HEAD = "Names and values that were in use, the latest last:"
ANCHORS_HEAD = "Paths, ids, numbers, commands and errors, oldest first; where two disagree the later holds:"
# In place of a stretch that is left out of a user's message.
_GAP = "[…]"
_REDACTOR = redactor(())
_LEAST_ROOM_TOKENS = 32
# Of one giant message the two ends say what it was and how it came out.
_READ_PER_MESSAGE_CHARS, _READ_PER_WORDS_CHARS, _READ_PER_CALL_CHARS = 12_000, 40_000, 4_000
# The newest are read, up to so much.
_READ_CHARS = 400_000
# In UTF-8, so that a piece holds about as many tokens in any script. A clause of a person's says one thing (with 160
# three questions of a hundred less), a line of output needs its end.
_CLAUSE_BYTES, _LINE_BYTES = 120, 160
# A long line is divided after a sentence, an item, a word.
_SEPARATORS = (". ", "。", "; ", "}, ", "], ", ", ", "，", "、", " ")
_LEAST_LINE_CHARS = 4
# A piece's cost to its reader apart from its text.
_PIECE_COST_BYTES = 60
# A dash, a line break or a mark.
_ITEM_TOKENS = 3
# By writer. Messages of more characters count less in all that they say: an answer of 2,000 a tenth.
_USER, _RESULT, _ASSISTANT, _CALL, _PASTED = 3.0, 3.0, 2.0, 1.0, 0.5
_SHORT_CHARS, _LEAST_BREVITY = 400, 0.05
# A bare number in a tool's output is mostly a line's.
_RESULT_NUMBER = 1.0
# Of the room: for sentences with a word that makes rules (without it every second of them is lost; with more,
# questions for values lose what rules gain), for bare names if tools are called (0.5 to 0.7 are the same), and in
# chats (none loses .03 of the next answer's names, a seventh loses .03 of the questions).
_RULES_SHARE, _NAMES_SHARE, _CHAT_NAMES_SHARE = 0.35, 0.6, 0.1
# The first sentence of a person's message says what it is about.
_OPENING = 1.3
# Each piece taken of a message halves what its others count by so much of it.
_FAIR_BYTES = 160
# How much more a thing counts for each time that a short message of the assistant's names it (logarithmically).
_REUSE = 2.0
# Of rows of an output that differ in their digits only, each older one counts so much of the next.
_ROW_RATIO = 0.7
_DIGITS = str.maketrans("123456789", "000000000")
# After so many that found no room hardly any will.
_MOST_MISSES = 200
# A longer line that ends in a colon says something by itself.
_MOST_ANNOUNCING_CHARS = 100
# How likely a name is needed again that stands in 0, 1, or more of the assistant's messages; a bare figure is half as
# likely, a plain word less; and up to seven times as likely if it was named in the last few messages.
_AGAIN = (1.0, 10.0, 15.0)
_NUMBER_RATIO, _PLAIN_RATIO = 0.5, 0.3
_FRESH, _FRESH_MESSAGES = 6.0, 5
_NAME_COST_CHARS = 8
_MOST_NAMES, _LEAST_NAME_TOKENS = 2_000, 3


class _Piece(NamedTuple):
    """A piece of the message at `message`, the one at `place` there, with the weights of what it names."""

    message: int
    place: int
    text: str
    size_bytes: int
    names: Mapping[str, float]
    # Its value apart from its names.
    base: float
    # How much it counts for its writer.
    ratio: float
    # Of the user's words, to be quoted, or of a system message.
    is_words: bool = False
    is_operators: bool = False
    # 0 for a sentence that does not rule anything.
    rule: float = 0.0
    opens_line: bool = True


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
            task_part = len(parts) - 1 if at == task and _is_words(parts[-1]) else task_part
    if budget_tokens < _LEAST_ROOM_TOKENS or not parts:
        return ""
    return _Selection(parts, redact, known, budget_tokens, count, task_part, task_tokens).text()


class _Selection:
    """Takes pieces, those first that add most for their size to those taken before."""

    def __init__(
        self,
        messages: Sequence[Message],
        redact: Redact,
        known: str,
        budget_tokens: int,
        count: Callable[[str], int],
        task: int | None,
        task_tokens: int,
    ) -> None:
        self._messages = messages
        self._task = task
        self._task_tokens = task_tokens
        self._pieces = _pieces(messages, redact, task)
        self._known = known
        self._budget_tokens = budget_tokens
        self._count = count
        self._seen = set(named(known))
        self._taken: dict[int, _Piece] = {}
        self._taken_bytes: Counter[int] = Counter()
        self._names: list[str] = []
        self._named_by_assistant: Counter[str] = Counter()
        self._ages: dict[str, int] = {}
        self._use = self._uses()
        self._fill()

    def _fill(self) -> None:
        room = self._budget_tokens - self._count(WORDS_HEAD) - self._count(ANCHORS_HEAD)
        room -= self._take_task(min(self._task_tokens, room))
        rules_room = left = int(_RULES_SHARE * room)
        for is_operators in (True, False):
            rules = (at for at, each in enumerate(self._pieces) if each.rule and each.is_operators is is_operators)
            left = self._take(rules, left, self._rules)
        room -= rules_room - left
        has_tools = any(message.calls for message in self._messages)
        names_room = int((_NAMES_SHARE if has_tools else _CHAT_NAMES_SHARE) * room)
        room = self._take(range(len(self._pieces)), room - names_room, self._says)
        self._take_names(names_room + room)
        # Room reckoned for marks and names, and not needed.
        self._take(range(len(self._pieces)), self._budget_tokens - self._count(self.text()), self._says)
        # A section that opened last brought its head.
        while self._taken and self._count(self.text()) > self._budget_tokens:
            self._taken.popitem()

    def _take_task(self, room: int) -> int:
        """Takes the task from its beginning, as far as there is room, and returns the tokens of that."""
        used = 0
        for index, piece in enumerate(self._pieces):
            if piece.message == self._task:
                # They are quoted in one, each new line with a mark.
                tokens = self._count(f"\n  {piece.text}")
                if used + tokens > room:
                    break
                used += tokens
                self._taken[index] = piece
                self._seen.update(piece.names)
        return used

    def text(self) -> str:
        """The chosen lines, in the order of the conversation."""
        taken = [self._taken[index] for index in sorted(self._taken)]
        lines = [f"- {piece.text}" for piece in taken if not (piece.is_words or piece.is_operators)]
        orders = [f"- {piece.text}" for piece in taken if piece.is_operators]
        names = [f"- {', '.join(self._names)}"] if self._names else []
        quotations = (WORDS_HEAD, self._quotations(taken))
        sections = (quotations, (OPERATOR_HEAD, orders), (ANCHORS_HEAD, lines), (NAMES_HEAD, names))
        return "\n".join("\n".join((head, *items)) for head, items in sections if items)

    def _take(self, candidates: Iterable[int], room: int, value: Callable[[_Piece], float]) -> int:
        """Takes the best of these pieces, and returns the tokens that they leave of the room.

        A piece's value only shrinks as others are taken, so it is weighed anew when it comes up.
        """
        waiting = [(-value(self._pieces[index]), index) for index in candidates if index not in self._taken]
        heapq.heapify(waiting)
        misses = 0
        while waiting and room > _ITEM_TOKENS and misses < _MOST_MISSES:
            before, index = heapq.heappop(waiting)
            piece = self._pieces[index]
            now = value(piece)
            if now <= 0:
                continue
            if now < -before:
                heapq.heappush(waiting, (-now, index))
                continue
            if piece.text in self._known:
                continue
            tokens = self._count(piece.text) + _ITEM_TOKENS
            if tokens > room:
                misses += 1
                continue
            room -= tokens
            self._taken[index] = piece
            self._taken_bytes[piece.message] += piece.size_bytes + _PIECE_COST_BYTES
            self._seen.update(piece.names)
        return room

    def _says(self, piece: _Piece) -> float:
        """The value, for its size, of the things that a piece alone says."""
        use, seen = self._use, self._seen
        new = sum([weight * use.get(key, 1.0) for key, weight in piece.names.items() if key not in seen])
        if not new and (not piece.base or (piece.names and not piece.is_words)):
            return 0.0
        return piece.ratio * (new + piece.base) * self._breadth(piece) / (piece.size_bytes + _PIECE_COST_BYTES)

    def _rules(self, piece: _Piece) -> float:
        return piece.rule * self._breadth(piece) / (piece.size_bytes + _PIECE_COST_BYTES)

    def _breadth(self, piece: _Piece) -> float:
        return 1 / (1 + self._taken_bytes[piece.message] / _FAIR_BYTES)

    def _uses(self) -> dict[str, float]:
        """A factor for each thing by how often the assistant names it; notes how each was in use."""
        weighed: defaultdict[str, float] = defaultdict(float)
        for piece in self._pieces:
            message = self._messages[piece.message]
            is_assistant = message.role == "assistant"
            brevity = min(1.0, _SHORT_CHARS / _said_chars(message)) if is_assistant else 0.0
            for key in piece.names:
                name = name_of(key)
                self._ages[name] = len(self._messages) - 1 - piece.message
                if is_assistant:
                    weighed[key] += brevity
                    self._named_by_assistant[name] += 1
        return {key: 1 + _REUSE * math.log1p(weight) for key, weight in weighed.items()}

    def _take_names(self, room: int) -> None:
        """Takes the names that are most likely needed again for their size and stand nowhere else."""
        room -= self._count(NAMES_HEAD) + _ITEM_TOKENS
        times, ages = self._named_by_assistant, self._ages
        shown = set(map(name_of, self._seen))

        def again(name: str) -> float:
            # A plain word is a person's name, or in German any noun.
            is_plain = name.isalpha() and name[1:] == name[1:].lower()
            ratio = _NUMBER_RATIO if is_number(name) else _PLAIN_RATIO if is_plain else 1.0
            chance = _AGAIN[min(times[name], len(_AGAIN) - 1)] * ratio
            return chance * (1 + _FRESH / (1 + (ages[name] / _FRESH_MESSAGES) ** 2)) / (_NAME_COST_CHARS + len(name))

        # A bare figure that was not taken up says nothing, and what is set off in several words is no name.
        names = [
            name
            for name in ages
            if not (name in shown or " " in name or _orders(name)) and (times[name] or not is_number(name))
        ]
        for name in heapq.nsmallest(_MOST_NAMES, names, key=lambda name: (-again(name), name)):
            if room < _LEAST_NAME_TOKENS:
                break
            tokens = self._count(name) + 2
            if tokens <= room:
                room -= tokens
                self._names.append(name)
        self._names.sort(key=lambda name: (-ages[name], name))
        self._seen.update(self._names)

    def _quotations(self, taken: Iterable[_Piece]) -> list[str]:
        """The user's words, one item for each message, with a mark where something is left out."""
        last = {piece.message: piece.place for piece in self._pieces if piece.is_words}
        parts: defaultdict[int, list[_Piece]] = defaultdict(list)
        for piece in taken:
            if piece.is_words:
                parts[piece.message].append(piece)
        return [_quotation(pieces, last[message]) for message, pieces in parts.items()]


def _orders(name: str) -> bool:
    """Returns True for "ALWAYS" and "can/cannot": among the names they would order something that nobody said."""
    return not RULE_WORDS.isdisjoint(name.casefold().split("/"))


def _quotation(pieces: Sequence[_Piece], last: int) -> str:
    shown = ["-" if pieces[0].place == 0 else f"- {_GAP}", " ", pieces[0].text]
    for before, piece in pairwise(pieces):
        # A new line is seen to be one.
        if piece.opens_line:
            shown.append("\n  ")
        elif piece.place > before.place + 1:
            shown.append(f" {_GAP} ")
        else:
            shown.append(" " if before.text[-1:].isascii() else "")
        shown.append(piece.text)
    return "".join((*shown, f" {_GAP}" if pieces[-1].place < last else ""))


def _pieces(messages: Sequence[Message], redact: Redact, task: int | None) -> list[_Piece]:
    """The pieces of the read text, oldest first; of a repeat the last stays, the task first, then the user's."""
    cleaned = {at: _cleaned(messages[at], redact) for at in _read(messages)}
    words = {
        at: list(sentences(_ends(message.text, _READ_PER_WORDS_CHARS)))
        for at, message in cleaned.items()
        if _is_words(message) or message.is_system
    }
    own = {at: parts for at, parts in words.items() if _is_words(messages[at])}
    talk = Talk(each.text for parts in own.values() for each in parts if not each.pasted)
    clauses = [piece for at, parts in own.items() for piece in _clauses(at, parts, talk)]
    clauses.sort(key=lambda piece: piece.message == task)
    orders = [
        piece._replace(is_words=False, is_operators=True, rule=piece.rule or piece.base * _is_short(messages[at]))
        for at, parts in words.items()
        if at not in own
        for piece in _clauses(at, parts, Talk())
    ]
    states = state_calls(messages)
    echoes = _echoes(messages, states)
    lines = [
        piece
        for at, message in cleaned.items()
        if at not in words and at not in echoes
        for piece in _lines(at, message, states)
    ]
    seen: set[str] = set()
    rows: Counter[str] = Counter()
    kept: list[_Piece] = []
    for piece in (*reversed(clauses), *reversed(orders), *reversed(lines)):
        folded = piece.text.casefold()
        if folded in seen and piece.message != task:
            continue
        seen.add(folded)
        if not (piece.is_words or piece.is_operators):
            row = folded.translate(_DIGITS)
            piece = piece._replace(ratio=piece.ratio * _ROW_RATIO ** rows[row])
            rows[row] += 1
        kept.append(piece)
    kept.reverse()
    # Stable: pieces of a message stay in order.
    return sorted(kept, key=lambda piece: piece.message)


def _cleaned(message: Message, redact: Redact) -> Message:
    text, arguments = redact(message.text), [redact(call.arguments) for call in message.calls]
    if text is message.text and not arguments:
        return message
    calls = (replace(call, arguments=each) for call, each in zip(message.calls, arguments, strict=True))
    return replace(message, text=text, calls=tuple(calls))


def _read(messages: Sequence[Message]) -> list[int]:
    """The newest messages, up to so much text, and the first of the user's, which may be the task."""
    chars, found = 0, set[int]()
    first = next((at for at, message in enumerate(messages) if _is_words(message)), None)
    for at in (*(() if first is None else (first,)), *reversed(range(len(messages)))):
        if chars > _READ_CHARS:
            break
        most_chars = _READ_PER_WORDS_CHARS if _is_words(messages[at]) else _READ_PER_MESSAGE_CHARS
        chars += min(_said_chars(messages[at]), most_chars)
        found.add(at)
    return sorted(found)


def _is_words(message: Message) -> bool:
    return message.role == "user"


def _is_short(message: Message) -> bool:
    return len(message.text) <= _SHORT_CHARS


def _said_chars(message: Message) -> int:
    # Never 0: others are divided by it.
    return len(message.text) + sum(len(call.arguments) for call in message.calls) + 1


def _clauses(at: int, parts: Sequence[Sentence], talk: Talk) -> Iterator[_Piece]:
    place = 0
    for sentence in _joined(parts):
        for number, text in enumerate(filter(None, _divided(sentence.text, _CLAUSE_BYTES))):
            weight = talk.weight(text)
            ratio = _PASTED if sentence.pasted else _USER
            yield _Piece(
                message=at,
                place=place,
                text=text,
                size_bytes=_bytes(text),
                names=named(text),
                base=0.0 if sentence.pasted else weight.worth,
                ratio=ratio if place else ratio * _OPENING,
                is_words=True,
                rule=0.0 if sentence.pasted or not weight.is_rule else weight.worth,
                opens_line=sentence.opens_line and not number,
            )
            place += 1


def _joined(parts: Sequence[Sentence]) -> Iterator[Sentence]:
    """Sentences, with one that ends in a colon ("Run exactly this:") together with the next: alone it says little."""
    held: Sentence | None = None
    for part in parts:
        joined = part
        if held is not None and part.pasted:
            yield held
        elif held is not None:
            joined = held._replace(text="\n  ".join((held.text, part.text)))
        held = joined if joined.text.endswith((":", "：")) and len(joined.text) < _MOST_ANNOUNCING_CHARS else None
        if held is None:
            yield joined
    if held is not None:
        yield held


def _echoes(messages: Sequence[Message], states: Mapping[tuple[int, int], bool]) -> set[int]:
    """The positions of results that say again what their call says of a state."""
    calls = {call.id: call for at, place in states for call in messages[at].calls[place : place + 1]}
    return {
        at
        for at, message in enumerate(messages)
        if message.role == "tool"
        and (call := calls.get(message.call_id)) is not None
        and 2 * sum(text in message.text for text in state_texts(call)) >= len(state_texts(call))
    }


def _lines(at: int, message: Message, states: Mapping[tuple[int, int], bool]) -> Iterator[_Piece]:
    is_assistant = message.role == "assistant"
    text = without_notices(message.text) if is_assistant else message.text
    brevity = max((_SHORT_CHARS / max(len(text), _SHORT_CHARS)) ** 1.5, _LEAST_BREVITY)
    ratio, number = (_ASSISTANT, NUMBER) if is_assistant else (_RESULT, _RESULT_NUMBER)
    place = 0
    for line in _ends(text, _READ_PER_MESSAGE_CHARS).splitlines():
        for part in _divided(" ".join(line.split()), _LINE_BYTES):
            if len(part) >= _LEAST_LINE_CHARS:
                names = named(part, number_weight=number)
                yield _Piece(at, place, part, _bytes(part), names, 0.0, brevity * ratio)
                place += 1
    for number, call in enumerate(message.calls):
        written = " ".join(f"{call.name}({render_arguments(call.arguments)[:_READ_PER_CALL_CHARS]})".split())
        is_newest = states.get((at, number))
        if is_newest is None:
            for part in _divided(written, _LINE_BYTES):
                yield _Piece(at, place, part, _bytes(part), named(part), 0.0, _CALL)
                place += 1
        elif is_newest and len(call.arguments) <= _READ_PER_CALL_CHARS:
            # A part of a state, or an older one, would say what is not so.
            yield _Piece(at, place, written, _bytes(written), named(written), float(len(state_texts(call))), _RESULT)
            place += 1


def _divided(line: str, most_bytes: int) -> Iterator[str]:
    """The pieces of a line, divided where a sentence, an item or at least a word ends."""
    most = max(most_bytes * len(line) // max(_bytes(line), 1), 1)
    start = 0
    while len(line) - start > most:
        least, end = start + most // 3, start + most
        for separator in _SEPARATORS:
            at = line.rfind(separator, least, end)
            if at >= 0:
                end = at + len(separator)
                break
        yield line[start:end].strip()
        start = end
    yield line[start:].strip()


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _ends(text: str, most_chars: int) -> str:
    half = most_chars // 2
    return text if len(text) <= most_chars else f"{text[:half]}\n{text[-half:]}"
