"""`litellm-compaction doctor`: is this config file going to do what its author expects?

The findings of a proxy's own start, and one report a deployment. Hosted providers are never asked (`proxy/routing.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
import httpx

from litellm_compaction.cli.config_file import ConfigFile, read_config, shipped_config
from litellm_compaction.cli.proxy_process import Running, running_up
from litellm_compaction.cli.stores import opened_store
from litellm_compaction.config import Settings, settings_from
from litellm_compaction.core.messages import JsonValue, Request, parse_message
from litellm_compaction.engine import KnownWays
from litellm_compaction.errors import ConfigError, ModelNotLoaded, ServerUnavailable, StoreError, WindowUnread
from litellm_compaction.places import is_redis
from litellm_compaction.proxy.client import mapping
from litellm_compaction.proxy.config_check import API_BASE_VARIABLE, Finding, entry_name, note, problem
from litellm_compaction.proxy.litellm_inside import LACKS
from litellm_compaction.proxy.live_settings import KEY as CHANGED_SETTINGS
from litellm_compaction.proxy.live_settings import chosen_values
from litellm_compaction.proxy.report import DeploymentReport, Reporter
from litellm_compaction.proxy.routing import Deployment, deployment_of, is_local_address
from litellm_compaction.tokenizers.registry import Sources, TokenizerSource
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.fetch import without_userinfo
from litellm_compaction.windows.lmstudio import DEFAULT_API_BASE, server_root
from litellm_compaction.windows.lmstudio_rpc import LMStudioRpc
from litellm_compaction.windows.windows import Target, Windows

# In the second it may be busy with a long prompt.
_LIMIT_S, _PROBE_LIMIT_S = 3.0, 120.0
_TOLERANCE_RATIO = 0.02
_OPT_IN = "write `model_info: {compaction: {enabled: true}}`"
# Letters, code, numbers, and other scripts: long enough that one token is less than the tolerance.
_TEXT = "Over 1,250 runs in 2026 `sum(values) / len(values)` took 38.5 ms:\n    Größe, naïve, 东京, привет. " * 4
_MESSAGES = [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": _TEXT}]
_PATH: JsonValue = {"type": "object", "properties": {"path": {"type": "string", "description": "Where it is."}}}
_TOOL: JsonValue = {"name": "read_file", "description": "Reads a text file and returns its lines.", "parameters": _PATH}


@click.command()
@click.option("--config", type=click.Path(path_type=Path), metavar="PATH", help="The proxy's config.yaml.")
@click.option("--probe", "probes", is_flag=True, help="Compare our count with each loaded model's, by a request.")
def doctor(config: Path | None, probes: bool) -> int:
    """Check a config.yaml and the servers that it names.

    It says for each deployment if it is guarded, with which window, and what is wrong; the exit code is 1 if something
    is. Without --config it reads the config of an `up` that runs, otherwise config.yaml in this folder, otherwise the
    one that comes with this package.
    """
    environ: Mapping[str, str] = os.environ
    up, here = running_up(environ), Path("config.yaml")
    file = read_config(config or (Path(up.config) if up else here if here.is_file() else shipped_config()))
    if up is not None and up.api_base and file.models_by_environment:
        environ = {API_BASE_VARIABLE: up.api_base, **environ}
    lines, findings = asyncio.run(examined(file, environ, probes=probes))
    findings = [*file.findings(environ), *findings, *(_of_up(up, file) if up else ())]
    print("\n".join((f"config   {file.path}", *lines, *_judgement(findings))))
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def _of_up(up: Running, file: ConfigFile) -> Iterator[Finding]:
    other = "" if file.path == Path(up.config) else f"; {file.path} is looked at, and is not what it runs"
    yield note("up", f"it runs at {up.base_url} with {up.config}{other}.")
    if up.is_simulated:
        yield note("up", "a SIMULATOR answers its requests, not LM Studio: the answers are canned, of no real model.")


async def examined(
    file: ConfigFile, environ: Mapping[str, str], *, probes: bool = False
) -> tuple[list[str], list[Finding]]:
    """The report of a config's deployments, in lines, and all findings at their servers and in the store."""
    environ = {**environ, API_BASE_VARIABLE: environ.get(API_BASE_VARIABLE) or DEFAULT_API_BASE}
    try:
        settings = settings_from(file.settings).with_store(environ)
    except ConfigError:
        # `check_config` reports it.
        settings = settings_from(None)
    # The environment's web proxy must not be asked for a server on this machine or network.
    async with httpx.AsyncClient(trust_env=False) as http:
        windows = Windows(cache_s=60.0, http=http, timeout_s=_LIMIT_S, rpc=LMStudioRpc.of(settings))
        # A file that cannot be used becomes a finding.
        sources = Sources(settings.tokenizer)
        reporter = Reporter(windows, sources, KnownWays())
        looks = [
            _Look(entry_name(entry, index), environ, http, settings, reporter, probes)
            for index, entry in enumerate(file.deployments)
        ]
        try:
            await asyncio.gather(*(look.at(entry) for look, entry in zip(looks, file.deployments, strict=True)))
        finally:
            await windows.aclose()
    findings = [finding for look in looks for finding in look.findings]
    findings += [finding async for finding in _of_store(file, settings, environ)]
    if looks and all(look.is_guarded is False for look in looks):
        what = "no deployment is guarded: add an lm_studio/… one, or opt one in (see each reason)."
        findings.append(problem("model_list", what))
    return [line for look in looks for line in look.lines], findings


