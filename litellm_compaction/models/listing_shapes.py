"""How LM Studio writes its listings as JSON, and what else is taken for one.

Called by `lmstudio.py`; `served.py` shares the kinds of fields. Tolerant of missing and new fields; the fields that
must be there are LM Studio's own marks (`loaded_instances`, `state`), which no other server's listing has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError

from litellm_compaction.models.fetch import NotThisApi


def _positive_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def text_or_empty(value: object) -> str:
    """`value`, or "" for what is no text."""
    return value if isinstance(value, str) else ""


def _quantization_name(value: object) -> str:
    """Its name: an object in v1, a text in v0."""
    return text_or_empty(value.get("name") if isinstance(value, dict) else value)


def _known_format(value: object) -> str:
    return value if value in ("gguf", "mlx") else ""


def list_or_empty(value: object) -> object:
    """`value`, or an empty list for JSON's null."""
    return [] if value is None else value


Tokens = Annotated["int | None", BeforeValidator(_positive_or_none)]
_Text = Annotated[str, BeforeValidator(text_or_empty)]
_Quantization = Annotated[str, BeforeValidator(_quantization_name)]
_Format = Annotated[Literal["gguf", "mlx", ""], BeforeValidator(_known_format)]


class V1Config(BaseModel):
    """With which settings an instance is loaded; embedding models name few of them."""

    context_length: Tokens = None
    parallel: Tokens = None


class V1Instance(BaseModel):
    """One entry of `loaded_instances`."""

    id: str
    config: V1Config = V1Config()


class V1Model(BaseModel):
    """One entry of `models` (LM Studio docs, rest/list)."""

    key: str
    type: _Text = "llm"
    publisher: _Text = ""
    architecture: _Text = ""
    loaded_instances: Annotated[list[V1Instance], BeforeValidator(list_or_empty)]
    max_context_length: Tokens = None
    variants: Annotated[list[object], BeforeValidator(list_or_empty)] = []
    selected_variant: _Text = ""
    quantization: _Quantization = ""
    format: _Format = ""


class _V1Listing(BaseModel):
    models: list[object]


class V0Model(BaseModel):
    """One entry of `data`; `loaded_context_length` is undocumented, so optional (zed pull request 25606)."""

    id: str
    type: _Text = "llm"
    publisher: _Text = ""
    arch: _Text = ""
    state: Literal["loaded", "not-loaded"]
    loaded_context_length: Tokens = None
    max_context_length: Tokens = None
    quantization: _Quantization = ""
    compatibility_type: _Format = ""


class _V0Listing(BaseModel):
    data: list[object]


_Entry = TypeVar("_Entry", bound=BaseModel)


def read_v1(answer: object) -> list[V1Model]:
    """The models of a `/api/v1/models` answer.

    Raises:
        NotThisApi: it is something else.
    """
    path = "/api/v1/models"
    return list(_entries(_valid(answer, _V1Listing, path).models, V1Model, path))


def read_v0(answer: object) -> list[V0Model]:
    """The models of a `/api/v0/models` answer.

    Raises:
        NotThisApi: it is something else.
    """
    path = "/api/v0/models"
    return list(_entries(_valid(answer, _V0Listing, path).data, V0Model, path))


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
