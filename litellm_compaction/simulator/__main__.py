"""The simulator on the command line: `python -m litellm_compaction.simulator --model qwen/qwen3-8b:8192`."""

from __future__ import annotations

import argparse
import re
import signal
import threading
from collections.abc import Sequence
from typing import get_args

from litellm_compaction.simulator.rendering import Overflow

from .catalog import Model
from .script import ChatCall, Reply, Script, numbered_words
from .server import serve
from .simulator import Simulator


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT."""
    options = _parser().parse_args(arguments)
    loaded: list[tuple[str, int]] = options.model
    keys = [*dict.fromkeys([key for key, _ in loaded] + options.not_loaded)]
    simulator = Simulator(
        [_model(key) for key in keys], overflow=options.overflow, tokens_per_second=options.tokens_per_second
    )
    for key, context_length in loaded:
        simulator.load(key, context_length)
    if options.reply_words:
        simulator.script = _words_script(options.reply_words)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with serve(simulator, options.host, options.port) as address:
        print(f"listening on {address.base_url}", flush=True)  # noqa: T201 - what scripts wait for
        stop.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m litellm_compaction.simulator", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=1234)
    parser.add_argument("--model", type=_loaded_model, action="append", default=[], metavar="KEY:CONTEXT")
    parser.add_argument("--not-loaded", action="append", default=[], metavar="KEY")
    parser.add_argument("--overflow", choices=get_args(Overflow), default="truncate_middle")
    parser.add_argument("--tokens-per-second", type=float, default=None, metavar="N")
    parser.add_argument("--reply-words", type=int, default=0, metavar="N", help="answer with N numbered words")
    return parser


def _loaded_model(text: str) -> tuple[str, int]:
    key, _, context_length = text.rpartition(":")
    if not key or not context_length.isdigit():
        raise argparse.ArgumentTypeError(f"expected KEY:CONTEXT, such as qwen/qwen3-8b:8192, not {text!r}")
    return key, int(context_length)


def _model(key: str) -> Model:
    publisher, _, name = key.rpartition("/")
    family = re.match(r"[a-z]+(?:-oss|\d+)?", name.lower())
    return Model(
        key,
        publisher=publisher or "lmstudio-community",
        architecture=family.group() if family else "qwen3",
        max_context_length=1_048_576,
    )


def _words_script(words: int) -> Script:
    def script(call: ChatCall) -> Reply:
        return Reply(numbered_words(words))

    return script


if __name__ == "__main__":
    main()
