"""How a tokenizer source is called in reports. Called by `doctor` and `count`."""

from __future__ import annotations

from collections.abc import Mapping

from litellm_compaction.tokenizers.registry import LoadCost
from litellm_compaction.tokenizers.sources import Kind, TokenizerSource

_WORDS: Mapping[Kind, str] = {
    "operator": "{}, as the operator wrote",
    "lm_studio_file": "LM Studio's file {}",
    "server_file": "the server's own file {}",
    "pack": "{}, the model's own from this package",
    "download": "{}, downloaded from Hugging Face",
    "stand_in": "{}, a stand-in that errs high until calibrated by usage",
    "heuristic": "four characters a token, as the operator wrote",
}


def tokenizer_name(source: TokenizerSource) -> str:
    """The file, or the name of the vocabulary."""
    return str(source.path) if source.path is not None else source.family.vocabulary


def source_words(source: TokenizerSource) -> str:
    """Where the vocabulary comes from, and what is to be thought of it."""
    return _WORDS[source.kind].format(tokenizer_name(source))


def template_words(source: TokenizerSource) -> str:
    """How the tokens around the texts are known."""
    if source.template == "formula":
        return "estimated by a formula"
    return "the file's own" if source.template == "file" else f"{source.family.template}, from this package"


def cost_words(cost: LoadCost | None) -> str:
    """What loading the vocabulary has cost, to be put behind its name; "" where it was not loaded."""
    if cost is None:
        return ""
    memory = f", {cost.memory_bytes / 2**20:.0f} MB" if cost.memory_bytes is not None else ""
    return f" (loaded in {cost.load_ms / 1e3:.1f} s{memory})"
