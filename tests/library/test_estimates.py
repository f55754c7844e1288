"""Sizes at once, of anything that a caller may hold; and the names that the package gives."""

from __future__ import annotations

import logging

import pytest

import litellm_compaction
from litellm_compaction import CompactionConfig, estimate_messages_tokens, estimate_tokens, safe_compact
from litellm_compaction.errors import ConfigError, SummaryFailed
from tests.builders import chat
from tests.library.scripted import FakeCompletion


@pytest.mark.parametrize("value", [None, 3, [], {"text": "x"}, b"bytes"])
def test_what_is_no_text_has_no_tokens(value: object) -> None:
    assert estimate_tokens(value) == 0


def test_a_role_counts() -> None:
    assert estimate_messages_tokens([{"role": "assistant", "content": "four"}]) == -(-(9 + 4) // 4)


def test_tool_parts_count_by_their_texts() -> None:
    """As Vercel's AI SDK writes calls and results; a picture still costs what a large one does."""
    call = {"type": "tool-call", "toolCallId": "a", "toolName": "read", "args": {"path": "a.py"}}
    result = {"type": "tool-result", "toolCallId": "a", "result": "line " * 100}
    assert estimate_messages_tokens([{"role": "assistant", "content": [call]}]) < 40
    assert 125 <= estimate_messages_tokens([{"role": "user", "content": [result]}]) < 160
    assert estimate_messages_tokens([{"role": "user", "content": [{"type": "image_url"}]}]) >= 1200


async def test_a_failure_says_why(caplog: pytest.LogCaptureFixture) -> None:
    config = CompactionConfig(model="qwen/qwen3-8b", context_window_tokens=16_384)
    with caplog.at_level(logging.WARNING):
        await safe_compact(chat(20), config, FakeCompletion([ConnectionError("secret words")]))
    (line,) = [record.message for record in caplog.records if "library_compaction_failed" in record.message]
    assert line.endswith("reason=error error=SummaryFailed cause=ConnectionError")


def test_the_errors_are_names_of_the_package() -> None:
    assert (litellm_compaction.ConfigError, litellm_compaction.SummaryFailed) == (ConfigError, SummaryFailed)
