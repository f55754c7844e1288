"""`litellm-compaction doctor`: is this config file going to do what its author expects?

The servers behind the file are asked: guarded or not, reachable, loaded, with which window and tokenizer. Only servers
that are LM Studio by name or lie in a local network are asked, and those that an operator opted in (`proxy/routing.py`
has the rule); hosted providers never are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import httpx

from litellm_compaction.cli.config_file import API_BASE_VARIABLE, ConfigFile, Section, read_config, shipped_config
from litellm_compaction.cli.examined import (
    Examined,
    about_window,
    closest,
    in_use,
    names,
    why_not,
    with_source,
    without_credentials,
)
from litellm_compaction.cli.findings import (
    Finding,
    config_findings,
    entry_name,
    entry_section,
    note,
    problem,
    settings_or_defaults,
    sharing_findings,
)
from litellm_compaction.cli.probing import probe
from litellm_compaction.config import SAME_MODEL, Settings
from litellm_compaction.engine import GoingOn, Standing, shares_context
from litellm_compaction.errors import ConfigError, ModelNotLoaded, ServerUnavailable, StoreError, WindowUnknown
from litellm_compaction.events import event_from_json, harmless, useless_summarisers
from litellm_compaction.proxy.routing import WAYS_OF, Carrier, Deployment, carrier_of, deployment_of, unknown_model
from litellm_compaction.redis_address import is_redis
from litellm_compaction.stores import MemoryStore, Store, open_existing
from litellm_compaction.tokenizers.sources import Sources, TokenizerSource
from litellm_compaction.tokens.prompt import renders_exactly
from litellm_compaction.windows.fetch import KeyRefused, NotThisApi
from litellm_compaction.windows.lmstudio import DEFAULT_API_BASE, Listing, WantedModel, list_models, match, server_root
from litellm_compaction.windows.lmstudio_rpc import LMStudioRpc
from litellm_compaction.windows.other_servers import SERVERS, Served, list_served
from litellm_compaction.windows.windows import Target, Windows, server_of

_LIMIT_S = 3.0


async def examine(
    file: ConfigFile, environ: Mapping[str, str], *, probes: bool = False
) -> tuple[tuple[Examined, ...], tuple[Finding, ...]]:
    """All deployments of the file in its order, and what was found about them.

    Args:
        probes: whether loaded models are asked how many tokens two tiny requests take.
    """
    environ = {**environ, API_BASE_VARIABLE: environ.get(API_BASE_VARIABLE) or DEFAULT_API_BASE}
    async with contextlib.AsyncExitStack() as stack:
        # The environment's web proxy must not be asked for a server on this machine or network.
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        settings = settings_or_defaults(file, environ)
        windows = Windows(cache_s=60.0, http=http, timeout_s=_LIMIT_S, rpc=LMStudioRpc.of(settings))
        stack.push_async_callback(windows.aclose)
        examiner = _Examiner(http, windows, file, settings, environ, probes=probes)
        found = await asyncio.gather(
            *(examiner.examine(entry, entry_name(entry, index)) for index, entry in enumerate(file.deployments))
        )
        pruning = [each for name in _pruning_models(file, settings) for each in await examiner.pruning_model(name)]
    rows = tuple(row for one, _ in found for row in one)
    findings = [finding for _, some in found for finding in some]
    sharing = [row.name for row in rows if row.guarded and shares_context(settings.admission, row.parallel or 1)]
    findings += sharing_findings(sharing, settings.store, environ)
    findings += pruning
    findings += await _shared_store(settings)
    findings += await _summarisers(settings, environ)
    if rows and all(row.guarded is False for row in rows):
        findings.append(
            problem("model_list", "no deployment is guarded: add an lm_studio/… one, or opt one in (see each reason).")
        )
    return rows, tuple(findings)


def _pruning_models(file: ConfigFile, settings: Settings) -> list[str]:
    """The other models that are to write summaries, as far as the file has them; each once."""
    sections = [entry_section(entry, "model_info").get("compaction") for entry in file.deployments]
    own = [section.get("pruning_model") for section in sections if isinstance(section, Mapping)]
    named = dict.fromkeys(name for name in (settings.pruning_model, *own) if isinstance(name, str) and name)
    return [name for name in named if name != SAME_MODEL and not unknown_model(file.data, name)]


class _AsRouter:
    """A config file as the router that LiteLLM would make of it, as far as entries are looked for by name."""

    def __init__(self, file: ConfigFile, environ: Mapping[str, str]) -> None:
        self._file = file
        self._environ = environ

    def get_model_list(self, model_name: str, team_id: str | None = None) -> list[Section]:
        """The entries of a name, with the model filled in where a wildcard serves it."""
        alias = self._file.section("router_settings").get("model_group_alias")
        target = alias.get(model_name) if isinstance(alias, Mapping) else None
        name = target if isinstance(target, str) else model_name
        exact = [entry for entry in self._file.deployments if entry.get("model_name") == name]
        return exact or [found for entry in self._file.deployments if (found := self._filled(entry, name)) is not None]

    def get_deployment(self, model_id: str) -> Section | None:
        """The entry with an id of its own."""
        own = (entry for entry in self._file.deployments if entry_section(entry, "model_info").get("id") == model_id)
        return next(own, None)

    def _filled(self, entry: Section, name: str) -> Section | None:
        before, star, behind = str(entry.get("model_name", "")).partition("*")
        if not star or not name.startswith(before) or not name.endswith(behind):
            return None
        params = entry_section(entry, "litellm_params")
        served = name[len(before) : len(name) - len(behind) or None]
        return {**entry, "litellm_params": {**params, "model": str(params.get("model", "")).replace("*", served)}}


def _carried(row: Examined, carrier: Carrier) -> Examined:
    """The row with its carrier; LiteLLM's hooks know chats only."""
    if not row.guarded:
        return replace(row, ways=(), gone_on=())
    return replace(row, carrier=carrier, ways=tuple(way for way in row.ways if way in WAYS_OF[carrier]))


