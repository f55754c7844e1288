"""How many tokens a server itself counts for a request, asked of its tokenizer: exact, and nothing is generated.

Called by `window.py`, which knows what a server speaks. llama.cpp's server renders (`POST /apply-template`) and counts
(`POST /tokenize`; llama.cpp, tools/server/README.md); vLLM does both at once (`POST /tokenize` with messages; vLLM,
entrypoints/openai). LM Studio has neither: there a very short answer tells (`engine/probing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import httpx
from pydantic import BaseModel, Field, ValidationError

from litellm_compaction.core.messages import JsonValue, Request
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.models.fetch import post_json
from litellm_compaction.models.lmstudio import server_root

TokenizerApi: TypeAlias = Literal["llama.cpp", "vllm"]
TOKENIZER_APIS: tuple[TokenizerApi, ...] = ("llama.cpp", "vllm")
# The other extras of a chat are unknown to vLLM's `/tokenize` ("Tokenizer API"), which would leave them out.
_VLLM_EXTRAS = frozenset({"chat_template_kwargs"})
# 100,000 tokens take llama.cpp about 0.1 s; a server that generates may be slower to answer.
_LIMIT_S = 5.0


class _Rendered(BaseModel):
    """`POST /apply-template` of llama.cpp's server: what its chat completion would read."""

    prompt: str


class _Tokenized(BaseModel):
    """`POST /tokenize` of llama.cpp's server."""

    tokens: Sequence[object]


class _Counted(BaseModel):
    """`POST /tokenize` of vLLM."""

    count: Annotated[int, Field(gt=0)]


async def tokens_by_server(
    http: httpx.AsyncClient, api: TokenizerApi, api_base: str, api_key: str | None, model: str, request: Request
) -> int | None:
    """The prompt tokens of a request, as its chat completion will have them; None where the server does not say.

    Never raises. Not asked for images and sound: no tokenizer counts those.

    Args:
        http: the client to use.
        api: what the server speaks.
        api_base: of the server.
        api_key: sent with the questions.
        model: as the server knows it.
        request: what would be sent.
    """
    if any(message.other_parts for message in request.messages):
        return None
    if api == "vllm" and not request.extras.keys() <= _VLLM_EXTRAS:
        return None
    root = server_root(api_base)
    body: dict[str, JsonValue] = {**request.extras, "messages": [dict(message.raw) for message in request.messages]}
    if request.tools:
        body["tools"] = list(request.tools)
        if request.tool_choice is not None:
            body["tool_choice"] = request.tool_choice

    async def ask(path: str, asked: dict[str, JsonValue]) -> object:
        return await post_json(http, f"{root}{path}", api_key, asked, _LIMIT_S, api=f"{api}'s API")

    try:
        if api == "vllm":
            body |= {"model": model, "add_generation_prompt": True}
            return _Counted.model_validate(await ask("/tokenize", body)).count
        prompt = _Rendered.model_validate(await ask("/apply-template", body)).prompt
        asked: dict[str, JsonValue] = {"content": prompt, "add_special": True, "parse_special": True}
        return len(_Tokenized.model_validate(await ask("/tokenize", asked)).tokens) or None
    except (ServerUnavailable, ValidationError, ValueError, RecursionError):
        return None
