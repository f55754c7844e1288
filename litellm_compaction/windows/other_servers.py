"""Windows and exact counts of servers that are not LM Studio: one class for each kind, in one table.

Only deployments that an operator opted in are asked. Shapes are validated, never status alone; a GET here loads no
model. Jan and llamafile run llama.cpp's server; KoboldCpp, LocalAI and others are not asked. LM Studio has a protocol
of its own (`lmstudio_rpc.py`). A further kind of server is a subclass of `LocalServer` in `SERVERS`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, TypeAlias

import httpx

from litellm_compaction.core.messages import JsonValue, Request
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import PATIENT_TIMEOUT_S, NotThisApi, at, fetch_json, positive, text_at
from litellm_compaction.windows.lmstudio import server_root
from litellm_compaction.windows.window import Found, Window

# A name in `SERVERS`.
Api: TypeAlias = str

# 100,000 tokens take llama.cpp about 0.1 s; a server that generates may be slower to answer.
_COUNT_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model that a server has loaded.

    Attributes:
        names: of it in requests; empty if the server answers every name with this model.
        context_length: tokens of one request; None if the server does not say.
        slots: requests that it serves at a time with `context_length` each.
        parallel: of those that fill one context of that length together; 1 if the server does not say.
    """

    names: tuple[str, ...]
    context_length: int | None
    slots: int = 1
    parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """A server's loaded models, and the API that told so; `api` is None if it speaks none of those `asked`."""

    api: Api | None
    models: tuple[ServedModel, ...] = ()
    asked: tuple[Api, ...] = ()

    @property
    def chats(self) -> Mapping[str, bool]:
        """All of them are loaded."""
        return {model.names[0]: True for model in self.models if model.names}

    def find(self, model: str) -> Found:
        """As `Listing`."""
        if self.api is None:
            asked = ", ".join(SERVERS[api].path for api in self.asked)
            return Found(None, f"its server tells no context length ({asked})")
        server, served = SERVERS[self.api], self._served(model)
        if served is None or served.context_length is None:
            return Found(None, f"{server.path} names no context length of {model}")
        return Found(
            Window(
                tokens=served.context_length,
                source=self.api,
                instance_id=model,
                parallel=served.parallel,
                slots=served.slots,
            )
        )

    def _served(self, model: str) -> ServedModel | None:
        """The exact name goes before one of another case."""
        for fold in (str, str.casefold):
            for each in self.models:
                if not each.names or fold(model) in map(fold, each.names):
                    return each
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One server, to be asked; `timeout_s` is the limit for each question, body included, and `api` its kind."""

    http: httpx.AsyncClient
    api_base: str
    api_key: str | None
    api: Api
    timeout_s: float = PATIENT_TIMEOUT_S

    async def ask(self, path: str, body: Mapping[str, JsonValue] | None = None) -> object:
        """The JSON at `path`, or the JSON that answers `body`; errors as `fetch_json`."""
        url, api = f"{server_root(self.api_base)}{path}", f"{self.api}'s API"
        return await fetch_json(self.http, url, self.api_key, timeout_s=self.timeout_s, asked=body, api=api)


class LocalServer(ABC):
    """A kind of server that tells with which context length its models are loaded.

    Attributes:
        name: in logs, events, `doctor`, and as a window's source.
        title: for people.
        path: of the question; a GET that loads nothing.
        providers: LiteLLM's names for it, each with the variable that holds the address of one whose deployment names
            none, and the address without that (LiteLLM, main.py, llms/hosted_vllm, llms/llamafile).
        continues: whether it goes on with an answer whose end is the last message, and takes a prompt that is rendered
            here; `continues_when_told`: by vLLM's `continue_final_message` only.
        no_thoughts: the fields of a request's body that end a model's thinking before it begins, if there are any.
    """

    name: ClassVar[Api]
    title: ClassVar[str]
    path: ClassVar[str]
    providers: ClassVar[Mapping[str, tuple[str, str | None]]] = MappingProxyType({})
    continues: ClassVar[bool] = False
    continues_when_told: ClassVar[bool] = False
    no_thoughts: ClassVar[Mapping[str, JsonValue]] = MappingProxyType({})

    @abstractmethod
    def read(self, answer: object) -> tuple[ServedModel, ...]:
        """The models that an answer to `path` lists; a NotThisApi says that it is another API's."""

    async def complete(self, server: Asked, models: tuple[ServedModel, ...], answer: object) -> tuple[ServedModel, ...]:
        """`models` with the facts that only a further question tells."""
        return models

    async def tokens_of(self, server: Asked, model: str, request: Request) -> int | None:
        """The prompt tokens of a request with text only, as its chat completion has them; None, or as `ask` fails."""
        return None


