"""Measures a conversation, by estimate or with the model's own vocabulary, and a window."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache

import httpx

from litellm_compaction.core.messages import JsonObject, JsonValue, Message, Request, parse_message
from litellm_compaction.errors import ModelNotLoaded, WindowUnknown, WindowUnread
from litellm_compaction.library.config import CompactionConfig
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Windows

# English prose and code have about four characters to a token; other scripts have fewer, so this errs low there.
_TOKEN_CHARS = 4
# An image, a sound, a file: what OpenAI's vision models take for a large picture, rounded up (1105 tokens, 2024-05).
_PART_TOKENS = 1200
# A client made for one question; nothing is read a second time.
_CACHE_S = 60.0
_TOOL_PARTS = ("tool-call", "tool-result")


def estimate_tokens(text: object) -> int:
    """ceil(characters / 4): 30 % too low for code and numbers, far too low for Chinese; `count_tokens` is exact.

    0 for anything that is not a string: a message that only calls tools has `content` None.
    """
    return -(-len(text) // _TOKEN_CHARS) if isinstance(text, str) else 0


def estimate_messages_tokens(messages: Sequence[JsonObject]) -> int:
    """The sum of `estimate_tokens` over the messages' words: role, text, reasoning, and calls with their arguments.

    The template's own tokens are not in it. Content parts `tool-call` and `tool-result` (Vercel's AI SDK) count by
    their texts; any other part that is not text counts as 1,200 tokens.

    Raises:
        ValueError: an entry is not a message.
    """
    return sum(map(message_estimate, parsed(messages)))


def should_compact(
    messages: Sequence[JsonObject],
    config: CompactionConfig,
    *,
    tokens: int | None = None,
    tools: Sequence[JsonValue] = (),
) -> bool:
    """Returns True if the prompt is above `config.trigger_ratio` of the window.

    Args:
        messages: n, oldest first; not changed.
        tokens: the prompt's size as `count_tokens` gives it, or the last answer's `usage` and what came since. Without
            it the estimate decides, which may come too late: leave room by a lower `trigger_ratio`.
        tools: schemas that are sent too; counted in the estimate.

    Raises:
        ValueError: an entry is not a message.
    """
    if tokens is None:
        tokens = estimate_messages_tokens(messages) + tools_estimate(tools)
    return tokens > config.trigger_tokens


async def count_tokens(messages: Sequence[JsonObject], *, model: str, tools: Sequence[JsonValue] = ()) -> int:
    """The prompt's tokens, as the model's chat template renders it; long texts are counted in a thread.

    Exact for the families whose vocabulary and template we hold (docs/limits.md); for others it errs high.

    Args:
        messages: n, oldest first; not changed.
        model: its name, with or without provider.
        tools: schemas that are sent with them.

    Raises:
        ValueError: an entry is not a message.
    """
    return await prompt_tokens(parsed(messages), model, tools)


async def loaded_window(
    model: str, *, api_base: str, api_key: str | None = None, http: httpx.AsyncClient | None = None
) -> int:
    """Tokens of context that a model of LM Studio's is loaded with, as its own API says now (`/api/v1/models`).

    Args:
        model: as LM Studio lists it, without a provider's prefix.
        api_base: of the server, such as `http://127.0.0.1:1234/v1`.
        http: the client to use; None makes one.

    Raises:
        WindowUnknown: the server does not answer, does not list the model, or has not loaded it; says what to change.
    """
    target = Target(key=model, model=model, api_base=api_base, api_key=api_key, context_length=None)
    windows = Windows(cache_s=_CACHE_S, http=http)
    try:
        return (await windows.resolve(target)).tokens
    except (ModelNotLoaded, WindowUnknown) as error:
        tried = "LM Studio names no context length of it; correct `model` (`lms ps` lists what is loaded) or `api_base`"
        if isinstance(error, ModelNotLoaded):
            tried = f"LM Studio has not loaded it; load it (`lms load {model}`) and ask again"
        elif isinstance(error, WindowUnread):
            tried = "its server does not answer; start it (`lms server start`) or correct `api_base`"
        raise WindowUnknown(model, tried=tried) from error
    finally:
        await windows.aclose()


async def prompt_tokens(messages: Sequence[Message], model: str, tools: Sequence[JsonValue]) -> int:
    request = Request(messages=tuple(messages), tools=tuple(tools))
    return (await counter().count(model, family_of("", model), request)).tokens


def parsed(messages: Sequence[JsonObject]) -> tuple[Message, ...]:
    """The messages as the core knows them.

    Raises:
        ValueError: an entry is not a message; says which one.
    """
    for index, raw in enumerate(messages):
        if not isinstance(raw, Mapping) or not isinstance(raw.get("role"), str):
            raise ValueError(f"messages[{index}]: expected an object with a role")  # noqa: TRY004 - as all bad shapes
    return tuple(map(parse_message, messages))


def tools_estimate(tools: Sequence[JsonValue]) -> int:
    return sum(estimate_tokens(json.dumps(tool, ensure_ascii=False, default=str)) for tool in tools)


def message_estimate(message: Message) -> int:
    called = sum(len(call.name) + len(call.arguments) for call in message.calls)
    said = [json.dumps(part, ensure_ascii=False, default=str) for part in _tool_parts(message)]
    chars = len(message.role) + len(message.text) + len(message.reasoning) + called + sum(map(len, said))
    return -(-chars // _TOKEN_CHARS) + _PART_TOKENS * (len(message.other_parts) - len(said))


def _tool_parts(message: Message) -> list[JsonValue]:
    content = message.raw.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return [
        {name: value for name, value in part.items() if name != "type"}
        for part in parts
        if isinstance(part, Mapping) and part.get("type") in _TOOL_PARTS
    ]


@cache
def counter() -> TokenCounter:
    """The process's own: what has been counted is not counted again. The usage of summaries corrects it."""
    return TokenCounter()
