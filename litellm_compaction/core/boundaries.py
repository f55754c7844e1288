"""Where may a conversation be cut: which messages may be covered by a summary, and which are sacred.

Called by the planner. A cut k covers `messages[lead:k]` and keeps `messages[k:]` as they are. A legal cut is
the intersection of small rules, each with the reason of the provider that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from litellm_compaction.core.messages import Message, lead_length, newest_user_index, open_round_start


def latest_cut(messages: Sequence[Message]) -> int:
    """The largest index at which the sacred tail is still whole.

    The tail is sacred (promise P2) from the tool round whose results nobody has answered yet, else from the
    last message: the newest user message, or an assistant message that the client wants continued. When we carry
    an answer over the limit, it is the end of that answer and our request to go on.
    """
    if messages and messages[-1].is_ours:
        return max(len(messages) - 2, 0)
    start = open_round_start(messages)
    if start is not None:
        return start
    return max(len(messages) - 1, 0)


def legal_cuts(messages: Sequence[Message]) -> tuple[int, ...]:
    """The indices at which the list may be cut, ascending; empty when nothing may be covered.

    Rules, as 28 shapes showed in 31 chat templates (llama.cpp's collection, 2026-11):
    * after the leading system messages, and covering at least one message;
    * never between a call and its results: a `tool` message never opens the tail (Mistral, gpt-oss, Llama 4
      refuse orphans);
    * the tail opens with `user` or `assistant`: a system message after the summary is refused by Qwen 3.5 and
      dropped by gpt-oss;
    * the sacred tail is whole;
    * a message of ours never opens the tail: the record travels with the user's own words.
    """
    lead = lead_length(messages)
    last = latest_cut(messages)
    return tuple(
        k for k in range(lead + 1, last + 1) if messages[k].role in ("user", "assistant") and not messages[k].is_ours
    )


def sacred_indices(messages: Sequence[Message]) -> frozenset[int]:
    """Indices of the messages that reach the model verbatim whatever happens (promise P2).

    The leading system messages, the newest user message wherever it stands, and the tail from `latest_cut` on.
    """
    sacred = {*range(lead_length(messages)), *range(latest_cut(messages), len(messages))}
    newest = newest_user_index(messages)
    if newest is not None:
        sacred.add(newest)
    return frozenset(sacred)


def pinned_position(messages: Sequence[Message], covered_messages: int) -> int | None:
    """The position after the lead of the user message that stays verbatim although it is covered, or None.

    The newest user message of the covered part, when the tail opens with an assistant message: then the tail
    is still about that request.
    """
    lead = lead_length(messages)
    cut = lead + covered_messages
    if cut < len(messages) and messages[cut].role == "user":
        return None
    newest = newest_user_index(messages[:cut])
    if newest is None or newest != newest_user_index(messages):
        return None
    return newest - lead
