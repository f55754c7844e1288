"""The forms in which old messages are sent: whole, without attached data, as a line, bare, or the part that fits.

Masking old results is as good as summarising on SWE-bench at half the cost (JetBrains, arXiv 2508.21433). A form is
made anew for every request of nothing but the message, so that a stored one can put no words into its place.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.core.messages import (
    JsonValue,
    Message,
    ToolCall,
    calls_by_position,
    outside_thoughts,
    parse_message,
    render_arguments,
    roughly_tokens,
    rounds,
    with_text,
)
from litellm_compaction.core.stretches import Stretch, parts_of, texts_of, with_texts

_REMOVED_DATA = "[About {tokens} tokens that were attached here were removed. Read it again if it is needed.]"
_CLEARED = "[Old tool result content cleared]"
# A result, or data, that is hardly longer than the line in its place stays.
_LEAST_SAVED_CHARS = 80
_ARGUMENTS_CHARS = 120
# Chat, responses and messages; LiteLLM has made chat parts of all of them before a guarded deployment is chosen.
_IMAGE_KINDS = ("image_url", "input_image", "image")
_REASONING_KEYS = frozenset({"reasoning_content", "reasoning", "thinking_blocks", "reasoning_details"})

How: TypeAlias = Literal["whole", "words", "line", "gone"]
ImagePlace: TypeAlias = tuple[int, int]
"""Where an image stands: the position of its message, and which of that message's images it is, from 0."""


class Form(NamedTuple):
    """The form in which a message is sent; one without a form is sent without its reasoning and images."""

    position: int  # After the leading system messages.
    # `words` is all but attached data; `line` one for a tool's result or for a message's data.
    how: How


def in_order(forms: Mapping[int, How]) -> tuple[Form, ...]:
    """The forms of messages by their positions, ascending."""
    return tuple(starmap(Form, sorted(forms.items())))


def in_forms(
    messages: Sequence[Message], form_of: Mapping[int, How], images: Collection[ImagePlace] = ()
) -> list[Message | None]:
    """The messages as they are sent, None for one that is gone, the same object if unchanged; `images` stay."""
    calls = calls_by_position(messages) if "line" in form_of.values() else {}

    def sent(at: int, message: Message) -> Message | None:
        if (how := form_of.get(at)) == "gone":
            return None
        if how in ("whole", "words"):
            return message if how == "whole" else without_data(message)
        shown = _bare(without_data(message) if how == "line" else message, at, images)
        is_result = how == "line" and message.role == "tool"
        return with_text(shown, line_for(calls.get(at))) if is_result else shown

    return [sent(at, message) for at, message in enumerate(messages)]


def line_for(call: ToolCall | None) -> str:
    """The text that stands for the old result of a call: tool, short arguments, how to get it back."""
    return f"[Old result of {called(call)} was removed. Call the tool again if it is needed.]"


def called(call: ToolCall | None) -> str:
    """A call in a few words; None for an unknown one."""
    if call is None:
        return "an earlier call"
    line = " ".join(render_arguments(call.arguments).split())
    return f"{call.name}({line if len(line) <= _ARGUMENTS_CHARS else line[:_ARGUMENTS_CHARS] + '…'})"


def lines_for(messages: Sequence[Message]) -> dict[int, str]:
    """The shorter text for each result and each message with data that is worth it, the oldest first."""
    calls = calls_by_position(messages)
    shorter = {
        at: line_for(calls.get(at)) if message.role == "tool" else without_data(message).text
        for at, message in enumerate(messages)
        if message.role in ("tool", "user")
    }
    return {at: text for at, text in shorter.items() if len(messages[at].text) - len(text) >= _LEAST_SAVED_CHARS}


def without_data(message: Message) -> Message:
    """`message` with one line for each stretch of data in it; the same object if that would save nothing or is new."""
    return message if message.is_renewed else with_shorter_data(message, lambda _: "")


def with_shorter_data(message: Message, shorten: Callable[[str], str | None]) -> Message:
    """`message` with something shorter for the data in a user's one: parts, words, notes and the data's own tags stay.

    `shorten` gives the text in place of a stretch of data, oldest first: "" for a line that says what was there, None
    for the stretch as it is.
    """
    if message.role != "user" or message.is_synthetic:
        return message

    def shown(text: str, stretches: Sequence[Stretch]) -> str:
        pieces, end = [], 0
        for each in (each for each in stretches if each.kind in ("data", "recurring")):
            data = text[each.body : each.body_end]
            shorter = shorten(data) if len(data) - len(_REMOVED_DATA) >= _LEAST_SAVED_CHARS else None
            shorter = _REMOVED_DATA.format(tokens=roughly_tokens(data)) if shorter == "" else shorter
            if shorter is not None and len(shorter) < len(data):
                pieces += [text[end : each.body], "\n", shorter.strip("\n"), "\n" * (each.body_end < each.end)]
                end = each.body_end
        return "".join((*pieces, text[end:]))

    texts = texts_of(message)
    changed = list(map(shown, texts, parts_of(message)))
    return message if changed == texts else replace(with_texts(message, changed), marks=message.marks)


def image_parts(message: Message) -> list[JsonValue]:
    content = message.raw.get("content")
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") in _IMAGE_KINDS]


