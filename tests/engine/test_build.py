"""What becomes of a compaction whose summary does not come, comes from another model, or may not be asked for."""

from __future__ import annotations

import json

import pytest

from litellm_compaction.core.messages import chain
from litellm_compaction.stores import Originals
from litellm_compaction.stores.rows import MemoryRows
from tests.builders import (
    JsonDict,
    assistant,
    budget,
    calls,
    conversation,
    parsed,
    result,
    user,
)
from tests.engine.bench import Bench, sent


def _reads(*ports: int) -> list[JsonDict]:
    """A task and a read file for each port, the last one already talked about; equal ports are one file."""
    raw = [user("Find the ports.")]
    for number, port in enumerate(ports):
        text = f"server alpha_{port} listens on port {port}\n" + "".join(f"padding {n}\n" for n in range(240))
        call = calls(f"c{number}", name="read_file", arguments=json.dumps({"path": f"conf/{port}.ini"}))
        raw += [call, result(f"c{number}", text)]
    return [*raw, assistant("Done."), user("And?")]


def _originals() -> tuple[Originals, MemoryRows]:
    rows = MemoryRows(ttl_s=100, max_bytes=10_000_000)
    return Originals(rows, ttl_s=100, secret=lambda: "sk-master"), rows


@pytest.mark.parametrize(
    ("keeps", "resolves", "shows"), [("compacted", True, True), ("off", True, False), ("compacted", False, False)]
)
async def test_stubs_show_the_handles_of_what_is_kept(keeps: str, resolves: bool, shows: bool) -> None:
    """If originals are kept and the model can look them up; the newest ones, and the prompt is no larger for it."""
    originals, _ = _originals()
    raw = _reads(*range(8001, 8013))
    bench = Bench(originals=originals)
    tool = {"type": "function", "function": {"name": "read_file"}}
    prepared = await bench.guard(raw, 8192, keep_originals=keeps, carries_calls=resolves, tools=[tool])
    (kept,) = [compaction for _, compaction in bench.store.kept]
    hashes = chain(parsed(raw))
    shown = {each.position: each.handle for each in kept.stub_contents if each.handle}
    assert bool(shown) == shows
    assert shown == {at: hashes[at + 1][:12] for at in kept.stubbed[len(kept.stubbed) - len(shown) :]}
    messages = sent(raw, prepared)
    assert all(f" or recall {handle} if it is needed." in messages[at].text for at, handle in shown.items())
    assert prepared.count.tokens - prepared.count.tools_tokens <= budget(8192, conversation(parsed(raw))).target_tokens(
        10**6
    )
    await originals.settle()
