"""What becomes of a compaction whose summary does not come, comes from another model, or may not be asked for."""

from __future__ import annotations

import json

from litellm_compaction.stores import Originals
from litellm_compaction.stores.rows import MemoryRows
from tests.builders import (
    JsonDict,
    assistant,
    calls,
    result,
    user,
)


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
