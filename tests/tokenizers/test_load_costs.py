"""What loading has cost: measured on this process, and nothing where the system does not say."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from litellm_compaction.cli.examined import cost_words
from litellm_compaction.tokenizers import files, registry
from litellm_compaction.tokenizers.files import load_tokenizer_file
from litellm_compaction.tokenizers.gguf import GgufHeader, read_gguf
from litellm_compaction.tokenizers.registry import LoadCost, Loading, load_cost
from tests.tokenizers.gguf_writer import Array, bpe_fields, gguf


@pytest.fixture(autouse=True)
def _no_costs_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_costs", {})


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="only Linux says it in a file")
def test_memory_is_what_the_process_has_grown_by(caplog: pytest.LogCaptureFixture) -> None:
    """Held while it is noted, 64 MiB are seen; the log says so too."""
    loading = Loading()
    held = bytearray(b"x") * (64 << 20)
    with caplog.at_level(logging.INFO, logger="litellm_compaction"):
        loading.note("made")
    assert len(held) == 64 << 20
    cost = load_cost("made")
    assert cost is not None
    assert cost.memory_bytes is not None
    assert 60 << 20 <= cost.memory_bytes <= 96 << 20
    assert f"vocabulary_loaded name=made load_ms={cost.load_ms:.0f}" in caplog.text
    assert load_cost("other") is None


def test_memory_may_be_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no such file, or it holds something else, the time is known all the same."""
    odd = tmp_path / "statm"
    odd.write_text("12 twelve\n")
    for path in (tmp_path / "missing", odd):
        monkeypatch.setattr(registry, "_STATM", path)
        Loading().note("made")
        cost = load_cost("made")
        assert cost is not None
        assert cost.memory_bytes is None
        assert cost.load_ms >= 0


def test_the_cost_of_a_model_file_is_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading its header takes time and memory too."""
    now_s = [0.0]

    def slow(path: Path) -> GgufHeader:
        now_s[0] += 5.0
        return read_gguf(path)

    monkeypatch.setattr(registry, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(files, "read_gguf", slow)
    path = tmp_path / "model.gguf"
    tokens = Array("str", ["a", "c", "ac", "<|end|>", "Ġa"])
    merges = Array("str", ["a c", "Ġ a"])
    path.write_bytes(gguf(bpe_fields(tokenizer__ggml__tokens=tokens, tokenizer__ggml__merges=merges)))
    cost = load_cost(load_tokenizer_file(path).vocabulary)
    assert cost is not None
    assert cost.load_ms == 5000.0


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (None, ""),
        (LoadCost(1230.0, None), " (loaded in 1.2 s)"),
        (LoadCost(180.0, 54 << 20), " (loaded in 0.2 s, 54 MB)"),
    ],
)
def test_costs_are_said_in_words(cost: LoadCost | None, words: str) -> None:
    """What is not known is left out."""
    assert cost_words(cost) == words
