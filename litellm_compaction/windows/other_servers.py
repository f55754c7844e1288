"""Windows and exact counts of servers that are not LM Studio: one class for each kind, in one table.

Only deployments that an operator opted in are asked. Shapes are validated, never status alone; a GET here loads no
model. Jan and llamafile run llama.cpp's server; KoboldCpp, LocalAI and others are not asked.

A server's own tokenizer counts a request exactly and generates nothing: llama.cpp's server counts a chat (`POST
/v1/chat/completions/input_tokens`), or renders (`POST /apply-template`) and counts (`POST /tokenize`; llama.cpp,
tools/server/README.md); vLLM does both at once (`POST
/tokenize` with messages; vLLM, entrypoints/openai). LM Studio has a protocol of its own (`lmstudio_questions.py`).

A further kind of server is a subclass of `LocalServer` and a `register` (docs/contributing.md has an example).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, ClassVar, NamedTuple, TypeAlias, TypeVar

import httpx
from pydantic import BaseModel, BeforeValidator, ValidationError

from litellm_compaction.core.messages import JsonValue, Request
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import NotThisApi, fetch_json
from litellm_compaction.windows.lmstudio import Tokens, list_or_empty, server_root

# A name in `SERVERS`.
Api: TypeAlias = str

# 100,000 tokens take llama.cpp about 0.1 s; a server that generates may be slower to answer.
_COUNT_LIMIT_S = 5.0
# llama.cpp, tools/server/README.md; older builds answer 404.
_INPUT_TOKENS_PATH = "/v1/chat/completions/input_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model that a server has loaded.

    Attributes:
        names: of it in requests; empty if the server answers every name with this model.
        context_length: tokens of one request; None if the server does not say.
        slots: requests that it serves at a time with `context_length` each.
        is_shared: whether those fill one context of that length together; False if the server does not say.
    """

    names: tuple[str, ...]
    context_length: int | None
    slots: int = 1
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server's loaded models, and the API that told so; `api` is None for a server that tells no window."""

    api: Api | None
    models: tuple[ServedModel, ...]


SILENT = Served(api=None, models=())


