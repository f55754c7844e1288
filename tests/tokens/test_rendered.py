"""Rendered prompts: where the tokens of each message are."""

from __future__ import annotations

import pytest

from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokens.counter import TokenCounter
from tests.builders import assistant, calls, request_of, result, system, tools, user

PROSE = "The quick brown fox jumps over the lazy dog while the others are watching from the hill. "


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mistral-nemo", "mistral-small-3.2", "qwen3-8b", "gpt-oss-20b"])
async def test_each_message_has_its_own_tokens(model: str) -> None:
    """Sizes are those of the messages' texts, up to a header, however the template orders and escapes them."""
    family, texts = family_of("", model), [f"{index} {PROSE * (1 + index % 3)}" for index in range(6)]
    called = [calls("call00001", content=""), result("call00001", texts[2] + '\n"quoted"')]
    raw = [system(texts[0]), user(texts[1]), *called, assistant(texts[3]), user(texts[4])]
    made = await TokenCounter().count("t", family, request_of(*raw, tools=tools(1)))
    assert made.own.exact
    assert made.tokens == made.overhead_tokens + made.tools_tokens + sum(made.sizes)
    # Mistral Nemo's template puts the system message into the last user message.
    for position, index in ((1, 1), (3, 2), (4, 3), (5, 4))[: 3 if model == "mistral-nemo" else 4]:
        length = vocabulary(family.vocabulary).lengths([texts[index]])[0]
        assert 0.6 * length <= made.sizes[position] <= length + 40, position
    assert made.overhead_tokens < 120
