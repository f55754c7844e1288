"""Divides the tokens of a rendered prompt among messages, tools and the rest.

Texts are searched for in the prompt, in order; those that cannot be told apart share by length. A prompt is counted
whole, so these sizes only steer where a conversation is cut.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.tokenizers.vocabulary import Segment

# Texts shorter than this are found in other texts, so they are only searched for nearby.
_TELLING_CHARS, _NEAR_CHARS = 24, 400
_MAX_PLACES = 16
_PROBE_CHARS = 200
# Between special tokens of a turn's header stands at most a role.
_HEADER_GAP_CHARS = 24
# About the length of a message's header.
_MESSAGE_CHARS = 16
_MAX_LOST_RATIO = 0.1
# Searches for texts that the template has dropped or changed read the prompt this often at most.
_MAX_READINGS = 8
# Searched at once at first; then eight times as many.
_WINDOW_CHARS = 4096


class Scale:
    """Tokens up to any character of a prompt; inside a text in proportion to its characters.

    Segments follow one another, so each is where the one before it ends. They are kept as numbers: as objects, those of
    40,000 messages were half of what a collection of garbage looks at, in which all requests wait (2026-11-23).
    """

    def __init__(self, segments: Sequence[Segment], lengths: Sequence[int]) -> None:
        self._ends = [segment.end for segment in segments]
        self._is_special = bytearray(segment.is_special for segment in segments)
        self._tokens = [0]
        # The end of the special token that the prompt begins with; 0 if it begins with text.
        self.first_special_end = self._ends[0] if self._is_special[:1] == b"\x01" else 0
        remaining = iter(lengths)
        for segment in segments:
            self._tokens.append(self._tokens[-1] + (1 if segment.is_special else next(remaining)))
        self.total = self._tokens[-1]

    def before(self, position: int) -> int:
        index = bisect_right(self._ends, position)
        if index == len(self._ends):
            return self.total
        start = self._start(index)
        inside = self._tokens[index + 1] - self._tokens[index]
        return self._tokens[index] + inside * (position - start) // (self._ends[index] - start)

    def follows_header(self, position: int) -> bool:
        """Returns True if at most a role and the like stands between a special token and a character."""
        index = bisect_right(self._ends, position)
        return index < len(self._ends) and position - self._start(index) <= _HEADER_GAP_CHARS

    def header_start(self, position: int, lower: int) -> int:
        """The start of the header that ends at a character: at most a role stands between its special tokens."""
        start = position
        index = bisect_right(self._ends, position - 1)
        while 0 <= index < len(self._ends):
            first = self._start(index)
            length = min(position, self._ends[index]) - max(lower, first)
            if not self._is_special[index] and length > _HEADER_GAP_CHARS:
                break
            start = max(lower, first)
            if first <= lower:
                break
            index -= 1
        return start

    def _start(self, index: int) -> int:
        return self._ends[index - 1] if index else 0


class Shares(NamedTuple):
    """The parts of a prompt, as in `Count`.

    Attributes:
        reasoning_tokens: the part of `sizes` that is reasoning, about.
    """

    sizes: tuple[int, ...]
    tools_tokens: int
    overhead_tokens: int
    reasoning_tokens: int


class _Places(NamedTuple):
    starts: list[int]
    end: int
    reasoning_tokens: int


def share(request: Request, text: str, scale: Scale, tools_tokens: int) -> Shares:
    """Divides a request's prompt (`text`, `scale`), which would lose `tools_tokens` without tools."""
    places = _places(request.messages, text, scale)
    if places is None:
        return _by_length(request, scale.total, tools_tokens)
    edges = [*places.starts, places.end]
    sizes = [after - before for before, after in pairwise(map(scale.before, edges))]
    tools_tokens = min(tools_tokens, scale.total)
    # The schemas stand inside a message, or before all of them.
    left = tools_tokens
    if request.tools and sizes:
        place = bisect_right(edges, _tools_position(request.tools, text)) - 1
        if 0 <= place < len(sizes):
            taken = min(left, sizes[place])
            sizes[place] -= taken
            left -= taken
    overhead_tokens = scale.total - sum(sizes) - tools_tokens
    if overhead_tokens < 0:
        tools_tokens += overhead_tokens
        overhead_tokens = 0
    return Shares(tuple(sizes), tools_tokens, overhead_tokens, places.reasoning_tokens)


