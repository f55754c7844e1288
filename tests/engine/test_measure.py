"""A request weighs what the server counted of it; what is made of it weighs what its text costs elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.engine.measure import RequestMeasurer, note_length
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Windows
from tests.builders import chat, parsed, user
from tests.engine.bench import Bench


async def test_an_anchor_decides_about_the_request_and_not_about_a_compaction() -> None:
    """Its tokens and its doubt are the server's; sizes, floor and budget of a compaction are not lowered by them."""
    bench = Bench(counter=TokenCounter())
    context = bench.context(8192)
    family = family_of("", context.target.model)
    counter = bench.counter
    for words, ratio in ((200, 1.0), (250, 0.8)):
        seen = Request(messages=parsed(chat(8, words=words)))
        count = await counter.count(context.target.key, family, seen)
        counter.learn(context.target.key, count, round(count.raw_tokens * ratio))
    measurer = RequestMeasurer(windows=Windows(cache_s=5), counter=counter, sources=Sources())
    measured = await measurer.measure(Request(messages=parsed(chat(8, words=250))), context)
    assert (
        measured.conversation.tokens
        == measured.count.tokens
        < sum(measured.conversation.sizes) + measured.conversation.fixed_tokens
    )
    assert measured.budget.own.error_ratio == measured.count.error_ratio < measured.budget.error_ratio
    assert measured.budget.own.prompt_limit_tokens > measured.budget.prompt_limit_tokens


@pytest.mark.parametrize(("words", "fits"), [(10, True), (20_000, False)])
async def test_what_is_known_to_be_too_long_is_noted(words: int, fits: bool) -> None:
    """P8: if a compaction fails by a fault of ours, such a request is refused in place of being sent as it came."""
    bench = Bench()
    context = bench.context()
    request = bench.request([user("word " * words)])
    note_length(await bench.compactor._measurer.measure(request, context))
    assert (context.attempts.too_long is None) is fits
    # The rest of an answer is no request of the client's.
    carried = replace(bench.context(), goes_on=True)
    note_length(await bench.compactor._measurer.measure(request, carried))
    assert carried.attempts.too_long is None
