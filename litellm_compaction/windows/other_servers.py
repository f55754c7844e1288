"""Windows and exact counts of servers that are not LM Studio: llama.cpp's server, vLLM, Ollama.

Only deployments that an operator opted in are asked. Shapes are validated, never status alone; a GET here loads no
model. Jan and llamafile run llama.cpp's server; KoboldCpp, LocalAI and others are not asked.

A server's own tokenizer counts a request exactly and generates nothing: llama.cpp's server renders (`POST
/apply-template`) and counts (`POST /tokenize`; llama.cpp, tools/server/README.md); vLLM does both at once (`POST
/tokenize` with messages; vLLM, entrypoints/openai). LM Studio has neither: there a very short answer tells
(`engine/probing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias, TypeVar

import httpx
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from litellm_compaction.core.messages import JsonValue, Request
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import NotThisApi, get_json, post_json
from litellm_compaction.windows.lmstudio import Tokens, list_or_empty, server_root, text_or_empty

Api: TypeAlias = Literal["llama.cpp", "vllm", "ollama"]

PATHS: dict[Api, str] = {"llama.cpp": "/props", "vllm": "/v1/models", "ollama": "/api/ps"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model that a server has loaded.

    Attributes:
        names: under which requests reach it; empty where the server answers every name with this model.
        context_length: tokens of one request; None where the server does not say.
        slots: requests that it serves at a time with `context_length` each.
        path: of its file on the server's machine; "" where the server does not say.
        is_shared: whether those fill one context of that length together; False where the server does not say.
    """

    names: tuple[str, ...]
    context_length: int | None
    slots: int = 1
    path: str = ""
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server has loaded, and by which API it said so; `api` is None for a server that tells no window."""

    api: Api | None
    models: tuple[ServedModel, ...]


SILENT = Served(api=None, models=())


async def list_served(
    http: httpx.AsyncClient, api_base: str, api_key: str | None, apis: Sequence[Api], *, timeout_s: float = 3.0
) -> Served:
    """The first answer to one of `apis`, in their order; `SILENT` where the server speaks none of them.

    Args:
        timeout_s: limit for each request, body included.

    Raises:
        ServerUnavailable: nothing answered (no connection, timeout, a gateway's 5xx, or llama.cpp's 503 while it
            loads its model).
    """
    for api in apis:
        url = f"{server_root(api_base)}{PATHS[api]}"
        try:
            answer = await get_json(http, url, api_key, timeout_s, api=f"{api}'s API")
            served = _read(api, answer)
        except NotThisApi:
            continue
        if api == "llama.cpp" and served.models[0].slots > 1:
            return await _with_sharing(http, api_base, api_key, served, answer, timeout_s)
        return served
    return SILENT


async def _with_sharing(
    http: httpx.AsyncClient, api_base: str, api_key: str | None, served: Served, props: object, timeout_s: float
) -> Served:
    """llama.cpp's slots as what they are: of one unified cache, where each has as much as there is in all.

    `llama-server` makes such a cache where nobody sets `--parallel`: four slots with the whole context each (2026-11).
    /props has one slot's context; newer builds name the whole one beside their model, in /v1/models.
    """
    (model,) = served.models
    whole = _valid(_Props, props, "llama.cpp").n_ctx
    if whole is None:
        try:
            url = f"{server_root(api_base)}{PATHS['vllm']}"
            rows = _valid(
                _MetaListing, await get_json(http, url, api_key, timeout_s, api="llama.cpp's API"), "vllm"
            ).data
        except (NotThisApi, ServerUnavailable):
            rows = []
        whole = next((row.meta.n_ctx for row in rows if row.meta is not None and row.meta.n_ctx is not None), None)
    return replace(served, models=(replace(model, is_shared=whole is not None and whole == model.context_length),))


def find_served(served: Served, model: str) -> ServedModel | None:
    """The loaded model that a request for `model` reaches; None when it is not loaded or not known.

    The exact name goes before one that differs in case. Ollama takes a name without a tag for `name:latest` (Ollama
    docs, "Model names").
    """
    for fold in (lambda name: name, str.casefold):
        wanted = {fold(model), fold(f"{model}:latest")}
        for each in served.models:
            if not each.names or wanted & {fold(name) for name in each.names}:
                return each
    return None


def _read(api: Api, answer: object) -> Served:
    if api == "llama.cpp":
        props = _valid(_Props, answer, api)
        if props.default_generation_settings.n_ctx is None:
            # A router in front of several models says 0 here (llama.cpp's server, router mode).
            raise NotThisApi("/props names no context length")
        model = ServedModel(
            names=(),
            context_length=props.default_generation_settings.n_ctx,
            slots=props.total_slots or 1,
            path=props.model_path,
        )
        return Served(api=api, models=(model,))
    if api == "vllm":
        rows = _valid(_VllmListing, answer, api).data
        numbers = [row.max_model_len for row in rows if row.max_model_len is not None]
        if not numbers:
            raise NotThisApi("/v1/models names no max_model_len")
        # LoRA adapters are listed without a number, and run on the engine of the models beside them.
        return Served(
            api=api,
            models=tuple(
                ServedModel(names=(row.id,), context_length=row.max_model_len or min(numbers)) for row in rows
            ),
        )
    loaded = _valid(_OllamaListing, answer, api).models
    return Served(
        api=api,
        models=tuple(
            ServedModel(names=tuple({row.name, row.model} - {""}), context_length=row.context_length) for row in loaded
        ),
    )


class _Generation(BaseModel):
    n_ctx: Tokens = None


class _Props(BaseModel):
    """`GET /props` of llama.cpp's server: `n_ctx` is one slot's (llama.cpp, tools/server/README.md)."""

    default_generation_settings: _Generation
    total_slots: Tokens = None
    model_path: Annotated[str, BeforeValidator(text_or_empty)] = ""
    n_ctx: Tokens = None


class _MetaModel(BaseModel):
    meta: _Generation | None = None


class _MetaListing(BaseModel):
    """`GET /v1/models` of llama.cpp's server: OpenAI's, with `meta` on each card."""

    data: list[_MetaModel]


class _VllmModel(BaseModel):
    id: str
    max_model_len: Tokens = None


class _VllmListing(BaseModel):
    """`GET /v1/models` of vLLM: OpenAI's, with `max_model_len` on each card (vLLM, entrypoints/openai)."""

    data: list[_VllmModel]


class _OllamaModel(BaseModel):
    name: str = ""
    model: str = ""
    context_length: Tokens = None


class _OllamaListing(BaseModel):
    """`GET /api/ps` of Ollama: loaded models; `context_length` is the allocated one (docs.ollama.com/api/ps).

    The trained one, in `/api/show`, is never asked for: a request longer than the allocation is cut.
    """

    models: Annotated[list[_OllamaModel], BeforeValidator(list_or_empty)]


_Shape = TypeVar("_Shape", bound=BaseModel)


def _valid(shape: type[_Shape], answer: object, api: Api) -> _Shape:
    try:
        return shape.model_validate(answer)
    except ValidationError as error:
        raise NotThisApi(f"{PATHS[api]}: the answer has another shape") from error


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
