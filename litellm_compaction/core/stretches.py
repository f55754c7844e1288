"""Tells a person's words in a user message from what their client wrote: notes and attached data.

Clients put files that they have read again, outputs of commands and reminders under the role `user`, often into the
message with the person's words. They are known by their form, by what the client repeats beside other words, and by the
short list in `clients.toml`. Data shrinks as tool results do and is never quoted as the person's, and so does what
recurs; a note stays where it is, and is not quoted either (promise P2). If a doubt is left, text counts as the
person's, so that it stays; it is quoted as the person's only without one.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from litellm_compaction.core import table
from litellm_compaction.core.messages import FRAME_END, NO_MARKS, Marks, Message, parse_message, user_message

Kind: TypeAlias = Literal["words", "doubted", "note", "data", "recurring"]
_Lines: TypeAlias = tuple[str, ...]
_Block: TypeAlias = tuple[str, _Lines]

RULES: Mapping[str, Mapping[str, Any]] = table("clients")
_ELEMENTS: Mapping[str, Kind] = {
    name: "data" if kind == "data" else "note" for kind, names in RULES["elements"].items() for name in names
}
_OPENINGS: Mapping[str, Mapping[str, Any]] = RULES["openings"]
# LiteLLM's form of a system message in mid-conversation: a text part of its own, before those of that message.
LITELLMS_NOTE = "Operator note (not from the user)"
# One that cannot be mistaken may stand after the person's words, too.
_INNER_OPENING = re.compile("\n(?=" + "|".join(re.escape(each) for each in _OPENINGS if each.startswith("--")) + ")")
# An opening tag at the beginning of a line; and of data by its form: an attribute says where to read it again.
_OPENS = re.compile(r"^[ \t]*<([A-Za-z][\w.:-]{1,60})(?:[ \t][^<>\n]{0,1000})?>", re.MULTILINE)
_SOURCED = re.compile(
    r"<([A-Za-z][\w.:-]{1,60})[ \t](?:[^<>\n]{0,1000}[ \t])?(?:path|file|filename|file_path|ur[il])=[\"']"
)
# Alone in its part, or beside another message, an element with a name of several words is a program's; a name may also
# tell of the person's words in it.
_WRAPPED = re.compile(r"<(\w{1,30} \w{1,30}|[A-Za-z][\w.:-]{1,60})(?:[ \t][^<>\n]{0,1000})?>")
_SEVERAL_WORDS = re.compile(r"\w[-_ :.]\w|[a-z][A-Z]")
_LAST_CLOSED = re.compile(r"</([A-Za-z][\w.:-]{1,60})>\s*\Z")
_OF_THE_PERSON = re.compile(
    r"(?:\b|_)(?:user|human|person|task|query|question|request|prompt|message|answer|feedback|input|command|args|words)"
    r"(?:\b|_)|(?:Query|Question|Request|Message|Answer)\b",
)
# In a message beside another one: a line about a JSON object, which is all the rest.
_FENCED = re.compile(r"[^\n`]{1,200}\n```(?:json)?\n[\[{].*[\]}]\n```\s*\Z", re.DOTALL)
# The beginning of a tool's result, inside a note.
_RESULT = re.compile(
    r"(?:Called|Result of calling) the [\w.:-]{1,80} tool(?: with the following input)?:"
    r"|Note: [^\n]{1,1000} was (?:modified|read before)|The user selected (?:the )?lines? "
)
# Cline and Roo Code without native tool calls: a result under the role `user`, some with what the person answered; and
# how they begin what they say themselves.
_TEXT_RESULT = re.compile(r"\[[a-z_]{2,40}(?: for '[^\n]{0,2000}')?\.?[^\n]{0,200}\] Result:")
_PERSONS_WORDS = re.compile(r"<(?:feedback|answer|user_message|task)>")
_TITLE = re.compile(r"\[[A-Z]{2,30}(?: [A-Z]{2,30}){1,3}\] ")
# Hermes, Qwen and Anthropic's older protocol.
_RESULT_TAGS = ("<tool_response>", "<tool_result>", "<function_results>")
# A client's own compaction, by this package's library or a tool with the same heading.
_RECORD = "## Session Summary"
_QUESTION_ENDS = ("?", "？")
_BLANKS = re.compile(r"\s*")
# A paragraph reaches over the list behind it.
_PARAGRAPH_END = re.compile(r"\n[ \t]*\n(?![ \t]*(?:[-*|{\[<]|\d+[.)]|\t| {2}))")
_BLANK_LINES = re.compile(r"\n[ \t\r]*\n\s*")
_NUMBERS = re.compile(r"\d+")
_DATES = re.compile(
    r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}\b|\b[AP]M\b"
)
_TOKEN = re.compile(r"[!-~]+[./\\_:=-][!-~]+\Z")
_LINE_FORM = re.compile(r"[-*+|•]|[\"']?\w[\w ]{0,30}[\"']? ?[:=]")
# A sentence without any mark of a program, as a person may repeat one, is the client's only if it is never left out.
_SENTENCE = re.compile(r"[\w\"'(“„«¿¡][^\n]{0,198}(?<!:)\Z")
_LEAST_MESSAGES = 3
# Inside a line of the person's a shorter element is one that the person writes about.
_LEAST_INLINE_CHARS, _MOST_HEAD_CHARS = 120, 200
# More tags are a file's, or an attack's, and would take long to read; no program adds more text.
_MAX_TAGS, _MAX_STRETCHES, _MAX_NAMES = 20_000, 1_000, 50
_MAX_CHARS, _MAX_COMPARED_CHARS = 2_000_000, 1_000_000


class Stretch(NamedTuple):
    """A part of a text, from `start` to `end`; of data, the part that may be left out is from `body` to `body_end`.

    Of an element that recurs, its `name`.
    """

    kind: Kind
    start: int
    end: int
    body: int = 0
    body_end: int = 0
    name: str = ""

    @property
    def speaks(self) -> bool:
        """The person may have written it."""
        return self.kind in ("words", "doubted")


# ------------------------------------------------------------------ of a message


def has_words(message: Message) -> bool:
    """Returns True if a user message may hold something that the person wrote."""
    return any(each.speaks for _, each in stretches_of(message))


def is_text_result(message: Message) -> bool:
    """Returns True if a user message holds a call's result, in the form of a protocol of text."""
    text = message.text.lstrip()
    return message.role == "user" and (text.startswith(_RESULT_TAGS) or _TEXT_RESULT.match(text) is not None)


