"""Where the tokens of a rendered prompt belong: to which message, to the tools, to nobody.

Called by `counting.py`. Texts are searched for in the prompt; what cannot be told apart is shared out by length.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.models.scale import Scale

# Texts shorter than this are found in what is not theirs.
_TELLING_CHARS, _NEAR_CHARS, _MAX_PLACES = 24, 400, 16
_PROBE_CHARS = 200
# A header of a message is about this long.
_MESSAGE_CHARS = 16
_MAX_LOST_RATIO = 0.1
_UNESCAPED = re.compile(r'[^"\\\x00-\x1f]*')
# Searches for texts that the template has dropped or changed read the prompt this often at most.
_MAX_READINGS = 8
# How far is looked at once.
_WINDOW_CHARS = 4096


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


class Place(NamedTuple):
    """Where a message of a prompt is, and what was found up to its end.

    Attributes:
        start: its first character.
        before: tokens before it.
        end: behind its last character.
        reasoning_tokens: of all reasoning so far.
        lost_chars: of texts that were not found so far.
        chars: of texts so far.
        reach: in a prompt that is the same up to this character, it would be found at the same place.
    """

    start: int
    before: int
    end: int
    reasoning_tokens: int
    lost_chars: int
    chars: int
    reach: float


def share(
    request: Request, text: str, scale: Scale, tools_tokens: int, known: Sequence[Place] = ()
) -> tuple[Shares, list[Place]]:
    """What each message takes of the prompt, and where they are in it.

    Args:
        request: that was rendered.
        text: its prompt.
        scale: of it.
        tools_tokens: what the prompt would lose without tools.
        known: places of the first messages, from an earlier prompt.
    """
    places = _places(request.messages, text, scale, known)
    if places is None:
        return _by_length(request, scale.total, tools_tokens), []
    end = places[-1].end if places else _first(scale)
    before = [place.before for place in places]
    before.append(scale.before(end))
    sizes = [after - first for first, after in pairwise(before)]
    tools_tokens = min(tools_tokens, scale.total)
    # The schemas stand inside a message, or before all of them.
    left = tools_tokens
    if request.tools and places:
        starts = [place.start for place in places]
        place = bisect_right([*starts, end], _tools_position(request.tools, text)) - 1
        if 0 <= place < len(sizes):
            taken = min(left, sizes[place])
            sizes[place] -= taken
            left -= taken
    overhead_tokens = scale.total - sum(sizes) - tools_tokens
    if overhead_tokens < 0:
        tools_tokens += overhead_tokens
        overhead_tokens = 0
    reasoning_tokens = places[-1].reasoning_tokens if places else 0
    return Shares(scale.total, tuple(sizes), tools_tokens, overhead_tokens, reasoning_tokens), places


def _first(scale: Scale) -> int:
    """Where messages can begin: behind the token that begins a prompt."""
    return scale.ends[0] if scale.segments and scale.segments[0].is_special else 0


def _places(messages: Sequence[Message], text: str, scale: Scale, known: Sequence[Place]) -> list[Place] | None:
    """Where each message is; texts are searched for in order.

    None where too much of them is not found: dropped, changed, or out of order.
    """
    places = list(known)
    end = lower = _first(scale)
    reach: float = end
    reasoning_tokens, lost_chars, chars = 0, 0, 1
    if places:
        _, _, end, reasoning_tokens, lost_chars, chars, reach = places[-1]
        lower = max(places[-1].start, end)
    readings = _MAX_READINGS * len(text)
    most_lost_chars = _MAX_LOST_RATIO * (1 + sum(map(_wanted_chars, messages)))
    for message in messages[len(places) :]:
        if lost_chars > most_lost_chars:
            return None
        start: int | None = None
        for part in (message.reasoning, message.text, *(call.name for call in message.calls)):
            wanted = part.strip()
            if not wanted or readings < 0:
                continue
            found, seen = _find(text, wanted, end, scale)
            reach = max(reach, seen)
            chars += len(wanted)
            if found < 0:
                readings -= len(text) - end
                # Templates drop reasoning of older turns by design.
                lost_chars += 0 if part is message.reasoning else len(wanted)
                continue
            start = found if start is None else start
            end = min(len(text), found + len(wanted))
            reach = max(reach, end)
            if part is message.reasoning:
                reasoning_tokens += scale.before(end) - scale.before(found)
        for call in message.calls:
            end = min(len(text), end + len(call.arguments) * 3 // 4)
            reach = max(reach, end)
        begin = lower if start is None else max(lower, scale.header_start(start, lower))
        places.append(Place(begin, scale.before(begin), end, reasoning_tokens, lost_chars, chars, reach))
        lower = max(begin, end)
    return None if lost_chars > _MAX_LOST_RATIO * chars or readings < 0 else places


def _wanted_chars(message: Message) -> int:
    """Characters that are searched for, at most."""
    called = sum(len(call.name) for call in message.calls) if message.calls else 0
    return len(message.reasoning) + len(message.text) + called


def _find(text: str, wanted: str, position: int, scale: Scale) -> tuple[int, float]:
    """Where a text is first, as it is or escaped as in JSON, -1 if nowhere; and what of the prompt decides that."""
    probe = wanted[:_PROBE_CHARS]
    if _UNESCAPED.fullmatch(probe):
        return _find_exactly(text, probe, position, scale)
    escaped = json.dumps(probe, ensure_ascii=False)[1:-1]
    if len(probe) < _TELLING_CHARS:
        found, reach = _find_exactly(text, probe, position, scale)
        return (found, reach) if found >= 0 else _find_exactly(text, escaped, position, scale)
    width = _WINDOW_CHARS
    while True:
        end = position + width
        plain = text.find(probe, position, end)
        # One that begins before the other may end behind it.
        other = text.find(escaped, position, end if plain < 0 else plain + len(escaped))
        if plain < 0 <= other:
            plain = text.find(probe, position, other + len(probe))
        if plain >= 0 or other >= 0:
            found = min(place for place in (plain, other) if place >= 0)
            return found, found + max(len(probe), len(escaped))
        if end >= len(text):
            return -1, inf
        width *= 4


def _find_exactly(text: str, probe: str, position: int, scale: Scale) -> tuple[int, float]:
    found = text.find(probe, position)
    if len(probe) >= _TELLING_CHARS or found < 0:
        return found, found + len(probe) if found >= 0 else inf
    # A short text may stand inside others: its own place is behind a header, or at least nearby.
    near = found if found <= position + _NEAR_CHARS else -1
    last = len(text) if near < 0 else position + _WINDOW_CHARS
    for _ in range(_MAX_PLACES):
        if found < 0:
            break
        if scale.follows_header(found):
            return found, found + len(probe)
        found = text.find(probe, found + 1, last)
    return near, last if near >= 0 else inf


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
