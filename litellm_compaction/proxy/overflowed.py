"""What an overflow teaches about the window, also one that never reaches the loop that carries the answer.

`restart.py` judges the streams that it reads. Where the hooks carry, a refusal, and with LiteLLM 1.109.1 also a stream
that fails before its first chunk, goes to LiteLLM's own retry or to the client instead; the hooks that hear of it ask
here.
"""

from __future__ import annotations

from collections.abc import Mapping

from litellm_compaction.engine import Guarded
from litellm_compaction.errors import Overflow, ended_early, overflow_from_text
from litellm_compaction.proxy.calls import Call

# A prompt this close to the window explains an answer that breaks off without a word.
NEAR_FULL_RATIO = 0.80
# The same where the server has counted the prompt itself.
FULL_RATIO = 0.98
# What is believed of a window after an overflow that named no number.
_SHRINK_RATIO = 0.80


def taught(overflow: Overflow, guarded: Guarded, *, is_shared: bool) -> Overflow:
    """`overflow` with what is to be believed of the window, also where the server named no number.

    Args:
        overflow: what the server said.
        guarded: what it was sent.
        is_shared: whether others may have filled the context, so that nothing is known of the window.
    """
    if overflow.window_tokens is not None or is_shared:
        return overflow
    return overflow._replace(window_tokens=int(_SHRINK_RATIO * guarded.window.tokens))


def unread_overflow(call: Call, message: str, details: Mapping[str, object]) -> Overflow | None:
    """What an attempt that failed reveals of the window, None for nothing; what the loop has read it learns itself.

    Args:
        call: the request.
        message: of LiteLLM's error.
        details: LiteLLM's own of the attempt; they have the usage, if the server reported one.
    """
    overflow = overflow_from_text(message)
    guarded = call.guarded
    if guarded is None or not call.is_hooked or call.is_read:
        return overflow
    if overflow is None:
        reported = _prompt_tokens(details)
        tokens, ratio = (guarded.count.tokens, NEAR_FULL_RATIO) if reported is None else (reported, FULL_RATIO)
        if not ended_early(message) or tokens < ratio * guarded.window.tokens:
            return None
        overflow = Overflow(reported, None)
    return taught(overflow, guarded, is_shared=call.room is not None and call.room.is_shared(guarded.window))


def _prompt_tokens(details: Mapping[str, object]) -> int | None:
    # LiteLLM 1.109.1 (streaming_handler.py, `_record_partial_usage_for_failure`): of the chunks that came, if any did.
    reported = getattr(details.get("combined_usage_object"), "prompt_tokens", None)
    return reported if isinstance(reported, int) and reported > 0 else None
