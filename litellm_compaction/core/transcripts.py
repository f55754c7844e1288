"""Tells a client's own request about a conversation: for its summary, its title, its topic.

A header or the beginning of its instruction says so (`clients.toml`), or the conversation is rendered into one message:
then nothing of it is ours to summarize, its instruction stays, and the oldest rendered turns give way.
"""

from __future__ import annotations

import itertools
import json
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from litellm_compaction.core.cuts import excerpt
from litellm_compaction.core.messages import Message, with_text
from litellm_compaction.core.stretches import LITELLMS_NOTE, RULES, last_words

_SUMMARIES = tuple(RULES["summaries"]["begins"])
# No client describes a turn in more.
_MAX_HEADER_CHARS = 10_000

_USER, _MODEL = "user", "model"
# The names under which conversations are rendered, by side.
_USERS = """
user human person customer client me you u h q question benutzer benutzerin nutzer utilisateur usuario usuário utente
gebruiker użytkownik kullanıcı пользователь користувач 用户 用戶 ユーザー 사용자 المستخدم 🧑 👤 🙂"""
_MODELS = """
assistant ai model bot agent llm gpt chatgpt claude gemini a answer reply response tool function assistent assistente
asistente asystent asistan ki ia ассистент помощник асистент 助手 アシスタント 어시스턴트 المساعد 🤖"""
_SPEAKERS = {**dict.fromkeys(_USERS.split(), _USER), **dict.fromkeys(_MODELS.split(), _MODEL)}
_WORD = re.compile(r"[^\W_]+|[🧑👤🙂🤖]")
_LINE = re.compile(r"^[^\n]{1,80}", re.MULTILINE)
# Of a line that names a role: what stands before it, no string of a program, and behind it.
_BEFORE = re.compile(r"(?:(?:[^\"'`=]|={3,}){0,40}(?<![./$@_\w])|[ \t]*<[^<>]{1,60}[\"'])\Z")
_BEHIND = re.compile(
    r"(?:[ \t][\w#]{1,12})?(?:[ \t]*\([^()]{0,40}\))?\s?[\"'*_\])|]*(?:[:：>|\])]|</|[-–—]+>? )|[^\w\n]{0,8}(?:\n|\Z)"
)
_NAME = re.compile(
    r"^(?:\d|[^\w\n]){0,40}([^\W\d_][\w.'-]{0,20}(?: [^\W\d_][\w.'-]{0,20})?)[\]*_]{0,3}(?:: |：|:\*\* )(?=\S)",
    re.MULTILINE,
)
_WORDS = re.compile(r"\w+(?: \w+)*")
# The beginning of a turn in the marks of chat templates, in JSON, and in lists that programs print.
_MARK = re.compile(
    r"<\|(?:im_start\|>|start_header_id\|>)?(\w+)|<start_of_turn>(\w+)|\[(/?INST)\]"
    r"|\{[^{}]{0,200}?['\"](?:role|from|author|speaker|sender)['\"]\s{0,3}:\s{0,3}['\"](\w+)"
    r"|['\"]role['\"]\s{0,3}:\s{0,3}['\"](\w+)['\"]\s{0,9}\}|\(['\"](\w+)['\"], |\b(\w{2,12})Message\(",
    re.IGNORECASE,
)
_INSTRUCTIONS = {"inst": _USER, "/inst": _MODEL}
_MARK_END = re.compile(r"<\|(?:im_end|eot_id|end)\|>|<end_of_turn>|</s>|[\])}][ \t\r]{0,3}\](?=\s)")
# Marks of a client's around rendered turns; a person who pastes some writes no such line before or behind them.
_FRAME = re.compile(r"[ \t]*(?:</?[A-Za-z|][^<>\n]{0,200}>|#{1,6} [^\n]*|[-=*_]{3,}|[\[{])[ \t]*\Z")
_END = re.compile(
    r"^[ \t]*(?:</[A-Za-z][^<>\n]{0,200}>|#{1,6} [^\n]*|[-=*_]{3,}|```|[\]}])[ \t]*$|\n[ \t]*(?=\n)", re.MULTILINE
)
_QUESTIONS = ("?", "？", "؟")
_SHORT_CHARS, _TELLING_CHARS = 300, 60
_LEAST_TURNS, _LEAST_TIMES_NAMED, _MOST_SPEAKERS = 3, 3, 12
# More takes seconds to read: some 250,000 tokens.
_MOST_CHARS = 1_000_000
_LEFT_OUT = "[The oldest {turns} of {all} messages were left out here, about {tokens} tokens.]\n"
_MARGIN_TOKENS, _LEAST_TURN_TOKENS = 32, 64


