"""Names the parts that are too large to fit, by tokens, and says what to change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from litellm_compaction.core.budget import Budget, margin_tokens
from litellm_compaction.core.messages import calls_by_position
from litellm_compaction.core.stretches import stretches_of
from litellm_compaction.core.view import View
from litellm_compaction.errors import DoesNotFit, Share

# Its client wants it sent as it is or not at all; or making it shorter failed by a fault of ours.
UNCHANGEABLE = "nothing is compacted: `truncation` is `disabled`, or it is a text completion. Send less"
UNPREPARED = "compacting them failed: the proxy's log has the error. Send the request again, send fewer messages"
_ADDED = "the client's own notes in the "
_LESS = ", shorten the message, or set `oversized_user_message: excerpt`"
# What to change, by the beginning of the share's name; any other is a template's.
_REMEDIES = {
    "result of tool": ", let the tool return less, or set `oversized_tool_result: excerpt`",
    "newest user message": _LESS,
    "last request of the user": _LESS,
    _ADDED: ", let the client add less to the user's words, or set `oversized_user_message: excerpt`",
    "newest assistant message": ", or let the model write less in one call",
    "tools": ", or offer fewer tools",
    "system messages": ", or shorten the system prompt",
    "newest": ", or shorten the system message behind the newest ones",
}


def protected_shares(view: View, tools_tokens: int) -> tuple[Share, ...]:
    """Shares of the floor: system, tools, the request in work, each result that no answer has used, and its call."""
    sizes, calls = view.floor_sizes, calls_by_position(view.messages)
    shares = [Share("tools", tools_tokens), Share("template", view.fixed_tokens - tools_tokens)]
    shares.append(Share("system messages", sum(sizes[: view.prefix])))
    for index in sorted({*view.requests, *view.tail}):
        message = view.messages[index]
        name = "last request of the user" if index in view.requests[:-1] else f"newest {message.role} message"
        if message.role == "tool":
            name = f"result of tool {calls[index].name if index in calls else '(unknown)'}"
        added = [each for each in stretches_of(message) if not each.speaks] if message.role == "user" else []
        added_tokens = sizes[index] * sum(each.end - each.start for each in added) // max(len(message.text), 1)
        shares += [Share(name, sizes[index] - added_tokens), Share(_ADDED + name, added_tokens)]
    return tuple(share for share in shares if share.tokens)


def refusal(model: str, view: View, budget: Budget, tools_tokens: int) -> DoesNotFit:
    """The error for a request that cannot be made to fit: numbers, what takes them, and what to change."""
    shares, floor, answer = protected_shares(view, tools_tokens), budget.floor_tokens, budget.rules.answer_min_tokens
    likely, sums = replace(budget, likely_ratio=1.0).needed_window_tokens(floor), Counter[str]()
    needed = likely if likely > budget.window_tokens else budget.needed_window_tokens(floor)
    for share in shares:
        sums[next((words for name, words in _REMEDIES.items() if share.name.startswith(name)), "")] += share.tokens
    items = ", ".join(f"{each.name} {each.tokens} tokens" for each in sorted(shares, key=lambda each: -each.tokens))
    ((remedy, _),) = sums.most_common(1) or [("", 0)]
    said = (
        f" that cannot be compacted (context_length_exceeded). They are: {items}. Besides them "
        f"{margin_tokens(floor, budget.likely_ratio)} tokens, by which the server may count more, and {answer} tokens "
        f"for the answer are kept free. Load {model} with a context length of at least {needed} tokens{remedy}."
    )
    return _does_not_fit(budget, floor, said, needed, shares)


def too_long(model: str, tokens: int, budget: Budget, why: str) -> DoesNotFit:
    """The error for a request that does not fit as it came, and is not compacted: one of the two reasons above."""
    needed = budget.needed_window_tokens(tokens)
    said = f" (context_length_exceeded), and {why}, or load {model} with a context length of {needed} tokens or more."
    return _does_not_fit(budget, tokens, said, needed, (Share("messages and tools", tokens),))


def _does_not_fit(budget: Budget, tokens: int, said: str, needed: int, shares: tuple[Share, ...]) -> DoesNotFit:
    """An error whose first sentences have the wording that agents recognize as "context length exceeded"."""
    limit = f"This model's maximum context length is {budget.window_tokens} tokens. "
    said = f"{limit}However, your messages resulted in {tokens} tokens{said}"
    return DoesNotFit(said, shares=shares, window_tokens=budget.window_tokens, needed_tokens=needed)
