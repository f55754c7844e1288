"""The deployments that a request can reach, which of them are guarded, with which settings, and who carries them.

A deployment is guarded if it is `lm_studio/…`, or `openai/…` at a loopback or private address that answers as LM
Studio, or if its operator opted in: then by its server's own window, the operator's `context_length`, or
`max_input_tokens`. Only servers of one's own are asked: vLLM, llamafile, and OpenAI-compatible ones in a local network.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from litellm_compaction.concurrency import Kept
from litellm_compaction.config import NO_CHANGES, DeploymentSettings, Settings, deployment_settings_from
from litellm_compaction.core.go_on import Way
from litellm_compaction.engine import ALL_WAYS
from litellm_compaction.errors import CompactionError, ConfigError
from litellm_compaction.proxy import litellm_inside
from litellm_compaction.proxy.client import fingerprint, mapping, metadata_of
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.windows.other_servers import SERVERS
from litellm_compaction.windows.windows import Target, Window, Windows

logger = logging.getLogger("litellm_compaction")

# A part of an entry of the router's list, or of the arguments of a call.
Entry: TypeAlias = Mapping[str, Any]
Carrier: TypeAlias = Literal["transport", "hooks"]
# The ways of each to go on with an answer: LiteLLM's hooks know chats only.
WAYS_OF: Mapping[Carrier, frozenset[Way]] = {"transport": frozenset(ALL_WAYS), "hooks": frozenset(("prefill", "turn"))}
# Of a hosted pruning model without any other number; never of a model that is guarded.
DEFAULT_WINDOW_TOKENS = 128_000
_OPENAI_PROVIDERS = ("openai", "custom_openai")
# Where LiteLLM finds a server whose entry has no address: in a variable, or at an address of its own; and a key, in a
# variable of the same name with KEY for BASE.
_PLACES: Mapping[str, tuple[str, str | None]] = {
    "lm_studio": ("LM_STUDIO_API_BASE", None),
    "openai": ("OPENAI_API_BASE", None),
    **{provider: place for server in SERVERS.values() for provider, place in server.providers.items()},
}
_LOCAL_SUFFIXES = (".local", ".lan", ".home", ".internal", ".localdomain", ".home.arpa", ".ts.net", ".test")
# LiteLLM takes a model of such a name, without a provider, for OpenAI's.
_OPENAIS = re.compile(r"(gpt-|chatgpt-|o\d)")
# LiteLLM reads these before a model's name, behind a provider's, as the route by which to ask for it.
_ROUTE = re.compile(r"\A([^/]+/)?(?:responses|chat_completions)/")
_MAX_GROUPS = 64
_LISTED = "litellm-compaction-"
_DEFAULTS = Settings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One deployment of the router."""

    id: str  # The router's; pins a call to this deployment.
    group: str  # Its `model_name`.
    provider: str  # LiteLLM's name for its kind.
    target: Target  # For window and counting: of LM Studio, if its server is or, until it is guarded, may be that.
    opted_in: Target | None = None  # For a server that is not LM Studio; None leaves that alone.
    own: DeploymentSettings = NO_CHANGES  # `model_info.compaction`.
    settings: Settings = _DEFAULTS  # The selector's or, once it is guarded, those in force for it.
    conflict: str = ""  # Why a change at run time does not reach it.

    @property
    def is_foreign(self) -> bool:
        """It is left alone, whatever its server is."""
        return not self.target.is_lmstudio and self.opted_in is None

    @property
    def is_asked_first(self) -> bool:
        """Its server decides, by a question, if it is LM Studio."""
        return self.target.is_lmstudio and self.provider != "lm_studio"

    @property
    def carrier(self) -> Carrier:
        """The transport where LiteLLM reaches the server by a client that can be given."""
        is_reachable = self.provider in ("lm_studio", *_OPENAI_PROVIDERS) and self.target.api_base is not None
        return "transport" if is_reachable and self.settings.carrier != "hooks" else "hooks"

    @property
    def does_guard(self) -> bool:
        """It is not observed only."""
        return self.settings.mode == "guard"

    @property
    def shape(self) -> tuple[object, ...]:
        """The same for the same model of the same server with the same settings."""
        return self.settings, self.target.api_base, self.target.model


