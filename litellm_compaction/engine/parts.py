"""Parts of a request that a server is asked about: what no compaction shrinks, its beginning, and less of its texts."""

from __future__ import annotations

from dataclasses import replace

from litellm_compaction.core.budget import MARGIN_MIN_TOKENS
from litellm_compaction.core.excerpts import common_level
from litellm_compaction.core.forms import without_data
from litellm_compaction.core.messages import Request, system_prefix_length, user_message, with_only_text
from litellm_compaction.engine.context import MeasuredRequest
from litellm_compaction.tokens.estimate import Estimate

# A shorter part says too little of the rest.
_LEAST_TOKENS, _LEAST_SHARE = 200, 4


def floor_of(measured: MeasuredRequest) -> Request:
    """The messages that no compaction can shrink, as a request of their own."""
    messages = measured.request.messages
    latest_cut = measured.conversation.latest_cut
    kept = tuple(
        without_data(messages[index]) if index < latest_cut else messages[index]
        for index in sorted(measured.conversation.protected)
    )
    prefix = system_prefix_length(kept)
    if len(kept) == prefix or kept[prefix].role != "user":
        # Templates want the user's word first; so does what a compaction makes.
        kept = (*kept[:prefix], user_message("."), *kept[prefix:])
    return replace(measured.request, messages=kept)


def beginning_of(request: Request, count: Estimate, limit_tokens: int) -> Request | None:
    """The longest beginning within a limit that is a valid request; None if that is too short to say much.

    The real request then finds it in the server's cache.
    """
    messages = request.messages
    # Before another end than the person's word some templates leave the system message out.
    ends = ("user",) if messages[-1].role == "user" else ("user", "tool")
    tokens, end, end_tokens = count.overhead_tokens + count.tools_tokens, 0, 0
    for index, size in enumerate(count.sizes):
        tokens += size
        if tokens > limit_tokens:
            break
        following = messages[index + 1].role if index + 1 < len(messages) else ""
        if messages[index].role in ends and following != "tool":
            end, end_tokens = index + 1, tokens
    if end in (0, len(messages)) or end_tokens < max(_LEAST_TOKENS, limit_tokens // _LEAST_SHARE):
        return None
    return replace(request, messages=messages[:end])


def cut(measured: MeasuredRequest, request: Request, count: Estimate, limit_tokens: int) -> Request | None:
    """A request of so many tokens, its texts cut to one common length; None if that leaves little of them."""
    if request.extras and count.own.optional_tokens > limit_tokens // 2:
        return replace(request, extras={})
    texts = ["".join((message.text, *(call.arguments for call in message.calls))) for message in request.messages]
    texts_tokens = list(map(measured.count_text, texts))
    room_tokens = sum(texts_tokens) - (count.tokens - limit_tokens)
    level_tokens = common_level(texts_tokens, [1] * len(texts_tokens), room_tokens)
    if level_tokens < MARGIN_MIN_TOKENS:
        return None
    return replace(
        request,
        messages=tuple(
            message if tokens <= level_tokens else with_only_text(message, _beginning(text, level_tokens, measured))
            for message, text, tokens in zip(request.messages, texts, texts_tokens, strict=True)
        ),
    )


def _beginning(text: str, limit_tokens: int, measured: MeasuredRequest) -> str:
    while text and (tokens := measured.count_text(text)) > limit_tokens:
        text = text[: min(len(text) * max(limit_tokens, 0) // tokens, len(text) - 1)]
    return text
