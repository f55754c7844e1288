"""The budget of an answer's thinking, and its end in the same stream where the server knows how; for `loop.py`.

Elsewhere the loop stops the answer and has the model go on behind the end of its thoughts, as at the window's end.
"""

from __future__ import annotations

import logging
import math

from litellm_compaction.engine import PreparedRequest, RequestContext
from litellm_compaction.proxy.answer.one_answer import Progress
from litellm_compaction.proxy.answer.protocol import Asked, Upstream
from litellm_compaction.proxy.answer.relay import Relay
from litellm_compaction.windows.windows import server_of

logger = logging.getLogger("litellm_compaction")

# The share of a thought that may follow after a server has said that it ends it: llama.cpp wrote 3 tokens more,
# but many may be on their way then. One that goes on is stopped.
_END_RATIO = 0.25
_LEAST_END_TOKENS = 256


class Thoughts:
    """The thinking of one answer, over all its upstream requests."""

    def __init__(self, context: RequestContext, asked: Asked, progress: Progress, upstream: Upstream) -> None:
        self._context = context
        self._asked_tokens = asked.thoughts_tokens
        self._is_whole = asked.is_whole
        self._progress = progress
        self._upstream = upstream
        self._has_asked = False

    def most_tokens(self, prepared: PreparedRequest) -> float:
        """The room for thoughts in one request: what the budget leaves, or less once the model is to think no more.

        A whole answer is not seen before its end, and its own bound ends its thoughts.
        """
        if self._is_whole:
            return math.inf
        if prepared.closing is not None:
            return max(
                self._context.settings.constants.reasoning_answer_min_tokens, prepared.max_output_tokens(None) // 2
            )
        ratio, budget_tokens = self._context.settings.constants.reasoning_budget_ratio, self._asked_tokens
        if not ratio:
            return math.inf
        if budget_tokens is None:
            budget_tokens = ratio * prepared.window.tokens
        return max(budget_tokens - self._progress.given_tokens, 1)

    def can_end(self, prepared: PreparedRequest) -> bool:
        """Returns True if thoughts have a budget, and the server can end them in the stream; it is asked once."""
        server = server_of(prepared.window.source)
        knows_how = server is not None and server.ends_thoughts and not self._has_asked
        return knows_how and prepared.closing is None and self.most_tokens(prepared) < math.inf

    async def end(self, prepared: PreparedRequest, relay: Relay) -> None:
        """Has the server end the thoughts whose budget is spent; the stream goes on if it says that it does."""
        if not self.can_end(prepared):
            return
        self._has_asked = True
        if await self._upstream.end_thoughts(relay.answer_id):
            logger.info(
                "thought_ended model=%s tokens=%d window=%d",
                self._context.label,
                relay.generated_tokens,
                prepared.window.tokens,
            )
            relay.thinks_on(max(_LEAST_END_TOKENS, int(_END_RATIO * relay.generated_tokens)))
