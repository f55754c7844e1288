"""Child processes: started, watched, ended by their own handles."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from litellm_compaction.cli import up
from litellm_compaction.cli.up import (
    exit_code,
    local_url,
    proxy_command,
    proxy_environment,
    running,
    usable_port,
    wait_until_alive,
)
from litellm_compaction.errors import CompactionError, ServerUnavailable


def python(code: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """A child that runs `code`."""
    return running("child", [sys.executable, "-c", code], {})


def sleeper() -> AbstractContextManager[subprocess.Popen[bytes]]:
    """A child that ends only when it is told to."""
    return python("import signal; signal.pause()")


def test_a_child_ends_with_its_block() -> None:
    """Also when the block fails."""
    with pytest.raises(ZeroDivisionError), sleeper() as child:
        raise ZeroDivisionError
    assert exit_code(child) == 128 + signal.SIGTERM


def test_a_child_that_does_not_listen_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that it is given."""
    monkeypatch.setattr(up, "_GRACE_S", 0.1)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with running("child", [sys.executable, "-c", deaf], {}, output=subprocess.PIPE) as child:
        assert child.stdout is not None
        with child.stdout:
            child.stdout.readline()
    assert exit_code(child) == 128 + signal.SIGKILL


def test_a_program_that_is_missing_is_explained(tmp_path: Path) -> None:
    """No traceback of subprocess."""
    missing = running("proxy", [str(tmp_path / "missing")], {})
    with pytest.raises(CompactionError, match="The proxy cannot be started"):
        missing.__enter__()


def test_the_end_of_the_proxy_is_noticed_while_waiting() -> None:
    """Nobody waits three minutes for a process that has ended."""
    with (
        python("raise SystemExit(3)") as child,
        pytest.raises(ServerUnavailable, match="exit code 3"),
    ):
        wait_until_alive(child, f"http://127.0.0.1:{usable_port('127.0.0.1', 0)}")


def test_waiting_has_an_end() -> None:
    """A proxy that never answers is given up."""
    with sleeper() as child, pytest.raises(ServerUnavailable, match="did not answer"):
        wait_until_alive(child, f"http://127.0.0.1:{usable_port('127.0.0.1', 0)}", limit_s=0.1)


def test_a_taken_port_is_refused() -> None:
    """LiteLLM would silently take another one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CompactionError, match=rf"Cannot listen on 127.0.0.1 port {port}.*--port"):
            usable_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),  # noqa: S104 - compared, not bound
        ("::", "http://[::1]:1"),
        ("::1", "http://[::1]:1"),
        ("box.local", "http://box.local:1"),
    ],
)
def test_the_url_of_a_listening_address(host: str, expected: str) -> None:
    """An address to listen on is not always one to connect to."""
    assert local_url(host, 1) == expected


def test_the_proxy_environment_keeps_keys_off_the_command_line(tmp_path: Path) -> None:
    """The key travels in the environment, where other users cannot see it."""
    environment = proxy_environment({"NO_PROXY": "corp"}, master_key="sk-x", api_base="http://127.0.0.1:1/v1")
    assert environment["LITELLM_MASTER_KEY"] == "sk-x"
    assert environment["LM_STUDIO_API_BASE"] == "http://127.0.0.1:1/v1"
    assert environment["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert environment["NO_PROXY"] == "corp,127.0.0.1,localhost"
    assert "sk-x" not in " ".join(proxy_command(tmp_path / "config.yaml", "127.0.0.1", 4000))
