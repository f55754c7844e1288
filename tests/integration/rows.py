"""The rows that the second callback beside a proxy (`beside_config/recorder.py`) has written, found by their key."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.integration.harness import until


class Rows:
    """What LiteLLM has told about the calls of each key; a test that has a key of its own meets no other's rows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def environ(self) -> dict[str, str]:
        """What the recorder must find in its environment."""
        return {"RECORDER_FILE": str(self.path)}

    def of(self, key: str, expected: int) -> list[dict[str, Any]]:
        """The key's rows, as soon as there are as many as expected: LiteLLM writes them after the answer.

        Without those of questions, which ask a server to count a prompt and depend on what it has told before.
        """
        # LiteLLM's own form of a key (litellm/proxy/_types.py, hash_token).
        digest = hashlib.sha256(key.encode()).hexdigest()
        return until(lambda: rows if len(rows := self._of(digest)) >= expected else [])

    def _of(self, digest: str) -> list[dict[str, Any]]:
        text = self.path.read_text() if self.path.exists() else ""
        # The other process may be in the middle of a line.
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        own = [row for row in rows if row["identity"]["hash"] == digest]
        return [row for row in own if row["max_tokens"] != 1 or row["messages"] == 1]
