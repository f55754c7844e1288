"""Which deployments are guarded, who is asked for a window, what is shown of it, and who carries an answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from litellm_compaction.config import Settings
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.proxy.routing import (
    Deployment,
    DeploymentSelector,
    carrier_of,
    deployment_of,
)
from litellm_compaction.proxy.wire import refusing
from litellm_compaction.windows.windows import Windows

ON = {"compaction": {"enabled": True}}
LOCAL, HOSTED = "http://127.0.0.1:8080/v1", "https://api.example.com/v1"


def deployment(model: str, info: dict[str, Any] | None = None, **params: Any) -> Deployment:
    return deployment_of({"model": model, **params}, info or {}, group="g", environ={})


def kind(read: Deployment) -> str:
    return "foreign" if read.is_foreign else "asked" if read.is_asked_first else "guarded"


def test_only_a_local_network_may_be_asked() -> None:
    """Loopback, private addresses and local names may be LM Studio; a hosted provider's window is never asked for."""
    foreign = (
        *(None, "https://api.groq.com/openai/v1", "http://8.8.8.8:1234/v1", "https://[2606:4700::1111]/v1"),
        *("api.example.com/v1", "https://localhost.example.com/v1", "http://user:127.0.0.1@example.com/v1"),
    )
    hosts = ("127.0.0.1:1234", "localhost", "[::1]:1234", "192.168.1.9:1234", "studio.local:1234", "studio")
    local = ("127.0.0.1:1234", *(f"http://{host}/v1" for host in hosts))
    for api_base in (*foreign, *local):
        read = deployment("openai/x", api_base=api_base)
        assert (kind(read), read.target.is_lmstudio) == (
            ("asked", True) if api_base in local else ("foreign", False)
        ), api_base
    others = (("anthropic/claude", None), ("azure/gpt", "https://mine.openai.azure.com"))
    assert {kind(deployment(model, api_base=api_base)) for model, api_base in others} == {"foreign"}


@pytest.mark.parametrize("model", ["openai/x", "ollama/x", "hosted_vllm/x", "llamafile/x", "anthropic/x"])
@pytest.mark.parametrize("info", [{}, {"compaction": {"enabled": False}}, {"compaction": {"context_length": 4096}}])
async def test_without_opting_in_no_request_is_made(model: str, info: dict[str, Any]) -> None:
    """P7: a deployment that is not opted in is not guarded, and no server is asked for its window."""
    requests: list[str] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        requests.append(request.url.path)
        return httpx.Response(404, json={})

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as http:
        windows = Windows(cache_s=5.0, http=http)
        guards = DeploymentSelector(LiveSettings(Settings()), windows)
        read = deployment(model, info, api_base=LOCAL)
        assert (read.opted_in, read.target.apis) == (None, ())
        assert await guards.guard(read) is None
        await windows.aclose()
    # A local OpenAI-compatible server is asked whether it is LM Studio, as ever; nothing else is asked of anybody.
    asks = model.startswith("openai/") and info != {"compaction": {"enabled": False}}
    assert requests == (["/lmstudio-greeting", "/api/v1/models", "/api/v0/models"] if asks else [])


class _Answering:
    """Windows of which only one thing is asked: whether a server is LM Studio."""

    def __init__(self, *answers: bool | None) -> None:
        self._answers = list(answers)

    async def is_lmstudio(self, api_base: str, api_key: str | None) -> bool | None:
        return self._answers.pop(0)


async def test_a_silent_server_is_asked_again_and_a_warning_names_the_line_to_write(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A time-out is no "no": one that comes to answer as LM Studio is guarded from then on."""
    windows: Any = _Answering(None, None, True, False)
    guards = DeploymentSelector(LiveSettings(Settings()), windows)
    silent = deployment("openai/x", {}, api_base=LOCAL)
    assert [await guards.guard(silent) is not None for _ in range(4)] == [False, False, True, False]
    assert caplog.text.count("`model: lm_studio/…`") == 1


def test_the_transport_carries_what_it_can_reach() -> None:
    """Where LiteLLM asks the server by a client that can be given; the operator may choose the hooks."""
    reached = {("lm_studio/x", LOCAL), ("openai/x", LOCAL)}
    for model, base in (*reached, ("openai/x", None), ("ollama_chat/x", LOCAL)):
        carrier = "transport" if (model, base) in reached else "hooks"
        assert carrier_of(deployment(model, ON, api_base=base), Settings()) == carrier
        assert carrier_of(deployment(model, ON, api_base=base), Settings(carrier="hooks")) == "hooks"
    # Ollama is told to refuse what it would cut, beside the client's own fields; no other server is told anything.
    sent = refusing({"extra_body": {"top_k": 1, "truncate": True}}, "ollama_chat")
    assert sent == {"extra_body": {"top_k": 1, "truncate": False, "shift": False}}
    assert refusing({}, "hosted_vllm") == {}
