"""A call of the library as the engine sees it: a request without a server, and one model that writes summaries.

The window is the one that the caller wrote down; compactions are kept for the length of the call, since the caller's
messages carry it on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from litellm_compaction.config import Settings, settings_from
from litellm_compaction.core.messages import JsonValue, Message, Request, parse_message
from litellm_compaction.core.record import Record, ledger_messages, listable
from litellm_compaction.engine.ask import SummaryClient
from litellm_compaction.engine.build import CompactionBuilder
from litellm_compaction.engine.context import Attempts, MeasuredRequest, PruningModel, RequestContext, nothing
from litellm_compaction.engine.measure import RequestMeasurer, hashed
from litellm_compaction.errors import ServerUnavailable, SummaryFailed
from litellm_compaction.library.config import CompactionConfig
from litellm_compaction.library.tokens import counter
from litellm_compaction.stores import memory_store
from litellm_compaction.summarizer import Ask, SummaryAnswer
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.windows.windows import Target, Windows

# Called with `model=, messages=, max_tokens=, temperature=`; answers as OpenAI's chat completions, object or dict:
# `litellm.acompletion`, `AsyncOpenAI().chat.completions.create`, or a function of the caller's.
Completion: TypeAlias = Callable[..., Awaitable[object]]

# A pruning, and the summary that is made if it does not do.
_MOST_JOBS = 2
# The store lives for one call, and holds one compaction or two.
_STORE_S, _STORE_BYTES = 86_400.0, 1 << 24


class Call(NamedTuple):
    """A measured conversation, and what makes compactions and summaries of it."""

    measured: MeasuredRequest
    builder: CompactionBuilder
    summary_client: SummaryClient


async def begin(
    messages: Sequence[Message],
    config: CompactionConfig,
    acompletion: Completion,
    *,
    tools: Sequence[JsonValue] = (),
    focus: str = "",
    earlier: Record | None = None,
) -> Call:
    """Measures a conversation with the counter that all calls share, without the `earlier` record that it carried."""
    windows, sources = Windows(cache_s=_STORE_S), Sources()
    measurer = RequestMeasurer(windows=windows, counter=counter(), sources=sources)
    client = SummaryClient(windows=windows, counter=counter(), sources=sources)
    store = memory_store(ttl_s=_STORE_S, max_bytes=_STORE_BYTES)
    builder = CompactionBuilder(
        summary_client=client,
        store=store,
        quoted=listable,
        earlier_quotes=ledger_messages(earlier.ledger) if earlier else (),
    )
    context = offline_context(
        config.model,
        config.context_window_tokens,
        _settings(config),
        acompletion,
        summary_model=config.summary_model,
        summary_window_tokens=config.summary_window_tokens,
        temperature=config.temperature,
        summary_calls=_MOST_JOBS,
        focus=focus,
    )
    measured = await measurer.measure(Request(messages=tuple(messages), tools=tuple(tools)), context)
    return Call(measured=await hashed(measured), builder=builder, summary_client=client)


def offline_context(
    model: str,
    window_tokens: int,
    settings: Settings,
    acompletion: Completion,
    *,
    temperature: float,
    summary_calls: int,
    summary_model: str | None = None,
    summary_window_tokens: int | None = None,
    focus: str = "",
) -> RequestContext:
    """The surroundings of a request without a proxy; None for the summariser's takes those of `model`."""
    writer = summary_model or model
    pruning_model = PruningModel(
        label=writer,
        target=_offline_target(writer, summary_window_tokens or window_tokens),
        ask=_asking(writer, acompletion, temperature),
        # Asked about the conversation as text: its server's cache is not known.
        is_same=False,
    )
    return RequestContext(
        label=model,
        target=_offline_target(model, window_tokens),
        settings=settings,
        scope="",
        pruning_models=(pruning_model,),
        warm_up=nothing,
        attempts=Attempts(summary_calls_left=summary_calls),
        focus=focus,
    )


def _offline_target(model: str, window_tokens: int) -> Target:
    # Without an address no server is asked.
    return Target(key=model, model=model, api_base=None, api_key=None, context_length=window_tokens, is_lmstudio=False)


def _settings(config: CompactionConfig) -> Settings:
    return settings_from(None).model_copy(
        update={
            # A share of the window alone: room for the answer is what the caller reserves.
            "pre_request_ratio": config.trigger_ratio,
            "output_buffer_ratio": 0.0,
            "output_buffer_min_tokens": 0,
            "answer_min_tokens": 0,
            "reasoning_answer_min_tokens": 0,
            "system_reserve_tokens": config.system_reserve_tokens,
            "output_reserve_tokens": config.output_reserve_tokens,
            "safety_buffer_tokens": config.safety_buffer_tokens,
            "strategy": config.strategy,
            "summary_timeout_s": config.timeout_s,
        }
    )


def _asking(model: str, acompletion: Completion, temperature: float) -> Ask:
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
                temperature=temperature,
            )
        except ServerUnavailable:
            raise
        except Exception as error:
            raise SummaryFailed("error", f"the summariser raised {type(error).__name__}") from error
        await _learn(model, messages, response)
        return _answer(response)

    return ask


async def _learn(model: str, messages: Sequence[Message], response: object) -> None:
    """Corrects later counts for the model by the server's own number, if the answer says it."""
    told = _field(_field(response, "usage"), "prompt_tokens")
    if isinstance(told, int):
        count = await counter().count(model, family_of("", model), Request(messages=tuple(messages)))
        counter().learn(model, count, told)


def _answer(response: object) -> SummaryAnswer:
    choices = _field(response, "choices")
    choice = choices[0] if isinstance(choices, Sequence) and choices else None
    message = _field(choice, "message")
    if message is None:
        raise SummaryFailed("error", f"the summariser's answer, {type(response).__name__}, has no choices[0].message")
    content, finish_reason = _field(message, "content"), _field(choice, "finish_reason")
    reasoning = _field(message, "reasoning_content") or _field(message, "reasoning")
    parts: JsonValue = content if isinstance(content, str | list) else None
    return SummaryAnswer(
        text=parse_message({"role": "assistant", "content": parts}).text,
        reasoning=reasoning if isinstance(reasoning, str) else "",
        finish_reason=finish_reason if isinstance(finish_reason, str) else "stop",
        calls_tool=bool(_field(message, "tool_calls")),
    )


def _field(holder: object, name: str) -> object:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
