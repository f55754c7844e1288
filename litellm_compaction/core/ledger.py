"""The ledger: what survives a compaction verbatim, without any model.

First the user's own words, because a constraint cannot be recognised by signal words alone (summaries keep 17 % of side
constraints, arXiv 2608.11242): whole messages where they fit, else whole sentences, rules first. Then lines that name
paths, ids, numbers, commands and errors, which summaries lose first (paths 9.8 %, numbers 1.9 % survive, deja-vu 543).
Then bare names that were in use, which the next step takes up again. Deterministic, bounded, in linear time, for any
language.

What a line is worth is a matter of who says it, where, and how often the assistant came back to it. Where a thing was
given several values, the older line keeps its words and says what came later; only what people and assistants state
counts, since rows of a tool's output share their keys without replacing each other.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from litellm_compaction.core.anchors import is_number, is_plain, latest_values, marked, read, statements
from litellm_compaction.core.directives import Piece, Talk, replaced, sentences, worth
from litellm_compaction.core.messages import Message, ToolCall, render_arguments, without_notices
from litellm_compaction.core.secrets import Cleaned, Redact, redactor
from litellm_compaction.core.stretches import divided

_PIECE_CHARS = 160
# Anchors per 1,000 characters are many in logs: what is older than this many characters has only its user's words.
SCANNED_CHARS = 120_000
# Of one giant result the two ends say what it was and how it came out; the rest must not hide older messages.
SCANNED_PER_MESSAGE_CHARS = 12_000
# Of a person's message more: rules may stand anywhere in it.
_SCANNED_WORDS_CHARS = 40_000
# What takes the place of something is said in few words.
_SCANNED_PER_LATER_CHARS, _MOST_LATER = 4_000, 50
# A shorter line without an anchor ("So the plan is:") states nothing.
_LEAST_STATEMENT_CHARS = 30
# Where a long line is divided: behind a sentence, an item, a word.
_SEPARATORS = (". ", "。", "; ", "}, ", "], ", ", ", " ")
# Who says it: an assistant's words tell what mattered, a listing names everything.
_USER, _ASSISTANT, _CALL = 1.6, 1.6, 1.2
# A short result says how something came out, a long one is a listing: from 1.2 down to 0.4.
_SHORT_RESULT_CHARS, _LONG_RESULT_CHARS = 400, 6_000
_SHORT_RESULT, _LONG_RESULT = 1.2, 0.4
# How a step came out: what the first words behind a result, and all of a short one, say beside their anchors.
_OUTCOME = 4.0
# What the user's words say beside their anchors, where there was no room to quote them all.
_USERS_OWN = 0.75
_SHORT_OUTCOME = 3.0
# Source code can be read again, and names in every line what one line says once.
_CODE = re.compile(
    r"(?:\d+[:\s-]\s*)?(?:import |from \w|def |class |return\b|raise |except\b|try:|elif |else\b|while |@\w|#|//|/\*|"
    r"\*|\.\. |>>> |\.\.\. |self\.|func |fn |let |const |var |public |private |static )"
)
_CODE_ENDS = (":", "{", "(", ";")
_CODE_RATIO = 0.4
# What was only asked or weighed says little of what is.
_DOUBTS = ("wait", "maybe", "perhaps", "hmm", "if i ", "let's ", "let’s ", "let me ")
_DOUBT_RATIO = 0.6
WORDS_HEAD = "The user's own words, oldest first; where two disagree the later holds:"
NAMES_HEAD = "Names and values that were in use, the latest last:"
ANCHORS_HEAD = "Paths, ids, numbers, commands and errors, oldest first; where two disagree the later holds:"
# What stands for a stretch of the user's words that is left out.
_GAP = "[…]"
# What the values in a sentence of the user's may add to it; how much more a sentence of the task counts, and the first
# of a message.
_MOST_VALUES = 3.0
_TASK_RATIO, _OPENING_RATIO = 1.5, 1.3
# Of one message each further sentence counts less, half behind so many characters: a task of two pages must not take
# the place of what the next messages say in a line each.
_MUCH_CHARS = 1_000
# Of a sentence's words so many stand in another that says the same of a thing, with another value.
_SAME_RATIO = 0.7
# What ends so says little without the line behind it, and that without the next at most twice.
_ANNOUNCES = (":", "：")
_MOST_ANNOUNCED = 3
# No text has fewer tokens than one for so many characters.
_MOST_TOKEN_CHARS = 12
# A dash, a line break, and now and then a value that came later.
_ITEM_TOKENS = 6
# What a piece costs beside its text: a dash, a line break, and the eye that has to find the place again.
_PIECE_COST_CHARS = 40
# A dash, a word and a line break.
_LEAST_QUOTATION_TOKENS = 3
# Behind so many that found no room hardly any will.
_MOST_MISSES = 200
# What of the lines' room names alone may take; what they do not need the lines have. With 0.4 the next step found a
# point or two less of what it took up again (seven conversations, 2026-11), with 0.7 fewer facts had their line.
_NAMES_SHARE = 0.6
_MOST_NAMES = 2_000
_LEAST_NAME_TOKENS = 3
# How likely a name is needed again that stands in 0, 1, or more of the assistant's messages, beside one another; a bare
# figure half as likely, a plain word less; and up to seven times as likely where it was named in the last few messages.
_AGAIN = (1.0, 10.0, 15.0)
_NUMBER_RATIO = 0.5
_PLAIN_RATIO = 0.3
_FRESH, _FRESH_MESSAGES = 6.0, 5
_NAME_COST_CHARS = 8
_LEAST_WORDS_TOKENS, _LEAST_ROOM_TOKENS, _LEAST_LINE_TOKENS = 32, 24, 12
_OLDEST_RATIO, _NEWEST_RATIO = 0.75, 1.25
_REPEATED_ROW_RATIO = 0.7
_REDACTOR = redactor(())
# Of so many characters in a row most are in no other text; with five the set of them took longer to make.
_GRAM_CHARS = 4
_DIGITS = bytes.maketrans(b"123456789", b"000000000")


class Line(NamedTuple):
    """A line that may stand in the ledger.

    Attributes:
        text: on one line, at most about 160 characters.
        anchors: what it names, with the weight that each has here.
        weight: what it says beside its anchors.
        is_stated: whether a person or an assistant states it in words.
    """

    text: str
    anchors: Mapping[str, float]
    weight: float
    is_stated: bool


class Use(NamedTuple):
    """How a name was in use.

    Attributes:
        times: in how many of the assistant's messages it stands.
        age: how many messages stand behind the one that named it last.
    """

    times: int
    age: int


class Candidates(NamedTuple):
    """The lines worth a place, oldest first, and how everything that they name was in use."""

    lines: list[Line]
    uses: dict[str, Use]


class Utterance(NamedTuple):
    """What a message says, or a part of what it does.

    Attributes:
        role: of who says it.
        text: in words.
        calls: of tools.
    """

    role: str
    text: str
    calls: Sequence[ToolCall] = ()


def candidates(roles: Sequence[str], said_at: Callable[[int], Utterance]) -> Candidates:
    """What may stand in the ledger.

    Args:
        roles: of the messages of the covered part, oldest first, without what is quoted elsewhere.
        said_at: what they say, by their place; asked for the newest first, and not for those that are not read.
    """
    found: list[Line] = []
    times: Counter[str] = Counter()
    ages: dict[str, int] = {}
    # Each with a bound of its own: what a few giant results say must not hide what the assistant wrote before them.
    scanned = {True: 0, False: 0}
    seen: set[str] = set()
    # Newest first, so that the bound on scanned text drops the oldest and a repeated line keeps its latest place.
    for index in range(len(roles) - 1, -1, -1):
        role = roles[index]
        is_stated = role in ("user", "assistant")
        if scanned[is_stated] > SCANNED_CHARS:
            if scanned[not is_stated] > SCANNED_CHARS:
                break
            continue
        named: set[str] = set()
        for text, ratio, bonus in reversed(_lines(said_at(index), index > 0 and roles[index - 1] == "tool")):
            scanned[is_stated] += len(text)
            if scanned[is_stated] > SCANNED_CHARS:
                break
            parts = text.split()
            shown = " ".join(parts)
            if len(shown) < 4 or (shown in seen and not is_stated):
                continue
            anchors, signal = read(parts, shown, ratio, is_stated=is_stated)
            named.update(anchors)
            if shown in seen:
                continue
            seen.add(shown)
            signal += bonus
            if anchors or (signal > 1 and len(shown) >= _LEAST_STATEMENT_CHARS):
                if _is_doubtful(shown) if is_stated else _is_code(shown):
                    doubt = _DOUBT_RATIO if is_stated else _CODE_RATIO
                    signal *= doubt
                    anchors = {anchor: weight * doubt for anchor, weight in anchors.items()}
                found.append(Line(shown, anchors, signal * ratio, is_stated))
        times.update(named if role == "assistant" else ())
        for anchor in named:
            ages.setdefault(anchor, len(roles) - 1 - index)
    found.reverse()
    return Candidates(found, {anchor: Use(times[anchor], age) for anchor, age in ages.items()})


def _is_doubtful(shown: str) -> bool:
    return shown.endswith("?") or shown[:12].lower().startswith(_DOUBTS)


def _is_code(shown: str) -> bool:
    return shown.endswith(_CODE_ENDS) or _CODE.match(shown) is not None


def _lines(said: Utterance, follows_result: bool) -> list[tuple[str, float, float]]:
    """The pieces of a message, with the weight of who said them and what their place says."""
    if said.role == "user":
        return [(piece, _USER, _USERS_OWN * worth(piece)) for piece in _pieces(said.text)]
    if said.role != "assistant":
        ratio = _result_ratio(len(said.text))
        bonus = _SHORT_OUTCOME if ratio == _SHORT_RESULT else 0.0
        return [(piece, ratio, bonus) for piece in _pieces(said.text)]
    found = [(piece, _ASSISTANT, 0.0) for piece in _pieces(without_notices(said.text))]
    if found and follows_result:
        # How the last step came out is what comes first, in any language.
        found[0] = (found[0][0], _ASSISTANT, _OUTCOME)
    for call in said.calls:
        pieces = _pieces(f"{call.name}({render_arguments(call.arguments)})")
        found += [(piece, _CALL, 0.0) for piece in pieces]
    return found


def _result_ratio(chars: int) -> float:
    if chars <= _SHORT_RESULT_CHARS:
        return _SHORT_RESULT
    share = math.log(chars / _SHORT_RESULT_CHARS) / math.log(_LONG_RESULT_CHARS / _SHORT_RESULT_CHARS)
    return max(_SHORT_RESULT - (_SHORT_RESULT - _LONG_RESULT) * share, _LONG_RESULT)


def _pieces(text: str) -> list[str]:
    """The lines of a text, long ones divided where a sentence, an item or at least a word ends."""
    found: list[str] = []
    for line in _ends(text, SCANNED_PER_MESSAGE_CHARS).splitlines():
        start = 0
        while len(line) - start > _PIECE_CHARS:
            end = start + _PIECE_CHARS
            for separator in _SEPARATORS:
                at = line.rfind(separator, start + _PIECE_CHARS // 3, end)
                if at >= 0:
                    end = at + len(separator)
                    break
            found.append(line[start:end])
            start = end
        found.append(line[start:] if start else line)
    return found


def _ends(text: str, most_chars: int) -> str:
    """The two ends of a longer text."""
    half = most_chars // 2
    return text if len(text) <= most_chars else f"{text[:half]}\n{text[-half:]}"


# An anchor that stands in 0, 1, 2, … of the assistant's messages: what is come back to matters more, up to a point.
_USE = tuple(1 + 0.5 * math.log1p(times) for times in range(21))


def ledger(
    messages: Sequence[Message],
    *,
    budget_tokens: int,
    words_tokens: int,
    count: Callable[[str], int],
    known: str = "",
    newer: Sequence[Message] = (),
    redact: Redact = _REDACTOR,
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
    # Our requests to go on are nobody's words, and what a client has put among the user's is a tool's.
    messages = [part for message in messages if not message.asks_to_go_on for part in divided(message)]
    newer = [part for message in newer for part in divided(message)]
    cleaned = Cleaned((*messages, *newer), redact)
    latest = latest_values(_stated((*messages, *newer), cleaned))
    users = [at for at, message in enumerate(messages) if message.role == "user" and message.text.strip()]
    later_at = [at for at, message in enumerate(newer) if message.role == "user"]
    # The newest first: they are cleaned together with some older ones.
    later = [
        _ends(cleaned[len(messages) + at].text, _SCANNED_PER_LATER_CHARS) for at in reversed(later_at[-_MOST_LATER:])
    ][::-1]
    quoted = _users_words(
        len(users),
        lambda index: cleaned[users[index]].text.strip(),
        min(words_tokens, budget_tokens),
        count,
        latest,
        later,
    )
    shown = [quoted[index].shown for index in sorted(quoted) if quoted[index].shown]
    words = "\n".join((WORDS_HEAD, *shown)) if shown else ""
    room_tokens = max(budget_tokens - (count(words) if words else 0), 0)
    # What of the user's words found no room is read like the others' lines.
    left = {users[index]: each.left for index, each in quoted.items()}
    others = [each for at in range(len(messages)) for each in left.get(at, (at,))]
    roles = [messages[each].role if isinstance(each, int) else each.role for each in others]

    def said_at(index: int) -> Utterance:
        each = others[index]
        if not isinstance(each, int):
            return each
        message = cleaned[each]
        return Utterance(message.role, message.text, message.calls)

    lines = _lines_and_names(candidates(roles, said_at), room_tokens, words + known, count, latest)
    return "\n".join(section for section in (words, lines) if section)


def _stated(messages: Sequence[Message], cleaned: Cleaned) -> list[str]:
    """What people and assistants said, oldest first, as far back as lines are read."""
    found: list[str] = []
    chars = 0
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].role in ("user", "assistant"):
            text = cleaned[at].text[:SCANNED_PER_MESSAGE_CHARS]
            chars += len(text)
            if chars > SCANNED_CHARS:
                break
            found.append(text)
    found.reverse()
    return found


class _Quoted(NamedTuple):
    """A quotation of a message, "" for none, and what it leaves out."""

    shown: str
    left: list[Utterance]


class _Sentence(NamedTuple):
    """A sentence of the user's.

    Attributes:
        piece: of the message.
        counts: whether it is said nowhere later, and its values still hold.
    """

    piece: Piece
    counts: bool


def _users_words(
    number: int,
    text_at: Callable[[int], str],
    budget_tokens: int,
    count: Callable[[str], int],
    latest: Mapping[str, str],
    later: Sequence[str],
) -> dict[int, _Quoted]:
    """The user's messages as quotations, by their number; without those that are not looked at any more.

    Whole where all fit; else sentence by sentence, rules first, each whole or not at all.

    Args:
        number: of messages.
        text_at: their texts by their place, oldest first; old ones are not asked for where the others fill the room.
        budget_tokens: bound on the quotations under their head.
        count: tokens of a text.
        latest: values that hold now.
        later: what the user said behind them, which may take the place of what they say.
    """
    room = budget_tokens - count(WORDS_HEAD)
    if not number or budget_tokens < _LEAST_WORDS_TOKENS:
        return {}
    texts = _all_texts(number, text_at, _MOST_TOKEN_CHARS * room)
    if texts is not None:
        whole = {index: _Quoted(f"- {marked(text, latest)}", []) for index, text in enumerate(texts)}
        sizes = itertools.accumulate(count(each.shown) + 1 for each in whole.values())
        if all(size <= room for size in sizes):
            return whole
    behind = [piece.text for text in later for piece in sentences(text) if not piece.pasted]
    divided = _divided(number, text_at, latest, behind)
    talk = Talk(each.piece.text for parts in divided.values() for each in parts if not each.piece.pasted)
    _without_replaced(divided, behind, talk)
    chosen: dict[int, set[int]] = {index: set() for index in divided}
    misses = 0
    for index, places in _by_worth(divided, talk):
        # Of 40,000 messages only those are counted that may find room.
        if room < _LEAST_QUOTATION_TOKENS or misses > _MOST_MISSES:
            break
        size = sum(count(divided[index][place].piece.text) + _ITEM_TOKENS for place in places)
        if size <= room:
            room -= size
            chosen[index].update(places)
        else:
            misses += 1
    return {
        index: _Quoted(_quotation(divided[index], places), _left(divided[index], places))
        for index, places in chosen.items()
    }


def _all_texts(number: int, text_at: Callable[[int], str], most_chars: int) -> list[str] | None:
    """The texts, oldest first; None where they have more characters."""
    found: list[str] = []
    chars = 0
    for index in range(number - 1, -1, -1):
        found.append(text_at(index))
        chars += len(found[-1])
        if chars > most_chars:
            return None
    found.reverse()
    return found


def _divided(
    number: int, text_at: Callable[[int], str], latest: Mapping[str, str], behind: Iterable[str]
) -> dict[int, list[_Sentence]]:
    """The sentences of the messages that are looked at: of the newest, and of the first, which is the task."""
    texts: dict[int, str] = {}
    scanned = 0
    for index in range(number - 1, 0, -1):
        # What somebody pasted has its words before or behind it.
        text = _ends(text_at(index), _SCANNED_WORDS_CHARS)
        scanned += len(text)
        if scanned > SCANNED_CHARS:
            break
        texts[index] = text
    texts[0] = _ends(text_at(0), _SCANNED_WORDS_CHARS)
    found: dict[int, list[_Sentence]] = {}
    seen = set(map(str.casefold, behind))
    # The words of the newest sentence that gives a thing its value.
    newest: dict[str, Set[str]] = {}
    for index in sorted(texts, reverse=True):
        parts: list[_Sentence] = []
        said: dict[str, Set[str]] = {}
        for piece in sentences(texts[index]):
            folded = piece.text.casefold()
            counts = folded not in seen
            seen.add(folded)
            if stated := statements(piece.text):
                words = set(folded.split())
                shown = marked(piece.text, latest, stated)
                if shown != piece.text:
                    piece = piece._replace(text=shown)
                    # What says hardly more than the value that it gave is nothing now; a rule with an old value is one.
                    same = max(len(words & newest.get(key, set())) for key, _ in stated)
                    counts = counts and same < _SAME_RATIO * len(words)
                said.update((key, words) for key, _ in stated)
            parts.append(_Sentence(piece, counts))
        for key, those in said.items():
            newest.setdefault(key, those)
        found[index] = parts
    return found


def _without_replaced(divided: Mapping[int, list[_Sentence]], behind: Sequence[str], talk: Talk) -> None:
    """Has sentences count no more that a later one takes the place of, there or among those behind them."""
    places = [
        (index, place)
        for index in sorted(divided)
        for place, each in enumerate(divided[index])
        if each.counts and not each.piece.pasted
    ]
    for older in replaced([*(divided[index][place].piece.text for index, place in places), *behind], talk):
        if older >= len(places):
            continue
        index, place = places[older]
        divided[index][place] = divided[index][place]._replace(counts=False)


def _by_worth(divided: Mapping[int, Sequence[_Sentence]], talk: Talk) -> list[tuple[int, range]]:
    """Message and places of the sentences that count, those first that say most for their size.

    What announces something ("Run exactly this:") stands with what it announces.
    """
    last = max(divided)
    found: list[tuple[float, int, range]] = []
    for index, parts in divided.items():
        recency = _OLDEST_RATIO + (_NEWEST_RATIO - _OLDEST_RATIO) * (index / last if last else 1)
        ratio = recency if index else _TASK_RATIO
        weighed: list[tuple[float, int, range]] = []
        place = 0
        while place < len(parts):
            end = _announced(parts, place)
            places = range(place, end)
            if parts[place].counts:
                value = sum(_value(parts[at].piece, talk) for at in places) * ratio * (1 if place else _OPENING_RATIO)
                cost = sum(_PIECE_COST_CHARS + len(parts[at].piece.text) for at in places)
                weighed.append((-value / cost, cost, places))
            place = end
        chars = 0
        for density, cost, places in sorted(weighed, key=lambda each: (each[0], each[2].start)):
            found.append((density / (1 + chars / _MUCH_CHARS), index, places))
            chars += cost
    found.sort(key=lambda each: (each[0], each[1], each[2].start))
    return [(index, places) for _, index, places in found]


def _announced(parts: Sequence[_Sentence], place: int) -> int:
    """Behind what has to stand with the sentence at `place`."""
    end = place + 1
    if (
        not place
        and sum(len(each.piece.text) for each in parts) <= _PIECE_CHARS
        and all(each.counts and not each.piece.pasted for each in parts)
    ):
        # Who says little says one thing.
        return len(parts)
    while (
        end < min(len(parts), place + _MOST_ANNOUNCED)
        and parts[end - 1].piece.text.endswith(_ANNOUNCES)
        and parts[end].counts
        and len(parts[end].piece.text) <= _PIECE_CHARS
    ):
        end += 1
    return end


def _value(piece: Piece, talk: Talk) -> float:
    """What a sentence of the user's says, its values included."""
    anchors, _ = read(piece.text.split(), piece.text, 1.0, is_stated=True)
    values = min(sum(anchors.values()), _MOST_VALUES)
    return worth(piece.text, pasted=piece.pasted, talk=talk) + (_CODE_RATIO if piece.pasted else 1) * values


