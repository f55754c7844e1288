"""`litellm-compaction doctor`: is this config file going to do what its author expects?

Only servers that are LM Studio by name or lie in a local network are asked, and those that an operator opted in
(`proxy/routing.py` has the rule); hosted providers never are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import httpx

from litellm_compaction.cli.config_file import ConfigFile, read_config, shipped_config
from litellm_compaction.cli.running import Running, running_up
from litellm_compaction.cli.servers import Probe, probe
from litellm_compaction.config import SAME_MODEL, Settings, settings_from
from litellm_compaction.engine import KnownWays, Standing, shares_context
from litellm_compaction.errors import (
    CompactionError,
    ConfigError,
    ModelNotLoaded,
    ServerUnavailable,
    StoreError,
)
from litellm_compaction.events import event_from_json, harmless, useless_summarisers
from litellm_compaction.places import is_redis
from litellm_compaction.proxy.config_check import (
    API_BASE_VARIABLE,
    Finding,
    entry_name,
    note,
    problem,
)
from litellm_compaction.proxy.litellm_api import redis_of
from litellm_compaction.proxy.litellm_router import LACKS
from litellm_compaction.proxy.live_settings import KEY as CHANGED_SETTINGS
from litellm_compaction.proxy.live_settings import overlay_from_json
from litellm_compaction.proxy.report import (
    DeploymentReport,
    Reporter,
    source_words,
    targets_of,
    template_words,
    tokenizer_name,
    why_unasked,
)
from litellm_compaction.proxy.routing import (
    Deployment,
    as_entry,
    asked_deployment_of,
    deployment_of,
    is_local_address,
    unknown_model,
)
from litellm_compaction.stores import Store, memory_store, open_existing
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.windows.fetch import KeyRefused, NotThisApi, without_userinfo
from litellm_compaction.windows.lmstudio import DEFAULT_API_BASE, Listing, list_models, match, server_root
from litellm_compaction.windows.lmstudio_rpc import LMStudioRpc
from litellm_compaction.windows.other_servers import SERVERS, Served, list_served
from litellm_compaction.windows.windows import Windows, server_of

_LIMIT_S = 3.0
# Longer than `Windows` waits for any server.
_REPORT_LIMIT_S = 60.0
_HERE = Path("config.yaml")
# `--num_workers` and its default (litellm/proxy/proxy_cli.py, 1.106.2).
_WORKERS_VARIABLES = ("NUM_WORKERS", "DEFAULT_NUM_WORKERS_LITELLM_PROXY")
_SOURCES = {
    **{name: server.says for name, server in SERVERS.items()},
    "operator": "the config file",
    "max_input_tokens": "model_info.max_input_tokens",
    "model_map": "LiteLLM's model map",
    "default": "an assumption",
}


# More places of which the same is said are counted.
_MOST_NAMED = 3


def doctor(*, config: Path | None, as_json: bool, environ: Mapping[str, str], probe: bool = False) -> int:
    """Prints the report; 0 when there is no problem, else 1.

    Args:
        config: None is that of an `up` that runs, else config.yaml in the current folder, else the shipped one.
        probe: loaded models are sent two tiny requests, whose tokens are compared with our count.

    Raises:
        ConfigError: the file cannot be read.
    """
    live = running_up(environ)
    file = read_config(config or _default_config(live))
    if live is not None and live.api_base and file.models_by_environment and not environ.get(API_BASE_VARIABLE):
        environ = {**environ, API_BASE_VARIABLE: live.api_base}
    rows, from_servers = asyncio.run(_examined(file, environ, probes=probe))
    findings = (*file.findings(environ), *from_servers)
    if live is not None:
        findings = (*findings, *_of_up(live, file))
    has_problem = any(finding.level == "problem" for finding in findings)
    if as_json:
        report = {
            "config": str(file.path),
            "ok": not has_problem,
            "deployments": [row.document() for row in rows],
            "findings": [{name: getattr(each, name) for name in ("level", "place", "message")} for each in findings],
        }
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print("\n".join(map(harmless, _lines(file, rows, findings))))
    return 1 if has_problem else 0


def _default_config(live: Running | None) -> Path:
    if live is not None:
        return Path(live.config)
    return _HERE if _HERE.is_file() else shipped_config()


def _of_up(live: Running, file: ConfigFile) -> Iterator[Finding]:
    """What runs; a file that it does not run, and answers of no model, are told."""
    yield note("up", f"it runs at {live.base_url} with {live.config}.")
    if file.path != Path(live.config):
        yield note("up", f"{file.path} is looked at, and is not what runs.")
    if live.is_simulated:
        yield note("up", "a SIMULATOR answers its requests, not LM Studio: the answers are canned, of no real model.")


def problems_at_servers(file: ConfigFile, environ: Mapping[str, str]) -> list[Finding]:
    """The problems that `file.findings` cannot see; each server has a few seconds to answer."""
    _, findings = asyncio.run(_examined(file, environ, probes=False))
    return [finding for finding in findings if finding.level == "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One deployment, or one loaded model of a wildcard.

    Attributes:
        name: its `model_name`.
        guarded, reachable, loaded: None if the server was not asked, or did not say.
        server: its address without credentials; "" if it was not asked.
        api: version of LM Studio's API, or the name of another server's; "" if it was not asked.
        report: None if nothing more is known.
    """

    name: str
    model: str
    guarded: bool | None
    why: str
    server: str = ""
    reachable: bool | None = None
    api: str = ""
    loaded: bool | None = None
    report: DeploymentReport | None = None
    probes: tuple[Probe, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def place(self) -> str:
        """Its name in findings, with the model if a wildcard has several."""
        return f"{self.name} → {self.model}" if "*" in self.name and "*" not in self.model else self.name

    def with_problem(self, message: str, *, passes: bool = False) -> _Row:
        return replace(self, findings=(*self.findings, problem(self.name, message, passes=passes)))

    @property
    def parallel(self) -> int | None:
        """The number of requests that share its window; None if no server says."""
        window = self.report.window if self.report is not None else None
        is_told = window is not None and (window.source in SERVERS or window.source.startswith("api/"))
        return window.parallel if window is not None and is_told else None

    def document(self) -> dict[str, object]:
        report = self.report
        window, source = (report.window, report.source) if report is not None else (None, None)
        standing = report.standing if report is not None else Standing()
        return {
            **{name: getattr(self, name) for name in ("name", "model", "guarded", "why", "server", "reachable", "api")},
            "loaded": self.loaded,
            "window_tokens": window.tokens if window is not None else None,
            "window_source": window.source if window is not None else "",
            "parallel": self.parallel,
            "architecture": report.architecture if report is not None else "",
            "family": source.family.name if source is not None else "",
            "tokenizer": tokenizer_name(source) if source is not None else "",
            "tokenizer_exact": source.family.exact if source is not None else None,
            "tokenizer_source": source.kind if source is not None else "",
            "tokenizer_words": source_words(source) if source is not None else "",
            "template_words": template_words(source) if source is not None else "",
            "model_settings": report.model_settings if report is not None else "",
            "probes": [asdict(each) for each in self.probes],
            "carrier": report.carrier if report is not None else "",
            "ways": standing.ways,
            "gone_on": standing.gone_on,
        }


async def _examined(file: ConfigFile, environ: Mapping[str, str], *, probes: bool) -> tuple[list[_Row], list[Finding]]:
    environ = {**environ, API_BASE_VARIABLE: environ.get(API_BASE_VARIABLE) or DEFAULT_API_BASE}
    try:
        settings = settings_from(file.settings).with_store(environ)
    except ConfigError:
        # `check_config` reports it.
        settings = settings_from(None)
    async with contextlib.AsyncExitStack() as stack:
        # The environment's web proxy must not be asked for a server on this machine or network.
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        windows = Windows(cache_s=60.0, http=http, timeout_s=_LIMIT_S, rpc=LMStudioRpc.of(settings))
        stack.push_async_callback(windows.aclose)
        store = _store(file, settings, environ)
        stack.push_async_callback(store.aclose)
        reporter = Reporter(
            windows,
            # A file that cannot be used becomes a finding.
            Sources.of(settings, on_failure=lambda _: None),
            KnownWays(),
            limit_s=_REPORT_LIMIT_S,
            is_patient=True,
            environ=environ,
        )
        examiner = _Examiner(
            http=http, windows=windows, settings=settings, reporter=reporter, environ=environ, probes=probes
        )
        found = await asyncio.gather(
            *(examiner.examine(entry, entry_name(entry, index)) for index, entry in enumerate(file.deployments))
        )
        rows = [row for some in found for row in some]
        findings = [finding for row in rows for finding in row.findings]
        findings += _sharing(rows, settings, environ)
        for name in _pruning_models(file, settings):
            findings += await examiner.pruning_model(file, name)
        findings += [finding async for finding in _of_store(store, settings)]
    if rows and all(row.guarded is False for row in rows):
        findings.append(
            problem("model_list", "no deployment is guarded: add an lm_studio/… one, or opt one in (see each reason).")
        )
    return rows, findings


def _sharing(rows: Sequence[_Row], settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """A note if several worker processes would share one context; their number is known if a variable says it."""
    names = [row.name for row in rows if row.guarded and shares_context(settings.admission, row.parallel or 1)]
    number = next((environ[name] for name in _WORKERS_VARIABLES if environ.get(name)), "1")
    if names and settings.store.startswith("memory:") and number.isdecimal() and int(number) > 1:
        yield note(
            ", ".join(dict.fromkeys(names)),
            f"their requests share one context, and room in it is reserved within each of the {number} workers only: "
            "set `store: sqlite://`, which they share, or start the proxy with one worker.",
        )


def _pruning_models(file: ConfigFile, settings: Settings) -> list[str]:
    """The names of other models that write summaries, as far as the file has them; each once."""
    sections = [as_entry(as_entry(entry.get("model_info")).get("compaction")) for entry in file.deployments]
    named = (settings.pruning_model, *(section.get("pruning_model") for section in sections))
    names = dict.fromkeys(name for name in named if isinstance(name, str) and name)
    return [name for name in names if name != SAME_MODEL and not unknown_model(file.data, name)]


def _store(file: ConfigFile, settings: Settings, environ: Mapping[str, str]) -> Store:
    """The proxy's store; an empty one if that cannot be seen from here."""
    ttl_s, max_bytes = settings.store_ttl_s, settings.store_max_bytes
    try:
        return open_existing(
            settings.store, ttl_s=ttl_s, max_bytes=max_bytes, environ=environ, redis=redis_of(file.data)
        )
    except (ConfigError, StoreError):
        return memory_store(ttl_s=ttl_s, max_bytes=max_bytes)


async def _of_store(store: Store, settings: Settings) -> AsyncIterator[Finding]:
    """Faults of a Redis that machines share, and the models whose summaries are useless, by the history."""
    if is_redis(settings.store):
        from litellm_compaction.stores.redis import RedisRows

        assert isinstance(store.rows, RedisRows), "the store of this URL"  # noqa: S101
        try:
            server = await store.rows.about()
        except StoreError as error:
            todo = "start it, or correct `store`; requests go on with the memory of each process meanwhile"
            yield problem("store", f"{error}: {todo}.", passes=True)
            return
        if server.is_too_old:
            yield problem("store", f"Redis {server.version} has no streams: Redis 5 or newer is needed.")
        if server.is_replica:
            yield problem("store", "it is a read-only replica: name its master.")
        if server.policy.startswith("allkeys-"):
            text = "may evict changed settings, and what nobody has used for a while: noeviction or volatile-lru keeps"
            yield note("store", f"maxmemory-policy {server.policy} {text} the settings.")
    with contextlib.suppress(StoreError):
        if said := await store.get_fact(*LACKS):
            yield problem("LiteLLM", f"the proxy that runs with this store, or ran last, says: {said}")
    with contextlib.suppress(StoreError, ConfigError):
        saved = await store.get_setting(CHANGED_SETTINGS)
        if values := overlay_from_json(saved.partition("\n")[0] if saved else None).values:
            named = ", ".join(f"{key}: {value}" for key, value in values.items())
            yield note("page", f"changed on the settings page, in place of config.yaml's values: {named}.")
    with contextlib.suppress(StoreError):
        events = [event for row in await store.events() if (event := event_from_json(row.text)) is not None]
        for said in useless_summarisers(events):
            yield note("pruning_model", said)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examiner:
    http: httpx.AsyncClient
    windows: Windows
    settings: Settings
    reporter: Reporter
    environ: Mapping[str, str]
    probes: bool

    async def pruning_model(self, file: ConfigFile, name: str) -> list[Finding]:
        """A note if a pruning model would not be asked now, by the rules of the proxy."""
        name_served = str(as_entry(file.section("router_settings").get("model_group_alias")).get(name, name))
        exact = [entry for entry in file.deployments if entry.get("model_name") == name_served]
        whys: list[str] = []
        for entry in exact or file.deployments:
            params, info = as_entry(entry.get("litellm_params")), as_entry(entry.get("model_info"))
            pattern = "(.*)".join(map(re.escape, str(entry.get("model_name", "")).split("*")))
            found = re.fullmatch(pattern, name_served)
            if found is None and info.get("id") != name_served:
                continue
            served = "".join(found.groups()) if found is not None else ""
            params = {**params, "model": str(params.get("model", "")).replace("*", served or "*")}
            try:
                deployment = asked_deployment_of(params, info, group=name, environ=self.environ)
                target, other = deployment.target, deployment.other_target
                if other is not None and not await self.windows.is_lmstudio(target.api_base or "", target.api_key):
                    target = other
                await self.windows.resolve(target)
                whys.append("")
            except ConfigError:
                # `check_config` reports it.
                continue
            except CompactionError as error:
                whys.append(why_unasked(error))
        says = "the model that is asked writes its own summaries"
        return [note(f"pruning_model {name}", f"{says}: {whys[0]}.")] if whys and all(whys) else []

    async def examine(self, entry: Mapping[str, Any], name: str) -> list[_Row]:
        params, info = as_entry(entry.get("litellm_params")), as_entry(entry.get("model_info"))
        try:
            deployment = deployment_of(params, info, group=name, environ=self.environ)
        except ConfigError:
            return [_Row(name=name, model="", guarded=None, why="its settings are not valid")]
        row = _Row(name=name, model=deployment.target.model, guarded=False, why=_why_not(deployment, params))
        if deployment.kind == "foreign":
            return [await self._perhaps_meant(row, deployment, str(params.get("model")))]
        if deployment.kind == "opted_in":
            return await self._opted_in(row, deployment)
        return await self._lm_studio(row, deployment)

    async def _perhaps_meant(self, row: _Row, deployment: Deployment, model: str) -> _Row:
        """A problem if the prefix is forgotten, the commonest slip: LM Studio is there, and lists such a model."""
        api_base = deployment.target.api_base
        if deployment.settings.enabled is False or api_base is None or not is_local_address(api_base):
            return row
        try:
            listing = await list_models(self.http, api_base, deployment.target.api_key, timeout_s=_LIMIT_S)
        except (ServerUnavailable, NotThisApi):
            return row
        if not any(listed.key == model for listed in listing.models):
            return row
        return row.with_problem(f"LM Studio at its api_base has this model: write `model: lm_studio/{model}`.")

    async def _lm_studio(self, row: _Row, deployment: Deployment) -> list[_Row]:
        api_base, api_key = deployment.target.api_base or "", deployment.target.api_key
        row = replace(row, server=without_userinfo(api_base))
        has_v1 = api_base.rstrip("/").endswith("/v1")
        advice = f"api_base is {row.server}, but requests go below /v1: write {server_root(row.server)}/v1."
        if deployment.kind == "lm_studio" and not has_v1:
            row = row.with_problem(advice)
        try:
            # Its error tells the reason: no server there, a refused key, or another server.
            listing = await list_models(self.http, api_base, api_key, timeout_s=_LIMIT_S)
            if not (listing.models or await self.windows.is_lmstudio(api_base, api_key)):
                # Any server may answer with an empty list.
                raise NotThisApi(f"{row.server} lists no models")  # noqa: TRY301 - as a server that says so itself
        except NotThisApi as error:
            if deployment.other_target is not None:
                other = replace(deployment, target=deployment.other_target)
                return await self._opted_in(replace(row, reachable=True), other)
            if deployment.kind != "lm_studio" and not isinstance(error, KeyRefused):
                return [replace(row, reachable=True, why="its server is not LM Studio")]
            todo = "point api_base to LM Studio 0.3.6 or newer"
            if isinstance(error, KeyRefused):
                todo = "set LM_STUDIO_API_KEY (or api_key of this deployment) to a token of that server"
            row = row.with_problem(f"{error}: {todo}.")
            return [replace(row, guarded=None, reachable=True, why="its server did not answer as LM Studio")]
        except ServerUnavailable as error:
            todo = "start LM Studio's server (`lms server start`), or correct api_base"
            row = row.with_problem(f"{error}: {todo}.", passes=True)
            return [replace(row, guarded=None, reachable=False, why="its server was not reached")]
        if deployment.kind != "lm_studio" and not has_v1:
            row = row.with_problem(advice)
        why = "it is lm_studio/…" if deployment.kind == "lm_studio" else "its server answers as LM Studio"
        return await self._reported(
            replace(row, guarded=True, why=why, reachable=True, api=listing.api), deployment, listing
        )

    async def _opted_in(self, row: _Row, deployment: Deployment) -> list[_Row]:
        target = deployment.target
        row = replace(row, guarded=True, why="model_info.compaction.enabled is true")
        if not (target.apis and target.api_base):
            return await self._reported(row, deployment, None)
        row = replace(row, server=without_userinfo(target.api_base))
        try:
            served = await list_served(self.http, target.api_base, target.api_key, target.apis, timeout_s=_LIMIT_S)
        except ServerUnavailable as error:
            row = row.with_problem(f"{error}: start the server, or correct api_base.", passes=True)
            return await self._reported(replace(row, reachable=False), deployment, None)
        return await self._reported(replace(row, reachable=True, api=served.api or ""), deployment, served)

    async def _reported(self, row: _Row, deployment: Deployment, listing: Listing | Served | None) -> list[_Row]:
        """The row, or one for each loaded model of its wildcard, with the known facts."""
        targets = await targets_of(self.windows, deployment)
        if not targets and isinstance(listing, Listing):
            row = replace(row, report=self.reporter.blank(deployment, self.settings, deployment.target))
            if not any(model.kind == "llm" for model in listing.models):
                return [row.with_problem("LM Studio has no chat model: download one (`lms get`).")]
            unloaded = self._not_loaded(row.name, "no chat model is loaded yet")
            return [replace(row, loaded=False, findings=(*row.findings, unloaded))]
        rows: list[_Row] = []
        for target in targets or [deployment.target]:
            found = match(listing, target.model) if isinstance(listing, Listing) else None
            listed = found[0] if found is not None else None
            report = await self.reporter.report(deployment, self.settings, target, listed)
            one = replace(row, model=target.model, report=report)
            if isinstance(report.absence, ModelNotLoaded):
                one = replace(one, loaded=False)
            elif report.window is not None and target.is_lmstudio:
                one = replace(one, loaded=listed is not None)
            findings = [
                # Those of the whole deployment once.
                *(() if rows else row.findings),
                *self._of_window(one, report, listing),
                *(problem(one.place, failure) for failure in report.failures),
                *(note(one.place, warning) for warning in report.warnings),
            ]
            if self.probes and report.source is not None and _is_loaded(one, report):
                probes, more = await probe(one.place, target, report.source, self.windows.tokens_of)
                one, findings = replace(one, probes=probes), [*findings, *more]
            rows.append(replace(one, findings=tuple(findings)))
        return rows

    def _of_window(self, row: _Row, report: DeploymentReport, listing: Listing | Served | None) -> Iterator[Finding]:
        target, window, absence = report.target, report.window, report.absence
        if isinstance(absence, ModelNotLoaded):
            # Another server than LM Studio that loads on request is Ollama.
            what = f"{target.model} is not loaded" if target.is_lmstudio else f"Ollama has not loaded {target.model}"
            yield self._not_loaded(row.name, what, "" if target.is_lmstudio else "set num_ctx in litellm_params")
        elif absence is not None and isinstance(listing, Listing):
            todo = "update LM Studio, or write model_info.compaction.context_length"
            if match(listing, target.model) is None:
                todo = f"correct the model{_closest(target.model, listing)}"
            yield problem(row.name, f"{absence} What to do: {todo}.")
        elif absence is not None and row.reachable is not False:
            todo = "write model_info.compaction.context_length, as large as the server was started with"
            yield problem(row.name, f"{absence} What to do: {todo}.")
        if window is None or target.is_lmstudio:
            return
        write = "write model_info.compaction.context_length"
        if isinstance(listing, Served) and window.source not in SERVERS and not target.asked_tokens:
            server = SERVERS[listing.api] if listing.api is not None else None
            if server is not None and server.loads_on_request:
                until = f"so {window.tokens:,} tokens ({window.source}) count until then"
                parameter = server.window_parameter
                surely = f" To be sure, set {parameter} in litellm_params." if parameter else ""
                what = f"{server.title} has not loaded {target.model}, {until}"
                yield note(row.name, f"{what}; it is read when the first request has loaded it.{surely}")
            elif window.source != "operator":
                asked = ", ".join(SERVERS[api].path for api in target.apis)
                yield note(row.name, f"its server tells no window ({asked}): {write}.")
        if window.source == "default":
            yield note(row.name, f"its window is assumed to be {window.tokens:,} tokens: {write}.")
        if window.slots > window.parallel:
            text = f"{window.slots} requests at a time have this window each; if they share it (--kv-unified), write"
            yield note(row.name, f"{text} `admission: pool`.")

    def _not_loaded(self, name: str, what: str, surely: str = "") -> Finding:
        if self.settings.when_not_loaded == "warm_up":
            more = f" To be sure, {surely}." if surely else ""
            known = "so its window is not known; the first request loads it (when_not_loaded)"
            return note(name, f"{what}, {known}.{more}")
        remedy = f"load it, or {surely}" if surely else "load it in LM Studio, or write `warm_up`"
        return problem(name, f"{what}, and when_not_loaded is `error`: {remedy}.")


def _is_loaded(row: _Row, report: DeploymentReport) -> bool:
    """Returns True if a request surely loads nothing."""
    if report.window is None or report.target.is_lmstudio:
        return bool(row.loaded)
    server = server_of(report.window.source)
    return server is not None and not server.loads_on_request


def _why_not(deployment: Deployment, params: Mapping[str, Any]) -> str:
    if deployment.settings.enabled is False:
        return "model_info.compaction.enabled is false"
    if str(params.get("model", "")).startswith("openai/") and deployment.target.api_base:
        return "its server is not in a local network, so it is not asked; opt in with model_info.compaction.enabled"
    return "its provider is not LM Studio; opt in with model_info.compaction.enabled"


def _closest(model: str, listing: Listing) -> str:
    keys = [listed.key for listed in listing.models if listed.kind == "llm"]
    near = get_close_matches(model, keys, n=3, cutoff=0.3) or keys[:3]
    return f"; LM Studio has {', '.join(near)}" if near else "; LM Studio has no chat model"


def _lines(file: ConfigFile, rows: Sequence[_Row], findings: Sequence[Finding]) -> Iterator[str]:
    yield f"config   {file.path}"
    for row in rows:
        yield ""
        yield row.name if row.name.partition("/")[2] == row.model else f"{row.name} → {row.model or '?'}"
        yield f"  guarded  {'not known' if row.guarded is None else 'yes' if row.guarded else 'no'}: {row.why}"
        if row.server:
            named = f"LM Studio's API {row.api}" if row.api in ("v0", "v1") else row.api
            api = f", {named}" if named else ""
            yield f"  server   {row.server}, {'reachable' if row.reachable else 'not reachable'}{api}"
        if row.report is not None:
            yield from _report_lines(row, row.report)
    for level, title in (("problem", "Problems"), ("note", "Notes")):
        some = [finding for finding in findings if finding.level == level]
        if some:
            yield ""
            yield f"{title}:"
            yield from (f"  {'✗' if level == 'problem' else '·'} {line}" for line in _grouped(some))
    yield ""
    count = sum(finding.level == "problem" for finding in findings)
    yield "No problems found." if not count else f"{count} problem{'s' if count > 1 else ''} found."


def _grouped(findings: Sequence[Finding]) -> Iterator[str]:
    """The findings as lines, those that say the same of several places as one."""
    places: dict[str, list[str]] = {}
    for finding in findings:
        # The message may name its place.
        places.setdefault(finding.message.replace(finding.place, "…"), []).append(finding.place)
    told: set[str] = set()
    for finding in findings:
        said = finding.message.replace(finding.place, "…")
        named = list(dict.fromkeys(places[said]))
        if len(named) <= _MOST_NAMED:
            yield f"{finding.place}: {finding.message}"
        elif said not in told:
            told.add(said)
            yield f"{', '.join(named[:_MOST_NAMED])} and {len(named) - _MOST_NAMED} more: {said}"


def _report_lines(row: _Row, report: DeploymentReport) -> Iterator[str]:
    window, source = report.window, report.source
    if window is not None:
        shared = f", shared by up to {row.parallel} requests" if (row.parallel or 1) > 1 else ""
        yield f"  window   {window.tokens:,} tokens, from {_SOURCES.get(window.source, window.source)}{shared}"
    elif row.loaded is False:
        yield "  window   not known: not loaded"
    if report.model_settings:
        yield f"  settings {report.model_settings}"
    if source is not None:
        architecture = f" (architecture {report.architecture})" if report.architecture else ""
        how = f"{source_words(source)}; template: {template_words(source)}"
        yield f"  counting as {source.family.name}{architecture} with {how}"
    for found in row.probes:
        off = found.counted_tokens / found.server_tokens - 1
        tools = "with tools" if found.tools else "without tools"
        by_us, by_server = f"{found.counted_tokens} tokens by us", f"{found.server_tokens} by the server"
        by_rpc = f", {found.rpc_tokens} by LM Studio's own protocol" if found.rpc_tokens is not None else ""
        yield f"  probe    {tools}: {by_us}, {by_server} ({off:+.1%}){by_rpc}"
    how = "below LiteLLM's OpenAI client" if report.carrier == "transport" else "by LiteLLM's hooks"
    yield f"  carrier  {report.carrier}: running answers are carried over the limit {how}"
    if goes_on := report.standing.in_words():
        yield f"  goes on  {goes_on}"
