"""Bodies of chat requests: which are refused, what strict templates say, how prompts are rendered and counted."""

from __future__ import annotations

import pytest

from tests.lmstudio_double import Model, Reply
from tests.simulator.bench import KEY, BenchFactory, assistant, long_chat, system, user

SYSTEM, USER, ANSWER = system("S"), user("q"), assistant("a")


@pytest.mark.parametrize("factor", [2.0, 0.7])
def test_it_cuts_by_its_own_count(bench: BenchFactory, factor: float) -> None:
    """Silently, with 200: what is left is inside the window as this server counts, and fills what it may."""
    served = bench(1000, models=[Model(KEY, tokens_factor=factor)], script=lambda call: Reply("ok"))
    assert served.chat(*long_chat(30)).status_code == 200
    assert served.last.truncated
    assert 500 < served.last.kept_tokens <= 875


def test_images_cost_a_fixed_number_of_tokens(bench: BenchFactory) -> None:
    """An image costs 1000 tokens whatever its data, and text parts are counted as text."""
    served = bench()
    served.chat(user("look here"))
    plain = served.last.prompt_tokens
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 20_000}}
    served.chat(user([{"type": "text", "text": "look here"}, image]))
    assert served.last.prompt_tokens == plain + 1000
    assert "QUJD" not in served.last.seen_text
