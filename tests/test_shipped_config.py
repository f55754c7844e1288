"""The configuration that is shipped shows the real settings, and has their defaults."""

from __future__ import annotations

import re
from pathlib import Path

from litellm_compaction.cli.config_file import read_config
from litellm_compaction.config import Settings, settings_from

ROOT = Path(__file__).parents[1]


def test_the_shipped_config_shows_real_settings_with_their_defaults() -> None:
    """Each commented key exists, and its value is the default."""
    text = (ROOT / "config.yaml").read_text(encoding="utf-8")
    shown = re.findall(r"^    # (\w+): (\S+)", text.partition("    # for example:\n")[2], re.MULTILINE)
    assert len(shown) >= 5
    for name, value in shown:
        default = Settings.model_fields[name].default
        assert value in (str(default), f"{default:.2f}" if isinstance(default, float) else str(default))


def test_the_shipped_config_has_the_defaults() -> None:
    """Nothing else is set, so that the defaults of the code count: on one's own machine originals are kept."""
    shipped = settings_from(read_config(ROOT / "config.yaml").settings)
    assert shipped == settings_from({"keep_originals": "compacted"})
    assert shipped != settings_from(None)
