"""How a server's `/v1/chat/completions` is asked for a summary: LM Studio's, or any other that speaks it."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
from pydantic import BaseModel, ValidationError

from litellm_compaction.core.messages import JsonObject, JsonValue, Message
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.summarizer import Ask, IsEnough, SummaryAnswer

_TEMPERATURE = 0.3
_CONNECT_S = 5.0
_ERROR_CHARS = 300


class _Said(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[object] | None = None


class _Choice(BaseModel):
    message: _Said
    finish_reason: str | None = None


class _Answer(BaseModel):
    choices: list[_Choice]


def chat_server(http: httpx.AsyncClient, api_base: str, api_key: str | None, model: str, *, timeout_s: float) -> Ask:
    """An asker for the summarizer.

    Its calls raise `ServerUnavailable`, not `SummaryFailed`: on the command line a server that cannot be used is a
    mistake to put right, while a proxy would have to go on without a summary.

    Args:
        http: without a base URL; the caller ends it.
        api_base: with or without `/v1`.
        api_key: sent as bearer token, None for none.
        model: as the server knows it.
        timeout_s: limit for the whole answer.
    """
    base = api_base.rstrip("/")
    url = f"{base if base.endswith('/v1') else f'{base}/v1'}/chat/completions"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def ask(
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[JsonValue] = (),
        tool_choice: JsonValue = None,
        is_enough: IsEnough | None = None,
    ) -> SummaryAnswer:
        body: dict[str, JsonValue] = {
            "model": model,
            "messages": [message.raw for message in messages],
            "max_tokens": max_tokens,
            "temperature": _TEMPERATURE,
        }
        if tools:
            body["tools"] = list(tools)
            if tool_choice is not None:
                body["tool_choice"] = tool_choice
        return _read(url, await _posted(http, url, headers, body, timeout_s))

    return ask


async def _posted(
    http: httpx.AsyncClient, url: str, headers: dict[str, str], body: JsonObject, timeout_s: float
) -> httpx.Response:
    try:
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        return await http.post(url, json=body, headers=headers, timeout=timeout)
    except httpx.ConnectError as exc:
        raise ServerUnavailable(
            f"nothing answers at {url}. Start LM Studio's server, name another one with --api-base, "
            "or see without a model what would be done: --dry-run"
        ) from exc
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise ServerUnavailable(f"{url} gave no summary ({type(exc).__name__}). Is --api-base right?") from exc


def _read(url: str, response: httpx.Response) -> SummaryAnswer:
    try:
        if response.status_code == 200:
            choice = _Answer.model_validate_json(response.content).choices[0]
            said = choice.message
            return SummaryAnswer(
                text=said.content or "",
                reasoning=said.reasoning_content or said.reasoning or "",
                finish_reason=choice.finish_reason or "stop",
                calls_tool=bool(said.tool_calls),
            )
    except (ValidationError, IndexError):
        # LM Studio answers 200 with an error on unknown paths.
        pass
    raise ServerUnavailable(
        f"{url} answered HTTP {response.status_code} and no chat completion: "
        f"{' '.join(response.text.split())[:_ERROR_CHARS]!r}. Check --model and --api-base"
    )
