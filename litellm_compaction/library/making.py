"""What a compaction is made of: by a summary, a hand-off, or a pruning, on the same core as the proxy's.

Called by `compacting`, which counts what comes of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from litellm_compaction.core.compaction import Compaction, apply
from litellm_compaction.core.cut_points import request_text
from litellm_compaction.core.excerpts import excerpt
from litellm_compaction.core.ledger import ledger
from litellm_compaction.core.messages import Message, visible_text
from litellm_compaction.core.prompts import unanswered_calls
from litellm_compaction.core.pruning import (
    Decided,
    Pruning,
    decide,
    offered,
    plan_tokens,
    pruning_prompt,
    roomy_answer_tokens,
)
from litellm_compaction.core.record import Record, ledger_messages, listable, write_record
from litellm_compaction.core.secrets import redacted
from litellm_compaction.core.strategies import STRATEGIES, lead_in, writer_of
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.library.config import CompactionConfig
from litellm_compaction.library.selection import Selected
from litellm_compaction.library.summaries import REQUEST_TOKENS, Completion, asker, prompt_limit_tokens, summary_of
from litellm_compaction.library.tokens import text_counter
from litellm_compaction.summarizer import answer_to
from litellm_compaction.tokenizers.families import family_of

logger = logging.getLogger("litellm_compaction")

# Of the ledger the user's own words may take so much, as in the proxy (core/plan.py).
_WORDS_SHARE = 0.5
_WORDS_PER_TOKEN = 0.6
# Half of the prompt, as in the proxy (design: 40 to 60 % go).
_PRUNED_SHARE = 0.5
# What a chat template puts around a message, roughly.
_MESSAGE_TOKENS = 4
_NOTHING = Pruning(dropped=(), stubbed=(), shortened=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A shorter conversation.

    Attributes:
        messages: to send.
        strategy: that made it.
        summary: what the model wrote.
        gone: how many messages of the conversation are not sent any more.
    """

    messages: tuple[Message, ...] = field(repr=False)
    strategy: str
    summary: str = field(repr=False)
    gone: int


async def summarized(selected: Selected, config: CompactionConfig, acompletion: Completion, *, focus: str) -> Made:
    """A record in place of all that is covered: a summary, or a hand-over with the last request behind it.

    Raises:
        SummaryFailed: the model gave nothing usable.
    """
    strategy = writer_of(config.strategy)
    summary = await summary_of(
        selected.fresh,
        config,
        acompletion,
        earlier=selected.earlier.summary if selected.earlier else "",
        request=request_text(selected.messages),
        round_number=_round(selected),
        focus=focus,
    )
    compaction = _compaction(selected, strategy)
    hidden = selected.fresh
    messages = await asyncio.to_thread(_written, selected, compaction, summary, hidden, config)
    return Made(messages=messages, strategy=strategy, summary=summary, gone=len(hidden))


