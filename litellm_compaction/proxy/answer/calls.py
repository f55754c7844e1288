"""The tool calls of one upstream answer: fragments told apart, sent on as they come, or held until they are whole.

A client's call that it has not begun to receive can be cut, and asked for again, so near the window's end calls are
held. Those of our own tool are kept: the client neither knows nor sees them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from litellm_compaction.proxy.answer.sse import Chunk

# As many as Mistral's templates ask for.
_ID_CHARS = 9


@dataclass(slots=True, eq=False)
class Call:
    """A call as far as it has come, with its server's number for it."""

    index: int | None
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)
    # Those of its fragments, as the server wrote them.
    fields: dict[str, Any] = field(default_factory=dict)
    # It comes to the client as a whole, or not at all; or the client has begun to receive it.
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
        return f"{self.name or ''}{''.join(self.arguments)}"

    def add(self, fragment: Mapping[str, Any]) -> None:
        function = fragment.get("function") or {}
        self.arguments.append(function.get("arguments") or "")
        self.name = self.name or function.get("name")
        self.id = self.id or fragment.get("id") or (uuid4().hex[:_ID_CHARS] if self.name else None)
        self.fields = {**fragment, **{key: value for key, value in self.fields.items() if value}}

    def is_of(self, fragment: Mapping[str, Any], *, by_id: bool) -> bool:
        """Returns True if a fragment belongs to it, by the id or by the server's number; a name begins another call."""
        index, id_ = fragment.get("index"), fragment.get("id")
        has_name = bool((fragment.get("function") or {}).get("name"))
        is_there = index is None or self.index is None or index == self.index
        if by_id:
            # Two calls may have one id.
            return bool(id_) and self.id == id_ and (is_there or not has_name)
        return is_there and not (self.id and id_ and (self.id == id_ or has_name))


class Calls:
    """The calls of one answer; `ours` is the name of our own tool, if the model has it."""

    def __init__(self, ours: str | None = None) -> None:
        self._ours_name = ours
        self._all: list[Call] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def ours(self) -> list[Call]:
        return [call for call in self._all if self._ours_name is not None and call.name == self._ours_name]

    @property
    def clients(self) -> list[Call]:
        return [call for call in self._all if self._is_clients(call)]

    @property
    def held(self) -> list[Call]:
        return [call for call in self._all if call.is_held]

    @property
    def has_begun(self) -> bool:
        return any(call.is_sent for call in self._all)

    @property
    def are_whole(self) -> bool:
        """Returns True if no call was cut: its arguments are JSON, or there are none."""
        return all(call.is_whole or not any(call.arguments) for call in self._all)

    def take(self, fragments: Sequence[Chunk], *, may_begin: bool) -> list[Chunk]:
        """Returns the fragments to send now, numbered as if there were no calls but the client's.

        One that `may_begin` is sent as it comes, unless an earlier one is held.
        """
        sent: list[Chunk] = []
        for fragment in fragments:
            call = self._placed(fragment)
            call.add(fragment)
            if call.is_sent:
                sent.append({**fragment, "index": self._index(call)})
            elif self._is_clients(call) and may_begin and not self.held:
                call.is_sent = True
                sent.append(self._shown(call))
            elif self._is_clients(call):
                call.is_held = True
        return sent

    def whole(self) -> list[Chunk]:
        """The held ones but the last, in which the stream was cut."""
        return [self._shown(call) for call in self.held[:-1]]

    def given_up(self) -> list[Chunk]:
        """The held ones, and those whose name never came; from now on none is held."""
        waiting = [call for call in self._all if call.is_held or not (call.is_sent or call.name)]
        for call in waiting:
            call.is_held = False
        return [self._shown(call) for call in waiting]

    def _is_clients(self, call: Call) -> bool:
        return self._ours_name is None or (bool(call.name) and call.name != self._ours_name)

    def _index(self, call: Call) -> int:
        before = self._all[: self._all.index(call)]
        return len(before) - sum(each in before for each in self.ours)

    def _shown(self, call: Call) -> Chunk:
        function = {**(call.fields.get("function") or {}), "arguments": "".join(call.arguments)}
        if call.name:
            function["name"] = call.name
        return {**call.fields, "index": self._index(call), "id": call.id, "function": function}

    def _placed(self, fragment: Mapping[str, Any]) -> Call:
        """The call that a fragment belongs to; a new one if it belongs to none."""
        function, index = fragment.get("function") or {}, fragment.get("index")
        name, arguments = function.get("name"), function.get("arguments")
        calls = [(call, by_id) for by_id in (True, False) for call in reversed(self._all)]
        found = next((call for call, by_id in calls if call.is_of(fragment, by_id=by_id)), None)
        # Of a call whose arguments are whole nothing is left to say.
        if found is not None and not (name and found.name and arguments and found.is_whole):
            return found
        call = Call(index if isinstance(index, int) else None)
        self._all.append(call)
        return call