def _store(settings: Settings, environ: Mapping[str, str]) -> Store:
    """Where the proxy keeps what servers have shown; an empty one where that cannot be seen from here."""
    ttl_s, max_bytes = settings.store_ttl_s, settings.store_max_bytes
    try:
        return open_existing(settings.store, ttl_s=ttl_s, max_bytes=max_bytes, environ=environ)
    except (ConfigError, StoreError):
        return MemoryStore(ttl_s=ttl_s, max_bytes=max_bytes)


async def _shared_store(settings: Settings) -> list[Finding]:
    """What is wrong with a Redis that machines share; nothing with any other store."""
    if not is_redis(settings.store):
        return []
    from litellm_compaction.stores.redis import RedisStore

    store = open_existing(settings.store, ttl_s=settings.store_ttl_s, max_bytes=settings.store_max_bytes)
    if not isinstance(store, RedisStore):
        return []
    try:
        server = await store.about()
    except StoreError as error:
        todo = "start it, or correct `store`; requests go on with the memory of each process meanwhile"
        return [problem("store", f"{error}: {todo}.")]
    finally:
        await store.aclose()
    findings = []
    if server.is_too_old:
        findings.append(problem("store", f"Redis {server.version} has no streams: Redis 5 or newer is needed."))
    if server.is_replica:
        findings.append(problem("store", "it is a read-only replica: name its master, or the sentinels."))
    if server.policy.startswith("allkeys-"):
        findings.append(
            note(
                "store",
                f"maxmemory-policy {server.policy} may evict changed settings, and what nobody has used for a while: "
                "noeviction or volatile-lru keeps the settings.",
            )
        )
    return findings


async def _summarisers(settings: Settings, environ: Mapping[str, str]) -> list[Finding]:
    """Which models write summaries that say nothing, as far as the history knows."""
    store = _store(settings, environ)
    try:
        rows = await store.events()
    except StoreError:
        # What is wrong with a store is said elsewhere.
        return []
    finally:
        await store.aclose()
    events = (event for row in rows if (event := event_from_json(row.text)) is not None)
    return [note("pruning_model", said) for said in useless_summarisers(events)]