async def _of_store(file: ConfigFile, settings: Settings, environ: Mapping[str, str]) -> AsyncIterator[Finding]:
    """Tells what the proxies have noted in their store, or that it cannot be read."""
    try:
        async with opened_store(settings, file, environ) as opened:
            fault, *lost = (await opened.store.get_fact(*LACKS) or "").split("\n")
            changed = chosen_values(await opened.store.get_setting(CHANGED_SETTINGS))
    except (ConfigError, StoreError) as error:
        # A file is made with the first compaction; a proxy's memory cannot be seen from here.
        if is_redis(settings.store):
            todo = "start it, or correct `store`; requests go on with the memory of each process meanwhile"
            yield problem("store", f"{error}: {todo}.", passes=True)
        return
    source = "the proxy that runs with this store, or ran last, says"
    if fault:
        yield problem("LiteLLM", f"{source}: {fault}")
    for words in lost:
        yield note("LiteLLM", f"{source}: {words}")
    if changed:
        named = ", ".join(f"{key}: {value}" for key, value in changed.items())
        yield note("page", f"changed on the settings page, in place of config.yaml's values: {named}.")


@dataclass(slots=True)
class _Look:
    """Looks at one deployment; `is_guarded` is None if nobody can say now."""

    name: str
    environ: Mapping[str, str]
    http: httpx.AsyncClient
    settings: Settings
    reporter: Reporter
    probes: bool
    is_guarded: bool | None = None
    lines: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    async def at(self, entry: Mapping[str, Any]) -> None:
        """Decides about an entry as the proxy does, and says what helps if that was not meant."""
        params, info = mapping(entry.get("litellm_params")), mapping(entry.get("model_info"))
        try:
            read = deployment_of(params, info, group=self.name, environ=self.environ)
        except ConfigError:
            self._say(self.name, None, "its settings are not valid")
            return
        deployment = replace(read, settings=self.settings)
        target, may_be, enabled = deployment.target, deployment.is_asked_first, deployment.own.enabled
        is_ours, opted_in = target.is_lmstudio and not may_be, deployment.opted_in
        api_base, server = target.api_base or "", without_userinfo(target.api_base or "")
        may_ask = may_be or (deployment.is_foreign and enabled is None and is_local_address(api_base))
        is_there = await self.reporter.windows.is_lmstudio(api_base, target.api_key) if may_ask else None
        if is_ours or (may_be and is_there):
            if not server.rstrip("/").endswith("/v1"):
                self._find(f"api_base is {server}, but requests go below /v1: write {server_root(server)}/v1.")
            why = "it is lm_studio/…" if is_ours else "its server answers as LM Studio"
            await self._report(deployment, why)
        elif opted_in is not None:
            await self._report(replace(deployment, target=opted_in), "model_info.compaction.enabled is true")
        elif may_be and is_there is None:
            self._find(f"{server} does not answer: start it; if it is not LM Studio, {_OPT_IN} to guard it.", True)
            self._say(self.name, None, "its server was not reached")
        else:
            if is_there:
                self._find(f"LM Studio answers at its api_base: write `model: lm_studio/{params.get('model')}`.")
            is_off = "model_info.compaction.enabled is false"
            self._say(self.name, False, is_off if enabled is False else f"its server is not LM Studio; {_OPT_IN}")

    def _find(self, said: str, passes: bool = False) -> None:
        self.findings.append(problem(self.name, said, passes=passes))

    def _say(self, title: str, is_guarded: bool | None, why: str) -> None:
        self.is_guarded = is_guarded
        says = "not known" if is_guarded is None else "yes" if is_guarded else "no"
        self.lines += ["", title, f"  guarded  {says}: {why}"]

    async def _report(self, deployment: Deployment, why: str) -> None:
        """Reports a deployment, or each loaded model of a wildcard, with the known facts."""
        windows, mode = self.reporter.windows, deployment.own.changes.get("mode", "guard")
        for report in await self.reporter.reports(deployment):
            target, name = report.target, self.name
            title = name if name.partition("/")[2] == target.model else f"{name} → {target.model}"
            place = title if "*" in name and "*" not in target.model else name
            self._say(title, mode == "guard", why if mode == "guard" else f"its mode is {mode}")
            facts = report.facts(shows_places=True).items()
            # Why there is no window is a problem, and told there.
            self.lines += [f"  {about:8} {words}" for about, words in facts if about != "window" or report.window]
            self.findings += _of(place, report, await windows.listed(target), self.settings.when_not_loaded)
            if self.probes and report.source is not None and report.is_loaded:
                line, finding = await _probe(self.http, place, target, report.source)
                self.lines.append(f"  probe    {line}")
                self.findings += [finding] if finding else []


