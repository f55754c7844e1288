"""Child processes: started, watched, ended by their own handles."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from litellm_compaction.cli import proxy_process
from litellm_compaction.cli.proxy_process import serving, usable_port
from litellm_compaction.errors import CompactionError


def test_a_taken_port_is_refused() -> None:
    """LiteLLM would silently take another one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CompactionError, match=rf"Cannot listen on 127.0.0.1 port {port}.*--port"):
            usable_port("127.0.0.1", port)


@pytest.mark.skipif(os.name == "nt", reason="SIGTERM is a signal of POSIX")
def test_a_stop_signal_ends_the_child_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does: the block ends, and the child with it."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(proxy_process, "_RUN_LITELLM", "import signal; signal.pause()")
    monkeypatch.setattr(proxy_process, "_wait_until_alive", lambda *_: None)
    proxy = serving(Path("config.yaml"), "127.0.0.1", 0, os.environ, is_shown=True)
    with pytest.raises(KeyboardInterrupt), proxy as child:  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        child.wait()
    assert child.returncode is not None
    assert signal.getsignal(signal.SIGTERM) == before
