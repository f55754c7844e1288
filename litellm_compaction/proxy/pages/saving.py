"""What the settings form does: it saves or resets, or says why not. Called by `routes.py` for whoever may write."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from litellm_compaction.config import SAME_MODEL
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.proxy.live_settings import Known
from litellm_compaction.proxy.overlay import CHANGEABLE, Overlay, find_problems, parsed
from litellm_compaction.proxy.pages.form import ALL
from litellm_compaction.proxy.pages.overview import Surroundings, revision_of
from litellm_compaction.proxy.pages.visitors import Visitor
from litellm_compaction.proxy.routing import reachable_entries


@dataclass(frozen=True, slots=True)
class Refused:
    """A form that was not accepted: what was entered, and why not.

    Attributes:
        problems: by key; `notice` is for the whole form.
    """

    status: HTTPStatus
    entered: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    notice: str = ""


async def write(around: Surroundings, form: Mapping[str, str], known: Known, visitor: Visitor) -> str | Refused:
    """Changes the settings as a form asks for; gives `saved`, `reset` or `same`, or why not.

    Args:
        around: the running plug-in.
        form: `do`, `revision`, and the settings by key, or under `reset` one key or `*`.
        known: what is in force now.
        visitor: who sent the form; may write.
    """
    entered = {key: form[key].strip() for key in CHANGEABLE if key in form}
    if form.get("revision") != revision_of(known):
        notice = "Somebody else has changed the settings meanwhile. Look at them and save again."
        return Refused(HTTPStatus.CONFLICT, entered=entered, notice=notice)
    is_reset = form.get("do") == "reset"
    overlay = _reset(form, known) if is_reset else _changed(around, entered, known, visitor)
    if isinstance(overlay, Refused):
        return overlay
    if overlay == known.overlay and not known.ignored:
        return "same"
    try:
        await around.live.write(overlay)
    except ConfigError as error:
        # What is left after a reset of one key may contradict the file.
        return Refused(HTTPStatus.UNPROCESSABLE_ENTITY, entered=entered, notice=f"Not saved. {error}")
    except StoreError as error:
        notice = f"Not saved, and nothing has changed: {error}"
        return Refused(HTTPStatus.SERVICE_UNAVAILABLE, entered=entered, notice=notice)
    return "reset" if is_reset else "saved"


def _reset(form: Mapping[str, str], known: Known) -> Overlay:
    key = form.get("reset", "")
    return Overlay() if key == ALL else known.overlay.without([key])


def _changed(around: Surroundings, entered: Mapping[str, str], known: Known, visitor: Visitor) -> Overlay | Refused:
    configured = around.live.configured
    in_force = {key: change.value for key, change in known.overlay.changes.items()}
    problems = find_problems(configured, {**in_force, **entered})
    model = entered.get("pruning_model")
    if model and not _is_model(around, model, known):
        problems["pruning_model"] = f"pruning_model = {model}: not a model of this proxy"
    if problems:
        notice = "Not saved. " + problems.pop("", "See below.")
        return Refused(HTTPStatus.UNPROCESSABLE_ENTITY, entered=entered, problems=problems, notice=notice)
    values = {key: value for key, value in parsed(configured, {**in_force, **entered}).items() if key in entered}
    return known.overlay.changed(configured, values, when_s=time.time(), role=visitor.role)


def _is_model(around: Surroundings, name: str, known: Known) -> bool:
    if name in (SAME_MODEL, known.settings.pruning_model):
        return True
    router = around.router()
    return router is not None and bool(reachable_entries(router, name, {}))
