"""What both hooks of one request need is worked out once, by the real hooks, without LiteLLM."""

from __future__ import annotations

from typing import Any

import pytest

from tests.security.hooks import Client, Scene, conversation, use_router

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