def _left(parts: Sequence[_Sentence], places: Set[int]) -> list[Utterance]:
    """What of a message is quoted nowhere: the user's prose, and what was pasted as the output that it is."""
    left = [each.piece for place, each in enumerate(parts) if each.counts and place not in places]
    if not left:
        return []
    prose, pasted = ([each.text for each in left if each.pasted is kind] for kind in (False, True))
    return [Utterance(role, "\n".join(texts)) for role, texts in (("user", prose), ("tool", pasted)) if texts]


def _quotation(parts: Sequence[_Sentence], places: Set[int]) -> str:
    """The chosen sentences of a message in order, with a marker for each stretch that is left out; "" for none."""
    if not places:
        return ""
    shown = ["-"]
    before = -1
    for place in sorted(places):
        piece = parts[place].piece
        shown.append(f" {_GAP}" if place > before + 1 else "")
        if len(shown) > 2 and piece.opens_line:
            # An item of a list of the user's own is none of the ledger's.
            shown.append("\n  " if piece.text.startswith("- ") else "\n")
        else:
            shown.append(" ")
        shown.append(piece.text)
        before = place
    shown.append(f" {_GAP}" if before < len(parts) - 1 else "")
    return "".join(shown)


def _lines_and_names(
    found: Candidates,
    budget_tokens: int,
    known: str,
    count: Callable[[str], int],
    latest: Mapping[str, str],
) -> str:
    """The lines with the most new anchors for their size, in the order of the conversation, and names behind them.

    A line says what a thing is about and costs ten times what its name alone does. What the assistant used it uses
    again: of names that it wrote, one in 20 comes back in a later step, of those that only a tool wrote one in 400
    (seven recorded conversations, 2026-11).
    """
    lines, uses = found
    chooser = _Chooser(lines, uses, known)
    chosen: dict[int, str] = {}

    def choose(room: int) -> int:
        """Takes lines, and returns what they leave of the room."""
        too_long: list[int] = []
        while room >= _LEAST_LINE_TOKENS and len(too_long) <= _MOST_MISSES and (index := chooser.best()) is not None:
            text = marked(lines[index].text, latest) if lines[index].is_stated else lines[index].text
            size = count(text) + 2
            if size <= room:
                room -= size
                chosen[index] = text
                chooser.take(index)
            else:
                too_long.append(index)
        chooser.put_back(too_long)
        return room

    names_tokens = int(_NAMES_SHARE * budget_tokens)
    room = budget_tokens - names_tokens - count(ANCHORS_HEAD)
    if room < _LEAST_ROOM_TOKENS:
        room, names_tokens = budget_tokens - count(ANCHORS_HEAD), 0
    if room < _LEAST_ROOM_TOKENS:
        return ""
    room = choose(room)
    names = _names(uses, names_tokens + room, chooser.is_seen, count)
    chooser.see(names)
    room = choose(room + names_tokens - (count(_named(names)) + 1 if names else 0))
    shown = "\n".join([ANCHORS_HEAD, *(f"- {chosen[index]}" for index in sorted(chosen))]) if chosen else ""
    named = {anchor for index in chosen for anchor in lines[index].anchors}
    line = _named([name for name in names if name not in named])
    return "\n".join(section for section in (shown, line) if section)


