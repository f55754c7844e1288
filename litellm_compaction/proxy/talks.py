"""Conversations as numbers: how full the context was turn by turn, as a row for the store, and rows put together.

Several workers may serve one conversation. Each keeps a row of what it has seen of it; the page joins them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from litellm_compaction.engine import Action

MAX_TURNS = 120

_ACTIONS: tuple[Action, ...] = get_args(Action)


class Drop(NamedTuple):
    """A restart in mid-answer: the context before and after, in tokens."""

    before_tokens: int
    after_tokens: int


@dataclass(slots=True)
class Turn:
    """One client request.

    Attributes:
        when_s: wall clock, seconds since 1970.
        before_tokens: the prompt as it came, estimated.
        prompt_tokens: as it was sent; the server's own number as soon as it said one.
        filled_tokens: prompt and answer; `prompt_tokens` until the answer is there.
        restarts: in the order in which they happened.
        messages: how many there were, without the leading system ones.
        talk: name of the conversation, as long as this process remembers it.
    """

    when_s: float
    before_tokens: int
    prompt_tokens: int
    filled_tokens: int
    window_tokens: int
    action: Action = "none"
    restarts: list[Drop] = field(default_factory=list)
    messages: int = 0
    talk: str = ""


@dataclass(slots=True)
class Talk:
    """One conversation, its newest turn last.

    Attributes:
        name: says nothing about the text; the same in all workers.
        model: `model_name` that was asked.
        tenant: whose it is, as in events.
        count: turns so far; more than `turns` holds once the oldest are forgotten.
        compact_ratio, carry_ratio: shares of the window at which a prompt is compacted and an answer carried over.
    """

    name: str
    model: str
    tenant: str
    compact_ratio: float
    carry_ratio: float
    count: int = 0
    turns: deque[Turn] = field(default_factory=lambda: deque(maxlen=MAX_TURNS))

    @property
    def id(self) -> str:
        """The name as people read it."""
        return self.name[:6]

    @property
    def last_s(self) -> float:
        """When the newest turn was; 0 without any."""
        return self.turns[-1].when_s if self.turns else 0.0

    @property
    def is_eventful(self) -> bool:
        """Whether there is more to see than one bar."""
        return self.count > 1 or any(turn.action == "compacted" or turn.restarts for turn in self.turns)

    def add(self, turn: Turn) -> None:
        """Adds a newer turn; one with fewer messages than the one before begins another conversation like this."""
        if self.turns and turn.messages < self.turns[-1].messages:
            self.turns.clear()
            self.count = 0
        self.turns.append(turn)
        self.count += 1


def talk_to_json(talk: Talk) -> str:
    """One line of numbers and names."""
    turns = [
        [
            round(turn.when_s, 3),
            turn.before_tokens,
            turn.prompt_tokens,
            turn.filled_tokens,
            turn.window_tokens,
            _ACTIONS.index(turn.action),
            turn.messages,
            turn.restarts,
        ]
        for turn in talk.turns
    ]
    fields = {
        "name": talk.name,
        "model": talk.model,
        "tenant": talk.tenant,
        "ratios": [talk.compact_ratio, talk.carry_ratio],
        "count": talk.count,
        "turns": turns,
    }
    return json.dumps(fields, separators=(",", ":"))


def talk_from_json(text: str) -> Talk | None:
    """The conversation that some version of `talk_to_json` wrote; None where this one cannot read it."""
    try:
        fields = json.loads(text)
        compact_ratio, carry_ratio = map(float, fields["ratios"])
        name, model, tenant = (str(fields[key]) for key in ("name", "model", "tenant"))
        talk = Talk(name, model, tenant, compact_ratio, carry_ratio, count=int(fields["count"]))
        talk.turns.extend(map(_turn, fields["turns"]))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
        return None
    return talk


def joined(rows: Iterable[Talk]) -> list[Talk]:
    """The conversations that several workers have seen parts of, the most recent first."""
    by_name: dict[str, list[Talk]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    talks = [_joined(some) for some in by_name.values()]
    return sorted(talks, key=lambda talk: (-talk.last_s, talk.name))


def _joined(rows: list[Talk]) -> Talk:
    newest = max(rows, key=lambda row: row.last_s)
    if len(rows) == 1:
        return newest
    talk = Talk(newest.name, newest.model, newest.tenant, newest.compact_ratio, newest.carry_ratio)
    for turn in sorted((turn for row in rows for turn in row.turns), key=lambda turn: turn.when_s):
        talk.add(turn)
    # What the rows themselves have forgotten of this conversation.
    shown = set(map(id, talk.turns))
    talk.count += sum(row.count - len(row.turns) for row in rows if any(id(turn) in shown for turn in row.turns))
    return talk


def _turn(row: list[Any]) -> Turn:
    when_s, before, prompt, filled, window, action, messages, restarts = row
    return Turn(
        float(when_s),
        int(before),
        int(prompt),
        int(filled),
        int(window),
        action=_ACTIONS[int(action)],
        restarts=[Drop(int(one), int(other)) for one, other in restarts],
        messages=int(messages),
    )
