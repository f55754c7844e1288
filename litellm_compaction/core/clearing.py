"""Rung 1 of the ladder: old tool results, attached data, reasoning and images give way to a line each, without a model.

Masking old results is as good as summarising on SWE-bench at half the cost (JetBrains, arXiv 2508.21433). Stubs are
written anew for every request, so they depend on nothing but the messages, and on the sizes that results had.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count as numbers
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from litellm_compaction.core.continuation.text import outside_thoughts
from litellm_compaction.core.messages import (
    NO_MARKS,
    JsonValue,
    Message,
    ToolCall,
    canonical_arguments,
    parse_message,
    render_arguments,
    roughly_tokens,
    with_text,
)
from litellm_compaction.core.rounds import calls_by_position
from litellm_compaction.core.stretches import Kind, Stretch, parts_of, stretches_of

_ARGUMENTS_CHARS = 120
_ADDRESS_CHARS = 120
# A result, or data, that is hardly longer than the line in its place stays.
_LEAST_SAVED_CHARS = 80
_RECURRING: frozenset[Kind] = frozenset({"recurring"})
_SHRINKING: frozenset[Kind] = frozenset({"data", "recurring"})
# Of the text in place of data, in any vocabulary.
REMOVED_TOKENS = 32
_REMOVED = "[About {tokens} tokens that were attached here were removed. Read it again if it is needed.]"
_BEGIN = "[Old result of "
# With the longest arguments. What only looks like a stub is no longer than one.
_MOST_STUB_CHARS = 500
# Chat, responses and messages; LiteLLM has made chat parts of all of them before a guarded deployment is chosen.
_IMAGE_KINDS = frozenset({"image_url", "input_image", "image"})
_NOTHING_LEFT = "[Old reasoning was removed.]"
_REASONING_KEYS = frozenset({"reasoning_content", "reasoning", "thinking_blocks", "reasoning_details"})


class StubSize(NamedTuple):
    """How much a result was when its stub was made: a client may have cleared it since.

    Attributes:
        position: of the result, after the leading system messages.
        size: as the stub tells it.
    """

    position: int
    size: str


ImagePlace: TypeAlias = tuple[int, int]
"""Where an image stands: the position of its message, and which of that message's images it is, from 0."""


def edited(
    messages: Sequence[Message],
    stubbed: Collection[int],
    *,
    untouched: Collection[int] = (),
    images: Collection[ImagePlace] = (),
    sizes: Mapping[int, str] = MappingProxyType({}),
) -> list[Message]:
    """The messages without old reasoning and images; a message without anything to drop stays the same object.

    Args:
        messages: n, oldest first; each result after its call.
        stubbed: positions of the tool results that become stubs, and of user messages whose attached data does.
        untouched: positions of messages that stay as they are but for that, images included.
        images: those that stay.
        sizes: of results, by position, if they were others when their stubs were made.
    """
    calls = calls_by_position(messages)
    shown: list[Message] = []
    for position, message in enumerate(messages):
        if position in stubbed and message.role != "tool":
            message = without_data(message)
        if position in untouched:
            shown.append(message)
        elif position in stubbed and message.role == "tool":
            text = stub(message, calls.get(position), sizes.get(position, ""))
            shown.append(with_text(_without_images(message, position, images), text))
        else:
            shown.append(_without_images(_without_reasoning(message), position, images))
    return shown


def stub(result: Message, call: ToolCall | None, size: str = "") -> str:
    """The text that stands for an old tool result: tool, short arguments, size, how to get it back.

    Args:
        result: as the client sends it.
        call: of that result; None for an unknown one.
        size: that it had; "" for what it has.
    """
    return f"{_BEGIN}{called(call)}, {size or size_of(result)}, was removed. Call the tool again if it is needed.]"


def size_of(result: Message) -> str:
    """The size of a result as its stub tells it."""
    text = result.text
    line_count = text.count("\n", 0, len(text) - 1) + 1
    return f"{line_count} lines" if line_count > 1 else f"about {roughly_tokens(text)} tokens"


