"""Gathers the page's content, for one visitor: deployments, models, conversations, events, settings.

Servers are asked by the same cached reads as for requests, and none is waited for long.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from litellm_compaction.config import LIVE, SAME_MODEL, Settings, choices
from litellm_compaction.engine import Compactor
from litellm_compaction.errors import CompactionError, ModelNotLoaded, StoreError
from litellm_compaction.events import Event, event_from_json, useless_summarisers
from litellm_compaction.proxy.deployments import DeploymentSelector, GuardedDeployment
from litellm_compaction.proxy.live_settings import Known, LiveSettings, allowed_values, for_deployment
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.turns import Talk, Turns, talks_of, turn_from_json
from litellm_compaction.proxy.page.view import Field, Notice, Row
from litellm_compaction.proxy.report import DeploymentReport, Reporter
from litellm_compaction.proxy.routing import as_entry, router_entries
from litellm_compaction.recall import Lookup
from litellm_compaction.stores import Originals, Store

SHOWN_EVENTS = 200
_LIMIT_S = 2.0
_SAME = "Same as current model (default)"
# LiteLLM's `model_info.mode` of models that write no text.
_NO_TEXT = ("embedding", "image_generation", "rerank", "audio_transcription", "audio_speech", "moderation")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the running plug-in that the page looks at.

    Attributes:
        router: gives LiteLLM's of the moment.
        lookup: of the messages that compactions covered; None if there can be none.
        originals: the same messages.
    """

    live: LiveSettings
    guards: DeploymentSelector
    compactor: Compactor
    store: Store
    turns: Turns
    router: Callable[[], Any]
    lookup: Lookup | None = None
    originals: Originals | None = None


def revision_of(known: Known) -> str:
    """A name of this state of the changes."""
    return hashlib.blake2b((known.text or "").encode(), digest_size=8).hexdigest()


async def rows_for(around: Surroundings, visitor: Visitor) -> list[Row]:
    """The deployments that the visitor may see, in the router's order."""
    router = around.router()
    entries = [entry for entry in router_entries(router) if visitor.may_see(router, str(entry.get("model_name") or ""))]
    found = await asyncio.gather(*(_rows(around, entry, visitor) for entry in entries))
    return [row for rows in found for row in rows]


def models_for(router: Any, rows: Sequence[Row], visitor: Visitor) -> Mapping[str, str]:
    """The models that can be chosen, each with its meaning: every `model_name`, and the loaded ones of wildcards."""
    found: dict[str, str] = {}
    for entry in router_entries(router):
        name, kind = str(entry.get("model_name") or ""), as_entry(entry.get("model_info")).get("mode")
        if name and "*" not in name and kind not in _NO_TEXT and visitor.may_see(router, name):
            found.setdefault(name, str(as_entry(entry.get("litellm_params")).get("model") or ""))
    for row in rows:
        group, model = row.guard.deployment.group, row.report.target.model
        if group.count("*") == 1 and "*" not in model:
            found.setdefault(group.replace("*", model), model)
    return dict(sorted(found.items()))


def fields_for(
    configured: Settings,
    known: Known,
    models: Mapping[str, str],
    *,
    entered: Mapping[str, str],
    problems: Mapping[str, str],
) -> list[Field]:
    """The settings that can be changed; a value that was entered replaces the one in force."""
    fields: list[Field] = []
    for key, live in LIVE.items():
        setting = Settings.model_fields[key]
        value = entered.get(key, str(getattr(known.settings, key)))
        said = str(getattr(configured, key))
        words = choices(setting)
        allowed = "" if words else allowed_values(setting)
        text = live.text or setting.description or ""
        fields.append(
            Field(
                key=key,
                label=live.label,
                description=f"{text} Allowed: {allowed}." if allowed else text,
                value=value,
                configured="the current model" if (key, said) == ("pruning_model", SAME_MODEL) else said,
                is_configured=key in configured.model_fields_set,
                change=known.overlay.changes.get(key),
                options=_models(models, value) if key == "pruning_model" else [(word, word) for word in words],
                problem=problems.get(key, ""),
            )
        )
    return fields


