"""A request weighs what the server counted of it; what is made of it weighs what its text costs elsewhere."""

from __future__ import annotations

from litellm_compaction.core.messages import Request
from litellm_compaction.engine.measure import RequestMeasurer
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Windows
from tests.builders import chat, parsed
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