class Address(NamedTuple):
    """LiteLLM's own address for a server whose deployment names none.

    LiteLLM: main.py (Ollama), llms/hosted_vllm/chat/transformation.py, llms/llamafile/chat/transformation.py.

    Attributes:
        variable: of the environment.
        default: if that is not set; None for nowhere.
    """

    variable: str
    default: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One server, to be asked.

    Attributes:
        api_base: of the server.
        api_key: sent with each question.
        timeout_s: limit for each question, body included.
        api: its kind, for errors.
    """

    http: httpx.AsyncClient
    api_base: str
    api_key: str | None
    timeout_s: float
    api: Api

    async def ask(self, path: str, body: Mapping[str, JsonValue] | None = None) -> object:
        """The JSON at `path`, or the JSON that answers `body`.

        Raises:
            NotThisApi, ServerUnavailable, ValueError, RecursionError: as `fetch_json`.
        """
        url, api = f"{server_root(self.api_base)}{path}", f"{self.api}'s API"
        return await fetch_json(self.http, url, self.api_key, self.timeout_s, asked=body, api=api)


class LocalServer(ABC):
    """A kind of server that tells with which context length its models are loaded.

    Attributes:
        name: in logs, events, `doctor`, and as a window's source.
        title: for people; `says` is the field that says the window.
        path: of the question; a GET that loads nothing.
        providers: LiteLLM's names for it, with the place where LiteLLM looks for it.
        cloud_hosts: hosts of a hosted service that LiteLLM reaches by the same names; those are never asked.
        window_parameter: by which each request allocates its window; "" for none.
        loads_on_request: whether a model that is not loaded is loaded by its first request.
        continues: whether it goes on with an answer whose end is the last message, and takes a prompt that is rendered
            here; `continues_when_told`: by vLLM's `continue_final_message` only.
        counts: whether it has a tokenizer to ask.
        refuses_by: the fields of a request's body, on the routes of its `providers`, by which it refuses a prompt that
            it would cut in silence.
        no_thoughts: the fields of a request's body that end a model's thinking before it begins, if there are any.
    """

    name: ClassVar[Api]
    title: ClassVar[str]
    says: ClassVar[str]
    path: ClassVar[str]
    providers: ClassVar[Mapping[str, Address]] = MappingProxyType({})
    cloud_hosts: ClassVar[tuple[str, ...]] = ()
    window_parameter: ClassVar[str] = ""
    loads_on_request: ClassVar[bool] = False
    continues: ClassVar[bool] = False
    continues_when_told: ClassVar[bool] = False
    no_thoughts: ClassVar[Mapping[str, JsonValue]] = MappingProxyType({})
    counts: ClassVar[bool] = False
    refuses_by: ClassVar[Mapping[str, JsonValue]] = MappingProxyType({})

    @abstractmethod
    def read(self, answer: object) -> tuple[ServedModel, ...]:
        """The models that an answer to `path` lists.

        Raises:
            NotThisApi: the answer is another API's.
        """

    async def complete(self, server: Asked, models: tuple[ServedModel, ...], answer: object) -> tuple[ServedModel, ...]:
        """`models` with the facts that only a further question tells."""
        return models

    async def tokens_of(self, server: Asked, model: str, request: Request) -> int | None:
        """The prompt tokens of a request that holds text only, as its chat completion will have them.

        Args:
            server: to be asked.
            model: as the server knows it.
            request: the request to count.

        Returns:
            None if the server cannot say.

        Raises:
            ServerUnavailable, ValueError, RecursionError: it did not say.
        """
        return None


class LlamaCpp(LocalServer):
    """llama.cpp's server, llamafile and Jan."""

    name = "llama.cpp"
    title = "llama.cpp"
    says = "llama.cpp's /props"
    path = "/props"
    providers = MappingProxyType({"llamafile": Address("LLAMAFILE_API_BASE", "http://127.0.0.1:8080/v1")})
    continues = True
    counts = True
    # The first by llama.cpp's sampler (its pull request 23673), the second by the model's own template.
    no_thoughts = MappingProxyType({"thinking_budget_tokens": 0, "chat_template_kwargs": {"enable_thinking": False}})

    def read(self, answer: object) -> tuple[ServedModel, ...]:
        props = _valid(_Props, answer, self.path)
        if props.default_generation_settings.n_ctx is None:
            # A router in front of several models says 0 here (llama.cpp's server, router mode).
            raise NotThisApi("/props names no context length")
        return (
            ServedModel(
                names=(),
                context_length=props.default_generation_settings.n_ctx,
                slots=props.total_slots or 1,
            ),
        )

    async def complete(self, server: Asked, models: tuple[ServedModel, ...], answer: object) -> tuple[ServedModel, ...]:
        """Its slots as they are: those of one unified cache have each as much as there is in all.

        `llama-server` makes such a cache unless `--parallel` is set: four slots with the whole context each.
        /props has one slot's context; newer builds name the whole one beside their model, in /v1/models.
        """
        (model,) = models
        if model.slots == 1:
            return models
        whole = _valid(_Props, answer, self.path).n_ctx
        if whole is None:
            try:
                rows = _valid(_MetaListing, await server.ask("/v1/models"), "/v1/models").data
            except (NotThisApi, ServerUnavailable):
                rows = []
            whole = next((row.meta.n_ctx for row in rows if row.meta is not None and row.meta.n_ctx is not None), None)
        return (replace(model, is_shared=whole is not None and whole == model.context_length),)

    async def tokens_of(self, server: Asked, model: str, request: Request) -> int | None:
        try:
            return _tokens(await server.ask(_INPUT_TOKENS_PATH, _body(request)), "input_tokens")
        except NotThisApi:
            pass
        prompt = _field(await server.ask("/apply-template", _body(request)), "prompt", str)
        asked: dict[str, JsonValue] = {"content": prompt, "add_special": True, "parse_special": True}
        return len(_field(await server.ask("/tokenize", asked), "tokens", list)) or None


class Vllm(LocalServer):
    """vLLM."""

    name = "vllm"
    title = "vLLM"
    says = "vLLM's max_model_len"
    path = "/v1/models"
    providers = MappingProxyType({"hosted_vllm": Address("HOSTED_VLLM_API_BASE", None)})
    continues = True
    continues_when_told = True
    counts = True
    no_thoughts = MappingProxyType({"chat_template_kwargs": {"enable_thinking": False}})
    # Its `/tokenize` ("Tokenizer API") knows no other extras of a chat, and would leave them out.
    _extras: ClassVar[frozenset[str]] = frozenset({"chat_template_kwargs"})

    def read(self, answer: object) -> tuple[ServedModel, ...]:
        rows = _valid(_VllmListing, answer, self.path).data
        numbers = [row.max_model_len for row in rows if row.max_model_len is not None]
        if not numbers:
            raise NotThisApi("/v1/models names no max_model_len")
        # LoRA adapters are listed without a number, and run on the engine of the models beside them.
        return tuple(ServedModel(names=(row.id,), context_length=row.max_model_len or min(numbers)) for row in rows)

    async def tokens_of(self, server: Asked, model: str, request: Request) -> int | None:
        if not request.extras.keys() <= self._extras:
            return None
        body = {**_body(request), "model": model, "add_generation_prompt": True}
        return _tokens(await server.ask("/tokenize", body), "count")


