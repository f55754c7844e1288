"""A LiteLLM config as it is read without LiteLLM, and what `doctor` finds in it before it asks any server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli.config_file import read_config, shipped_config
from litellm_compaction.errors import ConfigError
from tests.cli.conftest import config, deployment


def test_includes_are_merged_as_litellm_does(write: Callable[..., Path]) -> None:
    """Lists grow; other values are replaced; a file that includes itself ends."""
    write(
        {"model_list": [deployment(name="two")], "general_settings": {"b": 1}, "include": ["config.yaml"]}, "more.yaml"
    )
    path = write(config(deployment(name="one"), include=["more.yaml"], general_settings={"a": 1}))
    file = read_config(path)
    assert [entry["model_name"] for entry in file.deployments] == ["one", "two"]
    assert file.section("general_settings") == {"b": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not valid YAML in line"),
        ("- a list", "not a LiteLLM config"),
        ("", "not a LiteLLM config"),
        ("include: [missing.yaml]", "missing.yaml cannot be read"),
    ],
)
def test_what_is_no_config_is_refused(write: Callable[[Any], Path], text: str, message: str) -> None:
    """The error names the file and the place."""
    with pytest.raises(ConfigError, match=message):
        read_config(write(text))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (deployment(params={"api_base": "os.environ/LM_STUDIO_API_BASE"}), ["qwen/qwen3-8b"]),
        (deployment("openai/local", params={"api_base": "os.environ/LM_STUDIO_API_BASE"}), ["local"]),
        (deployment(), ["qwen/qwen3-8b"]),
        (deployment(params={"api_base": "http://127.0.0.1:1/v1"}), []),
        (deployment("openai/gpt-5"), []),
    ],
)
def test_which_models_the_environment_places(
    write: Callable[[Any], Path], entry: dict[str, Any], expected: list[str]
) -> None:
    """LiteLLM reads LM_STUDIO_API_BASE where a deployment says so, or says nothing."""
    assert read_config(write(config(entry))).models_by_environment == expected
    assert read_config(shipped_config()).models_by_environment == ["*"]


def problems(path: Path, environ: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """(place, message) of each problem."""
    found = read_config(path).findings(environ or {})
    return [(finding.place, finding.message) for finding in found if finding.level == "problem"]


def test_a_file_that_shadows_the_package_is_found(write: Callable[..., Path]) -> None:
    """LiteLLM prefers a file beside the config."""
    write("", "litellm_compaction.py")
    [(_, text)] = problems(write(config()))
    assert "instead of the installed package" in text
