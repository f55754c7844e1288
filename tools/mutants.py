"""Measures what the tests notice: changes one place of the package at a time, and runs the tests that run it.

    python tools/mutants.py [--sample 200] [--seed 1] [--rooms core engine] [--slow proxy] [--again FILE]

A mutant turns a comparison, negates a condition, drops a call, or changes a number. First the fast suite runs once
without one, under coverage.py (`pip install coverage`; it is in no lock), which tells which tests run which line. A
mutant meets those, the file of its module first; if none notices it, the rest of its room's. In the end those that
are left meet the whole fast suite, and in rooms named by `--slow` the slow tests, too. It works on a copy of the
repository and prints one line a mutant. What nothing notices is to be judged by hand (some are equivalent).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "litellm_compaction"
# A mutant may make a test wait, or loop, for ever. The slowest fast test takes two seconds, on a busy machine thirty.
_LIMIT_S = 120
_SUITE_LIMIT_S = 3600
_EXIT_HANGS = 86
# Of those that run a line. One that hundreds run is noticed by the first few or by its own.
_MOST_TESTS = 250
# Mutants of each room in a sample of 200, at least; "" is the top level of the package.
_SHARES = {"core": 20, "engine": 20, "tokens": 20, "windows": 20, "stores": 20, "library": 14, "": 6, "recall": 20}
_SHARES |= {"proxy": 50}
_LINES = pytest.StashKey[Any]()
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
    """One change: `text` in place of bytes `start` to `end` of a file. Tests that run one of `lines` may notice it."""

    path: Path
    line: int
    start: int
    end: int
    text: str
    lines: frozenset[int]

    @property
    def room(self) -> str:
        """The folder of the package that it is in; "" for its top level."""
        return self.path.parts[1] if len(self.path.parts) > 2 else ""

    @property
    def own(self) -> str:
        """How the paths of the tests of its module begin."""
        return str(Path("tests", *self.path.parts[1:-1], f"test_{self.path.stem.strip('_')}"))

    def told(self, source: bytes) -> str:
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{self.path}:{self.line}: {before[:70]} -> {' '.join(self.text.split())[:70]}"


def mutants(path: Path, source: bytes) -> Iterator[Mutant]:
    """Yields every mutant of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    # They run when the class is made, whichever test is the first to import it.
    defaults = [
        part for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body if not _is_def(part)
    ]

    def place(node: ast.AST) -> tuple[int, int]:
        spot: Any = node
        return starts[spot.lineno - 1] + spot.col_offset, starts[(spot.end_lineno or 0) - 1] + (
            spot.end_col_offset or 0
        )

    for node, statement in _code(tree):

        def changed(node: Any, text: str, statement: Any = statement) -> Mutant:
            lines = () if statement in defaults else _lines(tree, node, statement)
            return Mutant(path, node.lineno, *place(node), text, frozenset(lines))

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


