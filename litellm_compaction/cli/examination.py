"""What the servers behind a config file say: guarded or not, reachable, loaded, with which window and tokenizer.

Called by `doctor`. Only servers are asked that are LM Studio by name or lie in a local network, and those that an
operator opted in (`proxy/opted_in.py` has the rule); hosted providers never are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

import httpx

from litellm_compaction.cli.config_file import API_BASE_VARIABLE, ConfigFile, Section
from litellm_compaction.cli.findings import (
    Finding,
    entry_name,
    entry_section,
    note,
    problem,
    settings_or_defaults,
    sharing_findings,
)
from litellm_compaction.cli.probing import Probe, probe
from litellm_compaction.cli.source_words import source_words, template_words, tokenizer_name
from litellm_compaction.config import Settings
from litellm_compaction.engine import shares_context
from litellm_compaction.errors import ConfigError, ModelNotLoaded, ServerUnavailable, WindowUnknown
from litellm_compaction.models.fetch import NotThisApi
from litellm_compaction.models.lmstudio import DEFAULT_API_BASE, Listing, list_models, match, server_root
from litellm_compaction.models.model_files import WantedModel
from litellm_compaction.models.served import PATHS, Served, list_served
from litellm_compaction.models.sources import Sources, TokenizerSource
from litellm_compaction.models.window import Target, Window, Windows
from litellm_compaction.proxy.carriers import carrier_of
from litellm_compaction.proxy.routing import Deployment, deployment_of

_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One deployment, or one loaded model behind a wildcard.

    Attributes:
        name: its `model_name`; model: as the server is asked for it.
        guarded: None where nobody could be asked.
        why: the reason for `guarded`, in words.
        server: its address without credentials; "" where it was not asked.
        reachable, loaded: None where it was not asked, or nobody knows.
        api: version of LM Studio's API; "" where it was not asked.
        tokenizer: the vocabulary or file that counts; exact says whether it is the model's own.
        tokenizer_source: its kind, as in `models/sources.py`; tokenizer_words and template_words are for people.
        probes: our count against the server's, where that was wanted.
        carrier: what carries a running answer over the limit; "" where nothing does.
    """

    name: str
    model: str
    guarded: bool | None
    why: str
    server: str = ""
    reachable: bool | None = None
    api: str = ""
    loaded: bool | None = None
    window_tokens: int | None = None
    window_source: str = ""
    parallel: int | None = None
    architecture: str = ""
    family: str = ""
    tokenizer: str = ""
    tokenizer_exact: bool | None = None
    tokenizer_source: str = ""
    tokenizer_words: str = ""
    template_words: str = ""
    probes: tuple[Probe, ...] = ()
    carrier: str = ""


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
        windows = Windows(cache_s=60.0, http=http, timeout_s=_LIMIT_S)
        stack.push_async_callback(windows.aclose)
        settings = settings_or_defaults(file)
        examiner = _Examiner(http, windows, settings, environ, probes=probes)
        found = await asyncio.gather(
            *(examiner.examine(entry, entry_name(entry, index)) for index, entry in enumerate(file.deployments))
        )
    rows = tuple(row for one, _ in found for row in one)
    findings = [finding for _, some in found for finding in some]
    sharing = [row.name for row in rows if row.guarded and shares_context(settings.admission, row.parallel or 1)]
    findings += sharing_findings(sharing, environ)
    if rows and not any(row.guarded for row in rows) and not any(row.reachable is False for row in rows):
        findings.append(
            problem("model_list", "no deployment is guarded: add an lm_studio/… one, or opt one in (see each reason).")
        )
    return rows, tuple(findings)


