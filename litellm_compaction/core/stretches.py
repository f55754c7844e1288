"""Tells a person's words in a user message from what their client wrote: notes and attached data.

Clients put files that they have read again, outputs of commands and reminders under the role `user`, often into the
message with the person's words. They are known by their form, by what the client repeats (`recurring.py`), and by the
short list in `clients.toml`. Data shrinks as tool results do and is never quoted as the person's, and so does what
recurs; a note stays where it is, and is not quoted either (promise P2). If the form leaves a doubt, text counts as the
person's, so that it stays; it is quoted as the person's only without one.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, NamedTuple, TypeAlias

from litellm_compaction.core.messages import FRAME_END, NO_MARKS, Marks, Message, parse_message, user_message

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind: TypeAlias = Literal["words", "doubted", "note", "data", "recurring"]

RULES: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    resources.files(__package__).joinpath("clients.toml").read_text(encoding="utf-8")
)
_ELEMENTS: Mapping[str, Kind] = {
    name: "data" if kind == "data" else "note" for kind, names in RULES["elements"].items() for name in names
}
_OPENINGS: Mapping[str, Mapping[str, Any]] = RULES["openings"]
# LiteLLM's form of a system message in mid-conversation (mid_conversation_system.py): a text part of its own, before
# those of the system message.
LITELLMS_NOTE = "Operator note (not from the user)"
# Those that say where they end stand after the person's words, too, if they cannot be mistaken.
_INNER_OPENING = re.compile(
    "\n(?=" + "|".join(re.escape(text) for text, rule in _OPENINGS.items() if "--" in rule.get("to", "")) + ")"
)
# Of an element that is data by its form: an attribute says where it can be read again.
_SOURCED = re.compile(
    r"<([A-Za-z][\w.:-]{1,60})[ \t](?:[^<>\n]{0,1000}[ \t])?(?:path|file|filename|file_path|ur[il])=[\"']"
)
# Alone in its part, or in a message beside another one, an element with a name of several words is a program's. The
# person's words are wrapped, too, and such a name tells of them.
_WRAPPED = re.compile(r"<(\w{1,30} \w{1,30}|[A-Za-z][\w.:-]{1,60})(?:[ \t][^<>\n]{0,1000})?>")
# In a message beside another one: a line about a JSON object, which is all the rest.
_FENCED = re.compile(r"[^\n`]{1,200}\n```(?:json)?\n[\[{].*[\]}]\n```\s*\Z", re.DOTALL)
_LAST_CLOSED = re.compile(r"</([A-Za-z][\w.:-]{1,60})>\s*\Z")
_SEVERAL_WORDS = re.compile(r"\w[-_ :.]\w|[a-z][A-Z]")
_OF_THE_PERSON = re.compile(
    r"(?:\b|_)(?:user|human|person|task|query|question|request|prompt|message|answer|feedback|input|command|args|words)"
    r"(?:\b|_)|(?:Query|Question|Request|Message|Answer)\b",
)
# The beginning of a tool's result, inside a note.
_RESULT = re.compile(
    r"(?:Called|Result of calling) the [\w.:-]{1,80} tool(?: with the following input)?:"
    r"|Note: [^\n]{1,1000} was (?:modified|read before)|The user selected (?:the )?lines? "
)
# Cline and Roo Code without native tool calls (src/core/assistant-message): a result under the role `user`. In such a
# result these hold what the person answered.
_TEXT_RESULT = re.compile(r"\[[a-z_]{2,40}(?: for '[^\n]{0,2000}')?\.?[^\n]{0,200}\] Result:")
# Hermes, Qwen and Anthropic's older protocol, where a client writes results as the model was trained to read them.
_RESULT_TAGS = ("<tool_response>", "<tool_result>", "<function_results>")
# How programs begin what they say themselves in a part of its own.
_TITLE = re.compile(r"\[[A-Z]{2,30}(?: [A-Z]{2,30}){1,3}\] ")
_PERSONS_WORDS = re.compile(r"<(?:feedback|answer|user_message|task)>")
# A client's own compaction, by this package's library or a tool with the same heading.
_RECORD = "## Session Summary"
_BEGINNINGS = frozenset(("<", "#", "[", *(opening[0] for opening in _OPENINGS)))
_QUESTION_ENDS = ("?", "？")
_BLANKS = re.compile(r"\s*")
# A paragraph reaches over the list behind it.
_PARAGRAPH_END = re.compile(r"\n[ \t]*\n(?![ \t]*(?:[-*|{\[<]|\d+[.)]|\t| {2}))")
_BLANK_LINES = re.compile(r"\n[ \t\r]*\n\s*")
_NUMBERS = re.compile(r"\d+")
_TOKEN = re.compile(r"[!-~]+[./\\_:=-][!-~]+\Z")
_LINE_FORM = re.compile(r"[-*+|•]|[\"']?\w[\w ]{0,30}[\"']? ?[:=]")
_DATES = re.compile(
    r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}\b|\b[AP]M\b"
)
# Inside a line of the person's a short element is one that the person writes about.
_LEAST_INLINE_CHARS = 120
# More tags are a file's, or an attack's, and would take long to read.
_MAX_TAGS, _MAX_STRETCHES, _MAX_NAMES = 20_000, 1_000, 50
# No program adds more than this to a conversation; each look at 200 MB takes 0.3 s.
_MAX_CHARS = 2_000_000
_MOST_HEAD_CHARS = 200


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
    found = [text[each.start : each.end].strip() for text, each in stretches_of(message) if each.speaks]
    return found[-1] if found else ""


def words_ratio(message: Message) -> float:
    """The share of a user message's characters that is not certainly a client's."""
    added_chars = sum(each.end - each.start for _, each in stretches_of(message) if not each.speaks)
    return 1 - added_chars / max(sum(map(len, texts_of(message))), 1)


def divided(message: Message) -> list[Message]:
    """A message as the client's additions, a tool's, and the person's words; itself if it is all the person's."""
    if message.role != "user" or message.is_synthetic:
        return [message]
    found = [(text[each.start : each.end], each.kind) for text, each in stretches_of(message)]
    if all(kind == "words" for _, kind in found):
        return [message]
    attached = "\n".join(text for text, kind in found if kind != "words")
    words = "\n".join(text.strip() for text, kind in found if kind == "words")
    return [parse_message({"role": "tool", "content": attached}), *([user_message(words)] if words else [])]


def levelled(text: str) -> tuple[str, ...]:
    """The lines of a text without what changes from one time to the next: numbers, dates, white space."""
    numbered = _NUMBERS.sub("0", text)
    text = _DATES.sub("0", numbered) if numbered is not text else text
    return tuple(filter(None, (" ".join(line.split()) for line in text.split("\n"))))


def paragraphs(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields the places of the paragraphs in a part of a text, in order; of too many the last holds all the rest."""
    start = _first_sign(text, start)
    for blank in itertools.islice(_BLANK_LINES.finditer(text, start, end), _MAX_STRETCHES):
        yield start, blank.start()
        start = blank.end()
    if start < end:
        yield start, end


