"""Gathers what the page's routes tell one visitor as JSON: settings, models, deployments, events, conversations.

LiteLLM decides with each request whose key it shows; `docs/page.md` lists the rights of each role. Servers are asked by
the same cached reads as for requests, and none is waited for long.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from litellm_compaction.config import LIVE, SAME_MODEL, Settings, choices
from litellm_compaction.core.messages import JsonObject
from litellm_compaction.errors import CompactionError
from litellm_compaction.events import AHEAD, CompactionEvent, Event, event_from_json, event_to_json
from litellm_compaction.proxy.client import note_credential, tenant_of
from litellm_compaction.proxy.litellm_inside import Seam, current_router
from litellm_compaction.proxy.litellm_inside.application import key_owner, may_use
from litellm_compaction.proxy.live_settings import LiveSettings, for_deployment
from litellm_compaction.proxy.report import DeploymentReport, Reporter
from litellm_compaction.proxy.routing import GuardedDeployment, as_entry, router_entries
from litellm_compaction.proxy.service import Service
from litellm_compaction.stores import Store
from litellm_compaction.stores.sqlite import MemoryRows

# LiteLLM refuses a path that it does not know to all but administrators (auth/route_checks.py). A key that may list
# models may look here.
_KNOWN_PATH = "/v1/models"
_LIMIT_S = 2.0
# LiteLLM's `model_info.mode` of models that write text.
_WRITES_TEXT = (None, "chat", "completion", "responses")
_MOST_PLOTTED = 2000
_PLOTTED = ("when_s", "model", "outcome", "phase", "tokens_before", "tokens_after", "window_tokens", "compaction_id")


@dataclass(frozen=True, slots=True)
class Visitor:
    """A client with a valid key: its role ("" if LiteLLM does not say), its tenant as in events, LiteLLM's record."""

    role: str
    tenant: str
    auth: Any

    @property
    def may_write(self) -> bool:
        return self.role == "proxy_admin"

    @property
    def sees_all(self) -> bool:
        return self.role in ("proxy_admin", "proxy_admin_viewer")

    @property
    def tenant_seen(self) -> str:
        """The tenant whose numbers are shown; "" for all."""
        return "" if self.sees_all else self.tenant


async def visitor_of(request: Request) -> Visitor | None:
    """Returns the owner of the key in a request's headers, as LiteLLM sees it; None if it refuses.

    Only a header that a client sets itself counts: neither a cookie nor a browser's password, which another site can
    make a browser send.
    """
    headers = {name: value for name, value in request.headers.items() if name != "cookie"}
    shown = headers.get("authorization", "")
    if shown[:6].lower() == "basic ":
        return None
    # Where a proxy looks for keys in a header of its own, a browser cannot know that.
    own = (Seam.KEY_HEADER.get() or {}).get("litellm_key_header_name")
    beside = {own.lower(): shown} if isinstance(own, str) and shown else {}
    try:
        auth = await key_owner(request.scope, {**beside, **headers}, _KNOWN_PATH)
    except Exception:  # noqa: BLE001 - whatever it raises is a no, such as a ModuleNotFoundError without `prisma`
        return None
    note_credential(headers)
    role, key = getattr(auth, "user_role", None), getattr(auth, "api_key", None)
    if getattr(auth, "is_session_token", False):
        key = getattr(auth, "key_alias", None) or key
    # The metadata that LiteLLM gives this key's requests (litellm_pre_call_utils.py).
    metadata = {f"user_api_key_{name}": getattr(auth, name, None) for name in ("team_id", "user_id")}
    tenant = tenant_of({**metadata, "user_api_key_hash": key})
    return Visitor(role=str(getattr(role, "value", role) or ""), tenant=tenant, auth=auth)