def _code(tree: ast.AST, statement: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """Yields the nodes that run, with their statements: no annotation, no decorator, nothing for type checkers."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            ):
                now = node if isinstance(node, ast.stmt) else statement
                yield node, now
                yield from _code(node, now)


def _is_def(node: ast.AST | None) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def _lines(tree: ast.Module, node: Any, statement: Any) -> Iterator[int]:
    """Yields the lines that run a changed node, or use it."""
    if _is_def(statement):
        yield from range(statement.body[0].lineno, (statement.end_lineno or 0) + 1)
    elif statement in tree.body and not hasattr(statement, "body"):
        names = {part.id for part in ast.walk(statement) if isinstance(part, ast.Name)}
        yield from (part.lineno for part in ast.walk(tree) if isinstance(part, ast.Name) and part.id in names)
    else:
        last = node if hasattr(statement, "body") else statement
        yield from range(statement.lineno, last.end_lineno + 1)


class Tests:
    """The fast tests of a copy of the repository, and the lines that each runs."""

    def __init__(self, copy: Path, data: Path) -> None:
        self._copy, self._data = copy, data
        self._run_by: dict[Path, dict[int, list[str]]] = {}

    def learn(self) -> None:
        """Runs all of them under coverage.py, unless an earlier run's data is there."""
        if not list(self._data.glob("lines*")):
            self._data.mkdir(parents=True, exist_ok=True)
            failed = _failed(
                self._copy, ["tests"], "-m", "not slow", "-n", "2", MUTANTS_LINES=str(self._data / "lines")
            )
            if failed:
                raise SystemExit(f"The fast suite fails without a mutant, in a copy of the repository: {failed}")

    def noticing(self, mutant: Mutant) -> str:
        """Returns the test that notices a mutant: one that runs it, of its module or, if none is known, its room."""
        own = self._files(mutant.own)
        chosen = {test for line in mutant.lines for test in self._of(mutant.path).get(line, ())}
        chosen = set(random.Random(mutant.start).sample(sorted(chosen), min(len(chosen), _MOST_TESTS)))  # noqa: S311
        others = sorted({test.partition("::")[0] for test in chosen} - set(own), key=lambda file: _far(mutant, file))
        if not chosen:
            own = self._files("tests/" + (mutant.room or "test_"))
        if not own and not others:
            return ""
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join([*own, *chosen]))
            file.flush()
            return _failed(self._copy, [*own, *others], "-m", "not slow", "-n", "0", MUTANTS_TESTS=file.name)

    def _files(self, start: str) -> list[str]:
        found = sorted(str(path.relative_to(self._copy)) for path in self._copy.glob("tests/**/test_*.py"))
        return [path for path in found if path.startswith(start)]

    def _of(self, path: Path) -> dict[int, list[str]]:
        if path not in self._run_by:
            import coverage

            run_by: dict[int, list[str]] = {}
            for file in self._data.glob("lines*"):
                data = coverage.CoverageData(str(file))
                data.read()
                for measured in data.measured_files():
                    if measured.endswith(f"/{path}"):
                        for line, tests in data.contexts_by_lineno(measured).items():
                            run_by.setdefault(line, []).extend(filter(None, tests))
            self._run_by[path] = run_by
        return self._run_by[path]


def _far(mutant: Mutant, file: str) -> tuple[bool, str]:
    return not file.startswith(f"tests/{mutant.room or 'test_'}"), file


def _failed(copy: Path, tests: Sequence[str], *options: str, **environ: str) -> str:
    """Runs tests; returns the first that fails and how, "" if none does.

    In a fork of this process, which has loaded LiteLLM and has not loaded the package: starting costs most otherwise.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as said:
        running = os.fork()
        if not running:
            _run(copy, [*options, *tests], environ, said.name)
        timer = threading.Timer(_SUITE_LIMIT_S, os.killpg, (running, signal.SIGKILL))
        timer.start()
        status = os.waitstatus_to_exitcode(os.waitpid(running, 0)[1])
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):  # what a test has started
            os.killpg(running, signal.SIGKILL)
        told = said.read()
    if status in (0, 5):  # 5: there are no such tests
        return ""
    if status in (_EXIT_HANGS, -signal.SIGKILL):
        return "(hangs)"
    # A log that pytest shows may have lines that begin alike.
    lines = [line for line in told.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return lines[0].partition(" ")[2][:300] if lines else f"({status}: {told.splitlines()[-1:]})"


def _load() -> None:
    """Loads what every fork would load."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    importlib.import_module("litellm.proxy.proxy_server")


