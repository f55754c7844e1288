"""Messages, the vocabulary of every other module, and the hash chain that tells when two conversations are the same.

A result answers a call's id, wherever it stands before the next assistant message; of calls with one id by its place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import regex

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
JsonObject: TypeAlias = Mapping[str, JsonValue]

FRAME_BEGIN, FRAME_END = "[BEGIN RECORD OF EARLIER CONVERSATION]", "[END RECORD OF EARLIER CONVERSATION]"
START_NOTICE = "⚙️ Compacting conversation history..."
DONE_NOTICE = "✅ Context compacted, continuing..."
ABORT_NOTICE = "⚠️ Context limit exceeded ({used}/{window} tokens). Aborting."
NEARLY_FULL_NOTICE = "⚠️ Context limit nearly full ({used}/{window} tokens). Aborting."
ATTEMPTS_NOTICE = "⚠️ Max compaction attempts reached"
THOUGHTS_NOTICE = "⚠️ The model only thought and gave no answer ({used}/{window} tokens)."

# A notice is a line of its own; with it go the blank lines that set it apart.
_NOTICES = regex.compile(
    rf"(?:\n\n|\A|(?<=\n))(?:{re.escape(START_NOTICE)}(?:\n{re.escape(DONE_NOTICE)})?|{re.escape(DONE_NOTICE)}"
    r"|⚠️ Context limit (?:exceeded|nearly full) \(\d+/\d+ tokens\)\. Aborting\."
    rf"|{re.escape(ATTEMPTS_NOTICE)}|⚠️ The model only thought and gave no answer \(\d+/\d+ tokens\)\."
    r")(?:\n\n|\n?\Z|\n(?=</think))"
)
# A client that writes thoughts into its text leaves this if they were a notice only.
_EMPTY_THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>\s*</think(?:ing)?>\s*")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking_blocks")
# For an answer of nothing but a notice: some templates refuse an empty message, or two users in a row.
NO_ANSWER = "(interrupted)"
NO_RESPONSE = "Tool no response"
_SYSTEM_ROLES = frozenset({"system", "developer"})
# Reading more at once would hold up other threads, and with them the event loop.
_MOST_PARSED_CHARS = 1_000_000
THINK_START, THINK_END = "<think>", "</think>"
_BLOCK_OPENS, _BLOCK_ENDS = re.compile(r"(?i)<think(?:ing)?>"), re.compile(r"(?i)</think(?:ing)?>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of an assistant message; `arguments` is the client's string, valid JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One entry of a request's `messages`."""

    role: str  # As the client sent it; unknown roles are kept.
    text: str  # The content's; parts joined by newlines, "" for null.
    other_parts: tuple[str, ...] = ()  # Types of the parts that are not text ("image_url", …), in order.
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""  # Of a tool result: the call that it answers.
    # Ours, so that an answer goes on: a request to go on, or the end of the answer if the model itself goes on with it.
    is_synthetic: bool = False
    raw: JsonObject  # The client's, never changed in place.
    # By which a user message's client is known (`stretches.py`): levelled lines, and elements by `<` and their name.
    marks: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    is_beside: bool = field(default=False, compare=False, repr=False)  # No answer parts it from the one next to it.
    received: Message | None = field(default=None, compare=False, repr=False)  # As it came, if some of it is cleared.
    is_renewed: bool = False  # Its client writes it anew in each request; `received` is what it was at first.

    @property
    def is_system(self) -> bool:
        return self.role in _SYSTEM_ROLES

    @property
    def asks_to_go_on(self) -> bool:
        """True for a request of ours in the user's place."""
        return self.is_synthetic and self.role == "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to a model, as far as it takes room in the window; tools and extras are never edited."""

    messages: tuple[Message, ...]
    tools: tuple[JsonValue, ...] = ()
    tool_choice: JsonValue = None
    # Other fields that a server may write into the prompt, by their names (`documents`, `chat_template_kwargs`).
    extras: JsonObject = field(default_factory=dict)
    # The positions, after the leading system messages, of those that its client has sent before, and sends no more.
    left_out: frozenset[int] = frozenset()
    token_ids: int | None = None  # The number of those that a text completion consists of, in place of a message.

    @property
    def has_own_template(self) -> bool:
        """True if the client brings the chat template, by one of the two ways that vLLM has for it."""
        arguments = self.extras.get("chat_template_kwargs")
        return "chat_template" in self.extras or (isinstance(arguments, Mapping) and "chat_template" in arguments)


