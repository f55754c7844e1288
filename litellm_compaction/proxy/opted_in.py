"""The window of a deployment that an operator opted in although it is not LM Studio: who is asked, what else counts.

The order: the server's own number, `context_length`, `max_input_tokens` of `model_info`, LiteLLM's model map; 128,000
for hosted models only. A server of one's own that says nothing may have been started with any context length, and may
cut silently: without a number its requests are refused, as LM Studio's are.

A server is asked only for an opted-in deployment, and only where it is nobody's cloud: providers that name software to
run oneself (Ollama, vLLM, llamafile) at the address that the operator gave; OpenAI-compatible ones at an address in a
local network, where llama.cpp's server, vLLM and Ollama all pass for OpenAI.
"""

from __future__ import annotations

import ipaddress
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from litellm_compaction.windows.other_servers import Api
from litellm_compaction.windows.windows import Source, Target

# What the issue asks for where nothing else is known of a hosted model; never for LM Studio or another own server.
DEFAULT_WINDOW_TOKENS = 128_000
OPENAI_PROVIDERS = ("openai", "custom_openai")

_OLLAMA = ("ollama", "ollama_chat")
# What speaks which API, and where LiteLLM looks for it when the deployment names no address (LiteLLM 1.106.2:
# main.py:4503, llms/hosted_vllm/chat/transformation.py:111, llms/llamafile/chat/transformation.py:28).
_SELF_HOSTED: dict[str, tuple[tuple[Api, ...], str, str | None]] = {
    "ollama": (("ollama",), "OLLAMA_API_BASE", "http://localhost:11434"),
    "ollama_chat": (("ollama",), "OLLAMA_API_BASE", "http://localhost:11434"),
    "hosted_vllm": (("vllm",), "HOSTED_VLLM_API_BASE", None),
    "llamafile": (("llama.cpp",), "LLAMAFILE_API_BASE", "http://127.0.0.1:8080/v1"),
}
_OPENAI_COMPATIBLE: tuple[Api, ...] = ("llama.cpp", "vllm", "ollama")
# Ollama's own cloud, which LiteLLM reaches by the same provider.
_CLOUD_HOSTS = ("ollama.com", "ollama.ai")
_LOCAL_SUFFIXES = (".local", ".lan", ".home", ".internal", ".localdomain", ".home.arpa", ".ts.net", ".test")
_MODEL_MAP_FILE = "model_prices_and_context_window_backup.json"


def opted_in_target(
    target: Target,
    provider: str,
    litellm_params: Mapping[str, Any],
    model_info: Mapping[str, Any],
    environ: Mapping[str, str],
) -> Target:
    """`target` as an operator opted it in: whom to ask for its window, and what counts where nobody answers.

    Args:
        target: of the deployment; its `context_length` is what stands in `model_info.compaction`.
        provider: LiteLLM's name for how it is reached.
        litellm_params: `num_ctx` makes Ollama allocate that many tokens for each request.
        model_info: `max_input_tokens`, as far as the operator wrote it.
        environ: for the addresses that LiteLLM takes from variables.
    """
    apis, variable, address = _SELF_HOSTED.get(provider, ((), "", None))
    api_base = target.api_base or environ.get(variable) or address
    if provider in OPENAI_PROVIDERS and api_base and is_local_address(api_base):
        apis = _OPENAI_COMPATIBLE
    is_own = provider in _SELF_HOSTED or bool(api_base and is_local_address(api_base))
    if api_base is None or _host(api_base).endswith(_CLOUD_HOSTS):
        apis, is_own = (), is_own and api_base is None
    asked = _positive(litellm_params.get("num_ctx")) if provider in _OLLAMA else None
    tokens, source = _told(target, asked, provider, model_info) or (
        (None, "operator") if is_own else (DEFAULT_WINDOW_TOKENS, "default")
    )
    return replace(
        target,
        api_base=api_base,
        context_length=tokens,
        context_source=source,
        is_lmstudio=False,
        apis=apis,
        asked_tokens=asked,
    )


def without_guesses(target: Target, written: int | None) -> Target:
    """`target` while nobody knows whether its server is LM Studio, which has no window by default.

    Args:
        target: as opted in.
        written: `context_length` of the deployment.
    """
    return replace(target, context_length=written, context_source="operator")


def is_local_address(api_base: str) -> bool:
    """Whether an address is certainly nobody's hosted service: loopback, private, or a name of a local network.

    Only such addresses are ever asked whether they are LM Studio; a public one has to be opted in, as
    `lm_studio/…` or with `model_info.compaction.enabled`.
    """
    host = _host(api_base)
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return bool(host) and ("." not in host or host.endswith(_LOCAL_SUFFIXES))


def max_input_tokens(provider: str, model: str) -> int | None:
    """What LiteLLM's model map says of a provider's model; no network, and no import of LiteLLM.

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


def _told(target: Target, asked: int | None, provider: str, model_info: Mapping[str, Any]) -> tuple[int, Source] | None:
    """The first number that anybody but the server gives, and who it was."""
    candidates: tuple[tuple[int | None, Source], ...] = (
        (target.context_length, "operator"),
        (asked, "operator"),
        (_positive(model_info.get("max_input_tokens")), "max_input_tokens"),
        (max_input_tokens(provider, target.model), "model_map"),
    )
    return next(((tokens, source) for tokens, source in candidates if tokens), None)


def _model_map() -> Mapping[str, Any]:
    """The map of the running LiteLLM, which an operator may have extended; else the one that it ships."""
    running = getattr(sys.modules.get("litellm"), "model_cost", None)
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
