"""What is installed is what was locked, and nothing of ours runs what it reads."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import lock
from tools.lock import changes, main, read, told, without_places

ROOT = Path(__file__).parents[1]
LOCKS = {
    name: (ROOT / "locks" / f"{name}.txt").read_text(encoding="utf-8")
    for name in ("run", "test", "engine", "docs", "installer")
}
A, B, C = ("sha256:" + letter * 64 for letter in "abc")
# Calls that run or build what a text says. `ast.literal_eval` and `yaml.safe_load` do not.
RUNNING = {"eval", "exec", "compile", "__import__"}
UNSAFE = {
    "pickle": {"load", "loads", "Unpickler"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "yaml": {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all"},
    "torch": {"load"},
    "joblib": {"load"},
    "numpy": {"load"},
}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def sources() -> list[Path]:
    """Every Python file that is ours."""
    return sorted(
        path
        for part in ("litellm_compaction", "tools", "benchmarks", "tests/tokens/golden")
        for path in (ROOT / part).rglob("*.py")
    )


def unsafe(tree: ast.AST) -> list[str]:
    """What a file imports or calls that runs what it reads."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            root = node.module.split(".")[0]
            named = {name.name for name in node.names}
            found += [root] if root in UNSAFE_MODULES or named & UNSAFE.get(root, set()) else []
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in RUNNING:
                found.append(node.func.id)
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                module, name = node.func.value.id, node.func.attr
                found += [f"{module}.{name}"] if name in UNSAFE.get(module, set()) else []
    return found


def test_nothing_of_ours_runs_what_it_reads() -> None:
    """No pickle and its kin, no `eval`, no YAML that builds objects; the scan sees each of them."""
    found = {str(path): unsafe(ast.parse(path.read_text(encoding="utf-8"))) for path in sources()}
    assert len(found) > 100
    assert {path: names for path, names in found.items() if names} == {}
    for code in (
        "import pickle",
        "from yaml import load",
        "import yaml\nyaml.load(x)",
        "eval(x)",
        "import marshal as m",
    ):
        assert unsafe(ast.parse(code)), code


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
    [site] = [Requirement(each) for each in re.findall(r'^docs = \["(.*)"\]$', text, re.MULTILINE)]
    assert all(site.specifier.contains(version) for version in read(LOCKS["docs"])[site.name])
    assert "hatchling" in read(LOCKS["run"])


def test_what_a_new_lock_changes_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Added, removed and other versions are usual."""
    old = read(f"a==1 \\\n    --hash={A}\nb==1 \\\n    --hash={B}\n")
    new = read(f"b==2 ; python_version < '3.11' \\\n    --hash={C}\nb==3 \\\n    --hash={A}\nc==1 \\\n    --hash={C}\n")
    assert told(changes(old, new)) == 0
    assert capsys.readouterr().out.splitlines() == ["removed  a 1", "changed  b 1 -> 2 | 3", "added    c 1"]
    assert told(changes(old, old)) == 0
    assert capsys.readouterr().out == "no change\n"


def test_other_files_at_the_same_version_are_an_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code says so, too: for a file that is gone, one that came, and one that is another."""
    paths = [tmp_path / name for name in ("old.txt", "gone.txt", "come.txt", "other.txt")]
    hashes = [(A, B), (A,), (A, B, C), (A, C)]
    for path, some in zip(paths, hashes, strict=True):
        path.write_text("a==1 \\\n" + " \\\n".join(f"    --hash={each}" for each in some) + "\n", encoding="utf-8")
    assert [main(["compare", str(paths[0]), str(path)]) for path in paths] == [0, 1, 1, 1]
    assert [line.split(": ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("ALARM")] == [
        "1 files gone, 0 new at the same version",
        "0 files gone, 1 new at the same version",
        "1 files gone, 1 new at the same version",
    ]


def test_a_package_without_a_hash_is_no_lock() -> None:
    """An installer would take any file that has the name and the version."""
    with pytest.raises(ValueError, match="a 1 has no hash"):
        read("a==1\n")


def _index(monkeypatch: pytest.MonkeyPatch, alone: str, whole: str | None) -> list[str]:
    """An index that has `alone` as the newest LiteLLM, and `whole` as all that resolves; what it is asked."""
    asked: list[str] = []

    def resolved(arguments: Sequence[str], given: str) -> str:
        asked.append(given)
        if "--no-deps" in arguments:
            return f"litellm=={alone}\n"
        if whole is None:
            raise subprocess.CalledProcessError(1, "uv", stderr="x needs y, and y is not there")
        return whole

    monkeypatch.setattr(lock, "resolved", resolved)
    return asked


def _locked_litellm() -> str:
    [version] = read(LOCKS["run"])["litellm"]
    return version


def test_a_newer_litellm_that_resolves_is_written_with_its_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CI installs that file; a place of the index does not get into it."""
    out = tmp_path / "newest.txt"
    newer = LOCKS["run"].replace(f"litellm=={_locked_litellm()} ", "litellm==1.109.9 ")
    _index(monkeypatch, "1.109.9", "--index-url https://mirror.example/simple\n" + newer)
    assert main(["newest", str(out)]) == 0
    assert capsys.readouterr().out == f"changed  litellm {_locked_litellm()} -> 1.109.9\n"
    assert "mirror" not in out.read_text(encoding="utf-8")
    assert list(read(out.read_text(encoding="utf-8"))["litellm"]) == ["1.109.9"]
