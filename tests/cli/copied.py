"""The command line with proxies that are copies: `python -m tests.cli.copied up` is `litellm-compaction up`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from litellm_compaction.cli import demo, up
from litellm_compaction.cli.app import main
from tests.integration import harness, preloaded

_COMMAND = "TESTS_PROXY_COMMAND"
_stock_command = up.proxy_command


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What this module needs beside a command's environment; nothing where no copies can be made."""
    command = preloaded.command(harness.environment())
    return {**environ, **({_COMMAND: json.dumps(command)} if command else {})}


def replaced(environ: Mapping[str, str], config: Path, host: str, port: int) -> list[str]:
    """The command that starts a copy, with the arguments that the executable would get."""
    whole = _stock_command(config, host, port)
    found = environ.get(_COMMAND)
    command: Sequence[str] = json.loads(found) if found else whole[: whole.index("--config")]
    return [*command, *whole[whole.index("--config") :]]


if __name__ == "__main__":
    for module in (up, demo):
        setattr(module, "proxy_command", lambda *asked: replaced(os.environ, *asked))  # noqa: B010 - no such attribute to mypy
    sys.exit(main())
