"""The calls that we make ourselves, summaries, warm-ups and probes, on behalf of a client's request.

They go through the proxy's router, so that they are logged and paid for by the same key, team and user.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import anyio
import litellm
from litellm.types.utils import ModelResponse

from litellm_compaction.concurrency import Tasks
from litellm_compaction.core.messages import Message, Request, roughly_tokens, user_message, visible_text
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.proxy import litellm_inside, wire

logger = logging.getLogger("litellm_compaction")

# The one internal origin that LiteLLM counts against the key's tokens per minute
# (parallel_request_limiter_v3.py exempts every other one).
_ORIGIN = "autorouter_compaction"
# By which an operator tells our calls from those of clients, in spend logs, callbacks and metrics.
OWN_TAG = "litellm-compaction"
_SUMMARY_TEMPERATURE = 0.3
# A server that ignores its bound writes more than this for each token of it.
_MOST_TOKEN_CHARS = 16
# A plain answer that is given up is generated to its end all the same; a stream ends when it is closed.
_AS_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
# Asyncio keeps only weak references to its tasks.
_logging = Tasks()
# True in the task of a call of ours. A client cannot forge this, as it could a marker.
is_internal_call: ContextVar[bool] = ContextVar("litellm_compaction_internal_call", default=False)


@contextlib.contextmanager
def as_ours() -> Iterator[None]:
    """Marks the calls that are made within as our own, which are never guarded."""
    token = is_internal_call.set(True)
    try:
        yield
    finally:
        is_internal_call.reset(token)


@dataclass(frozen=True, slots=True)
class Caller:
    """Makes calls of ours to one model, on behalf of a client's request."""

    router: Any
    model: Callable[[], str]  # Gives a deployment's id, which pins it, or a model name.
    parent: Mapping[str, Any]  # Metadata of the client's request, to whose key the call belongs.
    timeout_s: float  # For each call.
    group: str = ""  # The `model_name` for people.

    async def ask(self, messages: Sequence[Message], *, max_tokens: int, **tools: Any) -> SummaryAnswer:
        """Makes the model write a summary; raises SummaryFailed for every failure."""
        asked = Request(messages=tuple(messages), **tools)
        try:
            stream = await self._call(asked, max_tokens, temperature=_SUMMARY_TEMPERATURE, **_AS_STREAM)
            return await _joined(stream, messages, _MOST_TOKEN_CHARS * max_tokens)
        except Exception as error:
            # Without the server's words, which may quote the conversation. INFO: the line about the replacement, or
            # about going without the summary, is the WARNING.
            kind, status = type(error).__name__, getattr(error, "status_code", None)
            logger.info("pruning_failed model=%s error=%s status=%s", self.group, kind, status)
            # LiteLLM's own limit is the same, and may come before the summarizer's.
            raise SummaryFailed("timeout" if isinstance(error, litellm.Timeout) else "error", kind) from error

    async def may_write_ahead(self) -> bool:
        """True if its key may have summaries before they are needed: never one with any limit."""
        return not litellm_inside.has_limits(self.parent)

    async def load(self) -> None:
        """Makes LM Studio load the model; a failure shows in the next look at the window, in clearer words."""
        await self.measure(Request(messages=(user_message("."),)))

    async def measure(self, request: Request) -> int | None:
        """The server's own count of a request, by an answer of one token that no client sees; None if it gives none."""
        extras = {"extra_body": dict(request.extras)} if request.extras else {}
        try:
            usage = wire.usage_of(await self._call(request, 1, **extras))
        except Exception as error:  # noqa: BLE001 - without a count the request is judged by ours
            logger.debug("probe error=%s", type(error).__name__)
            return None
        return usage.prompt_tokens if usage is not None else None

    async def _call(self, request: Request, max_tokens: int, **options: Any) -> Any:
        if request.tools:
            options["tools"] = list(request.tools)
            options |= {} if request.tool_choice is None else {"tool_choice": request.tool_choice}
        # An answer from LiteLLM's response cache could belong to another tenant's conversation.
        options |= {"timeout": self.timeout_s, "cache": {"no-cache": True, "no-store": True}, "max_tokens": max_tokens}
        messages = wire.encode(request.messages)
        return await call_router(self.router, self.model(), self.parent, messages=messages, **options)


async def call_router(router: Any, model: str, parent: Mapping[str, Any], **arguments: Any) -> Any:
    """Makes a completion through the router for the key, team and user of `parent`; `model` is a group or an id."""
    if isinstance(end_user := parent.get("user_api_key_end_user_id"), str) and end_user:
        arguments["user"] = end_user
    arguments |= {"metadata": litellm_inside.Seam.OWN_CALLS.needed()(parent, _ORIGIN)}
    with as_ours():
        return await router.acompletion(model=model, num_retries=0, disable_fallbacks=True, **arguments)


async def _joined(stream: Any, prompt: Sequence[Message], most_chars: int) -> SummaryAnswer:
    """The whole of a stream; one that is stopped, being too long or given up, is paid for by an estimate."""
    text = reasoning = ""
    finish_reason, calls_tool, is_logged = "stop", False, False
    try:
        async for chunk in stream:
            for choice in chunk.choices[:1]:
                text += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                calls_tool = calls_tool or bool(getattr(choice.delta, "tool_calls", None))
                finish_reason = choice.finish_reason or finish_reason
            if len(text) + len(reasoning) > most_chars:
                finish_reason = "length"
                break
        else:
            is_logged = True
    except Exception:
        # LiteLLM logs failures itself.
        is_logged = True
        raise
    finally:
        # Also if the time limit cancels it: that stops the server.
        with anyio.CancelScope(shield=True):
            if (aclose := getattr(stream, "aclose", None)) is not None:
                await aclose()
        if not is_logged:
            prompt_tokens = sum(roughly_tokens(visible_text(message)) for message in prompt)
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": roughly_tokens(f"{reasoning}{text}")}
            # Not waited for: the client wants the server.
            _logging.begin(log_stopped(getattr(stream, "logging_obj", None), text, usage))
    return SummaryAnswer(text=text, reasoning=reasoning, finish_reason=finish_reason, calls_tool=calls_tool)


async def log_stopped(log: Any, text: str, usage: Mapping[str, int]) -> None:
    """Makes LiteLLM log, and charge, a stream that was stopped, by its logging object and the text and usage so far."""
    details = getattr(log, "model_call_details", None)
    dispatch = getattr(log, "dispatch_success_handlers", None)
    if dispatch is None or not isinstance(details, dict) or details.get("has_dispatched_final_stream_success"):
        return
    choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": text}}
    response = ModelResponse(choices=[choice], usage={**usage, "total_tokens": sum(usage.values())})
    try:
        await dispatch(response, cache_hit=None, start_time=None, end_time=None, prefer_async_handlers=True)
    except Exception as error:  # noqa: BLE001 - of another plug-in's callback
        logger.warning("summary_not_logged error=%s", type(error).__name__)
