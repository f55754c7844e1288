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
        (deployment(params={"api_base": "os.environ/LM_STUDIO_API_BASE"}), True),
        (deployment(), True),
        (deployment(params={"api_base": "http://127.0.0.1:1/v1"}), False),
        (deployment("openai/gpt-5"), False),
    ],
)
def test_whether_the_environment_decides(write: Callable[[Any], Path], entry: dict[str, Any], expected: bool) -> None:
    """LiteLLM reads LM_STUDIO_API_BASE where a deployment says so, or says nothing."""
    assert read_config(write(config(entry))).follows_environment is expected
    assert read_config(shipped_config()).follows_environment


def test_keys_are_not_in_the_repr(write: Callable[[Any], Path]) -> None:
    """A log of the value does not show what the file holds."""
    assert "sk-secret" not in repr(read_config(write(config(general_settings={"master_key": "sk-secret"}))))


def problems(path: Path, environ: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """(place, message) of each problem."""
    found = read_config(path).findings(environ or {})
    return [(finding.place, finding.message) for finding in found if finding.level == "problem"]


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (None, "not listed"),
        ([], "not listed"),
        (["prometheus"], "not listed"),
        ("prometheus", "not listed"),
        ("litellm_compaction.handler", "a bare string replaces"),
        (["litellm_compaction"], "'litellm_compaction' is not the handler"),
        (["litellm_compaction.handler", "litellm_compaction.handler"], "listed 2 times"),
    ],
)
def test_a_wrong_callback_line_is_found(write: Callable[..., Path], callbacks: Any, message: str) -> None:
    """Without the right line nothing is guarded, or other callbacks are lost."""
    assert problems(write(config())) == []
    [(place, text)] = problems(write(config(litellm_settings={"callbacks": callbacks})))
    assert place == "litellm_settings.callbacks"
    assert message in text


def test_a_file_that_shadows_the_package_is_found(write: Callable[..., Path]) -> None:
    """LiteLLM prefers a file beside the config."""
    write("", "litellm_compaction.py")
    [(_, text)] = problems(write(config()))
    assert "instead of the installed package" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 0.4}, "unknown key 'target'"),
        ({"target_ratio": 0.9}, "target_ratio must be below pre_request_ratio"),
        ({"mode": "gaurd"}, "mode = 'gaurd'"),
        ("guard", "must be a mapping"),
        ({"pruning_model": "nowhere"}, "no model of this proxy is called 'nowhere'; known: "),
    ],
)
def test_wrong_settings_are_found(write: Callable[..., Path], settings: Any, message: str) -> None:
    """The finding quotes the key and says what is allowed."""
    [(place, text)] = problems(write(config(settings=settings)))
    assert place.startswith("callback_settings.litellm_compaction")
    assert message in text


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        (deployment(compaction={"enabled": True}), "local: compaction"),
        (deployment(params={"compaction": {}}), "local: litellm_params.compaction"),
        (deployment(params={"model_info": {}}), "local: litellm_params.model_info"),
        (deployment(info={"context_length": 8192}), "local: model_info.context_length"),
        (deployment(info={"compaction": {"windows": 1}}), "local: model_info.compaction"),
        (deployment(info={"compaction": {"target_ratio": 0.9}}), "local: model_info.compaction"),
        ({"model_name": "local"}, "local: litellm_params.model"),
    ],
)
def test_wrong_deployment_settings_are_found(write: Callable[..., Path], entry: dict[str, Any], place: str) -> None:
    """Each with its place and where it belongs."""
    assert [found for found, _ in problems(write(config(entry)))] == [place]


def test_a_variable_that_is_not_set_is_found(write: Callable[..., Path]) -> None:
    """LiteLLM would put nothing in its place."""
    path = write(config(deployment(params={"api_key": "os.environ/MY_TOKEN"})))
    [(place, text)] = problems(path)
    assert place == "model_list[0].litellm_params.api_key"
    assert "MY_TOKEN is not set" in text
    assert problems(path, {"MY_TOKEN": "x"}) == []