def own_words(message: Message) -> str:
    """The words of a user message that are certainly the person's; "" for none."""
    return "\n".join(
        text[each.start : each.end].strip() for text, each in stretches_of(message) if each.kind == "words"
    )


def last_words(message: Message) -> str:
    """The last stretch that the person may have written; "" for none."""
    spoken = [text[each.start : each.end].strip() for text, each in stretches_of(message) if each.speaks]
    return spoken[-1] if spoken else ""


def words_ratio(message: Message) -> float:
    """The share of a user message's characters that is not certainly a client's."""
    added_chars = sum(each.end - each.start for _, each in stretches_of(message) if not each.speaks)
    return 1 - added_chars / max(sum(map(len, texts_of(message))), 1)


def divided(message: Message) -> list[Message]:
    """A message as the client's additions, a tool's, and the person's words; itself if it is all the person's."""
    pieces = [] if message.role != "user" or message.is_synthetic else [*stretches_of(message)]
    attached = "\n".join(text[each.start : each.end] for text, each in pieces if each.kind != "words")
    if not attached:
        return [message]
    words = own_words(message)
    return [parse_message({"role": "tool", "content": attached}), *([user_message(words)] if words else [])]


def stretches_of(message: Message) -> Iterator[tuple[str, Stretch]]:
    """The stretches of a user message, each with the text that it is a part of."""
    return ((text, each) for text, own in zip(texts_of(message), parts_of(message), strict=True) for each in own)


def texts_of(message: Message) -> list[str]:
    """The text parts of a message."""
    content = message.raw.get("content")
    parts = content if isinstance(content, list) else [message.text]
    given = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in given if isinstance(text, str)]


