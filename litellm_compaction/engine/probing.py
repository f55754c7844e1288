"""The server's own count, asked for before anything is sent that depends on it.

Asked by the compactor in two cases. Before it refuses a request only because our count may be wrong, it has a sample
counted: a stand-in vocabulary keeps a quarter of the window free until the server has counted something, and a client
whose every request is refused would never get that far. After a compaction, where `count: probe` wants it, it has the
result counted.
"""

from __future__ import annotations

from dataclasses import replace

from litellm_compaction.core.boundaries import sacred_indices
from litellm_compaction.core.messages import Request, lead_length, parse_message, user_message
from litellm_compaction.engine.case import Guarded, Work
from litellm_compaction.engine.lessons import Lessons
from litellm_compaction.engine.replies import truncation
from litellm_compaction.models.counter import TokenCounter

# A sample takes at most this share of the window, even if it counts as high as it can: it must never be cut.
_SAMPLE_WINDOW_RATIO = 0.8
# With less doubt than this nothing would be gained.
_LEAST_DOUBT_RATIO = 0.05
_LEAST_SAMPLE_TOKENS = 200
# Some servers report no usage for an answer of one token.
_RECOUNT_ANSWER_TOKENS = 16


class Prober:
    """Has samples and results counted; each once for a client request.

    Args:
        counter: knows what is suspicious.
        lessons: learns from them, and keeps it.
    """

    def __init__(self, counter: TokenCounter, lessons: Lessons) -> None:
        self._counter = counter
        self._lessons = lessons

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
        prompt_tokens = await case.measure(sample)
        if prompt_tokens is None:
            return False
        sampled = await self._counter.count(case.target.key, work.family, sample)
        if self._counter.is_suspicious(sampled, prompt_tokens):
            return False
        self._lessons.learn(case.target.key, case.label, sampled, prompt_tokens)
        return prompt_tokens < sampled.tokens * (1 + work.budget.error_ratio)

    async def has_recounted(self, work: Work, guarded: Guarded) -> bool:
        """Whether the server has counted what is about to be sent, where `count: probe` wants that.

        Costs one of the request's summary calls (promise P5) and an answer of 16 tokens; the prompt stays in the
        server's cache for the request itself. Whatever goes wrong leaves the estimate.
        """
        case = work.case
        attempts = case.attempts
        if case.settings.count != "probe" or case.measure is None or guarded.messages is None:
            return False
        if not attempts.may_recount or attempts.summary_calls_left < 1 or not guarded.budget.fits(guarded.count.tokens):
            return False
        attempts.may_recount = False
        attempts.summary_calls_left -= 1
        request = replace(work.request, messages=guarded.messages)
        prompt_tokens = await case.measure(request, answer_tokens=_RECOUNT_ANSWER_TOKENS)
        if prompt_tokens is None or truncation(guarded, prompt_tokens, 1, self._counter):
            return False
        self._lessons.learn(case.target.key, case.label, guarded.count, prompt_tokens)
        return True


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
