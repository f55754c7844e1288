"""The error tree, and the overflow messages of every server and version that we know."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.errors import Overflow, overflow_from_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECORDED = tomllib.loads(Path(__file__).with_name("recorded_overflows.toml").read_text(encoding="utf-8"))["recorded"]


@pytest.mark.parametrize("recorded", [pytest.param(each, id=each["server"]) for each in RECORDED])
def test_recorded_bodies_are_recognized(recorded: dict[str, Any]) -> None:
    """With the numbers that they name, as they came, in upper case, and quoted inside of other text."""
    body = recorded["body"]
    revealed = Overflow(recorded.get("prompt"), recorded.get("window"))
    assert overflow_from_text(body) == revealed
    assert overflow_from_text(body.upper()) == revealed
    assert overflow_from_text(f"litellm.BadRequestError: OpenAIException -\n{body}\nTraceback …") == revealed
    assert overflow_from_text(json.dumps({"error": {"message": body}, "message": body})) == revealed


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