def parts_of(message: Message) -> list[list[Stretch]]:
    """The stretches of each text part of a message."""
    texts, marks = texts_of(message), message.marks
    is_note = bool(texts) and texts[0].startswith(LITELLMS_NOTE)
    is_alone = is_note or len(texts) == 1
    found = [stretches(text, NO_MARKS if is_note else marks, is_alone=is_alone) for text in texts]
    asked = [_asks_in_element(text) for text in texts]
    # The client wraps the person's words, so other parts are its own; a question may be theirs.
    wraps = not is_alone and (any(asked) or any(_TEXT_RESULT.match(text.lstrip()) for text in texts[:-1]))
    is_persons = (is_one or text.rstrip().endswith(_QUESTION_ENDS) for text, is_one in zip(texts, asked, strict=True))
    found = [
        _all_clients(own) if is_note or (wraps and not is_its) else own
        for own, is_its in zip(found, is_persons, strict=True)
    ]
    said = [(own, at, text) for text, own in zip(texts, found, strict=True) for at in range(len(own)) if own[at].speaks]
    wrapped = [(own, at) for own, at, text in said if _is_wrapped(text, own[at], marks.is_beside)]
    if marks.is_beside or len(wrapped) < len(said):
        for own, at in wrapped:
            own[at] = own[at]._replace(kind="note")
    return found


def _all_clients(found: Iterable[Stretch]) -> list[Stretch]:
    return [each._replace(kind="note") if each.speaks else each for each in found]


def _is_wrapped(text: str, stretch: Stretch, is_beside: bool) -> bool:
    """Returns True for words that are one element, whose name tells of a program and of nothing that a person said."""
    start = _first_sign(text, stretch.start)
    if len(text) > _MAX_CHARS or (is_beside and _FENCED.match(text, start)):
        return len(text) <= _MAX_CHARS
    opening = _WRAPPED.match(text, start)
    name = opening[1] if opening else ""
    is_programs = _SEVERAL_WORDS.search(name) is not None and not _OF_THE_PERSON.search(name)
    return is_programs and text[start : stretch.end].rstrip().endswith(f"</{name}>")


def _asks_in_element(text: str) -> bool:
    """Returns True for a part with a result that holds the person's words, or that ends with an element for them."""
    if _TEXT_RESULT.match(text, _first_sign(text, 0)) and _PERSONS_WORDS.search(text):
        return True
    last = _LAST_CLOSED.search(text, max(len(text) - _MOST_HEAD_CHARS, 0))
    return last is not None and _OF_THE_PERSON.search(last[1]) is not None and f"\n<{last[1]}>" in f"\n{text}"


# ------------------------------------------------------------------ of a text


def stretches(text: str, marks: Marks = NO_MARKS, *, is_alone: bool = True) -> list[Stretch]:
    """Divides a part of a user's message, in order, without what is blank.

    Beside other parts, not `is_alone`, a result as text reaches to the part's end, and so does a title.
    """
    begin = _first_sign(text, 0)
    elements = _elements(text, marks.names) if len(text) <= _MAX_CHARS else None
    if elements is None:
        # The person's, but it was not looked at.
        return [Stretch("doubted", 0, len(text))]
    if not (is_alone or _PERSONS_WORDS.search(text)):
        if (result := _TEXT_RESULT.match(text, begin)) is not None:
            return [Stretch("data", 0, len(text), result.end(), len(text))]
        if _TITLE.match(text):
            return [Stretch("note", 0, len(text))]
    found: list[Stretch] = []
    for element in elements:
        # One that stands in an opening is part of that.
        found += _between(text, found[-1].end if found else 0, element.start)
        if not found or element.start >= found[-1].end:
            found.append(element)
    found += _between(text, found[-1].end if found else 0, len(text))
    return _with_doubts([piece for each in found for piece in _without_recurring(text, each, marks)])


@lru_cache(maxsize=64)
def _tag(names: frozenset[str]) -> re.Pattern[str]:
    listed = "|".join(map(re.escape, sorted({*_ELEMENTS, *names}, key=len, reverse=True)))
    return re.compile(rf"<(?:/(?P<closes>{listed})|(?P<opens>{listed})(?:[ \t][^<>\n]{{0,1000}})?)>")


