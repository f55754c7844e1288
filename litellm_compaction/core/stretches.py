"""Tells a person's words in a user message from what their client wrote: notes and attached data.

A text is divided into elements, what a listed opening begins, and paragraphs; each is a client's by its form, by what
recurs beside other words, or by the short list in `clients.toml`. Data shrinks as tool results do, and so does what
recurs; a note stays; neither is quoted as the person's (promise P2). In doubt text stays, but is not quoted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from litellm_compaction.core import table
from litellm_compaction.core.messages import Message, parse_message, part_text, user_message

Kind: TypeAlias = Literal["words", "doubted", "note", "data", "recurring"]
_Lines: TypeAlias = tuple[str, ...]

RULES: Mapping[str, Mapping[str, Any]] = table("clients")
# LiteLLM's form of a system message in mid-conversation: a text part of its own, before those of that message.
LITELLMS_NOTE = "Operator note (not from the user)"
# No program adds more text, or more of its additions; comparing takes longer.
_MAX_CHARS, _MAX_COMPARED_CHARS, _MAX_TAGS, _MAX_STRETCHES = 2_000_000, 1_000_000, 100_000, 1_000
_MOST_HEAD_CHARS = 200


class Stretch(NamedTuple):
    """A part of `text`, from `start` to `end`; of data, the part that may be left out is from `body` to `body_end`."""

    kind: Kind
    text: str
    start: int
    end: int
    body: int = 0
    body_end: int = 0
    name: str = ""  # Of an element that recurs.

    @property
    def speaks(self) -> bool:
        """The person may have written it."""
        return self.kind in ("words", "doubted")

    @property
    def words(self) -> str:
        return self.text[self.start : self.end].strip()


def has_words(message: Message) -> bool:
    """Returns True if a user message may hold something that the person wrote."""
    return any(each.speaks for each in stretches_of(message))


def is_text_result(message: Message) -> bool:
    """Returns True if a user message holds a call's result, in the form of a protocol of text."""
    return message.role == "user" and _RESULT_BEGINS.match(message.text) is not None


def own_words(message: Message) -> str:
    """The words of a user message that are certainly the person's; "" for none."""
    return "\n".join(each.words for each in stretches_of(message) if each.kind == "words")


def divided(message: Message) -> list[Message]:
    """A message as the client's additions, a tool's, and the person's words; itself if it is all the person's."""
    found = [] if message.role != "user" or message.is_synthetic else stretches_of(message)
    attached = "\n".join(each.text[each.start : each.end] for each in found if each.kind != "words")
    if not attached:
        return [message]
    words = own_words(message)
    return [parse_message({"role": "tool", "content": attached}), *([user_message(words)] if words else [])]


def texts_of(message: Message) -> list[str]:
    """The text parts of a message."""
    content = message.raw.get("content")
    given = map(part_text, content) if isinstance(content, list) else [message.text]
    return [text for text in given if text is not None]


def with_texts(message: Message, texts: Iterable[str]) -> Message:
    """`message` with other text in its text parts, as many as it has; a part without any goes."""
    content, given = message.raw.get("content"), iter(texts)
    if not isinstance(content, list):
        return parse_message({**message.raw, "content": next(given)})
    own = [(part, None if part_text(part) is None else next(given)) for part in content]
    parts = [
        part if text is None else {**part, "text": text} if isinstance(part, Mapping) else text
        for part, text in own
        if text != ""
    ]
    return parse_message({**message.raw, "content": parts})


def stretches_of(message: Message) -> list[Stretch]:
    """The stretches of a user message, in order."""
    return [*chain.from_iterable(parts_of(message))]


def parts_of(message: Message) -> list[list[Stretch]]:
    """The stretches of each text part of a message.

    Beside a part with an element for the person's words, behind a result as text, and in LiteLLM's form of a system
    message all other words are the client's. What recurs, or a program's element, is the person's if nobody says more.
    """
    texts = texts_of(message)
    parts = [stretches(text, message.marks, is_alone=len(texts) == 1) for text in texts]
    every = [*chain.from_iterable(parts)]
    # A listed element is its client's, although its name may tell of a command or a task.
    for_words = {*filter(_is_for_words, {each.text for each in every if each.speaks})}
    is_beside = bool(for_words) or any(map(_BEGINS_CLIENTS.match, texts[:-1]))
    # Of a listed opening all the rest that recurs is its client's as well.
    says_more = any(each.speaks or (each.kind == "note" and not each.words.startswith("<")) for each in every)
    is_among = message.is_beside or not all(_is_programs(each.words) for each in every if each.speaks)

    def decided(stretch: Stretch) -> Stretch:
        if stretch.kind == "recurring":
            return stretch if says_more else stretch._replace(kind="words")
        is_programs = is_among and stretch.kind == "words" and _is_programs(stretch.words)
        is_asked = stretch.text in for_words or stretch.text.rstrip().endswith(("?", "？"))
        is_clients = is_programs or (stretch.speaks and is_beside and not is_asked)
        return stretch._replace(kind="note") if is_clients else stretch

    return [[decided(each) for each in own] for own in parts]