def stretches(text: str, marks: Marks = NO_MARKS) -> list[Stretch]:
    """Divides a part of a user's message, in order, without what is blank; `marks` tell of its client."""
    begin = _first_sign(text, 0)
    if begin == len(text):
        return []
    if len(text) > _MAX_CHARS:
        # One of millions of characters is the person's, but was not looked at.
        return [Stretch("doubted", 0, len(text))]
    if "</" not in text and text[begin] not in _BEGINNINGS:
        # So is most of what people write.
        return _without_recurring(text, [Stretch("words", 0, len(text))], marks)
    elements = _elements(text, marks.names)
    if elements is None:
        return [Stretch("doubted", 0, len(text))]
    found: list[Stretch] = []
    for element in elements:
        # One that stands in an opening is part of that.
        found += _between(text, found[-1].end if found else 0, element.start)
        if not found or element.start >= found[-1].end:
            found.append(element)
    found += _between(text, found[-1].end if found else 0, len(text))
    return _with_doubts(_without_recurring(text, found, marks))


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
    last: dict[str, re.Match[str]] = {}
    behind: dict[str, re.Match[str]] = {}
    closing: dict[int, re.Match[str]] = {}
    for tag in reversed(tags):
        name = tag["opens"] or tag["closes"]
        if tag["closes"] and not (name in behind and behind[name]["closes"]):
            last[name] = tag
        elif tag["opens"] and name in last:
            closing[tag.start()] = last[name]
        behind[name] = tag
    found: list[Stretch] = []
    for tag in tags:
        name, close = tag["opens"], closing.get(tag.start())
        if close is None or (found and tag.start() < found[-1].end):
            continue
        kind: Kind = _ELEMENTS.get(name) or ("recurring" if name in names else "data")
        is_sourced = kind != "data" or name not in listed or _SOURCED.match(text, tag.start()) is not None
        if is_sourced and _stands_alone(text, tag.start(), close.end()):
            found.append(_element(text, name, kind, tag, close))
    return None if len(tags) > _MAX_TAGS or len(found) > _MAX_STRETCHES else found


