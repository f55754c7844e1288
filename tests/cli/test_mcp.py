"""`litellm-compaction mcp` as the SDK's own client starts it, and as it refuses to start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TextIO

from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client

from tests.cli.test_stores_recall import SECRET, Run, path, run
from tests.integration.harness import environment

__all__ = ["path", "run"]


def started(path: Path, *arguments: str, errors: TextIO = sys.stderr) -> Client:
    command = ["-m", "litellm_compaction.cli", "mcp", "--store", f"sqlite:///{path}", *arguments]
    given = environment(LITELLM_MASTER_KEY=SECRET, LITELLM_COMPACTION_HOME=str(path.parent))
    return Client(stdio_client(StdioServerParameters(command=sys.executable, args=command, env=given), errors))


async def asked(client: Client, tool: str, **given: object) -> tuple[str, bool]:
    answer = await client.call_tool(tool, given)
    [content] = answer.content
    assert content.type == "text"
    return content.text, answer.is_error


async def listed(client: Client) -> list[str]:
    text, _ = await asked(client, "describe_compactions")
    return [row.get("first_handle") for row in json.loads(text)["compactions"]]


def test_without_originals_it_does_not_start(run: Run, tmp_path: Path) -> None:
    """It says how to have them, and makes no file."""
    other = tmp_path / "other.sqlite3"
    said = run("mcp", "--store", f"sqlite:///{other}", code=1, store=False)
    assert "keep_originals: compacted" in said
    assert list(tmp_path.glob("other*")) == []


def test_a_scope_that_is_not_clear_is_named(run: Run) -> None:
    """Before anything is served."""
    assert "2 scopes begin with 'scope-'" in run("mcp", "--scope", "scope-", code=1)
