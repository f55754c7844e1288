"""The deployments that a request can reach, which of them are guarded, and which carrier serves each.

A deployment is guarded if it is LM Studio (`lm_studio/…`, or an OpenAI-compatible address that answers as LM Studio) or
if its operator opted in. The transport carries it if LiteLLM reaches it through the OpenAI client, the hooks otherwise.

The window of an opted-in deployment, in this order: the server's own number, `context_length`, `max_input_tokens` of
`model_info`, LiteLLM's model map; 128,000 for hosted models only. A server of one's own that says nothing may have
been started with any context length, and may cut silently: without a number its requests are refused, as LM Studio's
are. Of opted-in deployments only servers of one's own are asked: those of providers that name software to run oneself
(Ollama, vLLM, llamafile), and OpenAI-compatible ones at an address in a local network.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from litellm_compaction.config import SAME_MODEL, DeploymentSettings, Settings, deployment_settings_from
from litellm_compaction.core.continuation.request import Way
from litellm_compaction.engine import ALL_WAYS
from litellm_compaction.proxy.litellm_inside import router as litellm_router
from litellm_compaction.proxy.litellm_inside.seam import Seam
from litellm_compaction.windows.other_servers import SERVERS
from litellm_compaction.windows.windows import Source, Target

# Of a hosted model without any other number; never for LM Studio or another own server.
DEFAULT_WINDOW_TOKENS = 128_000
OPENAI_PROVIDERS = ("openai", "custom_openai")

_LOCAL_SUFFIXES = (".local", ".lan", ".home", ".internal", ".localdomain", ".home.arpa", ".ts.net", ".test")
_MODEL_MAP_FILE = "model_prices_and_context_window_backup.json"
# LiteLLM asks these for text completions, all others for a chat (main.py, `text_completion`, 1.106.2).
_TEXT_PROVIDERS = frozenset({"openai", "azure", "azure_text", "text-completion-openai", "text-completion-codestral"})
# LiteLLM reads these before a model's name, behind a provider's, as the route by which to ask for it.
_ROUTE = re.compile(r"\A([^/]+/)?(?:responses|chat_completions)/")
_MAX_GROUPS = 64
_SHOWN_NAMES = 20
# The ways of each to go on with an answer: LiteLLM's hooks know chats only.
WAYS_OF: Mapping[Carrier, frozenset[Way]] = {
    "transport": frozenset(ALL_WAYS),
    "hooks": frozenset(("prefill", "turn")),
}
# Replaces LiteLLM's OpenAI client by a handler that ignores the client it is given (tried out on 1.106.2).
BYPASS_VARIABLE = "EXPERIMENTAL_OPENAI_BASE_LLM_HTTP_HANDLER"


def opted_in_target(
    target: Target,
    provider: str,
    litellm_params: Mapping[str, Any],
    model_info: Mapping[str, Any],
    environ: Mapping[str, str],
) -> Target:
    """`target` as an operator opted it in: the server to ask for its window, and the number without an answer.

    Args:
        target: its `context_length` is that of `model_info.compaction`.
        provider: LiteLLM's name for its kind.
        litellm_params: may say how many tokens each request makes the server allocate (Ollama: `num_ctx`).
        environ: for the addresses that LiteLLM takes from variables.
    """
    server = next((server for server in SERVERS.values() if provider in server.providers), None)
    apis: tuple[str, ...] = () if server is None else (server.name,)
    variable, address = ("", None) if server is None else server.providers[provider]
    api_base = target.api_base or environ.get(variable) or address
    is_local = bool(api_base and is_local_address(api_base))
    if provider in OPENAI_PROVIDERS and is_local:
        apis = tuple(SERVERS)
    is_own = server is not None or is_local
    # A hosted service may go by the name of a server of one's own.
    cloud_hosts = tuple(host for each in SERVERS.values() for host in each.cloud_hosts)
    if api_base is None or _host(api_base).endswith(cloud_hosts):
        apis, is_own = (), is_own and api_base is None
    asked = _positive(litellm_params.get(server.window_parameter)) if server and server.window_parameter else None
    candidates: tuple[tuple[int | None, Source], ...] = (
        (target.context_length, "operator"),
        (asked, "operator"),
        (_positive(model_info.get("max_input_tokens")), "max_input_tokens"),
        (max_input_tokens(provider, target.model), "model_map"),
        (None, "operator") if is_own else (DEFAULT_WINDOW_TOKENS, "default"),
    )
    tokens, source = next((each for each in candidates if each[0]), candidates[-1])
    return replace(
        target,
        api_base=api_base,
        context_length=tokens,
        context_source=source,
        is_lmstudio=False,
        apis=apis,
        asked_tokens=asked,
    )


def is_local_address(api_base: str) -> bool:
    """True if an address is certainly no hosted service: loopback, private, or a name of a local network.

    Only such addresses are ever asked if they are LM Studio; a public one has to be opted in, as `lm_studio/…` or with
    `model_info.compaction.enabled`.
    """
    host = _host(api_base)
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return bool(host) and ("." not in host or host.endswith(_LOCAL_SUFFIXES))


def max_input_tokens(provider: str, model: str) -> int | None:
    """The number in LiteLLM's model map; no network, and no import of LiteLLM.

    `litellm.get_model_info` would ask an Ollama server for its trained length, and wait for it.
    """
    known = _model_map()
    for name in (f"{provider}/{model}", model):
        entry = known.get(name)
        if isinstance(entry, Mapping) and entry.get("litellm_provider", provider) == provider:
            tokens = _positive(entry.get("max_input_tokens"))
            if tokens is not None:
                return tokens
    return None


def _is_openais(model: str) -> bool:
    """LiteLLM takes a model of this name, without a provider, for OpenAI's."""
    entry = _model_map().get(model)
    return isinstance(entry, Mapping) and entry.get("litellm_provider") == "openai"