def _element(text: str, name: str, kind: Kind, opening: re.Match[str], closing: re.Match[str]) -> Stretch:
    start, end = opening.start(), closing.end()
    result = _RESULT.match(text, _first_sign(text, opening.end()))
    if result is not None:
        return Stretch("data", start, end, _line_end(text, result.end(), closing.start()), closing.start())
    return Stretch(kind, start, end, opening.end(), closing.start(), name if kind == "recurring" else "")


def _stands_alone(text: str, start: int, end: int) -> bool:
    before = text[max(0, start - _LEAST_INLINE_CHARS) : start].rstrip(" \t")
    return before[-1:] in ("", "\n", ">") or end - start > _LEAST_INLINE_CHARS or "\n" in text[start:end]


def _between(text: str, start: int, end: int) -> list[Stretch]:
    found: list[Stretch] = []
    # A text may hold thousands of records, so each is a turn of a loop.
    while (begin := _first_sign(text, start)) < end:
        each = _first_between(text, start, begin, end)
        found.append(each)
        if len(found) > _MAX_STRETCHES:
            return [Stretch("doubted", found[0].start, end)]
        start, end = each.end, max(end, each.end)
    return found


def _first_between(text: str, start: int, begin: int, end: int) -> Stretch:
    if text.startswith(_RECORD, begin):
        # One of ours may have the person's words after it.
        close = text.find(FRAME_END, begin)
        return Stretch("note", start, len(text) if close < 0 else close + len(FRAME_END))
    opened = next((each for each in _OPENINGS.items() if text.startswith(each[0], begin)), None)
    to = "" if opened is None else opened[1].get("to", "")
    close = -1 if opened is None else _opening_end(text, begin, end, to)
    if opened is not None and close > 0:
        line, body_end = _line_end(text, begin, close), close - (0 if to == "part" else len(to))
        result = _RESULT.match(text, _first_sign(text, line))
        if result is not None:
            return Stretch("data", start, close, _line_end(text, result.end(), body_end), body_end)
        return Stretch(opened[1]["kind"], start, close, line, body_end)
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
    found = _PARAGRAPH_END.search(text, begin, end)
    close = end if found is None else found.start()
    # A question in the line below what was pasted may be the person's.
    last = text.rfind("\n", begin, close)
    return last if last > 0 and text[last:close].rstrip().endswith(_QUESTION_ENDS) else close


def _without_recurring(text: str, found: list[Stretch], marks: Marks) -> list[Stretch]:
    """The same without the client's paragraphs among the words."""
    if not (marks.names or marks.lines):
        return found
    divided: list[Stretch] = []
    for each in found:
        if each.kind != "words":
            divided.append(each)
            continue
        for start, end, kind in _apart(text, paragraphs(text, each.start, each.end), marks):
            if divided and divided[-1].kind == kind and divided[-1].start >= each.start:
                divided[-1] = divided[-1]._replace(end=end, body_end=end)
            else:
                divided.append(Stretch(kind, start, end, _line_end(text, start, end), end))
    return divided


def _apart(text: str, places: Iterable[tuple[int, int]], marks: Marks) -> Iterator[tuple[int, int, Kind]]:
    """The places of paragraphs, apart from the client's lines at their ends."""
    for start, end in places:
        if is_clients(levelled(text[start:end]), marks):
            yield start, end, "recurring"
            continue
        close = end
        while (at := text.rfind("\n", start, close)) >= 0 and marks.lines.issuperset(levelled(text[at:close])):
            close = at
        yield start, close, "words"
        if close < end:
            yield close, end, "recurring"


