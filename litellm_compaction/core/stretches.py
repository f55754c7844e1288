"""Tells a person's words in a user message from what their client wrote: notes, attached data, its own summarizing.

Clients put files that they have read again, outputs of commands and reminders under the role `user`, often into the
message with the person's words. `clients.toml` says by which forms they are known. Data shrinks as tool results do and
is never quoted as the person's; a note stays where it is, and is not quoted either (promise P2). If the form leaves
a doubt, text counts as the person's, so that it stays; it is quoted as the person's only without one.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Literal, NamedTuple, TypeAlias

from litellm_compaction.core.messages import JsonValue, Message, parse_message, roughly_tokens, user_message
from litellm_compaction.core.prompts import FRAME_END

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind: TypeAlias = Literal["words", "doubted", "note", "data"]

_RULES: Mapping[str, Sequence[Mapping[str, Any]]] = tomllib.loads(
    resources.files(__package__).joinpath("clients.toml").read_text(encoding="utf-8")
)
_ELEMENTS: Mapping[str, Kind] = {name: rule["kind"] for rule in _RULES["elements"] for name in rule["names"]}
_OPENINGS: Mapping[str, Kind] = {text: rule["kind"] for rule in _RULES["openings"] for text in rule["begins"]}
_SUMMARIES = tuple(text for rule in _RULES["summaries"] for text in rule["begins"])
# LiteLLM's form of a system message in mid-conversation (mid_conversation_system.py): a text part of its own, before
# those of the system message.
_LITELLMS_NOTE = "Operator note (not from the user)"
# No client describes a turn in more.
_MAX_HEADER_CHARS = 10_000
# Those of data stand after the person's words, too, if they cannot be mistaken.
_INNER_OPENING = re.compile(
    "\n(?=" + "|".join(re.escape(text) for text, kind in _OPENINGS.items() if kind == "data" and text[0] != "<") + ")"
)
_NAMES = "|".join(map(re.escape, sorted(_ELEMENTS, key=len, reverse=True)))
_TAG = re.compile(rf"<(?:/(?P<closes>{_NAMES})|(?P<opens>{_NAMES})(?:[ \t][^<>\n]{{0,1000}})?)>")
# The beginning of a tool's result, inside a note.
_RESULT = re.compile("|".join(begin for rule in _RULES["results"] for begin in rule["begins"]))
# Codex: a heading before the wrapped contents of AGENTS.md (codex-rs/core/src/user_instructions.rs).
_AGENTS_FILE = re.compile(r"\s*# AGENTS\.md instructions[^\n]{0,1000}\s*\Z")
# Cline and Roo Code without native tool calls (src/core/assistant-message): a result under the role `user`. In such a
# result these hold what the person answered.
_TEXT_RESULT = re.compile(r"\[[a-z_]{2,40}(?: for '[^\n]{0,2000}')?\.?[^\n]{0,200}\] Result:")
# Hermes, Qwen and Anthropic's older protocol, where a client writes results as the model was trained to read them.
_RESULT_TAGS = ("<tool_response>", "<tool_result>", "<function_results>")
_PERSONS_WORDS = re.compile(r"<(?:feedback|answer|user_message|task)>")
# A client's own compaction, by this package's library or a tool with the same heading.
_RECORD = "## Session Summary"
_BEGINNINGS = frozenset(("<", "#", "[", *(opening[0] for opening in _OPENINGS)))
_BLANKS = re.compile(r"\s*")
# Inside a line of the person's a short element is one that the person writes about.
_LEAST_INLINE_CHARS = 120
# More tags are a file's, or an attack's, and would take long to read.
_MAX_TAGS = 20_000
_MAX_STRETCHES = 1_000
# No program adds more than this to a conversation; each look at 200 MB takes 0.3 s (2026-11-23).
_MAX_CHARS = 2_000_000
# Data that is hardly longer than the line in its place stays.
_LEAST_SAVED_CHARS = 80
_MOST_HEAD_CHARS = 200
# Of the text in place of data, in any vocabulary.
REMOVED_TOKENS = 32
_REMOVED = "[About {tokens} tokens that were attached here were removed. Read it again if it is needed.]"


class Stretch(NamedTuple):
    """A part of a text, from `start` to `end`; of data, the part that may be left out is from `body` to `body_end`."""

    kind: Kind
    start: int
    end: int
    body: int = 0
    body_end: int = 0


def has_words(message: Message) -> bool:
    """Returns True if a user message may hold something that the person wrote."""
    return any(each.kind in ("words", "doubted") for _, each in _found(message))


def is_text_result(message: Message) -> bool:
    """Returns True if a user message holds a call's result, in the form of a protocol of text."""
    text = message.text.lstrip()
    return message.role == "user" and (text.startswith(_RESULT_TAGS) or _TEXT_RESULT.match(text) is not None)


