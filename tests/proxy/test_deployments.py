"""Which deployments are guarded, and what is shown of their windows."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from litellm_compaction.config import Settings
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.proxy.routing import DeploymentSelector, carrier_of, limits_of
from litellm_compaction.windows.windows import Window, Windows
from tests.constants import settings_of
from tests.proxy.test_routing import LOCAL, ON, deployment


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
        found = deployment(model, info, api_base=LOCAL)
        assert found.other_target is None
        assert found.target.apis == ()
        assert await guards.guard(found) is None
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
    found = deployment("openai/x", {}, api_base=LOCAL)
    assert [await guards.guard(found) is not None for _ in range(4)] == [False, False, True, False]
    assert caplog.text.count("`model: lm_studio/…`") == 1


@pytest.mark.parametrize(
    ("settings", "window_tokens", "answer_tokens"),
    [({}, 8192, 1638), ({"output_buffer_ratio": 0.5}, 8192, 4096), ({"output_buffer_ratio": 0.0}, 8192, 819)],
)
def test_the_answer_that_is_shown_is_what_is_set_aside_for_it(
    settings: dict[str, Any], window_tokens: int, answer_tokens: int
) -> None:
    """A client takes it off the window, and asks for no more: the buffer of an empty prompt."""
    window = Window(tokens=window_tokens, source="api/v1", architecture="", instance_id="", parallel=1)
    shown = {"max_input_tokens": window_tokens, "max_output_tokens": answer_tokens}
    assert limits_of(window, settings_of(**settings)) == shown


@pytest.mark.parametrize(
    ("model", "base", "settings", "carrier"),
    [
        ("lm_studio/x", LOCAL, {}, "transport"),
        ("openai/x", LOCAL, {}, "transport"),
        ("openai/x", None, {}, "hooks"),
        ("ollama_chat/x", LOCAL, {}, "hooks"),
        ("lm_studio/x", LOCAL, {"carrier": "hooks"}, "hooks"),
    ],
)
def test_the_transport_carries_what_it_can_reach(
    model: str, base: str | None, settings: dict[str, Any], carrier: str
) -> None:
    """Where LiteLLM asks the server by a client that can be given; the operator may choose the hooks."""
    assert carrier_of(deployment(model, ON, api_base=base), Settings(**settings)) == carrier