def is_clients(lines: Sequence[str], marks: Marks) -> bool:
    """Returns True for a paragraph's levelled lines that begin as a client's do, and half of which come again."""
    first, *others = lines or ("",)
    has_sentence = any(line_form(line) not in marks.items and not _TOKEN.match(line) for line in others)
    return first in marks.lines and not has_sentence and 2 * sum(line in marks.items for line in others) >= len(others)


def line_form(line: str) -> str:
    """The beginning that the lines of one list share, a mark or a key; the line itself if it has none."""
    found = _LINE_FORM.match(line)
    return line if found is None else found[0]


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


def stretches_of(message: Message) -> Iterator[tuple[str, Stretch]]:
    """The stretches of a user message, each with the text that it is a part of."""
    return ((text, each) for text, found in zip(texts_of(message), parts_of(message), strict=True) for each in found)


def texts_of(message: Message) -> list[str]:
    content = message.raw.get("content")
    parts = content if isinstance(content, list) else [message.text]
    given = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in given if isinstance(text, str)]


def parts_of(message: Message) -> list[list[Stretch]]:
    """The stretches of each text part of a message."""
    texts = texts_of(message)
    if texts and texts[0].startswith(LITELLMS_NOTE):
        return [_all_clients(stretches(text)) for text in texts]
    found = [part_stretches(text, message.marks, is_alone=len(texts) == 1) for text in texts]
    asked = [_asks_in_element(text) for text in texts]
    if texts[1:] and (any(asked) or any(map(_whole_result, texts[:-1]))):
        # The client wraps the person's words, so other parts are its own; a question may be theirs.
        found = [
            own if is_one or text.rstrip().endswith(_QUESTION_ENDS) else _all_clients(own)
            for text, own, is_one in zip(texts, found, asked, strict=True)
        ]
    is_beside = message.marks.is_beside
    said = [(own, at, text) for text, own in zip(texts, found, strict=True) for at in range(len(own)) if own[at].speaks]
    wrapped = [(own, at) for own, at, text in said if _is_wrapped(text, own[at], is_beside)]
    if is_beside or len(wrapped) < len(said):
        for own, at in wrapped:
            own[at] = own[at]._replace(kind="note")
    return found


def part_stretches(text: str, marks: Marks = NO_MARKS, *, is_alone: bool) -> list[Stretch]:
    """The stretches of a text part: beside others a result as text reaches to the part's end, and so does a title."""
    if not is_alone and _TITLE.match(text) and not _PERSONS_WORDS.search(text):
        return [Stretch("note", 0, len(text))]
    return ([] if is_alone else _whole_result(text)) or stretches(text, marks)


def _all_clients(found: Iterable[Stretch]) -> list[Stretch]:
    return [each._replace(kind="note") if each.speaks else each for each in found]


def _whole_result(text: str) -> list[Stretch]:
    """A part that is a result as text, to its end: no person has typed in it; empty for any other."""
    result = _TEXT_RESULT.match(text, _first_sign(text, 0))
    if result is None or len(text) > _MAX_CHARS or _PERSONS_WORDS.search(text):
        return []
    return [Stretch("data", 0, len(text), result.end(), len(text))]


def _is_wrapped(text: str, stretch: Stretch, is_beside: bool) -> bool:
    """Returns True for words that are one element, whose name tells of a program and of nothing that a person said."""
    start = _first_sign(text, stretch.start)
    if len(text) <= _MAX_CHARS and is_beside and _FENCED.match(text, start):
        return True
    name = found[1] if len(text) <= _MAX_CHARS and (found := _WRAPPED.match(text, start)) else ""
    is_programs = _SEVERAL_WORDS.search(name) is not None and not is_persons_name(name)
    return is_programs and text[start : stretch.end].rstrip().endswith(f"</{name}>")


def _asks_in_element(text: str) -> bool:
    """Returns True for a part with a result that holds the person's words, or that ends with an element for them."""
    if _TEXT_RESULT.match(text, _first_sign(text, 0)) and _PERSONS_WORDS.search(text):
        return True
    last = _LAST_CLOSED.search(text, max(len(text) - _MOST_HEAD_CHARS, 0))
    return last is not None and is_persons_name(last[1]) and f"\n<{last[1]}>" in f"\n{text}"


def is_persons_name(name: str) -> bool:
    """Returns True for the name of an element that may hold a person's words."""
    return _OF_THE_PERSON.search(name) is not None