def own_words(message: Message) -> str:
    """The words of a user message that are certainly the person's; "" for none."""
    return "\n".join(text[each.start : each.end].strip() for text, each in _found(message) if each.kind == "words")


def is_client_summary(messages: Sequence[Message], headers: Mapping[str, str]) -> bool:
    """Returns True if a client asks for a summary of its own, with which it goes on in place of its history.

    A quotation of such a request in mid-text is none, nor is one with an answer after it.

    Args:
        messages: oldest first.
        headers: by their names in lower case; a body's field in place of one counts.
    """
    if any(_says(rule, headers.get(rule["name"], "")) for rule in _RULES["headers"]):
        return True
    if not messages:
        return False
    if messages[0].is_system and messages[0].text.lstrip().startswith(_SUMMARIES):
        return True
    # Claude Code 2.1.197 sends a reminder as a system message after its instruction (on the wire, 2026-11-24).
    newest = (each for each in reversed(messages) if not (each.is_system or each.text.startswith(_LITELLMS_NOTE)))
    last = next(newest, messages[-1])
    words = [text[each.start : each.end].strip() for text, each in _found(last) if each.kind in ("words", "doubted")]
    return last.role == "user" and words[-1:] != [] and words[-1].startswith(_SUMMARIES)


def _says(rule: Mapping[str, Any], value: str) -> bool:
    if "member" not in rule:
        return value in rule["values"]
    try:
        found = json.loads(value) if len(value) <= _MAX_HEADER_CHARS else None
    except (ValueError, RecursionError):
        return False
    return isinstance(found, Mapping) and found.get(rule["member"]) in rule["values"]


def divided(message: Message) -> list[Message]:
    """A message as the client's additions, with the role `tool`, and the person's words, as the user's.

    The message itself if it is all the person's.
    """
    if message.role != "user" or message.is_synthetic:
        return [message]
    found = [(text[each.start : each.end], each.kind) for text, each in _found(message)]
    if all(kind == "words" for _, kind in found):
        return [message]
    attached = "\n".join(text for text, kind in found if kind != "words")
    words = "\n".join(text.strip() for text, kind in found if kind == "words")
    return [_result(attached), *([user_message(words)] if words else [])]


def data_of(message: Message) -> Message | None:
    """The data that `without_data` leaves out, as a result of a tool; None for none."""
    found = [text[each.body : each.body_end] for text, each in _found(message) if _shrinks(each)]
    return _result("\n".join(found)) if found and message.role == "user" else None


def without_data(message: Message) -> Message:
    """`message` with one line for each stretch of data in it; the same object if that would save nothing."""
    return with_shorter_data(message, lambda _: "")


def with_shorter_data(message: Message, shorten: Callable[[str], str | None]) -> Message:
    """`message` with something shorter for the data in it: parts, words, notes and the data's own tags stay.

    Args:
        message: any; only a user's holds data.
        shorten: gives the text in place of a stretch of data, oldest first; "" for a line that says what was there,
            None for the stretch as it is.
    """
    if message.role != "user" or message.is_synthetic:
        return message
    content = message.raw.get("content")
    shown = (
        [_shortened(part, shorten) for part in content] if isinstance(content, list) else _shortened(content, shorten)
    )
    return message if shown == content else parse_message({**message.raw, "content": shown})


def stretches(text: str) -> list[Stretch]:
    """Divides a text of a user's message, in order, without what is blank."""
    begin = _first_sign(text, 0)
    if begin == len(text):
        return []
    if len(text) > _MAX_CHARS:
        # One of millions of characters is the person's, but was not looked at.
        return [Stretch("doubted", 0, len(text))]
    if "</" not in text and text[begin] not in _BEGINNINGS:
        # So is most of what people write.
        return [Stretch("words", 0, len(text))]
    found: list[Stretch] = []
    cursor = 0
    for element in _elements(text):
        if element.kind == "doubted":
            return [element]
        if element.start >= cursor:
            found += _between(text, cursor, element.start)
            cursor = max(cursor, found[-1].end if found else 0)
        if element.start >= cursor:
            found.append(element)
            cursor = element.end
    return _with_doubts([*found, *_between(text, cursor, len(text))])