def parse_message(raw: JsonObject) -> Message:
    """Parses the client's JSON; whatever a server may accept gets a place. A ValueError says that it has no role."""
    role, content, calls = raw.get("role"), raw.get("content"), raw.get("tool_calls")
    if not isinstance(role, str):
        raise ValueError("a message without a role")  # noqa: TRY004 - one error type for every bad shape
    if not isinstance(content, list):
        content = [] if content is None else [content if isinstance(content, str) else _dumped(content)]
    others = [part for part in content if part_text(part) is None]
    return Message(
        role=role,
        text="\n".join(text for part in content if (text := part_text(part)) is not None),
        other_parts=tuple(_string(part.get("type")) if isinstance(part, Mapping) else "unknown" for part in others),
        reasoning=_string(raw.get("reasoning_content") or raw.get("reasoning")),
        calls=tuple(map(_call, calls)) if isinstance(calls, list) else (),
        call_id=_string(raw.get("tool_call_id")),
        raw=raw,
    )


def user_message(text: str) -> Message:
    return parse_message({"role": "user", "content": text})


def merged(messages: Sequence[Message], text: str, parts: Sequence[JsonValue] = ()) -> Message:
    """User messages as one: `text`, further parts of a content, then each message as it came, the last one unbroken.

    Strict templates refuse two users in a row. Text becomes parts only if there is more than text before the last.
    """
    *earlier, last = messages or (user_message(""),)
    content = last.raw.get("content")
    if parts or any(message.other_parts for message in earlier):
        content = [_text_part(text), *parts, *(part for each in messages for part in _parts(each))]
    else:
        text += "".join(f"{message.text}\n\n" for message in earlier)
        content = [_text_part(text), *content] if isinstance(content, list) else text + last.text
    return parse_message({**last.raw, "content": content})


def with_text(message: Message, text: str) -> Message:
    """`message` with its text replaced; parts that are not text stay, after the text."""
    content = message.raw.get("content")
    others = [part for part in content if part_text(part) is None] if isinstance(content, list) else []
    return parse_message({**message.raw, "content": [_text_part(text), *others] if isinstance(content, list) else text})


def with_only_text(message: Message, text: str) -> Message:
    """`message` with its text replaced and without reasoning; what it is beside others stays.

    If it has calls, `text` stands in the arguments of the first: some templates leave out what is said beside a call.
    """
    raw = {key: value for key, value in message.raw.items() if key not in (*_REASONING_KEYS, "function_call")}
    if not message.calls:
        return with_text(parse_message(raw), text)
    functions = [{"name": call.name, "arguments": "{}"} for call in message.calls]
    functions[0]["arguments"] = json.dumps({"text": text}, ensure_ascii=False)
    calls = zip(message.calls, functions, strict=True)
    raw["tool_calls"] = [{"id": call.id, "type": "function", "function": function} for call, function in calls]
    return with_text(parse_message(raw), "")


def _text_part(text: str) -> JsonValue:
    return {"type": "text", "text": text}


def part_text(part: JsonValue) -> str | None:
    """Returns the text of a part of a content, in either shape that clients send; None for any other part."""
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else None


def _parts(message: Message) -> Sequence[JsonValue]:
    content = message.raw.get("content")
    return content if isinstance(content, list) else [_text_part(message.text)]


def _call(call: JsonValue) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return ToolCall(id="", name="", arguments=_dumped(call))
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else _dumped(arguments)
    return ToolCall(id=_string(call.get("id")), name=_string(function.get("name")), arguments=written)


def _dumped(value: JsonValue) -> str:
    # Value by value: written at once, a large one would hold up all other threads.
    return "".join(json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value))


def _string(value: JsonValue) -> str:
    return value if isinstance(value, str) else ""


def system_prefix_length(messages: Sequence[Message]) -> int:
    """The number of system or developer messages that open the list."""
    return next((index for index, message in enumerate(messages) if not message.is_system), len(messages))


def newest_user_index(messages: Sequence[Message]) -> int | None:
    """The index of the newest message with the role `user` that is not ours, of any writer, or None."""
    places = range(len(messages) - 1, -1, -1)
    return next((at for at in places if messages[at].role == "user" and not messages[at].is_synthetic), None)


def clients_length(messages: Sequence[Message]) -> int:
    """The number of messages before an answer that goes on, the first part of which stands before our request."""
    return next((at - each.asks_to_go_on for at, each in enumerate(messages) if each.is_synthetic), len(messages))


