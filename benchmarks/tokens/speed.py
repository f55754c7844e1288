"""What counting costs: the first and the next turn of a request, the event loop, and each delta of a stream.

    python benchmarks/tokens/speed.py [--family llama3.1] [--rounds 15]

Requests of 30,000 and 120,000 tokens, of 1,000 tokens per message. "First" has a fresh cache and vocabularies loaded;
"next" is the same conversation, parsed anew from JSON, with an answer and a question of 500 tokens each behind it,
others in each round, so that every round has the same size. Beside it the part of it that is the encoder's: the time
for two other such texts alone, taken in turn with it. LiteLLM's
`token_counter(model="gpt-4o", …)`, which counts content with o200k and four tokens per message, is run on the same
conversations right after us; "of LiteLLM's" is our median divided by its own.
The stall is the longest time for which another task of the same event loop had to wait, the median of five; beside it
the same of a loop without any work, since that is what the machine's other programs cost. "Longest call" is the
processor time of the longest single call of C code, which is how long a thread can hold the interpreter lock against
the event loop, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.generated import GeneratedTokens
from litellm_compaction.tokens.prompt import own_count
from litellm_compaction.tokens.texts import TextCounts

MODELS = {
    "llama3.1": ("llama", "llama-3.1-8b"),
    "llama2": ("llama", "llama-2-7b"),
    "mistral-nemo": ("llama", "mistral-nemo"),
    "mistral-v3": ("llama", "mistral-7b-instruct-v0.3"),
    "gpt-oss": ("gpt-oss", "gpt-oss-20b"),
    "qwen3": ("qwen3", "qwen3-8b"),
    "deepseek-v3.1": ("deepseek2", "deepseek-v3.1"),
    "gemma4": ("gemma4", "gemma-4"),
}
# Messages: an odd number, so that the user has spoken last.
SIZES = (31, 121)
WORDS = Path(__file__).read_text(encoding="utf-8").split(" ")
KINDS: dict[str, Callable[[random.Random], str]] = {
    "prose": lambda source: text(1_000_000, source),
    "chinese": lambda source: "".join(chr(source.randrange(0x4E00, 0x9FA5)) for _ in range(1_000)) * 333,
    "spaces": lambda source: " " * (1_000_000 + source.randrange(1_000)),
    "base64": lambda source: base64.b64encode(source.randbytes(750_000)).decode(),
}


def main() -> None:
    """Measures, and prints a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--family", choices=MODELS, action="append")
    arguments.add_argument("--rounds", type=int, default=15)
    chosen = arguments.parse_args()
    # LiteLLM's rows need no prices from the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    for name in chosen.family or list(MODELS):
        asyncio.run(measure(name, family_of(*MODELS[name]), chosen.rounds))
    litellm_rows(chosen.rounds)


async def measure(name: str, family: Family, rounds: int) -> None:
    """One paragraph of the table."""
    small = parse(conversation(8))
    begun = time.perf_counter()
    load_ms = await longest_wait_ms(TokenCounter().count("t", family, small))
    print(f"{name}: loaded and counted in {time.perf_counter() - begun:.2f} s, stall meanwhile {load_ms:.0f} ms")
    for messages in SIZES:
        first = []
        for seed in range(rounds):
            request = parse(conversation(messages, seed))
            first.append(await timed(TokenCounter(), family, request))
        ratio = share(first, litellm_counts(messages, rounds))
        following, encoding, tokens = await next_turns(family, messages, rounds)
        next_ratio = share(following, litellm_counts(messages, rounds, next_turn=True))
        print(
            f"  {tokens} tokens: first {middle(first)} ms, {ratio} of LiteLLM's; "
            f"next turn {middle(following)} ms, {next_ratio} of LiteLLM's, "
            f"encoding its new text alone {middle(encoding)} ms"
        )
    print(f"  1 MB message, stall in ms (an idle loop's: {await stall(None, ''):.1f}):", end="")
    for kind in KINDS:
        longest_ms = min(longest_call_ms(family, kind, seed) for seed in range(3))
        print(f" {kind} {await stall(family, kind):.1f}, longest call {longest_ms:.1f}", end=";")
    print(f"\n  per delta {per_delta_us(family):.2f} µs")


