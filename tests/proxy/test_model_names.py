"""Which names of a config file a pruning model may have."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.proxy.routing import unknown_model

CONFIG: dict[str, Any] = {
    "model_list": [
        {"model_name": "local", "litellm_params": {"model": "lm_studio/x"}, "model_info": {"id": "own-id"}},
        {"model_name": "lm_studio/*", "litellm_params": {"model": "lm_studio/*"}},
        "not a mapping",
    ],
    "router_settings": {"model_group_alias": {"nickname": "local", "hidden": {"model": "local", "hidden": True}}},
}


@pytest.mark.parametrize("name", ["__same__", "local", "own-id", "nickname", "hidden", "lm_studio/qwen/qwen3-8b"])
def test_every_way_in_which_the_router_finds_a_model_is_known(name: str) -> None:
    """Groups, ids, aliases and what a wildcard serves."""
    assert unknown_model(CONFIG, name) == ""


@pytest.mark.parametrize("name", ["loca", "Local", "openai/x", "lm_studio", ""])
def test_others_are_refused_with_those_that_are_known(name: str) -> None:
    """The operator sees what to choose from."""
    said = unknown_model(CONFIG, name)
    assert said == (
        f"no model of this proxy is called {name!r}; known: local, lm_studio/*, nickname, hidden, and __same__"
    )


def test_models_of_a_database_may_come_later() -> None:
    """Nothing is refused that LiteLLM could still learn."""
    assert unknown_model({**CONFIG, "general_settings": {"store_model_in_db": True}}, "nobody") == ""


def test_a_long_list_is_cut() -> None:
    """An error is no catalog."""
    many = {"model_list": [{"model_name": f"m{number}"} for number in range(50)]}
    assert unknown_model(many, "nobody").endswith("m18, m19, …, and __same__")
