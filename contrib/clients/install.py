"""Installs a client from its registry, into a folder of its own, once.

`TESTS_CLIENTS_FOLDER` names the folder that keeps the installations; without it they go when the tests end.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER_VARIABLE = "TESTS_CLIENTS_FOLDER"
_LIMIT_S = 600
# Claude Code, Qwen Code and Cline ask for 22; the npm of 20 installs older versions of them without a word.
_NODE = 22


class NotInstalled(Exception):
    """The registry did not give a client, or not in time."""


def install(name: str, packages: Sequence[str], folder: Path) -> Path:
    """The folder of a client, with a `venv` for `pip:…` packages or `node_modules` for `npm:…`.

    Raises:
        NotInstalled: with the installer's last line.
    """
    home = folder / name
    mark = home / "installed.json"
    if mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == list(packages):
        return home
    # npm would keep to the version that another Node or an interrupted installation has left there.
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    pip = [package.removeprefix("pip:") for package in packages if package.startswith("pip:")]
    npm = [package.removeprefix("npm:") for package in packages if package.startswith("npm:")]
    if pip:
        _run([_uv(), "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(home / "venv")])
        _run([_uv(), "pip", "install", "--quiet", "--python", str(home / "venv" / "bin" / "python"), *pip])
    if npm:
        quiet = ("--no-audit", "--no-fund", "--loglevel=error")
        _run(["npm", "install", "--prefix", str(home), *quiet, *npm], PATH=search_path(home, folder))
    mark.write_text(json.dumps(list(packages)), encoding="utf-8")
    return home


def search_path(home: Path, folder: Path) -> str:
    """PATH of a client: its own programs, a Node that is new enough, this machine's."""
    return os.pathsep.join(
        [str(home / "venv" / "bin"), str(home / "node_modules" / ".bin"), *_newer_node(folder), os.environ["PATH"]]
    )


@functools.cache
def _newer_node(folder: Path) -> tuple[str, ...]:
    node = shutil.which("node")
    if node is not None:
        said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
        if int(said.lstrip("v").partition(".")[0] or 0) >= _NODE:
            return ()
    home = folder / f"node-{_NODE}"
    binaries = home / "node_modules" / ".bin"
    if not (binaries / "node").exists():
        _run(["npm", "install", "--prefix", str(home), "--no-audit", "--no-fund", "--loglevel=error", f"node@{_NODE}"])
    return (str(binaries),)


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv") or "uv"


def _run(command: list[str], **environ: str) -> None:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "UV_SYSTEM_CERTS": "1", **environ},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{command[0]}: {type(error).__name__}") from error
    if done.returncode:
        raise NotInstalled((done.stderr.strip().splitlines() or ["no word of why"])[-1][:300])
