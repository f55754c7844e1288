"""Vocabularies: packs are whole, special tokens are found, pieces cost what the whole costs, data from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from litellm_compaction.errors import CompactionError
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.registry import has_pack, read_pack

PACKS = Path(registry.__file__).parent / "packs"


def test_a_damaged_pack_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose hash is another is not used."""
    (tmp_path / "llama2.json.xz").write_bytes(b"no")
    (tmp_path / "SHA256SUMS").write_text((PACKS / "SHA256SUMS").read_text())
    monkeypatch.setattr(registry, "_FOLDER", tmp_path)
    assert has_pack("llama2")
    with pytest.raises(CompactionError, match="reinstall"):
        read_pack("llama2")
