"""Recognizes a conversation although its client has cleared or shortened data that a record covers (promise P4).

Coding agents replace old tool results by a note, or cut them. The hash chain then is another one from there on. So a
record says what each covered message was: the chain's entry, and a print of its data. A later conversation is the same
one if its words and calls are the same, and its data is what it was, a marked piece of that, or a note: some words in
brackets, or the same short text in the place of several different results.

In doubt it is another conversation: a record tells what a result said, and several people may share a key (P9).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from litellm_compaction.core.messages import (
    Message,
    chain,
    is_text_part,
    normal_part,
    normal_text,
    parse_message,
    roughly_tokens,
)
from litellm_compaction.core.stretches import stretches

# A note says that something was here; more would say what. So many words in brackets are no result ("[Permission
# denied]", "(no output)"); of fewer only what recurs is a note.
_NOTE_TOKENS, _LEAST_WORDS = 60, 3
# A note in brackets: `[Old tool result content cleared]`, `<MASKED>`; with words before them only if it says how much
# was here: `Old output: (12 lines omitted)`. Markdown's emphasis may stand around it.
_NOTE = re.compile(
    r"\A(?P<lead>[^\W\d][^\n\[\](){}<>\"]{0,80}: )?(?:\[[^{}\"]{1,480}\]|\([^{}\"]{1,480}\)|<[^\W\d][\w -]{0,80}/?>)\Z"
)
_WORD = re.compile(r"[^\W\d_]{3,}")
_AMOUNT = re.compile(r"\b\d[\d.,]{0,12} ?(?:k?b|bytes|lines?|chars|characters|tokens|words)\b", re.IGNORECASE)
_DIGIT = re.compile(r"\d")
# Clients leave one of these where they cut, or a line in brackets behind what they left.
_MARK = re.compile(r"\.\.\.|…|\[(?:\d[\d.,]{0,12} )?[^\W\d_]{3}[^\[\]\n\"'{}=]{0,200}\]")
_ENDING = re.compile(r"\n[ \t]{0,8}[\[(<][^\n]{3,290}[\])>]\s{0,8}\Z")
_MOST_ENDING_CHARS = 300
# A cut leaves at most so much of data that is not too short to be cut.
_CUT_RATIO, _LEAST_CUT_CHARS = 0.75, 512
# Both ends of data are known in pieces; a cut may lie inside of one.
_PIECE_CHARS, _PIECE_DIGITS, _MOST_PIECES, _LEAST_EQUAL_CHARS = 32, 4, 128, 128


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


def seen(rest: Sequence[Message], hashes: Sequence[str], known: Sequence[Seen] = ()) -> tuple[Seen, ...]:
    """Returns what n messages after the leading system ones are, or were: `known` says that of the first ones.

    `hashes` is their chain, n + 1 entries.
    """
    known = known[: len(rest)]
    new = range(len(known), len(rest))
    return (*known, *(Seen(hashes[at + 1], tuple(map(_datum, _divided(rest[at])[1]))) for at in new))


def words_chain(rest: Sequence[Message]) -> tuple[str, ...]:
    """Returns the chain over roles, calls, and the words of person and model alone: an entry more than messages."""

    def without_data(message: Message) -> Message:
        kept = {key: message.raw[key] for key in ("tool_calls", "tool_call_id") if key in message.raw}
        return parse_message({"role": message.role, "content": "\n".join(_divided(message)[0]), **kept})

    return chain(list(map(without_data, rest)))


def edits(rest: Sequence[Message], record: Sequence[Seen]) -> int | None:
    """Returns how many messages of a record their client has edited since; None if they are others.

    The first of `rest` have the words of those.
    """
    if len(record) > len(rest):
        return None
    pairs = [(message.role, _divided(message)[1], was.data) for message, was in zip(rest, record, strict=False)]
    other = [each for each in pairs if list(map(text_hash, each[1])) != [datum.digest for datum in each[2]]]
    return len(other) if all(_standing(other)) else None


def edited(pairs: Sequence[tuple[Message, Message]]) -> list[bool]:
    """Tells of messages, each with what it was by its words and calls, if the client has cleared or cut their data."""
    return _standing([(now.role, _divided(now)[1], tuple(map(_datum, _divided(was)[1]))) for now, was in pairs])


def chain_behind(rest: Sequence[Message], record: Sequence[Seen]) -> tuple[str, ...]:
    """Returns the chain of messages of which a record, of one message at least, says what the first ones were."""
    entries = [each.entry for each in record]
    return (chain(())[0], *entries[:-1], *chain(rest[len(record) :], after=entries[-1]))


def _standing(messages: Sequence[tuple[str, Sequence[str], Sequence[Datum]]]) -> list[bool]:
    """Tells of messages, each by its role, its data and what that was, if the data stands for what was there."""
    # What stands in the place of several different data is a note.
    places: defaultdict[str, set[str]] = defaultdict(set)
    for text, was in (pair for _, data, were in messages for pair in zip(data, were, strict=False)):
        if _is_short(text) and len(text) < was.chars:
            places[text].add(was.digest)

    def is_note(text: str, role: str, chars: int) -> bool:
        is_sure = role != "tool" or len(_WORD.findall(text)) >= _LEAST_WORDS
        return len(text) < chars and (len(places[text]) > 1 or (is_sure and _is_note(text)))

    def stand(role: str, data: Sequence[str], were: Sequence[Datum]) -> bool:
        if len(data) == 1 < len(were):
            # One note in the place of several parts.
            return is_note(data[0], role, sum(each.chars for each in were))
        return len(data) == len(were) and all(
            text_hash(text) == was.digest or is_note(text, role, was.chars) or _is_piece(text, was)
            for text, was in zip(data, were, strict=True)
        )

    return [stand(*each) for each in messages]


def _is_short(text: str) -> bool:
    return len(text) <= 8 * _NOTE_TOKENS and roughly_tokens(text) <= _NOTE_TOKENS


def _is_note(text: str) -> bool:
    """Returns True for a few words in brackets that say nothing but that something was here, and how much."""
    text = text.strip().strip("*_`~")
    note = _NOTE.match(text) if _is_short(text) else None
    if note is None or _WORD.search(text) is None:
        return False
    said = _AMOUNT.sub("", text)
    return _DIGIT.search(said) is None and not (note["lead"] and said == text)


def _is_piece(text: str, was: Datum) -> bool:
    """Returns True if a text is the head, the tail, or both, of what was there, with a mark where it was cut.

    A line in brackets at the end may be the client's mark, or have stood there.
    """
    if len(text) > _CUT_RATIO * was.chars:
        return False
    ending = _ENDING.search(text, max(len(text) - _MOST_ENDING_CHARS, 0))
    bodies = [(text, ""), *([(text[: ending.start()], ending[0])] if ending else [])]
    return any(_is_cut(body, mark, was) for body, mark in bodies)


def _is_cut(body: str, mark: str, was: Datum) -> bool:
    head = _equal_chars(_pieces(body), was.head)
    tail = _equal_chars(_pieces(body[head:], backwards=True), was.tail)
    rest = body[head : len(body) - tail]
    is_note = len(rest) <= 8 * _NOTE_TOKENS and roughly_tokens(rest) <= _NOTE_TOKENS + _PIECE_CHARS // 2
    return head + tail >= _LEAST_EQUAL_CHARS and is_note and _MARK.search(rest + mark) is not None


def _equal_chars(pieces: str, known: str) -> int:
    """The characters of the first pieces that are the same."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(pieces, known, strict=False))
    return sum(1 for _ in same) // _PIECE_DIGITS * _PIECE_CHARS