async def _probe(
    http: httpx.AsyncClient, place: str, target: Target, source: TokenizerSource
) -> tuple[str, Finding | None]:
    """Compares our count with a server's that has loaded the model: a line of the report, and what is wrong."""
    tools: list[JsonValue] = [{"type": "function", "function": _TOOL}]
    request = Request(messages=tuple(map(parse_message, _MESSAGES)), tools=tuple(tools))
    count = await TokenCounter().count(target.key, source.family, request)
    url = f"{server_root(target.api_base or '')}/v1/chat/completions"
    body = {"model": target.model, "messages": _MESSAGES, "tools": tools, "temperature": 0, "max_tokens": 16}
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    try:
        answer = await http.post(url, json=body, headers=headers, timeout=_PROBE_LIMIT_S)
        server_tokens = int(answer.json()["usage"]["prompt_tokens"])
        off_ratio = count.tokens / server_tokens - 1
    except (httpx.HTTPError, httpx.InvalidURL, ArithmeticError, ValueError, TypeError, LookupError, RecursionError):
        return "failed", problem(place, "the probe failed: the answer has no usage.prompt_tokens.")
    line = f"{count.tokens} tokens by us, {server_tokens} by the server ({off_ratio:+.1%})"
    todo = "set `tokenizer:` to the path of the model's own tokenizer.json"
    if abs(off_ratio) <= _TOLERANCE_RATIO:
        return line, None
    if count.own.exact or not count.low <= server_tokens <= count.likely:
        why = f"outside of {count.low} to {count.likely}: see whether the server's prompt template is the model's own"
        return line, problem(place, f"{line}, {why}, or {todo}.")
    return line, note(place, f"{line}; usage corrects it. To count better from the start, {todo}.")


def _of(place: str, report: DeploymentReport, listed: Mapping[str, bool], when_not_loaded: str) -> Iterator[Finding]:
    """The findings of a report; `listed` are the models that LM Studio lists."""
    target, window, absence = report.target, report.window, report.absence
    write = "write model_info.compaction.context_length"
    if isinstance(absence, (WindowUnread, ServerUnavailable)):
        yield problem(place, str(absence), passes=True)
    elif isinstance(absence, ModelNotLoaded) or (listed and "*" in target.model):
        what = f"{target.model} is not loaded, so its window is not known"
        if when_not_loaded == "warm_up":
            yield note(place, f"{what}: the first request loads it (when_not_loaded).")
        else:
            yield problem(place, f"{what}, and requests are refused: load it in LM Studio, or write `warm_up`.")
    elif absence is not None and target.is_lmstudio:
        near = ", ".join(get_close_matches(target.model, listed, n=3, cutoff=0.3) or [*listed][:3])
        todo = f"correct the model: LM Studio has {near}" if near else "download a model (`lms get`)"
        key = "set LM_STUDIO_API_KEY if it refuses the key"
        yield problem(place, f"{absence} What to do: {todo}; correct api_base if it is not LM Studio's; {key}.")
    elif absence is not None:
        yield problem(place, f"{absence} What to do: {write}, as large as the server was started with.")
    if window is not None and not target.is_lmstudio and window.slots > window.parallel:
        text = f"{window.slots} requests at a time have this window each; if they share it (--kv-unified), write"
        yield note(place, f"{text} `admission: pool`.")
    if report.failure:
        yield problem(place, report.failure)
    yield from (note(place, warning) for warning in report.warnings)


def _judgement(findings: Sequence[Finding]) -> Iterator[str]:
    """Problems and notes; what is said of several places is said once."""
    for level, title, mark in (("problem", "Problems", "✗"), ("note", "Notes", "·")):
        places: dict[str, list[str]] = {}
        for finding in findings:
            if finding.level == level:
                places.setdefault(finding.message, []).append(finding.place)
        if places:
            yield from ("", f"{title}:")
        yield from (f"  {mark} {', '.join(named)}: {message}" for message, named in places.items())
    count = sum(finding.level == "problem" for finding in findings)
    yield from ("", "No problems found." if not count else f"{count} problem{'s' if count > 1 else ''} found.")