class _Examiner:
    def __init__(
        self,
        http: httpx.AsyncClient,
        windows: Windows,
        settings: Settings,
        environ: Mapping[str, str],
        *,
        probes: bool,
    ) -> None:
        self._http = http
        self._windows = windows
        self._settings = settings
        self._environ = environ
        self._probes = probes
        # What is wrong with a file becomes a finding.
        self._sources = Sources.of(settings, on_failure=lambda _: None)

    async def examine(self, entry: Section, name: str) -> tuple[list[Examined], list[Finding]]:
        try:
            deployment = deployment_of(
                entry_section(entry, "litellm_params"),
                entry_section(entry, "model_info"),
                group=name,
                environ=self._environ,
            )
        except ConfigError:
            return [Examined(name=name, model="", guarded=False, why="its settings are not valid")], []
        target = deployment.target
        row = Examined(name=name, model=target.model, guarded=False, why=_why_not(deployment, entry))
        rows, findings = await self._examined(row, deployment)
        carrier = carrier_of(deployment, self._settings, self._environ)
        return [replace(row, carrier=carrier if row.guarded else "") for row in rows], findings

    async def _examined(self, row: Examined, deployment: Deployment) -> tuple[list[Examined], list[Finding]]:
        target, name = deployment.target, row.name
        if deployment.kind == "foreign":
            return [row], []
        if deployment.kind == "opted_in":
            return await self._opted_in(row, target)
        row = replace(row, server=_without_credentials(target.api_base or ""))
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
                raise NotThisApi(f"{_without_credentials(api_base)} lists no models")
            return listing
        return await list_models(self._http, api_base, target.api_key, timeout_s=_LIMIT_S)

    async def _opted_in(self, row: Examined, target: Target) -> tuple[list[Examined], list[Finding]]:
        row = replace(row, guarded=True, why="model_info.compaction.enabled is true")
        served: Served | None = None
        findings: list[Finding] = []
        if target.apis and target.api_base:
            row = replace(row, server=_without_credentials(target.api_base))
            try:
                served = await list_served(self._http, target.api_base, target.api_key, target.apis, timeout_s=_LIMIT_S)
                row = replace(row, reachable=True, api=served.api or "")
            except ServerUnavailable as error:
                row = replace(row, reachable=False)
                findings.append(problem(row.name, f"{error}: start the server, or correct api_base."))
        rows: list[Examined] = []
        for model in _names(target, served):
            one = replace(target, key=f"{target.key}|{model}", model=model)
            window = await self._windows.resolve(one)
            counted = replace(
                row,
                model=model,
                window_tokens=window.tokens,
                window_source=window.source,
                parallel=window.parallel if window.source in PATHS else None,
            )
            # Ollama would load the model.
            counted, more = await self._counted(
                counted, one, "", None, is_loaded=window.source in ("llama.cpp", "vllm")
            )
            rows.append(counted)
            findings += [*more, *_about_window(row, one, window, served)]
        return rows, findings

    async def _another_server(
        self, row: Examined, deployment: Deployment, error: NotThisApi
    ) -> tuple[list[Examined], list[Finding]]:
        if deployment.other_target is not None:
            return await self._opted_in(row, deployment.other_target)
        if "API key was refused" in str(error):
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
        loaded = [model.key for model in listing.models if model.kind == "llm" and model.loaded]
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
            window: Window = await self._windows.resolve(target)
        except ModelNotLoaded:
            found = match(listing, target.model)
            architecture, wanted = (found[0].architecture, found[0].wanted) if found is not None else ("", None)
            row, findings = await self._counted(replace(row, loaded=False), target, architecture, wanted)
            return [row], [self._not_loaded(row.name, f"{target.model} is not loaded"), *findings]
        except WindowUnknown as error:
            if match(listing, target.model) is not None:
                todo = "update LM Studio, or write model_info.compaction.context_length"
            else:
                todo = f"correct the model{_closest(target.model, listing)}"
            return [row], [problem(row.name, f"{error} What to do: {todo}.")]
        row = replace(
            row,
            loaded=match(listing, target.model) is not None,
            window_tokens=window.tokens,
            window_source=window.source,
            parallel=window.parallel,
        )
        row, findings = await self._counted(row, target, window.architecture, window.wanted, is_loaded=row.loaded)
        return [row], findings

    async def _counted(
        self,
        row: Examined,
        target: Target,
        architecture: str,
        wanted: WantedModel | None,
        *,
        is_loaded: bool | None = False,
    ) -> tuple[Examined, list[Finding]]:
        """The row with what counts the deployment's prompts, and how well, where that is to be tried."""
        source = await self._sources.source(target, architecture, wanted, patient=True)
        findings = [problem(row.name, failure) for failure in source.failures]
        row = _with_source(row, architecture, source)
        if self._probes and is_loaded:
            probes, more = await probe(self._http, row.name, target, source)
            row, findings = replace(row, probes=probes), [*findings, *more]
        return row, findings

    def _not_loaded(self, name: str, what: str) -> Finding:
        if self._settings.when_not_loaded == "warm_up":
            return note(name, f"{what}, so its window is not known; the first request loads it (when_not_loaded).")
        return problem(name, f"{what}, and when_not_loaded is `error`: load it in LM Studio, or write `warm_up`.")


def _names(target: Target, served: Served | None) -> list[str]:
    """The models to describe: the deployment's own, or what is loaded behind a wildcard."""
    loaded = [model.names[0] for model in served.models if model.names] if served else []
    return loaded if loaded and "*" in target.model else [target.model]


def _about_window(row: Examined, target: Target, window: Window, served: Served | None) -> list[Finding]:
    """What to know of an opted-in deployment's window, and what to do where nobody knows it."""
    findings: list[Finding] = []
    write = "write model_info.compaction.context_length"
    if served is not None and window.source not in PATHS and not target.asked_tokens:
        if served.api == "ollama":
            load = "it is read when the first request has loaded it"
            what = (
                f"Ollama has not loaded {target.model}, so {window.tokens:,} tokens ({window.source}) count until then"
            )
            findings.append(note(row.name, f"{what}; {load}. To be sure, set num_ctx in litellm_params."))
        elif window.source != "operator":
            asked = ", ".join(PATHS[api] for api in target.apis)
            findings.append(note(row.name, f"its server tells no window ({asked}): {write}."))
    if window.source == "default":
        findings.append(note(row.name, f"its window is assumed to be {window.tokens:,} tokens: {write}."))
    if window.slots > 1:
        text = f"{window.slots} requests at a time have this window each; if they share it (--kv-unified), write"
        findings.append(note(row.name, f"{text} `admission: pool`."))
    return findings


def _with_source(row: Examined, architecture: str, source: TokenizerSource) -> Examined:
    return replace(
        row,
        architecture=architecture,
        family=source.family.name,
        tokenizer=tokenizer_name(source),
        tokenizer_exact=source.family.exact,
        tokenizer_source=source.kind,
        tokenizer_words=source_words(source),
        template_words=template_words(source),
    )


def _why_not(deployment: Deployment, entry: Section) -> str:
    if deployment.settings.enabled is False:
        return "model_info.compaction.enabled is false"
    model = str(entry_section(entry, "litellm_params").get("model", ""))
    if model.startswith("openai/") and deployment.target.api_base:
        return "its server is not in a local network, so it is not asked; opt in with model_info.compaction.enabled"
    return "its provider is not LM Studio; opt in with model_info.compaction.enabled"


def _closest(model: str, listing: Listing) -> str:
    keys = [listed.key for listed in listing.models if listed.kind == "llm"]
    near = get_close_matches(model, keys, n=3, cutoff=0.3) or keys[:3]
    return f"; LM Studio has {', '.join(near)}" if near else "; LM Studio has no chat model"


def _without_credentials(api_base: str) -> str:
    scheme, separator, rest = api_base.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}" if separator else api_base
