"""The server's own count of a sample of a request that would be refused only because our count may be wrong.

Asked by the compactor before it refuses: a stand-in vocabulary keeps a quarter of the window free until the server has
counted something. A client whose every request is refused would never get that far.
"""

from __future__ import annotations

from dataclasses import replace

from litellm_compaction.core.boundaries import sacred_indices
from litellm_compaction.core.messages import Request, lead_length, parse_message, user_message
from litellm_compaction.engine.case import Work
from litellm_compaction.models.counter import TokenCounter

# A sample takes at most this share of the window, even if it counts as high as it can: it must never be cut.
_SAMPLE_WINDOW_RATIO = 0.8
# With less doubt than this nothing would be gained.
_LEAST_DOUBT_RATIO = 0.05
_LEAST_SAMPLE_TOKENS = 200


class Prober:
    """Has samples counted; once for a client request.

    Args:
        counter: learns from them.
    """

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter

    async def has_learned(self, work: Work) -> bool:
        """Whether the server has counted a sample of `work`, so that another look at it is worth while.

        Costs one answer of one token; the prompt is one that the next request may find in the server's cache.
        """
        case = work.case
        if case.measure is None or not case.attempts.may_probe or not _might_fit(work):
            return False
        sample = _sample(work)
        if sample is None:
            return False
        case.attempts.may_probe = False
        prompt_tokens = await case.measure(sample.messages)
        if prompt_tokens is None:
            return False
        sampled = await self._counter.count(case.target.key, work.family, sample)
        if self._counter.is_suspicious(sampled, prompt_tokens):
            return False
        self._counter.learn(case.target.key, sampled, prompt_tokens)
        return prompt_tokens < sampled.tokens * (1 + work.budget.error_ratio)


def _might_fit(work: Work) -> bool:
    """Whether the request fits if our count is as much too high as it may be too low."""
    doubt = work.budget.error_ratio
    certain = replace(work.budget, error_ratio=0.0)
    return doubt > _LEAST_DOUBT_RATIO and certain.fits(int(work.budget.floor_tokens * (1 - doubt)))


def _sample(work: Work) -> Request | None:
    """The beginning of what no compaction can shrink, as a request of its own: system messages first."""
    limit_tokens = int(_SAMPLE_WINDOW_RATIO * work.window.tokens / (1 + work.budget.error_ratio))
    messages = work.request.messages
    lead = lead_length(messages)
    sacred = [messages[index].text for index in sorted(sacred_indices(messages)) if index >= lead]
    system = _beginning("\n\n".join(message.text for message in messages[:lead]), limit_tokens, work)
    rest = _beginning("\n\n".join(sacred), limit_tokens - work.count_text(system), work) or "."
    if work.count_text(system) + work.count_text(rest) < _LEAST_SAMPLE_TOKENS:
        return None
    first = [parse_message({"role": messages[0].role, "content": system})] if system else []
    return Request(messages=(*first, user_message(rest)))


def _beginning(text: str, limit_tokens: int, work: Work) -> str:
    while text and (tokens := work.count_text(text)) > limit_tokens:
        text = text[: min(len(text) * max(limit_tokens, 0) // tokens, len(text) - 1)]
    return text
