"""What goes out for a weighed request: its own messages, or what a compaction leaves of them, counted as it is sent.

Asked by the compactor for everything that it lets through, and whether a new compaction does what it was made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from litellm_compaction.core.compaction import Compaction, apply
from litellm_compaction.core.decisions import Edit, Making
from litellm_compaction.core.messages import Message
from litellm_compaction.core.strategies import with_every_result
from litellm_compaction.engine.case import Guarded, Work
from litellm_compaction.engine.sending import SentPrompts
from litellm_compaction.engine.threads import is_long, off_loop_if
from litellm_compaction.engine.weighing import Scales
from litellm_compaction.tokens.count import holding


class Outgoing:
    """Makes what is sent, and remembers it.

    Args:
        scales: count it.
        sent: is told of it.
    """

    def __init__(self, *, scales: Scales, sent: SentPrompts) -> None:
        self._scales = scales
        self._sent = sent

    def unchanged(self, work: Work) -> Guarded:
        """The request as it was weighed."""
        self._note(work, None)
        return Guarded(
            action="compacted" if work.is_shortened else "none",
            messages=work.request.messages if work.is_shortened else None,
            tokens_before=work.tokens_before,
            count=work.count,
            count_text=work.count_text,
            budget=work.budget.own,
            window=work.window,
        )

    async def applied(self, work: Work, compaction: Compaction, action: Literal["reused", "compacted"]) -> Guarded:
        """The request with a compaction in place of what it covers; whether that fits is the caller's to ask."""
        covered = work.conversation.messages
        messages = await off_loop_if(is_long(covered), lambda: _with_every_result(apply(covered, compaction)))
        self._note(work, compaction)
        count = await self._scales.count(work, messages)
        if work.floor_count is not None:
            # Planned by a floor that the server has counted: only the rest is in doubt.
            count = holding(count, [work.floor_count])
        return Guarded(
            action=action,
            messages=messages,
            tokens_before=work.tokens_before,
            count=count,
            count_text=work.count_text,
            budget=replace(work.budget, error_ratio=count.error_ratio, own_error_ratio=None),
            window=work.window,
            round=compaction.round,
        )

    def _note(self, work: Work, compaction: Compaction | None) -> None:
        """Remembers what the server's cache will hold; small prompts have no hashes, excerpts are not the client's."""
        if work.conversation.hashes and not work.is_shortened and not work.case.is_supposed:
            self._sent.note(work.case.scope, work.case.target.key, work.conversation.hashes, compaction)


def _with_every_result(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages as strict templates take them; calls at the very end are the client's business."""
    if messages and messages[-1].calls:
        return (*with_every_result(messages[:-1]), messages[-1])
    return with_every_result(messages)


def is_enough(work: Work, decision: Making, compaction: Compaction, guarded: Guarded) -> bool:
    """Whether a new compaction does, counted as it is sent; otherwise the next rung's turn has come (promise P5).

    Args:
        work: the request.
        decision: what was to be made.
        compaction: what was made, perhaps by a later rung.
        guarded: what it leaves to be sent.
    """
    tokens, budget = guarded.count.tokens, guarded.budget
    if not budget.fits(tokens) or tokens >= work.count.tokens:
        return False
    if isinstance(decision, Edit) and tokens > decision.predicted_tokens and budget.triggers(tokens):
        return False
    return compaction.rung != "prune" or not budget.triggers(tokens)
