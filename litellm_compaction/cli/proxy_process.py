"""A stock LiteLLM proxy in a child process, for `up` and `demo`: started, watched until it answers, ended.

`doctor` and `connect` read here which one `up` runs now.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
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
from typing import IO, NamedTuple

import httpx

from litellm_compaction.errors import CompactionError, ConfigError, ServerUnavailable
from litellm_compaction.places import data_folder

# LiteLLM's imports take 6–8 s on two cores, several times that on a cold or busy disk.
_START_LIMIT_S = 180.0
_POLL_S, _GRACE_S = 0.2, 10.0
# As the plug-in writes them (`proxy/callback.py`).
_OWN_LINE = re.compile("litellm_compaction:(?:WARNING|ERROR|CRITICAL|INFO: guarding)")
# The last is the same and all else that LiteLLM fetches by itself, where it knows the word.
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_OFFLINE_MODE": "true"}
_RUN_LITELLM = "import sys; from litellm import run_server; sys.argv[0] = 'litellm'; sys.exit(run_server())"


@contextlib.contextmanager
def serving(
    config: Path, host: str, port: int, environ: Mapping[str, str], *, is_shown: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """A stock LiteLLM proxy that answers; it is asked to end with the block, and killed after 10 s or a second Ctrl-C.

    It has a session of its own, so that Ctrl-C in the terminal ends the block first. SIGTERM does the same. It fetches
    nothing from the internet. If `is_shown`, its words are, but of its start only the plug-in's: LiteLLM's are 40 lines
    about other things.

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
        env=_environment(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    held, is_ready = deque[str](maxlen=200), threading.Event()
    reader = threading.Thread(target=_read, args=(process.stdout, held, is_ready, is_shown), daemon=True)
    reader.start()
    try:
        _wait_until_alive(process, local_url(host, port))
        is_ready.set()
        yield process
    finally:
        has_failed = not is_ready.is_set() and isinstance(sys.exc_info()[1], ServerUnavailable)
        try:
            process.terminate()
            process.wait(_GRACE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        reader.join(_GRACE_S)
        for line in held if has_failed else ():
            print(line, flush=True)
        signal.signal(signal.SIGTERM, before)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    child = {**_OFFLINE, **environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    # A web proxy of the user's network cannot reach this machine's own LM Studio.
    for name in ("NO_PROXY", "no_proxy"):
        child[name] = ",".join(filter(None, (child.get(name, ""), "127.0.0.1", "localhost")))
    return child


def _read(stream: IO[bytes], held: deque[str], is_ready: threading.Event, is_shown: bool) -> None:
    """Shows a child's words as they come; those of a start are held, but for the plug-in's own."""
    with stream:
        for raw in stream:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            if not is_shown or not (is_ready.is_set() or _OWN_LINE.search(line)):
                held.append(line)
                continue
            # A proxy whose lines nobody reads would stop at the next one.
            with contextlib.suppress(OSError):
                print(line, flush=True)


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
    """`port` itself if it is free, or a free one for 0; an error if it is not: LiteLLM would silently take another."""
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


class Running(NamedTuple):
    """A proxy that `up` has started, and the server behind it; `api_base` is None if the config names its servers."""

    base_url: str
    config: str
    api_base: str | None
    is_simulated: bool


@contextlib.contextmanager
def noted(running: Running, environ: Mapping[str, str]) -> Iterator[None]:
    """Keeps a note of what runs while the block does, of the newest `up` alone; without it all goes well, too."""
    with contextlib.suppress(OSError, ConfigError):
        path = _note(environ)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([os.getpid(), *running]), encoding="utf-8")
    try:
        yield
    finally:
        # A newer one keeps its own.
        if running_up(environ) == running:
            _note(environ).unlink(missing_ok=True)


def running_up(environ: Mapping[str, str]) -> Running | None:
    """Returns what the newest `up` of this user serves, if it still runs."""
    try:
        process, base_url, config, api_base, is_simulated = json.loads(_note(environ).read_text(encoding="utf-8"))
        # Asks, and sends nothing. Windows has no such question.
        if os.name == "posix":
            os.kill(process, 0)
        return Running(base_url, config, api_base, is_simulated)
    except (OSError, ConfigError, ValueError, TypeError, OverflowError):
        return None


def _note(environ: Mapping[str, str]) -> Path:
    return data_folder(environ) / "up.json"