class Ollama(LocalServer):
    """Ollama; it renders every prompt by its own template, and has no tokenizer to ask."""

    name = "ollama"
    title = "Ollama"
    says = "Ollama's /api/ps"
    path = "/api/ps"
    providers = MappingProxyType(
        dict.fromkeys(("ollama", "ollama_chat"), Address("OLLAMA_API_BASE", "http://localhost:11434"))
    )
    cloud_hosts = ("ollama.com", "ollama.ai")
    window_parameter = "num_ctx"
    # It drops the oldest messages of a prompt that is too long, and shifts the context of an answer that outgrows it,
    # unless told not to (Ollama, api/types.go, server/routes.go). Its `/v1` knows neither field.
    refuses_by = MappingProxyType({"truncate": False, "shift": False})
    loads_on_request = True

    def read(self, answer: object) -> tuple[ServedModel, ...]:
        loaded = _valid(_OllamaListing, answer, self.path).models
        return tuple(
            ServedModel(names=tuple({row.name, row.model} - {""}), context_length=row.context_length) for row in loaded
        )


_table: dict[Api, LocalServer] = {}
# The order in which an address of an unknown kind is asked.
SERVERS: Mapping[Api, LocalServer] = MappingProxyType(_table)


def register(server: LocalServer) -> LocalServer:
    """Adds a kind of server to the table; the same name again replaces it."""
    _table[server.name] = server
    return server


for _server in (LlamaCpp(), Vllm(), Ollama()):
    register(_server)


async def list_served(
    http: httpx.AsyncClient, api_base: str, api_key: str | None, apis: Sequence[Api], *, timeout_s: float = 3.0
) -> Served:
    """The first answer to one of `apis`, in their order; `SILENT` if the server speaks none of them.

    Args:
        timeout_s: limit for each request, body included.

    Raises:
        ServerUnavailable: nothing answered (no connection, timeout, a gateway's 5xx, llama.cpp's 503 during a load).
    """
    for api in apis:
        server = Asked(http=http, api_base=api_base, api_key=api_key, timeout_s=timeout_s, api=api)
        try:
            answer = await server.ask(SERVERS[api].path)
            models = SERVERS[api].read(answer)
        except NotThisApi:
            continue
        return Served(api=api, models=await SERVERS[api].complete(server, models, answer))
    return SILENT


def find_served(served: Served, model: str) -> ServedModel | None:
    """The loaded model that a request for `model` reaches; None when it is not loaded or not known.

    The exact name goes before one of another case. Ollama reads a bare name as `name:latest` (docs, "Model names").
    """
    for fold in (lambda name: name, str.casefold):
        wanted = {fold(model), fold(f"{model}:latest")}
        for each in served.models:
            if not each.names or wanted & {fold(name) for name in each.names}:
                return each
    return None


async def tokens_by_server(
    http: httpx.AsyncClient, api: Api, api_base: str, api_key: str | None, model: str, request: Request
) -> int | None:
    """The prompt tokens of a request, as its chat completion will have them; None if the server does not say.

    Never raises. Not asked for images and sound: no tokenizer counts those.

    Args:
        http: the client to use.
        api: of the server.
        api_base: of the server.
        api_key: sent with the questions.
        model: as the server knows it.
        request: the request to count.
    """
    if any(message.other_parts for message in request.messages):
        return None
    server = Asked(http=http, api_base=api_base, api_key=api_key, timeout_s=_COUNT_LIMIT_S, api=api)
    try:
        return await SERVERS[api].tokens_of(server, model, request)
    except (ServerUnavailable, ValueError, RecursionError):
        return None


def _body(request: Request) -> dict[str, JsonValue]:
    body: dict[str, JsonValue] = {**request.extras, "messages": [dict(message.raw) for message in request.messages]}
    if request.tools:
        body["tools"] = list(request.tools)
        if request.tool_choice is not None:
            body["tool_choice"] = request.tool_choice
    return body


class _Generation(BaseModel):
    n_ctx: Tokens = None


class _Props(BaseModel):
    """`GET /props` of llama.cpp's server: `n_ctx` is one slot's (llama.cpp, tools/server/README.md)."""

    default_generation_settings: _Generation
    total_slots: Tokens = None
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


def _valid(shape: type[_Shape], answer: object, path: str) -> _Shape:
    try:
        return shape.model_validate(answer)
    except ValidationError as error:
        raise NotThisApi(f"{path}: the answer has another shape") from error


_Kind = TypeVar("_Kind")


def _field(answer: object, name: str, kind: type[_Kind]) -> _Kind:
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise NotThisApi(f"the answer has no {name}")
    return value


def _tokens(answer: object, name: str) -> int:
    tokens = _field(answer, name, int)
    if tokens < 1:
        raise NotThisApi(f"{name} is {tokens}")
    return tokens
