"""LM Studio's API: the models it lists, their loaded instances, and the marks that tell LM Studio from other servers.

Shapes are validated, never status alone: LM Studio answers 200 with an error body on unknown paths. The reading is
tolerant of missing and new fields; the fields that must be there are LM Studio's own marks (`loaded_instances`,
`state`), which no other server's listing has. A GET here never loads a model (only inference requests do; LM Studio
docs, "ttl-and-auto-evict").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import httpx

from litellm_compaction.windows.fetch import KeyRefused, NotThisApi, at, fetch_json, positive, text_at
from litellm_compaction.windows.window import Found, Window

# The address of LM Studio's server by default (LM Studio docs, "Running LM Studio as a server").
DEFAULT_ADDRESS = "http://127.0.0.1:1234"
DEFAULT_API_BASE = f"{DEFAULT_ADDRESS}/v1"
# The versions of the API, and where each lists its models.
Api: TypeAlias = Literal["v1", "v0"]
_ROWS: Mapping[Api, str] = {"v1": "models", "v0": "data"}


class Instance(NamedTuple):
    """One loaded copy of a model; its `id` is a valid `model` value of a request.

    `context_length` is None when the server does not say, as for embedding models; `parallel` requests share it at the
    same time, one where engines let them queue.
    """

    id: str
    context_length: int | None
    parallel: int


class ListedModel(NamedTuple):
    """One downloaded model (LM Studio docs, rest/list): `variants` are `key@quant` names of it."""

    key: str
    architecture: str
    variants: tuple[str, ...]
    instances: tuple[Instance, ...]
    answers_chats: bool
    is_mlx: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LMStudioListing:
    """All models that a server has, and the version of the API that listed them."""

    api: Api
    models: tuple[ListedModel, ...]

    @property
    def chats(self) -> Mapping[str, bool]:
        """By their keys, and those that are loaded also by the names that they were loaded with."""
        chats = [model for model in self.models if model.answers_chats]
        copies = {instance.id: True for model in chats for instance in model.instances}
        return {**{model.key: bool(model.instances) for model in chats}, **copies}

    def find(self, model: str) -> Found:
        """As `Listing`; `max_context_length` is never used."""
        path, found = f"/api/{self.api}/models", match(self, model)
        if found is None:
            return Found(None, f"{path} lists {len(self.models)} models, none of them {model}")
        listed, instance = found
        if instance is None:
            return Found(None, f"{path}: not loaded", is_unloaded=True)
        if instance.context_length is None:
            return Found(None, f"{path} lists {instance.id} as loaded, without a context length")
        return Found(
            Window(
                tokens=instance.context_length,
                source=f"api/{self.api}",
                instance_id=instance.id,
                architecture=listed.architecture,
                parallel=instance.parallel,
                adds_bos=not listed.is_mlx,
            )
        )


@lru_cache(maxsize=1024)
def server_root(api_base: str) -> str:
    """`api_base` without trailing slashes and `/v1`: where LM Studio's own paths begin."""
    return api_base.strip().rstrip("/").removesuffix("/v1").rstrip("/")


async def list_models(http: httpx.AsyncClient, api_base: str, api_key: str | None) -> LMStudioListing:
    """The server's list: `/api/v1/models` (LM Studio 0.4+), else `/api/v0/models` (0.3.6+).

    Raises:
        KeyRefused: the server answered, and refused the key.
        NotThisApi: the server answered, but both paths have another shape.
        ServerUnavailable: nothing answered (no connection, timeout, a gateway's 5xx).
    """
    refusals: list[NotThisApi] = []
    for api in _ROWS:
        try:
            answer = await fetch_json(http, f"{server_root(api_base)}/api/{api}/models", api_key)
            return parse_list(api, answer)
        except NotThisApi as refusal:  # noqa: PERF203 - two
            refusals.append(refusal)
    is_refused = any(isinstance(each, KeyRefused) for each in refusals)
    raise (KeyRefused if is_refused else NotThisApi)("; ".join(map(str, refusals)))