def deployment_of(
    params: Entry, info: Entry, *, group: str, environ: Mapping[str, str], is_asked: bool = False
) -> Deployment:
    """The deployment that a `model_list` entry, or the arguments of a call to it, describe.

    A pruning model `is_asked` as if it had been opted in, and with a supposed window if it is hosted. A ConfigError is
    a `model_info.compaction` that is not valid.
    """
    full_name = _text(params.get("model"))
    prefix, slash, behind = full_name.partition("/")
    # Of `lm_studio/*` a client may ask for no model: LM Studio then answers with the one that is loaded.
    named = prefix if slash else "openai" if _OPENAIS.match(full_name) else ""
    provider = _text(params.get("custom_llm_provider")) or named
    model = without_route(behind if slash and prefix == provider else full_name)
    section = {**mapping(info.get("compaction")), "enabled": True} if is_asked else info.get("compaction")
    place = f"model_info.compaction of {group or full_name!r}"
    own = NO_CHANGES if section is None else deployment_settings_from(section, place)
    api_base, api_key = _address(provider, params, environ)
    is_ours, is_near = provider == "lm_studio", provider in _OPENAI_PROVIDERS and is_local_address(api_base)
    identity = _text(info.get("id")) or full_name
    target = Target(
        key=f"{identity}|{model}",
        model=model,
        api_base=api_base,
        api_key=api_key,
        context_length=own.context_length,
        is_lmstudio=(is_ours or is_near) and own.enabled is not False,
        tokenizer=str(own.changes.get("tokenizer", "")),
    )
    opted_in = _opted_in(target, provider, info, is_asked) if own.enabled and not is_ours else None
    return Deployment(id=identity, group=group, provider=provider, target=target, opted_in=opted_in, own=own)