def _run(copy: Path, options: Sequence[str], environ: dict[str, str], said: str) -> NoReturn:
    """Runs pytest in this process, and ends it."""
    os.setsid()
    os.chdir(copy)
    paths = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    os.environ |= {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **environ}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(path for path in sys.path if path != str(ROOT))]
    file = os.open(said, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # Plugins of pytest's that LiteLLM has loaded are not rewritten.
    quiet = ["-x", "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider"]
    status = 1
    try:
        status = pytest.main([*quiet, "-p", "tools.mutants", *options])
    finally:
        sys.stdout.flush()
        os._exit(status)


def pytest_configure(config: pytest.Config) -> None:
    """Notes which test runs which lines, where `Tests.learn` asks for it."""
    if file := os.environ.get("MUTANTS_LINES"):
        import coverage

        lines = coverage.Coverage(f"{file}-{os.getpid()}", config_file=False, source_pkgs=[PACKAGE], messages=False)
        # The process that hands out the tests runs none.
        lines.set_option("run:disable_warnings", ["module-not-imported", "module-not-measured", "no-data-collected"])
        config.stash[_LINES] = lines
        lines.start()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that `Tests.noticing` did not choose."""
    if file := os.environ.get("MUTANTS_TESTS"):
        chosen = set(Path(file).read_text("utf-8").splitlines())
        items[:] = [item for item in items if chosen & {item.nodeid, item.nodeid.partition("::")[0]}]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends a test that takes too long, and says whose the lines are that run now."""
    if lines := item.config.stash.get(_LINES, None):
        lines.switch_context(item.nodeid)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(_EXIT_HANGS))
    signal.alarm(_LIMIT_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Keeps what `pytest_configure` began to note."""
    if lines := config.stash.get(_LINES, None):
        lines.stop()
        lines.save()


def _sample(found: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draws mutants: each room's share of `count`, and the rest where there are lines, in an order that is random."""
    luck = random.Random(seed)  # noqa: S311 - a sample that can be drawn again
    mixed = luck.sample(found, len(found))
    drawn, left, of = list[Mutant](), list[Mutant](), Counter[str]()
    for mutant in mixed:
        of[mutant.room] += 1
        (drawn if of[mutant.room] <= _SHARES.get(mutant.room, 0) * count / 200 else left).append(mutant)
    drawn += left[: max(count - len(drawn), 0)]
    return luck.sample(drawn, len(drawn))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="*", default=[], help="folders of the package; all if none is named")
    parser.add_argument("--slow", nargs="*", default=[], help="folders whose mutants meet the slow tests, too")
    parser.add_argument("--lines", type=Path, help="a folder that keeps which test runs which lines for other runs")
    parser.add_argument("--again", type=Path, help="what an earlier run printed: only what nothing noticed there")
    parser.add_argument("--skip", type=int, default=0, help="so many of the sample, which an earlier run had")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__"))
        tests = Tests(copy, options.lines or Path(folder, "lines"))
        tests.learn()
        _load()
        if failed := _failed(copy, ["tests/core"], "-m", "not slow"):
            raise SystemExit(f"Without a mutant, too, fails {failed}")
        paths = [path.relative_to(copy) for path in sorted(copy.glob(f"{PACKAGE}/**/*.py"))]
        sources = {path: (copy / path).read_bytes() for path in paths}
        found = [mutant for path in paths for mutant in mutants(path, sources[path])]
        found = [mutant for mutant in found if not options.rooms or mutant.room in options.rooms]
        if options.again:
            lines = options.again.read_text("utf-8").splitlines()
            before = {line.split(maxsplit=1)[1] for line in lines if line.startswith("nobody ")}
            found = [mutant for mutant in found if mutant.told(sources[mutant.path]) in before]
        noticed, asked = Counter[str](), Counter[str]()

        def meets(mutant: Mutant, noticing: Any) -> bool:
            source = sources[mutant.path]
            (copy / mutant.path).write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
            by = noticing(mutant)
            (copy / mutant.path).write_bytes(source)
            print(f"{'noticed' if by else 'nobody':8} {mutant.told(source)}  {by}".rstrip(), flush=True)
            noticed[mutant.room] += bool(by)
            return bool(by)

        def whole(mutant: Mutant) -> str:
            fast = () if mutant.room in options.slow else ("-m", "not slow")
            return _failed(copy, ["tests"], "-n", "2", *fast)

        sample = _sample(found, options.sample, options.seed)[options.skip :]
        left = [mutant for mutant in sample if not meets(mutant, tests.noticing)]
        print(f"\n{len(left)} are left for the whole suite.")
        left = [mutant for mutant in left if not meets(mutant, whole)]
        asked.update(mutant.room for mutant in sample)
        for room, count in sorted(asked.items()):
            print(f"{room or 'top level':12} {noticed[room]:3} of {count}")


if __name__ == "__main__":
    main()
