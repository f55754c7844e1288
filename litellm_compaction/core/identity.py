"""Recognizes a conversation although its client sends it otherwise than before (promise P4).

Coding agents replace old tool results by a note, or cut them. The hash chain then is another one from there on. So a
record says what each covered message was: the chain's entry, and a print of its data. A later conversation is the same
one if its words and calls are the same, and its data is what it was, a marked piece of that, or a note: some words in
brackets, or the same short text in the place of several different results.

Some clients send only their last messages, some write one anew in each request. What a client changes behind a record
its server reads again from there on, and of a list that begins otherwise no record is found. So all is put back where
it was, and what is written anew counts as its first version.

In doubt it is another conversation: a record tells what a result said, and several people may share a key (P9).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, repeat, takewhile
from operator import eq
from typing import NamedTuple

from litellm_compaction.core.messages import (
    Message,
    chain,
    normal_part,
    normal_text,
    part_text,
    roughly_tokens,
    user_message,
)
from litellm_compaction.core.stretches import is_text_result, stretches

# A note says that something was here; more would say what. So many words in brackets are no result ("[Permission
# denied]", "(no output)"); of fewer only what recurs is a note.
_NOTE_TOKENS, _LEAST_WORDS = 60, 3
# A note in brackets: `[Old tool result content cleared]`, `<MASKED>`; with words before them only if it says how much
# was here: `Old output: (12 lines omitted)`. It has no other number. Markdown's emphasis may stand around it.
_NOTE = re.compile(
    r"[*_`~]*(?!.*\d)(?=.*[^\W\d_]{3})(?:[^\W\d][^\n\[\](){}<>\"]{0,80}: (?=.*\0))?"
    r"(?:\[[^{}\"]{1,480}\]|\([^{}\"]{1,480}\)|<[^\W\d][\w -]{0,80}/?>)[*_`~]*",
    re.DOTALL,
)
_WORD = re.compile(r"[^\W\d_]{3,}")
_AMOUNT = re.compile(r"\b\d[\d.,]{0,12} ?(?:k?b|bytes|lines?|chars|characters|tokens|words)\b", re.IGNORECASE)
# Clients leave one of these where they cut, or one in brackets as a line behind what they left.
_MARK = re.compile(r"\.\.\.|…|\[(?:\d[\d.,]{0,12} )?[^\W\d_]{3}[^\[\]\n\"'{}=]{0,200}\]")
# A cut leaves at most so much of data that is not too short to be cut.
_CUT_RATIO, _LEAST_CUT_CHARS = 0.75, 512
# Both ends of data are known in pieces, the end backwards; a cut may lie inside of one.
_PIECE_CHARS, _PIECE_DIGITS, _MOST_PIECES, _LEAST_EQUAL_CHARS = 32, 4, 128, 128
# Changes of a conversation that count: a turn of an agent has several requests.
_MOST_CHANGES = 8
# So many different messages are equal behind what is put back: many conversations begin alike, and end in "go on".
_LEAST_EQUAL = 4
# A message that is written anew has another version each time; the lists of two persons have two.
_MOST_RENEWED, _VERSIONS = 3, 3
# Behind it a system message is none of the leading ones, which no chain holds.
_BEFORE = user_message("")


class Datum(NamedTuple):
    """What is known of a tool result, an attached file or an image: digests of all, and of its first and last pieces.

    `chars` is 0 for a note, in whose place nothing else is taken.
    """

    digest: str
    chars: int
    head: str = ""
    tail: str = ""


class Seen(NamedTuple):
    """A message as it was when a record was made of it: the chain's entry after it, and its data."""

    entry: str
    data: tuple[Datum, ...] = ()


def seen(rest: Sequence[Message], hashes: Sequence[str], before: Sequence[Seen] = ()) -> tuple[Seen, ...]:
    """Returns what n messages after the leading system ones are, or were: `before` says that of the first ones.

    `hashes` is their chain, n + 1 entries.
    """
    return (*before[: len(rest)], *(Seen(hashes[at + 1], prints(rest[at])) for at in range(len(before), len(rest))))


