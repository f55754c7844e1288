"""What is counted of five conversations in six families, and after each number of a server's; a line a number.

`GOLDENS=write pytest tests/goldens -n 0` writes the file anew; its diff belongs into the commit that changes it.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import GeneratedTokens, TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from tests.builders import image, parsed, tools
from tests.goldens.tellers import TELLS, Teller, recorded

_FILE = Path(__file__).parent / "counts.txt"
_CASES = (
    ("qwen3-8b", "qwen3", "chat"),
    ("qwen3-8b", "qwen3", "agent"),
    ("llama-3.1-8b", "llama", "values"),
    ("gpt-oss-20b", "gpt-oss", "agent"),
    ("mistral-small-3.2", "", "pasted"),
    ("mistral-small-3.2", "", "pictures"),
    ("glm-4", "glm4", "chat"),
    ("qwen2.5-vl-7b", "qwen2vl", "pictures"),
    ("nobody-knows", "", "agent"),
    ("nobody-knows", "", "pictures"),
)
# What a server says of each prompt, of what is likely: mostly alike, now and then odd.
_SHARES = (0.95, 0.97, 1.2, 0.96, 0.5, 0.5, 1.0, 0.94, 5.0)


@pytest.mark.parametrize(("name", "architecture", "tells"), _CASES)
async def test_the_counts_are_as_recorded(name: str, architecture: str, tells: str) -> None:
    """Of a conversation that grows, whose server counts it after every second turn, and of its last answer."""
    lines = [line async for line in _lines(name, architecture, tells)]
    assert lines == recorded(_FILE, f"{name} {tells}", lines)


async def _lines(name: str, architecture: str, tells: str) -> AsyncIterator[str]:
    counter, family, teller = TokenCounter(), family_of(architecture, name), Teller(tells)
    told = parsed([*itertools.islice(TELLS[tells](teller), 60)])
    offered = tuple(tools(2) if tells == "agent" else ())
    for turn, share in enumerate(_SHARES):
        messages = told[: 5 * (turn + 1)]
        if tells == "pictures":
            messages = messages + parsed([{"role": "user", "content": [image(400 * turn, 300)]}])
        request = Request(messages=messages, tools=offered)
        count = await counter.count("t", family, request, window_tokens=4096)
        said = int(share * count.tokens)
        if turn % 3 == 2:
            counter.take_protocols("t", count, request, said)
            how = "by protocol"
        elif turn % 3 == 1:
            how = f"asked {counter.learn('t', count, said, is_asked=True)}"
        else:
            how = f"answered {counter.learn('t', count, said)}"
        flags = f"{counter.is_suspicious(count, said):d}{counter.may_be_cut(count, said):d}"
        yield f"{_ends(count)}; {said} {how} {flags}"
    running = GeneratedTokens(counter.text_counter("t", family, text=count.text))
    steps = []
    for word in teller.anything(20).split(" "):
        running.add(f"{word} ")
        steps.append(running.tokens)
    yield f"{_ends(await counter.count('u', family, request, window_tokens=1))}; {steps[::40]} {running.exact()}"


def _ends(count: Estimate) -> str:
    shares = f"{count.other_ratio:.3f} {count.made_likely_ratio:.3f} {count.text.usual:.3f} {count.rates[1].high:.3f}"
    parts = f"{sum(count.sizes)} + {count.tools_tokens} + {count.overhead_tokens}, {count.unpriced_tokens}"
    return f"{count.low} {count.tokens} {count.likely} {count.high}: {parts}; {shares}"
