"""Tells a client's own request about a conversation: for its summary, its title, its topic.

A header or the beginning of its instruction says so (`clients.toml`), or the conversation is rendered into one message.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from litellm_compaction.core.messages import Message
from litellm_compaction.core.stretches import LITELLMS_NOTE, RULES, stretches_of

_SUMMARIES = tuple(RULES["summaries"]["begins"])
_IS_USERS = {name: side == "users" for side, names in RULES["speakers"].items() for name in names.split()}
_LINE = re.compile(r"^[^\n]{1,80}", re.MULTILINE)
_WORD = re.compile(r"[^\W_]+|[🧑👤🙂🤖]")
_WORDS = re.compile(r"\w+(?: \w+)*")
# Of a line that names a role: what stands before it, no string of a program, and behind it.
_BEFORE = re.compile(r"(?:(?:[^\"'`=]|={3,}){0,40}(?<![./$@_\w])|[ \t]*<[^<>]{1,60}[\"'])\Z")
_BEHIND = re.compile(
    r"(?:[ \t][\w#]{1,12})?(?:[ \t]*\([^()]{0,40}\))?\s?[\"'*_\])|]*(?:[:：>|\])]|</|[-–—]+>? )|[^\w\n]{0,8}(?:\n|\Z)"
)
# What no prose has: markup of chat templates (Llama's older one has what the user says in `[INST]`), objects of JSON,
# in which what is said may stand before the role, and lists that programs print.
_MARK = re.compile(
    r"<\|(?:im_start\|>|start_header_id\|>)?(\w+)|<start_of_turn>(\w+)|\[(/?INST)\]"
    r"|\{[^{}]{0,200}?['\"](?:role|from|author|speaker|sender)['\"]\s{0,3}:\s{0,3}['\"](\w+)"
    r"|['\"]role['\"]\s{0,3}:\s{0,3}['\"](\w+)['\"]\s{0,9}\}|\(['\"](\w+)['\"], |\b(\w{2,12})Message\(",
    re.IGNORECASE,
)
# Marks of a client's around rendered turns; a person who pastes some writes no such line before or behind them.
_FRAME = re.compile(r"[ \t]*(?:</?[A-Za-z|][^<>\n]{0,200}>|#{1,6} [^\n]*|[-=*_]{3,}|[\[{])[ \t]*\Z")
# The last turn ends before a line that is none of its words, or with its paragraph.
_END = re.compile(
    r"^[ \t]*(?:</[A-Za-z][^<>\n]{0,200}>|#{1,6} [^\n]*|[-=*_]{3,}|```|[\]}])[ \t]*$|\n[ \t]*(?=\n)", re.MULTILINE
)
_ASKS = re.compile("[?？؟]")
_SHORT_CHARS = 300
_LEAST_TURNS = 3
# More takes seconds to read: some 250,000 tokens.
_MOST_CHARS = 1_000_000


class _Turn(NamedTuple):
    """The beginning of a rendered turn in a text, whose words begin at `said`; the user's or the model's."""

    start: int
    said: int
    is_users: bool


def is_client_summary(messages: Sequence[Message], headers: Mapping[str, str], *, has_tools: bool = False) -> bool:
    """Returns True if a client asks for a summary of its own, or without tools about a conversation in one message.

    Names of `headers` are in lower case; a body's field in place of one counts.
    """
    if any(re.search(form, headers.get(name, "")) for name, form in RULES["headers"].items()):
        return True
    # Claude Code sends a reminder as a system message after its instruction.
    asking = [each for each in messages if not (each.is_system or each.text.startswith(LITELLMS_NOTE))]
    begins = [each.text.lstrip() for each in messages[:1] if each.is_system]
    # Most say no such words anywhere, and need not be divided.
    last = [each for each in asking[-1:] if each.role == "user" and any(words in each.text for words in _SUMMARIES)]
    begins += [part.words for each in last for part in stretches_of(each) if part.speaks][-1:]
    return any(text.startswith(_SUMMARIES) for text in begins) or (not has_tools and rendered_in(messages) is not None)


def rendered_in(messages: Sequence[Message]) -> int | None:
    """The index of the message into which a client has rendered a conversation; None for none.

    There is no answer, and hardly more than that and an instruction. A chat about which a person asks is none.
    """
    if not messages or any(not message.is_system and message.role != "user" for message in messages):
        return None
    at = max(range(len(messages)), key=lambda index: len(messages[index].text))
    text = messages[at].text
    talk = _talk(text)
    if not talk or 2 * len(talk) < sum(len(message.text) for message in messages):
        return None
    above, below = text[: talk.start].strip(), text[talk.stop :].strip()
    beside = (above.rpartition("\n")[2], below.partition("\n")[0])
    is_framed = any(_FRAME.match(line) for line in beside if line) or below.endswith((":", "："))
    # A person asks beside what they paste.
    is_asked = any(_ASKS.search(text[-1:] if len(text) > _SHORT_CHARS else text) for text in (above, below))
    return at if messages[at].is_system or is_framed or not is_asked else None


def _talk(text: str) -> range:
    """The place of a rendered conversation in a text, up to where the form or paragraph of its last turn ends.

    A talk has enough turns of both sides; without one the place is empty.
    """
    talk = _turns(text) if len(text) <= _MOST_CHARS else []
    if len(talk) < _LEAST_TURNS:
        return range(0)
    line = _END.search(text, talk[-1].said)
    return range(talk[0].start, line.start() if line else len(text))


def _turns(text: str) -> list[_Turn]:
    """Rendered turns, oldest first, all in one form, that in which both sides speak most."""
    forms: defaultdict[str, list[_Turn]] = defaultdict(list)
    for mark in _MARK.finditer(text):
        if (is_users := _IS_USERS.get(mark[mark.lastindex or 0].casefold())) is not None:
            forms["\n"].append(_Turn(mark.start(), mark.start(), is_users))
    # A program has several lists, a conversation is one.
    if sum(text[turn.start - 1 : turn.start + 1] in ("[{", "[(") for turn in forms["\n"] if turn.start) > 1:
        forms.clear()
    for line in _LINE.finditer(text):
        for word in _WORD.finditer(text, line.start(), line.end()):
            is_users, before = _IS_USERS.get(word[0].casefold()), text[line.start() : word.start()]
            behind = None if is_users is None else _BEHIND.match(text, word.end())
            if is_users is not None and behind is not None and _BEFORE.match(before):
                forms[_WORDS.sub("a", before).strip()].append(_Turn(line.start(), behind.end(), is_users))
                break
    both = (found for found in forms.values() if len({turn.is_users for turn in found}) > 1)
    return max(both, key=len, default=[])
