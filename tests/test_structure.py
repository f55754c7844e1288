"""The tests mirror the package: each module has a file of tests of its name, and each such file a module.

`core/budget.py` is tested by `core/test_budget.py`; `core/test_budget_topic.py` would be more of its tests. Tests of
the whole project stand at the top level; integration, security, goldens and the real engine have folders of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import litellm_compaction

PACKAGE = Path(litellm_compaction.__file__).parent
TESTS = Path(__file__).parent


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    return (path.relative_to(folder) for path in sorted(folder.rglob(pattern)))


def untested(package: Path, tests: Path) -> list[str]:
    """Modules without a file of tests of their name that holds a test."""
    return [
        module.as_posix()
        for module in _files(package, "*.py")
        if not module.name.startswith("__") and not _has_tests(tests / module.with_name(f"test_{module.name}"))
    ]


def _has_tests(file: Path) -> bool:
    return (
        file.is_file() and re.search(r"^(async )?def test_", file.read_text(encoding="utf-8"), re.MULTILINE) is not None
    )


def strangers(package: Path, tests: Path) -> list[str]:
    """Files of tests in a folder that the package has, too, but named after no module and no folder there."""
    return [file.as_posix() for file in _files(tests, "*/test_*.py") if _is_stranger(package / file.parent, file.stem)]


def _is_stranger(folder: Path, name: str) -> bool:
    known = [f"test_{path.stem}" for path in folder.iterdir()] if folder.is_dir() else [name]
    return not any(name == each or name.startswith(f"{each}_") for each in known)


def test_each_module_has_its_tests() -> None:
    assert untested(PACKAGE, TESTS) == []


def test_each_file_of_tests_has_its_module() -> None:
    """Whoever changes a module finds all of its tests by its name."""
    assert strangers(PACKAGE, TESTS) == []


def test_what_is_missing_is_seen(tmp_path: Path) -> None:
    """A module without a file, one whose file is empty, and files of other names; more of a module's tests are none."""
    package, tests = tmp_path / "package", tmp_path / "tests"
    for name in ("a.py", "b.py", "room/c.py", "room/d.py", "room/__init__.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    for name in ("test_a.py", "test_project.py", "room/test_c.py", "room/test_c_more.py", "room/test_else.py"):
        (tests / name).parent.mkdir(parents=True, exist_ok=True)
        (tests / name).write_text("async def test_it() -> None: ...\n", encoding="utf-8")
    (tests / "test_b.py").write_text('"""Nothing yet."""\n', encoding="utf-8")
    assert untested(package, tests) == ["b.py", "room/d.py"]
    assert strangers(package, tests) == ["room/test_else.py"]
