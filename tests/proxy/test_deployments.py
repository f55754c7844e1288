"""Which deployments are guarded, and what is shown of their windows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from litellm_compaction.config import Settings
from litellm_compaction.proxy.deployments import DeploymentSelector, FormerAnswers, Publisher, limits_of
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.proxy.routing import BYPASS_VARIABLE, carrier_of
from litellm_compaction.stores import Store
from litellm_compaction.windows.windows import Window, Windows
from tests.constants import settings_of
from tests.proxy.test_routing import LOCAL, ON, deployment
from tests.stores.made import MemoryStore


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
        guards = DeploymentSelector(LiveSettings(Settings()), windows, Publisher())
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


async def _guarded(store: Store, *answers: bool | None) -> list[bool]:
    """Whether a process that begins with a store guards a deployment, for each answer of its server."""
    windows: Any = _Answering(*answers)
    guards = DeploymentSelector(LiveSettings(Settings()), windows, Publisher(), FormerAnswers(store))
    found = deployment("openai/x", {}, api_base=LOCAL)
    return [await guards.guard(found) is not None for _ in answers]


async def test_a_known_lm_studio_that_is_silent_stays_guarded() -> None:
    """Also after a restart: requests would pass it unguarded while it loads a model. A later no is believed."""
    store = MemoryStore(ttl_s=1e6, max_bytes=1_000_000)
    assert await _guarded(store, None, None) == [False, False]
    assert await _guarded(store, None, True, None) == [False, True, True]
    assert await _guarded(store, None, None) == [True, True]
    assert await _guarded(store, None, False, None) == [True, False, False]
    assert await _guarded(store, None) == [False]


class _HandedOver(list[dict[str, Any]]):
    """A list of LiteLLM's that counts how often it is handed over to the Rust core."""

    times = 0

    def __setitem__(self, *item: Any) -> None:
        self.times += 1
        super().__setitem__(*item)


class _Info(dict[str, Any]):
    """An entry's `model_info`, each write to which hands the whole list over."""

    def __setitem__(self, *item: Any) -> None:
        raise AssertionError("written by itself")

    update = __delitem__ = pop = clear = setdefault = __setitem__  # type: ignore[assignment] # none of them is called


def test_windows_are_shown_by_one_assignment_and_do_not_come_back_as_the_operators() -> None:
    """However many deployments: what we wrote is not an operator's word, and what they wrote stays."""
    infos = [_Info(id="a"), _Info(id="b", max_input_tokens=7000), *(_Info(id=str(number)) for number in range(20))]
    entries = _HandedOver([{"model_info": info} for info in infos])
    router = SimpleNamespace(enable_pre_call_checks=False, model_list=entries)
    publisher, shown = Publisher(), {"max_input_tokens": 4096, "max_output_tokens": 819}
    windows = {str(info["id"]): shown for info in infos}
    for _ in range(2):
        publisher.publish(router, windows)
        assert entries.times == 1
    assert (infos[0], infos[1]) == ({"id": "a", **shown}, {"id": "b", "max_input_tokens": 7000})
    assert publisher.as_written(infos[0]) == {"id": "a"}
    assert publisher.as_written(infos[1]) is infos[1]
    # LiteLLM has read its configuration again.
    dict.clear(infos[0])
    dict.update(infos[0], id="a")
    publisher.publish(router, windows)
    assert (infos[0], entries.times) == ({"id": "a", **shown}, 2)
    publisher.publish(router, {})
    assert (infos[0], entries.times) == ({"id": "a"}, 3)


@pytest.mark.parametrize(
    ("settings", "window_tokens", "answer_tokens"),
    [({}, 8192, 1638), ({"output_buffer_ratio": 0.5}, 8192, 4096), ({"output_buffer_ratio": 0.0}, 8192, 819)],
)
def test_the_answer_that_is_shown_is_what_is_set_aside_for_it(
    settings: dict[str, Any], window_tokens: int, answer_tokens: int
) -> None:
    """A client takes it off the window, and asks for no more: the buffer of an empty prompt."""
    window = Window(tokens=window_tokens, source="api/v1", architecture="", instance_id="", parallel=1, read_s=0)
    shown = {"max_input_tokens": window_tokens, "max_output_tokens": answer_tokens}
    assert limits_of(window, settings_of(**settings)) == shown


@pytest.mark.parametrize(
    ("model", "base", "settings", "environ", "carrier"),
    [
        ("lm_studio/x", LOCAL, {}, {}, "transport"),
        ("openai/x", LOCAL, {}, {}, "transport"),
        ("openai/x", None, {}, {}, "hooks"),
        ("ollama_chat/x", LOCAL, {}, {}, "hooks"),
        ("lm_studio/x", LOCAL, {"carrier": "hooks"}, {}, "hooks"),
        ("lm_studio/x", LOCAL, {}, {BYPASS_VARIABLE: " True"}, "hooks"),
        ("lm_studio/x", LOCAL, {}, {BYPASS_VARIABLE: "no"}, "transport"),
    ],
)
def test_the_transport_carries_what_it_can_reach(
    model: str, base: str | None, settings: dict[str, Any], environ: dict[str, str], carrier: str
) -> None:
    """Where LiteLLM asks the server by a client that can be given; the operator may choose the hooks."""
    assert carrier_of(deployment(model, ON, api_base=base), Settings(**settings), environ) == carrier