class Turn(NamedTuple):
    """The place of a rendered turn in a text."""

    start: int
    end: int


class _Head(NamedTuple):
    """Where a turn begins, and the end of its head."""

    start: int
    end: int
    speaker: str


def is_client_summary(messages: Sequence[Message], headers: Mapping[str, str], *, has_tools: bool = False) -> bool:
    """Returns True if a client asks for a summary of its own, with which it goes on in place of its history.

    So is a request without tools and answers for something about a conversation that stands in one message. Names of
    `headers` are in lower case; a body's field in place of one counts.
    """
    if any(_says(rule, headers.get(name, "")) for name, rule in RULES["headers"].items()):
        return True
    if not messages:
        return False
    if messages[0].is_system and messages[0].text.lstrip().startswith(_SUMMARIES):
        return True
    # Claude Code sends a reminder as a system message after its instruction.
    newest = (each for each in reversed(messages) if not (each.is_system or each.text.startswith(LITELLMS_NOTE)))
    last = next(newest, messages[-1])
    if last.role == "user" and last_words(last).startswith(_SUMMARIES):
        return True
    return not has_tools and rendered_in(messages) is not None


def _says(rule: Mapping[str, Any], value: str) -> bool:
    if "member" not in rule:
        return value in rule["values"]
    try:
        found = json.loads(value) if len(value) <= _MAX_HEADER_CHARS else None
    except (ValueError, RecursionError):
        return False
    return isinstance(found, Mapping) and found.get(rule["member"]) in rule["values"]


def turns(text: str) -> list[Turn]:
    """The rendered turns of a text, oldest first; the last ends where its form or paragraph does; [] for no talk."""
    return _read(text)[0]


def _read(text: str) -> tuple[list[Turn], bool]:
    """The rendered turns of a text, and True if they may be anything that has names and colons."""
    for read in (_marks, _labels, _names) if len(text) <= _MOST_CHARS else ():
        heads = read(text)
        if _is_talk(text, heads):
            starts = [head.start for head in heads]
            ends = [*starts[1:], _last_end(text, heads[-1])]
            is_doubted = read is _names and not _is_dialogue(heads)
            return [Turn(start, end) for start, end in zip(starts, ends, strict=True)], is_doubted
    return [], False


def rendered_in(messages: Sequence[Message]) -> int | None:
    """The index of the message into which a client has rendered a conversation; None for none.

    There is no answer, and hardly more than that and an instruction. A chat about which a person asks is none.
    """
    if any(message.role not in ("system", "developer", "user") for message in messages):
        return None
    at = max(range(len(messages)), key=lambda index: len(messages[index].text), default=-1)
    text = messages[at].text if at >= 0 else ""
    found, is_doubted = _read(text)
    if not found or 2 * (found[-1].end - found[0].start) < sum(len(message.text) for message in messages):
        return None
    above, below = text[: found[0].start].strip(), text[found[-1].end :].strip()
    if messages[at].is_system or _is_framed(above, below):
        return at
    return None if is_doubted or _asks(above) or _asks(below) else at


def with_fewer_turns(message: Message, excess_tokens: int, count: Callable[[str], int]) -> Message:
    """`message` with so many tokens less: the oldest rendered turns give way, of the last one its middle."""
    text = message.text
    found = turns(text)
    if not found or excess_tokens <= 0:
        return message
    limit_tokens = count(text) - excess_tokens

    def without(oldest: int) -> str:
        start, end = found[0].start, found[oldest].start
        mark = _LEFT_OUT.format(turns=oldest, all=len(found), tokens=count(text[start:end])) if oldest else ""
        return text[:start] + mark + text[end:]

    oldest = bisect_left(range(len(found)), True, key=lambda number: count(without(number)) <= limit_tokens)
    if oldest < len(found):
        return with_text(message, without(oldest))
    shown = without(len(found) - 1)
    # What stands below may be an instruction; most of a long text is the turn's, whose end is shown as well.
    below = text[found[-1].end :]
    below = below if 2 * count(below) <= limit_tokens else ""
    last = text[found[-1].start : len(text) - len(below)]
    # The parts of a text may count for more than the whole.
    room_tokens = count(last) - (count(shown) - limit_tokens) - _MARGIN_TOKENS
    ends = excerpt(last, max(room_tokens, _LEAST_TURN_TOKENS), count)
    return with_text(message, shown[: len(shown) - len(last) - len(below)] + ends + below)


