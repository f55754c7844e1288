"""A family that can be counted with on this machine, whatever has happened to the files of its vocabulary.

Called by `counter.py`: a damaged pack must not refuse a request, and must not pass for an exact count either.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from litellm_compaction.errors import CompactionError
from litellm_compaction.models.families import FORMULA_ERROR, Family, stand_in
from litellm_compaction.models.templates import is_compiled, template
from litellm_compaction.models.tokenizers import is_broken, is_loaded, vocabulary

logger = logging.getLogger("litellm_compaction")

_broken_templates: set[str] = set()


async def usable_soon(family: Family) -> Family:
    """As `usable`; what is not loaded yet is loaded in a thread."""
    family = _without_broken(family)
    return family if _is_ready(family) else await asyncio.to_thread(usable, family)


def usable(family: Family) -> Family:
    """The family with its vocabulary loaded, or what stands in for it: 0.1–2 s the first time. Never raises."""
    family = _without_broken(family)
    while not _is_ready(family):
        _load(family)
        family = _without_broken(family)
    return family


def _is_ready(family: Family) -> bool:
    return is_loaded(family.vocabulary) and all(map(is_compiled, _templates(family)))


def _templates(family: Family) -> list[str]:
    return [name for name in (family.template, family.tool_template) if name]


def _without_broken(family: Family) -> Family:
    while is_broken(family.vocabulary):
        family = stand_in(family)
    if _broken_templates and any(name in _broken_templates for name in _templates(family)):
        error_ratio = max(FORMULA_ERROR, family.error_ratio)
        return replace(family, template="", tool_template="", exact=False, error_ratio=error_ratio)
    return family


def _load(family: Family) -> None:
    """Loads what is missing, or notes once that it is broken."""
    try:
        vocabulary(family.vocabulary)
    except CompactionError as error:
        logger.warning("vocabulary family=%s counted with a stand-in that errs high: %s", family.name, error)
        return
    for name in _templates(family):
        _load_template(name, family)


def _load_template(name: str, family: Family) -> None:
    try:
        template(name)
    except (KeyError, OSError, ValueError) as error:
        _broken_templates.add(name)
        logger.warning(
            "template family=%s counted by a formula: %s cannot be read (%s); reinstall litellm-compaction",
            family.name,
            name,
            type(error).__name__,
        )