def _named(names: Sequence[str]) -> str:
    return f"{NAMES_HEAD}\n- {', '.join(names)}" if names else ""


def _names(
    uses: Mapping[str, Use], budget_tokens: int, is_seen: Callable[[str], bool], count: Callable[[str], int]
) -> list[str]:
    """The names that are most likely needed again for their size and stand nowhere else, the latest last."""
    room = budget_tokens - count(NAMES_HEAD) - 3
    if room < _LEAST_LINE_TOKENS:
        return []

    def again(name: str) -> float:
        use = uses[name]
        ratio = _NUMBER_RATIO if is_number(name) else _PLAIN_RATIO if is_plain(name) else 1.0
        chance = _AGAIN[min(use.times, len(_AGAIN) - 1)] * ratio
        return chance * (1 + _FRESH / (1 + (use.age / _FRESH_MESSAGES) ** 2)) / (_NAME_COST_CHARS + len(name))

    # A bare figure that no one took up says nothing.
    waiting = [(-again(name), name) for name, use in uses.items() if use.times or not is_number(name)]
    heapq.heapify(waiting)
    chosen: list[str] = []
    for _ in range(min(_MOST_NAMES, len(waiting))):
        if room < _LEAST_NAME_TOKENS:
            break
        _, name = heapq.heappop(waiting)
        if not is_seen(name) and (size := count(name) + 2) <= room:
            room -= size
            chosen.append(name)
    chosen.sort(key=lambda name: (-uses[name].age, name))
    return chosen


