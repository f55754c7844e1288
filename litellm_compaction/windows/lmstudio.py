"""LM Studio's API: the models it lists, their loaded instances, and the marks that tell LM Studio from other servers.

Shapes are validated, never status alone: LM Studio answers 200 with an error body on unknown paths. The reading is
tolerant of missing and new fields; the fields that must be there are LM Studio's own marks (`loaded_instances`,
`state`), which no other server's listing has. A GET here never loads a model (only inference requests do; LM Studio
docs, "ttl-and-auto-evict").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import httpx
from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from litellm_compaction.windows.fetch import KeyRefused, NotThisApi, fetch_json

# The address of LM Studio's server by default (LM Studio docs, "Running LM Studio as a server").
DEFAULT_ADDRESS = "http://127.0.0.1:1234"
# So many take about 5 ms.
_MANY_ROWS = 200
DEFAULT_API_BASE = f"{DEFAULT_ADDRESS}/v1"


def _either(name: str) -> AliasChoices:
    return AliasChoices(name, AliasPath("config", name))


def _positive_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""


def _known_format(value: object) -> str:
    return value if value in ("gguf", "mlx") else ""


def _only_texts(value: object) -> object:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else list_or_empty(value)


def list_or_empty(value: object) -> object:
    return [] if value is None else value


Tokens = Annotated["int | None", BeforeValidator(_positive_or_none)]
_Text = Annotated[str, BeforeValidator(text_or_empty)]
_Parallel = Annotated[int, BeforeValidator(lambda value: _positive_or_none(value) or 1)]
_Format = Annotated[Literal["gguf", "mlx", ""], BeforeValidator(_known_format)]


class Instance(BaseModel):
    """One loaded copy of a model.

    Attributes:
        id: a valid `model` value of a request.
        context_length: tokens with which it is loaded; None when the server does not say, as for embedding models.
        parallel: requests that share this context length at the same time; engines that let them queue list none.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    context_length: Tokens = Field(None, validation_alias=_either("context_length"))
    parallel: _Parallel = Field(1, validation_alias=_either("parallel"))


class ListedModel(BaseModel):
    """One downloaded model: an entry of `models` (LM Studio docs, rest/list).

    Attributes:
        variants: `key@quant` names of the same model.
        instances: empty when the model is not loaded.
        file_format: "" when the server does not say, or names another.
    """

    model_config = ConfigDict(frozen=True)

    key: str
    type: _Text = "llm"
    architecture: _Text = ""
    variants: Annotated[tuple[str, ...], BeforeValidator(_only_texts)] = ()
    instances: Annotated[tuple[Instance, ...], BeforeValidator(list_or_empty)] = Field(
        validation_alias="loaded_instances"
    )
    file_format: _Format = Field("", validation_alias="format")

    @property
    def kind(self) -> Literal["llm", "embedding"]:
        """`llm` if it answers chats."""
        return "embedding" if self.type.startswith("embedding") else "llm"

    @property
    def loaded(self) -> bool:
        return bool(self.instances)


