"""Which settings of ours stand in a config file where nobody reads them.

LiteLLM ignores keys that it does not know, so what is misplaced would count as not written: `mode: observe` one level
too high would leave the guard acting. Apart from `startup.py`, which reads it: `doctor` does too, and loads no LiteLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from litellm_compaction.config import Settings

SECTION = "litellm_compaction"
SETTINGS_PLACE = f"callback_settings.{SECTION}"

_HANDLER = f"{SECTION}.handler"
_LIKENESS_RATIO = 0.92
# Where LiteLLM reads nothing for us, or reads it too late (order of settings in LiteLLM 1.106.2).
_OURS = (
    (SECTION,),
    ("general_settings", SECTION),
    ("general_settings", "callback_settings", SECTION),
    ("litellm_settings", SECTION),
    ("litellm_settings", "callback_settings", SECTION),
)
# Words that another callback, or a later LiteLLM, may use for itself.
_PERHAPS_OURS = (
    ("compaction",),
    ("callback_settings", "compaction"),
    ("general_settings", "compaction"),
    ("general_settings", "callback_settings"),
    ("litellm_settings", "compaction_settings"),
    ("litellm_settings", "callback_settings"),
)


class Misplaced(NamedTuple):
    """Where settings stand that are not read; `is_ours` where they can be meant for nobody else."""

    place: str
    is_ours: bool

    @property
    def advice(self) -> str:
        """What to change."""
        return f"settings are not read here: move them to `{SETTINGS_PLACE}` (top level)."


def misplaced(config: Mapping[str, object]) -> Iterator[Misplaced]:
    """Every such place in a config file, as written; each at most once."""
    sure = [*(names for names in _OURS if _has(config, names)), *_beside_our_section(config)]
    yield from (Misplaced(".".join(names), True) for names in sure)
    for names in _PERHAPS_OURS:
        if _has(config, names) and not any(known[: len(names)] == names for known in sure):
            yield Misplaced(".".join(names), False)


def _beside_our_section(config: Mapping[str, object]) -> Iterator[tuple[str, ...]]:
    section = config.get("callback_settings")
    for key in section if isinstance(section, Mapping) else ():
        name = str(key)
        is_like_ours = get_close_matches(name.lower(), (SECTION, _HANDLER), 1, _LIKENESS_RATIO)
        if name != SECTION and (name in Settings.model_fields or is_like_ours):
            yield "callback_settings", name


def _has(config: Mapping[str, object], names: tuple[str, ...]) -> bool:
    found: object = config
    for name in names:
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    return True