class _Chooser:
    """Gives the line that adds most for its size, again and again.

    What a line adds only shrinks as others are taken, so it is weighed anew when it comes up, and no sooner.
    """

    def __init__(self, lines: Sequence[Line], uses: Mapping[str, Use], known: str) -> None:
        self._lines = lines
        self._known = _Known(known)
        self._seen: dict[str, bool] = {}
        self._ratios = _ratios(lines)
        # The best place where an anchor stands sets its worth; what the assistant came back to matters more.
        self._values: dict[str, float] = {}
        for line in lines:
            for anchor, weight in line.anchors.items():
                if weight > self._values.get(anchor, 0.0):
                    self._values[anchor] = weight
        for anchor, value in self._values.items():
            self._values[anchor] = value * _USE[min(uses[anchor].times, len(_USE) - 1)]
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
                if self._lines[index].text in self._known:
                    continue
                return index
            heapq.heappush(self._waiting, (-worth, index))
        return None

    def take(self, index: int) -> None:
        """Notes that this line stands in the ledger."""
        self.see(self._lines[index].anchors)

    def put_back(self, indices: Iterable[int]) -> None:
        """Has lines that found no room come up again."""
        for index in indices:
            heapq.heappush(self._waiting, (-self._fresh_worth(index), index))

    def see(self, anchors: Iterable[str]) -> None:
        """Notes that these stand in the ledger."""
        self._seen.update(dict.fromkeys(anchors, True))

    def _fresh_worth(self, index: int) -> float:
        line = self._lines[index]
        fresh = {anchor: self._values[anchor] for anchor in line.anchors if not self.is_seen(anchor)}
        if not fresh and line.weight <= 1:
            return 0.0
        return self._worth(index, fresh)

    def _worth(self, index: int, values: Mapping[str, float]) -> float:
        line = self._lines[index]
        value = sum([values[anchor] for anchor in line.anchors if anchor in values])
        return (value + line.weight) * self._ratios[index] / (_PIECE_COST_CHARS + len(line.text))

    def is_seen(self, anchor: str) -> bool:
        """Whether something stands where the model sees it."""
        is_seen = self._seen.get(anchor)
        if is_seen is None:
            is_seen = self._seen[anchor] = anchor in self._known
        return is_seen


