"""Names the parts that are too large to fit, by tokens, or shortens them if the operator allows that."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace

from litellm_compaction.core.budget import ROOM_ABOVE_FLOOR_RATIO, Budget, margin_tokens
from litellm_compaction.core.cuts import common_level, excerpt
from litellm_compaction.core.forms import with_shorter_data
from litellm_compaction.core.messages import Message, with_text
from litellm_compaction.core.rounds import calls_by_position
from litellm_compaction.core.stretches import stretches_of
from litellm_compaction.core.transcripts import rendered_in
from litellm_compaction.core.view import View
from litellm_compaction.errors import DoesNotFit, Share

# Its client wants it sent as it is or not at all; or making it shorter failed by a fault of ours.
UNCHANGEABLE = "nothing is compacted: `truncation` is `disabled`, or it is a text completion. Send less"
UNPREPARED = "compacting them failed: the proxy's log has the error. Send the request again, send fewer messages"
_LEAST_EXCERPT_TOKENS = 64
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


def shortened(view: View, budget: Budget, *, tool_results: bool, user_message: bool) -> tuple[Message, ...] | None:
    """The messages with all protected texts above one common level cut to head and tail; None if even that is too much.

    Results in the open tool round may be cut, or unanswered user messages and the requests, or both.
    """
    changed, sizes, count = list(view.messages), view.sizes, view.count_text
    may_change = {"tool": tool_results, "user": user_message}
    open_ones = sorted({*view.requests, *view.tail})
    candidates = [at for at in open_ones if may_change.get(changed[at].role) and not changed[at].is_synthetic]
    room = budget.prompt_limit_tokens - budget.floor_tokens + sum(sizes[index] for index in candidates)
    # If there is history to record, a summary and a ledger need room besides the excerpts.
    room -= min(room // 2, int(ROOM_ABOVE_FLOOR_RATIO * budget.window_tokens)) if view.cuts else 0
    level = common_level([sizes[index] for index in candidates], [1] * len(candidates), room)
    if level < _LEAST_EXCERPT_TOKENS:
        return None
    for index in (index for index in candidates if sizes[index] > level):
        text = changed[index].text
        changed[index] = with_text(changed[index], excerpt(text, level - max(sizes[index] - count(text), 0), count))
    return tuple(changed)


def with_less_data(view: View, budget: Budget, limit_tokens: int) -> tuple[Message, ...] | None:
    """The messages with less of the data that is attached to unanswered ones; None if all may stay.

    One into which a conversation is rendered is cut to its head and tail, where its instruction stands; else, if the
    protected messages take more than `limit_tokens`, data goes, the oldest first, the last of it to its head and tail.
    """
    changed, count = list(view.messages), view.count_text
    # Below the trigger, and with room for a record of the history.
    record_tokens = int(ROOM_ABOVE_FLOOR_RATIO * budget.window_tokens) if view.cuts else 0
    excess_tokens = budget.floor_tokens - min(limit_tokens, budget.trigger_tokens - record_tokens)

    def shorten(data: str) -> str | None:
        nonlocal excess_tokens
        if excess_tokens <= 0:
            return None
        size = count(data)
        keep_tokens = size - excess_tokens
        shown = excerpt(data, keep_tokens, count) if keep_tokens >= _LEAST_EXCERPT_TOKENS else ""
        # The line in place of data has fewer than the least excerpt.
        excess_tokens -= size - max(count(shown), _LEAST_EXCERPT_TOKENS)
        return shown

    if budget.rules.keeps_what_fits and (at := rendered_in(view.messages)) is not None:
        if budget.own.triggers(view.tokens):
            text, over_tokens = changed[at].text, view.tokens - budget.trigger_tokens
            shown = excerpt(text, max(count(text) - over_tokens, _LEAST_EXCERPT_TOKENS), count)
            changed[at] = with_text(changed[at], shown)
    elif budget.floor_tokens > limit_tokens:
        for index in view.tail:
            changed[index] = with_shorter_data(changed[index], shorten)
    return None if all(map(operator.is_, changed, view.messages)) else tuple(changed)
