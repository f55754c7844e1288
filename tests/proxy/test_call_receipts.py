"""The receipt that an answer carries for the record that was applied to it, by the real hooks, without LiteLLM."""

from __future__ import annotations

import pytest

from litellm_compaction.stores import StoredCompaction, digest
from tests.security.hooks import Client, Scene, conversation, use_router

# Of LiteLLM's chunks.
pytestmark = pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning")
_NAMES = ("record", "covered", "digest")


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene()
    use_router(monkeypatch, made.router)
    return made


def receipt(client: Client) -> dict[str, str]:
    return {name: client.headers[f"x-litellm-compaction-{name}"] for name in _NAMES}


async def kept(scene: Scene) -> StoredCompaction:
    [stored] = await scene.handler._store.compactions()
    return stored


@pytest.mark.parametrize("group", ["carried", "hooked"])
async def test_an_answer_names_the_record_that_was_applied(scene: Scene, group: str) -> None:
    """As the store has it; the turn after it, which finds the record, gets the same receipt."""
    said = conversation("alice", 4)
    for _ in range(2):
        client = Client(scene, "sk-alice", said, attempts=[group])
        await client.send()
        stored = await kept(scene)
        prefix = sum(message["role"] == "system" for message in said[:1])
        assert receipt(client) == {
            "record": stored.id,
            "covered": f"{prefix + 1}-{prefix + stored.compaction.covered_messages}",
            "digest": digest(stored.compaction),
        }
        assert stored.compaction.covered_hash not in repr(client.headers)


async def test_a_request_that_is_sent_as_it_came_has_no_receipt(scene: Scene) -> None:
    """Nothing was applied."""
    client = Client(scene, "sk-alice", conversation("alice", 0), attempts=["carried"])
    await client.send()
    assert client.headers["x-litellm-compaction"] == "none"
    assert not [name for name in client.headers if name.endswith(_NAMES)]


async def test_tenants_get_receipts_of_their_own(scene: Scene) -> None:
    """The same conversation with another key has another id."""
    ids = set()
    for key in ("sk-alice", "sk-bob"):
        client = Client(scene, key, conversation("alice", 4), attempts=["carried"])
        await client.send()
        ids.add(receipt(client)["record"])
    assert len(ids) == 2
