"""A stock LiteLLM proxy in a child process, for `up` and `demo`: started, watched until it answers, ended."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import httpx

from litellm_compaction.errors import CompactionError, ServerUnavailable
from litellm_compaction.master_key import KEY_VARIABLE
from litellm_compaction.proxy.config_check import API_BASE_VARIABLE

# LiteLLM's imports take 6–8 s on two cores, several times that on a cold or busy disk.
_START_LIMIT_S = 180.0
_POLL_S = 0.2
_GRACE_S = 10.0
_HELD_LINES = 200
# As the plug-in writes them (`proxy/callback.py`).
_OWN_LINE = re.compile("litellm_compaction:(?:WARNING|ERROR|CRITICAL|INFO: guarding)")
# The last is the same and all else that LiteLLM fetches by itself, where it knows the word.
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_OFFLINE_MODE": "true"}
_RUN_LITELLM = "import sys; from litellm import run_server; sys.argv[0] = 'litellm'; sys.exit(run_server())"


@contextlib.contextmanager
def serving(
    config: Path,
    host: str,
    port: int,
    environ: Mapping[str, str],
    *,
    is_shown: bool,
    master_key: str | None = None,
    api_base: str | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A stock LiteLLM proxy that answers; it is asked to end with the block, and killed after 10 s or a second Ctrl-C.

    It has a session of its own, so that Ctrl-C in the terminal ends the block first. SIGTERM does the same. It has the
    caller's environment, and fetches nothing from the internet.

    Args:
        is_shown: shows its words, but of its start only the plug-in's: LiteLLM's are 40 lines about other things.
        master_key, api_base: None if the config has its own.

    Raises:
        CompactionError: LiteLLM's proxy is not installed for this interpreter.
        ServerUnavailable: it ended, or did not answer in time; its words were shown.
    """
    # Looked up, not imported: importing LiteLLM takes seconds.
    missing = [name for name in ("litellm", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        what = f"LiteLLM's proxy is not installed for {sys.executable} (missing: {', '.join(missing)})."
        raise CompactionError(f"{what} Install it with: pip install 'litellm[proxy]'")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
        [sys.executable, "-c", _RUN_LITELLM, "--config", str(config), "--host", host, "--port", str(port)],
        env=_environment(environ, {KEY_VARIABLE: master_key, API_BASE_VARIABLE: api_base}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    words = _Words(process, is_shown=is_shown)
    try:
        _wait_until_alive(process, local_url(host, port))
        words.is_ready = True
        yield process
    except ServerUnavailable:
        words.has_failed = not words.is_ready
        raise
    finally:
        try:
            process.terminate()
            process.wait(_GRACE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        words.end()
        signal.signal(signal.SIGTERM, before)


def _environment(environ: Mapping[str, str], own: Mapping[str, str | None]) -> dict[str, str]:
    child = {**_OFFLINE, **environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    child |= {name: value for name, value in own.items() if value is not None}
    # A web proxy of the user's network cannot reach this machine's own LM Studio.
    for name in ("NO_PROXY", "no_proxy"):
        child[name] = ",".join(filter(None, (child.get(name, ""), "127.0.0.1", "localhost")))
    return child


class _Words:
    """Shows a child's words as they come; those of a start only if it fails, and the plug-in's own."""

    def __init__(self, process: subprocess.Popen[bytes], *, is_shown: bool) -> None:
        self.is_ready = self.has_failed = False
        self._is_shown = is_shown
        self._held: deque[str] = deque(maxlen=_HELD_LINES)
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                if not self._is_shown or not (self.is_ready or _OWN_LINE.search(line)):
                    self._held.append(line)
                    continue
                # A proxy whose lines nobody reads would stop at the next one.
                with contextlib.suppress(OSError):
                    print(line, flush=True)

    def end(self) -> None:
        self._reader.join(_GRACE_S)
        if self.has_failed:
            print("\n".join(self._held), flush=True)


def _wait_until_alive(proxy: subprocess.Popen[bytes], base_url: str) -> None:
    deadline_s = time.monotonic() + _START_LIMIT_S
    with httpx.Client(trust_env=False, timeout=2.0) as http:
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.HTTPError):
                if http.get(f"{base_url}/health/liveliness").status_code == 200:
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                what = f"The proxy ended with exit code {proxy.wait(_POLL_S)} before it was ready"
                raise ServerUnavailable(f"{what}; its own message is above.")
    raise ServerUnavailable(f"The proxy did not answer at {base_url}/health/liveliness within {_START_LIMIT_S:g} s.")


def usable_port(host: str, port: int) -> int:
    """`port` itself if it is free, or a free one for 0: LiteLLM would silently take another.

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
        todo = "Choose another with --port, or --port 0 for any free one."
        raise CompactionError(f"Cannot listen on {host} port {port} ({exc.strerror or exc}). {todo}") from exc


def local_url(host: str, port: int) -> str:
    """The URL under which this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
