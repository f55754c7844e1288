"""By what a deployment is counted: the operator's word, else the family; what cannot be followed is said at start."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from litellm_compaction.errors import CompactionError
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokenizers.registry import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target
from tests.builders import agent_run, request_of, tools
from tests.tokenizers.test_files import small_tokenizer

ASKED = request_of(*agent_run(6), tools=tools(2))


@pytest.mark.parametrize(
    ("model", "own", "everybodys", "kind", "vocabulary", "error"),
    [
        ("tiny", "", "auto", "stand_in", "cl100k_base", 0.35),
        ("tiny", "", "{file}", "operator", "file:{file}", 0.15),
        ("tiny", "auto", "{file}", "stand_in", "cl100k_base", 0.35),
        ("tiny", "heuristic", "{file}", "heuristic", "heuristic", 0.35),
        ("tiny", "llama-3.1-8b", "auto", "operator", "llama3", 0.02),
        ("llama-3.1-8b", "", "auto", "pack", "llama3", 0.02),
        ("llama-3.1-8b", "{file}", "auto", "operator", "file:{file}", 0.05),
    ],
)
async def test_the_operators_word_goes_before_the_family(
    tmp_path: Path, model: str, own: str, everybodys: str, kind: str, vocabulary: str, error: float
) -> None:
    """The deployment's word, the global one, a pack, a stand-in; a file counts with the family's template."""
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    file = str(tmp_path / "tokenizer.json")
    sources = Sources(everybodys.format(file=file))
    own = own.format(file=file)
    asked = Target(key=model, model=model, api_base=None, api_key=None, context_length=None, tokenizer=own)
    found = sources.source(asked, "")
    made = (found.kind, found.family.vocabulary, found.family.error_ratio)
    assert made == (kind, vocabulary.format(file=file), error)
    assert found.path == ("" if "file" not in vocabulary else file)
    if found.path:
        assert found.family.template == family_of("", model).template
        assert (found.family.owns_vocabulary, found.family.single_digits) == (True, False)
        counted = await TokenCounter().count("t", found.family, ASKED)
        plain = await TokenCounter().count("t", family_of("", model), ASKED)
        # Nearly each letter is a token of it.
        assert counted.tokens > 1.25 * plain.tokens
        assert not counted.own.exact


async def test_a_damaged_pack_refuses_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stand-in counts instead, errs high, and does not pass for exact; one warning says why, as the report does."""
    (tmp_path / "qwen2.json.xz").write_bytes(b"no")
    for name, value in (("_FOLDER", tmp_path), ("_loaded", {}), ("_usable", {})):
        monkeypatch.setattr(registry, name, value)
    caplog.set_level(logging.WARNING, logger="litellm_compaction")
    family = family_of("qwen3", "qwen3-8b")
    counter = TokenCounter()
    made = await counter.count("t", family, ASKED)
    again = await counter.count("t", family, ASKED)
    assert made == again
    assert not made.own.exact
    assert made.likely >= 1.25 * made.tokens
    assert counter.text_counter("t", family)("some text") > 0
    [record] = caplog.records
    assert "qwen2 cannot be read or used (LZMAError" in record.message
    assert registry.why_broken("qwen2") in record.message
    loaded_anew = registry.usable(replace(family, load=1))
    assert (registry.why_broken("heuristic"), registry.is_loaded("qwen2"), loaded_anew.load) == ("", False, 1)
    with pytest.raises(CompactionError, match="LZMAError"):
        registry.vocabulary("qwen2")