async def next_turns(family: Family, messages: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Seconds of a next turn, and of encoding two texts like its new ones, by rounds; tokens of the whole prompt."""
    counter, words = TokenCounter(), vocabulary(family.vocabulary)
    said = conversation(messages)
    await counter.count("t", family, parse(said))
    following, encoding, tokens = [], [], 0
    for seed in range(rounds):
        request = parse(said + turn(seed))
        following.append(await timed(counter, family, request))
        tokens = (await counter.count("t", family, request)).tokens
        # Parsed as well, so that the processor's caches hold as little of the vocabulary as before.
        alone = [message.text for message in parse(said + turn(rounds + seed)).messages[-2:]]
        begun = time.perf_counter()
        words.lengths_in_prompt(alone)
        encoding.append(time.perf_counter() - begun)
    return following, encoding, tokens


def litellm_counts(messages: int, rounds: int, *, next_turn: bool = False) -> list[float]:
    """Seconds that LiteLLM takes for the same conversations, by rounds."""
    from litellm import token_counter

    seconds = []
    for seed in range(rounds):
        said = conversation(messages) + turn(seed) if next_turn else conversation(messages, seed)
        begun = time.perf_counter()
        token_counter(model="gpt-4o", messages=said)
        seconds.append(time.perf_counter() - begun)
    return seconds


def litellm_rows(rounds: int) -> None:
    """What LiteLLM takes."""
    from litellm import token_counter

    for messages in SIZES:
        print(
            f"litellm.token_counter, {token_counter(model='gpt-4o', messages=conversation(messages))} tokens: "
            f"first and next turn {middle(litellm_counts(messages, rounds))} ms"
        )
    said = [{"role": "user", "content": text(1_000_000, random.Random(1))}]
    begun = time.perf_counter()
    token_counter(model="gpt-4o", messages=said)
    print(f"  1 MB message: stall {1e3 * (time.perf_counter() - begun):.1f} ms (it runs on the event loop)")
    deltas = WORDS[:2000]
    begun = time.perf_counter()
    for delta in deltas:
        token_counter(model="gpt-4o", text=delta)
    print(f"  per delta {1e6 * (time.perf_counter() - begun) / len(deltas):.2f} µs")


async def timed(counter: TokenCounter, family: Family, request: Request) -> float:
    """Seconds that a count takes."""
    begun = time.perf_counter()
    await counter.count("t", family, request)
    return time.perf_counter() - begun


async def stall(family: Family | None, kind: str) -> float:
    """Milliseconds of the event loop that a new message of 1 MB takes, median of five; None for an idle loop."""
    waits = []
    for seed in range(5):
        work = asyncio.sleep(0.1) if family is None else TokenCounter().count("t", family, megabyte(kind, seed))
        waits.append(await longest_wait_ms(work))
    return statistics.median(waits)


def megabyte(kind: str, seed: int) -> Request:
    """A message of 1 MB."""
    return parse([{"role": "user", "content": KINDS[kind](random.Random(seed))}])


def longest_call_ms(family: Family, kind: str, seed: int) -> float:
    """Processor time of the longest call of C code while a message of 1 MB is counted, in this thread."""
    longest, begun = 0.0, []

    def profile(_: object, event: str, __: object) -> None:
        nonlocal longest
        if event == "c_call":
            begun.append(time.thread_time())
        elif event in ("c_return", "c_exception") and begun:
            longest = max(longest, time.thread_time() - begun.pop())

    request, texts = megabyte(kind, seed), TextCounts()
    sys.setprofile(profile)
    try:
        own_count(family, request, texts)
    finally:
        sys.setprofile(None)
    return 1e3 * longest


async def longest_wait_ms(work: Awaitable[object]) -> float:
    """The longest wait of another task while something is waited for, in milliseconds."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.0005)
            longest = max(longest, time.perf_counter() - before - 0.0005)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    longest = 0.0
    await work
    ticking.cancel()
    return 1e3 * longest


def per_delta_us(family: Family) -> float:
    """Microseconds per delta of a stream of 20,000 words."""
    generated = GeneratedTokens(TokenCounter().text_counter("t", family))
    deltas = [f" {word}" for word in text(120_000, random.Random(9)).split(" ")]
    begun = time.perf_counter()
    for delta in deltas:
        generated.add(delta)
        generated.tokens  # noqa: B018
    return 1e6 * (time.perf_counter() - begun) / len(deltas)


def conversation(messages: int, seed: int = 0) -> list[dict[str, str]]:
    """A system message and so many turns of about 1,000 tokens."""
    source = random.Random(seed)
    turns = [
        {"role": ("user", "assistant")[index % 2], "content": text(3_300, source)} for index in range(max(1, messages))
    ]
    return [{"role": "system", "content": "You help."}, *turns]


def turn(seed: int) -> list[dict[str, str]]:
    """An answer and the next question, of about 500 tokens each."""
    source = random.Random(10_000 + seed)
    return [{"role": role, "content": text(1_600, source)} for role in ("assistant", "user")]


def text(chars: int, source: random.Random) -> str:
    """Words of this file in any order."""
    parts: list[str] = []
    size = 0
    while size < chars:
        parts.append(source.choice(WORDS))
        size += len(parts[-1]) + 1
    return " ".join(parts)


def parse(messages: list[dict[str, str]]) -> Request:
    """The request, as if it had just come from a client."""
    return Request(messages=tuple(map(parse_message, json.loads(json.dumps(messages)))))


def share(seconds: list[float], theirs: list[float]) -> str:
    """A median as a part of another one."""
    return f"{statistics.median(seconds) / statistics.median(theirs):.2f}"


def middle(seconds: list[float]) -> str:
    """The median, in milliseconds, and the range."""
    values = sorted(1e3 * second for second in seconds)
    return f"{statistics.median(values):.2f} ({values[0]:.2f}–{values[-1]:.2f})"


if __name__ == "__main__":
    main()
