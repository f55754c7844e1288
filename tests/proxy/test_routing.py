"""Who is asked for a window, and what counts beside: the rule for deployments that an operator opted in."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.proxy.routing import (
    Deployment,
    asked_deployment_of,
    deployment_of,
    unknown_model,
)
from litellm_compaction.windows.windows import Target

ON = {"compaction": {"enabled": True}}
LOCAL, HOSTED = "http://127.0.0.1:8080/v1", "https://api.example.com/v1"


def deployment(model: str, info: dict[str, Any] | None = None, **params: Any) -> Deployment:
    return deployment_of({"model": model, **params}, info or {}, group="g", environ={})


def opted(model: str, *, compaction: dict[str, Any] | None = None, info: Any = None, **params: Any) -> Target:
    """The target of an opted-in deployment whose server is not LM Studio."""
    found = deployment(model, {"compaction": {"enabled": True, **(compaction or {})}, **(info or {})}, **params)
    return found.other_target or found.target


@pytest.mark.parametrize(
    ("model", "compaction", "info", "params", "tokens", "source"),
    [
        ("openai/gpt-4o", {"context_length": 9000}, {"max_input_tokens": 7000}, {}, 9000, "operator"),
        ("openai/gpt-4o", {}, {"max_input_tokens": 7000}, {}, 7000, "max_input_tokens"),
        ("openai/gpt-4o", {}, {"max_input_tokens": True}, {}, None, "operator"),
        ("openai/gpt-4o", {}, {"max_input_tokens": 10**9 + 1}, {}, None, "operator"),
        ("openrouter/never-heard-of", {}, {}, {}, None, "operator"),
        ("ollama/never-heard-of", {}, {}, {"num_ctx": 16384}, 16384, "operator"),
    ],
)
def test_the_sources_have_an_order(
    model: str,
    compaction: dict[str, Any],
    info: dict[str, Any],
    params: dict[str, Any],
    tokens: int | None,
    source: str,
) -> None:
    """context_length, what requests ask for, max_input_tokens; otherwise there is none."""
    target = opted(model, compaction=compaction, info=info, **params)
    assert (target.context_length, target.context_source) == (tokens, source)


@pytest.mark.parametrize(
    ("model", "params", "tokens"),
    [
        ("openai/never-heard-of", {"api_base": LOCAL}, None),
        ("openai/never-heard-of", {"api_base": "http://gpu.lan:8000/v1"}, None),
        ("hosted_vllm/never-heard-of", {"api_base": "https://vllm.example.com/v1"}, None),
        ("ollama/never-heard-of", {"api_base": "http://10.0.0.7:11434"}, None),
        ("openai/never-heard-of", {}, 128_000),
        ("ollama_chat/never-heard-of", {"api_base": "https://ollama.com"}, 128_000),
    ],
)
def test_a_hosted_pruning_model_has_a_supposed_window(model: str, params: dict[str, str], tokens: int | None) -> None:
    """A server of one's own has any context length, and may cut silently; nothing is supposed of a guarded model."""
    asked = asked_deployment_of({"model": model, **params}, {}, group="g", environ={})
    assert (asked.other_target or asked.target).context_length == tokens
    assert opted(model, **params).context_length is None


def test_lm_studio_has_no_default() -> None:
    """Opting LM Studio in changes nothing: its window is read, or unknown."""
    found = deployment("lm_studio/x", {**ON, "max_input_tokens": 5000}, api_base=LOCAL)
    assert (found.kind, found.target.is_lmstudio, found.target.context_length) == ("lm_studio", True, None)
    assert found.other_target is None


CONFIG: dict[str, Any] = {
    "model_list": [
        {"model_name": "local", "litellm_params": {"model": "lm_studio/x"}, "model_info": {"id": "own-id"}},
        {"model_name": "lm_studio/*", "litellm_params": {"model": "lm_studio/*"}},
        "not a mapping",
    ],
    "router_settings": {"model_group_alias": {"nickname": "local", "hidden": {"model": "local", "hidden": True}}},
}


@pytest.mark.parametrize("name", ["__same__", "local", "own-id", "nickname", "hidden", "lm_studio/qwen/qwen3-8b"])
def test_every_way_in_which_the_router_finds_a_model_is_known(name: str) -> None:
    """Groups, ids, aliases and what a wildcard serves."""
    assert unknown_model(CONFIG, name) == ""


