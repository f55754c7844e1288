"""LM Studio's API: the models it lists, their loaded instances, and the marks that tell LM Studio from other servers.

Shapes are validated, never status alone: LM Studio answers 200 with an error body on unknown paths. The reading is
tolerant of missing and new fields; the fields that must be there are LM Studio's own marks (`loaded_instances`,
`state`), which no other server's listing has. A GET here never loads a model (only inference requests do; LM Studio
docs, "ttl-and-auto-evict").
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import httpx
from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from litellm_compaction.windows.fetch import KeyRefused, NotThisApi, fetch_json

# The address of LM Studio's server by default (LM Studio docs, "Running LM Studio as a server").
DEFAULT_ADDRESS = "http://127.0.0.1:1234"
# So many take about 5 ms.
_MANY_ROWS = 200
# The versions of the API, and where each lists its models.
Api: TypeAlias = Literal["v1", "v0"]
_ROWS: Mapping[Api, str] = {"v1": "models", "v0": "data"}
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

    @model_validator(mode="before")
    @classmethod
    def _as_newer(cls, row: object) -> object:
        """A row as it was before 0.4, in the newer shape; its requests queue, one at a time.

        `loaded_context_length` is undocumented, so optional (zed pull request 25606).
        """
        if not isinstance(row, dict) or row.get("state") not in ("loaded", "not-loaded"):
            return row
        copy = {"id": row.get("id"), "context_length": row.get("loaded_context_length")}
        newer = {"key": row.get("id"), "architecture": row.get("arch"), "format": row.get("compatibility_type")}
        return {**row, **newer, "loaded_instances": [copy] if row["state"] == "loaded" else []}

    @property
    def kind(self) -> Literal["llm", "embedding"]:
        """`llm` if it answers chats."""
        return "embedding" if self.type.startswith("embedding") else "llm"

    @property
    def loaded(self) -> bool:
        return bool(self.instances)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All models that a server has, and the version of the API that listed them."""

    api: Api
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
    refusals: list[NotThisApi] = []
    for api in _ROWS:
        try:
            answer = await fetch_json(http, f"{root}/api/{api}/models", api_key, timeout_s)
            # One of thousands of models takes a second to read, so others go on meanwhile.
            lists = [value for value in answer.values() if isinstance(value, list)] if isinstance(answer, dict) else []
            is_long = sum(map(len, lists)) > _MANY_ROWS
            return await asyncio.to_thread(parse_list, api, answer) if is_long else parse_list(api, answer)
        except NotThisApi as refusal:  # noqa: PERF203 - two
            refusals.append(refusal)
    is_refused = any(isinstance(each, KeyRefused) for each in refusals)
    raise (KeyRefused if is_refused else NotThisApi)("; ".join(map(str, refusals)))


def parse_list(api: Api, answer: object) -> Listing:
    """The listing in an answer. One odd row must not hide the others, only odd rows are another API.

    Raises:
        NotThisApi: it has another shape.
    """
    rows = answer.get(_ROWS[api]) if isinstance(answer, dict) else None
    models: list[ListedModel] = []
    for row in rows if isinstance(rows, list) else ():
        with contextlib.suppress(ValidationError):
            models.append(ListedModel.model_validate(row))
    if not isinstance(rows, list) or (rows and not models):
        raise NotThisApi(f"/api/{api}/models: not LM Studio's API, the answer has another shape")
    return Listing(api=api, models=tuple(models))


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
    return _match(listing, model, str) or _match(listing, model, str.casefold)


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
        if found := [listed for listed in listing.models if step(listed)]:
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
