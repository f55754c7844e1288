"""What the callback costs a stream that it does not have to touch: time per chunk, and time to the first.

    python benchmarks/cost/stream_overhead.py [--streams 30] [--chunks 1000] [--tokens 1]

Three real proxies in front of the same simulator, asked in turn: with a callback that only hands chunks on, with ours
below LiteLLM's OpenAI client, and with ours in LiteLLM's hooks. Medians, and the medians of the ratios to the first in
the same turn; the proxy's CPU time up to the first chunk and for a chunk beside them, which other work on the machine
disturbs less, and the least for a chunk, which is disturbed least.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.integration.harness import CHAT, Proxy, lm_studio, proxy, write_config
from tests.lmstudio_double import Model, Reply, Simulator, numbered_words, serve

_KEY = "qwen2.5-7b-instruct"
_HAND_ON = """
from litellm.integrations.custom_logger import CustomLogger


class HandOn(CustomLogger):
    async def async_post_call_streaming_iterator_hook(self, user_api_key_dict, response, request_data):
        async for chunk in response:
            yield chunk


handler = HandOn()
"""


class Timing(NamedTuple):
    """One stream, in milliseconds."""

    first_ms: float
    first_cpu_ms: float
    chunk_ms: float
    cpu_ms: float


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=30, help="streams through each proxy")
    parser.add_argument("--chunks", type=int, default=1000, help="chunks in each stream, about")
    parser.add_argument("--tokens", type=int, default=1, help="tokens in each chunk")
    options = parser.parse_args()
    simulator = Simulator([Model(_KEY, architecture="qwen2")])
    simulator.load(_KEY, 131_072)
    with ExitStack() as stack:
        url = stack.enter_context(serve(simulator)).base_url
        proxies = {name: stack.enter_context(_proxy(stack, url, name)) for name in ("hand on", "transport", "hooks")}
        # No word twice: LiteLLM ends a stream that repeats the same chunk a hundred times. A word takes two tokens.
        words = numbered_words(max(options.chunks * options.tokens // 2, 1))
        simulator.script = lambda call: Reply(words, chunk_tokens=options.tokens)
        timings: dict[str, list[Timing]] = {name: [] for name in proxies}
        for number in range(options.streams + 3):
            for name, running in proxies.items():
                timing = _timed(running)
                if number >= 3:  # the first ones load what is loaded lazily
                    timings[name].append(timing)
        plain = timings["hand on"]
        print(
            f"{'':12}{'first chunk ms':>16}{'ratio':>8}{'CPU ms':>8}{'ratio':>8}"
            f"{'per chunk µs':>16}{'ratio':>8}{'CPU µs':>10}{'ratio':>8}{'least':>8}{'ratio':>8}"
        )
        least = {name: min(timing.cpu_ms for timing in taken) for name, taken in timings.items()}
        for name, taken in timings.items():
            median = _median(taken)
            ratios = _median([_ratios(own, base) for own, base in zip(taken, plain, strict=True)])
            print(
                f"{name:12}{median.first_ms:16.1f}{ratios.first_ms:8.2f}{median.first_cpu_ms:8.1f}"
                f"{ratios.first_cpu_ms:8.2f}{1000 * median.chunk_ms:16.0f}{ratios.chunk_ms:8.2f}"
                f"{1000 * median.cpu_ms:10.0f}{ratios.cpu_ms:8.2f}{1000 * least[name]:8.0f}"
                f"{least[name] / least['hand on']:8.2f}"
            )


def _proxy(stack: ExitStack, url: str, name: str):  # type: ignore[no-untyped-def]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "hand_on.py").write_text(_HAND_ON)
    models = [lm_studio("local", _KEY, url)]
    if name == "hand on":
        return proxy(write_config(folder, models, None, litellm_settings={"callbacks": ["hand_on.handler"]}))
    settings = {"carrier": "auto" if name == "transport" else "hooks"}
    return proxy(write_config(folder, models, settings))


def _timed(running: Proxy) -> Timing:
    body = {"model": "local", "messages": [{"role": "user", "content": "Say words."}], "stream": True}
    started_s, started_cpu_s = time.perf_counter(), _cpu_s(running)
    first_s = first_cpu_s = 0.0
    received: list[bytes] = []
    with running.client.stream("POST", CHAT, json=body, headers=running.headers) as answer:
        for data in answer.iter_raw():
            if not received:
                first_s, first_cpu_s = time.perf_counter(), _cpu_s(running)
            received.append(data)
    ended_s, ended_cpu_s = time.perf_counter(), _cpu_s(running)
    stream = b"".join(received)
    if not stream.endswith(b"data: [DONE]\n\n") or b'"error"' in stream:
        raise RuntimeError(f"the stream did not end as it should: {stream[-300:]!r}")
    chunks = max(stream.count(b"data: {") - 1, 1)
    return Timing(
        first_ms=1000 * (first_s - started_s),
        first_cpu_ms=1000 * (first_cpu_s - started_cpu_s),
        chunk_ms=1000 * (ended_s - first_s) / chunks,
        cpu_ms=1000 * (ended_cpu_s - first_cpu_s) / chunks,
    )


def _ratios(own: Timing, base: Timing) -> Timing:
    return Timing(*(one / max(other, 1e-9) for one, other in zip(own, base, strict=True)))


def _median(timings: list[Timing]) -> Timing:
    return Timing(*(statistics.median(column) for column in zip(*timings, strict=True)))


def _cpu_s(running: Proxy) -> float:
    """What the proxy has spent so far, on Linux: by its CPU clock (clock_getcpuclockid(3)), in nanoseconds."""
    return time.clock_gettime((~running.process.pid << 3) | 2)


if __name__ == "__main__":
    main()