def _address(provider: str, params: Entry, environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The address and key by which LiteLLM reaches a server, with those that it takes from the environment."""

    def read(*names: str) -> str | None:
        text = next(filter(None, (_text(params.get(name)) for name in names)), None)
        return environ.get(text.removeprefix("os.environ/")) if text and text.startswith("os.environ/") else text

    api_base, api_key = read("api_base", "base_url"), read("api_key")
    variable, address = _PLACES.get(provider, ("", None))
    # OpenAI's own name goes before that (LiteLLM's main.py, `_resolve_openai_api_base`).
    address = environ.get("OPENAI_BASE_URL" if provider == "openai" else variable) or environ.get(variable) or address
    if provider == "openai" and (api_base or not is_local_address(address)):
        # The key of a hosted service is no business of a local server, nor its address ours.
        return api_base, api_key
    return api_base or address, api_key or environ.get(variable.replace("BASE", "KEY"))


def _opted_in(target: Target, provider: str, info: Entry, is_asked: bool) -> Target:
    """`target` as an operator opted it in: the ways to ask for its window, and the number without an answer."""
    is_local, shown = is_local_address(target.api_base), info.get("max_input_tokens")
    may_be = (name for name, server in SERVERS.items() if target.is_lmstudio or provider in server.providers)
    apis = tuple(may_be) if target.api_base else ()
    tokens, source = target.context_length, "operator"
    # As YAML, the model map or a pydantic float hold it.
    if tokens is None and not isinstance(shown, bool) and isinstance(shown, (int, float)) and 1 <= shown <= 1e9:
        tokens, source = int(shown), "max_input_tokens"
    # Ollama's is its operator's number, wherever it runs.
    if tokens is None and is_asked and not (apis or is_local or provider.startswith("ollama")):
        tokens, source = DEFAULT_WINDOW_TOKENS, "default"
    return replace(target, context_length=tokens, context_source=source, is_lmstudio=False, apis=apis)


def without_route(model: str) -> str:
    """A model's name, with or without a provider's, without the route that LiteLLM would ask for it by."""
    return _ROUTE.sub(lambda route: route[1] or "", model)


def is_local_address(api_base: str | None) -> bool:
    """True if an address is certainly no hosted service: loopback, private, or a name of a local network."""
    address = api_base or ""
    host = urlsplit(address if "//" in address else f"//{address}").hostname or ""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return bool(host) and ("." not in host or host.endswith(_LOCAL_SUFFIXES))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def id_of(entry: Entry) -> str:
    return str(mapping(entry.get("model_info")).get("id"))


def router_entries(router: Any) -> list[Entry]:
    """Every deployment of the router that its operator has put there."""
    entries = litellm_inside.deployments(router) if router is not None else ()
    return [entry for entry in entries if not is_listed_here(id_of(entry))]


def group_entries(router: Any, name: str, team_id: str | None = None) -> list[Entry]:
    """The router's entries of one group, alias, wildcard match or deployment id, without its fallbacks."""
    entries = litellm_inside.deployments(router, name, team_id)
    return entries or [*filter(None, [litellm_inside.deployment(router, name)])]


def reachable_entries(router: Any, model: str, request: Mapping[str, Any]) -> list[Entry]:
    """The router's entries that a request for `model` can reach: its group, and all fallbacks of both."""
    team_id = metadata_of(request).get("user_api_key_team_id")
    listed = [
        each for key in litellm_inside.FALLBACKS for each in (request.get(key), litellm_inside.setting(router, key))
    ]
    fallbacks = [fallback for each in listed if isinstance(each, list) for fallback in each]
    entries: list[Entry] = []
    names = [model]
    # It grows meanwhile.
    for name in names:
        entries += group_entries(router, name, team_id if isinstance(team_id, str) else None)
        new = dict.fromkeys(each for fallback in fallbacks for each in _named(fallback, name) if each not in names)
        names += [*new][: _MAX_GROUPS - len(names)]
    return entries


def _named(fallback: object, name: str) -> Iterable[str]:
    """The groups that a fallback names for `name`: `{"a": ["b"]}`, `{"*": …}`, or a client's `"b"`."""
    groups = [fallback]
    if isinstance(fallback, Mapping):
        listed = (fallback.get(name), fallback.get("*"), [fallback.get("model")])
        groups = [group for each in listed if isinstance(each, (list, tuple)) for group in each]
    return (group for group in groups if isinstance(group, str))


def listed_id(wildcard_id: str, model: str) -> str:
    """The id of the deployment that shows one model behind a wildcard's; the same one for the same."""
    return f"{_LISTED}{fingerprint(f'{wildcard_id}|{model}')}"


def is_listed_here(deployment_id: str) -> bool:
    """We have put the deployment into the router's list, for a model behind a wildcard."""
    return deployment_id.startswith(_LISTED)


def serves(pattern: str, name: str) -> bool:
    """True if a `model_name` serves `name`: itself, or a wildcard as LiteLLM reads it, with `*` alone special."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def limits_of(window: Window, settings: Settings) -> dict[str, int]:
    """A window by the names of LiteLLM's lists, and the part that we set aside for an answer: clients take it off."""
    least_tokens = min(settings.constants.output_buffer_min_tokens, window.tokens // 10)
    answer_tokens = max(int(settings.constants.output_buffer_ratio * window.tokens), least_tokens)
    return {"max_input_tokens": window.tokens, "max_output_tokens": answer_tokens}


class DeploymentSelector:
    """The operator's settings, applied to deployments."""

    def __init__(self, source: LiveSettings, windows: Windows) -> None:
        self.configured = source.configured
        # What lacks of all that requests are guarded by: one look at a router, and at the client that carries answers.
        self.faults = Kept(litellm_inside.look, lambda _: math.inf, most=2)
        self._source = source
        self._windows = windows
        self._warn_once = lru_cache(logger.warning)

    async def reachable(self, router: Any, request: Mapping[str, Any]) -> list[Deployment | None]:
        """Every deployment that a request can reach, None for those that are left alone; [] if that cannot be said."""
        model = request.get("model")
        if router is None or not isinstance(model, str) or await self.faults.get((router, False)) is not None:
            return []
        return [await self.guard(self.deployment(entry)) for entry in reachable_entries(router, model, request)]

    async def is_guarded(self, router: Any, request: Mapping[str, Any]) -> bool:
        """Returns True if every deployment that a request, such as `{"model": name}`, can reach is guarded."""
        deployments = await self.reachable(router, request)
        return bool(deployments) and all(each is not None and each.does_guard for each in deployments)

    def deployment(self, entry: Entry, *, is_asked: bool = False) -> Deployment:
        """The deployment that an entry of the router's list describes, as `deployment_of` has it."""
        params, group = mapping(entry.get("litellm_params")), str(entry.get("model_name") or "")
        if (name := params.get("litellm_credential_name")) is not None:
            # LiteLLM adds them after our hook.
            own = {key: value for key, value in params.items() if value is not None}
            params = {**litellm_inside.Seam.CREDENTIALS.needed()(str(name)), **own}
        info = mapping(entry.get("model_info"))
        read = deployment_of(params, info, group=group, environ=os.environ, is_asked=is_asked)
        return replace(read, settings=self.configured)

    def called(self, router: Any, kwargs: Mapping[str, Any]) -> Deployment:
        """The deployment that a call's arguments describe."""
        group = metadata_of(kwargs).get("model_group") or litellm_inside.deployment(router, id_of(kwargs)).get(
            "model_name"
        )
        return self.deployment({"model_name": group, "litellm_params": kwargs, "model_info": kwargs.get("model_info")})

    async def guard(self, deployment: Deployment) -> Deployment | None:
        """The deployment as it is guarded; None for one that is left alone."""
        if deployment.is_foreign:
            return None
        current, own, conflict = await self._source.current(), deployment.own, ""
        try:
            settings = current.for_deployment(own) if own.changes else current
        except ConfigError as error:
            if current == self.configured:
                raise
            settings, conflict = self.configured.for_deployment(own), str(error)
            self._warn_once("settings changed at run time do not reach model=%s: %s", deployment.group, conflict)
        target = await self._target(deployment) if settings.mode != "off" else None
        return None if target is None else replace(deployment, target=target, settings=settings, conflict=conflict)

    async def guarded(self, router: Any) -> AsyncIterator[Deployment]:
        """Every guarded deployment of a router, in its order."""
        for entry in router_entries(router):
            if (guard := await self.guard_of(entry)) is not None:
                yield guard

    async def guard_of(self, entry: Entry) -> Deployment | None:
        """As `guard`; None also for one that was added with wrong settings: its requests are refused, it hides none."""
        with contextlib.suppress(ConfigError):
            return await self.guard(self.deployment(entry))
        return None

    async def _target(self, deployment: Deployment) -> Target | None:
        """The deployment's target, after it is known which server it is; None for one that was not opted in."""
        target, other = deployment.target, deployment.opted_in
        if not deployment.is_asked_first:
            return other or target
        answer = target.api_base is not None and await self._windows.is_lmstudio(target.api_base, target.api_key)
        if answer is None and other is None:
            message = "model=%s is not guarded while its server does not answer: if it is LM Studio, write %s"
            self._warn_once(message, deployment.group, "`model: lm_studio/…`")
        if answer or other is None:
            return target if answer else None
        # LM Studio, which it may be while it is silent, has no window by default.
        return other if answer is False else replace(other, context_length=deployment.own.context_length)

    async def pruning_target(self, router: Any, name: str) -> Target | None:
        """The target of a pruning model, of several the one with the smallest window; None for an unknown name."""
        deployments = [self.deployment(entry, is_asked=True) for entry in group_entries(router, name)]
        targets = [target for each in deployments if (target := await self._target(each)) is not None]
        tokens = {each.key: await self._windows.tokens_now(each) for each in targets if len(targets) > 1}
        return min(targets, key=lambda target: tokens.get(target.key) or math.inf, default=None)

    async def why_unusable(self, router: Any, name: str) -> str:
        """Says why summaries do not go to a pruning model now; "" if they do."""
        try:
            if (target := await self.pruning_target(router, name)) is None:
                return "no model of this proxy has this name"
            await self._windows.resolve(target)
        except CompactionError as error:
            return f"its context length is not known: {error.for_clients}"
        return ""
