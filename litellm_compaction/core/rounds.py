"""Finds which results answer which calls, and where a tool round ends.

A result answers a call's id, wherever it stands before the next assistant message; of calls with one id by its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from litellm_compaction.core.messages import Message, ToolCall, last_assistant_index, parse_message

NO_RESPONSE = "Tool no response"


class Made(NamedTuple):
    """A call, the index of the message that makes it, and its place among that message's calls."""

    at: int
    place: int
    call: ToolCall


class Round(NamedTuple):
    """The calls of neighbouring assistant messages, and what answers them before the next such message."""

    made: Sequence[Made]
    results: Mapping[int, Made]  # The call that each result answers, by the result's index.
    unanswered: Sequence[Made]

    @property
    def start(self) -> int:
        return self.made[0].at

    @property
    def end(self) -> int:
        """The index after its last call or result."""
        return max((self.made[-1].at, *self.results)) + 1


def rounds(messages: Sequence[Message]) -> Iterator[Round]:
    """The rounds, oldest first; some clients send each of several calls in a message of its own."""
    speaking = {at for at, each in enumerate(messages) if each.role == "assistant"}
    for first, end in pairwise((*sorted(at for at in speaking if at - 1 not in speaking), len(messages))):
        if made := [Made(at, *each) for at in range(first, end) for each in enumerate(messages[at].calls)]:
            yield _round(messages, made, range(made[0].at + 1, end))


def _round(messages: Sequence[Message], made: Sequence[Made], behind: range) -> Round:
    waiting: defaultdict[str, list[Made]] = defaultdict(list)
    for each in reversed(made):
        waiting[each.call.id].append(each)
    results: dict[int, Made] = {}
    for at in (at for at in behind if messages[at].role == "tool" and messages[at].call_id in waiting):
        alike = waiting[messages[at].call_id]
        # A result that comes once more is the last call's.
        results[at] = alike.pop() if len(alike) > 1 else alike[0]
    answered = {*results.values()}
    return Round(made, results, [each for each in made if each not in answered])


def calls_by_position(messages: Sequence[Message]) -> dict[int, ToolCall]:
    """For each tool result the call that it answers; ids may repeat over the rounds."""
    return {at: made.call for each in rounds(messages) for at, made in each.results.items()}


def within_rounds(messages: Sequence[Message]) -> frozenset[int]:
    """The indices at which a cut would divide calls from their results."""
    return frozenset(at for each in rounds(messages) for at in range(each.start + 1, each.end))


def open_round(messages: Sequence[Message]) -> Round | None:
    """The round whose results no assistant message follows, or None."""
    *_, last = (None, *rounds(messages))
    return last if last and last.results and last_assistant_index(messages) < min(last.results) else None


def open_round_start(messages: Sequence[Message]) -> int | None:
    """The start of the open round, else the first result that no assistant message follows, or None."""
    last, behind = open_round(messages), range(last_assistant_index(messages) + 1, len(messages))
    return last.start if last else next((index for index in behind if messages[index].role == "tool"), None)


def with_every_result(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with a filler for each result that is missing: a model tends to make a call that has none."""
    shown = list(messages)
    for each in reversed(list(rounds(messages))):
        shown[each.end : each.end] = [
            parse_message({"role": "tool", "tool_call_id": call.id, "content": NO_RESPONSE})
            for _, _, call in each.unanswered
        ]
    return tuple(shown)
