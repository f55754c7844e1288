"""By what a deployment is counted: the order of sources, what a file gives, and what happens where one fails."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.errors import CompactionError
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokenizers.model_files import ModelFiles
from litellm_compaction.tokenizers.sources import (
    Sources,
)
from litellm_compaction.tokens.counter import Count, TokenCounter
from litellm_compaction.windows.lmstudio import WantedModel
from litellm_compaction.windows.windows import Target
from tests.tokenizers.vocabulary_files import write_pack_gguf

CASES: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "tokens" / "golden" / "prompts.json").read_text("utf-8")
)["cases"]
LOCAL = "http://127.0.0.1:1234/v1"
WANTED = WantedModel(key="tiny", publisher="p", file_format="gguf")
# A vocabulary in this package, a template in it, and how the model is called whose they are.
FAMILIES = [
    ("qwen2", "qwen3", "qwen3", "qwen3-8b"),
    ("llama2", "llama2", "llama", "llama-2-7b"),
    ("tekken", "mistral-nemo", "llama", "mistral-nemo-instruct-2407"),
]


def target(model: str = "tiny", *, api_base: str | None = LOCAL, tokenizer: str = "") -> Target:
    return Target(key=model, model=model, api_base=api_base, api_key=None, context_length=None, tokenizer=tokenizer)


def request(case: str) -> Request:
    found = CASES[case]
    return Request(messages=tuple(map(parse_message, found["messages"])), tools=tuple(found.get("tools", ())))


async def count(family: Family, asked: Request) -> Count:
    return await TokenCounter().count("t", family, asked)


def lm_studio(folder: Path, **options: Any) -> Sources:
    return Sources(files=ModelFiles(folder, home=folder / "home"), **options)


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """LM Studio's models folder with one model, which carries Qwen's vocabulary and template."""
    write_pack_gguf(tmp_path / "p" / "tiny-GGUF" / "tiny-Q4_K_M.gguf", "qwen2", "qwen3")
    return tmp_path


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pack can be read, and nothing has been loaded yet."""

    def fail(name: str) -> None:
        raise CompactionError(f"The vocabulary pack {name} is damaged: reinstall litellm-compaction.")

    monkeypatch.setattr(registry, "read_pack", fail)
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(registry, "_broken", {})


async def test_a_damaged_pack_refuses_no_request(damaged: None, caplog: pytest.LogCaptureFixture) -> None:
    """A stand-in counts instead, errs high, and does not pass for exact; one warning says what to do."""
    caplog.set_level(logging.WARNING, logger="litellm_compaction")
    family = family_of("qwen3", "qwen3-8b")
    counter = TokenCounter()
    made = await counter.count("t", family, request("agent, 6 calls"))
    again = await counter.count("t", family, request("agent, 6 calls"))
    assert made == again
    assert not made.exact
    assert made.error_ratio >= 0.25
    assert await counter.count_text("t", family, "some text") == counter.text_counter("t", family)("some text") > 0
    [record] = caplog.records
    assert "reinstall" in record.message
