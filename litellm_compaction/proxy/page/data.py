"""Gathers what the page's routes tell one visitor as JSON: settings, models, deployments, events, conversations.

Servers are asked by the same cached reads as for requests, and none is waited for long.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from litellm_compaction.config import LIVE, SAME_MODEL, Settings, choices
from litellm_compaction.core.messages import JsonObject
from litellm_compaction.engine import Compactor
from litellm_compaction.errors import CompactionError
from litellm_compaction.events import AHEAD, CompactionEvent, Event, event_from_json, event_to_json
from litellm_compaction.proxy.live_settings import LiveSettings, for_deployment
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.report import DeploymentReport, Reporter
from litellm_compaction.proxy.routing import DeploymentSelector, GuardedDeployment, as_entry, router_entries
from litellm_compaction.recall import Lookup
from litellm_compaction.stores import Originals, Store
from litellm_compaction.stores.rows import MemoryRows

_LIMIT_S = 2.0
# LiteLLM's `model_info.mode` of models that write no text.
_NO_TEXT = ("embedding", "image_generation", "rerank", "audio_transcription", "audio_speech", "moderation")
_MOST_PLOTTED = 2000
_PLOTTED = ("when_s", "model", "outcome", "phase", "tokens_before", "tokens_after", "window_tokens", "compaction_id")


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
        "text": LIVE[key].text or " ".join((setting.description or "").split()),
        "value": getattr(live.settings, key),
        "configured": getattr(live.configured, key),
        "is_changed": key in live.values,
        "options": [SAME_MODEL] if key == "pruning_model" else [*choices(setting)],
    }


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
    written = own.model_dump(exclude_unset=True, exclude=hidden).items()
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
        "goes_on": ", ".join(filter(None, (report.carrier, report.goes_on))),
        "compact_ratio": guard.settings.pre_request_ratio,
        "carry_ratio": guard.settings.streaming_ratio,
        "notes": notes,
    }


def _state(report: DeploymentReport, visitor: Visitor) -> str:
    """Says why a report has no window; which server that is, is not every visitor's business."""
    if "*" in report.target.model:
        return "of the model that is asked for"
    if report.absence is None:
        return "its server does not answer"
    return str(report.absence) if visitor.sees_all else report.absence.for_clients


def fields_of(event: Event) -> JsonObject:
    """An event without the fingerprint of its owner."""
    return {name: value for name, value in json.loads(event_to_json(event)).items() if name != "tenant"}


async def events_of(store: Store, visitor: Visitor, limit: int) -> JsonObject:
    """The newest events that a visitor may see, the newest first."""
    return {"events": [fields_of(event) for event in reversed(await _events(store, visitor, limit))]}


async def conversations_of(store: Store, visitor: Visitor) -> JsonObject:
    """The conversations that a visitor may see, from the first compaction of each on, the most recent first."""
    return {"conversations": await asyncio.to_thread(_conversations, await _events(store, visitor, _MOST_PLOTTED))}


async def _events(store: Store, visitor: Visitor, limit: int) -> list[Event]:
    # The store looks for the characters alone.
    stored = await store.events(limit=limit, containing=visitor.tenant_seen)
    events = await asyncio.to_thread(lambda: [*map(event_from_json, (row.text for row in stored))])
    return [event for event in events if event is not None and visitor.tenant_seen in ("", event.tenant)]


def _conversations(events: Iterable[Event]) -> list[JsonObject]:
    """A conversation is known by its records, of which each goes on from the one before it."""
    firsts: dict[str, str] = {}
    talks: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if isinstance(event, CompactionEvent) and (record := event.compaction_id):
            first = firsts.setdefault(record, firsts.get(event.continues_id, record))
            if event.outcome not in AHEAD:
                talks.setdefault(first, []).append({name: getattr(event, name) for name in _PLOTTED})
    newest = sorted(talks.items(), key=lambda talk: talk[1][-1]["when_s"], reverse=True)
    return [{"id": first, "turns": turns} for first, turns in newest]
