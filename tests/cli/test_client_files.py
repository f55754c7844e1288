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

from litellm_compaction.cli.client_files import change_of, rendered
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
CONTINUE = """\
name: Local Assistant
version: 1.0.0
schema: v1
models:
  # at work
  - name: Größe
    provider: anthropic
    model: claude-sonnet   # newest
    prompt: |
      # not a comment
    roles: [chat, edit]

# what it may read
context:
  - provider: code
"""
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


def test_yaml_gets_one_more_item_and_keeps_every_line(tmp_path: Path) -> None:
    """The item stands after the last one, indented alike, before the comment of the next key."""
    after = changed(put(tmp_path / "config.yaml", CONTINUE), CONTINUE_LINES)
    assert removed(CONTINUE, after) == []
    assert yaml.safe_load(after) == {
        **yaml.safe_load(CONTINUE),
        "models": [*yaml.safe_load(CONTINUE)["models"], MODEL],
    }
    assert after.index("roles: [chat") < after.index("  - name: local (LiteLLM)") < after.index("\n\n# what it may")


@pytest.mark.parametrize(
    "text",
    [
        "models:\n- name: a\n  model: b\nrules: []\n",
        "models:\n    -   name: a\n        model: b",
        "rules: []\nmodels:\n  - name: a\n\n\n# the end\n",
        "rules: []\n",
        "# nothing yet\n",
    ],
)
def test_yaml_in_other_forms(text: str, tmp_path: Path) -> None:
    """Lists at the margin, wide dashes, no newline at the end, no list, and no value at all."""
    after = changed(put(tmp_path / "config.yaml", text), CONTINUE_LINES)
    assert removed(text, after) == []
    assert yaml.safe_load(after)["models"][-1] == MODEL


def test_a_list_alone_gets_one_more_item(tmp_path: Path) -> None:
    """As the file of `llm` is."""
    text = "# mine\n- model_id: gpt\n  model_name: gpt-4\n"
    after = changed(put(tmp_path / "extra.yaml", text), [{"model_id": "local", "model_name": "local"}])
    assert after == text + "- model_id: local\n  model_name: local\n"


@pytest.mark.parametrize("indent", [2, 4, "\t"])
def test_json_keeps_order_indentation_and_other_providers(indent: int | str, tmp_path: Path) -> None:
    """Text stays as it is, in any script."""
    before = json.dumps(OPENCODE, indent=indent, ensure_ascii=False) + "\n"
    after = changed(put(tmp_path / "opencode.json", before), OPENCODE_LINES)
    provider = {**OPENCODE["provider"], **OPENCODE_LINES["provider"]}  # type: ignore[dict-item]
    wanted = {**OPENCODE, "provider": provider, "model": "litellm/local"}
    assert after == json.dumps(wanted, indent=indent, ensure_ascii=False) + "\n"


