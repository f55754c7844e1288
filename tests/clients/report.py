"""The matrix as it was last run, in matrix.json, and its table in docs/clients.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.clients.cells import SCENARIOS, Cell
from tests.clients.table import CLIENTS

RECORDED = Path(__file__).with_name("matrix.json")
_SHOWN = {"green": "ok", "red": "**fails**", "own fault": "own fault", "not applicable": "–", "not installed": "?"}


def recorded() -> dict[str, Any]:
    """Client → its version, the day of its run, and scenario → state and reason; {} before the first run."""
    return json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.is_file() else {}  # type: ignore[no-any-return]


def added(rows: Mapping[str, Any], cells: Iterable[Cell], date: str) -> dict[str, Any]:
    """The rows with new cells in place of older ones of the same client and scenario."""
    made = {name: {**row, "cells": dict(row["cells"])} for name, row in rows.items()}
    for cell in cells:
        row = made.setdefault(cell.client, {"version": "", "date": date, "cells": {}})
        row |= {"version": cell.version or row["version"], "date": date}
        row["cells"][cell.scenario] = {"state": cell.state, "why": cell.why}
    return {client.name: made[client.name] for client in CLIENTS if client.name in made}


def table(rows: Mapping[str, Any]) -> str:
    """The rows as Markdown, and below them the reason of each cell that is neither ok nor without a meaning."""
    return "\n".join([*_rows(rows), *_reasons(rows)])


def _rows(rows: Mapping[str, Any]) -> Iterator[str]:
    yield f"| client | version | window | {' | '.join(SCENARIOS.values())} | run on |"
    yield "|---|---|---|" + "---|" * (len(SCENARIOS) + 1)
    for client in CLIENTS:
        if client.name in rows:
            row = rows[client.name]
            states = [_SHOWN[row["cells"][name]["state"]] if name in row["cells"] else "" for name in SCENARIOS]
            yield f"| {client.title} | {row['version']} | {client.window:,} | {' | '.join(states)} | {row['date']} |"


def _reasons(rows: Mapping[str, Any]) -> Iterator[str]:
    for client in CLIENTS:
        for scenario, cell in rows.get(client.name, {"cells": {}})["cells"].items():
            if cell["state"] not in ("green", "not applicable"):
                yield f"\n- {client.title}, {SCENARIOS[scenario]}: {cell['state']}. {cell['why']}"
