"""Finds what a client writes beside a person's words again and again, so that no list has to know the client.

A paragraph that stands in three user messages, each time as a part of a longer one, is the client's, and so is an
element that does. Numbers and dates do not count. What is ever all that a message says is the person's: people repeat
whole messages. In doubt a text is the person's.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
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
_HEADING = re.compile(r"(?![<\"'“„«¿¡])[^\w\s].*|.{1,80}:\Z")
# At the beginning of a line, and so no quotation in mid-sentence.
_OPENS = re.compile(r"^[ \t]*<([A-Za-z][\w.:-]{1,60})(?:[ \t][^<>\n]{0,1000})?>", re.MULTILINE)
# Reading more takes long, and no client writes so much into one conversation.
_MOST_CHARS, _MOST_NAMES = 1_000_000, 50


_Lines: TypeAlias = tuple[str, ...]


class _Said(NamedTuple):
    """A user message: the paragraphs of each of its parts, and the elements between them by name, as levelled lines.

    `is_turn` is True if it stands where a person speaks, at the beginning or after an answer, and the client does not.
    """

    is_turn: bool
    parts: list[list[_Lines]]
    elements: list[tuple[str, _Lines]]

    @property
    def paragraphs(self) -> list[_Lines]:
        return [each for part in self.parts for each in part]


def marked(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages, of which the user's know by which forms their client is known; the same objects if by none."""
    users = [at for at, each in enumerate(messages) if each.role == "user" and not each.is_synthetic]
    marks = NO_MARKS
    if len(users) >= _LEAST_MESSAGES and sum(len(messages[at].text) for at in users) <= _MOST_CHARS:
        marks = _marks(messages, users)
    beside = {at for at in users if _is_framed(messages[at].text) and _has_neighbour(messages, at)}
    if marks == NO_MARKS and not beside:
        return messages
    behind = {at for at in users if at and messages[at - 1].role == "tool"}
    forms = {
        (one, two): replace(marks, is_beside=one, is_behind=two)
        for one, two in itertools.product((True, False), repeat=2)
    }
    own = {at: replace(messages[at], marks=forms[at in beside, at in behind]) for at in users}
    return tuple(own.get(at, each) for at, each in enumerate(messages))


def _marks(messages: Sequence[Message], users: Sequence[int]) -> Marks:
    texts = {at: texts_of(messages[at]) for at in users}
    names = _often({name for text in texts[at] for name in _OPENS.findall(text)} for at in users)
    known = Marks(names=frozenset(sorted(name for name in names if not is_persons_name(name))[:_MOST_NAMES]))
    said = [_said(texts[at], known, is_turn=not _has_neighbour(messages, at)) for at in users]
    told = [each for each in said if each.paragraphs]
    whole = {each.paragraphs[0] for each in told if len(each.paragraphs) == 1 and (each.is_turn or not each.elements)}
    times = Counter(part for each in told for part in {*each.paragraphs, *(part[:1] for part in each.paragraphs)})
    again = {part for each in told for part in each.paragraphs if times[part] >= _LEAST_MESSAGES} - whole
    blocks = _never_left_out(again, [frozenset(each.paragraphs) for each in told])
    # A person types into another part than the one in which all comes again.
    apart = (part for each in told if each.parts[1:] for part in each.parts if again.issuperset(part))
    blocks.update(paragraph for part in apart if not blocks.isdisjoint(part) for paragraph in part)
    # A client glues a line to a person's words: paragraphs that differ end with it.
    last = Counter(part[-1:] for part in {part for each in told for part in each.paragraphs if part[1:]})
    glued = {line for line, count in last.items() if count >= _LEAST_MESSAGES} - whole
    lasts = [frozenset(part[-1:] for part in each.paragraphs if part[1:]) for each in told]
    marks = Marks(
        paragraphs=frozenset(map("\n".join, blocks)),
        headings=_often({part[0] for part in each.paragraphs if _HEADING.match(part[0])} for each in told),
        lines=_often(
            {form for part in each.paragraphs for line in part[1:] for form in (line, line_form(line))} for each in told
        ),
        footers=frozenset(line for (line,) in _never_left_out(glued, lasts)),
    )
    persons = frozenset(_all_that_is_said(said, marks, times))
    headings = {paragraph.partition("\n")[0] for paragraph in persons}
    marks = replace(marks, paragraphs=marks.paragraphs - persons, headings=marks.headings - headings)
    return replace(marks, names=frozenset(_clients_names(said, known.names, marks)))


def _never_left_out(parts: Collection[_Lines], told: Sequence[Collection[_Lines]]) -> set[_Lines]:
    """Those parts that are no sentence of a person's: one without marks of a program that some later message lacks."""
    first = {part: at for at in range(len(told) - 1, -1, -1) for part in told[at]}

    def may_be_said(part: _Lines) -> bool:
        if len(part) > 1 or len(part[0]) > _LONGEST_SENTENCE_CHARS or not _SENTENCE.match(part[0]):
            return False
        return any(part not in told[at] for at in range(first[part], len(told)))

    return {part for part in parts if not may_be_said(part)}


def _said(texts: Iterable[str], known: Marks, *, is_turn: bool) -> _Said:
    said = _Said(is_turn, [], [])
    for text in texts:
        said.parts.append([])
        for each in stretches(text, known):
            if each.kind == "note" and not text.startswith("<", each.start):
                # An opening: all of the message is a program's.
                said = said._replace(is_turn=False)
            if each.speaks:
                places = paragraphs(text, each.start, each.end)
                said.parts[-1].extend(filter(None, (levelled(text[start:end]) for start, end in places)))
            else:
                said.elements.append((each.name, levelled(text[each.body : each.body_end] if each.name else "")))
    return said


def _all_that_is_said(said: Iterable[_Said], marks: Marks, times: Counter[_Lines]) -> Iterator[str]:
    """The rarest paragraphs of messages that would have no other words: a person says something in each."""
    for each in said:
        is_persons = each.is_turn or not each.elements
        if is_persons and each.paragraphs and all(is_clients(part, marks) for part in each.paragraphs):
            found = {part: times[part if "\n".join(part) in marks.paragraphs else part[:1]] for part in each.paragraphs}
            least = min(found.values())
            yield from ("\n".join(part) for part, count in found.items() if count == least)


def _clients_names(said: Sequence[_Said], names: Collection[str], marks: Marks) -> Collection[str]:
    """Elements beside which the person always speaks, or of which half of the lines come again.

    In doubt all elements of a message in which the person would say nothing else are theirs.
    """
    speaks = [any(not is_clients(part, marks) for part in each.paragraphs) for each in said]

    def recurs(name: str) -> bool:
        found = [
            (does, lines) for does, each in zip(speaks, said, strict=True) for at, lines in each.elements if at == name
        ]
        again = _often({line for at, lines in each.elements if at == name for line in lines} for each in said)
        return all(does or 2 * sum(line in again for line in lines) >= len(lines) for does, lines in found)

    known = {name for name in names if recurs(name)}
    for does, each in zip(speaks, said, strict=True):
        own = {name for name, _ in each.elements}
        if each.is_turn and not does and own <= {*known, ""}:
            known -= own
    return known


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
