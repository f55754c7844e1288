"""LangChain's `SummarizationMiddleware`, with the same scripted model as ours; needs the package `langchain` (>= 1).

It is an agent's own state that it compacts, so a conversation goes through one middleware from its first turn on. It
sees neither system prompt nor tools: what they take is subtracted from what it is told of the window, and it counts by
the played server's own tokenizer, which is more than its users have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.lib.measuring import JsonDict, Method, SummaryCall, Transcript, Turn, budget, prompt_tokens, size
from benchmarks.lib.summarisers import Kind, summary
from litellm_compaction.core.messages import parse_message, system_prefix_length

_SUMMARY_TOKENS = 800
# Less than this it is never told to keep.
_LEAST_KEPT_TOKENS = 256
# Its default: of what is to be summarised its model gets so much, where the window takes that.
_TRIMMED_TOKENS = 4_000


def is_installed() -> bool:
    """Whether there is a LangChain with this middleware."""
    try:
        from langchain.agents.middleware import SummarizationMiddleware  # noqa: F401
    except ImportError:
        return False
    return True


def langchain(kind: Kind, transcript: Transcript, window_tokens: int) -> Method:
    """The middleware, told to summarise when we do and to keep as much as we do."""
    from langchain.agents.middleware import SummarizationMiddleware
    from langchain_core.exceptions import ModelError
    from langchain_core.messages import convert_to_messages

    lead = system_prefix_length(tuple(map(parse_message, transcript.messages)))
    fixed_tokens = prompt_tokens(transcript.tools, transcript.messages[:lead])
    limits = budget(window_tokens, fixed_tokens)
    trigger_tokens = next(tokens for tokens in range(window_tokens, 0, -8) if not limits.triggers(tokens))
    target_tokens = limits.target_tokens(trigger_tokens)
    calls: list[SummaryCall] = []
    client: Sequence[JsonDict] = ()

    def tokens_of(messages: Iterable[Any]) -> int:
        return sum(size(as_dict(message)) for message in messages)

    def as_dict(message: Any) -> JsonDict:
        # Its messages carry the client's positions as ids: what it leaves alone goes out as it came.
        if str(message.id).isdigit():
            original = client[int(message.id)]
            return {**original, "content": original.get("content") or ""}
        return {"role": "user" if message.type == "human" else message.type, "content": message.text}

    middleware: Any = SummarizationMiddleware(
        model=_model(kind, [fact["text"] for fact in transcript.facts], calls),
        trigger=("tokens", max(trigger_tokens - fixed_tokens, _LEAST_KEPT_TOKENS)),
        keep=("tokens", max(target_tokens - fixed_tokens - _SUMMARY_TOKENS, _LEAST_KEPT_TOKENS)),
        token_counter=tokens_of,
        trim_tokens_to_summarize=min(_TRIMMED_TOKENS, window_tokens - 2 * _SUMMARY_TOKENS),
    )
    state: list[Any] = []
    taken = lead
    is_compacted = False

    async def send(transcript: Transcript, now: Sequence[JsonDict]) -> Turn:
        nonlocal client, taken, is_compacted
        client = now
        fresh = convert_to_messages([{**each, "content": each.get("content") or ""} for each in now[taken:]])
        for position, message in enumerate(fresh, start=taken):
            message.id = str(position)
        state.extend(fresh)
        taken = len(now)
        calls.clear()
        try:
            update = await middleware.abefore_model({"messages": list(state)}, None)
        except ModelError:
            # Its agent ends with the error.
            return Turn(None, tuple(calls))
        if update is not None:
            # The first one says that all others go.
            state[:] = update["messages"][1:]
            is_compacted = True
        sent = [*now[:lead], *map(as_dict, state)]
        return Turn(sent, tuple(calls), is_compacted, update is not None)

    return send


def _model(kind: Kind, facts: Sequence[str], calls: list[SummaryCall]) -> Any:
    """A chat model that answers as the scripted pruning model, and notes what it was asked."""
    from langchain_core.exceptions import ModelError
    from langchain_core.language_models import SimpleChatModel

    class Scripted(SimpleChatModel):
        def _call(self, messages: list[Any], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
            prompt = "\n".join(message.text for message in messages)
            answer = summary(kind, prompt, facts, _SUMMARY_TOKENS)
            calls.append(SummaryCall([{"role": "user", "content": prompt}], False, answer))
            if not answer:
                error = ModelError("the model is down")
                error.is_retryable = False
                raise error
            return answer

        @property
        def _llm_type(self) -> str:
            return "scripted"

    return Scripted()
