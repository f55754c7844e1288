"""Clients' own files, as people have them: comments, other providers, odd encodings, links, and files not to touch."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import yaml

from litellm_compaction.cli.client_files import change_of
from litellm_compaction.errors import ConfigError

CODEX = """\
# My settings — größer, 东京
model = "gpt-5.5"          # the default
approval_policy = "on-request"
model_provider = 'litellm'

[model_providers.azure]
name = "Azure"
base_url = "https://example.openai.azure.com/openai"
env_key = "AZURE_OPENAI_API_KEY"   # not ours

[profiles.deep]
model = "o9"

[mcp_servers.docs]
command = "npx"
args = ["-y", "docs-mcp"]
"""
CODEX_LINES = {
    "model": "lm_studio/qwen/qwen3-8b",
    "model_provider": "litellm",
    "model_context_window": 32_768,
    "model_providers": {"litellm": {"name": "LiteLLM", "base_url": "http://127.0.0.1:4000/v1", "env_key": "KEY"}},
}
MODEL = {"name": "local (LiteLLM)", "model": "local", "capabilities": ["tool_use"], "options": {"contextLength": 8192}}
CONTINUE_LINES = {"models": [MODEL]}
OPENCODE = {
    "$schema": "https://opencode.ai/config.json",
    "theme": "größer",
    "provider": {"ollama": {"npm": "@ai-sdk/openai-compatible", "models": {"llama": {"name": "Llama"}}}},
}
OPENCODE_LINES = {
    "model": "litellm/local",
    "provider": {"litellm": {"models": {"local": {"limit": {"context": 8192}}}}},
}


def put(path: Path, text: str | bytes) -> Path:
    """A file with these bytes."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def changed(path: Path, wanted: Any) -> str:
    """The text of a file after the change was written; once more changes nothing."""
    change_of(path, wanted, {}).write()
    again = change_of(path, wanted, {})
    assert again.difference() == ""
    assert again.after == again.before == path.read_bytes()
    return path.read_bytes().decode()


def removed(before: str, after: str) -> list[str]:
    """The lines of the old text that the new one has not."""
    return [line for line in before.splitlines() if line not in after.splitlines()]


def test_toml_keeps_comments_order_and_other_providers(tmp_path: Path) -> None:
    """Only the line of the model is another, and it keeps its comment."""
    after = changed(put(tmp_path / "config.toml", CODEX), CODEX_LINES)
    assert removed(CODEX, after) == ['model = "gpt-5.5"          # the default']
    assert "# the default" in after
    known = tomlkit.parse(after).unwrap()
    assert {name: known[name] for name in ("model", "model_provider", "model_context_window")} == {
        name: CODEX_LINES[name] for name in ("model", "model_provider", "model_context_window")
    }
    assert set(known["model_providers"]) == {"azure", "litellm"}
    assert known["profiles"] == {"deep": {"model": "o9"}}
    assert known["mcp_servers"]["docs"]["args"] == ["-y", "docs-mcp"]


@pytest.mark.parametrize(
    "text",
    [
        "models:\n- name: a\n  model: b\nrules: []\n",
        "models:\n    -   name: a\n        model: b",
        "rules: []\nmodels:\n  - name: a\n\n\n# the end\n",
        "rules: []\n",
    ],
)
def test_yaml_in_other_forms(text: str, tmp_path: Path) -> None:
    """Lists at the margin, wide dashes, no newline at the end, no list, and no value at all."""
    after = changed(put(tmp_path / "config.yaml", text), CONTINUE_LINES)
    assert removed(text, after) == []
    assert yaml.safe_load(after)["models"][-1] == MODEL


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("opencode.json", '{"apiKey": "sk-secret", // mine\n}', OPENCODE_LINES),
        ("opencode.json", "[" * 100_000, OPENCODE_LINES),
        ("config.toml", "model = ", CODEX_LINES),
        ("config.toml", "a = 1\na = 'sk-secret'\n", CODEX_LINES),
        ("config.yaml", "models: [", CONTINUE_LINES),
        ("config.yaml", "a: 1\n---\nb: 2\n", CONTINUE_LINES),
        ("config.yaml", "models: [{name: a}]\n", CONTINUE_LINES),
        ("config.yaml", "models:\n- name: local (LiteLLM)\n  model: sk-secret\n", CONTINUE_LINES),
        ("config.yaml", b"name: \xff\xfe\n", CONTINUE_LINES),
    ],
)
def test_a_file_that_cannot_be_read_or_edited_is_not_touched(
    name: str, text: str | bytes, wanted: Any, tmp_path: Path
) -> None:
    """The error names the file, and never quotes it."""
    path = put(tmp_path / name, text)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=name) as error:
        change_of(path, wanted, {})
    assert "secret" not in str(error.value)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_json_keeps_order_indentation_line_ends_and_mark(end: str, mark: bytes, tmp_path: Path) -> None:
    """Text stays as it is, in any script; so do other providers, CRLF and the mark of the order of bytes."""
    before = (json.dumps(OPENCODE, indent=4, ensure_ascii=False) + "\n").replace("\n", end)
    path = put(tmp_path / "opencode.json", mark + before.encode())
    change_of(path, OPENCODE_LINES, {}).write()
    provider = {**OPENCODE["provider"], **OPENCODE_LINES["provider"]}  # type: ignore[dict-item]
    wanted = {**OPENCODE, "provider": provider, "model": "litellm/local"}
    after = (json.dumps(wanted, indent=4, ensure_ascii=False) + "\n").replace("\n", end)
    assert path.read_bytes() == mark + after.encode()
    assert change_of(path, OPENCODE_LINES, {}).difference() == ""


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_the_old_file_stays_beside_the_new_one(tmp_path: Path) -> None:
    """An older copy is not overwritten, nothing else is left, and a link stays one: its target is changed."""
    target, path = put(tmp_path / "dotfile", CODEX), tmp_path / "config.toml"
    path.symlink_to(target)
    put(tmp_path / "dotfile.bak", "older")
    path.chmod(0o640)
    backup = change_of(path, CODEX_LINES, {}).write()
    assert backup == tmp_path / "dotfile.bak1"
    assert backup.read_text("utf-8") == CODEX
    assert (tmp_path / "dotfile.bak").read_text("utf-8") == "older"
    assert len(list(tmp_path.iterdir())) == 4
    assert path.is_symlink()
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_file_that_was_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    """The question may have stood open for a while."""
    path = put(tmp_path / "config.toml", CODEX)
    change = change_of(path, CODEX_LINES, {})
    put(path, "model = 1\n")
    with pytest.raises(ConfigError, match="was changed meanwhile"):
        change.write()
    assert path.read_text("utf-8") == "model = 1\n"
    assert list(tmp_path.iterdir()) == [path]
