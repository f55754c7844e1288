"""A running llama-server, asked what a request costs.

Called by `tokens/accuracy.py`, tests/tokens/golden/build_engine.py and the tests that need a real engine. The program
is the operator's own, named by the environment variable LLAMA_SERVER; nothing here builds or downloads one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import IO, Any

VARIABLE = "LLAMA_SERVER"
# A longer prompt is refused with its number of tokens, which costs nothing to compute.
_WINDOW_TOKENS = 512
_ADDRESS = re.compile(r"listening on (?:\S+: )?(http://127\.0\.0\.1:\d+)")
# What gpt-oss's parser says of a model without weights; the prompt was read all the same.
_NOISE = "does not match the expected"
_START_S, _ANSWER_S = 120, 300


class Refused(Exception):
    """The engine does not take the request; its words are the message."""


def program() -> Path | None:
    """The llama-server of this machine: what LLAMA_SERVER names, else nothing.

    Raises:
        FileNotFoundError: LLAMA_SERVER names no program.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    found = shutil.which(named)
    if found is None:
        raise FileNotFoundError(f"{VARIABLE}={named} is no program: name a llama-server of llama.cpp")
    return Path(found)


class LlamaServer:
    """One model, served."""

    def __init__(self, address: str) -> None:
        self._address = address

    def prompt_tokens(self, request: Mapping[str, Any]) -> int:
        """What the engine counts for a chat request: `usage.prompt_tokens`, or what its refusal of the length says.

        Raises:
            Refused: for any other reason.
        """
        try:
            answer = self._post("/v1/chat/completions", {**request, "max_tokens": 1})
        except Refused as refusal:
            if _NOISE not in str(refusal):
                return _told_tokens(refusal)
        else:
            return int(answer["usage"]["prompt_tokens"])
        try:
            return int(self._post("/completion", {"prompt": self.prompt(request), "n_predict": 1})["tokens_evaluated"])
        except Refused as refusal:
            return _told_tokens(refusal)

    def prompt(self, request: Mapping[str, Any]) -> str:
        """The prompt that the engine renders, without a token that it puts before each."""
        return str(self._post("/apply-template", request)["prompt"])

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, names of special tokens included."""
        return list(self._post("/tokenize", {"content": text, "parse_special": True})["tokens"])

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"})  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.read().decode(errors="replace")) from None


def _told_tokens(refusal: Refused) -> int:
    found = re.search(r'"n_prompt_tokens":\s*(\d+)', str(refusal))
    if found is None:
        raise refusal
    return int(found[1])


@contextmanager
def served(binary: Path, model: Path, *, window_tokens: int = _WINDOW_TOKENS) -> Iterator[LlamaServer]:
    """A model on a port of this machine's choosing, until the end of the block.

    Raises:
        RuntimeError: the program does not serve the model; with its last words.
    """
    arguments = ["--model", str(model), "--host", "127.0.0.1", "--port", "0", "--ctx-size", str(window_tokens)]
    arguments += ["--jinja", "--no-warmup", "--parallel", "1", "--threads", "1", "--offline"]
    process = subprocess.Popen([binary, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout
    assert output is not None
    addresses: Queue[str | None] = Queue()
    last_words: deque[str] = deque(maxlen=10)
    reader = Thread(target=_read, args=(output, addresses, last_words), daemon=True)
    reader.start()
    try:
        address = addresses.get(timeout=_START_S)
        if address is None:
            raise RuntimeError(f"{binary} ended without serving {model}: {''.join(last_words)}")
        yield LlamaServer(address)
    finally:
        process.kill()
        process.wait()
        reader.join()
        output.close()


def _read(output: IO[str], addresses: Queue[str | None], last_words: deque[str]) -> None:
    """Reads what the program says, to its end: a full pipe would stop it."""
    for line in output:
        last_words.append(line)
        found = _ADDRESS.search(line)
        if found is not None:
            addresses.put(found[1])
    addresses.put(None)
