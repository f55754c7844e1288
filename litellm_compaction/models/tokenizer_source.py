"""What counts a deployment's prompts, and which family that makes of the model's.

Chosen by `sources.py`, read by whoever reports it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from litellm_compaction.models.families import FORMULA_ERROR, Family
from litellm_compaction.models.tokenizer_files import TokenizerFile

Kind: TypeAlias = Literal["operator", "lm_studio_file", "server_file", "pack", "download", "stand_in", "heuristic"]

# As `families.py` promises of a near family's template.
_NEAR_ERROR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """What counts a deployment's prompts.

    Attributes:
        kind: where the vocabulary comes from.
        family: counts with it.
        path: of the file; None where the vocabulary is not from one.
        failures: what is wrong with the sources that should have come before it, and what to do.
    """

    kind: Kind
    family: Family
    path: Path | None = None
    failures: tuple[str, ...] = ()

    @property
    def template(self) -> Literal["file", "package", "formula"]:
        """Whether the chat template is the file's, this package's, or a formula stands for it."""
        if not self.family.template:
            return "formula"
        return "file" if self.family.template.startswith("file:") else "package"


def with_file(base: Family, file: TokenizerFile) -> Family:
    """The family counted with a file: exactly, where the file has the template too.

    Args:
        base: its costs stand for what the template refuses.
    """
    own = replace(
        base,
        vocabulary=file.vocabulary,
        template=file.template,
        tool_template=file.tool_template,
        owns_vocabulary=True,
        exact=True,
        text_ratio=1.0,
        single_digits=False,
        error_ratio=0.02,
    )
    if file.template:
        return own
    error_ratio = max(base.error_ratio, _NEAR_ERROR) if base.template else FORMULA_ERROR
    return replace(own, template=base.template, exact=False, error_ratio=error_ratio)


def bundled(family: Family) -> TokenizerSource:
    """The family as this package counts it, with its own vocabulary or a stand-in."""
    return TokenizerSource(kind="pack" if family.owns_vocabulary else "stand_in", family=family)