def _bare(message: Message, at: int, images: Collection[ImagePlace]) -> Message:
    """`message` without its reasoning, and without its images but those in `images`."""
    raw, content = message.raw, message.raw.get("content")
    if message.role == "assistant":
        raw = {key: value for key, value in raw.items() if key not in _REASONING_KEYS}
        if isinstance(content, str) and "<think" in content:
            first, *others = outside_thoughts(content)
            said = "".join((first, *(part.lstrip() for part in others)))
            # Some templates refuse an assistant message that says nothing and calls nothing.
            raw = {**raw, "content": said or ("" if message.calls else "[Old reasoning was removed.]")}
    if isinstance(content, list):
        going = {id(part) for index, part in enumerate(image_parts(message)) if (at, index) not in images}
        note = {"type": "text", "text": "[An image was here; it was removed.]"}
        raw = {**raw, "content": [note if id(part) in going else part for part in content]}
    return message if raw == message.raw else parse_message(raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearOrder:
    """Anthropic's `clear_tool_uses_20250919`: which old results to clear, and from which size on.

    Source: anthropic, `types/beta/beta_clear_tool_uses_20250919_edit_param.py`.
    """

    above_tokens: int = 0  # Of the prompt; 0 if the number of calls decides.
    above_calls: int = 0
    keep: int = 3  # So many calls, the newest ones, keep their results.
    at_least_tokens: int = 0  # Less is not worth a changed prefix.
    excluded: frozenset[str] = frozenset()  # Tools whose results stay.
    inputs: bool | frozenset[str] = False  # The calls' arguments go, too: of all tools, or of those named.


def cleared(messages: Sequence[Message], order: ClearOrder, prompt_tokens: int) -> tuple[tuple[Message, ...], int]:
    """A conversation with old results cleared, if it is as large as ordered, and how many calls' results went."""
    all_rounds = list(rounds(messages))
    calls = [made for each in all_rounds for made in each.made]
    is_due = prompt_tokens > order.above_tokens if order.above_tokens else len(calls) > order.above_calls
    old = {made for made in calls[: max(len(calls) - order.keep, 0)] if is_due and made.call.name not in order.excluded}
    shown, gone = list(messages), set()
    for at, made in (answer for each in all_rounds for answer in each.results.items()):
        if made in old and messages[at].text != _CLEARED:
            gone.add(made)
            shown[at] = with_text(messages[at], _CLEARED)
            if order.inputs is True or (order.inputs and made.call.name in order.inputs):
                shown[made.at] = _without_input(shown[made.at], made.place)
    kept = zip(messages, shown, strict=True)
    return tuple(new if new is old else replace(new, received=old) for old, new in kept), len(gone)


def _without_input(message: Message, place: int) -> Message:
    calls = message.raw.get("tool_calls")
    shown = list(calls) if isinstance(calls, list) else []
    if isinstance(call := shown[place], dict) and isinstance(function := call.get("function"), dict):
        shown[place] = {**call, "function": {**function, "arguments": "{}"}}
    return parse_message({**message.raw, "tool_calls": shown})


# ------------------------------------------------------------------ the part that fits


def excerpt(text: str, limit_tokens: int, count: Callable[[str], int]) -> str:
    """`text` if it has at most `limit_tokens`, else its head (60 %) and tail with a marker between them.

    Below the marker's own size, 16 tokens, only the marker is left.
    """
    total = count(text) if len(text) > limit_tokens // 4 else 0
    if total <= limit_tokens:
        return text
    keep_tokens = max(limit_tokens - 16, 0)
    keep_chars = len(text) * keep_tokens // total
    # The ends may be denser than the average text.
    while (kept := sum(map(count, halves := _ends(text, keep_chars)))) > keep_tokens and keep_chars:
        keep_chars = min(keep_chars * keep_tokens // kept, keep_chars * 19 // 20)
    return f"\n[… {max(total - kept, 1)} tokens left out …]\n".join(halves)


def about(text: str, words: Sequence[str], limit_tokens: int, count: Callable[[str], int]) -> str:
    """`text` if it has at most `limit_tokens`, else its part around the rarest of some words, beside the most others.

    A word counts by its beginning, whatever its ending is. Without any of them the head and tail are left.
    """
    if count(text) <= limit_tokens:
        return text
    beginnings = dict.fromkeys(word[:5].casefold() for word in words if len(word) > 2)
    found = ([each.start() for each in re.finditer(re.escape(word), text, re.IGNORECASE)] for word in beginnings)
    places = sorted(filter(None, found), key=len)
    if not places:
        return excerpt(text, limit_tokens, count)
    # Words that stand so near to each other are of one statement.
    middle = max(places[0], key=lambda at: (sum(any(abs(place - at) < 150 for place in each) for each in places), at))
    chars = len(text)
    while True:
        start, end = max(middle - chars, 0), middle + chars
        part = ("…" if start else "") + text[start:end].strip() + ("…" if end < len(text) else "")
        if not chars or count(part) <= limit_tokens:
            return part
        chars = chars * 9 // 10


def ends(text: str, keep_chars: int) -> str:
    """The head (60 %) and tail of `text`, of at most so many characters, with a marker between them."""
    return "\n[…]\n".join(_ends(text, keep_chars)) if keep_chars < len(text) else text


def common_level(sizes: Sequence[int], weights: Sequence[int], room_tokens: int) -> int:
    """The largest L with sum(min(size, L * weight)) ≤ room, by bisection; the largest size if all fit."""

    def taken(level: int) -> int:
        return sum(min(size, level * weight) for size, weight in zip(sizes, weights, strict=True))

    return max(bisect_right(range(max(sizes, default=0) + 1), room_tokens, key=taken) - 1, 0)


def _ends(text: str, keep_chars: int) -> tuple[str, str]:
    head_chars = int(keep_chars * 0.6)
    head, tail = text[:head_chars], text[len(text) - keep_chars + head_chars :]
    # To the end of a line and from the start of one, if that costs at most a fifth.
    end, start = head.rfind("\n"), tail.find("\n")
    return (
        head[:end] if end >= len(head) * 4 // 5 else head,
        tail[start + 1 :] if 0 <= start <= len(tail) // 5 else tail,
    )
