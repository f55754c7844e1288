"""Clears old tool results as a client orders it: Anthropic's `clear_tool_uses_20250919`, on any conversation.

Source: anthropic 2.12.0 (`types/beta/beta_clear_tool_uses_20250919_edit_param.py`) and Anthropic's "Context editing".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from litellm_compaction.core.messages import JsonValue, Message, parse_message, with_text

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
    calls = [call for message in messages for call in message.calls]
    is_due = prompt_tokens > order.above_tokens if order.above_tokens else len(calls) > order.above_calls
    old = calls[: max(len(calls) - order.keep, 0)]
    answered = {message.call_id for message in messages if message.role == "tool" and message.text != _CLEARED}
    gone = {call.id: call.name for call in old if call.name not in order.excluded and call.id in answered}
    if not is_due or not gone:
        return Cleared(tuple(messages), 0)
    return Cleared(tuple(_without(message, gone, order) for message in messages), len(gone))


def _without(message: Message, gone: dict[str, str], order: ClearOrder) -> Message:
    if message.role == "tool" and message.call_id in gone:
        return with_text(message, _CLEARED)
    names = order.inputs
    if not names or gone.keys().isdisjoint(call.id for call in message.calls):
        return message
    shown = [_call(call, gone, names) for call in _raw_calls(message)]
    return parse_message({**message.raw, "tool_calls": shown})


def _raw_calls(message: Message) -> Sequence[JsonValue]:
    found = message.raw.get("tool_calls")
    return found if isinstance(found, list) else []


def _call(call: JsonValue, gone: dict[str, str], names: bool | Collection[str]) -> JsonValue:
    name = gone.get(str(call.get("id"))) if isinstance(call, dict) else None
    is_named = names is True or (not isinstance(names, bool) and name in names)
    if not isinstance(call, dict) or name is None or not is_named:
        return call
    function = call.get("function")
    return {**call, "function": {**(function if isinstance(function, dict) else {}), "arguments": _NO_INPUT}}