def settings_of(service: Service, visitor: Visitor) -> JsonObject:
    """The settings that can be changed at run time, with what is to be said about them."""
    live = service.live
    known = live.in_force
    notices = {
        f"The store cannot be read: {known.failure}. Nothing can be saved.": known.failure,
        f"The saved changes are ignored, config.yaml holds: {known.ignored}. Save or reset them.": known.ignored,
        "The store is this process's memory: changes end with it.": isinstance(service.store.rows, MemoryRows),
        f"mode is {known.settings.mode}: no request is changed.": known.settings.mode != "guard",
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
        "value": getattr(live.in_force.settings, key),
        "configured": getattr(live.configured, key),
        "is_changed": key in live.in_force.values,
        "options": [SAME_MODEL] if key == "pruning_model" else [*choices(setting)],
    }


async def deployments_of(service: Service, visitor: Visitor) -> JsonObject:
    """The guarded deployments that a visitor may see, and the models that may write summaries, each with its target."""
    router, owner = current_router(), {"user_api_key_auth": visitor.auth}
    entries = [
        entry
        for entry in router_entries(router)
        if visitor.sees_all or may_use(router, str(entry.get("model_name") or ""), owner)
    ]
    rows = [row for rows in await asyncio.gather(*(_rows(service, each, visitor) for each in entries)) for row in rows]
    models = {str(row["model_name"]).replace("*", str(row["model"])): str(row["model"]) for row in rows}
    for entry in reversed(entries):
        if as_entry(entry.get("model_info")).get("mode") in _WRITES_TEXT:
            models[str(entry.get("model_name") or "")] = str(as_entry(entry.get("litellm_params")).get("model") or "")
    return {"deployments": rows, "models": {name: models[name] for name in sorted(models) if name and "*" not in name}}


async def _rows(service: Service, entry: Mapping[str, Any], visitor: Visitor) -> list[JsonObject]:
    """One row, or one for each loaded model of a wildcard; none for a deployment that is not guarded."""
    compactor, guards, why = service.compactor, service.guards, ""
    try:
        guard = await asyncio.wait_for(guards.guard(guards.deployment(entry)), _LIMIT_S)
    except (CompactionError, asyncio.TimeoutError):
        return []
    if guard is None:
        return []
    name = guard.settings.pruning_model
    if name != SAME_MODEL:
        try:
            why = await asyncio.wait_for(guards.why_unusable(current_router(), name), _LIMIT_S)
        except asyncio.TimeoutError:
            why = "its server does not answer"
    notes = [f"pruning_model {name} is not used: {why}"] if why else []
    if conflict := for_deployment(service.live.in_force.settings, service.live.configured, guard.deployment.settings)[
        1
    ]:
        notes.append(f"Changes made here do not reach it: {conflict}")
    reporter = Reporter(compactor.windows, compactor.sources, compactor.known_ways, limit_s=_LIMIT_S)
    reports = await reporter.reports(guard.deployment, guard.settings)
    return [_row(guard, report, visitor, notes) for report in reports]


def _row(guard: GuardedDeployment, report: DeploymentReport, visitor: Visitor, notes: list[str]) -> JsonObject:
    window, source = report.window, report.source
    # A path is not everybody's business.
    hidden = {"enabled"} if visitor.sees_all else {"enabled", "tokenizer"}
    written = guard.deployment.settings.model_dump(exclude_unset=True, exclude=hidden).items()
    notes = [*(f"{key}: {value}" for key, value in written), *notes]
    if report.model_settings:
        notes += [f"in LM Studio: {report.model_settings}", *report.warnings]
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
    turns: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if isinstance(event, CompactionEvent) and (record := event.compaction_id):
            first = firsts.setdefault(record, firsts.get(event.continues_id, record))
            if event.outcome not in AHEAD:
                turns.setdefault(first, []).append({name: getattr(event, name) for name in _PLOTTED})
    newest = sorted(turns, key=lambda first: turns[first][-1]["when_s"], reverse=True)
    return [{"id": first, "turns": turns[first]} for first in newest]