# Alone in its part such an element is a program's, beside other words, unless its name tells of the person's.
_ALONE = re.compile(r"<(\w{1,30} \w{1,30}|[A-Za-z][\w.:-]{1,60})(?:[ \t][^<>\n]{0,1000})?>.*</\1>", re.DOTALL)
_SEVERAL_WORDS = re.compile(r"\w[-_ :.]\w|[a-z][A-Z]")
_LAST_CLOSED = re.compile(r"</([A-Za-z][\w.:-]{1,60})>\s*\Z")
_OF_THE_PERSON = re.compile(
    r"(?:\b|_)(?:user|human|person|task|query|question|request|prompt|message|answer|feedback|input|command|args|words)"
    r"(?:\b|_)|(?:Query|Question|Request|Message|Answer)\b",
)


def _is_for_words(text: str) -> bool:
    """Returns True for a part that ends with an element for the person's words."""
    last = _LAST_CLOSED.search(text, max(len(text) - _MOST_HEAD_CHARS, 0))
    return bool(last and _OF_THE_PERSON.search(last[1]) and f"\n<{last[1]}>" in f"\n{text}")


def _is_programs(words: str) -> bool:
    """Returns True for one element, whose name tells of a program and of nothing that a person said."""
    name = element[1] if (element := _ALONE.fullmatch(words)) else ""
    return _SEVERAL_WORDS.search(name) is not None and _OF_THE_PERSON.search(name) is None


_ELEMENTS: Mapping[str, Kind] = {
    name: "data" if kind == "data" else "note" for kind, names in RULES["elements"].items() for name in names
}
_TAG = re.compile(r"<(/?)([A-Za-z][\w.:-]{1,60})(?:[ \t][^<>\n]{0,1000})?>")
# Data by its form: an attribute says where to read it again.
_SOURCE = re.compile(r"[ \t](?:path|file|filename|file_path|ur[il])=[\"']")
# Inside a line of the person's a shorter element is one that the person writes about.
_LEAST_INLINE_CHARS = 120
# The rest of a paragraph, and the list behind it; a question in the last line may be of the person who pasted the rest.
_PARAGRAPH = re.compile(
    r".*?(?=(?:\n[^\n]*[?？][ \t]*)?(?:\n[ \t]*\n(?![ \t]*(?:[-*|{\[<]|\d+[.)]|\t| {2}))|\Z))", re.DOTALL
)
_OPENING = re.compile("|".join(map(re.escape, RULES["openings"])))
# One that cannot be mistaken may stand after the person's words, too.
_INNER_OPENING = re.compile(
    "\n(?=" + "|".join(re.escape(each) for each in RULES["openings"] if each.startswith("--")) + ")"
)
# A result under the role `user`: of Cline and Roo Code, some with the person's answer; of Hermes, Qwen and Anthropic.
_TEXT_RESULT = re.compile(r"\[[a-z_]{2,40}(?: for '[^\n]{0,2000}')?\.?[^\n]{0,200}\] Result:")
_RESULT_BEGINS = re.compile(rf"\s*(?:{_TEXT_RESULT.pattern}|<(?:tool_response|tool_result|function_results)>)")
_BEGINS_CLIENTS = re.compile(rf"{_RESULT_BEGINS.pattern}|{re.escape(LITELLMS_NOTE)}")
_PERSONS_WORDS = re.compile(r"<(?:feedback|answer|user_message|task)>")
# The beginning of a tool's result, inside a note.
_RESULT = re.compile(
    r"\s*(?:(?:Called|Result of calling) the [\w.:-]{1,80} tool(?: with the following input)?:"
    r"|Note: [^\n]{1,1000} was (?:modified|read before)|The user selected (?:the )?lines? )"
)
_SIGN = re.compile(r"\S")