def _is_stub(text: str) -> bool:
    """Returns True for a stub that a caller of the library sends back."""
    return text.startswith(_BEGIN) and len(text) <= _MOST_STUB_CHARS


def called(call: ToolCall | None) -> str:
    """A call in a few words; None for an unknown one."""
    return "an earlier call" if call is None else f"{call.name}({_short(render_arguments(call.arguments))})"


def image_parts(message: Message) -> list[JsonValue]:
    content = message.raw.get("content")
    if not isinstance(content, list) or not _IMAGE_KINDS.intersection(message.other_parts):
        return []
    return [part for part in content if _is_image(part)]


def stubs(messages: Sequence[Message]) -> dict[int, str]:
    """The shorter text in place of each result and each message with attached data, by position.

    The client's own words that come again later go first, then superseded reads, then the oldest.
    """
    calls = calls_by_position(messages)
    superseded = superseded_reads(messages)
    recurring = [at for at, each in enumerate(messages) if _recurs_in(each)][:-1]
    found = {
        position: stub(message, calls.get(position)) if message.role == "tool" else without_data(message).text
        for position, message in enumerate(messages)
        if message.role in ("tool", "user")
    }
    shrinking = [
        at
        for at, line in found.items()
        if len(messages[at].text) - len(line) >= _LEAST_SAVED_CHARS and not _is_stub(messages[at].text)
    ]
    shrinking.sort(key=lambda position: (position not in recurring, position not in superseded, position))
    return {position: found[position] for position in shrinking}


def with_data(messages: Sequence[Message], positions: Iterable[int]) -> tuple[int, ...]:
    """Returns the positions, ascending, whose messages have data attached that would shrink."""
    return tuple(sorted(at for at in positions if without_data(messages[at]) is not messages[at]))


def _recurs_in(message: Message) -> bool:
    """Returns True if the client's own words in a user message would shrink, and come again in later ones."""
    return message.marks is not NO_MARKS and any(_shrinks(each, _RECURRING) for _, each in stretches_of(message))


def data_of(message: Message) -> Message | None:
    """The data that `without_data` leaves out, as a result of a tool; None for none."""
    found: list[str] = []
    with_shorter_data(message, found.append)
    return parse_message({"role": "tool", "content": "\n".join(found)}) if found else None


def without_data(message: Message) -> Message:
    """`message` with one line for each stretch of data in it; the same object if that would save nothing."""
    return with_shorter_data(message, lambda _: "")


def with_shorter_data(
    message: Message, shorten: Callable[[str], str | None], kinds: Collection[Kind] = _SHRINKING
) -> Message:
    """`message` with something shorter for the data in it: parts, words, notes and the data's own tags stay.

    Args:
        message: any; only a user's holds data.
        shorten: gives the text in place of a stretch of data, oldest first; "" for a line that says what was there,
            None for the stretch as it is.
        kinds: of the stretches that it is asked about.
    """
    if message.role != "user" or message.is_synthetic:
        return message
    content = message.raw.get("content")
    found = iter(parts_of(message))

    def shown(part: JsonValue) -> JsonValue:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            return {**part, "text": shown(part["text"])}
        return _shortened(part, next(found), shorten, kinds) if isinstance(part, str) else part

    changed = list(map(shown, content)) if isinstance(content, list) else shown(content)
    if changed == content:
        return message
    return replace(parse_message({**message.raw, "content": changed}), marks=message.marks)


def _shrinks(stretch: Stretch, kinds: Collection[Kind]) -> bool:
    return stretch.kind in kinds and stretch.body_end - stretch.body - len(_REMOVED) >= _LEAST_SAVED_CHARS


def _shortened(
    text: str, found: Iterable[Stretch], shorten: Callable[[str], str | None], kinds: Collection[Kind]
) -> str:
    pieces: list[str] = []
    kept = 0
    for each in found:
        body = text[each.body : each.body_end]
        shorter = shorten(body) if _shrinks(each, kinds) else None
        if shorter is None:
            continue
        shorter = shorter or _REMOVED.format(tokens=roughly_tokens(body))
        if len(shorter) < len(body):
            closes = each.body_end < each.end
            pieces += [text[kept : each.body], "\n", shorter.strip("\n"), "\n" if closes else ""]
            kept = each.body_end
    return "".join((*pieces, text[kept:]))