def _elements(text: str) -> Iterator[Stretch]:
    """Elements that clients write, in order; if there are too many, one that is doubted and all of the text.

    A file may hold the very tag that ends it. So an element reaches over all closing tags up to the next opening one of
    its name, and over opening ones without a closing one between them.
    """
    tags = list(itertools.islice(_TAG.finditer(text), _MAX_TAGS + 1))
    if len(tags) > _MAX_TAGS:
        yield Stretch("doubted", 0, len(text))
        return
    places: dict[str, list[re.Match[str]]] = {}
    for tag in tags:
        places.setdefault(tag["opens"] or tag["closes"], []).append(tag)
    ranks = {tag.start(): rank for same in places.values() for rank, tag in enumerate(same)}
    cursor = number = 0
    for tag in tags:
        name = tag["opens"]
        if name is None or tag.start() < cursor:
            continue
        same, rank = places[name], ranks[tag.start()]
        while rank < len(same) and same[rank]["opens"]:
            rank += 1
        if rank >= len(same):
            # Never closed, and so is none that follows of this name.
            places[name] = []
            continue
        while rank + 1 < len(same) and same[rank + 1]["closes"]:
            rank += 1
        end = same[rank].end()
        if not _stands_alone(text, tag.start(), end):
            continue
        number += 1
        if number > _MAX_STRETCHES:
            yield Stretch("doubted", 0, len(text))
            return
        cursor = end
        yield _element(text, name, tag, same[rank])


def _element(text: str, name: str, opening: re.Match[str], closing: re.Match[str]) -> Stretch:
    start, end = opening.start(), closing.end()
    result = _RESULT.match(text, _first_sign(text, opening.end()))
    if result is not None:
        return Stretch("data", start, end, _line_end(text, result.end(), closing.start()), closing.start())
    return Stretch(_ELEMENTS[name], start, end, opening.end(), closing.start())


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
    for opening, kind in _OPENINGS.items():
        if text.startswith(opening, begin):
            line = _line_end(text, begin, len(text))
            result = _RESULT.match(text, _first_sign(text, line))
            if result is not None:
                return Stretch("data", start, len(text), _line_end(text, result.end(), len(text)), len(text))
            return Stretch(kind, start, len(text), line, len(text))
    result = _TEXT_RESULT.match(text, begin)
    if result is not None and _PERSONS_WORDS.search(text, begin) is None:
        return Stretch("data", start, end, result.end(), end)
    if end < len(text) and _AGENTS_FILE.match(text, start, end):
        return Stretch("note", start, end)
    inner = _INNER_OPENING.search(text, begin, end)
    return Stretch("words", start, end if inner is None else inner.start())


def _with_doubts(found: list[Stretch]) -> list[Stretch]:
    """The same, but words between stretches of data are doubted: a file may hold the tag that seems to end it."""
    data = [at for at, each in enumerate(found) if each.kind == "data"]
    for at in range(data[0] + 1, data[-1]) if data else ():
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


def _shrinks(stretch: Stretch) -> bool:
    return stretch.kind == "data" and stretch.body_end - stretch.body - len(_REMOVED) >= _LEAST_SAVED_CHARS


def _shortened(part: JsonValue, shorten: Callable[[str], str | None]) -> JsonValue:
    """A content or a part of one with something shorter for the data in its text."""
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": _shortened(part["text"], shorten)}
    if not isinstance(part, str):
        return part
    text = part
    pieces: list[str] = []
    kept = 0
    for each in stretches(text):
        if not _shrinks(each):
            continue
        body = text[each.body : each.body_end]
        shorter = shorten(body)
        if shorter is None:
            continue
        shorter = shorter or _REMOVED.format(tokens=roughly_tokens(body))
        if len(shorter) >= len(body):
            continue
        closes = each.body_end < each.end
        pieces += [text[kept : each.body], "\n", shorter.strip("\n"), "\n" if closes else ""]
        kept = each.body_end
    return "".join((*pieces, text[kept:]))


def _found(message: Message) -> Iterator[tuple[str, Stretch]]:
    content = message.raw.get("content")
    parts = content if isinstance(content, list) else [message.text]
    given = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in given if isinstance(text, str)]
    is_note = texts[:1] != [] and texts[0].startswith(_LITELLMS_NOTE)
    for text in texts:
        for each in stretches(text):
            yield text, each._replace(kind="note") if is_note and each.kind in ("words", "doubted") else each


def _result(text: str) -> Message:
    return parse_message({"role": "tool", "content": text})