def stretches(text: str, marks: Collection[str] = (), *, is_alone: bool = True) -> list[Stretch]:
    """Divides a part of a user's message, in order, without what is blank.

    Beside other parts, not `is_alone`, a result as text reaches to the part's end.
    """
    doubted = [Stretch("doubted", text, 0, len(text))]
    if len(text) > _MAX_CHARS or text.count("<") > _MAX_TAGS:
        return doubted
    pieces: list[Stretch] = []
    at = 0
    for element in (*_elements(text, marks), Stretch("words", text, len(text), len(text))):
        while (sign := _SIGN.search(text, at, element.start)) and len(pieces) <= _MAX_STRETCHES:
            pieces.append(_block(text, at, sign.start(), element.start, is_alone))
            at = pieces[-1].end
        # One that stands in an opening is part of that.
        if at <= element.start < element.end:
            pieces.append(element)
            at = element.end
        if len(pieces) > _MAX_STRETCHES:
            return doubted
    pieces = [piece for each in pieces for piece in _without_recurring(each, marks)]
    # Words between data or elements of one name are doubted: a file may hold the tag that ends it.
    for name in {each.name or each.kind for each in pieces if each.name or each.kind == "data"}:
        same = [at for at, each in enumerate(pieces) if name in (each.name, each.kind)]
        for at in range(same[0] + 1, same[-1]):
            if pieces[at].kind == "words":
                pieces[at] = pieces[at]._replace(kind="doubted")
    return pieces


def _elements(text: str, marks: Collection[str]) -> Iterator[Stretch]:
    """Elements that clients write, in order; a file may hold the very tag that ends it.

    So one reaches over all closing tags up to the next opening one of its name, and over opening ones before those.
    """
    spans: list[list[re.Match[str]]] = []
    last: dict[str, list[re.Match[str]]] = {}
    for tag in _TAG.finditer(text) if "</" in text else ():
        if tag[1] and tag[2] in last:
            last[tag[2]][1:] = [tag]
        elif not tag[1] and len(last.get(tag[2], ())) != 1:
            last[tag[2]] = [tag]
            spans.append(last[tag[2]])
    at = 0
    for opening, close in (span for span in spans if len(span) > 1):
        name, start, end = opening[2], opening.start(), close.end()
        by_source: Kind | None = "data" if _SOURCE.search(opening[0]) else None
        kind = _ELEMENTS.get(name) or ("recurring" if f"<{name}" in marks else by_source)
        before = text[max(0, start - _LEAST_INLINE_CHARS) : start].rstrip(" \t")[-1:]
        stands_alone = before in ("", "\n", ">") or end - start > _LEAST_INLINE_CHARS or "\n" in text[start:end]
        if kind is not None and start >= at and stands_alone:
            yield _read(Stretch(kind, text, start, end, opening.end(), close.start(), name * (kind == "recurring")))
            at = end


def _block(text: str, start: int, begin: int, end: int, is_alone: bool) -> Stretch:
    """What begins with the first sign at `begin`, before an element or the end at `end`: an opening, or words."""
    opening, result = _OPENING.match(text, begin), _TEXT_RESULT.match(text, begin)
    rule = RULES["openings"][opening[0]] if opening else {}
    kind, mark = rule.get("kind", "data"), rule.get("to", "")
    # A file may hold the mark that ends it.
    at = -1 if mark == "part" else text.find(mark, begin) if kind == "note" else text.rfind(mark, begin)
    if (at < 0 and kind == "data") if rule else (not result or _PERSONS_WORDS.search(text, begin)):
        inner = _INNER_OPENING.search(text, begin, end)
        return Stretch("words", text, start, end if inner is None else inner.start())
    paragraph = None if mark or (not rule and end < len(text)) else _PARAGRAPH.match(text, begin, end)
    close = paragraph.end() if paragraph else at + len(mark) if mark else end
    if at < 0 or not (rule or is_alone):
        # A note without its mark is all of its part.
        close, mark = len(text), ""
    body = result.end() if result else _line_end(text, begin, close)
    return _read(Stretch(kind, text, start, close, body, close - len(mark)))


def _read(note: Stretch) -> Stretch:
    """The same, but as data if it holds what a tool has read."""
    result = _RESULT.match(note.text, note.body)
    if result is None:
        return note
    return note._replace(kind="data", body=_line_end(note.text, result.end(), note.body_end), name="")


def _line_end(text: str, start: int, end: int) -> int:
    """Returns the end of the line at `start`, or the place where it has said enough."""
    at = text.find("\n", start, min(start + _MOST_HEAD_CHARS, end))
    return at if at >= 0 else min(start + _MOST_HEAD_CHARS, end)