def _elements(text: str, names: frozenset[str]) -> list[Stretch] | None:
    """Elements that clients write, in order; None if there are too many.

    A file may hold the very tag that ends it. So an element reaches over all closing tags up to the next opening one of
    its name, and over opening ones without a closing one between them.
    """
    sourced = dict.fromkeys(_SOURCED.findall(text) if "</" in text else ())
    listed = {each for each in itertools.islice(sourced, _MAX_NAMES) if each not in _ELEMENTS and f"</{each}>" in text}
    tags = list(itertools.islice(_tag(names | listed).finditer(text), _MAX_TAGS + 1))
    spans: list[list[re.Match[str]]] = []
    last: dict[str, list[re.Match[str]]] = {}
    for tag in tags:
        name = tag["opens"] or tag["closes"]
        if tag["closes"] and name in last:
            last[name][1:] = [tag]
        elif tag["opens"] and len(last.get(name, ())) != 1:
            last[name] = [tag]
            spans.append(last[name])
    found: list[Stretch] = []
    for opening, close in (span for span in spans if len(span) > 1):
        name, start, end = opening["opens"], opening.start(), close.end()
        kind: Kind = _ELEMENTS.get(name) or ("recurring" if name in names else "data")
        is_sourced = kind != "data" or name not in listed or _SOURCED.match(text, start) is not None
        if is_sourced and (not found or start >= found[-1].end) and _stands_alone(text, start, end):
            own = Stretch(kind, start, end, opening.end(), close.start(), name if kind == "recurring" else "")
            found.append(_read_in(text, own))
    return None if len(tags) > _MAX_TAGS or len(found) > _MAX_STRETCHES else found


def _stands_alone(text: str, start: int, end: int) -> bool:
    before = text[max(0, start - _LEAST_INLINE_CHARS) : start].rstrip(" \t")
    return before[-1:] in ("", "\n", ">") or end - start > _LEAST_INLINE_CHARS or "\n" in text[start:end]


def _read_in(text: str, note: Stretch) -> Stretch:
    """The same, but as data if it holds what a tool has read."""
    result = _RESULT.match(text, _first_sign(text, note.body))
    if result is None:
        return note
    return Stretch("data", note.start, note.end, _line_end(text, result.end(), note.body_end), note.body_end)


def _between(text: str, start: int, end: int) -> list[Stretch]:
    """The stretches of a text between two elements."""
    found: list[Stretch] = []
    # A text may hold thousands of records, so each is a turn of a loop.
    while (begin := _first_sign(text, start)) < end:
        found.append(_first_between(text, start, begin, end))
        if len(found) > _MAX_STRETCHES:
            return [Stretch("doubted", found[0].start, end)]
        start, end = found[-1].end, max(end, found[-1].end)
    return found


def _first_between(text: str, start: int, begin: int, end: int) -> Stretch:
    if text.startswith(_RECORD, begin):
        # One of ours may have the person's words after it.
        close = text.find(FRAME_END, begin)
        return Stretch("note", start, len(text) if close < 0 else close + len(FRAME_END))
    for opening, rule in _OPENINGS.items():
        to = rule.get("to", "")
        close = _opening_end(text, begin, end, to) if text.startswith(opening, begin) else -1
        if close > 0:
            body_end = close - (0 if to == "part" else len(to))
            return _read_in(text, Stretch(rule["kind"], start, close, _line_end(text, begin, close), body_end))
    result = _TEXT_RESULT.match(text, begin)
    if result is not None and _PERSONS_WORDS.search(text, begin) is None:
        # The client's own element behind it leaves no place for a person's words.
        close = end if end < len(text) else _opening_end(text, begin, end, "")
        return Stretch("data", start, close, result.end(), close)
    inner = _INNER_OPENING.search(text, begin, end)
    return Stretch("words", start, end if inner is None else inner.start())


def _opening_end(text: str, begin: int, end: int, to: str) -> int:
    """Where the form of an opening ends: at `to`, with the part, or else with its paragraph; -1 if `to` is missing.

    The text behind it is the person's: they may have pasted it.
    """
    if to == "part":
        return len(text)
    if to:
        close = text.rfind(to, begin)
        return close if close < 0 else close + len(to)
    paragraph = _PARAGRAPH_END.search(text, begin, end)
    close = end if paragraph is None else paragraph.start()
    # A question in the line below what was pasted may be the person's.
    last = text.rfind("\n", begin, close)
    return last if last > 0 and text[last:close].rstrip().endswith(_QUESTION_ENDS) else close


