"""Gathers what the page's routes tell one visitor as JSON: settings, models, deployments, events.

Servers are asked by the same cached reads as for requests, and none is waited for long.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from litellm_compaction.config import LIVE, SAME_MODEL, Settings, choices
from litellm_compaction.core.messages import JsonObject
from litellm_compaction.engine import Compactor
from litellm_compaction.errors import CompactionError, ModelNotLoaded
from litellm_compaction.events import Event, event_from_json, event_to_json, useless_summarisers
from litellm_compaction.proxy.deployments import DeploymentSelector, GuardedDeployment
from litellm_compaction.proxy.live_settings import LiveSettings, for_deployment
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.report import DeploymentReport, Reporter
from litellm_compaction.proxy.routing import as_entry, router_entries
from litellm_compaction.recall import Lookup
from litellm_compaction.stores import Originals, Store
from litellm_compaction.stores.rows import MemoryRows

_LIMIT_S = 2.0
# LiteLLM's `model_info.mode` of models that write no text.
_NO_TEXT = ("embedding", "image_generation", "rerank", "audio_transcription", "audio_speech", "moderation")
_KEYS = re.compile(rf"\b(?:{'|'.join(LIVE)})\b")
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the running plug-in that the page looks at; `lookup` and `originals` are None if none are kept."""

    live: LiveSettings
    guards: DeploymentSelector
    compactor: Compactor
    store: Store
    router: Callable[[], Any]
    lookup: Lookup | None = None
    originals: Originals | None = None


def settings_of(around: Surroundings, visitor: Visitor) -> JsonObject:
    """The settings that can be changed at run time, with what is to be said about them."""
    live = around.live
    notices = {
        f"The store cannot be read: {live.failure}. Nothing can be saved.": live.failure,
        f"The saved changes are ignored, config.yaml holds: {live.ignored}. Save or reset them.": live.ignored,
        "The store is this process's memory: changes end with it.": isinstance(around.store.rows, MemoryRows),
        f"mode is {live.settings.mode}: no request is changed.": live.settings.mode != "guard",
    }
    return {
        "role": visitor.role,
        "may_write": visitor.may_write,
        "sees_all": visitor.sees_all,
        "notices": [words for words, holds in notices.items() if holds],
        "settings": [_field(live, key) for key in LIVE],
    }


def _field(live: LiveSettings, key: str) -> JsonObject:
    setting = Settings.model_fields[key]
    return {
        "key": key,
        "label": LIVE[key].label,
        "text": LIVE[key].text or setting.description or "",
        "value": getattr(live.settings, key),
        "configured": getattr(live.configured, key),
        "is_changed": key in live.values,
        "options": [SAME_MODEL] if key == "pruning_model" else [*choices(setting)],
        "allowed": _allowed(key),
    }


def _allowed(key: str) -> str:
    """What a setting may be, for people."""
    setting = Settings.model_fields[key]
    limits = [(word, getattr(part, name, None)) for part in setting.metadata for name, word in _LIMITS.items()]
    numbers = ", ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)
    words = ", ".join(choices(setting)) or "a model of this proxy"
    return f"a share {numbers} (35 % is 0.35)" if numbers else words


def worded(problems: Mapping[str, str], values: JsonObject) -> dict[str, str]:
    """Returns a sentence for each setting that problems name.

    Args:
        problems: as `WrongValues` has them; "" marks each setting that its text names.
        values: that were refused, by key.
    """
    said: dict[str, str] = {}
    for key, problem in problems.items():
        if key in LIVE:
            said[key] = f"{LIVE[key].label}: “{str(values.get(key))[:100]}” is not {_allowed(key)}."
        else:
            text = _KEYS.sub(lambda name: f"“{LIVE[name[0]].label}”", f"{key} {problem}.".strip())
            said |= dict.fromkeys(_KEYS.findall(problem) or [key], text)
    return said


