"""Threat: a request that uses us to get round what LiteLLM guards: lists of models and budgets."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
from litellm import Router as LiteLLMRouter
from litellm.proxy._types import UserAPIKeyAuth

from litellm_compaction.config import Settings
from litellm_compaction.proxy.exchange import pruning_models_of
from litellm_compaction.proxy.internal import Caller
from litellm_compaction.proxy.litellm_inside import Seam, is_allowed

# LiteLLM's own, some of them while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


_ONLY = ["chat-8k"]
_NAMES = ("chat-8k", "pruner-large")
_ENTRIES = [{"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_key": "k"}} for name in _NAMES]
# Whether somebody may have summaries written by the model `pruner-large`.
_CALLERS: dict[str, tuple[dict[str, Any], bool]] = {
    "no lists": ({}, True),
    "its own list": ({"models": _ONLY}, False),
    "its own list with it": ({"models": [*_ONLY, "pruner-large"]}, True),
    "no default models": ({"models": ["no-default-models"]}, False),
    "the team's list": ({"team_id": "t", "team_models": _ONLY}, False),
    "all of the team's, which has not": ({"models": ["all-team-models"], "team_id": "t", "team_models": _ONLY}, False),
    "all of the team's, which has": (
        {"models": ["all-team-models"], "team_id": "t", "team_models": ["pruner-large"]},
        True,
    ),
    "its own list with it, not the team's": (
        {"models": ["pruner-large"], "team_id": "t", "team_models": _ONLY},
        False,
    ),
    "a budget for it that is spent": (
        {"token": "hash", "model_max_budget": {"pruner-large": {"budget_limit": 0.0, "time_period": "1d"}}},
        False,
    ),
    "a budget for another model": (
        {"token": "hash", "model_max_budget": {"chat-8k": {"budget_limit": 0.0, "time_period": "1d"}}},
        True,
    ),
}


@pytest.mark.parametrize("caller", _CALLERS)
async def test_pruning_model_obeys_litellms_own_checks(monkeypatch: pytest.MonkeyPatch, caller: str) -> None:
    """Where LiteLLM would refuse the same call, the pruning model is not asked, and a summary is made without it."""
    importlib.import_module("litellm.proxy.proxy_server")
    fields, allowed = _CALLERS[caller]
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", **fields)}
    router, settings = LiteLLMRouter(model_list=_ENTRIES), Settings(pruning_model="pruner-large")
    assert await is_allowed(router, "pruner-large", metadata) is allowed

    async def target(*_: object) -> object:
        return SimpleNamespace()

    guards: Any = SimpleNamespace(pruning_target=target)
    caller, deployment = (
        Caller(router, lambda: "m", metadata, timeout_s=5, group="m"),
        cast("Any", SimpleNamespace(target=None)),
    )
    models = await pruning_models_of(guards, deployment, settings, caller)
    assert [model.label for model in models] == (["pruner-large", "m"] if allowed else ["m"])


@pytest.mark.parametrize(("listed", "allowed"), [(_ONLY, False), ([*_ONLY, "pruner-large"], True)], ids=["no", "yes"])
@pytest.mark.parametrize(("field", "lookup"), [("user_id", "get_user_object"), ("project_id", "get_project_object")])
async def test_lists_in_litellms_database_hold(
    monkeypatch: pytest.MonkeyPatch, field: str, lookup: str, listed: list[str], allowed: bool
) -> None:
    """A user's and a project's lists of models stand in the database only: LiteLLM's own checks read them there."""
    proxy_server = importlib.import_module("litellm.proxy.proxy_server")
    auth_checks = importlib.import_module("litellm.proxy.auth.auth_checks")
    looked_up: list[object] = []

    async def stored(**asked: Any) -> Any:
        looked_up.append(asked.get(field))
        return SimpleNamespace(models=listed, user_id="u", project_id="u", project_alias="", user_role=None)

    monkeypatch.setattr(proxy_server, "prisma_client", object())
    monkeypatch.setattr(auth_checks, lookup, stored)
    metadata = {"user_api_key_auth": UserAPIKeyAuth(**{"api_key": "sk-1", field: "u"})}
    assert await is_allowed(LiteLLMRouter(model_list=_ENTRIES), "pruner-large", metadata) is allowed
    assert looked_up == ["u"]


async def test_a_check_that_fails_lets_nothing_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """As LiteLLM's own: without an answer the pruning model is not asked."""

    async def broken(*_: object) -> bool:
        raise RuntimeError("no database")

    monkeypatch.setattr(Seam.ACCESS, "get", lambda: broken)
    assert not await is_allowed(None, "carried", {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1")})


async def test_without_litellms_check_a_list_lets_nothing_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key without one may; what is no object of LiteLLM's is nobody's word, and without a proxy there are no keys."""
    monkeypatch.setattr(Seam.ACCESS, "get", lambda: None)
    router = LiteLLMRouter(model_list=_ENTRIES)
    for fields in ({}, {"models": _ONLY}, {"team_id": "t", "team_models": _ONLY}):
        auth = UserAPIKeyAuth(**{"api_key": "sk-1", **fields})
        assert await is_allowed(router, "pruner-large", {"user_api_key_auth": auth}) is (not fields)
    monkeypatch.setattr(Seam.BUDGET, "get", lambda: None)
    assert not await is_allowed(router, "pruner-large", {"user_api_key_auth": {"models": []}})
    assert await is_allowed(router, "pruner-large", {})


@pytest.mark.parametrize(
    ("caller", "allowed"),
    [
        ({}, True),
        ({"models": _ONLY}, True),
        ({"max_budget": 5.0}, False),
        ({"max_budget": 0.0}, False),
        ({"rpm_limit": 6}, False),
        ({"user_id": "u", "user_tpm_limit": 6}, False),
        ({"team_id": "t", "team_max_budget": 1.0}, False),
        ({"organization_max_budget": 100.0}, False),
        ({"model_max_budget": {"chat-8k": {"budget_limit": 1.0, "time_period": "1d"}}}, False),
        ({"metadata": {"model_rpm_limit": {"chat-8k": 2}}}, False),
        ({"team_metadata": {"model_tpm_limit": {"chat-8k": 2}}}, False),
        ({"metadata": {"tags": ["a"]}}, True),
    ],
)
async def test_nothing_is_written_ahead_for_a_key_with_limits(caller: dict[str, Any], *, allowed: bool) -> None:
    """None of its own requests is refused for what it never asked."""
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", **caller)}
    assert await Caller(None, lambda: "m", metadata, timeout_s=5).may_write_ahead() is allowed