def prints(message: Message) -> tuple[Datum, ...]:
    """Returns what is known of a message's data later."""
    return tuple(map(_datum, _divided(message)[1]))


def words_chain(rest: Sequence[Message]) -> tuple[str, ...]:
    """Returns the chain over roles, calls, the words of person and model, and if there is data beside those."""
    pairs = ((replace(each.received or each, raw={}, is_renewed=each.is_renewed), *_divided(each)) for each in rest)
    return chain([replace(each, text="\n".join((*words, "\0" * bool(data)))) for each, words, data in pairs])


def chain_behind(rest: Sequence[Message], record: Sequence[Seen]) -> tuple[str, ...]:
    """Returns the chain of messages of which a record, of one message at least, says what the first ones were."""
    entries = [each.entry for each in record]
    return (chain(())[0], *entries[:-1], *chain(rest[len(record) :], after=entries[-1]))


def edits(
    messages: Sequence[Message], were: Sequence[Sequence[Datum]], notes: Collection[str] = ()
) -> list[bool | None]:
    """Tells of each message, which has the words and calls of an earlier one, if its client has edited that one's data.

    None if what it has now cannot have come of what that was. The client has left `notes` before.
    """
    pairs = [(each.role, _divided(each)[1], was) for each, was in zip(messages, were, strict=True)]
    # What stands in the place of several different data is a note.
    places: defaultdict[str, set[str]] = defaultdict(set)
    for text, datum in (pair for _, data, was in pairs for pair in zip(data, was, strict=False)):
        if _is_short(text) and len(text) < datum.chars:
            places[text].add(datum.digest)

    def stands(text: str, role: str, was: Datum) -> bool:
        is_sure = role != "tool" or len(_WORD.findall(text)) >= _LEAST_WORDS
        is_note = len(text) < was.chars and (len(places[text]) > 1 or text in notes or (is_sure and _is_note(text)))
        return is_note or text_hash(text) == was.digest or _is_piece(text, was)

    def is_edited(role: str, data: Sequence[str], was: Sequence[Datum]) -> bool | None:
        if list(map(text_hash, data)) == [each.digest for each in was]:
            return False
        if len(data) == 1 != len(was):
            # One note in the place of several parts.
            was = [Datum("", sum(each.chars for each in was))]
        return (len(data) == len(was) and all(map(stands, data, repeat(role), was))) or None

    return [is_edited(*each) for each in pairs]


def _is_short(text: str, more_tokens: int = 0) -> bool:
    return len(text) <= 8 * _NOTE_TOKENS and roughly_tokens(text) <= _NOTE_TOKENS + more_tokens


def _is_note(text: str) -> bool:
    """Returns True for a few words in brackets that say nothing but that something was here, and how much."""
    return _is_short(text) and _NOTE.fullmatch(_AMOUNT.sub("\0", text.strip())) is not None


def _is_piece(text: str, was: Datum) -> bool:
    """Returns True if a text is the head, the tail, or both, of what was there, with a mark where it was cut."""
    (first, _, behind), (body, _, last) = text.partition("\n"), text.rstrip().rpartition("\n")
    # The mark may be the first or the last line as well.
    bodies = [(text, ""), *(each for each in ((behind, first), (body, last)) if _MARK.fullmatch(each[1].strip()))]
    return len(text) <= _CUT_RATIO * was.chars and any(_is_cut(body, mark, was) for body, mark in bodies)


