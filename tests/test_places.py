"""The folder of the user's files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from litellm_compaction.places import data_folder


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="other platforms have folders of their own")
def test_the_data_folder_follows_xdg(tmp_path: Path) -> None:
    """XDG_DATA_HOME if absolute, else ~/.local/share."""
    assert data_folder({"XDG_DATA_HOME": str(tmp_path), "HOME": "/h"}) == tmp_path / "litellm_compaction"
    expected = Path("/h/.local/share/litellm_compaction")
    assert data_folder({"XDG_DATA_HOME": "relative", "HOME": "/h"}) == expected
    assert data_folder({"HOME": "/h"}) == expected
