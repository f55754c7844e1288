"""Says by which vocabulary and template a deployment is counted: by the operator's word, else by the model's family.

Settings that cannot be followed are found at start, and by `doctor`, before a request finds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

from litellm_compaction.config import AUTO_TOKENIZER
from litellm_compaction.errors import CompactionError, ConfigError
from litellm_compaction.tokenizers.families import HEURISTIC, VOCABULARY_ERROR, Family, family_of
from litellm_compaction.tokenizers.registry import FILE_PREFIX, vocabulary
from litellm_compaction.windows.windows import Target, Window

Kind: TypeAlias = Literal["operator", "pack", "stand_in", "heuristic"]
# As `families.py` promises of a near family's template.
_NEAR_ERROR = 0.05
_HOW = (
    "the path of the model's tokenizer.json or of its folder (`hf download` fetches it), or a model's name of a known "
    "family (llama-3.1-8b)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """The vocabulary and the template that count a deployment's prompts.

    Attributes:
        kind: the vocabulary's origin.
        family: counts with it.
    """

    kind: Kind
    family: Family

    @property
    def path(self) -> str:
        """The operator's file; "" if the vocabulary is not from one."""
        name = self.family.vocabulary
        return name.removeprefix(FILE_PREFIX) if name.startswith(FILE_PREFIX) else ""

    @property
    def template(self) -> Literal["package", "formula"]:
        """The chat template's origin; a formula may stand for it."""
        return "package" if self.family.template else "formula"


class Sources:
    """The sources of all deployments.

    Args:
        tokenizer: the global setting; "" or `auto` is the model's family.
    """

    def __init__(self, tokenizer: str = "") -> None:
        self._tokenizer = tokenizer

    def family(self, target: Target, window: Window) -> Family:
        """The family that counts a deployment's prompts."""
        return self.source(target, window.architecture).family

    def source(self, target: Target, architecture: str) -> TokenizerSource:
        """The source that counts a deployment's prompts; its vocabulary may not be loaded yet.

        Args:
            target: the deployment.
            architecture: as LM Studio lists it; "" if it was not asked.
        """
        return _source(target.tokenizer or self._tokenizer, architecture, target.model)


@lru_cache(maxsize=4096)
def _source(written: str, architecture: str, model: str) -> TokenizerSource:
    family = family_of(architecture, model)
    if written in ("", AUTO_TOKENIZER):
        return TokenizerSource(kind="pack" if family.owns_vocabulary else "stand_in", family=family)
    if written == HEURISTIC.name:
        own = replace(HEURISTIC, reasons=family.reasons, rereads=family.rereads)
        return TokenizerSource(kind="heuristic", family=own)
    path = tokenizer_path(written)
    if path is None:
        named = replace(family_of("", written), reasons=family.reasons, rereads=family.rereads)
        return TokenizerSource(kind="operator", family=named)
    counted = replace(
        family,
        vocabulary=f"{FILE_PREFIX}{path}",
        owns_vocabulary=True,
        exact=False,
        single_digits=False,
        error_ratio=max(family.error_ratio, _NEAR_ERROR) if family.template else VOCABULARY_ERROR,
    )
    return TokenizerSource(kind="operator", family=counted)


def check_tokenizer(value: str, place: str) -> None:
    """Makes sure that a `tokenizer:` setting can be followed; loads the file, so that it is there from the start.

    Args:
        value: as written.
        place: how the key is called in errors.

    Raises:
        ConfigError: there is no such file, it cannot be used, or no such model is known.
    """
    if value in (AUTO_TOKENIZER, HEURISTIC.name):
        return
    if value.lower().endswith(".gguf"):
        raise ConfigError(f"{place} = {value!r}: .gguf files are not read any more: write {_HOW}, or leave it out")
    path = tokenizer_path(value)
    if path is None:
        if family_of("", value).name == "unknown":
            raise ConfigError(f"{place} = {value!r}: allowed: {AUTO_TOKENIZER}, {HEURISTIC.name}, {_HOW}")
        return
    try:
        vocabulary(f"{FILE_PREFIX}{path}")
    except CompactionError as error:
        raise ConfigError(f"{place} = {value!r}: {error} Write {_HOW}, or `{AUTO_TOKENIZER}`.") from error


def tokenizer_path(value: str) -> Path | None:
    """The path that a `tokenizer:` setting is; None if it names a model."""
    try:
        path = Path(value).expanduser()
        looks_like_path = "/" in value or "\\" in value or value.lower().endswith(".json") or path.is_dir()
    except (OSError, RuntimeError, ValueError):
        # Odd characters, or no home folder: the reader will say that there is no such file.
        return Path(value)
    return path if looks_like_path else None