async def deployments_of(around: Surroundings, visitor: Visitor) -> JsonObject:
    """The guarded deployments that a visitor may see, and the models that may write summaries, each with its target."""
    router = around.router()
    entries = [entry for entry in router_entries(router) if visitor.may_see(router, str(entry.get("model_name") or ""))]
    rows = [row for rows in await asyncio.gather(*(_rows(around, entry, visitor) for entry in entries)) for row in rows]
    models: dict[str, str] = {}
    for entry in entries:
        name, kind = str(entry.get("model_name") or ""), as_entry(entry.get("model_info")).get("mode")
        if name and "*" not in name and kind not in _NO_TEXT:
            models.setdefault(name, str(as_entry(entry.get("litellm_params")).get("model") or ""))
    for row in rows:
        group, model = str(row["model_name"]), str(row["model"])
        if group.count("*") == 1 and "*" not in model:
            models.setdefault(group.replace("*", model), model)
    return {"deployments": rows, "models": dict(sorted(models.items()))}


async def _rows(around: Surroundings, entry: Mapping[str, Any], visitor: Visitor) -> list[JsonObject]:
    """One row, or one for each loaded model of a wildcard; none for a deployment that is not guarded."""
    try:
        guard = await asyncio.wait_for(around.guards.guard(around.guards.deployment(entry)), _LIMIT_S)
    except (CompactionError, asyncio.TimeoutError):
        return []
    if guard is None:
        return []
    compactor, name, why = around.compactor, guard.settings.pruning_model, ""
    if name != SAME_MODEL:
        try:
            why = await asyncio.wait_for(around.guards.why_unusable(around.router(), name), _LIMIT_S)
        except asyncio.TimeoutError:
            why = "its server does not answer"
    reporter = Reporter(compactor.windows, compactor.sources, compactor.known_ways, limit_s=_LIMIT_S)
    reports = await reporter.reports(guard.deployment, guard.settings)
    notes = [f"pruning_model {name} is not used: {why}"] if why else []
    return [_row(around.live, guard, report, visitor, notes) for report in reports]


def _row(
    live: LiveSettings, guard: GuardedDeployment, report: DeploymentReport, visitor: Visitor, notes: list[str]
) -> JsonObject:
    window, source, own = report.window, report.source, guard.deployment.settings
    # A path is not everybody's business.
    hidden = {"enabled"} if visitor.sees_all else {"enabled", "tokenizer"}
    written = own.model_dump(exclude_none=True, exclude=hidden).items()
    notes = [*(f"{key}: {value}" for key, value in written), *notes]
    if report.model_settings:
        notes += [f"in LM Studio: {report.model_settings}", *report.warnings]
    if conflict := for_deployment(live.settings, live.configured, own)[1]:
        notes.append(f"Changes made here do not reach it: {conflict}")
    kind = "own vocabulary" if source is not None and source.family.owns_vocabulary else "stand-in"
    return {
        "model_name": guard.deployment.group,
        "model": report.target.model,
        "window_tokens": 0 if window is None else window.tokens,
        "window_source": "" if window is None else window.source,
        "parallel": 0 if window is None else window.parallel,
        "state": "" if window is not None else _state(report, visitor),
        "counts_by": "" if source is None else f"{source.family.name} ({kind})",
        "goes_on": ", ".join((report.carrier, *report.standing.ways[:1])),
        "goes_on_by": report.standing.in_words(),
        "notes": [*notes],
    }


def _state(report: DeploymentReport, visitor: Visitor) -> str:
    """Says why a report has no window."""
    if "*" in report.target.model:
        return "of the model that is asked for"
    if isinstance(report.absence, ModelNotLoaded):
        return "not loaded yet"
    if report.absence is None:
        return "its server does not answer"
    # The message names the server, which is not every visitor's business.
    return str(report.absence) if visitor.sees_all else "not known"


def fields_of(event: Event) -> JsonObject:
    """An event without the fingerprint of its owner."""
    return {name: value for name, value in json.loads(event_to_json(event)).items() if name != "tenant"}


async def events_of(store: Store, visitor: Visitor, limit: int) -> JsonObject:
    """The newest events that a visitor may see, the newest first, and remedies for models that write no summaries."""
    # The store looks for the characters alone.
    stored = await store.events(limit=limit, containing=visitor.tenant_seen)
    events = [event for row in stored if (event := event_from_json(row.text)) is not None]
    events = [event for event in events if visitor.tenant_seen in ("", event.tenant)]
    return {"events": [fields_of(event) for event in reversed(events)], "advice": [*useless_summarisers(events)]}
