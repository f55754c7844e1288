"""`recall` as an operator uses it, and what `purge` does with originals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from litellm_compaction.cli import main
from litellm_compaction.stores import open_originals, open_store
from litellm_compaction.stores.store import Store
from tests.cli.test_stores import SECRET, fill
from tests.recall.test_lookup import BIRD, FISH
from tests.stores.test_originals import covered, kept

Run = Callable[..., str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with originals of two tenants."""
    found = tmp_path / "store.sqlite3"
    store = open_store(f"sqlite:///{found}", ttl_s=1000, max_bytes=1_000_000, secret=lambda: SECRET)
    fill(store)
    asyncio.run(_keep(found, store))
    return found


async def _keep(path: Path, store: Store) -> None:
    url = f"sqlite:///{path}"
    originals = open_originals(url, store, ttl_s=1000, max_bytes=1_000_000, secret=lambda: SECRET)
    assert originals is not None
    one, two = covered(*FISH, scope="scope-a", tenant="one"), covered(*BIRD, scope="scope-b", tenant="two")
    await kept(originals, one, two)
    await originals.aclose()


@pytest.fixture
def run(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("LITELLM_MASTER_KEY", SECRET)
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(tmp_path / "home"))

    def run(*arguments: str, code: int = 0, store: bool = True) -> str:
        place = ["--store", f"sqlite:///{path}"] if store else []
        assert main([*arguments, *place]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return run


def test_one_scope_alone(run: Run) -> None:
    """By its beginning; nothing of another one is shown."""
    assert "falcon" in run("recall", "--scope", "scope-b", "falcon")
    assert run("recall", "--scope", "scope-a", "falcon").endswith("for: falcon\n")
    assert "2 scopes begin with 'scope-'" in run("recall", "--scope", "scope-", "falcon", code=1)


@pytest.mark.parametrize("written", ["sk-else", "os.environ/ELSE", None])
def test_the_key_is_the_configs_then_the_environments(
    run: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str | None
) -> None:
    """Another one reads nothing and is told so; no key is made."""
    config = tmp_path / "config.yaml"
    settings = {"litellm_compaction": {"store": f"sqlite:///{path}"}}
    general = {"master_key": written} if written else {}
    config.write_text(yaml.safe_dump({"callback_settings": settings, "general_settings": general, "model_list": []}))
    if written is None:
        assert "falcon" in run("recall", "--config", str(config), "falcon", store=False)
        monkeypatch.delenv("LITELLM_MASTER_KEY")
    assert "no originals here that can be read" in run("recall", "--config", str(config), "falcon", code=1, store=False)
    monkeypatch.setenv("ELSE", SECRET)
    if written == "os.environ/ELSE":
        assert "falcon" in run("recall", "--config", str(config), "falcon", store=False)
    assert not (tmp_path / "home").exists()


def test_purge_takes_the_originals_along(run: Run, path: Path) -> None:
    """Those of the scope; then all."""
    assert run("purge", "--scope", "scope-a", "--yes").endswith("\n1 records and 1 parts of originals deleted.\n")
    assert "typus" not in run("recall", "fish")
    assert "falcon" in run("recall", "falcon")
    run("purge", "--all", "--yes")
    assert "no originals" in run("recall", "falcon", code=1)


def test_without_originals_it_says_how_to_have_them(run: Run, tmp_path: Path) -> None:
    """A store of before, or of a proxy that keeps none: no file is made for a look."""
    path = tmp_path / "other.sqlite3"
    fill(open_store(f"sqlite:///{path}", ttl_s=1000, max_bytes=1_000_000))
    said = run("recall", "fish", "--store", f"sqlite:///{path}", code=1, store=False)
    assert "keep_originals: compacted" in said
    assert list(tmp_path.glob("other.sqlite3.originals*")) == []
