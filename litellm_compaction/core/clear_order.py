"""Clears old tool results as a client orders it: Anthropic's `clear_tool_uses_20250919`, on any conversation.

Source: anthropic 2.12.0 (`types/beta/beta_clear_tool_uses_20250919_edit_param.py`) and Anthropic's "Context editing".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from litellm_compaction.core.messages import Message, parse_message, with_text
from litellm_compaction.core.rounds import rounds

_CLEARED = "[Old tool result content cleared]"
_NO_INPUT = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearOrder:
    """The results to clear, and the size from which on.

    Attributes:
        above_tokens: of the prompt; 0 if the number of calls decides.
        above_calls: likewise.
        keep: so many calls, the newest ones, keep their results.
        at_least_tokens: less is not worth a changed prefix; 0 for any.
        excluded: tools whose results stay.
        inputs: the calls' arguments go, too: of all tools, or of those named.
    """

    above_tokens: int = 0
    above_calls: int = 0
    keep: int = 3
    at_least_tokens: int = 0
    excluded: frozenset[str] = frozenset()
    inputs: bool | frozenset[str] = False


class Cleared(NamedTuple):
    """The conversation after an order, and the number of calls whose results went."""

    messages: tuple[Message, ...]
    calls: int


def cleared(messages: Sequence[Message], order: ClearOrder, prompt_tokens: int) -> Cleared:
    """Returns a conversation with its old tool results cleared, if it is as large as the order says."""
    found = [(each.made, each.results) for each in rounds(messages)]
    calls = [each for made, _ in found for each in made]
    is_due = prompt_tokens > order.above_tokens if order.above_tokens else len(calls) > order.above_calls
    old = {each for each in calls[: max(len(calls) - order.keep, 0)] if each.call.name not in order.excluded}
    answered = ((at, each) for _, results in found for at, each in results.items() if messages[at].role == "tool")
    gone = {at: each for at, each in answered if each in old and messages[at].text != _CLEARED}
    if not is_due or not gone:
        return Cleared(tuple(messages), 0)
    shown = list(messages)
    for at in gone:
        shown[at] = with_text(shown[at], _CLEARED)
    names = order.inputs
    for each in {*gone.values()}:
        if names is True or (names and each.call.name in names):
            shown[each.at] = _without_input(shown[each.at], each.place)
    return Cleared(tuple(shown), len({*gone.values()}))


def _without_input(message: Message, place: int) -> Message:
    calls = message.raw.get("tool_calls")
    shown = list(calls) if isinstance(calls, list) else []
    call = shown[place]
    if isinstance(call, dict):
        function = call.get("function")
        shown[place] = {
            **call,
            "function": {**(function if isinstance(function, dict) else {}), "arguments": _NO_INPUT},
        }
    return parse_message({**message.raw, "tool_calls": shown})
