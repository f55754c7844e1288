"""Prompts as rendered and counted, also by a tokenizer that the name of the model does not promise."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.simulator import Model, Reply, Tokenizer
from tests.simulator.bench import KEY, BenchFactory, assistant, long_chat, user

HAN = "请把这份报告翻译成英文，然后告诉我哪些数字是错的。" * 20
LATIN = "Translate this report into German, and say which figures are wrong. " * 20


def tokens_of(bench: BenchFactory, tokenizer: Tokenizer | None, *messages: dict[str, Any], **fields: Any) -> int:
    """`usage.prompt_tokens` of a request."""
    served = bench(100_000, models=[Model(KEY, tokenizer=tokenizer)])
    return int(served.chat(*messages, **fields).json()["usage"]["prompt_tokens"])


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer(factor=2.0),
        Tokenizer(factor=0.7),
        Tokenizer(wide_factor=1.75),
        Tokenizer(wide_factor=0.6, message_tokens=20, prompt_tokens=200, added_system=LATIN[:300]),
    ],
    ids=["x2", "x0.7", "wide", "mixed"],
)
def test_it_cuts_by_its_own_count(bench: BenchFactory, tokenizer: Tokenizer) -> None:
    """Silently, with 200: what is left is inside the window as this server counts, and fills what it may."""
    messages = [*long_chat(30), user(HAN * 3)]
    window = tokens_of(bench, tokenizer, *messages) * 2 // 3
    served = bench(window, models=[Model(KEY, tokenizer=tokenizer)], script=lambda call: Reply("ok"))
    assert served.chat(*messages).status_code == 200
    assert served.last.truncated
    assert window // 2 < served.last.kept_tokens <= window - window // 8
    assert served.chat(*messages[-1:]).status_code == 200


def test_a_message_that_alone_is_too_long_loses_its_front(bench: BenchFactory) -> None:
    """Also where half of it is of a script that costs more."""
    tokenizer = Tokenizer(factor=1.1, wide_factor=1.75, message_tokens=4)
    served = bench(1000, models=[Model(KEY, tokenizer=tokenizer)])
    served.chat(user("first"), assistant("yes"), user((LATIN + HAN) * 20 + "the very end"))
    assert served.last.seen_text.endswith("the very end")
    assert 700 < served.last.kept_tokens <= 875


def test_images_cost_a_fixed_number_of_tokens(bench: BenchFactory) -> None:
    """An image costs 1000 tokens whatever its data, and text parts are counted as text."""
    served = bench()
    served.chat(user("look here"))
    plain = served.last.prompt_tokens
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 20_000}}
    served.chat(user([{"type": "text", "text": "look here"}, image]))
    assert served.last.prompt_tokens == plain + 1000
    assert "QUJD" not in served.last.seen_text