class _OlderModel(BaseModel):
    """One entry of `data` before 0.4; `loaded_context_length` is undocumented, so optional (zed pull request 25606)."""

    model_config = ConfigDict(extra="allow")

    id: str
    state: Literal["loaded", "not-loaded"]
    arch: _Text = ""
    loaded_context_length: Tokens = None
    compatibility_type: _Format = ""

    def as_listed(self) -> ListedModel:
        """The same in the newer shape; its requests queue, one at a time."""
        copy = {"id": self.id, "context_length": self.loaded_context_length}
        row = {"key": self.id, "architecture": self.arch, "format": self.compatibility_type}
        return ListedModel.model_validate(
            {**(self.model_extra or {}), **row, "loaded_instances": [copy] if self.state == "loaded" else []}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All models that a server has, and the version of the API that listed them."""

    api: Literal["v1", "v0"]
    models: tuple[ListedModel, ...]


def server_root(api_base: str) -> str:
    """`api_base` without trailing slashes and `/v1`: where LM Studio's own paths begin."""
    return api_base.strip().rstrip("/").removesuffix("/v1").rstrip("/")


async def list_models(
    http: httpx.AsyncClient, api_base: str, api_key: str | None, *, timeout_s: float = 3.0
) -> Listing:
    """The server's list: `/api/v1/models` (LM Studio 0.4+), else `/api/v0/models` (0.3.6+).

    Args:
        timeout_s: limit for each of the two requests, body included.

    Raises:
        KeyRefused: the server answered, and refused the key.
        NotThisApi: the server answered, but both paths have another shape.
        ServerUnavailable: nothing answered (no connection, timeout, a gateway's 5xx).
    """
    root = server_root(api_base)
    try:
        return await _parsed(_parse_v1, await fetch_json(http, f"{root}/api/v1/models", api_key, timeout_s))
    except NotThisApi as first:
        try:
            return await _parsed(_parse_v0, await fetch_json(http, f"{root}/api/v0/models", api_key, timeout_s))
        except NotThisApi as second:
            is_refused = isinstance(first, KeyRefused) or isinstance(second, KeyRefused)
            raise (KeyRefused if is_refused else NotThisApi)(f"{first}; {second}") from second


async def _parsed(parse: Callable[[object], Listing], answer: object) -> Listing:
    """The listing in an answer; one of thousands of models takes a second to read, so others go on meanwhile."""
    lists = [value for value in answer.values() if isinstance(value, list)] if isinstance(answer, dict) else []
    if sum(map(len, lists)) <= _MANY_ROWS:
        return parse(answer)
    return await asyncio.to_thread(parse, answer)


async def answers_as_lmstudio(
    http: httpx.AsyncClient, api_base: str, api_key: str | None, *, timeout_s: float = 3.0
) -> bool:
    """Returns True if the server is LM Studio: it greets as such (lmstudio-js), or lists a model as LM Studio does.

    Raises:
        ServerUnavailable: nothing answered, so it is not known.
    """
    try:
        greeting = await fetch_json(http, f"{server_root(api_base)}/lmstudio-greeting", api_key, timeout_s)
    except NotThisApi:
        greeting = None
    if isinstance(greeting, dict) and greeting.get("lmstudio") is True:
        return True
    try:
        # An empty list is no proof: other servers answer `{"models": []}` too.
        return bool((await list_models(http, api_base, api_key, timeout_s=timeout_s)).models)
    except NotThisApi:
        return False


def match(listing: Listing, model: str) -> tuple[ListedModel, Instance | None] | None:
    """The listed model, and its loaded instance, that a request for `model` reaches; None if unknown.

    Order: instance id, key, variant, without `@quant`, without `publisher/`, then the same ignoring case. An exact
    instance id wins; otherwise the smallest instance, since LM Studio sends a key to its canonical instance even if
    a larger one is loaded (openclaw issue 141357). The instance is None when the model is not loaded.
    """
    found = _match(listing, model, lambda name: name)
    return found if found is not None else _match(listing, model, str.casefold)


def _match(listing: Listing, model: str, fold: Callable[[str], str]) -> tuple[ListedModel, Instance | None] | None:
    wanted = fold(model)
    for listed in listing.models:
        for instance in listed.instances:
            if fold(instance.id) == wanted:
                return listed, instance
    bare = _without_quant(wanted)
    steps: tuple[Callable[[ListedModel], bool], ...] = (
        lambda listed: fold(listed.key) == wanted,
        lambda listed: any(fold(variant) == wanted for variant in listed.variants),
        lambda listed: _without_quant(fold(listed.key)) == bare,
        lambda listed: _without_publisher(_without_quant(fold(listed.key))) == _without_publisher(bare),
    )
    for step in steps:
        found = [listed for listed in listing.models if step(listed)]
        if found:
            return _smallest(found)
    return None


def _smallest(found: list[ListedModel]) -> tuple[ListedModel, Instance | None]:
    loaded = [(listed, instance) for listed in found for instance in listed.instances]
    if not loaded:
        return found[0], None
    # A copy without a number says nothing about the smallest.
    return min(loaded, key=lambda pair: pair[1].context_length or float("inf"))


def _without_quant(name: str) -> str:
    return name.partition("@")[0]


def _without_publisher(name: str) -> str:
    return name.rpartition("/")[2]


def _parse_v1(answer: object) -> Listing:
    path = "/api/v1/models"
    return Listing(api="v1", models=tuple(_entries(_valid(answer, _V1Listing, path).models, ListedModel, path)))


def _parse_v0(answer: object) -> Listing:
    path = "/api/v0/models"
    rows = _entries(_valid(answer, _V0Listing, path).data, _OlderModel, path)
    return Listing(api="v0", models=tuple(row.as_listed() for row in rows))


class _V1Listing(BaseModel):
    models: list[object]


class _V0Listing(BaseModel):
    data: list[object]


_Entry = TypeVar("_Entry", bound=BaseModel)


def _entries(rows: list[object], shape: type[_Entry], path: str) -> Iterator[_Entry]:
    """The rows that have the shape: one odd row must not hide the others, only odd rows are another API."""
    failure: NotThisApi | None = None
    found = False
    for row in rows:
        try:
            entry = _valid(row, shape, path)
        except NotThisApi as exc:  # noqa: PERF203 - tens of rows, every few seconds
            failure = exc
        else:
            found = True
            yield entry
    if failure is not None and not found:
        raise failure


def _valid(answer: object, shape: type[_Entry], path: str) -> _Entry:
    try:
        return shape.model_validate(answer)
    except ValidationError as exc:
        raise NotThisApi(f"{path}: not LM Studio's API, the answer has another shape") from exc
