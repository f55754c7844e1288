"""The estimates, the threshold, the division: by the numbers of the specification."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction import (
    CompactionConfig,
    estimate_messages_tokens,
    estimate_tokens,
    select_messages_to_compact,
    should_compact,
)
from tests.builders import assistant, calls, chat, result, system, user


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), (None, 0), (["x"], 0)])
def test_a_text_is_estimated_by_its_characters(text: object, tokens: int) -> None:
    assert estimate_tokens(text) == tokens


@pytest.mark.parametrize(
    ("message", "tokens"),
    [
        (user("abcdefgh"), 2 + 2),
        ({"role": "user", "content": [{"type": "text", "text": "abcd"}, {"type": "image_url", "image_url": {}}]}, 1203),
        (result("1", "abcd"), 2 + 1),
        ({"role": "tool", "content": [{"type": "tool-result", "result": "abcd"}]}, 2 + 11),
        ({"role": "assistant", "content": None}, 2),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "n", "arguments": "{}"}}]}, 2 + 8),
    ],
)
def test_a_message_is_estimated_by_its_words(message: dict[str, Any], tokens: int) -> None:
    """Two for its role, its text, its calls and results as JSON; 1,200 for a picture."""
    assert estimate_messages_tokens([message]) == tokens


def test_the_threshold_is_a_share_of_what_the_reserves_leave() -> None:
    assert CompactionConfig(threshold_percent=1.0).threshold_tokens == 117_000
    assert CompactionConfig(model_context_limit=16_384).threshold_tokens == int(0.8 * (16_384 - 11_000))
    small = CompactionConfig(model_context_limit=4096)
    assert (small.reserved_tokens, small.threshold_tokens) == (0, 3276)


def test_a_conversation_is_compacted_from_the_threshold_on() -> None:
    """But not if it has no more messages than are kept, and one."""
    config = CompactionConfig(model_context_limit=1024, system_reserve=0, output_reserve=0, safety_buffer=0)
    at_line = [*[user("a" * 4 * 60)] * 11, user("a" * 4 * (819 - 11 * 62 - 2))]
    assert should_compact(at_line, config)
    assert not should_compact([*at_line[:-1], user("a" * 4 * (818 - 11 * 62 - 2))], config)
    assert not should_compact([user("a" * 9999)] * 11, config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_context_limit", 1023), ("output_reserve", "4000"), ("threshold_percent", 1.1), ("strategy", "sumary")],
)
def test_a_bad_setting_is_named(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        CompactionConfig(**{name: value})  # type: ignore[arg-type]


SUMMARY = assistant("## Session Summary (round 2)\nA.")


@pytest.mark.parametrize(
    ("raw", "keep", "compacted", "previous"),
    [
        (chat(20), 10, range(1, 30), ""),
        ([system(), SUMMARY, *chat(20)[1:]], 10, range(2, 31), "A."),
        ([system(), SUMMARY, user("x"), assistant("y"), user("z")], 3, range(0), "A."),
        # The boundary walks back from results to their call.
        (
            [system(), user("a"), assistant("b"), user("c"), calls("1", "2"), result("1", "ok"), result("2", "ok")],
            1,
            range(1, 4),
            "",
        ),
        ([system(), user("a"), calls("1"), result("1", "ok"), assistant("b"), user("c")], 3, range(1, 2), ""),
    ],
)
def test_a_conversation_is_divided(raw: list[Any], keep: int, compacted: range, previous: str) -> None:
    """Leading system messages and an earlier summary stay, and no call loses its result."""
    chosen = select_messages_to_compact(raw, keep)
    assert chosen.messages_to_compact == [raw[at] for at in compacted]
    assert chosen.messages_to_keep == [message for at, message in enumerate(raw) if at not in compacted]
    assert chosen.previous_summary == previous
