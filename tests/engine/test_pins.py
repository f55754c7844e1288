"""Messages that a client has pinned stay verbatim, whichever compaction comes; within a tenth of the window."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.errors import BadWish
from tests.builders import JsonDict, assistant, user
from tests.engine.bench import Bench, sent
from tests.engine.test_records import said

RULE = "Whatever happens, the port of the walrus stays 9143."
WINDOW = 8192


def ruled(tokens: int) -> list[JsonDict]:
    """A conversation near whose beginning the person sets a rule among other words."""
    first, *rest = said(tokens)
    return [
        first,
        user("Begin."),
        assistant("Yes."),
        user(f"{'Before it. ' * 20}{RULE} {'After it. ' * 20}"),
        *rest[1:],
    ]


def verbatim(raw: list[JsonDict], messages: Any) -> bool:
    return any(str(raw[3]["content"]) in message.text for message in messages)


async def grown(bench: Bench, raw: list[JsonDict], **context: Any) -> list[JsonDict]:
    """The conversation when it has been compacted twice more; every request is checked."""
    rounds = 0
    while rounds < 2:
        raw = [*raw, assistant("word " * 200), user("Go on.")]
        prepared = await bench.guard(raw, WINDOW, **context)
        assert verbatim(raw, sent(raw, prepared))
        rounds += prepared.action == "compacted"
    return raw


@pytest.mark.parametrize("strategy", ["summary", "prune", "handoff"])
async def test_a_pinned_message_stays_in_every_later_compaction(strategy: str) -> None:
    """Once it is pinned, also in requests without the list; without a pin it would not."""
    raw = ruled(6700)
    bench = Bench()
    assert not verbatim(raw, sent(raw, await bench.guard(raw, WINDOW, strategy=strategy, keep_recent_messages=1)))
    bench = Bench()
    pins = (" ".join(RULE.split()[:8]),)
    messages = sent(raw, await bench.guard(raw, WINDOW, strategy=strategy, pins=pins))
    assert verbatim(raw, messages)
    await grown(bench, raw, strategy=strategy)


async def test_the_last_list_holds() -> None:
    """An empty one takes all pins away; other conversations and tenants never had them."""
    raw = ruled(6700)
    bench = Bench()
    assert verbatim(raw, sent(raw, await bench.guard(raw, WINDOW, pins=(RULE,))))
    assert not verbatim(raw, sent(raw, await bench.guard(raw, WINDOW, scope="others")))
    other = [raw[0], user("Another."), *raw[2:]]
    assert not verbatim(other, sent(other, await bench.guard(other, WINDOW)))
    await bench.guard(raw, WINDOW, pins=())
    assert not [row for row in await bench.store.rows.scan() if row.key.startswith("f:pins:") and row.body]
    action = "reused"
    while action != "compacted":
        raw = [*raw, assistant("word " * 200), user("Go on.")]
        prepared = await bench.guard(raw, WINDOW)
        action = prepared.action
    assert not verbatim(raw, sent(raw, prepared))


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        (("No such words.",), "Pin 1 is in no message"),
        ((RULE, "No more such."), "Pin 2 is in no message"),
        (("answer 5 answer 5",), "Pin 1 is in no message"),
    ],
)
async def test_a_pin_names_words_of_the_persons(pins: tuple[str, ...], says: str) -> None:
    """Not the model's, and nobody's; the refusal does not quote it."""
    with pytest.raises(BadWish, match=says) as raised:
        await Bench().guard(ruled(6700), WINDOW, pins=pins)
    assert pins[-1] not in str(raised.value)
