"""What LiteLLM's lists of models show: for whom, with which numbers, and when nothing is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from litellm import Router

from litellm_compaction.config import Settings
from litellm_compaction.proxy.deployments import DeploymentSelector, Publisher
from litellm_compaction.proxy.discovery import Discovery
from litellm_compaction.proxy.litellm_inside.application import expand_wildcards
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.windows.windows import Windows

pytestmark = pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning", "ignore::DeprecationWarning")

ONE, TWO = "http://one.test:1234/v1", "http://two.test:1234/v1"
QWEN, GEMMA = "qwen/qwen3-8b", "google/gemma-3-4b@q4_k_m"


class Servers:
    """LM Studios by host: the context length of each chat model, None for one that is not loaded."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, int | None]] = {
            "one.test": {QWEN: 8192, GEMMA: None},
            "two.test": {QWEN: 4096, "solo": 2048},
        }
        self.gate = asyncio.Event()
        self.gate.set()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        await self.gate.wait()
        models = self.models.get(request.url.host)
        if models is None:
            raise httpx.ConnectError("refused")
        rows = [
            {
                "key": key,
                "type": "llm",
                "loaded_instances": [] if window is None else [{"id": key, "config": {"context_length": window}}],
            }
            for key, window in models.items()
        ]
        return httpx.Response(
            200, json={"models": [*rows, {"key": "nomic", "type": "embedding", "loaded_instances": []}]}
        )


def router(*entries: tuple[str, str, str], **options: Any) -> Router:
    """LiteLLM's own, with (model_name, model, api_base)."""
    models = [
        {"model_name": name, "litellm_params": {"model": model, "api_base": base, "api_key": "k"}}
        for name, model, base in entries
    ]
    return Router(model_list=models, **options)


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
async def discovery(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Discovery]:
    """With a model map of its own, and LiteLLM's functions as they were afterwards."""
    import litellm
    import litellm.proxy.auth.model_checks as checks

    monkeypatch.setattr(litellm, "model_cost", dict(litellm.model_cost))
    for name in ("get_known_models_from_wildcard", "_get_wildcard_models"):
        monkeypatch.setattr(checks, name, getattr(checks, name))
    async with httpx.AsyncClient(transport=httpx.MockTransport(servers.answer)) as http:
        windows, publisher = Windows(cache_s=1e-9, http=http), Publisher()
        made = Discovery(windows, DeploymentSelector(LiveSettings(Settings()), windows, publisher), publisher)
        expand_wildcards(made.names)
        yield made
        servers.gate.set()
        await made.aclose()
        await windows.aclose()


def listed(configured: Router, *key_models: str) -> list[str]:
    """LiteLLM's own list for a key; without `key_models` for one that may use everything."""
    from litellm.proxy.auth.model_checks import get_complete_model_list

    found: Sequence[str] = get_complete_model_list(
        key_models=list(key_models),
        team_models=[],
        proxy_model_list=configured.get_model_names(),
        user_model=None,
        infer_model_from_keys=False,
        llm_router=configured,
    )
    # Some versions of LiteLLM list a wildcard itself, too.
    return [name for name in found if "*" not in name]


def shown(name: str) -> tuple[int | None, int | None]:
    """What LiteLLM's map says of a name: window and answer."""
    import litellm

    entry = litellm.model_cost.get(name, {})
    return entry.get("max_input_tokens"), entry.get("max_output_tokens")


async def test_one_name_on_two_servers_is_listed_once_with_the_smaller_window(discovery: Discovery) -> None:
    """Either may be asked."""
    configured = router(("lm_studio/*", "lm_studio/*", ONE), ("lm_studio/*", "lm_studio/*", TWO))
    await discovery.refresh(configured)
    assert sorted(listed(configured)) == sorted([f"lm_studio/{QWEN}", f"lm_studio/{GEMMA}", "lm_studio/solo"])
    assert shown(f"lm_studio/{QWEN}") == (4096, 819)


async def test_numbers_of_others_stay(discovery: Discovery, servers: Servers) -> None:
    """LiteLLM's and the operator's; ours come back after LiteLLM has taken a new map, and go without a trace."""
    import litellm

    configured = router(("lm_studio/*", "lm_studio/*", ONE))
    written = {"litellm_provider": "lm_studio", "max_input_tokens": 7000, "mode": "chat"}
    litellm.model_cost[f"lm_studio/{QWEN}"] = dict(written)
    servers.models["one.test"][GEMMA] = 4096
    await discovery.refresh(configured)
    assert litellm.model_cost[f"lm_studio/{QWEN}"] == written
    assert shown(f"lm_studio/{GEMMA}") == (4096, 819)
    del litellm.model_cost[f"lm_studio/{GEMMA}"]
    await discovery.refresh(configured)
    assert litellm.get_model_info(f"lm_studio/{GEMMA}")["max_input_tokens"] == 4096
    servers.models.clear()
    await discovery.refresh(configured)
    assert f"lm_studio/{GEMMA}" not in litellm.model_cost
    assert litellm.model_cost[f"lm_studio/{QWEN}"] == written


async def test_no_numbers_where_litellm_would_refuse_by_them(discovery: Discovery) -> None:
    """`enable_pre_call_checks` turns away what is about to be compacted; the names are listed all the same."""
    configured = router(("lm_studio/*", "lm_studio/*", ONE), enable_pre_call_checks=True)
    await discovery.refresh(configured)
    assert listed(configured) == [f"lm_studio/{QWEN}", f"lm_studio/{GEMMA}"]
    assert shown(f"lm_studio/{QWEN}") == (None, None)


async def test_a_silent_server_delays_no_list_for_long(
    discovery: Discovery, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is answered as it was; the reading goes on, and the next list has it."""
    monkeypatch.setattr("litellm_compaction.proxy.discovery._LIMIT_S", 0.01)
    configured = router(("lm_studio/*", "lm_studio/*", ONE))
    servers.gate.clear()
    await discovery.refresh(configured)
    assert listed(configured) == []
    servers.gate.set()
    monkeypatch.setattr("litellm_compaction.proxy.discovery._LIMIT_S", 30.0)
    await discovery.refresh(configured)
    assert listed(configured) == [f"lm_studio/{QWEN}", f"lm_studio/{GEMMA}"]


@pytest.mark.parametrize(
    ("path", "method", "reads"),
    [
        ("/v1/models", "GET", True),
        ("/v2/model/info", "GET", True),
        ("/vertex_ai/v1/models/a/b", "GET", False),
        ("/model_group/info", "GET", True),
        ("/v1/chat/completions", "POST", False),
        ("/v1/models/qwen:2", "GET", True),
        ("/v1/modelsfoo", "GET", False),
    ],
)
async def test_only_reads_of_lists_wait(discovery: Discovery, path: str, method: str, reads: bool) -> None:
    """Every other request goes to LiteLLM at once, and so does a read with a wrong key."""
    asked: list[int] = []

    async def known(scope: Any, headers: Mapping[str, str], path: str) -> None:
        if headers.get("authorization") != "Bearer right":
            raise PermissionError

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    transport = httpx.ASGITransport(discovery.serving(application, lambda: asked.append(1), known))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy.test") as client:
        with pytest.raises(PermissionError) if reads else nullcontext():
            await client.request(method, path)
        assert asked == []
        answer = await client.request(method, path, headers={"Authorization": "Bearer right"})
    assert (len(asked), answer.text) == (int(reads), path)
