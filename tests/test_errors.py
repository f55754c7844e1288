"""The error tree, and the overflow messages of every server and version that we know."""

from __future__ import annotations

import json

import pytest

from litellm_compaction.errors import (
    Overflow,
    overflow_from_text,
)

# facts/lm-studio.md, sections 0 and 2, by version and engine.
WORDINGS = [
    (
        (
            "Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded with "
            "context length of only 4096 tokens, which is not enough. Load it with a larger context length."
        ),
        Overflow(5000, 4096),
    ),
    (
        (
            "The number of tokens to keep from the initial prompt is greater than the context length "
            "(n_keep: 13055>= n_ctx: 4096). Try to load the model with a larger context length."
        ),
        Overflow(13055, 4096),
    ),
    ("Cannot truncate prompt with n_keep (15028) >= n_ctx (7424)", Overflow(15028, 7424)),
    (
        (
            "Reached context length of 4096 tokens with model (arch: gptoss) that does not currently support "
            "mid-generation context overflow."
        ),
        Overflow(None, 4096),
    ),
    ("Context size has been exceeded.", Overflow(None, None)),
    (
        (
            "Input does not fit in context length. The input has 31430 tokens, but the context length only supports "
            "30000 tokens."
        ),
        Overflow(31430, 30000),
    ),
    ("Input does not fit in context length.", Overflow(None, None)),
    (
        "request (9000 tokens) exceeds the available context size (4096 tokens), try increasing it",
        Overflow(9000, 4096),
    ),
    ("the request exceeds the available context size. try increasing the context size", Overflow(None, None)),
    ('{"code":400,"type":"exceed_context_size_error"}', Overflow(None, None)),
    ('{"type":"exceed_context_size_error","n_prompt_tokens":351,"n_ctx":256}', Overflow(351, 256)),
    (
        "This model's maximum context length is 4096 tokens. However, your messages resulted in 5000 tokens.",
        Overflow(5000, 4096),
    ),
    (
        (
            "This model's maximum context length is 4096 tokens. However, you requested 6000 tokens (5000 in the "
            "messages, 1000 in the completion)."
        ),
        Overflow(None, 4096),
    ),
]


@pytest.mark.parametrize(("wording", "revealed"), WORDINGS)
def test_known_wordings_are_recognized(wording: str, revealed: Overflow) -> None:
    """With the numbers that they name, alone, in upper case, and inside of a server's JSON and of other text."""
    assert overflow_from_text(wording) == revealed
    assert overflow_from_text(wording.upper()) == revealed
    assert overflow_from_text(json.dumps({"error": {"message": wording}, "message": wording})) == revealed
    assert overflow_from_text(f"litellm.BadRequestError: OpenAIException -\n{wording}\nTraceback …") == revealed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Model unloaded.",
        "generation failed",
        "The model has crashed without additional information. (Exit code: 18446744072635810000)",
        'Error rendering prompt with jinja template: "Only user and assistant roles are supported!"',
        "Unexpected endpoint or method. (GET /api/tags)",
        "Rate limit reached: 30000 tokens per minute",
        "max_tokens must be at least 1",
        "The context length of a model can be changed in its settings; 4096 tokens are the default.",
        "n_ctx = 4096, n_batch = 512, n_predict = 512, n_keep = 42",
        "Invalid context overflow policy: rollingWindow",
    ],
)
def test_other_texts_are_no_overflow(text: str) -> None:
    """A mistaken overflow would compact conversations for nothing."""
    assert overflow_from_text(text) is None
