"""Child processes: started, watched, ended by their own handles."""

from __future__ import annotations

import socket

import pytest

from litellm_compaction.cli.up import usable_port
from litellm_compaction.errors import CompactionError


def test_a_taken_port_is_refused() -> None:
    """LiteLLM would silently take another one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CompactionError, match=rf"Cannot listen on 127.0.0.1 port {port}.*--port"):
            usable_port("127.0.0.1", port)
