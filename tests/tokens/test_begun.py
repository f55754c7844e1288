"""Prompts that end inside an answer: what is sent where a server puts no template around them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import pytest

from litellm_compaction.core.messages import JsonValue, parse_message
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.begun import BegunPrompt, begun_prompt

NOW = datetime(2031, 2, 3, 4, 5, 6)
SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell of a ship."}
BEGUN = {"role": "assistant", "content": " Once upon a"}


def begun(
    model: str, messages: Sequence[dict[str, JsonValue]] = (SYSTEM, ASK, BEGUN), architecture: str = ""
) -> BegunPrompt | None:
    return begun_prompt(family_of(architecture, model), [parse_message(message) for message in messages], NOW)


@pytest.mark.parametrize(
    ("model", "end", "end_of_turn"),
    [
        ("qwen2.5-7b", "Tell of a ship.<|im_end|>\n<|im_start|>assistant\n Once upon a", "<|im_end|>"),
        # As its template writes an answer without thoughts.
        ("qwen3-8b", "<|im_start|>assistant\n<think>\n\n</think>\n\nOnce upon a", "<|im_end|>"),
        ("qwq-32b", "<|im_start|>assistant\n<think>\n\n</think>\n\nOnce upon a", "<|im_end|>"),
        ("gpt-oss-20b", "<|start|>assistant<|channel|>final<|message|> Once upon a", "<|end|>"),
        ("llama-2-7b", "Tell of a ship. [/INST] Once upon a", "</s>"),
        # Its vocabulary takes four seconds of processor time to load.
        pytest.param("gemma-4-12b", "<|turn>model\n Once upon a", "<turn|>", marks=pytest.mark.slow),
    ],
)
def test_the_answer_stands_where_the_template_writes_it(model: str, end: str, end_of_turn: str) -> None:
    """Behind the very characters with which the template opens an answer, and without what ends it."""
    prompt = begun(model)
    assert prompt is not None
    assert prompt.text.endswith(end)
    assert prompt.end_of_turn == end_of_turn


def test_the_server_itself_puts_its_token_before_the_prompt() -> None:
    """Llama's template begins with the token that its vocabulary adds to every prompt; two of it confuse a model."""
    prompt = begun("llama-3.1-8b")
    assert prompt is not None
    assert prompt.text.startswith("<|start_header_id|>system")


@pytest.mark.parametrize(
    ("model", "end"),
    [
        # Its template writes an empty block of thoughts before an answer; the next ends its prompt inside one.
        ("qwen3-8b", "<|im_start|>assistant\n<think>\nOnce upon a\n</think>\n\n"),
        ("qwq-32b", "<|im_start|>assistant\n<think>\nOnce upon a\n</think>\n\n"),
        # Without thoughts, and with thoughts in a channel of their own.
        ("qwen2.5-7b", None),
        ("gpt-oss-20b", None),
    ],
)
def test_a_prompt_can_end_behind_closed_thoughts(model: str, end: str | None) -> None:
    """As the model itself would have closed them; not if the template does not show how."""
    prompt = begun_prompt(family_of("", model), list(map(parse_message, (SYSTEM, ASK, BEGUN))), NOW, closes=True)
    assert (prompt is None) == (end is None)
    assert prompt is None or (end is not None and prompt.text.endswith(end))
    assert prompt is None or prompt.text.count("<think>") == 1


def test_closed_thoughts_stand_where_a_server_shows_them() -> None:
    """DeepSeek R1: the template begins a thought, and leaves it out of earlier answers."""
    asked = "<｜User｜>Tell<｜Assistant｜>"
    written = f"{asked}zq7"
    messages = list(map(parse_message, (ASK, BEGUN)))
    by_server = (f"{asked}<think>\n", written, f"{written}<｜end▁of▁sentence｜><｜User｜>.<｜Assistant｜><think>\n")
    family = family_of("", "deepseek-r1-distill-qwen-7b")
    prompt = begun_prompt(family, messages, NOW, by_server, closes=True)
    assert prompt == BegunPrompt(f"{asked}<think>\nOnce upon a\n</think>\n\n", "<｜end▁of▁sentence｜>")


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_control_token_in_a_text_must_not_become_one(role: str) -> None:
    """Whoever wrote it: there is no such prompt then."""
    messages = [SYSTEM, ASK, BEGUN]
    changed = [
        {**message, "content": f"{message['content']} <|im_end|> too"} if message["role"] == role else message
        for message in messages
    ]
    assert begun("qwen2.5-7b", changed) is None
    # The same letters are no token of another vocabulary.
    assert begun("llama-2-7b", changed) is not None


def test_what_is_not_known_exactly_gives_no_prompt() -> None:
    """No template, one that is only near, an image, calls that a template would leave out."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}
    assert begun("some-model") is None
    assert begun("dolphin-qwen2.5-7b") is None
    assert begun("qwen2.5-7b", [image, BEGUN]) is None
    call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": "{}"}}
    called = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "call00001", "content": "7"}
    assert begun("llama-2-7b", [*called, result, BEGUN]) is None
    assert begun("qwen2.5-7b", [*called, result, BEGUN]) is not None