def _model_map() -> Mapping[str, Any]:
    """The map of the running LiteLLM, which an operator may have extended, or else the one that it ships."""
    running = Seam.MODEL_MAP.get()
    return running if isinstance(running, Mapping) else _shipped_model_map()


@lru_cache(maxsize=1)
def _shipped_model_map() -> Mapping[str, Any]:
    spec = find_spec("litellm")
    if spec is None or spec.origin is None:
        return {}
    try:
        parsed = json.loads((Path(spec.origin).parent / _MODEL_MAP_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return parsed if isinstance(parsed, Mapping) else {}


def _host(api_base: str) -> str:
    return urlsplit(api_base if "//" in api_base else f"//{api_base}").hostname or ""


def _positive(value: object) -> int | None:
    """A number of tokens as YAML, the model map or a pydantic float hold it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= 1e9:
        return None
    return int(value)


Kind: TypeAlias = Literal["lm_studio", "maybe_lm_studio", "opted_in", "foreign"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One deployment of the router.

    Attributes:
        id: the router's id; pins a call to this deployment.
        group: its `model_name`.
        provider: LiteLLM's name for its kind.
        kind: `maybe_lm_studio` is decided by asking its server once.
        target: for window and counting.
        settings: `model_info.compaction`.
        other_target: in place of `target` if its server is not LM Studio; None leaves it alone then.
    """

    id: str
    group: str
    provider: str
    kind: Kind
    target: Target
    settings: DeploymentSettings
    other_target: Target | None = None

    @property
    def is_wildcard(self) -> bool:
        """The router fills in the model name, so the id alone does not name a model."""
        return "*" in self.group


def deployment_of(
    litellm_params: Mapping[str, Any],
    model_info: Mapping[str, Any],
    *,
    group: str,
    environ: Mapping[str, str],
) -> Deployment:
    """The deployment that a `model_list` entry, or the arguments of a call to it, describe.

    Raises:
        ConfigError: `model_info.compaction` is not valid.
    """
    full_name = _text(litellm_params.get("model"))
    prefix, slash, rest = full_name.partition("/")
    # Of `lm_studio/*` a client may ask for no model: LM Studio then answers with the one that is loaded.
    named = prefix if slash else "openai" if _is_openais(full_name) else ""
    provider = _text(litellm_params.get("custom_llm_provider")) or named
    model = without_route(rest if slash and prefix == provider else full_name)
    own = deployment_settings_from(model_info.get("compaction"), f"model_info.compaction of {group or full_name!r}")
    api_base = _resolved(litellm_params.get("api_base") or litellm_params.get("base_url"), environ)
    api_key = _resolved(litellm_params.get("api_key"), environ)
    if provider == "lm_studio":
        api_base = api_base or environ.get("LM_STUDIO_API_BASE")
        api_key = api_key or environ.get("LM_STUDIO_API_KEY")
    elif provider == "openai" and api_base is None and is_local_address(base := _openai_base(environ)):
        api_base, api_key = base, api_key or environ.get("OPENAI_API_KEY")
    kind = _kind(provider, api_base, own)
    identity = _text(model_info.get("id")) or full_name
    target = Target(
        key=f"{identity}|{model}",
        model=model,
        api_base=api_base,
        api_key=api_key,
        context_length=own.context_length,
        is_lmstudio=kind in ("lm_studio", "maybe_lm_studio"),
        tokenizer=str(own.changes.get("tokenizer", "")),
    )
    other = opted_in_target(target, provider, litellm_params, model_info, environ) if own.enabled else None
    return Deployment(
        id=identity,
        group=group,
        provider=provider,
        kind=kind,
        target=other if kind == "opted_in" and other is not None else target,
        settings=own,
        other_target=other if kind == "maybe_lm_studio" else None,
    )


def without_route(model: str) -> str:
    """A model's name, with or without a provider's, without the route that LiteLLM would ask for it by."""
    return _ROUTE.sub(lambda found: found[1] or "", model)


def asked_deployment_of(
    litellm_params: Mapping[str, Any], model_info: Mapping[str, Any], *, group: str, environ: Mapping[str, str]
) -> Deployment:
    """The deployment as a pruning model: its window is looked for as if it had been opted in."""
    written = model_info.get("compaction")
    own = {**(written if isinstance(written, Mapping) else {}), "enabled": True}
    return deployment_of(litellm_params, {**model_info, "compaction": own}, group=group, environ=environ)


def refuses_by(provider: str) -> Mapping[str, Any]:
    """The fields by which a provider's server refuses a prompt that it would cut in silence; {} if it knows none."""
    server = next((server for server in SERVERS.values() if provider in server.providers), None)
    return server.refuses_by if server is not None else {}


def is_bridged(provider: str) -> bool:
    """LiteLLM makes a chat of a text completion for this provider."""
    return provider not in _TEXT_PROVIDERS


def group_entries(router: Any, name: str, team_id: str | None = None) -> list[Mapping[str, Any]]:
    """The router's entries of one group, alias, wildcard match or deployment id, without its fallbacks."""
    found = litellm_router.deployments(router, name, team_id)
    if not found:
        pinned = litellm_router.deployment(router, name)
        found = [pinned] if pinned is not None else []
    return [as_entry(entry) for entry in found]


def reachable_entries(router: Any, model: str, request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The router's entries that a request for `model` can reach: its group and all configured fallbacks.

    Args:
        model: as the client wrote it: a group, an alias, a wildcard match or a deployment id.
        request: the request's body; a client may bring its own `fallbacks`.
    """
    entries: list[Mapping[str, Any]] = []
    waiting, seen = [model], {model}
    team_id = as_entry(request.get("metadata")).get("user_api_key_team_id")
    while waiting and len(seen) <= _MAX_GROUPS:
        name = waiting.pop(0)
        entries.extend(group_entries(router, name, team_id if isinstance(team_id, str) else None))
        for fallback in _fallbacks(router, name, request):
            if fallback not in seen:
                seen.add(fallback)
                waiting.append(fallback)
    return entries


def has_window_fallback(router: Any, group: str) -> bool:
    """The operator configured `context_window_fallbacks` for a group."""
    return any(_named(litellm_router.setting(router, "context_window_fallbacks"), group))


def router_entries(router: Any) -> list[Mapping[str, Any]]:
    """Every deployment of the router."""
    return [as_entry(entry) for entry in litellm_router.deployments(router)] if router is not None else []


def unknown_model(config: Mapping[str, Any], name: str) -> str:
    """Says why `name` is no model of a config file, and which are; "" if it is one, or may become one.

    Args:
        config: as written: `model_list`, aliases of `router_settings`, and whether models can come from a database.
        name: of a pruning model.
    """
    if name == SAME_MODEL or as_entry(config.get("general_settings")).get("store_model_in_db"):
        return ""
    names: list[str] = []
    ids: list[str] = []
    for entry in config.get("model_list") or ():
        names.append(_text(as_entry(entry).get("model_name")))
        ids.append(_text(as_entry(as_entry(entry).get("model_info")).get("id")))
    aliases = as_entry(as_entry(config.get("router_settings")).get("model_group_alias"))
    names = list(dict.fromkeys([*filter(None, names), *map(str, aliases)]))
    if any(serves(known, name) for known in names) or name in filter(None, ids):
        return ""
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")
    return f"no model of this proxy is called {name!r}; known: {shown or 'none'}, and {SAME_MODEL}"


def serves(pattern: str, name: str) -> bool:
    """True if a `model_name` serves `name`: itself, or a wildcard as LiteLLM reads it, with `*` alone special."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def _fallbacks(router: Any, name: str, request: Mapping[str, Any]) -> Iterable[str]:
    for setting in litellm_router.FALLBACKS:
        yield from _named(request.get(setting), name)
        yield from _named(litellm_router.setting(router, setting), name)


def _named(fallbacks: object, name: str) -> Iterable[str]:
    """The groups that a fallback setting names for `name`: `[{"a": ["b"]}]`, `{"*": …}`, or a client's `["b"]`."""
    if not isinstance(fallbacks, Sequence) or isinstance(fallbacks, str):
        return
    for entry in fallbacks:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, Mapping):
            if isinstance(entry.get("model"), str):
                yield entry["model"]
            for group, targets in entry.items():
                if group in (name, "*") and isinstance(targets, Sequence) and not isinstance(targets, str):
                    yield from (target for target in targets if isinstance(target, str))


def _kind(provider: str, api_base: str | None, own: DeploymentSettings) -> Kind:
    if own.enabled is False:
        return "foreign"
    if provider == "lm_studio":
        return "lm_studio"
    if provider in OPENAI_PROVIDERS and api_base and is_local_address(api_base):
        return "maybe_lm_studio"
    return "opted_in" if own.enabled else "foreign"


def as_entry(value: Any) -> Mapping[str, Any]:
    """A value of LiteLLM's router as a mapping; {} for anything else."""
    if isinstance(value, Mapping):
        return value
    dumped = value.model_dump() if hasattr(value, "model_dump") else {}
    return dumped if isinstance(dumped, Mapping) else {}


def _openai_base(environ: Mapping[str, str]) -> str:
    """The address that LiteLLM takes for OpenAI's models without one (main.py, `_resolve_openai_api_base`)."""
    return environ.get("OPENAI_BASE_URL") or environ.get("OPENAI_API_BASE") or ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _resolved(value: object, environ: Mapping[str, str]) -> str | None:
    text = _text(value)
    if text.startswith("os.environ/"):
        return environ.get(text.removeprefix("os.environ/"))
    return text or None


Carrier: TypeAlias = Literal["transport", "hooks"]


def carrier_of(deployment: Deployment, settings: Settings, environ: Mapping[str, str] = os.environ) -> Carrier:
    if settings.carrier == "hooks" or is_bypassed(environ):
        return "hooks"
    reachable = deployment.provider in ("lm_studio", *OPENAI_PROVIDERS) and deployment.target.api_base is not None
    return "transport" if reachable else "hooks"


def is_bypassed(environ: Mapping[str, str] = os.environ) -> bool:
    """LiteLLM is configured to ignore the client that carries our transport."""
    return environ.get(BYPASS_VARIABLE, "").strip().lower() in ("true", "1", "yes")
