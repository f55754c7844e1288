"""Threat: a log that tells. At DEBUG, where LiteLLM writes whole requests, our lines hold no word of a conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import ONE_ROUND, talk
from tests.integration.bench import Group, open_bench

# Planted in a conversation, in tools, in names and in headers.
_PLANTED = ("PLANTED-system", "PLANTED-newest", "PLANTED-tool", "PLANTED-user", "PLANTED-focus", "hunter2-PLANTED")


@pytest.mark.proxy
def test_our_lines_of_a_debug_log_hold_nothing_of_a_conversation(tmp_path: Path) -> None:
    """Streamed, whole, compacted, refused and failed; LiteLLM's own lines, which are not ours, have all of it."""
    settings = {"redact": "off"}
    debug = {"LITELLM_LOG": "DEBUG"}
    with open_bench(
        tmp_path, [Group("local")], settings, environ=debug, litellm_settings={"set_verbose": True}
    ) as bench:
        tool = {"type": "function", "function": {"name": "f", "description": "PLANTED-tool", "parameters": {}}}
        messages = [
            {"role": "system", "content": "PLANTED-system DB_PASSWORD=hunter2-PLANTED"},
            *(message for message in talk("PLANTED-user", ONE_ROUND) if message["role"] != "system"),
            {"role": "user", "content": "PLANTED-newest?"},
        ]
        compaction = {"metadata": {"compaction": {"now": True, "focus": "PLANTED-focus"}}}
        for stream in (False, True):
            body = {"model": "local", "messages": messages, "stream": stream, "user": "PLANTED-user", **compaction}
            assert bench.proxy.post({**body, "tools": [tool]}).status_code == 200
            long = [*messages[:1], {"role": "user", "content": "PLANTED-newest " * 20_000}]
            assert bench.proxy.post({**body, "messages": long}).status_code == 400
        lines = bench.proxy.logged(r".")
        ours = [line for line in lines if "litellm_compaction" in line]
        assert len(ours) >= 4, "nothing is told of these requests any more"
        assert [line[:300] for line in ours for word in _PLANTED if word in line] == []
        assert any(word in line for line in lines for word in _PLANTED), "LiteLLM did not write at DEBUG"