def _asks(text: str) -> bool:
    """Returns True for a question, as a person writes one beside what they paste."""
    return text.endswith(_QUESTIONS) or (len(text) <= _SHORT_CHARS and any(sign in text for sign in _QUESTIONS))


def _is_framed(above: str, below: str) -> bool:
    lines = (above.rpartition("\n")[2], below.partition("\n")[0])
    return any(_FRAME.match(line) for line in lines if line) or below.endswith((":", "："))


def _is_talk(text: str, heads: Sequence[_Head]) -> bool:
    """Returns True for enough turns of both sides, or of names that hardly follow themselves."""
    times = Counter(head.speaker for head in heads)
    if len(heads) < _LEAST_TURNS or not 1 < len(times) <= _MOST_SPEAKERS or max(times.values()) < 2:
        return False
    changes = sum(one.speaker != other.speaker for one, other in itertools.pairwise(heads))
    if not {_USER, _MODEL}.issubset(map(_SPEAKERS.get, times)) and 2 * changes < len(heads):
        return False
    ends = [*(head.start for head in heads[1:]), len(text)]
    said = {" ".join(text[head.end : end].split()) for head, end in zip(heads, ends, strict=True)}
    return 2 * sum(" " in each or not each.isascii() for each in said) > len(heads)


def _is_dialogue(heads: Sequence[_Head]) -> bool:
    """Returns True for two who speak by turns, and say more than the values of a list."""
    does_alternate = all(one.speaker != other.speaker for one, other in itertools.pairwise(heads))
    said_chars = heads[-1].start - heads[0].start
    return does_alternate and len({head.speaker for head in heads}) == 2 and said_chars >= _TELLING_CHARS * len(heads)


def _labels(text: str) -> list[_Head]:
    """Lines with the name of a role, all in the form in which both sides speak most."""
    forms: defaultdict[str, list[_Head]] = defaultdict(list)
    for line in _LINE.finditer(text):
        for word in _WORD.finditer(text, line.start(), line.end()):
            speaker = word[0].casefold()
            behind = _BEHIND.match(text, word.end()) if speaker in _SPEAKERS else None
            if behind is not None and _BEFORE.match(before := text[line.start() : word.start()]):
                forms[_WORDS.sub("a", before).strip()].append(_Head(line.start(), behind.end(), speaker))
                break
    both = [heads for heads in forms.values() if len({_SPEAKERS[head.speaker] for head in heads}) > 1]
    return max(both, key=len, default=[])


def _names(text: str) -> list[_Head]:
    """Lines with a name and a colon, if each of a few names comes again."""
    heads = [_Head(each.start(), each.end(), each[1]) for each in _NAME.finditer(text)]
    times = Counter(head.speaker for head in heads)
    return [head for head in heads if times[head.speaker] >= _LEAST_TIMES_NAMED]


def _marks(text: str) -> list[_Head]:
    """Turns by what no prose has: in Llama's older markup what the user says stands in `[INST]`."""
    heads: list[_Head] = []
    for each in _MARK.finditer(text):
        named = each[each.lastindex or 0].casefold()
        speaker = _INSTRUCTIONS.get(named, named)
        if speaker in _SPEAKERS:
            # What an object says may stand before its role.
            heads.append(_Head(each.start(), each.start() if each[0][0] == "{" else each.end(), speaker))
    # A program has several lists, a conversation is one.
    lists = sum(text[head.start - 1 : head.start + 1] in ("[{", "[(") for head in heads if head.start)
    return heads if lists <= 1 else []


def _last_end(text: str, last: _Head) -> int:
    found = _MARK_END.search(text, last.end) or _END.search(text, last.end)
    if found is None:
        return len(text)
    return found.end() if _MARK_END.match(text, found.start()) else found.start()