def last_assistant_index(messages: Sequence[Message]) -> int:
    """Returns -1 for none."""
    return next((index for index in range(len(messages) - 1, -1, -1) if messages[index].role == "assistant"), -1)


# ------------------------------------------------------------------ rounds of calls


class Made(NamedTuple):
    """A call, the index of the message that makes it, and its place among that message's calls."""

    at: int
    place: int
    call: ToolCall


class Round(NamedTuple):
    """The calls of neighbouring assistant messages, and what answers them before the next such message."""

    made: Sequence[Made]
    results: Mapping[int, Made]  # The call that each result answers, by the result's index.
    unanswered: Sequence[Made]

    @property
    def start(self) -> int:
        return self.made[0].at

    @property
    def end(self) -> int:
        """The index after its last call or result."""
        return max((self.made[-1].at, *self.results)) + 1


def rounds(messages: Sequence[Message]) -> Iterator[Round]:
    """The rounds, oldest first; some clients send each of several calls in a message of its own."""
    speaking = {at for at, each in enumerate(messages) if each.role == "assistant"}
    for first, end in pairwise((*sorted(at for at in speaking if at - 1 not in speaking), len(messages))):
        if made := [Made(at, *each) for at in range(first, end) for each in enumerate(messages[at].calls)]:
            yield _round(messages, made, range(made[0].at + 1, end))


def _round(messages: Sequence[Message], made: Sequence[Made], behind: range) -> Round:
    waiting: defaultdict[str, list[Made]] = defaultdict(list)
    for each in reversed(made):
        waiting[each.call.id].append(each)
    results: dict[int, Made] = {}
    for at in (at for at in behind if messages[at].role == "tool" and messages[at].call_id in waiting):
        alike = waiting[messages[at].call_id]
        # A result that comes once more is the last call's.
        results[at] = alike.pop() if len(alike) > 1 else alike[0]
    answered = {*results.values()}
    return Round(made, results, [each for each in made if each not in answered])


def calls_by_position(messages: Sequence[Message]) -> dict[int, ToolCall]:
    """For each tool result the call that it answers; ids may repeat over the rounds."""
    return {at: made.call for each in rounds(messages) for at, made in each.results.items()}


def within_rounds(messages: Sequence[Message]) -> frozenset[int]:
    """The indices at which a cut would divide calls from their results."""
    return frozenset(at for each in rounds(messages) for at in range(each.start + 1, each.end))


def open_round(messages: Sequence[Message]) -> Round | None:
    """The round whose results no assistant message follows, or None."""
    *_, last = (None, *rounds(messages))
    return last if last and last.results and last_assistant_index(messages) < min(last.results) else None


def open_round_start(messages: Sequence[Message]) -> int | None:
    """The start of the open round, else the first result that no assistant message follows, or None."""
    last, behind = open_round(messages), range(last_assistant_index(messages) + 1, len(messages))
    return last.start if last else next((index for index in behind if messages[index].role == "tool"), None)


