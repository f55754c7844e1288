"""What LiteLLM's lists of models show: for whom, with which numbers, and when nothing is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from litellm import Router

from litellm_compaction.config import Settings
from litellm_compaction.proxy.discovery import Discovery
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.proxy.presence import watched
from litellm_compaction.proxy.routing import DeploymentSelector, serves
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
async def discovery(servers: Servers) -> AsyncIterator[Discovery]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(servers.answer)) as http:
        windows = Windows(cache_s=1e-9, http=http)
        made = Discovery(windows, DeploymentSelector(LiveSettings(Settings()), windows))
        yield made
        servers.gate.set()
        await windows.aclose()


def listed(configured: Router) -> list[str]:
    """LiteLLM's own list for a key that may use everything."""
    from litellm.proxy.auth.model_checks import get_complete_model_list

    found: Sequence[str] = get_complete_model_list(
        key_models=[],
        team_models=[],
        proxy_model_list=configured.get_model_names(),
        user_model=None,
        infer_model_from_keys=False,
        llm_router=configured,
    )
    # Some versions of LiteLLM list a wildcard itself, too.
    return [name for name in found if "*" not in name]


def shown(configured: Router, name: str) -> list[tuple[int | None, int | None]]:
    """What the router says of the deployments of a name: window and answer."""
    entries = [entry for entry in configured.get_model_list() or () if entry["model_name"] == name]
    return [tuple(entry["model_info"].get(f"max_{end}put_tokens") for end in ("in", "out")) for entry in entries]  # type: ignore[misc] # a pair


async def test_each_server_behind_a_name_has_its_own_deployment(discovery: Discovery, servers: Servers) -> None:
    """Listed once, each with its window; what a server does not list any more goes, and comes back."""
    configured = router(("lm_studio/*", "lm_studio/*", ONE), ("lm_studio/*", "lm_studio/*", TWO))
    for _ in range(2):
        await discovery.refresh(configured)
        assert sorted(listed(configured)) == sorted([f"lm_studio/{QWEN}", f"lm_studio/{GEMMA}", "lm_studio/solo"])
        assert shown(configured, f"lm_studio/{QWEN}") == [(8192, 1638), (4096, 819)]
        assert shown(configured, f"lm_studio/{GEMMA}") == [(None, None)]
    (cold,) = configured.get_model_list(model_name=f"lm_studio/{GEMMA}") or ()
    # A look at its health would load it.
    assert cold["model_info"]["disable_background_health_check"] is True
    del servers.models["two.test"]
    await discovery.refresh(configured)
    assert sorted(listed(configured)) == sorted([f"lm_studio/{QWEN}", f"lm_studio/{GEMMA}"])
    fresh = router(("lm_studio/*", "lm_studio/*", ONE))
    await discovery.refresh(fresh)
    assert listed(fresh) == [f"lm_studio/{QWEN}", f"lm_studio/{GEMMA}"]


async def test_a_named_deployment_shows_its_window_and_never_in_place_of_the_operators(
    discovery: Discovery, servers: Servers
) -> None:
    """Under its own id, with all that it had; without a trace once nothing is known."""
    configured = router(("mine", f"lm_studio/{QWEN}", ONE), ("written", f"lm_studio/{QWEN}", ONE))
    (written,) = configured.get_model_list(model_name="written") or ()
    written["model_info"]["max_input_tokens"] = 7000
    before = [entry["model_info"]["id"] for entry in configured.get_model_list() or ()]
    for window, seen in ((8192, (8192, 1638)), (4096, (4096, 819)), (None, (None, None)), (2048, (2048, 409))):
        servers.models["one.test"][QWEN] = window
        await discovery.refresh(configured)
        assert shown(configured, "mine") == [seen]
        assert shown(configured, "written") == [(7000, None)]
        assert sorted(entry["model_info"]["id"] for entry in configured.get_model_list() or ()) == sorted(before)
    (found,) = configured.get_model_list(model_name="mine") or ()
    assert found["litellm_params"]["api_key"] == "k"


async def test_no_numbers_where_litellm_would_refuse_by_them(discovery: Discovery) -> None:
    """`enable_pre_call_checks` turns away what is about to be compacted; the names are listed all the same."""
    configured = router(("lm_studio/*", "lm_studio/*", ONE), enable_pre_call_checks=True)
    await discovery.refresh(configured)
    assert listed(configured) == [f"lm_studio/{QWEN}", f"lm_studio/{GEMMA}"]
    assert shown(configured, f"lm_studio/{QWEN}") == [(None, None)]


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
async def test_only_reads_of_lists_wait(
    discovery: Discovery, monkeypatch: pytest.MonkeyPatch, path: str, method: str, reads: bool
) -> None:
    """Every other request goes to LiteLLM at once."""
    asked: list[int] = []
    monkeypatch.setattr("litellm_compaction.proxy.litellm_inside.current_router", lambda: asked.append(1))

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    transport = httpx.ASGITransport(watched(application, discovery.route))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy.test") as client:
        answer = await client.request(method, path)
    assert (len(asked), answer.text) == (int(reads), path)


def test_a_wildcard_reaches_what_its_pattern_says() -> None:
    """As LiteLLM fills in the name; what else a regular expression knows is text."""
    assert [serves(pattern, QWEN) for pattern in ("*", "qwen/*", "*-8b", "google/*", "fixed")] == [True] * 3 + [
        False
    ] * 2
    assert not serves("a.*", "ab")