def _without_recurring(text: str, words: Stretch, marks: Marks) -> Iterator[Stretch]:
    """Words without the client's paragraphs among them, and its lines at their ends; any other stretch as it is."""
    if words.kind != "words" or not (marks.names or marks.lines):
        yield words
        return
    pieces: list[tuple[Kind, int, int]] = []
    for start, end in _paragraphs(text, words.start, words.end):
        close = start if _is_clients(_levelled(text[start:end]), marks) else end
        while (at := text.rfind("\n", start, close)) >= 0 and marks.lines.issuperset(_levelled(text[at:close])):
            close = at
        pieces += [("words", start, close), ("recurring", close, end)]
    for kind, same in itertools.groupby((each for each in pieces if each[1] < each[2]), key=lambda each: each[0]):
        places = [*same]
        start, end = places[0][1], places[-1][2]
        yield Stretch(kind, start, end, _line_end(text, start, end), end)


def _with_doubts(found: list[Stretch]) -> list[Stretch]:
    """The same, but words between data or elements of one name are doubted: a file may hold the tag that ends it."""
    for name in {each.name or each.kind for each in found if each.name or each.kind == "data"}:
        same = [at for at, each in enumerate(found) if name in (each.name, each.kind)]
        for at in range(same[0] + 1, same[-1]):
            if found[at].kind == "words":
                found[at] = found[at]._replace(kind="doubted")
    return found


def _first_sign(text: str, start: int) -> int:
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks is not None else start


def _line_end(text: str, start: int, end: int) -> int:
    """Returns the end of the line at `start`, or the place where it has said enough."""
    at = text.find("\n", start, min(start + _MOST_HEAD_CHARS, end))
    return at if at >= 0 else min(start + _MOST_HEAD_CHARS, end)


# ------------------------------------------------------------------ what a client writes again and again


class _Said(NamedTuple):
    """A user message: its blocks, paragraphs and elements, as levelled lines, an element with its name.

    `is_turn` is True if it stands where a person speaks, at the beginning or after an answer, and the client does not.
    """

    is_turn: bool
    has_elements: bool
    blocks: list[_Block]


