"""Installs this checkout with exactly the packages in locks/, each checked by its SHA-256.

    python tools/install.py             # the proxy
    python tools/install.py --tests     # the tests and the real clients in them, too
    python tools/install.py --engine    # beside these, a real llama.cpp and a small model for tests/real_engine (70 MB)

It installs into the environment of the Python that runs it. `uv` does the work, in seconds; where it cannot be had, or
cannot reach the index (it does not read pip's configuration: UV_DEFAULT_INDEX names a mirror to it), pip installs the
same files, in minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Each is run with `install` and more behind it.
UV = ("uv", "pip", "install", "--quiet", "--python", sys.executable)
PIP = ("pip", "--disable-pip-version-check", "install", "--quiet")


def main(arguments: Sequence[str] | None = None) -> int:
    """Installs; the exit code of what failed last, 0 when all is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tests", dest="lock", action="store_const", const="test.txt", default="run.txt")
    what.add_argument("--engine", dest="lock", action="store_const", const="engine.txt")
    lock = ROOT / "locks" / parser.parse_args(arguments).lock
    print(f"Installing what {lock.relative_to(ROOT)} lists into {sys.prefix} …", flush=True)
    if importlib.util.find_spec("uv") is not None or _ran(*PIP, "-r", str(ROOT / "locks" / "installer.txt")):
        if _installed(UV, lock):
            return _done()
        print("uv could not install it; pip tries the same files.", file=sys.stderr)
    return _done() if _installed(PIP, lock) else 1


def _done() -> int:
    program = Path(sys.executable).with_name("litellm-compaction")
    shown = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
    print(f"Done. Next: {shown} up", flush=True)
    return 0


def _installed(installer: Sequence[str], lock: Path) -> bool:
    """Tells whether the lock's packages and this one are there: its build takes nothing from outside the lock."""
    return _ran(*installer, "--no-deps", "--require-hashes", "-r", str(lock)) and _ran(
        *installer, "--no-deps", "--no-build-isolation", "--force-reinstall", str(ROOT)
    )


def _ran(*command: str) -> bool:
    # As pip does, uv then trusts the certificates that this machine trusts, such as a company's own.
    environ = {"UV_SYSTEM_CERTS": "1", **os.environ}
    return subprocess.run([sys.executable, "-m", *command], check=False, env=environ).returncode == 0  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
