"""Token lengths: any string, offline, word by word as by the whole; a damaged pack is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litellm_compaction.errors import CompactionError
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.registry import token_length, vocabulary

NAMES = ("cl100k_base", "o200k_base", "gpt-oss", "llama3", "llama2", "mistral-v3", "tekken", "qwen2", "deepseek-v3")
ANY_TEXT = st.text(st.characters(codec=None))


@settings(max_examples=settings().max_examples * 5, deadline=None)
@given(text=ANY_TEXT, name=st.sampled_from(NAMES))
def test_any_string_has_a_length(text: str, name: str) -> None:
    """No string raises, none is negative, none costs more than its bytes."""
    assert 0 <= token_length(name, text) <= max(1, 4 * len(text))


@pytest.mark.parametrize("folder", [None, "empty"])
def test_loading_needs_no_network_and_leaves_the_environment(folder: str | None, tmp_path: Path) -> None:
    """The files come from LiteLLM's folder, without importing LiteLLM, and TIKTOKEN_CACHE_DIR stays as it was."""
    code = (
        "import os, socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "before = os.environ.get('TIKTOKEN_CACHE_DIR')\n"
        "from litellm_compaction.tokenizers.registry import token_length\n"
        "assert token_length('o200k_base', 'hello world') == 2\n"
        "assert token_length('cl100k_base', 'hello world') == 2\n"
        "assert os.environ.get('TIKTOKEN_CACHE_DIR') == before\n"
        "assert 'litellm' not in sys.modules\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TIKTOKEN_CACHE_DIR"}
    if folder is not None:
        environment["TIKTOKEN_CACHE_DIR"] = str(tmp_path) if folder else ""
    root = Path(registry.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


PACKS = Path(registry.__file__).parent / "packs"


def test_a_damaged_pack_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose hash is another is not used, nor tried again."""
    (tmp_path / "llama2.json.xz").write_bytes(b"no")
    (tmp_path / "SHA256SUMS").write_text((PACKS / "SHA256SUMS").read_text())
    for name, value in (("_FOLDER", tmp_path), ("_loaded", {})):
        monkeypatch.setattr(registry, name, value)
    for _ in range(2):
        with pytest.raises(CompactionError, match="reinstall"):
            vocabulary("llama2")
    assert "damaged" in registry.why_broken("llama2")