class _Examiner:
    def __init__(
        self,
        http: httpx.AsyncClient,
        windows: Windows,
        file: ConfigFile,
        settings: Settings,
        environ: Mapping[str, str],
        *,
        probes: bool,
    ) -> None:
        self._http = http
        self._windows = windows
        self._file = file
        self._settings = settings
        self._environ = environ
        self._probes = probes
        # What is wrong with a file becomes a finding.
        self._sources = Sources.of(settings, on_failure=lambda _: None)
        self._going_on = GoingOn(_store(settings, environ))

    async def pruning_model(self, name: str) -> list[Finding]:
        """Why a pruning model would not be asked now; nothing where it would."""
        # Here: they load LiteLLM, which takes seconds.
        from litellm_compaction.proxy.deployments import DeploymentSelector, Publisher
        from litellm_compaction.proxy.live_settings import LiveSettings

        guards = DeploymentSelector(LiveSettings(self._settings), self._windows, Publisher())
        with contextlib.suppress(ConfigError):
            if why := await guards.why_unusable(_AsRouter(self._file, self._environ), name):
                return [note(f"pruning_model {name}", f"the model that is asked writes its own summaries: {why}.")]
        return []

    async def examine(self, entry: Section, name: str) -> tuple[list[Examined], list[Finding]]:
        try:
            deployment = deployment_of(
                entry_section(entry, "litellm_params"),
                entry_section(entry, "model_info"),
                group=name,
                environ=self._environ,
            )
        except ConfigError:
            return [Examined(name=name, model="", guarded=None, why="its settings are not valid")], []
        target = deployment.target
        row = Examined(name=name, model=target.model, guarded=False, why=why_not(deployment, entry))
        rows, findings = await self._examined(row, deployment)
        carrier = carrier_of(deployment, self._settings, self._environ)
        return [_carried(row, carrier) for row in rows], findings

    async def _examined(self, row: Examined, deployment: Deployment) -> tuple[list[Examined], list[Finding]]:
        target, name = deployment.target, row.name
        if deployment.kind == "foreign":
            return [row], []
        if deployment.kind == "opted_in":
            return await self._opted_in(row, target)
        row = replace(row, server=without_credentials(target.api_base or ""))
        try:
            listing = await self._listing(target)
        except NotThisApi as error:
            return await self._another_server(replace(row, reachable=True), deployment, error)
        except ServerUnavailable as error:
            todo = "start LM Studio's server (`lms server start`), or correct api_base"
            row = replace(row, guarded=None, why="its server was not reached", reachable=False)
            return [row], [problem(name, f"{error}: {todo}.")]
        why = "it is lm_studio/…" if deployment.kind == "lm_studio" else "its server answers as LM Studio"
        row = replace(row, guarded=True, why=why, reachable=True, api=listing.api)
        rows, findings = await self._listed(row, deployment, listing)
        if not (target.api_base or "").rstrip("/").endswith("/v1"):
            findings.append(
                problem(
                    name, f"api_base is {row.server}, but requests go below /v1: write {server_root(row.server)}/v1."
                )
            )
        return rows, findings

    async def _listing(self, target: Target) -> Listing:
        api_base = target.api_base or ""
        if not await self._windows.is_lmstudio(api_base, target.api_key):
            # Says why: nobody there, a refused key, or another server.
            listing = await list_models(self._http, api_base, target.api_key, timeout_s=_LIMIT_S)
            if not listing.models:
                raise NotThisApi(f"{without_credentials(api_base)} lists no models")
            return listing
        return await list_models(self._http, api_base, target.api_key, timeout_s=_LIMIT_S)

    async def _opted_in(self, row: Examined, target: Target) -> tuple[list[Examined], list[Finding]]:
        row = replace(row, guarded=True, why="model_info.compaction.enabled is true")
        served: Served | None = None
        findings: list[Finding] = []
        if target.apis and target.api_base:
            row = replace(row, server=without_credentials(target.api_base))
            try:
                served = await list_served(self._http, target.api_base, target.api_key, target.apis, timeout_s=_LIMIT_S)
                row = replace(row, reachable=True, api=served.api or "")
            except ServerUnavailable as error:
                row = replace(row, reachable=False)
                findings.append(problem(row.name, f"{error}: start the server, or correct api_base."))
        rows: list[Examined] = []
        for model in names(target, served):
            one = replace(target, key=f"{target.key}|{model}", model=model)
            try:
                window = await self._windows.resolve(one)
            except ModelNotLoaded:
                load = "the first request loads it (when_not_loaded). To be sure, set num_ctx in litellm_params"
                what = f"Ollama has not loaded {model}, so its window is not known"
                rows.append(replace(row, model=model, loaded=False))
                findings.append(self._not_loaded_yet(row.name, what, load))
                continue
            except WindowUnknown as error:
                rows.append(replace(row, model=model))
                if row.reachable is not False:
                    todo = "write model_info.compaction.context_length, as large as the server was started with"
                    findings.append(problem(row.name, f"{error} What to do: {todo}."))
                continue
            counted = replace(
                row,
                model=model,
                window_tokens=window.tokens,
                window_source=window.source,
                parallel=window.parallel if window.source in SERVERS else None,
            )
            server = server_of(window.source)
            is_loaded = server is not None and not server.loads_on_request
            counted, more = await self._counted(counted, one, "", None, is_loaded=is_loaded)
            rows.append(counted)
            findings += [*more, *about_window(row, one, window, served)]
        return rows, findings

    async def _another_server(
        self, row: Examined, deployment: Deployment, error: NotThisApi
    ) -> tuple[list[Examined], list[Finding]]:
        if deployment.other_target is not None:
            return await self._opted_in(row, deployment.other_target)
        if isinstance(error, KeyRefused):
            todo = "set LM_STUDIO_API_KEY (or api_key of this deployment) to a token of that server"
        elif deployment.kind == "lm_studio":
            todo = "point api_base to LM Studio 0.3.6 or newer"
        else:
            return [replace(row, guarded=False, why="its server is not LM Studio")], []
        return [replace(row, guarded=None, why="its server did not answer as LM Studio")], [
            problem(row.name, f"{error}: {todo}.")
        ]

    async def _listed(
        self, row: Examined, deployment: Deployment, listing: Listing
    ) -> tuple[list[Examined], list[Finding]]:
        target = deployment.target
        if "*" not in target.model:
            return await self._model(row, target, listing)
        chat = [model for model in listing.models if model.kind == "llm"]
        if not chat:
            return [row], [problem(row.name, "LM Studio has no chat model: download one (`lms get`).")]
        loaded = [model.key for model in chat if model.loaded]
        if not loaded:
            return [replace(row, loaded=False)], [self._not_loaded(row.name, "no chat model is loaded yet")]
        rows: list[Examined] = []
        findings: list[Finding] = []
        for key in loaded:
            more_rows, more = await self._model(
                replace(row, model=key), replace(target, key=f"{target.key}|{key}", model=key), listing
            )
            rows += more_rows
            findings += more
        return rows, findings

    async def _model(self, row: Examined, target: Target, listing: Listing) -> tuple[list[Examined], list[Finding]]:
        try:
            window = await self._windows.confirmed(target, await self._windows.resolve(target))
        except ModelNotLoaded:
            found = match(listing, target.model)
            architecture, wanted = (found[0].architecture, found[0].wanted) if found is not None else ("", None)
            row, findings = await self._counted(replace(row, loaded=False), target, architecture, wanted)
            return [row], [self._not_loaded(row.name, f"{target.model} is not loaded"), *findings]
        except WindowUnknown as error:
            if match(listing, target.model) is not None:
                todo = "update LM Studio, or write model_info.compaction.context_length"
            else:
                todo = f"correct the model{closest(target.model, listing)}"
            return [row], [problem(row.name, f"{error} What to do: {todo}.")]
        row = replace(
            row,
            loaded=match(listing, target.model) is not None,
            window_tokens=window.tokens,
            window_source=window.source,
            parallel=window.parallel,
        )
        said = self._windows.model_settings(target)
        about = [note(row.place, each) for each in said[0].works_against(said[1].ttl_s)] if said is not None else []
        row = replace(row, model_settings=said[0].in_words(said[1].ttl_s) if said is not None else "")
        template = said[0].template if said is not None else ""
        row, findings = await self._counted(
            row, target, window.architecture, window.wanted, is_loaded=row.loaded, template=template
        )
        return [row], [*about, *findings]

    async def _counted(
        self,
        row: Examined,
        target: Target,
        architecture: str,
        wanted: WantedModel | None,
        *,
        is_loaded: bool | None = False,
        template: str = "",
    ) -> tuple[Examined, list[Finding]]:
        """The row with what counts the deployment's prompts, and how well, where that is to be tried."""
        source = await self._sources.source(target, architecture, wanted, patient=True)
        # Loaded as the proxy would: only then is known whether it can be, and what it costs.
        source, failures = await in_use(source)
        findings = [problem(row.place, failure) for failure in (*source.failures, *failures)]
        if template:
            source = replace(source, family=await self._sources.in_effect(source, template, patient=True))
        row = await self._with_ways(with_source(row, architecture, source), target, source)
        if self._probes and is_loaded:
            probes, more = await probe(self._http, row.place, target, source, self._windows.tokens_of)
            row, findings = replace(row, probes=probes), [*findings, *more]
        return row, findings

    def _not_loaded_yet(self, name: str, what: str, load: str) -> Finding:
        if self._settings.when_not_loaded == "warm_up":
            return note(name, f"{what}; {load}.")
        return problem(name, f"{what}, and when_not_loaded is `error`: load it, or set num_ctx in litellm_params.")

    async def _with_ways(self, row: Examined, target: Target, source: TokenizerSource) -> Examined:
        """The row with how its server goes on, as far as anybody knows."""
        # Every source that is no server's leads to the last way, but for LM Studio's models.
        can_render = self._windows.instance(target) is not None or renders_exactly(source.family)
        standing = await self._going_on.standing(target, row.window_source, can_render=can_render)
        return replace(row, ways=standing.ways, gone_on=standing.gone_on)

    def _not_loaded(self, name: str, what: str) -> Finding:
        if self._settings.when_not_loaded == "warm_up":
            return note(name, f"{what}, so its window is not known; the first request loads it (when_not_loaded).")
        return problem(name, f"{what}, and when_not_loaded is `error`: load it in LM Studio, or write `warm_up`.")


