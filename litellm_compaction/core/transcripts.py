"""Finds a conversation that is rendered into one message: a client asks for its summary, its title, its topic.

Nothing of such a request is ours to summarize: its instruction stays, and the oldest rendered turns give way.
"""

from __future__ import annotations

import itertools
import json
import re
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
_NAMED = re.compile(rf"(?:{_USERS}|{_MODELS})\Z", re.IGNORECASE)
# Marks of a client's around rendered turns; a person who pastes some writes no such line before or behind them.
_FRAME = re.compile(r"[ \t]*(?:</?[A-Za-z|][^<>\n]{0,200}>|#{1,6} [^\n]*|[-=*_]{3,}|[\[{])[ \t]*\Z")
_END = re.compile(r"^[ \t]*(?:</[A-Za-z][^<>\n]{0,200}>|#{1,6} [^\n]*|[-=*_]{3,}|```|[\]}])[ \t]*$", re.MULTILINE)
_IS_ABOUT_ONE = re.compile(r"conversation|transcript|chat|dialog|history|messages", re.IGNORECASE)
_LEAST_TURNS = 3
_MOST_CHARS, _MOST_OBJECTS, _HEAD_CHARS = 4_000_000, 5_000, 200
_MARK = "[The oldest {turns} of {all} messages were left out here, about {tokens} tokens.]\n"
_MARK_TOKENS, _LEAST_TURN_TOKENS = 32, 64


class Turn(NamedTuple):
    """The place of a rendered turn in a text."""

    start: int
    end: int


def turns(text: str) -> list[Turn]:
    """The rendered turns of a text, oldest first; empty for less than a conversation."""
    if len(text) > _MOST_CHARS:
        return []
    found = next((each for each in (_in_json(text), _items(text), _labelled(text)) if len(each) >= _LEAST_TURNS), [])
    if not found:
        return []
    ends = [*(start for start, _ in found[1:]), _last_end(text, found[-1])]
    return [Turn(start, end) for (start, _), end in zip(found, ends, strict=True)]


def rendered_in(messages: Sequence[Message]) -> int | None:
    """The index of the message into which a client has rendered a conversation; None for none.

    Its instruction stands in the system message, or is set apart by marks of the client's: a person who pastes a chat
    and asks below it makes none. The request has no answer in it, and says hardly more than that one conversation.
    """
    if any(message.role not in ("system", "developer", "user") for message in messages):
        return None
    at = max(range(len(messages)), key=lambda index: len(messages[index].text), default=-1)
    found = turns(messages[at].text) if at >= 0 else []
    if not found:
        return None
    # Examples in a system prompt have its rules behind them, which are no part of the last one.
    paragraph = messages[at].text.find("\n\n", found[-1].start, found[-1].end)
    end = paragraph if paragraph >= 0 else found[-1].end
    if 2 * (end - found[0].start) < sum(len(message.text) for message in messages):
        return None
    if messages[at].is_system or _is_framed(messages[at].text, found):
        return at
    told = "".join(message.text for message in messages if message.is_system)
    return None if messages[at].text[: found[0].start].strip() or not _IS_ABOUT_ONE.search(told) else at


def with_fewer_turns(message: Message, excess_tokens: int, count: Callable[[str], int]) -> Message:
    """`message` with so many tokens less: the oldest rendered turns give way, of the last one its beginning."""
    text = message.text
    found = turns(text)
    if not found or excess_tokens <= 0:
        return message
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
        if any(isinstance(value.get(key), str) and _NAMED.match(value[key]) for key in _ROLE_KEYS):
            yield Turn(opening.start(), end)
            cursor = end


def _last_end(text: str, last: Turn) -> int:
    found = _END.search(text, last.end)
    return len(text) if found is None else found.start()