class _Known:
    """A text that is asked again and again whether something stands in it: mostly it does not."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._whole_words = set(text.split())
        # What has no blank in it stands inside a word.
        self._words = "\n".join(self._whole_words)
        shifted = (self._words[start:] for start in range(_GRAM_CHARS))
        self._grams = set(map("".join, zip(*shifted, strict=False)))

    def __contains__(self, part: str) -> bool:
        if " " in part:
            # A search through all of it is the last resort: what stands between two words is a whole one there, too.
            words = part.split()
            ends = {*words[:1], *words[-1:]}
            return (
                self._whole_words.issuperset(words[1:-1]) and all(map(self.__contains__, ends)) and part in self._text
            )
        grams = (part[:_GRAM_CHARS], part[-_GRAM_CHARS:]) if len(part) >= _GRAM_CHARS else ()
        return self._grams.issuperset(grams) and part in self._words


def _ratios(lines: Sequence[Line]) -> list[float]:
    """How much each line counts for its place: later ones more, and of rows that differ in digits only each less."""
    rows: Counter[bytes] = Counter()
    found: list[float] = []
    # All at once, which is several times as fast; no line has a line break in it.
    text = "\n".join(line.text for line in lines).encode("utf-8", "surrogatepass").translate(_DIGITS)
    for index, row in reversed(list(enumerate(text.split(b"\n") if lines else ()))):
        recency = _OLDEST_RATIO + (_NEWEST_RATIO - _OLDEST_RATIO) * index / len(lines)
        found.append(recency * _REPEATED_ROW_RATIO ** rows[row])
        rows[row] += 1
    found.reverse()
    return found