class LlamaCpp(LocalServer):
    """llama.cpp's server, llamafile and Jan."""

    name = "llama.cpp"
    title = "llama.cpp"
    path = "/props"
    providers = MappingProxyType({"llamafile": ("LLAMAFILE_API_BASE", "http://127.0.0.1:8080/v1")})
    continues = True
    # The first by llama.cpp's sampler (its pull request 23673), the second by the model's own template.
    no_thoughts = MappingProxyType({"thinking_budget_tokens": 0, "chat_template_kwargs": {"enable_thinking": False}})

    def read(self, answer: object) -> tuple[ServedModel, ...]:
        # One slot's; a router in front of several models says 0 (tools/server/README.md).
        tokens = positive(at(answer, "default_generation_settings", "n_ctx"))
        if tokens is None:
            raise NotThisApi("/props names no context length")
        return (ServedModel(names=(), context_length=tokens, slots=positive(at(answer, "total_slots")) or 1),)

    async def complete(self, server: Asked, models: tuple[ServedModel, ...], answer: object) -> tuple[ServedModel, ...]:
        """Its slots as they are: those of one unified cache have each as much as there is in all.

        `llama-server` makes such a cache unless `--parallel` is set: four slots with the whole context each.
        /props has one slot's context; newer builds name the whole one beside their model, in /v1/models.
        """
        (model,) = models
        if model.slots == 1:
            return models
        whole = positive(at(answer, "n_ctx"))
        if whole is None:
            with contextlib.suppress(ServerUnavailable):
                rows = _rows(await server.ask("/v1/models"), "data")
                whole = next(filter(None, (positive(at(row, "meta", "n_ctx")) for row in rows)), None)
        return (replace(model, parallel=model.slots) if whole == model.context_length else model,)

    async def tokens_of(self, server: Asked, model: str, request: Request) -> int | None:
        """As llama.cpp's tools/server/README.md has it; older builds render and count in two questions."""
        with contextlib.suppress(NotThisApi):
            counted = await server.ask("/v1/chat/completions/input_tokens", _body(request))
            if (tokens := positive(at(counted, "input_tokens"))) is not None:
                return tokens
        prompt = text_at(await server.ask("/apply-template", _body(request)), "prompt")
        asked: dict[str, JsonValue] = {"content": prompt, "add_special": True, "parse_special": True}
        return len(_rows(await server.ask("/tokenize", asked), "tokens")) or None if prompt else None


class Vllm(LocalServer):
    """vLLM."""

    name = "vllm"
    title = "vLLM"
    path = "/v1/models"
    providers = MappingProxyType({"hosted_vllm": ("HOSTED_VLLM_API_BASE", None)})
    continues = True
    continues_when_told = True
    no_thoughts = MappingProxyType({"chat_template_kwargs": {"enable_thinking": False}})
    # Its `/tokenize` ("Tokenizer API") knows no other extras of a chat, and would leave them out.
    _extras: ClassVar[frozenset[str]] = frozenset({"chat_template_kwargs"})

    def read(self, answer: object) -> tuple[ServedModel, ...]:
        # OpenAI's cards with `max_model_len` (vLLM, entrypoints/openai).
        sizes = {text_at(row, "id"): positive(at(row, "max_model_len")) for row in _rows(answer, "data")}
        numbers = [tokens for tokens in sizes.values() if tokens is not None]
        if not numbers:
            raise NotThisApi("/v1/models names no max_model_len")
        # LoRA adapters are listed without a number, and run on the engine of the models beside them.
        return tuple(ServedModel(names=(name,), context_length=sizes[name] or min(numbers)) for name in sizes if name)

    async def tokens_of(self, server: Asked, model: str, request: Request) -> int | None:
        if not request.extras.keys() <= self._extras:
            return None
        body = {**_body(request), "model": model, "add_generation_prompt": True}
        return positive(at(await server.ask("/tokenize", body), "count"))


# In the order in which an address of an unknown kind is asked; any other one can be added.
SERVERS: dict[Api, LocalServer] = {server.name: server for server in (LlamaCpp(), Vllm())}


async def list_served(http: httpx.AsyncClient, api_base: str, api_key: str | None, apis: Sequence[Api]) -> Served:
    """The first answer to one of `apis`, in their order.

    A ServerUnavailable says that nothing answered (no connection, timeout, a gateway's 5xx, llama.cpp's 503 in a load).
    """
    for api in apis:
        server = Asked(http=http, api_base=api_base, api_key=api_key, api=api)
        try:
            answer = await server.ask(SERVERS[api].path)
            models = SERVERS[api].read(answer)
        except NotThisApi:
            continue
        return Served(api=api, models=await SERVERS[api].complete(server, models, answer))
    return Served(api=None, asked=tuple(apis))


async def tokens_by_server(
    http: httpx.AsyncClient, api: Api, api_base: str, api_key: str | None, model: str, request: Request
) -> int | None:
    """As `LocalServer.tokens_of`, but never raises. Not asked for images and sound: no tokenizer counts those."""
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


def _rows(answer: object, name: str) -> list[object]:
    """A list in an answer, or none where it is null."""
    rows = answer.get(name, "") if isinstance(answer, dict) else ""
    if not isinstance(rows, (list, type(None))):
        raise NotThisApi(f"the answer has no list of {name}")
    return rows or []
