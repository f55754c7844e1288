"""Finds what a client writes beside a person's words again and again, so that no list has to know the client.

A line that stands in three user messages, each time beside others, is the client's, and so is an element that does.
Numbers and dates do not count. What is ever all that a message says is the person's: people repeat whole messages. In
doubt a text is the person's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from litellm_compaction.core.messages import NO_MARKS, Marks, Message
from litellm_compaction.core.stretches import (
    is_clients,
    is_persons_name,
    levelled,
    line_form,
    paragraphs,
    stretches,
    texts_of,
)

_LEAST_MESSAGES = 3
# A sentence without any mark of a program, as a person may repeat one, is the client's only if it is never left out.
_LONGEST_SENTENCE_CHARS = 200
_SENTENCE = re.compile(r"[\w\"'(“„«¿¡][^\n]*(?<!:)\Z")
# At the beginning of a line, and so no quotation in mid-sentence.
_OPENS = re.compile(r"^[ \t]*<([A-Za-z][\w.:-]{1,60})(?:[ \t][^<>\n]{0,1000})?>", re.MULTILINE)
# Reading more takes long, and no client writes so much into one conversation.
_MOST_CHARS, _MOST_NAMES = 1_000_000, 50

_Lines: TypeAlias = tuple[str, ...]


class _Said(NamedTuple):
    """A user message: its paragraphs, and the elements between them by name, as levelled lines.

    `is_turn` is True if it stands where a person speaks, at the beginning or after an answer, and the client does not.
    """

    is_turn: bool
    paragraphs: list[_Lines]
    elements: list[tuple[str, _Lines]]

    @property
    def is_persons(self) -> bool:
        """The person says something in it."""
        return bool(self.paragraphs) and (self.is_turn or not self.elements)


def marked(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages, of which the user's know by which forms their client is known; the same objects if by none."""
    users = [at for at, each in enumerate(messages) if each.role == "user" and not each.is_synthetic]
    marks = NO_MARKS
    if len(users) >= _LEAST_MESSAGES and sum(len(messages[at].text) for at in users) <= _MOST_CHARS:
        marks = _marks(messages, users)
    beside = {at for at in users if _is_framed(messages[at].text) and _has_neighbour(messages, at)}
    if marks == NO_MARKS and not beside:
        return messages
    forms = {is_beside: replace(marks, is_beside=is_beside) for is_beside in (True, False)}
    own = {at: replace(messages[at], marks=forms[at in beside]) for at in users}
    return tuple(own.get(at, each) for at, each in enumerate(messages))


def _marks(messages: Sequence[Message], users: Sequence[int]) -> Marks:
    texts = {at: texts_of(messages[at]) for at in users}
    names = _often({name for text in texts[at] for name in _OPENS.findall(text)} for at in users)
    known = Marks(names=frozenset(sorted(name for name in names if not is_persons_name(name))[:_MOST_NAMES]))
    said = [_said(texts[at], known, is_turn=not _has_neighbour(messages, at)) for at in users]
    whole = {each.paragraphs[0] for each in said if len(each.paragraphs) == 1 and not each.elements}
    # Of a paragraph that is all of several messages its lines count once.
    counted = [[part] for part in whole] + [each.paragraphs for each in said if whole.isdisjoint(each.paragraphs)]
    often = _often({line for part in parts for line in part} for parts in counted)
    often -= {part[0] for part in whole if len(part) == 1}
    forms = _often({line_form(line) for part in parts for line in part[1:]} for parts in counted)
    marks = Marks(lines=often - _maybe_said(often, said), items=often | forms)
    persons = {line for each in said for part in _all_that_is_said(each, said, marks) for line in part}
    marks = replace(marks, lines=marks.lines - persons)
    return replace(marks, names=_clients_names(said, known.names, marks))


def _maybe_said(lines: Iterable[str], said: Sequence[_Said]) -> set[str]:
    """Those lines that a person may repeat: sentences that some later message lacks."""
    told = [{line for part in each.paragraphs for line in part} for each in said if each.paragraphs]
    first = {line: at for at in range(len(told) - 1, -1, -1) for line in told[at]}
    sentences = {line for line in lines if len(line) <= _LONGEST_SENTENCE_CHARS and _SENTENCE.match(line)}
    return {line for line in sentences if any(line not in each for each in told[first[line] :])}


def _said(texts: Iterable[str], known: Marks, *, is_turn: bool) -> _Said:
    said = _Said(is_turn, [], [])
    for text in texts:
        for each in stretches(text, known):
            if each.kind == "note" and not text.startswith("<", each.start):
                # An opening: all of the message is a program's.
                said = said._replace(is_turn=False)
            if each.speaks:
                places = paragraphs(text, each.start, each.end)
                said.paragraphs.extend(filter(None, (levelled(text[start:end]) for start, end in places)))
            else:
                said.elements.append((each.name, levelled(text[each.body : each.body_end] if each.name else "")))
    return said


def _all_that_is_said(message: _Said, said: Sequence[_Said], marks: Marks) -> Collection[_Lines]:
    """The rarest paragraphs of a message that would have no other words, by their first lines; else none."""
    if not message.is_persons or not all(is_clients(part, marks) for part in message.paragraphs):
        return ()
    times = Counter(part[0] for each in said for part in {*each.paragraphs})
    least = min(times[part[0]] for part in message.paragraphs)
    return [part for part in message.paragraphs if times[part[0]] == least]


def _clients_names(said: Sequence[_Said], names: Collection[str], marks: Marks) -> frozenset[str]:
    """Elements beside which the person always speaks, or of which half of the lines come again.

    In doubt all elements of a message in which the person would say nothing else are theirs.
    """
    speaks = [any(not is_clients(part, marks) for part in each.paragraphs) for each in said]

    def recurs(name: str) -> bool:
        again = _often({line for at, lines in each.elements if at == name for line in lines} for each in said)
        return all(
            does or 2 * sum(line in again for line in lines) >= len(lines)
            for does, each in zip(speaks, said, strict=True)
            for at, lines in each.elements
            if at == name
        )

    known = {name for name in names if recurs(name)}
    for does, each in zip(speaks, said, strict=True):
        own = {name for name, _ in each.elements}
        if each.is_turn and not does and own <= {*known, ""}:
            known -= own
    return frozenset(known)


def _often(sets: Iterable[Collection[str]]) -> frozenset[str]:
    """What is in so many of the sets that it is a client's."""
    times = Counter(each for one in sets for each in one)
    return frozenset(each for each, count in times.items() if count >= _LEAST_MESSAGES)


def _is_framed(text: str) -> bool:
    return text.lstrip().startswith("<") or text.rstrip().endswith("```")


def _has_neighbour(messages: Sequence[Message], at: int) -> bool:
    """Returns True for a message next to another one that no answer separates from it: a user's, or a tool's result."""
    before = next((messages[place].role for place in range(at - 1, -1, -1) if not messages[place].is_system), "")
    behind = next((messages[place].role for place in range(at + 1, len(messages)) if not messages[place].is_system), "")
    return before in ("user", "tool") or behind == "user"