_HERE = Path("config.yaml")
_SOURCES = {
    **{name: server.says for name, server in SERVERS.items()},
    "operator": "the config file",
    "max_input_tokens": "model_info.max_input_tokens",
    "model_map": "LiteLLM's model map",
    "default": "an assumption",
}


def doctor(*, config: Path | None, as_json: bool, environ: Mapping[str, str], probes: bool = False) -> int:
    """Prints the report; 0 when there is no problem, else 1.

    Args:
        config: None is config.yaml in the current folder if there is one, else the shipped one.
        probes: loaded models are sent two tiny requests, whose tokens are compared with our count.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = read_config(config or (_HERE if _HERE.is_file() else shipped_config()))
    from_file = config_findings(file, environ)
    rows, from_servers = asyncio.run(examine(file, environ, probes=probes))
    findings = (*from_file, *from_servers)
    has_problem = any(finding.level == "problem" for finding in findings)
    if as_json:
        print(json.dumps(_report(file, rows, findings, has_problem), indent=2, ensure_ascii=False))
    else:
        print("\n".join(map(harmless, _lines(file, rows, findings))))
    return 1 if has_problem else 0


def _report(
    file: ConfigFile, rows: Sequence[Examined], findings: Sequence[Finding], has_problem: bool
) -> dict[str, object]:
    return {
        "config": str(file.path),
        "ok": not has_problem,
        "deployments": [asdict(row) for row in rows],
        "findings": [asdict(finding) for finding in findings],
    }


def _lines(file: ConfigFile, rows: Sequence[Examined], findings: Sequence[Finding]) -> Iterator[str]:
    yield f"config   {file.path}"
    for row in rows:
        yield ""
        yield row.name if row.name.partition("/")[2] == row.model else f"{row.name} → {row.model or '?'}"
        yield f"  guarded  {'not known' if row.guarded is None else 'yes' if row.guarded else 'no'}: {row.why}"
        if row.server:
            named = f"LM Studio's API {row.api}" if row.api in ("v0", "v1") else row.api
            api = f", {named}" if named else ""
            yield f"  server   {row.server}, {'reachable' if row.reachable else 'not reachable'}{api}"
        if row.window_tokens is not None:
            shared = f", shared by up to {row.parallel} requests" if (row.parallel or 1) > 1 else ""
            source = _SOURCES.get(row.window_source, row.window_source)
            yield f"  window   {row.window_tokens:,} tokens, from {source}{shared}"
        elif row.loaded is False:
            yield "  window   not known: not loaded"
        if row.model_settings:
            yield f"  settings {row.model_settings}"
        if row.tokenizer:
            architecture = f" (architecture {row.architecture})" if row.architecture else ""
            yield f"  counting as {row.family}{architecture} with {row.tokenizer_words}; template: {row.template_words}"
        for found in row.probes:
            off = found.counted_tokens / found.server_tokens - 1
            tools = "with tools" if found.tools else "without tools"
            by_us, by_server = f"{found.counted_tokens} tokens by us", f"{found.server_tokens} by the server"
            by_rpc = f", {found.rpc_tokens} by LM Studio's own protocol" if found.rpc_tokens is not None else ""
            yield f"  probe    {tools}: {by_us}, {by_server} ({off:+.1%}){by_rpc}"
        if row.carrier:
            how = "below LiteLLM's OpenAI client" if row.carrier == "transport" else "by LiteLLM's hooks"
            yield f"  carrier  {row.carrier}: running answers are carried over the limit {how}"
        if goes_on := Standing(row.ways, row.gone_on).in_words():
            yield f"  goes on  {goes_on}"
    for level, title in (("problem", "Problems"), ("note", "Notes")):
        some = [finding for finding in findings if finding.level == level]
        if some:
            yield ""
            yield f"{title}:"
            yield from (f"  {'✗' if level == 'problem' else '·'} {found.place}: {found.message}" for found in some)
    yield ""
    count = sum(finding.level == "problem" for finding in findings)
    yield "No problems found." if not count else f"{count} problem{'s' if count > 1 else ''} found."