def superseded_reads(messages: Sequence[Message]) -> frozenset[int]:
    """The positions of results that a later call of the same tool with the same arguments (normal form) repeats.

    The newest holds. A result whose call is unknown supersedes nothing and is not superseded.
    """
    calls = calls_by_position(messages)
    newest = {(call.name, canonical_arguments(call.arguments)): position for position, call in calls.items()}
    return frozenset(set(calls) - set(newest.values()))


def state_calls(messages: Sequence[Message]) -> dict[tuple[int, int], bool]:
    """The calls that carry a whole state, such as a list of tasks, by message and place there: True for the newest.

    A tool has such calls if a list of objects comes again with at least half of its texts the same, whatever the tool
    is called.
    """
    groups: defaultdict[tuple[str, str], list[tuple[tuple[int, int], set[str]]]] = defaultdict(list)
    for at, message in enumerate(messages):
        for place, call in enumerate(message.calls):
            for key, texts in _listed(call.arguments):
                groups[call.name, key].append(((at, place), texts))
    return {
        where: where == group[-1][0]
        for group in groups.values()
        if any(2 * len(one & other) >= max(len(one), len(other)) for (_, one), (_, other) in pairwise(group))
        for where, _ in group
    }


def state_texts(call: ToolCall) -> set[str]:
    """The texts of a state's items."""
    return {text for _, texts in _listed(call.arguments) for text in texts}


def _listed(arguments: str) -> list[tuple[str, set[str]]]:
    """The lists of objects among arguments, by their names, with the longest text of each object."""
    try:
        values = json.loads(arguments) if "[{" in arguments.replace(" ", "") else None
    except (ValueError, RecursionError):
        return []
    return [
        (key, {max(filter(_is_text, item.values()), key=len, default="") for item in value})
        for key, value in (values.items() if isinstance(values, dict) else ())
        if isinstance(value, list) and len(value) > 1 and all(isinstance(item, dict) for item in value)
    ]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _short(arguments: str) -> str:
    line = " ".join(arguments.split())
    return line if len(line) <= _ARGUMENTS_CHARS else line[:_ARGUMENTS_CHARS] + "…"


def _without_reasoning(message: Message) -> Message:
    if message.role != "assistant":
        return message
    raw = message.raw
    if any(key in raw for key in _REASONING_KEYS):
        message = parse_message({key: value for key, value in raw.items() if key not in _REASONING_KEYS})
    if "<think" in message.text:
        content = message.raw.get("content")
        if isinstance(content, str):
            # Some templates refuse an assistant message that says nothing and calls nothing.
            first, *others = outside_thoughts(content)
            said = "".join((first, *(part.lstrip() for part in others)))
            return with_text(message, said or ("" if message.calls else _NOTHING_LEFT))
    return message


def _without_images(message: Message, position: int, staying: Collection[ImagePlace]) -> Message:
    content = message.raw.get("content")
    if not isinstance(content, list) or not _IMAGE_KINDS.intersection(message.other_parts):
        return message
    index = numbers()
    parts = [
        {"type": "text", "text": f"[An image was here{_address(part)}; it was removed.]"}
        if isinstance(part, Mapping) and _is_image(part) and (position, next(index)) not in staying
        else part
        for part in content
    ]
    return message if parts == content else parse_message({**message.raw, "content": parts})


def _is_image(part: JsonValue) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in _IMAGE_KINDS


def _address(part: Mapping[str, JsonValue]) -> str:
    """The address of a linked image; an inline one has none."""
    holder = part.get("image_url")
    url = holder.get("url") if isinstance(holder, Mapping) else holder
    linked = isinstance(url, str) and url.startswith("http")
    return f", {str(url)[:_ADDRESS_CHARS]}" if linked else ""