def with_every_result(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with a filler for each result that is missing: a model tends to make a call that has none."""
    shown = list(messages)
    for each in reversed(list(rounds(messages))):
        shown[each.end : each.end] = [
            parse_message({"role": "tool", "tool_call_id": call.id, "content": NO_RESPONSE})
            for _, _, call in each.unanswered
        ]
    return tuple(shown)


def without_notices(text: str) -> str:
    """`text` without the lines that we put into answers: clients send them back as the assistant's words."""
    if not any(sign in text for sign in "⚙✅⚠"):
        return text
    # Other threads run meanwhile.
    stripped: str = _NOTICES.sub("", text, concurrent=True)
    return text if stripped == text else _EMPTY_THOUGHTS.sub("", stripped)


def outside_thoughts(text: str) -> list[str]:
    """The text before, between and after the closed `<think>` and `<thinking>` blocks of `text`."""
    outside: list[str] = []
    start = 0
    while (opening := _BLOCK_OPENS.search(text, start)) and (end := _BLOCK_ENDS.search(text, opening.end())):
        outside.append(text[start : opening.start()])
        start = end.end()
    return [*outside, text[start:]]


def is_only_thoughts(text: str) -> bool:
    """True if nothing of `text` stands outside its `<think>` blocks, the last of which may be open."""
    outside = "".join(outside_thoughts(text)).strip()
    return not outside or _BLOCK_OPENS.match(outside) is not None


def cleaned(message: Message) -> Message:
    """`message` without our notices in its text and its reasoning; the same object when there are none."""
    keys = (*_REASONING_KEYS, "content") if message.role == "assistant" else ()
    raw = {key: _without_notices_in(value) if key in keys else value for key, value in message.raw.items()}
    if raw == message.raw:
        return message
    gone = {key for key in keys if not raw.get(key) and message.raw.get(key)}
    empty = {"content": "" if message.calls else NO_ANSWER} if "content" in gone else {}
    return parse_message({**{key: value for key, value in raw.items() if key not in gone}, **empty})


def _without_notices_in(content: JsonValue) -> JsonValue:
    """A text, a part, or parts, freed of notices; a part that was nothing else is "", and left out of several."""
    if isinstance(content, list):
        freed = [_without_notices_in(part) for part in content]
        return [part for part, was in zip(freed, content, strict=True) if part or not was]
    if isinstance(content, Mapping):
        kept = {
            key: _without_notices_in(content[key]) for key in ("text", "thinking") if isinstance(content.get(key), str)
        }
        return "" if any(content[key] and not text for key, text in kept.items()) else {**content, **kept}
    return without_notices(content) if isinstance(content, str) else content


def render_arguments(arguments: str) -> str:
    """Tool arguments as they read, not as JSON escapes them."""
    try:
        parsed: JsonValue = json.loads(arguments)
        if not isinstance(parsed, dict):
            return arguments
        said = (each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in parsed.values())
        return ", ".join(f"{key}: {value}" for key, value in zip(parsed, said, strict=True))
    except (ValueError, RecursionError):
        return arguments


def visible_text(message: Message) -> str:
    """The text of a message as a model reads it, with its calls and their arguments."""
    called = (f"{call.name}({render_arguments(call.arguments)})" for call in message.calls)
    return "\n".join((without_notices(message.text), *called))


def roughly_tokens(text: str) -> int:
    """One token for four ASCII characters, one for any other: if no counter is at hand (12 languages)."""
    plain = len(text.encode("ascii", "ignore"))
    return plain // 4 + len(text) - plain


def chain(messages: Sequence[Message], *, after: str = "") -> tuple[str, ...]:
    """The hash chain of a conversation: entry i stands for exactly the first i messages after the leading system ones.

    Equal entries mean equal normal forms: notices, reasoning, cache markers and ids do not count, null equals "", text
    is trimmed, tool arguments are compared as parsed JSON. `after` is the entry for all before the first message.
    """
    digest = bytes.fromhex(after) if after else hashlib.blake2b(b"litellm_compaction:2", digest_size=16).digest()
    entries, places = [digest.hex()], dict[str, tuple[str, int]]()
    for message in messages[0 if after else system_prefix_length(messages) :]:
        own = _normal_form(message.received or message, places, entries[-1]) + b"\n" * message.is_renewed
        digest = hashlib.blake2b(own, key=digest, digest_size=16).digest()
        entries.append(digest.hex())
    return tuple(entries)


def _normal_form(message: Message, places: dict[str, tuple[str, int]], before: str) -> bytes:
    """Takes note of the `places` of calls by their ids, which some clients make anew; a result is its call's."""
    text, others = normal_text(message), [normal_part(part) for part in _parts(message) if part_text(part) is None]
    calls = [[call.name, canonical_arguments(call.arguments)] for call in message.calls]
    places.update((call.id, (before, place)) for place, call in enumerate(message.calls) if call.id)
    beside = json.dumps([message.role, calls, places.get(message.call_id), others], sort_keys=True, default=str)
    return f"{beside}\n{text}".encode("utf-8", "surrogatepass")


def normal_text(message: Message) -> str:
    """A message's text as the hash chain sees it: without notices, leading reasoning and outer white space."""
    text = message.text
    if message.role == "assistant":
        text = without_notices(text).lstrip()
        _, end, behind = text.partition(THINK_END)
        text = behind if end and text.startswith(THINK_START) else text
    return text.strip()


def canonical_arguments(arguments: str) -> str:
    """Tool arguments in normal form: without the accidents of how their JSON was written, unless they are huge."""
    if len(arguments) > _MOST_PARSED_CHARS:
        return arguments
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments


def normal_part(part: JsonValue) -> JsonValue:
    """A part of a content as the hash chain sees it: without cache markers."""
    return {key: part[key] for key in part if key != "cache_control"} if isinstance(part, Mapping) else part
