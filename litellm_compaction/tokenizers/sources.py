"""Says by which vocabulary and template a deployment is counted: by the operator's word, else by the model's family."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from litellm_compaction.config import AUTO_TOKENIZER
from litellm_compaction.errors import CompactionError, ConfigError
from litellm_compaction.tokenizers.families import HEURISTIC, NEAR_ERROR, VOCABULARY_ERROR, Family, family_of
from litellm_compaction.tokenizers.registry import FILE_PREFIX, vocabulary
from litellm_compaction.windows.windows import Target, Window

Kind: TypeAlias = Literal["operator", "pack", "stand_in", "heuristic"]
_HOW = (
    "the path of the model's tokenizer.json or of its folder (`hf download` fetches it), or a model's name of a known "
    "family (llama-3.1-8b)"
)


class TokenizerSource(NamedTuple):
    """The family that counts a deployment's prompts, and where its vocabulary is from."""

    kind: Kind
    family: Family

    @property
    def path(self) -> str:
        """The operator's file; "" if the vocabulary is not from one."""
        name = self.family.vocabulary
        return name.removeprefix(FILE_PREFIX) if name.startswith(FILE_PREFIX) else ""


class Sources:
    """The sources of all deployments; `tokenizer` is the global setting: "" or `auto` is the model's family."""

    def __init__(self, tokenizer: str = "") -> None:
        self._tokenizer = tokenizer

    def family(self, target: Target, window: Window) -> Family:
        """The family that counts a deployment's prompts."""
        return self.source(target, window.architecture).family

    def source(self, target: Target, architecture: str) -> TokenizerSource:
        """Its vocabulary may not be loaded yet; `architecture` as LM Studio lists it, "" if it was not asked."""
        return _source(target.tokenizer or self._tokenizer, architecture, target.model)


@lru_cache(maxsize=4096)
def _source(written: str, architecture: str, model: str) -> TokenizerSource:
    family = family_of(architecture, model)
    if written in ("", AUTO_TOKENIZER):
        return TokenizerSource("pack" if family.owns_vocabulary else "stand_in", family)
    path = None if written == HEURISTIC.name else _path(written)
    if path is None:
        named = HEURISTIC if written == HEURISTIC.name else family_of("", written)
        kind: Kind = "heuristic" if named is HEURISTIC else "operator"
        return TokenizerSource(kind, replace(named, reasons=family.reasons, rereads=family.rereads))
    error_ratio = max(family.error_ratio, NEAR_ERROR) if family.template else VOCABULARY_ERROR
    own: dict[str, Any] = {"owns_vocabulary": True, "exact": False, "single_digits": False, "error_ratio": error_ratio}
    return TokenizerSource("operator", replace(family, vocabulary=f"{FILE_PREFIX}{path}", **own))


def check_tokenizer(value: str, place: str) -> None:
    """Makes sure that the `tokenizer:` setting of a `place` can be followed; loads its file. Raises ConfigError."""
    if value in (AUTO_TOKENIZER, HEURISTIC.name):
        return
    if value.lower().endswith(".gguf"):
        raise ConfigError(f"{place} = {value!r}: .gguf files are not read any more: write {_HOW}, or leave it out")
    path = _path(value)
    if path is None:
        if family_of("", value).name == "unknown":
            raise ConfigError(f"{place} = {value!r}: allowed: {AUTO_TOKENIZER}, {HEURISTIC.name}, {_HOW}")
        return
    try:
        vocabulary(f"{FILE_PREFIX}{path}")
    except CompactionError as error:
        raise ConfigError(f"{place} = {value!r}: {error} Write {_HOW}, or `{AUTO_TOKENIZER}`.") from error


def _path(value: str) -> Path | None:
    """The path that a `tokenizer:` setting is; None if it names a model."""
    try:
        path = Path(value).expanduser()
        looks_like_path = "/" in value or "\\" in value or value.lower().endswith(".json") or path.is_dir()
    except (OSError, RuntimeError, ValueError):
        # Odd characters, or no home folder: the reader will say that there is no such file.
        return Path(value)
    return path if looks_like_path else None