def marked(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages, of which the user's know by which forms their client is known; the same objects if by none.

    A line that stands in three user messages, each time beside others, is the client's, and so is an element that does.
    Numbers and dates do not count. All that a message ever says is the person's: people repeat whole messages.
    """
    users = [at for at, each in enumerate(messages) if each.role == "user" and not each.is_synthetic]
    spoken = [at for at, each in enumerate(messages) if not each.is_system]
    pairs = [pair for pair in itertools.pairwise(spoken) if messages[pair[1]].role == "user"]
    # No answer separates these from another user's message, or from a tool's result.
    beside = {at for pair in pairs if messages[pair[0]].role in ("user", "tool") for at in pair}
    marks = NO_MARKS
    if len(users) >= _LEAST_MESSAGES and sum(len(messages[at].text) for at in users) <= _MAX_COMPARED_CHARS:
        marks = _marks({at: texts_of(messages[at]) for at in users}, beside)
    texts = ((at, messages[at].text.strip()) for at in users if at in beside)
    framed = {at for at, text in texts if text.startswith("<") or text.endswith("```")}
    if marks == NO_MARKS and not framed:
        return messages
    own = {at: replace(messages[at], marks=replace(marks, is_beside=at in framed)) for at in users}
    return tuple(own.get(at, each) for at, each in enumerate(messages))


def _marks(texts: Mapping[int, Sequence[str]], beside: Collection[int]) -> Marks:
    names = sorted(_often({name for text in each for name in _OPENS.findall(text)} for each in texts.values()))
    marks = Marks(names=frozenset([name for name in names if not _OF_THE_PERSON.search(name)][:_MAX_NAMES]))
    said = [_said(each, marks, is_turn=at not in beside) for at, each in texts.items()]
    paragraphs = [[lines for name, lines in each.blocks if not name] for each in said]
    whole = {own[0] for own, each in zip(paragraphs, said, strict=True) if len(own) == 1 and not each.has_elements}
    # Of a paragraph that is all of several messages its lines count once.
    counted = [[part] for part in whole] + [own for own in paragraphs if whole.isdisjoint(own)]
    often = _often({line for part in parts for line in part} for parts in counted)
    often -= {part[0] for part in whole if len(part) == 1}
    forms = _often({_line_form(line) for part in parts for line in part[1:]} for parts in counted)
    marks = replace(marks, lines=often - _maybe_said(often, paragraphs), items=often | forms)
    times = Counter(lines[0] for each in said for _, lines in {*each.blocks})
    persons = [block for each in said for block in _all_that_is_said(each, times, marks)]
    return replace(
        marks,
        names=marks.names.difference(name for name, _ in persons),
        lines=marks.lines.difference(line for name, lines in persons if not name for line in lines),
    )


def _said(texts: Iterable[str], marks: Marks, *, is_turn: bool) -> _Said:
    blocks: list[_Block] = []
    found = [(text, each) for text in texts for each in stretches(text, marks)]
    for text, each in found:
        places = _paragraphs(text, each.start, each.end) if each.speaks else [(each.body, each.body_end)]
        levelled = (_levelled(text[start:end]) for start, end in places if each.speaks or each.name)
        blocks += [(each.name, lines) for lines in levelled if lines]
    # A note that is no element is an opening: all of the message is a program's.
    is_programs = any(each.kind == "note" and not text.startswith("<", each.start) for text, each in found)
    return _Said(is_turn and not is_programs, not all(each.speaks for _, each in found), blocks)


def _all_that_is_said(message: _Said, times: Mapping[str, int], marks: Marks) -> list[_Block]:
    """The rarest paragraphs, or else elements, by their first lines, of a message that would have no other words."""
    if not all(name in marks.names if name else _is_clients(lines, marks) for name, lines in message.blocks):
        return []
    own = [block for block in message.blocks if not block[0]] or message.blocks
    least = min((times[lines[0]] for _, lines in own), default=0)
    if message.has_elements and not message.is_turn and least >= _LEAST_MESSAGES:
        return []
    return [block for block in own if times[block[1][0]] == least]


def _is_clients(lines: Sequence[str], marks: Marks) -> bool:
    """Returns True for a paragraph's levelled lines that begin as a client's do, and half of which come again."""
    first, *others = lines or ("",)
    has_sentence = any(_line_form(line) not in marks.items and not _TOKEN.match(line) for line in others)
    return first in marks.lines and not has_sentence and 2 * sum(line in marks.items for line in others) >= len(others)


def _maybe_said(lines: Iterable[str], paragraphs: Iterable[Sequence[_Lines]]) -> set[str]:
    """Those lines that a person may repeat: sentences that some later message lacks."""
    said = [{line for part in own for line in part} for own in paragraphs if own]
    first = {line: at for at in range(len(said) - 1, -1, -1) for line in said[at]}
    return {line for line in lines if _SENTENCE.match(line) and any(line not in each for each in said[first[line] :])}


def _line_form(line: str) -> str:
    """The beginning that the lines of one list share, a mark or a key; the line itself if it has none."""
    form = _LINE_FORM.match(line)
    return line if form is None else form[0]


def _levelled(text: str) -> _Lines:
    """The lines of a text without what changes from one time to the next: numbers, dates, white space."""
    numbered = _NUMBERS.sub("0", text)
    text = _DATES.sub("0", numbered) if numbered is not text else text
    return tuple(filter(None, (" ".join(line.split()) for line in text.split("\n"))))


def _paragraphs(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields the places of the paragraphs in a part of a text, in order; of too many the last holds all the rest."""
    start = _first_sign(text, start)
    for blank in itertools.islice(_BLANK_LINES.finditer(text, start, end), _MAX_STRETCHES):
        yield start, blank.start()
        start = blank.end()
    if start < end:
        yield start, end


def _often(sets: Iterable[Collection[str]]) -> frozenset[str]:
    """What is in so many of the sets that it is a client's."""
    times = Counter(each for one in sets for each in one)
    return frozenset(each for each, count in times.items() if count >= _LEAST_MESSAGES)