def _is_cut(body: str, mark: str, was: Datum) -> bool:
    head = _equal_chars(body, was.head)
    tail = _equal_chars(body[head:][::-1], was.tail)
    between = body[head : len(body) - tail]
    is_note = _is_short(between, _PIECE_CHARS // 2) and _MARK.search(between + mark) is not None
    return is_note and head + tail >= _LEAST_EQUAL_CHARS


def _equal_chars(text: str, known: str) -> int:
    """The characters of the first pieces that are the same."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(_pieces(text), known, strict=False))
    return len([*same]) // _PIECE_DIGITS * _PIECE_CHARS


def _pieces(text: str) -> str:
    """A few digits of each of a text's first pieces."""
    places = range(0, min(len(text) // _PIECE_CHARS, _MOST_PIECES) * _PIECE_CHARS, _PIECE_CHARS)
    return "".join(text_hash(text[at : at + _PIECE_CHARS])[:_PIECE_DIGITS] for at in places)


def _divided(message: Message) -> tuple[list[str], list[str]]:
    """The words of a message, and its data: what tools gave, what a client attached, and what is not text."""
    message = message.received or message
    content = message.raw.get("content")
    parts = content if isinstance(content, list) else [message.text]
    words = [normal_text(message)] if message.role not in ("tool", "user") else []
    data = [message.text.strip()] if message.role == "tool" else []
    for part in parts:
        text = part_text(part)
        if text is None:
            data.append(json.dumps(normal_part(part), sort_keys=True, default=str))
        elif message.role == "user":
            divided = stretches(text, is_alone=len(parts) == 1)
            if len(parts) > 1 and _is_note(text) and all(each.kind != "data" for each in divided):
                # In the place of an image.
                data.append(text.strip())
                continue
            words += [text[each.start : each.body if each.kind == "data" else each.end].strip() for each in divided]
            data += [text[each.body : each.body_end].strip() for each in divided if each.kind == "data"]
    return words, data


def _datum(text: str) -> Datum:
    chars = 0 if _is_note(text) else len(text)
    ends = (_pieces(text), _pieces(text[::-1])) if chars >= _LEAST_CUT_CHARS else ("", "")
    return Datum(text_hash(text), chars, *ends)


def text_hash(text: str) -> str:
    """128 bits in hexadecimal digits; any string of Python's."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Listed:
    """The messages of a request after the leading system ones, of which its client has sent all but `left_out`."""

    rest: tuple[Message, ...]
    left_out: frozenset[int] = frozenset()

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """What the words and calls of each message are, wherever it stands."""
        now = (replace(each, received=None, is_renewed=False) if each.is_renewed else each for each in self.rest)
        return tuple(words_chain([_BEFORE, each])[-1] + each.call_id for each in now)

    @cached_property
    def spoken(self) -> list[int]:
        """The positions of all but system messages."""
        return [at for at, each in enumerate(self.rest) if not each.is_system]

    @property
    def is_other(self) -> bool:
        """More stands in it, or in another's place, than its client has sent."""
        return bool(self.left_out) or any(each.is_renewed for each in self.rest)

    def without(self, start: int) -> Listed:
        """The list without those that were left out from a position on."""
        left_out = frozenset(at for at in self.left_out if at < start)
        rest = (each for at, each in enumerate(self.rest) if at in left_out or at not in self.left_out)
        return Listed(tuple(rest), left_out)


class Course(NamedTuple):
    """The chain of a conversation's newest list, and how many of its last messages changed from each to the next."""

    entries: Sequence[int] = ()
    changed: Sequence[int] = ()

    def then(self, entries: Sequence[int]) -> Course:
        """The course with another list; a new one if less than half of the last comes again."""
        if entries == self.entries:
            return self
        same = sum(takewhile(bool, map(eq, self.entries, entries)))
        changed = (*self.changed, len(self.entries) - same)[-_MOST_CHANGES:]
        return Course(entries, changed if 2 * same > len(self.entries) else ())


class Relisted(NamedTuple):
    """A list by an earlier one of its conversation."""

    listed: Listed
    cut: int | None = None  # So many of all but system messages stand before what was newly left out.
    renewed: Mapping[int, Sequence[str]] = {}  # The first versions of what is written anew, by position.
    notes: Collection[str] = ()  # What its client has left in the place of results so far.

    def is_as(self, before: Relisted) -> bool:
        """Returns True if it was changed as the other was, for a person may have done so once."""
        renewed = [each for at, each in self.renewed.items() if not self.listed.rest[at].is_system]
        return self.cut in (None, before.cut) and all(len(each) >= _VERSIONS for each in renewed)


def relisted(before: Relisted, now: Listed, end: int) -> Relisted | None:
    """Returns a list by an earlier one of its conversation; None if that is another's, or was changed otherwise.

    The first messages of `now`, `end` of them without system messages, are those of the other; behind them all is new.
    """
    old, notes = before.listed, before.notes
    same = _same(old, now, end)
    changed = [place for place, at in same.items() if old.rest[at].raw != now.rest[place].raw]
    edited = edits([now.rest[each] for each in changed], [prints(old.rest[same[each]]) for each in changed], notes)
    spoken = _with_renewed(old, now, end, same)
    stays = {**spoken, **_systems(old, now, spoken)}
    versions = dict[int, Sequence[str]]()
    for place, at in stays.items():
        if place not in same or old.rest[at].is_renewed:
            marks = (*before.renewed.get(at, ()), old.marks[at], now.marks[place])
            versions[place] = [mark for mark, _ in groupby(marks)][: _VERSIONS + 1]
    # What comes again so soon is another person's; a system message may have come to stand where another one stood.
    again = {place for place, each in versions.items() if len({*each}) < len(each)}
    anew = {at for at, each in versions.items() if at in now.spoken or (len(each) >= _VERSIONS and at not in again)}
    gone = sorted({*old.spoken}.difference(spoken.values()))
    news = [at for at in gone if at not in old.left_out]
    last = max([*(news or gone), *(stays[place] for place in anew)], default=len(old.rest))
    equal = {now.marks[place] for place, at in same.items() if at > last}
    # Whoever deletes something while the list slides on leaves out at two places.
    is_apart = any(news[0] < at < news[-1] for at in spoken.values() if news)
    is_short = last < len(old.rest) and len(equal) < _LEAST_EQUAL
    is_another = len(spoken) < end or len(anew) > _MOST_RENEWED or not again.isdisjoint(now.spoken)
    if None in edited or is_apart or is_short or is_another:
        return None
    rest, left_out, waiting = list[Message](), set[int](), iter((*gone, len(old.rest)))
    renewed = dict[int, Sequence[str]]()
    cleared, following = {place for place, is_edited in zip(changed, edited, strict=True) if is_edited}, next(waiting)
    for place, message in enumerate(now.rest):
        while following < stays.get(place, 0):
            left_out.add(len(rest))
            rest.append(old.rest[following])
            following = next(waiting)
        if place in cleared and (message.role == "tool" or is_text_result(message)) and not message.other_parts:
            notes = {*notes, message.text.strip()}
            rest.append(old.rest[stays[place]])
        else:
            first = old.rest[stays[place]] if place in anew else None
            rest.append(replace(message, received=first.received or first, is_renewed=True) if first else message)
        renewed |= {len(rest) - 1: versions[place]} if place in versions else {}
    cut = sum(at < news[0] for at in spoken.values()) if news else None
    return Relisted(Listed(tuple(rest), frozenset(left_out)), cut, renewed, notes)


def _same(old: Listed, now: Listed, end: int) -> dict[int, int]:
    """Returns where messages of equal words stand in both lists; of those that are not in one order none."""
    same, left, marks = dict[int, int](), iter(reversed(old.spoken)), {*old.marks}
    for place in reversed(now.spoken[:end]):
        if now.marks[place] in marks:
            at = next((at for at in left if old.marks[at] == now.marks[place]), None)
            if at is None:
                return {}
            same[place] = at
    return same


def _with_renewed(old: Listed, now: Listed, end: int, same: Mapping[int, int]) -> Mapping[int, int]:
    """Returns the same with each user's message of other words that stands where another one stood."""
    left = {at for at in old.spoken if old.rest[at].role == "user"}.difference(same.values())
    stays, before = {**same}, -1
    for place in now.spoken[:end]:
        before = same.get(place, before + 1)
        if before in left and now.rest[place].role == "user":
            stays[place] = before
    return stays


def _systems(old: Listed, now: Listed, spoken: Mapping[int, int]) -> Mapping[int, int]:
    """Returns where system messages of other words stand behind the same message in both lists."""
    behind = {place + 1: at + 1 for place, at in spoken.items() if place + 1 < len(now.rest) and at + 1 < len(old.rest)}
    both = {place: at for place, at in behind.items() if now.rest[place].is_system and old.rest[at].is_system}
    return {place: at for place, at in both.items() if old.rest[at].is_renewed or old.marks[at] != now.marks[place]}
