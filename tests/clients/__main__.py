"""Runs the matrix and prints it: `python -m tests.clients [CLIENT…] [--scenario NAME] [--write]`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.cells import SCENARIOS, open_matrix
from tests.clients.install import FOLDER_VARIABLE
from tests.clients.report import RECORDED, added, recorded, table
from tests.clients.table import CLIENTS


def main() -> None:
    """Prints each cell as it ends, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(client.name for client in CLIENTS))
    parser.add_argument("--scenario", action="append", choices=[*SCENARIOS], help="only this one; may be repeated")
    parser.add_argument("--write", action="store_true", help=f"keep the verdicts in {RECORDED.name}")
    options = parser.parse_args()
    chosen = [client for client in CLIENTS if client.name in (options.clients or [client.name])]
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    shown: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as data:
        home = Path(os.environ.get(FOLDER_VARIABLE) or folder)
        with open_matrix(chosen, home, Path(data)) as matrix:
            for client in chosen:
                cells = []
                for scenario in options.scenario or SCENARIOS:
                    cell = matrix.cell(client, scenario)
                    print(
                        f"{client.name} {cell.version} {scenario}: {cell.state} {cell.why} [{cell.requests}]",
                        flush=True,
                    )
                    cells.append(cell)
                shown = added(shown, cells, date)
                if options.write:
                    rows = added(recorded(), cells, date)
                    RECORDED.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(shown))


if __name__ == "__main__":
    main()
