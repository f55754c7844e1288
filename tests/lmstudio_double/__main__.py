"""The double on the command line: `python -m tests.lmstudio_double --model qwen/qwen3-8b:8192`."""

from __future__ import annotations

import argparse
import signal
import threading

from . import Model, Reply, Simulator, numbered_words, serve


def _loaded_model(text: str) -> tuple[str, int]:
    key, _, context_length = text.rpartition(":")
    if not key or not context_length.isdigit():
        raise argparse.ArgumentTypeError(f"expected KEY:CONTEXT, such as qwen/qwen3-8b:8192, not {text!r}")
    return key, int(context_length)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m tests.lmstudio_double", description=__doc__)
    parser.add_argument("--port", type=int, default=1234)
    parser.add_argument("--model", type=_loaded_model, action="append", default=[], metavar="KEY:CONTEXT")
    parser.add_argument("--tokens-per-second", type=float, default=None, metavar="N")
    parser.add_argument("--reply-words", type=int, default=50, metavar="N", help="answer with N numbered words")
    options = parser.parse_args()
    reply = Reply(numbered_words(options.reply_words))
    models = [Model(key, max_context_length=1_048_576) for key, _ in options.model]
    simulator = Simulator(models, tokens_per_second=options.tokens_per_second, script=lambda call: reply)
    for key, context_length in options.model:
        simulator.load(key, context_length)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with serve(simulator, port=options.port) as address:
        print(f"listening on {address.base_url}", flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
