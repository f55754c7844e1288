"""How a pruning model is asked which messages may go, and what is made of its answer.

Called by the maker. What the model says is held against the original by `core.pruning`; an answer that cannot be used
costs one call, and the next rung is a summary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from litellm_compaction.core.boundaries import request_text
from litellm_compaction.core.compaction import Compaction, edited_part
from litellm_compaction.core.decisions import Prune
from litellm_compaction.core.excerpts import excerpt
from litellm_compaction.core.messages import lead_length
from litellm_compaction.core.prompts import is_refusal
from litellm_compaction.core.pruning import Pruning, offered
from litellm_compaction.core.pruning_answers import decide
from litellm_compaction.core.pruning_prompts import PRUNE_PROMPT, plan_tokens, pruning_prompt, roomy_answer_tokens
from litellm_compaction.core.strategies import unanswered_calls
from litellm_compaction.engine.asking import Asker, why_unusable
from litellm_compaction.engine.case import PruningModel, Work
from litellm_compaction.engine.room import SUMMARY_EXTRA_TOKENS
from litellm_compaction.engine.threads import off_loop
from litellm_compaction.errors import ModelNotLoaded, SummaryFailed, WindowUnknown
from litellm_compaction.summarizer import answer_to

_REQUEST_TOKENS = 200
_WORDS_PER_TOKEN = 0.6
# The model answered, but not with an edit plan: another one is not asked, a summary may be within its reach.
_ANSWERED = frozenset({"invalid", "refusal"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What came of asking; without a `compaction`, `reason` says why in one word."""

    compaction: Compaction | None
    calls: int
    pruning_model: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What a model is asked; `choices` are positions after the lead, numbered from 1."""

    prompt: str
    choices: list[int]
    answer_tokens: int


class Pruner:
    """Asks pruning models for edit plans; `asker` knows how large a prompt each of them takes."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    async def prune(self, work: Work, decision: Prune) -> Pruned:
        """The pruning that the first usable answer gives, still without a ledger.

        Every call takes one from the request's budget (promise P5); a model that fails leaves the turn to the next.
        """
        attempts = work.case.attempts
        calls, asked, reason = 0, "", ""
        for model in work.case.pruning_models:
            if attempts.summary_calls_left <= 0:
                reason = reason or "attempts"
                break
            question = await self._question(work, decision, model)
            if isinstance(question, str):
                reason = question
                continue
            attempts.summary_calls_left -= 1
            calls, asked = calls + 1, model.label
            try:
                compaction = await _answered(work, decision, model, question)
            except SummaryFailed as error:
                reason = error.reason
                if reason in _ANSWERED:
                    break
            else:
                return Pruned(compaction=compaction, calls=calls, pruning_model=asked, reason=reason)
        return Pruned(compaction=None, calls=calls, pruning_model=asked, reason=reason)

    async def _question(self, work: Work, decision: Prune, model: PruningModel) -> _Question | str:
        """What to ask a model, or the reason why it cannot be asked."""
        choices = _choices(work, decision)
        answer_tokens = decision.summary_tokens + plan_tokens(len(choices))
        try:
            limit = await self._asker.prompt_limit(work, model, answer_tokens)
        except (ModelNotLoaded, WindowUnknown) as error:
            return why_unusable(error)
        limit_tokens, room_tokens = limit.tokens, answer_tokens + limit.thinking_tokens
        if model.is_same:
            # What is reserved of a shared context for a summary has to do for this, too.
            limit_tokens = min(limit_tokens, work.count.tokens + SUMMARY_EXTRA_TOKENS - room_tokens)

        def ask() -> _Question | None:
            prompt = _prompt(work, decision, choices, limit_tokens, limit.count)
            if not prompt:
                return None
            lead = lead_length(work.conversation.messages)
            most_tokens = roomy_answer_tokens(
                room_tokens,
                spare_tokens=limit_tokens - limit.count(prompt),
                offered_tokens=sum(work.conversation.sizes[lead + at] for at in choices),
            )
            return _Question(prompt=prompt, choices=choices, answer_tokens=most_tokens)

        return await off_loop(work.conversation.messages, ask) or "no_room"


async def _answered(work: Work, decision: Prune, model: PruningModel, question: _Question) -> Compaction:
    """What a model's answer makes of the conversation.

    Raises:
        SummaryFailed: it gave none, or none that can be used.
    """
    timeout_s = work.case.settings.summary_timeout_s
    answer = await answer_to(question.prompt, model.quiet_ask, max_tokens=question.answer_tokens, timeout_s=timeout_s)
    compaction = await off_loop(work.conversation.messages, lambda: _compaction(work, decision, question, answer))
    if compaction is None:
        raise SummaryFailed("refusal" if is_refusal(answer) else "invalid")
    return compaction


def _choices(work: Work, decision: Prune) -> list[int]:
    messages, compaction = work.conversation.messages, decision.compaction
    rest = messages[lead_length(messages) :]
    return offered(rest, _span(compaction), pinned=compaction.pinned, dropped=compaction.dropped)


def _span(compaction: Compaction) -> range:
    return range(compaction.replaced_messages, compaction.covered_messages)


def _prompt(work: Work, decision: Prune, choices: list[int], limit_tokens: int, count: Callable[[str], int]) -> str:
    conversation, compaction = work.conversation, decision.compaction
    lead = lead_length(conversation.messages)
    shown = edited_part(conversation.messages[lead:], compaction)
    unanswered = unanswered_calls(conversation.messages)
    offered_now = [(at, shown[at - compaction.replaced_messages]) for at in choices]
    return pruning_prompt(
        prompt=work.case.settings.own_prompt("prune") or PRUNE_PROMPT,
        values={
            "words": max(int(decision.summary_tokens * _WORDS_PER_TOKEN), 40),
            "round": decision.round,
            "current_tokens": decision.now_tokens,
            "target_tokens": decision.predicted_tokens,
            "limit_tokens": work.window.tokens,
        },
        request=excerpt(request_text(conversation.messages), _REQUEST_TOKENS, work.count_text),
        earlier=compaction.omissions,
        focus=work.case.focus,
        messages=[message for _, message in offered_now if message is not None],
        sizes=[
            min(conversation.sizes[lead + at], work.count_text(message.text) + 4) if message.text else 4
            for at, message in offered_now
            if message is not None
        ],
        unanswered=[
            [call.name for call in unanswered.get(lead + at, ())] for at, message in offered_now if message is not None
        ],
        limit_tokens=limit_tokens,
        count=count,
    )


def _compaction(work: Work, decision: Prune, question: _Question, answer: str) -> Compaction | None:
    """What the answer makes of the conversation; None where it is no answer, or changes nothing."""
    messages, base = work.conversation.messages, decision.compaction
    rest = messages[lead_length(messages) :]
    before = Pruning(dropped=base.dropped, stubbed=base.stubbed, shortened=base.shortened)
    decided = decide(answer, rest, _span(base), question.choices, before, prompt=question.prompt)
    if decided is None:
        return None
    pruning = decided.pruning
    said = "\n\n".join(filter(None, (base.omissions, decided.summary)))
    return replace(
        base,
        dropped=pruning.dropped,
        stubbed=pruning.stubbed,
        shortened=pruning.shortened,
        omissions=excerpt(said, decision.summary_tokens + decision.carried_tokens, work.count_text),
    )