def _pieces(text: str, *, backwards: bool = False) -> str:
    """A few digits of each piece of a text, from its beginning or its end on."""
    places = range(0, min(len(text) // _PIECE_CHARS, _MOST_PIECES) * _PIECE_CHARS, _PIECE_CHARS)
    starts = (len(text) - at - _PIECE_CHARS if backwards else at for at in places)
    return "".join(text_hash(text[start : start + _PIECE_CHARS])[:_PIECE_DIGITS] for start in starts)


def _divided(message: Message) -> tuple[list[str], list[str]]:
    """The words of a message, and its data: what tools gave, what a client attached, and what is not text."""
    content = message.raw.get("content")
    parts = content if isinstance(content, list) else [message.text]
    words = [normal_text(message)] if message.role not in ("tool", "user") else []
    data = [message.text.strip()] if message.role == "tool" else []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not is_text_part(part):
            data.append(json.dumps(normal_part(part), sort_keys=True, default=str))
        elif message.role == "user" and isinstance(text, str):
            found = stretches(text, is_alone=len(parts) == 1)
            if len(parts) > 1 and _is_note(text) and all(each.kind != "data" for each in found):
                # In the place of an image.
                data.append(text.strip())
                continue
            words += [text[each.start : each.body if each.kind == "data" else each.end].strip() for each in found]
            data += [text[each.body : each.body_end].strip() for each in found if each.kind == "data"]
    return words, data


def _datum(text: str) -> Datum:
    if _is_note(text) or len(text) < _LEAST_CUT_CHARS:
        return Datum(text_hash(text), 0 if _is_note(text) else len(text))
    return Datum(text_hash(text), len(text), _pieces(text), _pieces(text, backwards=True))


def text_hash(text: str) -> str:
    """128 bits in hexadecimal digits; any string of Python's."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
