"""A wrong setting stops `litellm --config` at once, with a message that names key, value and range.

Every kind of wrong setting: `tests/proxy/test_service.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import lm_studio, proxy, write_config

pytestmark = pytest.mark.proxy


def test_wrong_settings_stop_the_start(tmp_path: Path) -> None:
    """The process ends, and says what in which deployment is wrong, and what is allowed."""
    wrong = {"compaction": {"target_ratio": 7, "windw": 1}}
    config = write_config(tmp_path, [lm_studio("local", "model", "http://127.0.0.1:9", **wrong)], {"notices": "off"})
    said = r"(?s)model_info\.compaction of 'local'\.?.*target_ratio = 7: .*less than 1.*unknown key 'windw'"
    with pytest.raises(RuntimeError, match=said), proxy(config):
        pass
