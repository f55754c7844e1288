"""The tool calls of one upstream answer: fragments told apart, sent on as they come, or held until they are whole.

Fragments belong together by their id, then by the server's index. A client's call that it has not begun to receive can
be cut, and asked for again, so near the window's end calls are held. Those of our own tool are kept: the client neither
knows nor sees them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from litellm_compaction.proxy.answer.protocol import Chunk

# As many as Mistral's templates ask for.
_ID_CHARS = 9


@dataclass(slots=True, eq=False)
class Call:
    """A call as far as it has come.

    Attributes:
        place: among all calls of the answer.
        index: its server's number for it.
        fields: those of its fragments, as the server wrote them.
        is_held: it comes to the client as a whole, or not at all.
        is_sent: the client has begun to receive it.
    """

    place: int
    index: int | None
    id: str | None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    is_held: bool = False
    is_sent: bool = False

    @property
    def is_whole(self) -> bool:
        try:
            return isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            return False

    @property
    def text(self) -> str:
        """What of it has been generated."""
        return f"{self.name or ''}{''.join(self.arguments)}"

    def add(self, fragment: Mapping[str, Any]) -> None:
        function = fragment.get("function") or {}
        self.arguments.append(function.get("arguments") or "")
        self.id, self.name = self.id or fragment.get("id"), self.name or function.get("name")
        self.fields = {**fragment, **{key: value for key, value in self.fields.items() if value}}

    def shown(self, index: int) -> Chunk:
        """All of it as one fragment."""
        function = {**(self.fields.get("function") or {}), "arguments": "".join(self.arguments)}
        if self.name:
            function["name"] = self.name
        return {**self.fields, "index": index, "id": self.id, "function": function}


class Calls:
    """The calls of one answer.

    Args:
        ours: the name of our own tool, if the model has it.
    """

    def __init__(self, ours: str | None = None) -> None:
        self._ours_name = ours
        self._all: list[Call] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def ours(self) -> list[Call]:
        """Those of our own tool."""
        return [call for call in self._all if self._ours_name is not None and call.name == self._ours_name]

    @property
    def clients(self) -> list[Call]:
        """Those that are certainly the client's."""
        return [call for call in self._all if self._is_clients(call)]

    @property
    def held(self) -> list[Call]:
        """Those of the client's of which it has nothing yet."""
        return [call for call in self._all if call.is_held]

    @property
    def has_begun(self) -> bool:
        """Returns True if the client has begun to receive a call."""
        return any(call.is_sent for call in self._all)

    @property
    def are_whole(self) -> bool:
        """Returns True if no call was cut: its arguments are JSON, or there are none."""
        return all(call.is_whole or not any(call.arguments) for call in self._all)

    def take(self, fragments: Sequence[Any], *, may_begin: bool) -> list[Chunk]:
        """Returns the fragments to send now, numbered as if there were no calls but the client's.

        Args:
            fragments: as the server sends them.
            may_begin: a call may be sent as it comes, unless an earlier one is held.
        """
        sent: list[Chunk] = []
        for fragment in fragments:
            if not isinstance(fragment, dict):
                continue
            known = len(self._all)
            call = self._placed(fragment)
            call.add(fragment)
            if not self._is_clients(call):
                continue
            if call.is_sent:
                sent.append(_with(fragment, index=self._index(call)))
            elif may_begin and not call.is_held and not self.held:
                call.is_sent = True
                is_first = len(self._all) > known
                index = self._index(call)
                sent.append(_with(fragment, index=index, id=call.id) if is_first else call.shown(index))
            else:
                call.is_held = True
        return sent

    def whole(self) -> list[Chunk]:
        """The held calls but the last, in which the stream was cut."""
        return [call.shown(self._index(call)) for call in self.held[:-1]]

    def given_up(self) -> list[Chunk]:
        """The held calls, and those whose name never came; from now on none is held."""
        waiting = [
            call for call in self._all if call.is_held or not (call.is_sent or self._is_clients(call) or call.name)
        ]
        for call in waiting:
            call.is_held = False
        return [call.shown(self._index(call)) for call in waiting]

    def _is_clients(self, call: Call) -> bool:
        return self._ours_name is None or (bool(call.name) and call.name != self._ours_name)

    def _index(self, call: Call) -> int:
        return call.place - sum(each.place < call.place for each in self.ours)

    def _placed(self, fragment: Mapping[str, Any]) -> Call:
        """The call that a fragment belongs to; a new one if it belongs to none."""
        function, index = fragment.get("function") or {}, fragment.get("index")
        name, arguments = function.get("name"), function.get("arguments")
        found = Call(-1, index if isinstance(index, int) else None, fragment.get("id"), name)
        newest = self._all[::-1]
        same = [each for each in newest if _has_id(each, found)] or [each for each in newest if _is_there(each, found)]
        # Of a call whose arguments are whole nothing is left to say.
        if same and not (name and same[0].name and arguments and same[0].is_whole):
            return same[0]
        taken = {each.place for each in self._all}
        found.place = max(taken, default=-1) + 1
        if found.index is not None and found.index not in taken:
            found.place = found.index
        if name and not found.id:
            found.id = uuid4().hex[:_ID_CHARS]
        self._all.append(found)
        return found


def _with(fragment: Chunk, **fields: Any) -> Chunk:
    """The fragment itself if it says that already."""
    return fragment if fields.items() <= fragment.items() else {**fragment, **fields}


def _has_id(known: Call, found: Call) -> bool:
    # Two calls may have one id.
    return bool(found.id) and known.id == found.id and (_has_index(known, found) or not found.name)


def _is_there(known: Call, found: Call) -> bool:
    # Each fragment of a call may have an id of its own: a name begins another one.
    is_other = known.id and found.id and (known.id == found.id or found.name)
    return not is_other and _has_index(known, found)


def _has_index(known: Call, found: Call) -> bool:
    return found.index is None or known.index is None or found.index == known.index
