"""Settings from config.yaml: checked at start; `tokenizer` is followed for each deployment.

That a real proxy then does not start: `tests/integration/test_config_start.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import litellm
import pytest

from litellm_compaction.config import Settings
from litellm_compaction.errors import ConfigError
from litellm_compaction.proxy import startup
from litellm_compaction.proxy.routing import deployment_of, serves
from litellm_compaction.tokenizers.sources import Sources
from tests.tokenizers.gguf_writer import bpe_fields, gguf


def loaded(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], own: dict[str, Any] | None = None) -> Settings:
    """What the proxy makes of a configuration with one deployment."""
    monkeypatch.setattr(litellm, "callback_settings", {"litellm_compaction": settings})
    info = {"model_info": {"compaction": own}} if own is not None else {}
    monkeypatch.setattr(startup, "_config", lambda: {"model_list": [{"model_name": "local", **info}]})
    return startup.load_settings()


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(bpe_fields(tokenizer__chat_template="{{ messages[0].content }}")))
    return path


@pytest.mark.parametrize(
    ("settings", "own", "said"),
    [
        ({"tokenizer": "/nonexistent/x.gguf"}, None, r"litellm_compaction\.tokenizer = '/nonexistent/x\.gguf': it can"),
        ({"models_folder": "/nonexistent"}, None, r"litellm_compaction\.models_folder = '/nonexistent': allowed"),
        ({}, {"tokenizer": "who-is-this"}, r"model_info\.compaction of 'local'\.tokenizer = 'who-is-this': allowed"),
        (
            {"pre_request_ration": 0.8},
            None,
            r"litellm_compaction: unknown key 'pre_request_ration'; did you mean 'pre_request_ratio'\?",
        ),
        ({"pre_request_ratio": 1.5}, None, r"pre_request_ratio = 1\.5: .*less than 1"),
        ({"notices": "loud"}, None, r"notices = 'loud': .*'content', 'reasoning' or 'off'"),
        (
            {"pruning_model": "nobody"},
            None,
            r"litellm_compaction\.pruning_model: no model of this proxy is called 'nobody'; known: local",
        ),
        ({}, {"pruning_model": "nobody"}, r"model_info\.compaction of 'local'\.pruning_model: no model of this proxy"),
        (
            {"target_ratio": 0.5},
            {"pre_request_ratio": 0.45},
            r"model_info\.compaction of 'local'.*now 0\.5, 0\.45 and 0\.9",
        ),
    ],
)
def test_a_wrong_one_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], own: dict[str, Any] | None, said: str
) -> None:
    """The error names key, value and what is allowed."""
    with pytest.raises(ConfigError, match=said):
        loaded(monkeypatch, settings, own)


async def test_a_deployments_own_tokenizer_is_followed(model_file: Path) -> None:
    """Over the global one."""
    info = {"id": "1", "compaction": {"tokenizer": str(model_file)}}
    params = {"model": "lm_studio/qwen3-8b", "api_base": "http://127.0.0.1:9/v1"}
    target = deployment_of(params, info, group="local", environ={}).target
    found = await Sources(tokenizer="heuristic").source(target, "", None, patient=True)
    assert found.path == model_file
    other = deployment_of(params, {"id": "1"}, group="local", environ={}).target
    assert (await Sources(tokenizer="heuristic").source(other, "", None)).kind == "heuristic"


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*", "qwen/qwen3-8b", True),
        ("qwen/*", "qwen/qwen3-8b", True),
        ("qwen/*", "google/gemma", False),
        ("*-8b", "qwen3-8b", True),
        ("a.*", "ab", False),
        ("fixed", "fixed", True),
        ("fixed", "other", False),
    ],
)
def test_a_wildcard_reaches_what_its_pattern_says(pattern: str, name: str, expected: bool) -> None:
    """As LiteLLM fills in the name; what else a regular expression knows is text."""
    assert serves(pattern, name) is expected
