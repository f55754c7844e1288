"""Where the tokens of a rendered prompt belong: to which message, to the tools, to nobody.

Called by `counting.py`. Texts are searched for in the prompt; what cannot be told apart is shared out by length.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.models.prompts import Prompt

# Texts shorter than this are found in what is not theirs.
_TELLING_CHARS, _NEAR_CHARS, _MAX_PLACES = 24, 400, 16
_PROBE_CHARS = 200
# Between special tokens of a turn's header stands at most a role.
_HEADER_GAP_CHARS = 24
# A header of a message is about this long.
_MESSAGE_CHARS = 16
_MAX_LOST_RATIO = 0.1
_UNESCAPED = re.compile(r'[^"\\\x00-\x1f]*')
# Searches for texts that the template has dropped or changed read the prompt this often at most.
_MAX_READINGS = 8


class Shares(NamedTuple):
    """Where the tokens of a prompt belong; all parts together are `tokens`.

    Attributes:
        tokens: of the whole prompt.
        sizes: sizes[i] belongs to messages[i].
        tools_tokens: the schemas and what introduces them.
        overhead_tokens: before the first message, behind the last one.
        reasoning_tokens: the part of `sizes` that is reasoning, about.
    """

    tokens: int
    sizes: tuple[int, ...]
    tools_tokens: int
    overhead_tokens: int
    reasoning_tokens: int


def share(request: Request, prompt: Prompt, lengths: Sequence[int], tools_tokens: int) -> Shares:
    """What each message takes of the prompt.

    Args:
        request: that was rendered.
        prompt: its prompt.
        lengths: tokens of each of `prompt.texts()`.
        tools_tokens: what the prompt would lose without tools.
    """
    scale = _Scale(prompt, lengths)
    places = _starts(request.messages, prompt, scale)
    if places is None:
        return _by_length(request, scale.total, tools_tokens)
    starts, reasoning = places
    before = [scale.before(start) for start in starts]
    sizes = [end - start for start, end in pairwise(before)]
    tools_tokens = min(tools_tokens, scale.total)
    # The schemas stand inside a message, or before all of them.
    left = tools_tokens
    place = bisect_right(starts, _tools_position(request.tools, prompt.text)) - 1 if request.tools else -1
    if 0 <= place < len(sizes):
        taken = min(left, sizes[place])
        sizes[place] -= taken
        left -= taken
    overhead_tokens = scale.total - sum(sizes) - tools_tokens
    if overhead_tokens < 0:
        tools_tokens += overhead_tokens
        overhead_tokens = 0
    return Shares(scale.total, tuple(sizes), tools_tokens, overhead_tokens, reasoning)


class _Scale:
    """Tokens up to any character of a prompt; inside a text in proportion to its characters."""

    def __init__(self, prompt: Prompt, lengths: Sequence[int]) -> None:
        self.segments = prompt.segments
        self.ends: list[int] = []
        self._tokens = [0]
        remaining = iter(lengths)
        for segment in prompt.segments:
            self.ends.append(segment.end)
            self._tokens.append(self._tokens[-1] + (1 if segment.is_special else next(remaining)))
        self.total = self._tokens[-1]

    def before(self, position: int) -> int:
        """Tokens before a character."""
        index = bisect_right(self.ends, position)
        if index == len(self.segments):
            return self.total
        segment = self.segments[index]
        inside = self._tokens[index + 1] - self._tokens[index]
        return self._tokens[index] + inside * (position - segment.start) // (segment.end - segment.start)

    def follows_header(self, position: int) -> bool:
        """Whether at most a role and the like stands between a special token and a character."""
        index = bisect_right(self.ends, position)
        return index < len(self.segments) and position - self.segments[index].start <= _HEADER_GAP_CHARS

    def header_start(self, position: int, lower: int) -> int:
        """Where the header begins that ends at a character: at most a role stands between its special tokens."""
        start = position
        index = bisect_right(self.ends, position - 1)
        if index < len(self.segments) and not self.segments[index].is_special:
            if position - self.segments[index].start > _HEADER_GAP_CHARS:
                return start
            start = max(lower, self.segments[index].start)
            index -= 1
        while index >= 0 and index < len(self.segments) and self.segments[index].start >= lower:
            segment = self.segments[index]
            if not segment.is_special and segment.end - segment.start > _HEADER_GAP_CHARS:
                break
            start = segment.start
            index -= 1
        return start


def _starts(messages: Sequence[Message], prompt: Prompt, scale: _Scale) -> tuple[list[int], int] | None:
    """Where each message begins, and at last where the last one ends; with the tokens of all reasoning.

    Texts are searched for in order. None where too much of them is not found: dropped, changed, or out of order.
    """
    text = prompt.text
    first = scale.ends[0] if scale.segments and scale.segments[0].is_special else 0
    starts: list[int] = []
    position = lower = first
    reasoning_tokens = 0
    lost_chars, chars = 0, 1
    readings = _MAX_READINGS * len(text)
    for message in messages:
        start: int | None = None
        for part in (message.reasoning, message.text, *(call.name for call in message.calls)):
            wanted = part.strip()
            if not wanted or readings < 0:
                continue
            found = _find(text, wanted, position, scale)
            chars += len(wanted)
            if found < 0:
                readings -= len(text) - position
                # Templates drop reasoning of older turns by design.
                lost_chars += 0 if part is message.reasoning else len(wanted)
                continue
            start = found if start is None else start
            position = min(len(text), found + len(wanted))
            if part is message.reasoning:
                reasoning_tokens += scale.before(position) - scale.before(found)
        for call in message.calls:
            position = min(len(text), position + len(call.arguments) * 3 // 4)
        starts.append(lower if start is None else max(lower, scale.header_start(start, lower)))
        lower = max(starts[-1], position)
    if lost_chars > _MAX_LOST_RATIO * chars or readings < 0:
        return None
    return [*_spread(starts), min(len(text), position)], reasoning_tokens


def _find(text: str, wanted: str, position: int, scale: _Scale) -> int:
    """Where a text is, as it is or escaped as in JSON; -1 if nowhere."""
    probe = wanted[:_PROBE_CHARS]
    found = _find_exactly(text, probe, position, scale)
    if found < 0 and not _UNESCAPED.fullmatch(probe):
        found = _find_exactly(text, json.dumps(probe, ensure_ascii=False)[1:-1], position, scale)
    return found


def _find_exactly(text: str, probe: str, position: int, scale: _Scale) -> int:
    found = text.find(probe, position)
    if len(probe) >= _TELLING_CHARS or found < 0:
        return found
    # A short text may stand inside others: its own place is behind a header, or at least nearby.
    first = found
    for _ in range(_MAX_PLACES):
        if found < 0:
            break
        if scale.follows_header(found):
            return found
        found = text.find(probe, found + 1)
    return first if first <= position + _NEAR_CHARS else -1


def _by_length(request: Request, total: int, tools_tokens: int) -> Shares:
    """Shares in proportion to the characters of messages, where they cannot be told apart in the prompt."""
    weights = [_MESSAGE_CHARS + len(message.text) + _call_chars(message) for message in request.messages]
    tools_tokens = min(tools_tokens, total)
    left, weight_left = total - tools_tokens, sum(weights) + _MESSAGE_CHARS
    sizes: list[int] = []
    for weight in weights:
        sizes.append(left * weight // weight_left)
        left -= sizes[-1]
        weight_left -= weight
    reasoning = sum(len(message.reasoning) for message in request.messages)
    return Shares(total, tuple(sizes), tools_tokens, left, min(sum(sizes), reasoning // 4))


def _call_chars(message: Message) -> int:
    return sum(len(call.name) + len(call.arguments) + _MESSAGE_CHARS for call in message.calls)


def _spread(starts: list[int]) -> list[int]:
    """Positions that never fall."""
    highest = 0
    spread = []
    for start in starts:
        highest = max(highest, start)
        spread.append(highest)
    return spread


def _tools_position(tools: Sequence[JsonValue], text: str) -> int:
    """Where the first schema is, or 0; by its description, since calls repeat the name."""
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
