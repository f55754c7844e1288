"""What is too large by name, the error that says so, and excerpts where the operator allows them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import Message
from litellm_compaction.core.plan import shortened
from litellm_compaction.core.refusal import protected_shares, refusal
from litellm_compaction.core.view import RECORD_TOKENS
from tests.builders import (
    JsonDict,
    agent_run,
    assistant,
    budget,
    calls,
    chat,
    conversation,
    image,
    parsed,
    raw_conversations,
    result,
    size,
    system,
    user,
)

BIG = "word " * 20_000


def cut(
    raw: list[JsonDict], window: int = 8192, *, tool_results: bool = True, user_message: bool = True
) -> tuple[Message, ...] | None:
    view = conversation(parsed(raw))
    return shortened(view, budget(window, view), tool_results=tool_results, user_message=user_message)


@given(raw_conversations())
def test_the_shares_are_the_floor(raw: list[JsonDict]) -> None:
    """Nothing is counted twice or left out."""
    view = conversation(parsed(raw))
    floor = sum(share.tokens for share in protected_shares(view, tools_tokens=10))
    assert view.floor_tokens - floor in (0, RECORD_TOKENS)


@pytest.mark.parametrize(
    ("raw", "named", "remedy"),
    [
        ([*agent_run(2), calls("b", name="read_file"), result("b", BIG)], "result of tool read_file", "oversized_tool"),
        ([*chat(2), assistant("a"), user(BIG)], "newest user message", "oversized_user_message"),
        ([system(BIG), user("hi")], "system messages", "shorten the system prompt"),
        (
            [*chat(2), assistant("a"), user(f"<system-reminder>\n{BIG}</system-reminder>\nhi")],
            "the client's own notes in the newest user message",
            "let the client add less to the user's words",
        ),
        (
            [user("hi"), calls("b", arguments='{"text": "' + BIG + '"}'), result("b", "ok")],
            "newest assistant message",
            "write less in one call",
        ),
    ],
)
def test_a_refusal_says_who_and_what_to_do(raw: list[JsonDict], named: str, remedy: str) -> None:
    """P1's error: limit, floor, largest share first, margin, answer, a window that would do, and a remedy."""
    view = conversation(parsed(raw))
    limits = budget(8192, view)
    error = refusal("qwen", view, limits, tools_tokens=0)
    text = str(error)
    assert f"They are: {named} {max(share.tokens for share in error.shares)} tokens, " in text
    assert remedy in text
    assert f"Load qwen with a context length of at least {error.needed_tokens} tokens" in text
    assert (error.window_tokens, limits.floor_tokens) == (8192, view.floor_tokens)
    assert error.needed_tokens > 8192
    assert budget(error.needed_tokens, view).fits(view.floor_tokens)
    assert not re.search("word word", text)


def test_only_what_may_be_cut_is_cut() -> None:
    """Each kind of excerpt is allowed by its own setting; where all is full cutting to nothing helps nobody."""
    head, behind = [system(), user("hi")], [calls("1"), result("1", BIG)]
    both = [system(), user(BIG), *behind]
    for results, words in ((False, False), (True, False), (False, True)):
        assert cut(both, tool_results=results, user_message=words) is None
    assert cut([*head, *behind], user_message=False) is not None
    assert cut([system(BIG), *head[1:], *behind]) is None


def test_the_largest_gives_way_first() -> None:
    """Everything above one common level is cut down to it; what is smaller stays the same object."""
    raw = [*agent_run(1)[:2], calls("1", "2", "3"), result("1", BIG), result("2", "small"), result("3", BIG[:50_000])]
    short = cut(raw, 4096)
    assert short is not None
    changed = [at for at, (now, then) in enumerate(zip(short, parsed(raw), strict=True)) if now.text != then.text]
    assert changed == [3, 5]
    assert abs(size(short[3]) - size(short[5])) < 40
    assert short[3].raw.keys() == raw[3].keys()
    assert "tokens left out" in short[3].text


def test_an_excerpt_keeps_the_other_parts() -> None:
    """A request with an image and a giant text keeps the image."""
    raw = [{"role": "user", "content": [{"type": "text", "text": BIG}, image()]}]
    short = cut(raw)
    assert short is not None
    assert short[0].raw["content"][1] == image()  # type: ignore[index]


@given(st.lists(st.integers(1, 6000), min_size=1, max_size=4), st.integers(1, 6000), st.integers(0, 8))
def test_excerpts_fit_with_their_record(results: list[int], request_words: int, turns: int) -> None:
    """After the cut the floor fits the window, so that the history can be compacted; and the cut is the least."""
    ids = [f"c{number}" for number in range(len(results))]
    raw = [
        *(chat(turns)[:-1] if turns else []),
        user("word " * request_words),
        calls(*ids),
        *(result(each, "data " * words) for each, words in zip(ids, results, strict=True)),
    ]
    before = conversation(parsed(raw))
    limits = budget(4096, before)
    if limits.fits(before.floor_tokens):
        return
    short = cut(raw, 4096)
    assert short is not None
    assert limits.fits(conversation(short).floor_tokens)
    assert short == cut(raw, 4096)