_PART = re.compile(r"\S.*?(?=\n[ \t\r]*\n|\Z)", re.DOTALL)
_NUMBERS = re.compile(r"\d+")
# Such as a person may repeat; no mark of a program is in it.
_SENTENCE = re.compile(r"[\w\"'(“„«¿¡][^\n]{0,198}(?<!:)\Z")
_ITEM = re.compile(r"[-*+|•]|[\"']?\w[\w ]{0,30}[\"']? ?[:=]|\S+\Z")
_LEAST_MESSAGES = 3


def marked(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages, of which the user's know by which forms their client is known.

    A line that stands in three user messages, each time beside others, is the client's, and so is an element that does.
    Numbers do not count. All that a message ever says is the person's: people repeat whole messages.
    """
    users = {at: texts_of(each) for at, each in enumerate(messages) if each.role == "user" and not each.is_synthetic}
    is_long = sum(len(text) for texts in users.values() for text in texts) > _MAX_COMPARED_CHARS
    marks = frozenset[str]() if is_long or len(users) < _LEAST_MESSAGES else _marks([*users.values()])
    spoken = pairwise(at for at, each in enumerate(messages) if not each.is_system)
    # Another user's message, or a tool's result.
    beside = {at for pair in spoken if pair[1] in users and messages[pair[0]].role in ("user", "tool") for at in pair}
    marked_users = {at: replace(messages[at], marks=marks, is_beside=at in beside) for at in users}
    return tuple(marked_users.get(at, each) for at, each in enumerate(messages))


def _marks(messages: Sequence[Sequence[str]]) -> frozenset[str]:
    """The elements and lines that recur in the texts of user messages, oldest first."""
    tags = Counter(tag for texts in messages for tag in {*_TAG.findall("\n".join(texts))} if not tag[0])
    often = (name for (_, name), count in tags.items() if count >= _LEAST_MESSAGES)
    elements = {f"<{name}" for name in often if not _OF_THE_PERSON.search(name)}
    said: list[list[_Lines]] = []
    plain: set[str] = set()
    whole: set[_Lines] = set()
    for texts in messages:
        own = [each for text in texts for each in stretches(text, elements)]
        paragraphs = [_levelled(part[0]) for each in own if each.speaks for part in _parts(each)]
        is_whole = len(own) == len(paragraphs) == 1
        if paragraphs and not (is_whole and paragraphs[0] in whole):
            said.append(paragraphs)
        plain.update(*paragraphs if all(each.speaks for each in own) else ())
        # A line that is all of a message is the person's, and a message that comes again counts once.
        whole.update(paragraphs if is_whole else ())
    # A sentence is the client's if it is never left out, from the beginning or at least beside what it attaches.
    times = Counter(line for paragraphs in said for line in {*chain.from_iterable(paragraphs)})
    since = {line: at for at, paragraphs in reversed([*enumerate(said)]) for lines in paragraphs for line in lines}
    since |= dict.fromkeys(plain, 0)
    return frozenset(elements).union(
        line
        for line, count in times.items()
        if count >= _LEAST_MESSAGES and (line,) not in whole and not line.startswith("<")
        if count >= len(said) - since[line] or not _SENTENCE.match(line)
    )


def _without_recurring(words: Stretch, marks: Collection[str]) -> Iterator[Stretch]:
    """Words without the client's paragraphs among them; any other stretch as it is.

    A client's begins as others do, half of its lines come again, and no other is a sentence.
    """
    if words.kind != "words" or not marks:
        yield words
        return
    text, pieces, end = words.text, [], words.start
    for part in _parts(words):
        first, *others = _levelled(part[0])
        new = [line for line in others if line not in marks]
        is_clients = first in marks and 2 * len(new) <= len(others) and all(map(_ITEM.match, new))
        start, end = part.span()
        pieces.append(("recurring" if is_clients else "words", start, end))
    pieces.append(("words", end, words.end))
    for kind, same in groupby((each for each in pieces if text[each[1] : each[2]].strip()), key=lambda each: each[0]):
        places = [*same]
        start, end = places[0][1], places[-1][2]
        yield Stretch(kind, text, start, end, _line_end(text, start, end), end)


def _parts(words: Stretch) -> Iterator[re.Match[str]]:
    """The paragraphs of words, the first of too many."""
    return islice(_PART.finditer(words.text, words.start, words.end), _MAX_STRETCHES)


def _levelled(text: str) -> _Lines:
    """The lines of a text without what changes from one time to the next: numbers and white space."""
    return tuple(filter(None, (" ".join(line.split()) for line in _NUMBERS.sub("0", text).split("\n"))))
