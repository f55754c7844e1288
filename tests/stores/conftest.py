"""A SQLite file and stores on it, and what changes it behind their backs."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.stores.made import SqliteStore

Open = Callable[..., SqliteStore]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "to be" / "made" / "store.sqlite3"


@pytest.fixture
async def opened(path: Path) -> AsyncIterator[Open]:
    """Opens stores on the same file and ends them."""
    stores: list[SqliteStore] = []

    def make(**options: Any) -> SqliteStore:
        stores.append(SqliteStore(path, **{"ttl_s": 1000, "max_bytes": 10_000_000, **options}))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


def change(path: Path, *statements: str) -> None:
    """Changes the file behind the store's back."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def asides(path: Path) -> list[Path]:
    return [each for each in path.parent.glob("*.corrupt-*") if not each.name.endswith(("-wal", "-shm"))]