def parse_list(api: Api, answer: object) -> LMStudioListing:
    """The listing in an answer. One odd row must not hide the others; only odd rows are another API, a NotThisApi."""
    rows = at(answer, _ROWS[api])
    models = tuple(model for row in rows if (model := _listed(row))) if isinstance(rows, list) else ()
    if not isinstance(rows, list) or (rows and not models):
        raise NotThisApi(f"/api/{api}/models: not LM Studio's API, the answer has another shape")
    return LMStudioListing(api=api, models=models)


def _listed(row: object) -> ListedModel | None:
    """A row in the shape of 0.4, or as it was before; requests queued then, one at a time. None for any other.

    `loaded_context_length` is undocumented, so optional (zed pull request 25606).
    """
    key, architecture, form, copies = (at(row, name) for name in ("key", "architecture", "format", "loaded_instances"))
    if (state := at(row, "state")) in ("loaded", "not-loaded"):
        key, architecture, form = (at(row, name) for name in ("id", "arch", "compatibility_type"))
        copies = [{"id": key, "context_length": at(row, "loaded_context_length")}] if state == "loaded" else []
    elif not isinstance(row, dict) or "loaded_instances" not in row:
        return None
    instances = [_instance(copy) for copy in copies] if isinstance(copies, list) else []
    if not isinstance(key, str) or not isinstance(copies, (list, type(None))) or None in instances:
        return None
    variants = at(row, "variants")
    return ListedModel(
        key=key,
        architecture=architecture if isinstance(architecture, str) else "",
        variants=tuple(name for name in variants if isinstance(name, str)) if isinstance(variants, list) else (),
        instances=tuple(filter(None, instances)),
        answers_chats=not text_at(row, "type").startswith("embedding"),
        is_mlx=form == "mlx",
    )


def _instance(copy: object) -> Instance | None:
    if not (name := text_at(copy, "id")):
        return None
    tokens, parallel = (
        positive(at(copy, key)) or positive(at(copy, "config", key)) for key in ("context_length", "parallel")
    )
    return Instance(name, tokens, parallel or 1)


async def answers_as_lmstudio(http: httpx.AsyncClient, api_base: str, api_key: str | None) -> bool:
    """Returns True if the server is LM Studio: it greets as such (lmstudio-js), or lists a model as LM Studio does.

    A ServerUnavailable says that nothing answered, so that it is not known.
    """
    try:
        greeting = await fetch_json(http, f"{server_root(api_base)}/lmstudio-greeting", api_key)
    except NotThisApi:
        greeting = None
    if at(greeting, "lmstudio") is True:
        return True
    try:
        # An empty list is no proof: other servers answer `{"models": []}` too.
        return bool((await list_models(http, api_base, api_key)).models)
    except NotThisApi:
        return False


def match(listing: LMStudioListing, model: str) -> tuple[ListedModel, Instance | None] | None:
    """The listed model, and its loaded instance, that a request for `model` reaches; None if unknown.

    Order: instance id, key, variant, without `@quant`, without `publisher/`, then the same ignoring case. An exact
    instance id wins; otherwise the smallest instance, since LM Studio sends a key to its canonical instance even if
    a larger one is loaded (openclaw issue 141357). The instance is None when the model is not loaded.
    """
    return _match(listing.models, model, str) or _match(listing.models, model, str.casefold)


def _match(
    models: Sequence[ListedModel], model: str, fold: Callable[[str], str]
) -> tuple[ListedModel, Instance | None] | None:
    wanted = fold(model)
    for listed in models:
        for instance in listed.instances:
            if fold(instance.id) == wanted:
                return listed, instance
    bare = wanted.partition("@")[0]
    # A step is what is looked for, and by what each model goes then.
    steps: tuple[tuple[str, Callable[[ListedModel], Sequence[str]]], ...] = (
        (wanted, lambda listed: [listed.key]),
        (wanted, lambda listed: listed.variants),
        (bare, lambda listed: [listed.key.partition("@")[0]]),
        (bare.rpartition("/")[2], lambda listed: [listed.key.partition("@")[0].rpartition("/")[2]]),
    )
    for name, names in steps:
        matches = [listed for listed in models if name in map(fold, names(listed))]
        if not matches:
            continue
        # A copy without a number says nothing about the smallest.
        copies = [(listed, instance) for listed in matches for instance in listed.instances]
        return min(copies, key=lambda pair: pair[1].context_length or float("inf")) if copies else (matches[0], None)
    return None
