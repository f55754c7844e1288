"""What both hooks of one request need is worked out once, by the real hooks, without LiteLLM."""

from __future__ import annotations

from typing import Any

import pytest

from tests.security.beside.identities import auth_of
from tests.security.hooks import Client, Logging, Scene, conversation, use_router

# Of LiteLLM's chunks.
pytestmark = pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning")


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene()
    use_router(monkeypatch, made.router)
    return made


def counted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one for each time that a request is measured."""
    measured: list[str] = []
    measurer = scene.handler._compactor._measurer
    weigh = measurer.measure

    async def counting(request: Any, context: Any) -> Any:
        measured.append(context.label)
        return await weigh(request, context)

    monkeypatch.setattr(measurer, "measure", counting)
    return measured


@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("rounds", [0, 4], ids=["short", "compacted"])
async def test_a_request_whose_deployment_is_foreseen_is_measured_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, group: str, rounds: int
) -> None:
    """And sent as if it had been measured twice: compacted where it has to be, its answer whole."""
    measured = counted(scene, monkeypatch)
    client = Client(scene, "sk-alice", conversation("alice", rounds), attempts=[group])
    await client.send()
    assert client.error is None
    assert len(measured) == 1
    assert client.headers["x-litellm-compaction"] == ("compacted" if rounds else "none")
    assert "CANARY-alice" in client.read


async def test_a_retry_measures_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes may have gone by."""
    measured = counted(scene, monkeypatch)
    client = Client(scene, "sk-alice", conversation("alice", 0), attempts=["carried", "carried2"])
    scene.router.entries["carried2"] = scene.router.entries["carried"]
    await client.send()
    assert client.error is None
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("asked", "reads"),
    [({"prompt": "Once"}, 1), ({"prompt": "Once", "n": 1}, 1), ({"prompt": "Once", "n": 2}, 2)],
    ids=["plain", "one", "two"],
)
async def test_only_several_answers_are_fitted_beside_each_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], reads: int
) -> None:
    """A text completion that wants one answer costs no look at its windows for the sake of more."""
    windows = scene.handler._compactor.windows
    resolve, resolved = windows.resolve, list[str]()

    async def counting(target: Any, **options: Any) -> Any:
        resolved.append(target.key)
        return await resolve(target, **options)

    monkeypatch.setattr(windows, "resolve", counting)
    data = {"model": "carried", "litellm_call_id": "text", "litellm_logging_obj": Logging("text"), **asked}
    await scene.handler.async_pre_call_hook(auth_of("sk-alice"), None, data, "atext_completion")
    assert len(resolved) == reads


@pytest.mark.parametrize("stream", [True, False])
async def test_a_streams_usage_is_asked_for(scene: Scene, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Servers count a streamed answer only if they are asked to, and refuse to be asked for another."""
    client = Client(scene, "sk-alice", conversation("alice", 0), attempts=["hooked"], stream=stream)
    await client.send()
    assert client.error is None
    assert [sent.get("stream_options") for sent in client.sent] == [{"include_usage": True} if stream else None]
