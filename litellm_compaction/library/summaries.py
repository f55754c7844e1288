"""How the caller's own completion function is asked for a summary."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from litellm_compaction.core.budget import Budget, Rules
from litellm_compaction.core.clearing import edited, superseded_reads
from litellm_compaction.core.excerpts import excerpt
from litellm_compaction.core.messages import JsonObject, JsonValue, Message, parse_message
from litellm_compaction.core.prompts import one_line_topic
from litellm_compaction.core.strategies import strategy_of, writer_of
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.library.config import CompactionConfig
from litellm_compaction.library.tokens import parsed, text_counter
from litellm_compaction.summarizer import Ask, SummaryAnswer, SummaryJob, ending_in, summarize
from litellm_compaction.tokenizers.families import family_of, no_thinking_switch

# Called with `model=, messages=, max_tokens=, temperature=`; answers as OpenAI's chat completions, object or dict:
# `litellm.acompletion`, `AsyncOpenAI().chat.completions.create`, or a function of the caller's.
Completion: TypeAlias = Callable[..., Awaitable[object]]

# Of the request that is being worked on the summariser is shown so much.
REQUEST_TOKENS = 200
# The chat template's own tokens around the summariser's one user message, rounded up.
_TEMPLATE_TOKENS = 32


async def generate_summary(
    messages: Sequence[JsonObject],
    config: CompactionConfig,
    acompletion: Completion,
    *,
    earlier: str = "",
    request: str = "",
    round_number: int = 1,
    focus: str = "",
) -> str:
    """A summary of the messages, without any framing; one call, or several where they do not fit the window at once.

    Args:
        messages: what is to be summarized, oldest first; not changed.
        config: the summariser, its window, the summary's bound, the strategy, the time limit.
        acompletion: called with `model=, messages=, max_tokens=, temperature=`.
        earlier: a summary that the new one integrates, "" for none.
        request: what the user is asking for now, for orientation, "" for none.
        round_number: of the compaction, from 1.
        focus: a topic that is kept in more detail, "" for none; the model gets it as data.

    Raises:
        SummaryFailed: no usable summary; `reason` says why in one word, and `__cause__` what `acompletion` raised.
        ValueError: an entry is not a message, or `focus` has more than 500 characters.
    """
    return await summary_of(
        parsed(messages),
        config,
        acompletion,
        earlier=earlier,
        request=request,
        round_number=round_number,
        focus=one_line_topic(focus),
    )


async def summary_of(
    messages: Sequence[Message],
    config: CompactionConfig,
    acompletion: Completion,
    *,
    earlier: str,
    request: str,
    round_number: int,
    focus: str,
) -> str:
    """As `generate_summary`, for messages that are parsed already.

    Raises:
        SummaryFailed: as `generate_summary`.
    """
    model = config.summary_model or config.model
    count = text_counter(model)
    strategy = strategy_of(writer_of(config.strategy))

    def prepare() -> SummaryJob:
        job = SummaryJob(
            # Of repeated reads the newest says all: the room is better spent on the rest.
            messages=strategy.history(edited(messages, superseded_reads(messages))),
            earlier=earlier,
            request=excerpt(request, REQUEST_TOKENS, count),
            summary_tokens=config.summary_tokens,
            prompt_limit_tokens=prompt_limit_tokens(config, model, config.summary_tokens),
            thinking_tokens=config.summary_tokens if family_of("", model).reasons else 0,
            round_number=round_number,
            strategy=strategy,
            focus=focus,
        )
        # The first count loads a vocabulary, which takes too long for the event loop.
        count(job.instruction)
        return job

    job = await asyncio.to_thread(prepare)
    return await summarize(job, asker(config, model, acompletion), count, timeout_s=config.timeout_s)


def prompt_limit_tokens(config: CompactionConfig, model: str, answer_tokens: int) -> int:
    """The largest prompt for the summariser beside an answer; one that thinks keeps room for that too."""
    family = family_of("", model)
    rules = Rules(
        pre_request_ratio=config.trigger_ratio,
        streaming_ratio=1.0,
        target_ratio=1.0,
        output_buffer_ratio=0.0,
        output_buffer_min_tokens=0,
        answer_min_tokens=answer_tokens * (2 if family.reasons else 1),
    )
    window_tokens = config.summary_window_tokens or config.context_window_tokens
    budget = Budget(rules=rules, window_tokens=window_tokens, floor_tokens=0, error_ratio=family.error_ratio)
    return budget.prompt_limit_tokens - _TEMPLATE_TOKENS


def asker(config: CompactionConfig, model: str, acompletion: Completion) -> Ask:
    """The caller's function as the core asks: whatever it raises is a `SummaryFailed`."""

    async def ask(
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[JsonValue] = (),
        tool_choice: JsonValue = None,
    ) -> SummaryAnswer:
        try:
            response = await acompletion(
                model=model,
                messages=[dict(message.raw) for message in messages],
                max_tokens=max_tokens,
                temperature=config.temperature,
            )
        except Exception as error:
            raise SummaryFailed("error", f"the summariser raised {type(error).__name__}") from error
        return _answer(response)

    return ending_in(no_thinking_switch(model), ask)


def _answer(response: object) -> SummaryAnswer:
    """The answer in a chat completion, object or dict.

    Raises:
        SummaryFailed: it has no `choices[0].message`.
    """
    choices = _field(response, "choices")
    choice = choices[0] if isinstance(choices, Sequence) and choices else None
    message = _field(choice, "message")
    if message is None:
        raise SummaryFailed("error", f"the summariser's answer, {type(response).__name__}, has no choices[0].message")
    content, reasoning, finish_reason = (
        _field(message, "content"),
        _field(message, "reasoning_content") or _field(message, "reasoning"),
        _field(choice, "finish_reason"),
    )
    parts: JsonValue = content if isinstance(content, str | list) else None
    return SummaryAnswer(
        text=parse_message({"role": "assistant", "content": parts}).text,
        reasoning=reasoning if isinstance(reasoning, str) else "",
        finish_reason=finish_reason if isinstance(finish_reason, str) else "stop",
        calls_tool=bool(_field(message, "tool_calls")),
    )


def _field(holder: object, name: str) -> object:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
