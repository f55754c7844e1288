"""Where the tokens of a rendered prompt belong: to which message, to the tools, to nobody.

Texts are searched for in the prompt; what cannot be told apart is shared out by length. A `Scale` tells the tokens up
to any character, and which beginning a later prompt has in common with this one. Conversations are not kept here: what
is remembered of a prompt is where its special tokens are, how many tokens stand before each, and hashes of its parts.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise, takewhile
from math import inf
from operator import attrgetter, eq
from typing import NamedTuple, TypeAlias

from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.tokenizers.vocabulary import Segment

# Between special tokens of a turn's header stands at most a role.
_HEADER_GAP_CHARS = 24
# Segments and parts of all prompts together; about 100 bytes each.
_MAX_SIZE = 200_000

Key: TypeAlias = tuple[str, str, int]
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


class Scale:
    """Tokens up to any character of a prompt; inside a text in proportion to its characters.

    Segments follow one another, so each is where the one before it ends. They are kept as numbers: as objects, those of
    40,000 messages were half of what a collection of garbage looks at, in which everybody waits (2026-11-23).
    """

    def __init__(self, segments: Sequence[Segment], lengths: Sequence[int], known: Scale | None = None) -> None:
        """Takes the segments and the tokens of those that are texts; with `known`, of what follows it."""
        self.ends: list[int] = known.ends[:] if known is not None else []
        self._is_special: bytearray = known._is_special[:] if known is not None else bytearray()
        self._tokens: list[int] = known._tokens[:] if known is not None else [0]
        remaining = iter(lengths)
        total = self._tokens[-1]
        for segment in segments:
            self.ends.append(segment.end)
            self._is_special.append(segment.is_special)
            total += 1 if segment.is_special else next(remaining)
            self._tokens.append(total)
        self.total = total

    def head(self, count: int) -> Scale:
        """The scale of the first `count` segments."""
        made = Scale((), ())
        made.ends, made._is_special = self.ends[:count], self._is_special[:count]
        made._tokens = self._tokens[: count + 1]
        made.total = made._tokens[-1]
        return made

    def specials_before(self, position: int) -> int:
        """How many segments there are up to the last special token that ends before a character, it included."""
        count = bisect_right(self.ends, position)
        while count and not self._is_special[count - 1]:
            count -= 1
        return count

    @property
    def first_special_end(self) -> int:
        """The end of the special token that the prompt begins with; 0 where it begins with text."""
        return self.ends[0] if self._is_special[:1] == b"\x01" else 0

    @property
    def end(self) -> int:
        """Characters."""
        return self.ends[-1] if self.ends else 0

    def _start(self, index: int) -> int:
        return self.ends[index - 1] if index else 0

    def before(self, position: int) -> int:
        """Tokens before a character."""
        index = bisect_right(self.ends, position)
        if index == len(self.ends):
            return self.total
        start = self._start(index)
        inside = self._tokens[index + 1] - self._tokens[index]
        return self._tokens[index] + inside * (position - start) // (self.ends[index] - start)

    def follows_header(self, position: int) -> bool:
        """Whether at most a role and the like stands between a special token and a character."""
        index = bisect_right(self.ends, position)
        return index < len(self.ends) and position - self._start(index) <= _HEADER_GAP_CHARS

    def header_start(self, position: int, lower: int) -> int:
        """Where the header begins that ends at a character: at most a role stands between its special tokens."""
        start = position
        index = bisect_right(self.ends, position - 1)
        if index < len(self.ends) and not self._is_special[index]:
            if position - self._start(index) > _HEADER_GAP_CHARS:
                return start
            start = max(lower, self._start(index))
            index -= 1
        while 0 <= index < len(self.ends) and self._start(index) >= lower:
            if not self._is_special[index] and self.ends[index] - self._start(index) > _HEADER_GAP_CHARS:
                break
            start = self._start(index)
            index -= 1
        return start


class Beginning(NamedTuple):
    """The part of a prompt that an earlier one began with.

    Attributes:
        scale: of that part; its last segment is a special token.
        places: of messages that certainly are where they were.
    """

    scale: Scale
    places: Sequence[Place]


class _Entry(NamedTuple):
    hashes: list[int]
    scale: Scale
    places: list[Place]

    @property
    def size(self) -> int:
        return len(self.hashes) + len(self.scale.ends)


class Beginnings:
    """Prompts by their requests' fingerprints, least recently used ones forgotten; safe to use from several threads.

    Without them the next turn takes 1.05 to 1.6 times as long at 30,000 tokens, 1.3 to 2 times at 120,000 (2026-11-23).
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def find(
        self, names: tuple[str, str], prints: Sequence[int], parts: Sequence[str], longest_special: int
    ) -> Beginning:
        """What is known of the beginning of a prompt; empty where nothing is.

        Args:
            names: of the vocabulary and the template.
            prints: of the request, one per number of its messages (`prefix.py`).
            parts: its prompt, as the template has written it. Templates may write old messages in another way, so
                that only equal text counts. Most parts are texts of messages, whose hashes the interpreter knows from
                the fingerprints, so that no old text is read again.
            longest_special: characters of the vocabulary's longest special token.
        """
        known = self._known(names, prints)
        if known is None:
            return Beginning(Scale((), ()), ())
        equal = sum(takewhile(bool, map(eq, known.hashes, map(hash, parts))))
        equal_chars = sum(map(len, parts[:equal]))
        # What follows a special token may make it another one, or a part of another one.
        scale = known.scale.head(known.scale.specials_before(equal_chars - longest_special))
        return Beginning(scale, known.places[: bisect_right(known.places, scale.end, key=attrgetter("reach"))])

    def note(
        self, names: tuple[str, str], prints: Sequence[int], parts: Sequence[str], scale: Scale, places: list[Place]
    ) -> None:
        """Remembers a prompt.

        Args:
            names: as for `find`, as `prints` and `parts`.
            scale: of the whole prompt.
            places: of the request's messages.
        """
        if not prints:
            return
        key = (*names, prints[-1])
        entry = _Entry(list(map(hash, parts)), scale, places)
        with self._lock:
            self._drop(key)
            self._entries[key] = entry
            self._size += entry.size
            while self._size > _MAX_SIZE and len(self._entries) > 1:
                self._drop(next(iter(self._entries)))

    def _known(self, names: tuple[str, str], prints: Sequence[int]) -> _Entry | None:
        """The longest known prompt of a request that this one begins with."""
        with self._lock:
            for entry in reversed(prints):
                known = self._entries.get((*names, entry))
                if known is not None:
                    self._entries.move_to_end((*names, entry))
                    return known
        return None

    def _drop(self, key: Key) -> None:
        dropped = self._entries.pop(key, None)
        if dropped is not None:
            self._size -= dropped.size


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
    end = places[-1].end if places else scale.first_special_end
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


def _places(messages: Sequence[Message], text: str, scale: Scale, known: Sequence[Place]) -> list[Place] | None:
    """Where each message is; texts are searched for in order.

    None where too much of them is not found: dropped, changed, or out of order.
    """
    places = list(known)
    end = lower = scale.first_special_end
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