def _places(messages: Sequence[Message], text: str, scale: Scale) -> _Places | None:
    """The start of each message with its header; None if too much was dropped, changed, or is out of order."""
    starts: list[int] = []
    end = lower = scale.first_special_end
    reasoning_tokens, lost_chars, chars = 0, 0, 1
    readings = _MAX_READINGS * len(text)
    for message in messages:
        start: int | None = None
        for part in (message.reasoning, message.text, *(call.name for call in message.calls)):
            wanted = part.strip()
            if not wanted:
                continue
            chars += len(wanted)
            found = _find(text, wanted, end, scale)
            if found < 0:
                readings -= len(text) - end
                if readings < 0:
                    return None
                # Templates drop reasoning of older turns by design.
                lost_chars += 0 if part is message.reasoning else len(wanted)
                continue
            start = found if start is None else start
            end = min(len(text), found + len(wanted))
            if part is message.reasoning:
                reasoning_tokens += scale.before(end) - scale.before(found)
        for call in message.calls:
            end = min(len(text), end + len(call.arguments) * 3 // 4)
        starts.append(lower if start is None else max(lower, scale.header_start(start, lower)))
        lower = max(starts[-1], end)
    return None if lost_chars > _MAX_LOST_RATIO * chars else _Places(starts, end, reasoning_tokens)


def _find(text: str, wanted: str, position: int, scale: Scale) -> int:
    """The first place of a text, as it is or escaped as in JSON; -1 if there is none."""
    probe = wanted[:_PROBE_CHARS]
    forms = {probe, json.dumps(probe, ensure_ascii=False)[1:-1]}
    last = len(text)
    if len(probe) < _TELLING_CHARS:
        # It may stand inside others: its own place is after a header, or at least nearby.
        found = text.find(probe, position)
        far = last if found > position + _NEAR_CHARS else position + _WINDOW_CHARS
        for _ in range(_MAX_PLACES):
            if found < 0 or scale.follows_header(found):
                break
            found = text.find(probe, found + 1, far)
        if found >= 0 and scale.follows_header(found):
            return found
        last = min(position + _NEAR_CHARS, last)
    width = _WINDOW_CHARS
    while True:
        end = min(position + width, last)
        places = [place for form in forms if (place := text.find(form, position, end)) >= 0]
        if places:
            return min(places)
        if end == last:
            return -1
        width *= 8


def _by_length(request: Request, total: int, tools_tokens: int) -> Shares:
    """Divides in proportion to characters, if messages cannot be told apart in the prompt."""
    weights = [_MESSAGE_CHARS + len(message.text) + _call_chars(message) for message in request.messages]
    tools_tokens = min(tools_tokens, total)
    left, weight_left = total - tools_tokens, sum(weights) + _MESSAGE_CHARS
    sizes: list[int] = []
    for weight in weights:
        sizes.append(left * weight // weight_left)
        left -= sizes[-1]
        weight_left -= weight
    reasoning = sum(len(message.reasoning) for message in request.messages)
    return Shares(tuple(sizes), tools_tokens, left, min(sum(sizes), reasoning // 4))


def _call_chars(message: Message) -> int:
    return sum(len(call.name) + len(call.arguments) + _MESSAGE_CHARS for call in message.calls)


def _tools_position(tools: Sequence[JsonValue], text: str) -> int:
    """The place of the first schema, or 0; by its description, since calls repeat the name."""
    tool = tools[0]
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return 0
    for key in ("description", "name"):
        value = function.get(key)
        if isinstance(value, str) and value:
            probe = json.dumps(value[:_PROBE_CHARS], ensure_ascii=False)[1:-1].partition("\\")[0]
            found = text.find(probe) if probe else -1
            if found >= 0:
                return found
    return 0