def test_a_long_list_is_cut() -> None:
    """An error is no catalog."""
    many = {"model_list": [{"model_name": f"m{number}"} for number in range(50)]}
    assert unknown_model(many, "nobody").endswith("m18, m19, …, and __same__")


@pytest.mark.parametrize(
    ("params", "environ", "provider", "model", "api_base", "kind"),
    [
        ({"model": "openai/responses/x"}, {}, "openai", "x", LOCAL, "maybe_lm_studio"),
        ({"model": "lm_studio/responses/x"}, {}, "lm_studio", "x", LOCAL, "lm_studio"),
        ({"model": "responses/x", "custom_llm_provider": "openai"}, {}, "openai", "x", LOCAL, "maybe_lm_studio"),
        ({"model": "gpt-4o"}, {}, "openai", "gpt-4o", LOCAL, "maybe_lm_studio"),
        ({"model": "claude-sonnet-4-5"}, {}, "", "claude-sonnet-4-5", LOCAL, "foreign"),
        ({"model": "openai/x", "api_base": None}, {"OPENAI_BASE_URL": LOCAL}, "openai", "x", LOCAL, "maybe_lm_studio"),
        ({"model": "openai/x", "api_base": None}, {"OPENAI_BASE_URL": HOSTED}, "openai", "x", None, "foreign"),
        ({"model": "openai/x", "api_base": HOSTED}, {"OPENAI_BASE_URL": LOCAL}, "openai", "x", HOSTED, "foreign"),
    ],
)
def test_a_deployment_is_read_as_litellm_reads_it(
    params: dict[str, Any], environ: dict[str, str], provider: str, model: str, api_base: str | None, kind: str
) -> None:
    """Its route is no part of its name; a name that LiteLLM knows needs no provider; variables have addresses."""
    found = deployment_of({"api_base": LOCAL, **params}, {}, group="g", environ=environ)
    assert (found.provider, found.target.model, found.target.api_base, found.kind) == (provider, model, api_base, kind)


@pytest.mark.parametrize(
    ("model", "api_base", "kind"),
    [
        ("openai/gpt-4o", None, "foreign"),
        ("openai/x", "https://api.groq.com/openai/v1", "foreign"),
        ("openai/x", "http://8.8.8.8:1234/v1", "foreign"),
        ("openai/x", "https://[2606:4700::1111]/v1", "foreign"),
        ("anthropic/claude", None, "foreign"),
        ("azure/gpt", "https://mine.openai.azure.com", "foreign"),
        ("openai/x", "api.example.com/v1", "foreign"),
        ("openai/x", "https://localhost.example.com/v1", "foreign"),
        ("openai/x", "http://user:127.0.0.1@example.com/v1", "foreign"),
        ("openai/x", "http://127.0.0.1:1234/v1", "maybe_lm_studio"),
        ("openai/x", "http://localhost:1234/v1", "maybe_lm_studio"),
        ("openai/x", "http://[::1]:1234/v1", "maybe_lm_studio"),
        ("openai/x", "http://192.168.1.9:1234/v1", "maybe_lm_studio"),
        ("openai/x", "http://studio.local:1234/v1", "maybe_lm_studio"),
        ("openai/x", "http://studio:1234/v1", "maybe_lm_studio"),
        ("openai/x", "127.0.0.1:1234", "maybe_lm_studio"),
    ],
)
def test_only_a_local_network_may_be_asked(model: str, api_base: str | None, kind: str) -> None:
    """Loopback, private addresses and local names may be LM Studio; a hosted provider's window is never asked for."""
    found = deployment(model, api_base=api_base)
    assert (found.kind, found.target.is_lmstudio) == (kind, kind != "foreign")


@pytest.mark.parametrize(("model", "name"), [("lm_studio/", ""), ("lm_studio//", "/"), ("lm_studio/a/b", "a/b")])
def test_a_prefix_alone_names_the_provider(model: str, name: str) -> None:
    """A client may ask a wildcard deployment for no model, and LM Studio answers with what is loaded."""
    deployment = deployment_of({"model": model}, {}, group="", environ={})
    assert (deployment.kind, deployment.target.model) == ("lm_studio", name)