def refused_value(key: str, value: str) -> str:
    """A sentence about a value that a setting cannot have, with the setting's name and unit in the form."""
    setting = Settings.model_fields[key]
    allowed = allowed_values(setting)
    if choices(setting):
        problem = f"is not one of {allowed}"
    elif allowed:
        problem = f"is not a share ({allowed}; 35 % is 0.35)"
    else:
        problem = "is not a model of this proxy"
    return f"{LIVE[key].label}: “{value}” {problem}."


def useless_models(events: Sequence[Event]) -> list[Notice]:
    """Remedies for models whose newest summaries were mostly rejected; `events` as of `events_for`."""
    return [Notice("note", said) for said in useless_summarisers(reversed(events))]


async def events_for(store: Store, visitor: Visitor) -> list[Event]:
    """The newest events that the visitor may see, the newest first."""
    # The store looks for the characters alone.
    stored = await store.events(limit=SHOWN_EVENTS, containing=visitor.tenant_seen)
    events = [event for each in reversed(stored) if (event := event_from_json(each.text)) is not None]
    return [event for event in events if visitor.sees_all or event.tenant == visitor.tenant]


async def talks_for(store: Store, visitor: Visitor) -> list[Talk]:
    """The last conversations that the visitor may see, the most recent first; none of a store that cannot be read."""
    try:
        # The store looks for the characters alone.
        texts = await store.turns(containing=visitor.tenant_seen)
    except StoreError:
        return []
    turns = [turn for text in texts if (turn := turn_from_json(text)) is not None]
    return talks_of(turn for turn in turns if visitor.sees_all or turn.tenant == visitor.tenant)


def _models(models: Mapping[str, str], value: str) -> Sequence[tuple[str, str]]:
    options = {SAME_MODEL: _SAME, **{name: f"{name} ({target})" for name, target in models.items()}}
    options.setdefault(value, f"{value} (not in the list of models)")
    return list(options.items())


async def _rows(around: Surroundings, entry: Mapping[str, Any], visitor: Visitor) -> list[Row]:
    try:
        deployment = around.guards.deployment(entry)
        guard = await asyncio.wait_for(around.guards.guard(deployment), _LIMIT_S)
    except (CompactionError, asyncio.TimeoutError):
        return []
    if guard is None:
        return []
    compactor = around.compactor
    reporter = Reporter(compactor.windows, compactor.sources, compactor.known_ways, limit_s=_LIMIT_S)
    reports = await reporter.reports(guard.deployment, guard.settings)
    return [await _row(around, guard, report, visitor) for report in reports]


async def _row(around: Surroundings, guard: GuardedDeployment, report: DeploymentReport, visitor: Visitor) -> Row:
    written = guard.deployment.settings.model_dump(exclude_none=True, exclude={"mode", "enabled"})
    own = [f"{key}: {value}" for key, value in written.items()]
    name = guard.settings.pruning_model
    if name != SAME_MODEL and (why := await _why_unusable(around, name)):
        own.append(f"pruning_model {name} is not used: {why}")
    if report.model_settings:
        own += [f"in LM Studio: {report.model_settings}", *report.warnings]
    return Row(
        guard=guard,
        report=report,
        state=_state(report, visitor),
        accuracy=around.turns.accuracy(report.target.key),
        own=own,
        conflict=for_deployment(around.live.known.settings, around.live.configured, guard.deployment.settings)[1],
    )


async def _why_unusable(around: Surroundings, name: str) -> str:
    try:
        return await asyncio.wait_for(around.guards.why_unusable(around.router(), name), _LIMIT_S)
    except asyncio.TimeoutError:
        return "its server does not answer"


def _state(report: DeploymentReport, visitor: Visitor) -> str:
    """Says why a report has no window; "" if it has one."""
    if report.window is not None:
        return ""
    if "*" in report.target.model:
        return "of the model that is asked for"
    if isinstance(report.absence, ModelNotLoaded):
        return "not loaded yet"
    if report.absence is None:
        return "its server does not answer"
    # The message names the server, which is not every visitor's business.
    return str(report.absence) if visitor.sees_all else "not known"