async def pruned(
    selected: Selected, config: CompactionConfig, acompletion: Completion, *, tokens_before: int, focus: str
) -> Made | None:
    """The conversation without what the model lets go, and a record of that; None where it gives no usable plan.

    Like the proxy's it only ever chooses: what stays is the original, whole or in pieces.

    Args:
        selected: what may go.
        config: the model, its window, the bound on what it says.
        acompletion: is asked once, twice where it only thinks.
        tokens_before: of the prompt as it came.
        focus: a topic that is kept in more detail; "" for none.
    """
    model = config.summary_model or config.model
    count = text_counter(model)
    earlier = selected.earlier.summary if selected.earlier else ""
    if await asyncio.to_thread(count, earlier) > config.summary_tokens:
        # The record has grown over its bound: a summary makes one of it.
        return None
    rest = (*selected.covered, *selected.tail)
    span = range(len(selected.covered))
    choices = offered(rest, span, pinned=selected.pinned, dropped=())
    answer_tokens = config.summary_tokens + plan_tokens(len(choices))
    thinking_tokens = answer_tokens if family_of("", model).reasons else 0
    offer = [rest[at] for at in choices]
    unanswered = unanswered_calls(rest)

    def ask() -> tuple[str, int]:
        sizes = [count(message.text) + _MESSAGE_TOKENS for message in offer]
        limit_tokens = prompt_limit_tokens(config, model, answer_tokens)
        prompt = pruning_prompt(
            prompt=STRATEGIES[config.strategy].prompt,
            values={
                "words": max(int(config.summary_tokens * _WORDS_PER_TOKEN), 40),
                "round": _round(selected),
                "current_tokens": tokens_before,
                "target_tokens": int(_PRUNED_SHARE * tokens_before),
                "limit_tokens": config.context_window_tokens,
            },
            request=excerpt(request_text(selected.messages), REQUEST_TOKENS, count),
            earlier=earlier,
            focus=focus,
            messages=offer,
            sizes=sizes,
            unanswered=[[call.name for call in unanswered.get(at, ())] for at in choices],
            limit_tokens=limit_tokens,
            count=count,
        )
        spare_tokens = limit_tokens - count(prompt)
        room_tokens = answer_tokens + thinking_tokens
        return prompt, roomy_answer_tokens(room_tokens, spare_tokens=spare_tokens, offered_tokens=sum(sizes))

    prompt, room_tokens = await asyncio.to_thread(ask)
    decided: Decided | None = None
    reason = "invalid" if prompt else "no_room"
    if prompt:
        completion = asker(config, model, acompletion)
        try:
            answer = await answer_to(prompt, completion, max_tokens=room_tokens, timeout_s=config.timeout_s)
        except SummaryFailed as error:
            reason = error.reason
        else:
            decided = await asyncio.to_thread(decide, answer, rest, span, choices, _NOTHING, prompt=prompt)
    if decided is None:
        logger.warning("library_pruning_failed model=%s reason=%s; a summary is made", model, reason)
        return None
    pruning = decided.pruning
    said = await asyncio.to_thread(excerpt, decided.summary, config.summary_tokens, count)
    summary = "\n\n".join(filter(None, (earlier, said)))
    compaction = _compaction(selected, config.strategy, pruning)
    hidden_at = {*pruning.dropped, *pruning.stubbed, *(each.position for each in pruning.shortened)}
    hidden = [rest[at] for at in sorted(hidden_at)]
    messages = await asyncio.to_thread(_written, selected, compaction, summary, hidden, config)
    return Made(messages=messages, strategy=config.strategy, summary=summary, gone=len(pruning.dropped))


def _round(selected: Selected) -> int:
    return (selected.earlier.round if selected.earlier else 0) + 1


def _compaction(selected: Selected, strategy: str, pruning: Pruning = _NOTHING) -> Compaction:
    """What `core.compaction` applies; what it says is written by `_written`."""
    return Compaction(
        covered_messages=len(selected.covered),
        covered_hash="",
        pinned=selected.pinned,
        round=_round(selected),
        segments=(),
        ledger="",
        rung=strategy,
        edited_from=0 if STRATEGIES[strategy].chooses else None,
        dropped=pruning.dropped,
        stubbed=pruning.stubbed,
        shortened=pruning.shortened,
    )


def _written(
    selected: Selected, compaction: Compaction, summary: str, hidden: Sequence[Message], config: CompactionConfig
) -> tuple[Message, ...]:
    """The shorter conversation with its record; the recent messages stay as they came, `null` content included."""
    bare = apply(selected.messages, compaction, record="")
    earlier = ledger_messages(selected.earlier.ledger) if selected.earlier else []
    verbatim = ledger(
        [*earlier, *map(listable, hidden)],
        budget_tokens=config.ledger_tokens,
        words_tokens=int(_WORDS_SHARE * config.ledger_tokens),
        count=text_counter(config.model),
        known="\n".join((summary, *map(visible_text, bare[len(selected.system) :]), *map(visible_text, selected.kept))),
        newer=selected.tail,
    )
    # As in the ledger: what is written down is read by later requests, and maybe by others.
    summary = redacted(summary)
    record = Record(summary=summary, ledger=verbatim, round=compaction.round)
    text = write_record(record, lead_in=lead_in(compaction.rung))
    shown = apply(selected.messages, compaction, record=text)
    # A user message that opens the tail may carry the record.
    as_they_came = selected.tail[1:] if selected.tail[0].role == "user" else selected.tail
    return (*shown[: len(shown) - len(as_they_came)], *as_they_came)
