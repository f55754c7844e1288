"""What images cost is learned from usage, without harm to what text costs, and is kept."""

from __future__ import annotations

import base64
import struct
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Amounts, Estimate, Own
from litellm_compaction.tokens.known import Known
from tests.builders import request_of

KNOWN = family_of("qwen2", "qwen2.5-7b-instruct")
TEXT = "What is in this picture of the harbor? " * 20
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 640, 480) + b"\x08\x06\0\0\0"
# By area: 23 times 18 patches, a separator for each row, two marks and a reserve.
ESTIMATE = 440


def asked(*images: int, text: str = TEXT) -> Request:
    """A conversation with so many pictures in each of its questions."""
    raw: list[dict[str, Any]] = []
    for turn, number in enumerate(images):
        url = f"data:image/png;base64,{base64.b64encode(PNG + bytes([turn])).decode()}"
        parts = [{"type": "text", "text": f"{turn}. {text}"}] + [
            {"type": "image_url", "image_url": {"url": url}}
        ] * number
        raw += [
            {"role": "user", "content": parts if number else parts[0]["text"]},
            {"role": "assistant", "content": "A."},
        ]
    return request_of(*raw[:-1])


async def truth(request: Request, price: int) -> int:
    """The exact tokens of the text, and a price for every image."""
    messages = [message.raw for message in request.messages]
    images = sum(len(raw["content"]) - 1 for raw in messages if isinstance(raw["content"], list))
    plain = [
        {**raw, "content": raw["content"][0]["text"]} if isinstance(raw["content"], list) else raw for raw in messages
    ]
    counted = await TokenCounter().count("t", KNOWN, request_of(*plain))
    return counted.tokens + images * price


async def told(counter: TokenCounter, request: Request, price: int, family: Family = KNOWN) -> float:
    """How far the count is off, before the counter is told the truth."""
    counted, real = await counter.count("t", family, request), await truth(request, price)
    counter.learn("t", counted, real)
    return counted.tokens / real - 1


@pytest.mark.parametrize("price", [0, 85, 440, 1200])
async def test_the_price_of_one_image_is_that_of_the_next(price: int) -> None:
    """In another conversation too, whatever the estimate was."""
    counter = TokenCounter()
    first = await told(counter, asked(1), price)
    assert (abs(first) < 0.01) == (price == ESTIMATE)
    assert abs(await told(counter, asked(1, 0), price)) < 0.01
    assert abs(await told(counter, asked(2, text="Which one is older? " * 30), price)) < 0.01
    assert abs(await told(counter, asked(0, 0, 3), price)) < 0.01
    assert not (await counter.count("t", replace(KNOWN, load=1), asked(1))).rates[1].is_confirmed


@pytest.mark.parametrize("price", [0, 85, 1200])
async def test_images_say_nothing_of_text(price: int) -> None:
    """A text-only request of an exactly known family stays exact after pictures that cost anything."""
    counter = TokenCounter()
    for images in ((1,), (1, 0), (4, 0, 2)):
        await told(counter, asked(*images), price)
    plain = await counter.count("t", KNOWN, asked(0, 0))
    assert plain.tokens == await truth(asked(0, 0), price)
    assert plain.likely <= 1.02 * plain.tokens + 1


@pytest.mark.parametrize("price", [256, 1000])
def test_a_smaller_picture_may_cost_the_same(price: int) -> None:
    """Three of one size do not tell a price by area from one for all; the other end is that of the larger ones."""
    known, print_ = Known(), Estimate.exactly(0, ())
    for _ in range(3):
        own = Own((1653.0,), media=(1653.0,), images=1)
        known.note("t", replace(print_, own=own), price)
    for size in (1064.0, 2040.0):
        span = known.price("t", "", Amounts(0.0, 0.0, size, 1))
        assert span.low * size <= price * min(1, size / 1653) <= price * max(1, size / 1653) <= span.high * size
    # Two sizes that cost as their areas do leave no doubt.
    known.note("t", replace(print_, own=Own((1064.0,), media=(1064.0,), images=1)), price * 1064 // 1653)
    span = known.price("t", "", Amounts(0.0, 0.0, 1064.0, 1))
    assert span.high < 1.1 * price / 1653


async def test_a_protocols_number_leaves_the_doubt_of_the_pictures_that_are_added_to_it() -> None:
    """It counts none: where it is exact, what a picture costs may still be off by what one answer tells of it."""
    counter, plain, pictures = TokenCounter(), asked(0), asked(2, text="Which one is older? " * 30)
    await told(counter, asked(1), 1000)
    for request in (plain, pictures):
        counted = await counter.count("t", KNOWN, request)
        counter.take_protocols("t", counted, request, await truth(request, 0))
        if request is plain:
            counter.learn("t", counted, counted.tokens)
    counted = await counter.count("t", KNOWN, pictures)
    assert (counted.is_counted, counted.is_told) == (True, False)
    assert abs(counted.tokens - await truth(pictures, 1000)) <= 5
    assert counted.high >= await truth(pictures, 1100)
    assert not counter.awaits_protocol("t", counted, pictures)
