"""The library's configuration, its estimates, and what it would keep; all without a model."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import litellm_compaction
from litellm_compaction import (
    CompactionConfig,
    count_tokens,
    estimate_messages_tokens,
    estimate_tokens,
    select_messages,
    should_compact,
)
from litellm_compaction.errors import ConfigError
from tests.builders import agent_run, assistant, calls, chat, image, result, system, user
from tests.library.scripted import config


@pytest.mark.slow
def test_importing_the_package_is_cheap() -> None:
    """Names are loaded when they are used, and LiteLLM never."""
    code = (
        "import sys, litellm_compaction; assert 'litellm_compaction.library' not in sys.modules; "
        "assert not {'pydantic', 'httpx'} & set(sys.modules); "
        "from litellm_compaction import compact, safe_compact; sys.exit('litellm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    """What `__all__` and `dir` say can be had; anything else is an AttributeError."""
    for name in set(litellm_compaction.__all__) - {"handler"}:
        assert getattr(litellm_compaction, name) is not None
        assert name in dir(litellm_compaction)
    with pytest.raises(AttributeError, match="no attribute 'compress'"):
        _ = litellm_compaction.compress  # type: ignore[attr-defined]


@given(st.text(max_size=50))
def test_a_token_is_four_characters(text: str) -> None:
    """Rounded up."""
    assert 4 * (estimate_tokens(text) - 1) < max(len(text), 1) <= 4 * max(estimate_tokens(text), 1)


def test_messages_are_estimated_by_what_they_say() -> None:
    """Role, text, reasoning, names and arguments of calls; a fixed size for what is not text."""
    assert estimate_messages_tokens([]) == 0
    assert estimate_messages_tokens([user("a" * 401), system("b" * 4)]) == 102 + 3
    assert estimate_messages_tokens([calls("1", name="run", arguments="12345")]) == 5
    assert estimate_messages_tokens([{**assistant("a" * 4), "reasoning_content": "b" * 4}]) == 5
    assert estimate_messages_tokens([{"role": "user", "content": [image()]}]) == 1200 + 1


@pytest.mark.parametrize(("tokens", "expected"), [(None, True), (13_107, False), (13_108, True), (0, False)])
def test_the_trigger(tokens: int | None, expected: bool) -> None:
    """80 % of the window, by the estimate or by the number that the caller knows."""
    assert should_compact([user("a" * 4 * 13_108)], config(), tokens=tokens) is expected


def test_tools_count() -> None:
    """Schemas are part of the prompt."""
    messages = [user("a" * 4 * 13_000)]
    assert not should_compact(messages, config())
    assert should_compact(messages, config(), tools=[{"type": "function", "description": "b" * 800}])
    assert not should_compact([], config())


async def test_tokens_are_counted_as_the_template_renders_them() -> None:
    """More than the bare text, tools included, for exact and for unknown families."""
    for model in ("qwen/qwen3-8b", "unheard-of"):
        bare = await count_tokens(chat(3), model=model)
        assert 600 < bare < 2000
        assert await count_tokens(chat(3), model=model, tools=[{"type": "function", "function": {"name": "x"}}]) > bare
    assert await count_tokens([], model="qwen/qwen3-8b") < 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", None),
        ("context_window_tokens", 0),
        ("context_window_tokens", "8192"),
        ("context_window_tokens", True),
        ("context_window_tokens", 1023),
        ("trigger_ratio", 0),
        ("trigger_ratio", 80),
        ("trigger_ratio", float("nan")),
        ("keep_recent_messages", -1),
        ("keep_recent_messages", 2.5),
        ("summary_max_tokens", 0),
        ("ledger_max_tokens", -1),
        ("summary_model", ""),
        ("summary_window_tokens", 12),
        ("strategy", "magic"),
        ("strategy", ["summary"]),
        ("temperature", 3),
        ("temperature", "cold"),
        ("timeout_s", 0),
        ("timeout_s", float("inf")),
    ],
)
def test_a_bad_value_is_refused(field: str, value: Any) -> None:
    """At once, with the field, the value and what is allowed."""
    with pytest.raises(ConfigError) as refused:
        config(**{field: value})
    assert str(refused.value).startswith(f"CompactionConfig.{field} = {value!r}: allowed is ")


def test_the_configuration_is_frozen_and_closed() -> None:
    """Unknown fields are errors, and nothing changes afterwards."""
    with pytest.raises(TypeError, match="keep_recnt"):
        config(keep_recnt=3)
    with pytest.raises(AttributeError):
        config().model = "other"
    assert config() == config()
    assert CompactionConfig(model="m", context_window_tokens=128_000).keep_recent_messages == 10
    assert config(context_window_tokens=2048).summary_tokens == config(context_window_tokens=2048).ledger_tokens == 307


def test_a_selection_says_what_goes_where() -> None:
    """System, the part that a summary would stand for, the recent part; nothing is lost."""
    raw = chat(20)
    chosen = select_messages(raw, config())
    assert chosen.system == raw[:1]
    assert chosen.to_summarize == raw[1:-10]
    assert chosen.to_keep == raw[-10:]
    assert (chosen.reason, chosen.round, chosen.earlier_summary) == ("", 0, "")


def test_a_running_request_is_kept() -> None:
    """The task of a long tool run is not summarized while it is being worked on."""
    raw = agent_run(20)
    chosen = select_messages(raw, config())
    assert chosen.to_keep[0] == raw[1]
    assert chosen.to_keep[1:] == raw[-10:]
    assert raw[1] not in chosen.to_summarize


def test_an_earlier_summary_is_found() -> None:
    """With its round, and not among what is to be summarized."""
    chosen = select_messages([system(), user("## Session Summary (round 2)\nA."), *chat(20)[1:]], config())
    assert (chosen.round, chosen.earlier_summary) == (2, "A.")
    assert chosen.to_summarize[0]["content"].startswith("Question 0.")


def test_nothing_to_summarize_has_a_reason() -> None:
    """And everything is kept."""
    raw = chat(4)
    chosen = select_messages(raw, config())
    assert (chosen.reason, chosen.to_summarize, [*chosen.system, *chosen.to_keep]) == ("all_recent", [], raw)
    only = [system(), user("## Session Summary\nA."), calls("1"), result("1", "ok")]
    chosen = select_messages(only, config(keep_recent_messages=2))
    assert (chosen.reason, chosen.round, [*chosen.system, *chosen.to_keep]) == ("nothing_new", 1, only)
