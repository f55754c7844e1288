"""The operator's own prompts: what is taken, and errors that say what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from litellm_compaction.config import Settings, settings_from
from litellm_compaction.errors import ConfigError


def test_a_prompt_is_read_once(tmp_path: Path) -> None:
    """At start; what the file says later counts after a restart."""
    file = tmp_path / "prompt.txt"
    file.write_text('\ufeffIn {words} words. {"drop": []}\n', encoding="utf-8")
    settings = settings_from({"prompt_file": {"summary": str(file)}})
    file.unlink()
    assert settings.own_prompt("summary") == 'In {words} words. {"drop": []}'
    assert settings.own_prompt("handoff") == ""
    assert Settings().own_prompt("summary") == ""


@pytest.mark.parametrize(
    ("data", "finding"),
    [
        (b"no bound", r"without \{words\}; required: \{words\}; allowed besides: \{round\}"),
        (b"{words} {wrods}", r"unknown placeholder \{wrods\}; required"),
        (b"", r"without \{words\}"),
        (b"\xff\xfe{words}", "allowed: text in UTF-8"),
        (b"{words}" * 10_000, "longer than allowed: 16384 bytes"),
        (None, "No such file or directory; allowed: a readable text file"),
    ],
)
def test_what_is_wrong_with_a_prompt_stops_the_start(data: bytes | None, finding: str, tmp_path: Path) -> None:
    """Key, value, and what is allowed; never the prompt itself."""
    file = tmp_path / "bad.txt"
    if data is not None:
        file.write_bytes(data)
    section = {"prompt_file": {"handoff": str(file)}}
    with pytest.raises(ConfigError, match=finding) as raised:
        settings_from(section)
    assert str(raised.value).startswith(
        f"callback_settings.litellm_compaction.prompt_file = {section['prompt_file']!r}: handoff: {file}"
    )
    assert "no bound" not in str(raised.value)
