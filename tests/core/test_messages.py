"""What is a message, which messages belong together, and when two conversations are the same."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import (
    ABORT_NOTICE,
    ATTEMPTS_NOTICE,
    DONE_NOTICE,
    NEARLY_FULL_NOTICE,
    NO_ANSWER,
    START_NOTICE,
    THOUGHTS_NOTICE,
    chain,
    cleaned,
    parse_message,
    render_arguments,
    without_notices,
)
from tests.builders import JsonDict, assistant, calls, image, parsed, raw_conversations, result, system, user

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def _text_part(text: str, **more: Any) -> JsonDict:
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize("raw", [{}, {"role": None}, {"role": 7}, {"role": ["user"]}])
def test_a_message_without_a_role_is_refused(raw: JsonDict) -> None:
    """Nobody can place it; an unknown role is kept."""
    with pytest.raises(ValueError, match="without a role"):
        parse_message({**raw, "content": "x"})
    assert parse_message({"role": "critic"}).role == "critic"


@given(st.dictionaries(st.sampled_from(["content", "tool_calls", "tool_call_id", "reasoning", "name"]), JSON))
def test_any_json_object_with_a_role_is_a_message(fields: JsonDict) -> None:
    """Whatever a client sends is parsed, kept as it was, and has a place in the chain."""
    raw = {**fields, "role": "assistant"}
    before = copy.deepcopy(raw)
    message = parse_message(raw)
    assert message.raw is raw
    assert raw == before
    assert len(chain([message])) == 2


@pytest.mark.parametrize(
    "notice", [START_NOTICE, DONE_NOTICE, ABORT_NOTICE, NEARLY_FULL_NOTICE, ATTEMPTS_NOTICE, THOUGHTS_NOTICE]
)
def test_every_notice_is_taken_out_when_it_comes_back(notice: str) -> None:
    """With its numbers, as a client has it in an answer."""
    assert without_notices(f"So far.\n\n{notice.format(used=7411, window=8192)}\n\nMore.") in (
        "So far.More.",
        "So far.\n\nMore.",
    )


def test_only_our_lines_in_answers_are_taken_out() -> None:
    """A line that says more is the model's own; users' messages and clean answers stay the same object."""
    quoted = f"It printed: {START_NOTICE}"
    assert without_notices(quoted) == quoted
    for same in (*parsed([user(f"{START_NOTICE}\n"), assistant("clean"), assistant("⚙️ Settings"), calls("1")]),):
        assert cleaned(same) is same


TOLD = f"{START_NOTICE}\n\n{DONE_NOTICE}\n\n"
TAGGED = f"<think>\n{TOLD.strip()}"
THINKING = {"type": "thinking", "thinking": "So.", "signature": "s"}


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        # As a thought, under each of its names; other thoughts stay.
        ({"reasoning_content": TOLD}, {}),
        ({"reasoning": TOLD.strip().replace("\n\n", "\n")}, {}),
        ({"reasoning_content": f"{TOLD}So."}, {"reasoning_content": "So."}),
        ({"thinking_blocks": [{**THINKING, "thinking": TOLD}]}, {}),
        ({"thinking_blocks": [{**THINKING, "thinking": TOLD}, THINKING]}, {"thinking_blocks": [THINKING]}),
        # Between tags in the text.
        ({"content": f"{TAGGED}\n</think>\n\nHello"}, {}),
        ({"content": f"{TAGGED}\n\nSo.\n</think>\n\nHello"}, {"content": "<think>\nSo.\n</think>\n\nHello"}),
        ({"content": f"{TAGGED}\n</think>\n\nHello".replace("think>", "thinking>")}, {}),
        # An answer that is nothing else is not left empty: some chat templates refuse that; beside calls it may be.
        ({"content": TOLD}, {"content": NO_ANSWER}),
        ({**calls("1"), "content": TOLD}, {**calls("1"), "content": ""}),
        ({**calls("1"), "content": [_text_part(TOLD)]}, {**calls("1"), "content": ""}),
        ({"content": TOLD + "Hello"}, {}),
        ({"content": [f"{TOLD}Hello", image()]}, {"content": ["Hello", image()]}),
        (
            {"content": [_text_part(f"{TOLD}Hello", cache_control={})]},
            {"content": [_text_part("Hello", cache_control={})]},
        ),
    ],
)
def test_cleaning_reaches_every_place_of_an_answer(fields: JsonDict, left: JsonDict) -> None:
    """A notice is taken out of what a client sends back, wherever it was shown; nothing else is."""
    expected = {**assistant("Hello"), **left}
    shown = cleaned(parse_message({**assistant("Hello"), **fields}))
    assert shown.raw == expected
    assert cleaned(shown) is shown


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([user("a")], [assistant("a")]),
        ([user("a b")], [user("a  b")]),
        ([user("<think>hm</think>a")], [user("a")]),
        ([user(f"{START_NOTICE}\na")], [user("a")]),
        ([assistant("a <think>hm</think>")], [assistant("a")]),
        ([calls("1")], [calls("1", name="walk")]),
        ([calls("1", arguments='{"a": 1}')], [calls("1", arguments='{"a": "1"}')]),
        ([calls("1", arguments='{"a": [1, 2]}')], [calls("1", arguments='{"a": [2, 1]}')]),
        ([calls("1", "2"), result("1", "x")], [calls("1", "2"), result("2", "x")]),
        ([calls("1"), calls("2"), result("1", "x")], [calls("1"), calls("2"), result("2", "x")]),
        ([user("a")], [{"role": "user", "content": [_text_part("a"), image()]}]),
        (
            [{"role": "user", "content": [image()]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://other.test/x.png"}}]}],
        ),
        ([user("\ud800")], [user("\ud801")]),
        ([user("a"), user("b")], [user("b"), user("a")]),
        ([user("a"), user("b")], [user("a b"), user("")]),
        ([user("a"), system("later"), assistant("b")], [user("a"), assistant("b")]),
    ],
)
def test_what_counts(one: list[JsonDict], other: list[JsonDict]) -> None:
    """A record of one of these would be wrong for the other."""
    assert chain(parsed(one))[-1] != chain(parsed(other))[-1]


@pytest.mark.parametrize("depth", [10, 900, 50_000])
def test_deep_arguments_have_a_hash(depth: int) -> None:
    """Arguments nested beyond what a parser takes are compared as text."""
    deep = '{"a":' * depth + "1" + "}" * depth
    assert len(chain(parsed([calls("1", arguments=deep)]))) == 2
    assert render_arguments(deep)


@given(raw_conversations())
def test_a_conversation_that_comes_back_has_the_same_chain(raw: list[JsonDict]) -> None:
    """Sent again through JSON, and with what clients add and drop, a conversation is the same."""
    entries = chain(parsed(raw))
    again = [_as_a_client_returns_it(message) for message in raw]
    assert chain(parsed([system("The time is 10:02."), *again])) == entries
    assert len(set(entries)) == len(entries) == len([message for message in raw if message["role"] in _ROLES]) + 1


_ROLES = ("user", "assistant", "tool")


def _as_a_client_returns_it(raw: JsonDict) -> JsonDict:
    again: JsonDict = json.loads(json.dumps(raw))
    for named in (*again.get("tool_calls", ()), *([again] if again["role"] == "tool" else [])):
        key = "id" if "id" in named else "tool_call_id"
        named[key] = f"new {named[key]}"
    if again["role"] == "assistant":
        again["reasoning_content"] = "I thought about it."
        again["content"] = again["content"] or None
        if isinstance(again["content"], str) and not again["content"].startswith("<think>"):
            again["content"] = f"<think>hm</think>\n\n{again['content']}\n"
    return again
