"""Each real client in each scenario, behind a real proxy: as on an endless window.

`pytest contrib/clients` runs them, `-k "openai-python or langchain"` some; `CLIENTS` in table.py has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.clients.cells import SCENARIOS, Matrix, open_matrix
from contrib.clients.install import FOLDER_VARIABLE
from contrib.clients.model import Name
from contrib.clients.table import CLIENTS, Client

# `-k sdk` and `-k program` choose by these words.
_CELLS = [
    pytest.param(client, scenario, id=f"{'sdk' if client.is_sdk else 'program'}-{client.name}-{scenario}")
    for client in CLIENTS
    for scenario in SCENARIOS
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    """One proxy for all cells."""
    folder = os.environ.get(FOLDER_VARIABLE) or tmp_path_factory.mktemp("clients")
    with open_matrix(CLIENTS, Path(folder), tmp_path_factory.mktemp("proxy")) as opened:
        yield opened


@pytest.mark.parametrize(("client", "scenario"), _CELLS)
def test_the_client_works_as_on_an_endless_window(matrix: Matrix, client: Client, scenario: Name) -> None:
    """Nothing cut at the server, no orphans, the file byte for byte, the whole answer, a clean end."""
    cell = matrix.cell(client, scenario)
    if cell.state in ("not applicable", "not installed", "own fault"):
        pytest.skip(f"{cell.state}: {cell.why}")
    assert cell.state == "green", cell.why