def test_a_value_that_differs_is_replaced_and_shown(tmp_path: Path) -> None:
    """A window that was loaded anew."""
    path = put(tmp_path / "opencode.json", json.dumps(OPENCODE_LINES, indent=2))
    wanted = {"provider": {"litellm": {"models": {"local": {"limit": {"context": 4096}}}}}}
    change = change_of(path, wanted, {})
    lines = change.difference().splitlines()
    assert [line.strip("+- ") for line in lines if line[0] in "+-"][2:] == ['"context": 8192', '"context": 4096']
    assert change.before == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("config.toml", CODEX, CODEX_LINES),
        ("config.yaml", CONTINUE, CONTINUE_LINES),
        ("opencode.json", json.dumps(OPENCODE, indent=2, ensure_ascii=False) + "\n", OPENCODE_LINES),
    ],
)
def test_windows_line_ends_and_a_mark_of_the_order_of_bytes_stay(
    name: str, text: str, wanted: Any, tmp_path: Path
) -> None:
    """Every line ends as before; the mark is there once."""
    plain = changed(put(tmp_path / f"plain-{name}", text), wanted)
    path = put(tmp_path / name, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    change_of(path, wanted, {}).write()
    assert path.read_bytes() == b"\xef\xbb\xbf" + plain.replace("\n", "\r\n").encode()
    assert change_of(path, wanted, {}).difference() == ""


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("opencode.json", '{"apiKey": "sk-secret", // mine\n}', OPENCODE_LINES),
        ("opencode.json", "[1]", OPENCODE_LINES),
        ("opencode.json", "[" * 100_000, OPENCODE_LINES),
        ("config.toml", "model = ", CODEX_LINES),
        ("config.toml", "a = 1\na = 'sk-secret'\n", CODEX_LINES),
        ("config.yaml", "models: [", CONTINUE_LINES),
        ("config.yaml", "a: 1\n---\nb: 2\n", CONTINUE_LINES),
        ("config.yaml", "- a\n", CONTINUE_LINES),
        ("config.yaml", "models: []\n", CONTINUE_LINES),
        ("config.yaml", "models:\n", CONTINUE_LINES),
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


def test_a_missing_file_is_made_with_its_folder(tmp_path: Path) -> None:
    """It begins with what a new file needs, and only its owner can read it."""
    path = tmp_path / "a" / "b" / "config.yaml"
    change = change_of(path, CONTINUE_LINES, {"schema": "v1"})
    assert not path.parent.exists()
    assert change.write() is None
    assert path.read_text("utf-8") == rendered({"schema": "v1", **CONTINUE_LINES}, ".yaml")
    assert list(path.parent.iterdir()) == [path]
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_file_is_filled(tmp_path: Path) -> None:
    """It is as good as none."""
    assert json.loads(changed(put(tmp_path / "opencode.json", "\n"), OPENCODE_LINES)) == OPENCODE_LINES


def test_the_old_file_stays_beside_the_new_one(tmp_path: Path) -> None:
    """An older copy is not overwritten; nothing else is left."""
    path = put(tmp_path / "config.toml", CODEX)
    put(tmp_path / "config.toml.bak", "older")
    path.chmod(0o640)
    backup = change_of(path, CODEX_LINES, {}).write()
    assert backup == tmp_path / "config.toml.bak1"
    assert backup.read_text("utf-8") == CODEX
    assert (tmp_path / "config.toml.bak").read_text("utf-8") == "older"
    assert len(list(tmp_path.iterdir())) == 3
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """Its target is changed, as in a folder of dotfiles; the copy stands beside that."""
    folder = tmp_path / "dotfiles"
    folder.mkdir()
    target = put(folder / "codex.toml", CODEX)
    path = tmp_path / "config.toml"
    path.symlink_to(target)
    assert "model_context_window = 32768" in changed(path, CODEX_LINES)
    assert path.is_symlink()
    assert "model_context_window = 32768" in target.read_text("utf-8")
    assert (folder / "codex.toml.bak").read_text("utf-8") == CODEX
    path.unlink()
    path.symlink_to(tmp_path / "nowhere" / "config.toml")
    changed(path, CODEX_LINES)
    assert path.is_symlink()
    assert (tmp_path / "nowhere" / "config.toml").is_file()


def test_a_read_only_file_is_refused(tmp_path: Path) -> None:
    """Its folder may be written, so replacing it would work."""
    path = put(tmp_path / "config.toml", CODEX)
    path.chmod(0o444)
    try:
        with pytest.raises(ConfigError, match="is read-only"):
            change_of(path, CODEX_LINES, {})
    finally:
        path.chmod(0o644)
    assert path.read_text("utf-8") == CODEX


def test_a_file_that_was_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    """The question may have stood open for a while."""
    path = put(tmp_path / "config.toml", CODEX)
    change = change_of(path, CODEX_LINES, {})
    put(path, "model = 1\n")
    with pytest.raises(ConfigError, match="was changed meanwhile"):
        change.write()
    assert path.read_text("utf-8") == "model = 1\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file stands in its place."""
    put(tmp_path / "codex", "")
    with pytest.raises(ConfigError, match="cannot be"):
        change_of(tmp_path / "codex" / "config.toml", CODEX_LINES, {}).write()
