"""Finds a conversation that is rendered into one message: a client asks for its summary, its title, its topic.

Nothing of such a request is ours to summarize: its instruction stays, and the oldest rendered turns give way.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from litellm_compaction.core.excerpts import excerpt
from litellm_compaction.core.messages import Message, with_text

_USERS = "user|human|person|customer|client|me|you|q|question"
_MODELS = "assistant|ai|model|bot|agent|llm|gpt|claude|gemini|a|answer|reply|tool|function"
_ROLE = rf"(?<![A-Za-z0-9])(?:(?P<user>{_USERS})|(?P<model>{_MODELS}))(?![A-Za-z0-9])"
# A role near the beginning of a line, with a sign behind it, or as the end of the line.
_LABEL = re.compile(
    rf"^(?P<before>[^\n]{{0,40}}?){_ROLE}(?:[^\n:>\])]{{0,30}}[:>\])]|[^\w\n]{{0,8}}$)", re.IGNORECASE | re.MULTILINE
)
_OPENS = re.compile(r"^[ \t]*<([A-Za-z][\w.:-]{1,60})(?:[ \t][^<>\n]{0,1000})?>", re.MULTILINE)
_ITEMS_ROLE = re.compile(_ROLE, re.IGNORECASE)
_NUMBERS = re.compile(r"\d+")
_ROLE_KEYS = ("role", "from", "author", "speaker", "sender", "type")
_IN_JSON = re.compile(rf"\"(?:{'|'.join(_ROLE_KEYS)})\"\s*:\s*\"(?:{_USERS}|{_MODELS})\"", re.IGNORECASE)
_SPEAKER = re.compile(rf"(?:{_USERS}|{_MODELS})\Z", re.IGNORECASE)
_INSTRUCTION = re.compile(r"\[/?INST\]")
_NAME = re.compile(
    r"^[*_\[]{0,3}([^\W\d_][\w.'-]{0,20}(?: [^\W\d_][\w.'-]{0,20})?)[\]*_]{0,3}:(?:[*_]{2})? \S", re.MULTILINE
)
_LEAST_TIMES_NAMED, _MOST_SPEAKERS = 3, 12
# Marks of a client's around rendered turns; a person who pastes some writes no such line before or behind them.
_FRAME = re.compile(r"[ \t]*(?:</?[A-Za-z|][^<>\n]{0,200}>|#{1,6} [^\n]*|[-=*_]{3,}|[\[{])[ \t]*\Z")
_END = re.compile(r"^[ \t]*(?:</[A-Za-z][^<>\n]{0,200}>|#{1,6} [^\n]*|[-=*_]{3,}|```|[\]}])[ \t]*$", re.MULTILINE)
_IS_ABOUT_ONE = re.compile(r"conversation|transcript|chat|dialog|history|messages", re.IGNORECASE)
_LEAST_TURNS = 3
_MOST_TRIES = 3
_MOST_CHARS, _MOST_OBJECTS, _HEAD_CHARS = 4_000_000, 5_000, 200
_MARK = "[The oldest {turns} of {all} messages were left out here, about {tokens} tokens.]\n"
_MARK_TOKENS, _LEAST_TURN_TOKENS = 32, 64


class Turn(NamedTuple):
    """The place of a rendered turn in a text."""

    start: int
    end: int


def turns(text: str) -> list[Turn]:
    """The rendered turns of a text, oldest first; empty for less than a conversation."""
    return _read(text)[0]


def _read(text: str) -> tuple[list[Turn], bool]:
    """The rendered turns of a text, and if nothing but names tells who speaks."""
    readers = (_in_json, _items, _labelled, _instructions, _named) if len(text) <= _MOST_CHARS else ()
    for read in readers:
        found = read(text)
        if len(found) >= _LEAST_TURNS:
            ends = [*(start for start, _ in found[1:]), _last_end(text, found[-1])]
            return [Turn(start, end) for (start, _), end in zip(found, ends, strict=True)], read is _named
    return [], False


def rendered_in(messages: Sequence[Message]) -> int | None:
    """The index of the message into which a client has rendered a conversation; None for none.

    Its instruction stands in the system message, is set apart by marks of the client's, or stands above the turns with
    nothing below them: a person who pastes a chat and asks below it makes none. The request has no answer in it, and
    says hardly more than that one conversation.
    """
    if any(message.role not in ("system", "developer", "user") for message in messages):
        return None
    at = max(range(len(messages)), key=lambda index: len(messages[index].text), default=-1)
    text = messages[at].text if at >= 0 else ""
    found, is_by_names = _read(text)
    if not found:
        return None
    # Examples in a system prompt have its rules behind them, which are no part of the last one.
    paragraph = text.find("\n\n", found[-1].start, found[-1].end)
    end = paragraph if paragraph >= 0 else found[-1].end
    if 2 * (end - found[0].start) < sum(len(message.text) for message in messages):
        return None
    above, below = text[: found[0].start], text[found[-1].end :]
    told = "".join(message.text for message in messages if message.is_system and message is not messages[at])
    if is_by_names and not _IS_ABOUT_ONE.search(f"{told}\n{above}\n{below}"):
        return None
    if messages[at].is_system or _is_framed(text, found):
        return at
    if not above.strip():
        return at if _IS_ABOUT_ONE.search(told) else None
    return at if _IS_ABOUT_ONE.search(above) and paragraph < 0 and not below.strip() else None


def with_fewer_turns(message: Message, excess_tokens: int, count: Callable[[str], int]) -> Message:
    """`message` with so many tokens less: the oldest rendered turns give way, of the last one its beginning."""
    found = turns(message.text)
    if not found or excess_tokens <= 0:
        return message
    tokens, wanted_tokens, fewer = count(message.text), excess_tokens, message
    for _ in range(_MOST_TRIES):
        fewer = _without_oldest(message, found, wanted_tokens, count)
        missing_tokens = excess_tokens - (tokens - count(fewer.text))
        if missing_tokens <= 0:
            break
        # The parts of a text, as the marks of chats in it, may count for more than the whole.
        wanted_tokens += missing_tokens
    return fewer


def _without_oldest(
    message: Message, found: Sequence[Turn], excess_tokens: int, count: Callable[[str], int]
) -> Message:
    text = message.text
    gone, tokens = 0, -_MARK_TOKENS
    while gone < len(found) - 1 and tokens < excess_tokens:
        tokens += count(text[found[gone].start : found[gone].end])
        gone += 1
    mark = _MARK.format(turns=gone, all=len(found), tokens=tokens + _MARK_TOKENS) if gone else ""
    rest = text[found[gone].start :]
    if tokens < excess_tokens:
        last = text[found[-1].start : found[-1].end]
        least_tokens = max(count(last) - (excess_tokens - tokens), _LEAST_TURN_TOKENS)
        rest = excerpt(last, least_tokens, count) + text[found[-1].end :]
    return with_text(message, text[: found[0].start] + mark + rest)


def _is_framed(text: str, found: Sequence[Turn]) -> bool:
    before = text[: found[0].start].rstrip().rpartition("\n")[2]
    behind = text[found[-1].end :].strip().partition("\n")[0]
    return any(_FRAME.match(line) for line in (before, behind) if line) or text.rstrip().endswith(":")


def _labelled(text: str) -> list[Turn]:
    """Lines with the name of a role, all in the form in which both sides speak first."""
    labels = [(_NUMBERS.sub("0", each["before"]).strip().casefold(), each) for each in _LABEL.finditer(text)]
    users = {form for form, each in labels if each["user"]}
    both = next((form for form, each in labels if each["model"] and form in users), None)
    return [Turn(each.start(), each.end()) for form, each in labels if form == both]


def _instructions(text: str) -> list[Turn]:
    """Llama's older markup: what the user says in `[INST]`, each followed by the model's answer."""
    return [Turn(each.start(), each.end()) for each in _INSTRUCTION.finditer(text)]


def _named(text: str) -> list[Turn]:
    """Lines with a name and a colon, if each of a few names comes again and they hardly follow themselves."""
    lines = [(each[1], Turn(each.start(), each.end())) for each in _NAME.finditer(text)]
    times = Counter(name for name, _ in lines)
    spoken = [(name, turn) for name, turn in lines if times[name] >= _LEAST_TIMES_NAMED]
    names = {name for name, _ in spoken}
    changes = sum(one != other for (one, _), (other, _) in itertools.pairwise(spoken))
    is_talk = 1 < len(names) <= _MOST_SPEAKERS and 2 * changes >= len(spoken)
    return [turn for _, turn in spoken] if is_talk else []


def _items(text: str) -> list[Turn]:
    """Elements of one name that follow each other, most of which name a role."""
    runs: list[tuple[str, list[Turn]]] = [("", [])]
    unclosed, end = set[str](), 0
    for each in _OPENS.finditer(text):
        name, start = each[1], each.start()
        close = -1 if name in unclosed or start < end else text.find(f"</{name}>", each.end())
        if close < 0:
            unclosed.update({name} if start >= end else ())
            continue
        if runs[-1][0] != name or text[end:start].strip():
            runs.append((name, []))
        end = close + len(name) + 3
        runs[-1][1].append(Turn(start, end))
    longest = max((places for _, places in runs), key=len)
    named = sum(_ITEMS_ROLE.search(text, start, min(end, start + _HEAD_CHARS)) is not None for start, end in longest)
    return longest if 2 * named > len(longest) else []


def _in_json(text: str) -> list[Turn]:
    return list(_objects(text)) if _IN_JSON.search(text) else []


def _objects(text: str) -> Iterator[Turn]:
    decoder, cursor = json.JSONDecoder(), 0
    for opening in itertools.islice(re.finditer(r"\{", text), _MOST_OBJECTS):
        if opening.start() < cursor:
            continue
        try:
            value, end = decoder.raw_decode(text, opening.start())
        except (ValueError, RecursionError):
            continue
        if any(isinstance(value.get(key), str) and _SPEAKER.match(value[key]) for key in _ROLE_KEYS):
            yield Turn(opening.start(), end)
            cursor = end


def _last_end(text: str, last: Turn) -> int:
    found = _END.search(text, last.end)
    return len(text) if found is None else found.start()
