"""Model families: which vocabulary and which template costs stand for a model, and how it is told not to think.

The tables are data (`families.toml`). Summaries and prunings ask for no thinking by the model's own switch, since LM
Studio takes `reasoning_effort` and does nothing with it (its bugs 988, 1990, 2413).
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Another chat template than a name's own, a vocabulary with nearly its template, or only the vocabulary.
_RETRAINED_ERROR, NEAR_ERROR, VOCABULARY_ERROR = 0.1, 0.05, 0.15
# Names may come from clients, and patterns such as `qwen-?2.*vl` look at each of their parts again and again.
_MAX_NAME_CHARS = 256


class Costs(NamedTuple):
    """Tokens of a chat template around the texts: about, neither high nor low."""

    message: int = 6
    request: int = 16
    call: int = 16
    tool: int = 10
    tools: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A group of models that count alike: its values, of which `families.toml` says what they are by default.

    Attributes:
        template: the name of the chat template that is rendered (`templates/`); "" if there is none at hand.
        owns_vocabulary: the vocabulary is the model's own, or so near that all kinds of text fit.
        exact: the vocabulary is the model's own and the template, or its costs, are known.
        default_system_tokens: what it adds when the client sends no system message.
        image_tokens: one part that is not text, at the usual upper limit of its size.
        image_patch_px: pixels on a side of what one image token sees; 0 if every image costs the limit.
        rereads: a server reads a whole prompt of it again after any change (sliding windows, running states).
        error_ratio: before its server has said a number, true count ≤ count × (1 + this).
        load: of the model, as its window has it: what its server has counted holds for one.
    """

    name: str
    vocabulary: str = "cl100k_base"
    template: str = ""
    owns_vocabulary: bool = False
    exact: bool = False
    reasons: bool = False
    single_digits: bool = False
    costs: Costs = field(default_factory=Costs)
    default_system_tokens: int = 0
    image_tokens: int = 4096
    image_patch_px: int = 14
    rereads: bool = False
    error_ratio: float = 0.35
    load: int = 0


_TABLES: dict[str, Any] = tomllib.loads((resources.files(__package__) / "families.toml").read_text("utf-8"))


def _families() -> dict[str, Family]:
    """Each with the values of the one that it is `like`, which stands before it."""
    families: dict[str, Family] = {}
    for entry, row in _TABLES["families"].items():
        own = {**row, "costs": Costs(*row["costs"])} if "costs" in row else dict(row)
        families[entry] = replace(families[own.pop("like")], **own) if "like" in own else Family(**own)
    return families


_FAMILIES = _families()
HEURISTIC = _FAMILIES["heuristic"]
# In order: the first that matches wins.
_ARCHITECTURES, _NAMES = (
    [(re.compile(pattern), _FAMILIES[entry]) for pattern, entry in _TABLES[key]] for key in ("architectures", "names")
)
_SWITCHES = [(re.compile(pattern), switch) for pattern, switch in _TABLES["no_thinking_switches"]]
_RETRAINED, _REASONS, _ANSWERS_AT_ONCE, _REREADS = (
    re.compile("|".join(_TABLES[key])) for key in ("retrained", "reasons", "answers_at_once", "rereads")
)


@lru_cache(maxsize=1024)
def family_of(architecture: str, model: str) -> Family:
    """The family of a model: by LM Studio's architecture if that is telling, else by name, else `unknown`.

    The architecture is "" when it was not asked. A publisher before a slash counts only if the rest says nothing.
    """
    plain = re.sub(r"[^a-z0-9]", "", architecture[:_MAX_NAME_CHARS].casefold())
    name = _plain(model)
    own_name = name.rpartition("/")[2]
    told = next((each for pattern, each in _ARCHITECTURES if pattern.search(plain)), None)
    named = (each for text in (own_name, name) for pattern, each in _NAMES if pattern.search(text))
    family = next((each for each in named if told is None or each.name == told.name), told or _FAMILIES["unknown"])
    if family.template and _RETRAINED.search(name):
        family = replace(family, exact=False, error_ratio=max(family.error_ratio, _RETRAINED_ERROR))
    thinks = family.name == "gpt-oss" or _REASONS.search(name) is not None
    return replace(
        family,
        reasons=thinks and _ANSWERS_AT_ONCE.search(name) is None,
        rereads=_REREADS.match(plain or re.sub(r"[^a-z0-9]", "", own_name)) is not None,
    )


def _plain(model: str) -> str:
    return model[-_MAX_NAME_CHARS:].casefold().replace("_", "-")


@lru_cache(maxsize=1024)
def no_thinking_switch(model: str) -> str:
    """The end of a user message for a model that must not think; "" if it has no such switch, or does not think."""
    name = _plain(model)
    return next((switch for pattern, switch in _SWITCHES if pattern.search(name)), "")
