"""What is installed is what was locked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.lock import read, without_places

ROOT = Path(__file__).parents[1]
LOCKS = {
    name: (ROOT / "locks" / f"{name}.txt").read_text(encoding="utf-8")
    for name in ("run", "test", "engine", "docs", "installer")
}


@pytest.mark.parametrize("name", LOCKS)
def test_each_locked_package_has_its_files_hashes_and_no_place(name: str) -> None:
    """`read` refuses a package without a hash; a lock that names an index or a folder works on one machine only."""
    text = LOCKS[name]
    assert read(text)
    assert text == without_places(text)
    assert not re.search(r"://|file:|--index|--find-links| @ |^/", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", " "))]
    assert all(re.match(r"[a-z0-9.-]+(?:\[[a-z,-]+\])?==\S+ ", line) for line in lines)


def test_the_locks_agree_with_each_other() -> None:
    """What the tests run on is what users run."""
    run, test = read(LOCKS["run"]), read(LOCKS["test"])
    assert {name: test[name] for name in run} == run


def test_the_locks_have_all_that_the_package_needs() -> None:
    """Each requirement of pyproject.toml is locked, in a version within its bounds."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    parts = {
        "run": [r"^dependencies = \[(.*?)^\]"],
        "test": [r"^dependencies = \[(.*?)^\]", r"^test = \[(.*?)^\]", r"^clients = \[(.*?)^\]"],
    }
    for name, patterns in parts.items():
        lock = read(LOCKS[name])
        for pattern in patterns:
            found = re.search(pattern, text, re.DOTALL | re.MULTILINE)
            assert found is not None
            for line in re.findall(r'^  "(.*)",$', found[1], re.MULTILINE):
                requirement = Requirement(line)
                locked = lock[requirement.name.lower().replace("_", "-")]
                assert all(requirement.specifier.contains(version) for version in locked), line
