"""What `doctor` finds in a config file before it asks any server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli.config_file import read_config, shipped_config
from tests.cli.conftest import config, deployment

Write = Callable[..., Path]


def problems(path: Path, environ: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """(place, message) of each problem."""
    found = read_config(path).findings(environ or {})
    return [(finding.place, finding.message) for finding in found if finding.level == "problem"]


def test_a_good_config_has_no_problem(write: Write) -> None:
    """Nothing is found where nothing is wrong."""
    assert problems(write(config())) == []


def test_the_shipped_config_has_no_problem() -> None:
    """Also with an empty environment."""
    assert problems(shipped_config()) == []


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
def test_a_wrong_callback_line_is_found(write: Write, callbacks: Any, message: str) -> None:
    """Without the right line nothing is guarded, or other callbacks are lost."""
    [(place, text)] = problems(write(config(litellm_settings={"callbacks": callbacks})))
    assert place == "litellm_settings.callbacks"
    assert message in text


def test_the_handler_in_a_logging_list_is_found(write: Write) -> None:
    """success_callback has no request hooks."""
    settings = {"callbacks": ["litellm_compaction.handler"], "success_callback": ["litellm_compaction.handler"]}
    [(place, _)] = problems(write(config(litellm_settings=settings)))
    assert place == "litellm_settings.success_callback"


@pytest.mark.parametrize(
    ("tier", "own", "is_wrong"),
    [
        ("local", {}, True),
        ("lm_studio/any", {}, True),
        ([{"model_name": "local"}, "cloud"], {"context_compaction": {"trigger_ratio": 0.8}}, True),
        ("local", {"context_compaction": False}, False),
        ("local", {"context_compaction": None}, False),
        ("cloud", {}, False),
        ("alone", {}, False),
    ],
)
def test_an_auto_router_that_compacts_itself_is_found(
    write: Write, tier: Any, own: dict[str, Any], is_wrong: bool
) -> None:
    """It goes before the guard, and refuses what the guard would have made fit; others' tiers are no affair of ours."""
    params = {"model": "auto_router/complexity_router", "complexity_router_config": {"tiers": {"SIMPLE": tier}, **own}}
    entries = [
        deployment(),
        deployment("lm_studio/*", "lm_studio/*"),
        deployment("openai/gpt-5", "cloud"),
        deployment(name="alone", info={"compaction": {"enabled": False}}),
        {"model_name": "smart", "litellm_params": params},
    ]
    found = problems(write(config(*entries)))
    assert [place.endswith("complexity_router_config.context_compaction") for place, _ in found] == [True] * is_wrong


def test_a_file_that_shadows_the_package_is_found(write: Write) -> None:
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
def test_wrong_settings_are_found(write: Write, settings: Any, message: str) -> None:
    """The finding quotes the key and says what is allowed."""
    [(place, text)] = problems(write(config(settings=settings)))
    assert place.startswith("callback_settings.litellm_compaction")
    assert message in text


@pytest.mark.parametrize(
    "sections",
    [
        {"litellm_compaction": {"mode": "guard"}},
        {"general_settings": {"compaction": {}}},
        {"callback_settings": {"mode": "observe"}},
        {"litellm_settings": {"callbacks": ["litellm_compaction.handler"], "compaction_settings": {}}},
    ],
)
def test_settings_in_a_wrong_place_are_found(write: Write, sections: dict[str, Any]) -> None:
    """They would be ignored silently."""
    [(place, text)] = problems(write(config(**sections)))
    assert place.split(".")[0] in sections
    assert "move them to `callback_settings.litellm_compaction`" in text


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
def test_wrong_deployment_settings_are_found(write: Write, entry: dict[str, Any], place: str) -> None:
    """Each with its place and where it belongs."""
    assert [found for found, _ in problems(write(config(entry)))] == [place]


def test_litellms_own_mode_is_not_ours(write: Write) -> None:
    """`model_info.mode: chat` is LiteLLM's."""
    assert problems(write(config(deployment(info={"mode": "chat"})))) == []


def test_a_variable_that_is_not_set_is_found(write: Write) -> None:
    """LiteLLM would put nothing in its place."""
    path = write(config(deployment(params={"api_key": "os.environ/MY_TOKEN"})))
    [(place, text)] = problems(path)
    assert place == "model_list[0].litellm_params.api_key"
    assert "MY_TOKEN is not set" in text
    assert problems(path, {"MY_TOKEN": "x"}) == []


def test_no_finding_shows_a_key(write: Write) -> None:
    """Keys in the file stay in the file."""
    path = write(config(deployment(params={"api_key": "sk-secret"}), general_settings={"master_key": "sk-secret"}))
    assert "sk-secret" not in str(list(read_config(path).findings({})))
