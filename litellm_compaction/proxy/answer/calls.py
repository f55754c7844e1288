"""The tool calls of one upstream answer: fragments told apart, sent on as they come, or held until they are whole.

A client's call that it has not begun to receive can be cut, and asked for again, so near the window's end calls are
held. Those of our own tool are kept: the client neither knows nor sees them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, TypeAlias
from uuid import uuid4

from litellm_compaction.proxy.answer.sse import Chunk

# As many as Mistral's templates ask for.
_ID_CHARS = 9
# Of the client's held calls: none, those before the one in which the stream was cut, or all.
Kept: TypeAlias = Literal["no", "whole", "all"]
# Nobody knows it before its name has come, if there is a tool of ours.
Whose: TypeAlias = Literal["ours", "clients", "unknown"]


@dataclass(slots=True, eq=False)
class Call:
    """A call as far as it has come, with its server's number for it.

    One that `is_held` comes to the client as a whole, or not at all; of one that `is_sent` it has a part.
    """

    index: int | None
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)
    # Those of its fragments, as the server wrote them.
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
        return f"{self.name or ''}{''.join(self.arguments)}"

    def add(self, fragment: Mapping[str, Any]) -> None:
        function = fragment.get("function") or {}
        self.arguments.append(function.get("arguments") or "")
        self.name = self.name or function.get("name")
        self.id = self.id or fragment.get("id") or (uuid4().hex[:_ID_CHARS] if self.name else None)
        self.fields = {**fragment, **{key: value for key, value in self.fields.items() if value}}


class Calls(list[Call]):
    """The calls of one answer; `ours` is the name of our own tool, if the model has it."""

    ours: str | None = None

    @property
    def held(self) -> list[Call]:
        return [call for call in self if call.is_held]

    @property
    def whole(self) -> list[Call]:
        """The held calls without the last one, if the answer was cut in that."""
        held = self.held
        return held if held and held[-1].is_whole else held[:-1]

    @property
    def has_begun(self) -> bool:
        return any(call.is_sent for call in self)

    @property
    def are_whole(self) -> bool:
        """No call was cut: its arguments are JSON, or there are none."""
        return all(call.is_whole or not any(call.arguments) for call in self)

    def take(self, fragments: Sequence[Chunk], *, may_begin: bool) -> list[Chunk]:
        """The fragments to send now, numbered without calls of ours; those of one that `may_begin`, if none is held."""
        sent: list[Chunk] = []
        for fragment in fragments:
            call = self._placed(fragment)
            call.add(fragment)
            if call.is_sent:
                sent.append({**fragment, "index": self._index(call)})
            elif self._whose(call) == "clients":
                call.is_sent = may_begin and not self.held
                call.is_held = not call.is_sent
                sent += [self._shown(call)] if call.is_sent else []
        return sent

    def given_up(self, which: Kept) -> list[Chunk]:
        """The held calls that are to be kept, for `all` also those whose name never came; none is held any more."""
        whole = self.whole
        waiting = [call for call in self if call.is_held or not (call.is_sent or call.name)]
        for call in waiting:
            call.is_held = False
        return [self._shown(call) for call in {"no": [], "whole": whole, "all": waiting}[which]]

    def of(self, whose: Whose) -> list[Call]:
        return [call for call in self if self._whose(call) == whose]

    def _whose(self, call: Call) -> Whose:
        if self.ours is not None and not call.name:
            return "unknown"
        return "ours" if call.name and call.name == self.ours else "clients"

    def _index(self, call: Call) -> int:
        return sum(self._whose(each) != "ours" for each in takewhile(lambda each: each is not call, self))

    def _shown(self, call: Call) -> Chunk:
        function = {**(call.fields.get("function") or {}), "arguments": "".join(call.arguments)}
        if call.name:
            function["name"] = call.name
        return {**call.fields, "index": self._index(call), "id": call.id, "function": function}

    def _placed(self, fragment: Mapping[str, Any]) -> Call:
        """The call that a fragment belongs to, by the id or by the server's number, else a new one."""
        function, index, id_ = fragment.get("function") or {}, fragment.get("index"), fragment.get("id")
        name, newest = function.get("name"), self[::-1]
        near = [call for call in newest if index is None or call.index is None or call.index == index]
        # Two calls may have one id. A name begins another call.
        named = [call for call in (near if name else newest) if id_ and call.id == id_]
        numbered = [call for call in near if not (call.id and id_ and (call.id == id_ or name))]
        call = next(iter(named or numbered), None)
        # Of a call whose arguments are whole nothing is left to say.
        if call is None or (name and call.name and function.get("arguments") and call.is_whole):
            call = Call(index if isinstance(index, int) else None)
            self.append(call)
        return call
