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
from typing import NamedTuple

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


class _Element(NamedTuple):
    name: str
    lines: tuple[str, ...]


class _Said(NamedTuple):
    """A user message: the paragraphs of each of its parts by their levelled lines, and the elements between them.

    `is_turn` is True if it stands where a person speaks, at the beginning or after an answer, and the client does not.
    """

    is_turn: bool
    parts: list[list[tuple[str, ...]]]
    elements: list[_Element]

    @property
    def paragraphs(self) -> list[tuple[str, ...]]:
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
    whole = {each.paragraphs[0] for each in said if len(each.paragraphs) == 1 and (each.is_turn or not each.elements)}
    times = Counter(part for each in said for part in {*each.paragraphs, *(part[:1] for part in each.paragraphs)})
    again = {part for each in said for part in each.paragraphs if times[part] >= _LEAST_MESSAGES} - whole
    told = [frozenset(each.paragraphs) for each in said if each.paragraphs]
    first = {part: at for at in range(len(told) - 1, -1, -1) for part in told[at]}
    blocks = {part for part in again if not _may_be_said(part, told, first[part])}
    # A person types into another part than the one in which all comes again.
    apart = (part for each in said if each.parts[1:] for part in each.parts if again.issuperset(part))
    blocks.update(paragraph for part in apart if not blocks.isdisjoint(part) for paragraph in part)
    marks = Marks(
        paragraphs=frozenset(map("\n".join, blocks)),
        headings=_often({part[0] for part in each.paragraphs if _HEADING.match(part[0])} for each in said),
        lines=_often(
            {form for part in each.paragraphs for line in part[1:] for form in (line, line_form(line))} for each in said
        ),
    )
    marks = replace(marks, footers=_footers(said, whole))
    persons = frozenset(_all_that_is_said(said, marks, times))
    headings = {paragraph.partition("\n")[0] for paragraph in persons}
    marks = replace(marks, paragraphs=marks.paragraphs - persons, headings=marks.headings - headings)
    return replace(marks, names=frozenset(_clients_names(said, known.names, marks)))


def _footers(said: Sequence[_Said], whole: Collection[tuple[str, ...]]) -> frozenset[str]:
    """The lines with which paragraphs that differ end again and again: a client has glued them to a person's words."""
    told = [frozenset(part[-1:] for part in each.paragraphs if part[1:]) for each in said if each.paragraphs]
    first = {line: at for at in range(len(told) - 1, -1, -1) for line in told[at]}
    above = Counter(part[-1:] for part in {part for each in said for part in each.paragraphs if part[1:]})
    return frozenset(
        line[0]
        for line, count in above.items()
        if count >= _LEAST_MESSAGES and line not in whole and not _may_be_said(line, told, first[line])
    )


def _said(texts: Iterable[str], known: Marks, *, is_turn: bool) -> _Said:
    said = _Said(is_turn, [], [])
    for text in texts:
        said.parts.append([])
        for each in stretches(text, known):
            if each.kind == "note" and not text.startswith("<", each.start):
                # An opening: all of the message is a program's.
                said = said._replace(is_turn=False)
            if each.kind in ("words", "doubted"):
                places = paragraphs(text, each.start, each.end)
                said.parts[-1].extend(filter(None, (levelled(text[start:end]) for start, end in places)))
            else:
                said.elements.append(
                    _Element(each.name, levelled(text[each.body : each.body_end] if each.name else ""))
                )
    return said


def _may_be_said(part: tuple[str, ...], told: Sequence[Collection[tuple[str, ...]]], first: int) -> bool:
    """Returns True for a sentence that a person may repeat: one without marks that some later message does without."""
    if len(part) > 1 or len(part[0]) > _LONGEST_SENTENCE_CHARS or not _SENTENCE.match(part[0]):
        return False
    return any(part not in told[at] for at in range(first, len(told)))


def _all_that_is_said(said: Iterable[_Said], marks: Marks, times: Counter[tuple[str, ...]]) -> Iterator[str]:
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
            (does, own.lines)
            for does, each in zip(speaks, said, strict=True)
            for own in each.elements
            if own.name == name
        ]
        lines = _often({line for own in each.elements if own.name == name for line in own.lines} for each in said)
        return all(does or 2 * sum(line in lines for line in own) >= len(own) for does, own in found)

    known = {name for name in names if recurs(name)}
    for does, each in zip(speaks, said, strict=True):
        own = {element.name for element in each.elements}
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
