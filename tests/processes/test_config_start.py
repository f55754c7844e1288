"""A wrong setting stops `litellm --config` at once, with a message that names key, value and range.

Every kind of wrong setting: `tests/proxy/test_service.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import environment, free_port, lm_studio, write_config

pytestmark = pytest.mark.proxy


def test_wrong_settings_stop_the_start(tmp_path: Path) -> None:
    """The executable does not start, and says what in which deployment is wrong, and what is allowed."""
    wrong = {"compaction": {"target_ratio": 7, "windw": 1}}
    config = write_config(tmp_path, [lm_studio("local", "model", "http://127.0.0.1:9", **wrong)], {"notices": "off"})
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config), "--port", str(free_port())]
    environ = environment(XDG_DATA_HOME=str(tmp_path))
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    said = r"(?s)model_info\.compaction of 'local'\.?.*target_ratio = 7: .*less than 1.*unknown key 'windw'"
    assert ended.returncode
    assert re.search(said, ended.stdout + ended.stderr)
