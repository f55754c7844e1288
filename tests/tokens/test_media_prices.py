"""What images cost is learned from usage, without harm to what text costs, and is kept."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.media import UNKNOWN, MediaPrices

KNOWN = family_of("qwen2", "qwen2.5-7b-instruct")
OTHER = family_of("", "nobody-knows")
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
    return Request(messages=tuple(map(parse_message, raw[:-1])))


async def truth(request: Request, price: int) -> int:
    """The exact tokens of the text, and a price for every image."""
    messages = [message.raw for message in request.messages]
    images = sum(len(raw["content"]) - 1 for raw in messages if isinstance(raw["content"], list))
    plain = [
        {**raw, "content": raw["content"][0]["text"]} if isinstance(raw["content"], list) else raw for raw in messages
    ]
    counted = await TokenCounter().count("t", KNOWN, Request(messages=tuple(map(parse_message, plain))))
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


@pytest.mark.parametrize("price", [0, 85, 1200])
async def test_images_say_nothing_of_text(price: int) -> None:
    """A text-only request of an exactly known family stays exact after pictures that cost anything."""
    counter = TokenCounter()
    for images in ((1,), (1, 0), (4, 0, 2)):
        await told(counter, asked(*images), price)
    plain = await counter.count("t", KNOWN, asked(0, 0))
    assert plain.tokens == await truth(asked(0, 0), price)
    assert plain.error_ratio <= 0.02


async def test_a_picture_beside_a_long_text_says_nothing_of_it() -> None:
    """Too little of a price can be seen there, and no more of the text."""
    counter = TokenCounter()
    await told(counter, asked(1, text=TEXT * 12), 1200)
    plain = await counter.count("t", KNOWN, asked(0, text=TEXT * 12))
    assert plain.tokens == await truth(asked(0, text=TEXT * 12), 0)


async def test_beside_half_as_many_tokens_of_images_a_number_says_nothing_of_the_text() -> None:
    """Its difference may be the image's: text alone is counted as if nothing had been said."""
    counter, untaught = TokenCounter(), TokenCounter()
    request = asked(1, text=TEXT * 14)
    made = await counter.count("t", OTHER, request)
    assert 1 / 3 < made.media_tokens / (made.tokens - made.media_tokens) < 2 / 3
    counter.learn("t", made, made.tokens * 3 // 4)
    plain = [await each.count("t", OTHER, asked(0, text="Which one is older? " * 30)) for each in (counter, untaught)]
    assert plain[0].tokens == plain[1].tokens


async def test_a_new_picture_in_a_known_conversation_is_doubted_too() -> None:
    """By what is not known of its price, though all before it has been counted by the server."""
    counter = TokenCounter()
    await told(counter, asked(1, text="Another one. " * 30), 85)
    await told(counter, asked(0), 85)
    made = await counter.count("t", KNOWN, asked(0, 1))
    assert made.anchor is not None
    assert made.tokens + made.margin_tokens >= await truth(asked(0, 1), 85) + 0.3 * ESTIMATE


async def test_a_stand_in_keeps_room_for_a_new_picture() -> None:
    """Behind an anchor, before any has been seen: for all of its upper limit."""
    counter = TokenCounter()
    await told(counter, asked(0, text=TEXT * 8), 0, OTHER)
    made = await counter.count("t", OTHER, asked(0, 1, text=TEXT * 8))
    assert made.anchor is not None
    assert made.media_tokens > 1000
    text = await truth(asked(0, 1, text=TEXT * 8), 0)
    assert made.tokens + made.margin_tokens >= text + made.media_tokens


async def test_a_price_is_news() -> None:
    """Learned beside a text that is known already, it is written too."""
    counter = TokenCounter()
    for number in range(4):
        await told(counter, asked(0, text=f"{number} {TEXT * 2}"), 0)
    before = counter.change_key("t")
    await told(counter, asked(1), 1200)
    assert counter.change_key("t") != before


async def test_the_first_price_is_doubted() -> None:
    """One cheap picture is no reason to leave no room for one at its estimate; three are."""
    counter = TokenCounter()
    free: list[int] = []
    for number in range(4):
        request = asked(1, text=f"{number} {TEXT}")
        made = await counter.count("t", KNOWN, request)
        free.append(made.tokens + made.margin_tokens)
        counter.learn("t", made, await truth(request, 85))
    text = await truth(asked(1, text=f"3 {TEXT}"), 0)
    assert free[1] > text + 0.5 * ESTIMATE
    assert free[3] < text + 0.5 * ESTIMATE


async def test_sizes_know_which_message_has_the_image() -> None:
    """Where the price has been learned, messages without one keep their own size, anchored or not."""
    counter = TokenCounter()
    await told(counter, asked(1), 1200)
    plain = (await TokenCounter().count("t", KNOWN, asked(0, 0))).sizes
    for request in (asked(1, 0), asked(0, 1)):
        with_image = [
            index for index, message in enumerate(request.messages) if not isinstance(message.raw["content"], str)
        ]
        sizes = (await counter.count("t", KNOWN, request)).sizes
        for index, (size, text_size) in enumerate(zip(sizes, plain, strict=True)):
            assert abs(size - text_size - (1200 if index in with_image else 0)) <= 2


async def test_a_stand_in_learns_prices_too() -> None:
    """Together with what text takes: the first count errs high, later ones less and less."""
    counter = TokenCounter()
    errors = [await told(counter, asked(1, text=f"{number} {TEXT * 4}"), 256, OTHER) for number in range(6)]
    assert errors[0] > 0.3
    assert all(error > -0.05 for error in errors)
    assert errors[-1] < 0.5 * errors[0]


@pytest.mark.parametrize("family", [KNOWN, OTHER], ids=["known", "stand-in"])
async def test_prices_survive_a_restart(family: Family) -> None:
    """Another counter that takes over what one has learned counts the next picture alike."""
    counter = TokenCounter()
    for number in range(5):
        await told(counter, asked(1, text=f"{number} {TEXT}"), 1200, family)
    text = counter.as_json("t")
    assert "harbor" not in text
    again = TokenCounter()
    again.take_over("t", text)
    request = asked(1, text="Another conversation. " * 30)
    kept, new = [await each.count("t", family, request) for each in (again, TokenCounter())]
    same = await counter.count("t", family, request)
    assert kept.tokens == pytest.approx(same.tokens, rel=0.01)
    assert kept.error_ratio == pytest.approx(same.error_ratio, abs=0.01)
    assert kept.tokens != pytest.approx(new.tokens, rel=0.05)


def test_text_that_may_be_wrong_teaches_no_price() -> None:
    """Beside a long text whose own count may be off by more, a picture cannot be seen; nonsense is no price."""
    prices = MediaPrices()
    prices.note(440, 1200, doubt_tokens=200)
    prices.note(440, 440 * 5, doubt_tokens=0)
    prices.note(440, -440, doubt_tokens=0)
    prices.note(3, 3, doubt_tokens=0)
    assert not prices.samples.values
    assert prices.price() == UNKNOWN
    prices.note(440, -20, doubt_tokens=30)
    assert prices.price().factor == 0.0


def test_what_was_learned_is_noticed() -> None:
    """So that it is written: the first prices, and those that differ by more than a little."""
    prices = MediaPrices()
    gists = [prices.change_key()]
    for observed in (440, 440, 440, 441, 600):
        prices.note(440, observed, doubt_tokens=0)
        gists.append(prices.change_key())
    assert len(set(gists)) == 5
    assert gists[3] == gists[4]


def test_a_price_gives_way_to_eight_newer_ones() -> None:
    """A model that was loaded with another vision part: what its pictures cost is forgotten, but not before."""
    prices = MediaPrices()
    prices.note(440, 1200, doubt_tokens=0)
    factors = []
    for _ in range(8):
        prices.note(440, 440, doubt_tokens=0)
        factors.append(prices.price().factor)
    assert factors == [pytest.approx(1200 / 440)] * 7 + [1.0]


ROWS = st.one_of(
    st.lists(
        st.lists(
            st.one_of(st.floats(), st.integers(), st.booleans(), st.none(), st.text(max_size=3), st.just([])),
            max_size=5,
        ),
        max_size=60,
    ),
    st.recursive(st.none() | st.text() | st.floats(), st.lists, max_leaves=8),
)


@given(rows=ROWS)
def test_whatever_a_store_gives_is_bounded(rows: Any) -> None:
    """No exception, no price outside of what can be learned, and what is kept can be written again."""
    prices = MediaPrices()
    prices.note(440, 500, doubt_tokens=0)
    prices.samples.merge(rows)
    price = prices.price()
    assert 0 <= price.factor <= 4
    assert price.doubt_ratio is not None
    assert 0 <= price.doubt_ratio <= 4
    kept = json.loads(json.dumps(prices.samples.as_json(), allow_nan=False))
    assert 1 <= len(kept) <= 8
    # What was learned here is the newest.
    assert kept[-1][1:] == [round(500 / 440, 4), 440]
