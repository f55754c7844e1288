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
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokenizers.model_files import ModelFiles
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.lmstudio import WantedModel
from litellm_compaction.windows.windows import Target
from tests.tokenizers.vocabulary_files import write_pack_gguf

CASES: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "tokens" / "golden" / "prompts.json").read_text("utf-8")
)["cases"]


def request(case: str) -> Request:
    found = CASES[case]
    return Request(messages=tuple(map(parse_message, found["messages"])), tools=tuple(found.get("tools", ())))


@pytest.mark.parametrize(
    ("model", "own", "everybodys", "kind"),
    [
        ("tiny", "", "auto", "lm_studio_file"),
        ("tiny", "", "{other}", "operator"),
        ("tiny", "auto", "{other}", "lm_studio_file"),
        ("tiny", "heuristic", "{other}", "heuristic"),
        ("tiny", "llama-3.1-8b", "auto", "operator"),
        ("tiny", "/nonexistent/x.gguf", "auto", "lm_studio_file"),
        ("llama-3.1-8b", "", "auto", "pack"),
        ("nobody-knows", "", "auto", "stand_in"),
    ],
)
async def test_sources_have_an_order(tmp_path: Path, model: str, own: str, everybodys: str, kind: str) -> None:
    """The deployment's word, the global one, LM Studio's file, a pack, a stand-in; a broken file is passed over."""
    write_pack_gguf(tmp_path / "p" / "tiny-GGUF" / "tiny-Q4_K_M.gguf", "qwen2", "qwen3")
    other = str(write_pack_gguf(tmp_path / "other.gguf", "llama2", "llama2"))
    files = ModelFiles(tmp_path, home=tmp_path / "home")
    sources = Sources(files=files, tokenizer=everybodys.format(other=other))
    wanted = WantedModel(key=model, publisher="p", file_format="gguf")
    base = "http://127.0.0.1:1234/v1"
    asked = Target(key=model, model=model, api_base=base, api_key=None, context_length=None, tokenizer=own)
    found = await sources.source(asked, "", wanted, patient=True)
    assert (found.kind, len(found.failures)) == (kind, own.startswith("/nonexistent"))
    if kind == "lm_studio_file":
        asked_for, known = request("agent, 6 calls"), family_of("qwen3", "qwen3-8b")
        counted = await TokenCounter().count("t", found.family, asked_for)
        assert (counted.tokens, counted.exact) == ((await TokenCounter().count("t", known, asked_for)).tokens, True)


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
    assert not made.own.exact
    assert made.likely >= 1.25 * made.tokens
    assert counter.text_counter("t", family)("some text") > 0
    [record] = caplog.records
    assert "reinstall" in record.message
