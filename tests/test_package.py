"""The names that the package gives, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import litellm_compaction


@pytest.mark.slow
def test_importing_the_package_is_cheap() -> None:
    """Names are loaded when they are used, and LiteLLM never."""
    code = (
        "import sys, litellm_compaction; assert 'litellm_compaction.library' not in sys.modules; "
        "assert not {'pydantic', 'httpx'} & set(sys.modules); "
        "from litellm_compaction import compact, safe_compact; sys.exit('litellm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    """What `__all__` and `dir` say can be had; anything else is an AttributeError."""
    for name in set(litellm_compaction.__all__) - {"handler"}:
        assert getattr(litellm_compaction, name) is not None
        assert name in dir(litellm_compaction)
    with pytest.raises(AttributeError, match="no attribute 'compress'"):
        _ = litellm_compaction.compress  # type: ignore[attr-defined]
