"""How much of the package a request passes: modules and functions, without the simulator.

    python benchmarks/cost/walk.py [--names]

A proxy in this process before the double, one request each, after others that warm it up. The model's family is known
and counted by its vocabulary. `loop` are those that run on the event loop, `all` those in its worker threads, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(_ROOT))

_PACKAGE = f"{_ROOT / 'litellm_compaction'}{os.sep}"
_MODEL = "qwen3-8b"


class Walk:
    """A profile function: the functions of the package that were called since `begin`, by the thread."""

    def __init__(self) -> None:
        self.passed: set[tuple[str, str, int]] = set()
        self._has_begun = False

    def begin(self, *, has_begun: bool = True) -> None:
        if has_begun:
            self.passed.clear()
        self._has_begun = has_begun

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        path = frame.f_code.co_filename
        if self._has_begun and event == "call" and path.startswith(_PACKAGE):
            module = path.removeprefix(_PACKAGE)
            if not module.startswith("simulator"):
                self.passed.add((module, frame.f_code.co_name, threading.get_ident()))

    def modules(self, thread: int | None = None) -> list[str]:
        return sorted({module for module, _, own in self.passed if thread in (None, own)})


def _said(turns: int, topic: str) -> list[dict[str, str]]:
    pairs = (
        (
            {"role": "user", "content": f"{topic}, question {turn}: " + "word " * 60},
            {"role": "assistant", "content": "word " * 60},
        )
        for turn in range(turns)
    )
    return [message for pair in pairs for message in pair] + [{"role": "user", "content": "And now?"}]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--names", action="store_true", help="the modules, too")
    names = parser.parse_args().names
    walk = Walk()
    # Before the event loop and its threads begin.
    threading.setprofile(walk)
    from litellm_compaction.simulator import count_by
    from litellm_compaction.tokenizers.families import family_of
    from litellm_compaction.tokenizers.registry import vocabulary
    from tests.integration.bench import Group, open_bench

    count_by(lambda: vocabulary(family_of("", _MODEL).vocabulary).encoding)
    hello, long = [{"role": "user", "content": "Hi"}], _said(60, "a")
    with (
        tempfile.TemporaryDirectory() as folder,
        open_bench(
            Path(folder),
            [Group("local", key=_MODEL, architecture="qwen3")],
            {"background": "off", "store": "memory://"},
        ) as bench,
    ):

        def ask(messages: list[dict[str, str]], *, stream: bool = False) -> int:
            walk.begin()
            reply = bench.proxy.stream_body(
                {"model": "local", "messages": messages, "stream": stream}, "/v1/chat/completions"
            )
            walk.begin(has_begun=False)
            return reply.status

        for messages in (hello, hello, _said(60, "b"), hello):
            ask(messages)
        print("request          status  loop  all  functions")
        for name, messages in {
            "hello": hello,
            "new compaction": long,
            "applied again": long,
            "refused": [{"role": "user", "content": "word " * 30_000}],
        }.items():
            status = ask(messages)
            loop = next(own for module, _, own in walk.passed if module == "proxy/presence.py")
            functions = len({(module, function) for module, function, _ in walk.passed})
            print(f"{name:16} {status:6} {len(walk.modules(loop)):5} {len(walk.modules()):4} {functions:10}")
            if names:
                print("   ", ", ".join(walk.modules()))


if __name__ == "__main__":
    main()
