"""Starts the proxy for `up` and `demo`, watches it until it answers, and ends it by its own handle."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

import httpx

from litellm_compaction.errors import CompactionError, ServerUnavailable
from litellm_compaction.master_key import KEY_VARIABLE

# LiteLLM's imports take 6–8 s on two cores (measured 2026-11), several times that on a cold or busy disk.
PROXY_START_LIMIT_S = 180.0
_POLL_S = 0.2
_GRACE_S = 10.0
_RUN_LITELLM = "import sys; from litellm import run_server; sys.argv[0] = 'litellm'; sys.exit(run_server())"


def proxy_command(config: Path, host: str, port: int) -> list[str]:
    """The command that starts a stock LiteLLM proxy, as its users start it.

    Raises:
        CompactionError: LiteLLM's proxy is not installed for this interpreter.
    """
    # Looked up, not imported: importing LiteLLM takes seconds.
    missing = [name for name in ("litellm", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise CompactionError(
            f"LiteLLM's proxy is not installed for {sys.executable} (missing: {', '.join(missing)}). "
            "Install it with: pip install 'litellm[proxy]'"
        )
    script = Path(sys.executable).with_name("litellm.exe" if os.name == "nt" else "litellm")
    start = [str(script)] if script.is_file() else [sys.executable, "-c", _RUN_LITELLM]
    return [*start, "--config", str(config), "--host", host, "--port", str(port)]


def proxy_environment(environ: Mapping[str, str], *, master_key: str | None, api_base: str | None) -> dict[str, str]:
    """The caller's environment for the proxy, which fetches nothing from the internet.

    Args:
        master_key, api_base: None if the config has its own.
    """
    own = {KEY_VARIABLE: master_key, "LM_STUDIO_API_BASE": api_base}
    child = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        **environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        **{name: value for name, value in own.items() if value is not None},
    }
    # A web proxy of the user's network cannot reach this machine's own LM Studio.
    for name in ("NO_PROXY", "no_proxy"):
        child[name] = ",".join(filter(None, (child.get(name, ""), "127.0.0.1", "localhost")))
    return child


@contextlib.contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], environment: Mapping[str, str], *, output: int | IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process in a session of its own, so that Ctrl-C in the terminal reaches it once, through us.

    It is asked to end with the block, and is killed after 10 s.

    Raises:
        CompactionError: it cannot be started.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
        )
    except OSError as exc:
        raise CompactionError(f"The {name} cannot be started ({exc}).") from exc
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            if exit_code(process, _GRACE_S) is None:
                process.kill()
                process.wait()


def exit_code(process: subprocess.Popen[bytes], wait_s: float | None = None) -> int | None:
    """The exit code as a shell would show it; None if it still runs after `wait_s`."""
    try:
        code = process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return None
    return code if code >= 0 else 128 - code


def wait_until_alive(proxy: subprocess.Popen[bytes], base_url: str, limit_s: float = PROXY_START_LIMIT_S) -> None:
    """Waits for the proxy's first answer.

    Raises:
        ServerUnavailable: it ended, or did not answer in time.
    """
    deadline_s = time.monotonic() + limit_s
    with httpx.Client(trust_env=False, timeout=2.0) as http:
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.HTTPError):
                if http.get(f"{base_url}/health/liveliness").status_code == 200:
                    return
            code = exit_code(proxy, _POLL_S)
            if code is not None:
                raise ServerUnavailable(
                    f"The proxy ended with exit code {code} before it was ready; its own message is above."
                )
    raise ServerUnavailable(f"The proxy did not answer at {base_url}/health/liveliness within {limit_s:g} s.")


def usable_port(host: str, port: int) -> int:
    """`port` itself if it is free, or a free one for 0.

    LiteLLM would silently move to a random port when 4000 is taken (proxy_cli.py, 1.106.2).

    Raises:
        CompactionError: the port is taken, or the address is not this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            if os.name == "posix":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            bound: int = probe.getsockname()[1]
            return bound
    except OSError as exc:
        raise CompactionError(
            f"Cannot listen on {host} port {port} ({exc.strerror or exc}). "
            "Choose another with --port, or --port 0 for any free one."
        ) from exc


def local_url(host: str, port: int) -> str:
    """The URL under which this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
