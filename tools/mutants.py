"""Measures what the tests notice: changes one place of the package at a time, and runs the fast suite.

    python tools/mutants.py [--sample 200] [--seed 1] [--rooms core engine] [--whole proxy]

A mutant turns a comparison, negates a condition, drops a call, or changes a number. The tests of its room run first,
then the whole fast suite; rooms named by `--whole` run their slow tests, too. It works on a copy of the repository,
takes hours, and prints one line a mutant; those that nothing notices are to be judged by hand (some are equivalent).
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "litellm_compaction"
_LIMIT_S = 1800
_TURNED: dict[type[ast.cmpop], str] = {
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


class Mutant(NamedTuple):
    """One change: `text` in place of bytes `start` to `end` of a file."""

    path: Path
    line: int
    start: int
    end: int
    text: str

    @property
    def room(self) -> str:
        """The folder of the package that it is in; "" for its top level."""
        return self.path.parts[1] if len(self.path.parts) > 2 else ""

    def told(self, source: bytes) -> str:
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{self.path}:{self.line}: {before[:70]} -> {self.text[:70]}"


def mutants(path: Path, source: bytes) -> Iterator[Mutant]:
    """Yields every mutant of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.AST) -> tuple[int, int]:
        spot: Any = node
        return starts[spot.lineno - 1] + spot.col_offset, starts[(spot.end_lineno or 0) - 1] + (
            spot.end_col_offset or 0
        )

    def changed(node: ast.AST, text: str) -> Mutant:
        return Mutant(path, node.lineno, *place(node), text)  # type: ignore[attr-defined]

    for node in _code(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = (source[slice(*place(side))].decode() for side in (node.left, node.comparators[0]))
            yield changed(node, f"({left}) {_TURNED[type(node.ops[0])]} ({right})")
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(node.test, ast.Compare):
            yield changed(node.test, f"(not ({source[slice(*place(node.test))].decode()}))")
        elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
            yield changed(node, "pass")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield changed(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield changed(node, repr((node.value * 2 or 1.0) if isinstance(node.value, float) else node.value + 1))


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run: no annotation, no decorator, nothing for type checkers alone."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            ):
                yield node
                yield from _code(node)


def _notices(copy: Path, tests: Sequence[str], *options: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *tests]
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(  # noqa: S603 - our own interpreter and tests
            command, cwd=copy, env=environ, capture_output=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return ended.returncode not in (0, 5)  # 5: there are no such tests


def _noticed_by(copy: Path, room: str, *, whole: bool) -> str:
    own = [f"tests/{room}"] if room else sorted(str(path.relative_to(copy)) for path in copy.glob("tests/test_*.py"))
    if _notices(copy, own, "-m", "not slow"):
        return "room"
    if _notices(copy, ["tests"], "-m", "not slow", "-n", "2"):
        return "fast suite"
    return "whole suite" if whole and _notices(copy, ["tests"], "-n", "2") else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="*", default=[], help="folders of the package; all if none is named")
    parser.add_argument("--whole", nargs="*", default=[], help="folders whose mutants meet the slow tests, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__"))
        if _notices(copy, ["tests"], "-m", "not slow", "-n", "2"):
            raise SystemExit("The fast suite fails without a mutant, in a copy of the repository.")
        paths = [path.relative_to(copy) for path in sorted(copy.glob(f"{PACKAGE}/**/*.py"))]
        found = [mutant for path in paths for mutant in mutants(path, (copy / path).read_bytes())]
        found = [mutant for mutant in found if not options.rooms or mutant.room in options.rooms]
        noticed, asked = Counter[str](), Counter[str]()
        luck = random.Random(options.seed)  # noqa: S311 - a sample that can be drawn again
        for mutant in luck.sample(found, min(options.sample, len(found))):
            source = (copy / mutant.path).read_bytes()
            (copy / mutant.path).write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
            by = _noticed_by(copy, mutant.room, whole=mutant.room in options.whole)
            (copy / mutant.path).write_bytes(source)
            asked[mutant.room] += 1
            noticed[mutant.room] += bool(by)
            print(f"{by or 'NOBODY':11}  {mutant.told(source)}", flush=True)
        for room, count in sorted(asked.items()):
            print(f"{room or 'top level':12} {noticed[room]:3} of {count}")


if __name__ == "__main__":
    main()
