"""A real llama.cpp server in a process of its own: `python -m tests.real_engine.engine` is that process.

One thread each: on a shared machine two spin, and generate 4 tokens a second instead of 30.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LISTENING = "listening on "
_START_LIMIT_S = 120
_END_LIMIT_S = 60


class Engine:
    """One loaded copy of the model, whose `slots` share a cache of `window_tokens`; llama.cpp rounds them up to 256.

    `base_url` is "" while it does not run.
    """

    def __init__(self, weights: Path, window_tokens: int, slots: int = 1) -> None:
        self._weights = weights
        self.window_tokens = window_tokens
        self.slots = slots
        self.base_url = ""
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        command = [sys.executable, "-m", "tests.real_engine.engine", str(self._weights)]
        command += [str(self.window_tokens), str(self.slots)]
        self._process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        giving_up = threading.Timer(_START_LIMIT_S, self._process.kill)
        giving_up.start()
        said = next((line for line in self._process.stdout if line.startswith(_LISTENING)), "")
        giving_up.cancel()
        if not said:
            raise RuntimeError(f"the engine ended with {self._process.wait(_END_LIMIT_S)} instead of starting")
        self.base_url = said.removeprefix(_LISTENING).strip()

    def kill(self) -> None:
        """Ends it at once, whatever it is doing, as a crash would."""
        self.base_url = ""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(_END_LIMIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None


@contextmanager
def running(weights: Path, window_tokens: int) -> Iterator[Engine]:
    """An engine that runs while the block lasts."""
    engine = Engine(weights, window_tokens)
    try:
        engine.start()
        yield engine
    finally:
        engine.kill()


def _serve(weights: str, window_tokens: int, slots: int) -> None:
    """Serves until whoever started it has gone."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = weights
    params.n_ctx = window_tokens
    params.n_parallel = slots
    # As LM Studio loads a model (`useUnifiedKvCache`), and as llama-server does where nobody says how many slots.
    params.kv_unified = slots > 1
    params.ctx_shift = False
    params.port = 0
    params.hostnames = ["127.0.0.1"]
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.endpoint_slots = True
    params.use_jinja = True
    params.ui = False
    params.fit_params = False
    params.n_gpu_layers = 0
    params.verbosity = 1
    server = xllamacpp.Server(params)
    print(_LISTENING + server.listening_address, flush=True)
    # Its end comes when the tests close it or die: no engine is left behind.
    sys.stdin.read()
    # Past llama.cpp's own threads, which would be waited for.
    os._exit(0)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("weights")
    arguments.add_argument("window_tokens", type=int)
    arguments.add_argument("slots", type=int)
    asked = arguments.parse_args()
    _serve(asked.weights, asked.window_tokens, asked.slots)
