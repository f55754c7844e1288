"""Threat: a request that uses us to get round what LiteLLM guards: lists of models, budgets, rates."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from litellm import Router as LiteLLMRouter
from litellm.caching.caching import DualCache
from litellm.proxy._types import UserAPIKeyAuth
from litellm.proxy.hooks.parallel_request_limiter_v3 import _PROXY_MaxParallelRequestsHandler_v3
from litellm.proxy.utils import InternalUsageCache
from litellm.types.utils import ModelResponse

from litellm_compaction.core.messages import user_message
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.proxy import internal
from litellm_compaction.proxy.internal import Caller
from litellm_compaction.proxy.litellm_inside import callers
from litellm_compaction.proxy.litellm_inside.seam import Seam

# LiteLLM's own, some of them while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Router:
    """LiteLLM's router, as far as a summary is asked for; it keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def get_model_list(self, model_name: str | None = None, team_id: str | None = None) -> list[dict[str, Any]]:
        return [{"model_name": "carried", "litellm_params": {"model": "openai/test"}, "model_info": {"id": "id"}}]

    async def acompletion(self, **arguments: Any) -> Any:
        self.asked.append(arguments)
        return ModelResponse(choices=[{"message": {"role": "assistant", "content": "### Current state\nPorted."}}])


_ONLY = ["chat-8k"]
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
    names = ("chat-8k", "pruner-large")
    entries = [{"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_key": "k"}} for name in names]
    fields, allowed = _CALLERS[caller]
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", **fields)}
    router, asked = LiteLLMRouter(model_list=entries), Router()
    router.acompletion = asked.acompletion
    assert await callers.is_allowed(router, "pruner-large", metadata) is allowed
    ask = Caller(router, "pruner-large", metadata, timeout_s=5, group="pruner-large").ask
    monkeypatch.setattr(callers, "_limiter", lambda: None)
    if allowed:
        await ask([user_message("text")], max_tokens=5)
    else:
        with pytest.raises(SummaryFailed, match="not_allowed"):
            await ask([user_message("text")], max_tokens=5)
    assert len(asked.asked) == allowed


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
    names = ("chat-8k", "pruner-large")
    entries = [{"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_key": "k"}} for name in names]
    metadata = {"user_api_key_auth": UserAPIKeyAuth(**{"api_key": "sk-1", field: "u"})}
    assert await callers.is_allowed(LiteLLMRouter(model_list=entries), "pruner-large", metadata) is allowed
    assert looked_up == ["u"]


@pytest.mark.parametrize("check", ["is_allowed", "takes_place"])
async def test_checks_that_fail_let_nothing_through(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    """As LiteLLM's own: without an answer the pruning model is not asked."""

    async def broken(*_: object) -> bool:
        raise RuntimeError("no database")

    monkeypatch.setattr(internal, check, broken)
    router = Router()
    ask = Caller(router, "carried", {}, timeout_s=5, group="carried").ask
    with pytest.raises(SummaryFailed, match="not_checked"):
        await ask([user_message("text")], max_tokens=5)
    assert router.asked == []


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize(
    ("limits", "calls"),
    [({"rpm_limit": 2}, 2), ({"user_id": "u", "user_rpm_limit": 3}, 3), ({"max_parallel_requests": 1}, 4), ({}, 4)],
    ids=["key", "user", "slots", "none"],
)
async def test_summary_calls_count_as_requests_of_the_key(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], calls: int, is_same: bool
) -> None:
    """A key for two requests a minute had four made; its own slot of parallel calls does not stand in its way."""
    limiter = _PROXY_MaxParallelRequestsHandler_v3(internal_usage_cache=InternalUsageCache(DualCache()))
    monkeypatch.setattr(callers, "_limiter", lambda: limiter)
    for seam in (Seam.ACCESS, Seam.BUDGET):
        monkeypatch.setattr(seam, "places", ())
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", **limits)}
    router = Router()
    ask = Caller(router, "carried", metadata, timeout_s=5, group="carried", is_same=is_same).ask
    for _ in range(calls):
        await ask([user_message("text")], max_tokens=5)
    for _ in range(4 - calls):
        with pytest.raises(SummaryFailed, match="rate_limit"):
            await ask([user_message("text")], max_tokens=5)
    assert len(router.asked) == calls
    counted = limiter.internal_usage_cache.dual_cache.in_memory_cache.cache_dict
    used = [count for name, count in counted.items() if str(name).endswith(":requests")]
    # What is refused is not counted: the client's own next request has what the summary did not get.
    assert all(int(count) == calls for count in used)
    assert used or not {"rpm_limit", "user_rpm_limit"} & limits.keys()


@pytest.mark.parametrize(
    ("caller", "allowed"),
    [
        ({}, True),
        ({"max_budget": 5.0, "spend": 4.0}, True),
        ({"max_budget": 5.0, "spend": 5.0}, False),
        ({"team_id": "t", "team_max_budget": 1.0, "team_spend": 2.0}, False),
        ({"user_id": "u", "user_max_budget": 1.0, "user_spend": 2.0}, False),
        # What is spent of these does not stand in LiteLLM's object of the caller.
        ({"organization_max_budget": 100.0}, False),
        ({"end_user_max_budget": 100.0}, False),
        ({"models": _ONLY}, False),
    ],
)
async def test_nothing_is_written_ahead_for_a_key_that_litellm_would_refuse(
    monkeypatch: pytest.MonkeyPatch, caller: dict[str, Any], allowed: bool
) -> None:
    """No request of a client is there that LiteLLM has checked: lists and budgets are looked at for the call itself."""
    importlib.import_module("litellm.proxy.proxy_server")
    monkeypatch.setattr(callers, "_limiter", lambda: None)
    names = ("chat-8k", "pruner-large")
    entries = [{"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_key": "k"}} for name in names]
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", **caller)}
    assert await internal.may_write_ahead(LiteLLMRouter(model_list=entries), ["pruner-large"], metadata) is allowed


async def test_what_is_written_ahead_leaves_half_of_a_keys_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key for six requests a minute asks three, and no call in the background takes one from its own fourth."""
    limiter = _PROXY_MaxParallelRequestsHandler_v3(internal_usage_cache=InternalUsageCache(DualCache()))
    monkeypatch.setattr(callers, "_limiter", lambda: limiter)
    for seam in (Seam.ACCESS, Seam.BUDGET):
        monkeypatch.setattr(seam, "places", ())
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", rpm_limit=6)}
    may = partial(internal.may_write_ahead, Router(), ["carried"], metadata)
    ask = Caller(Router(), "carried", metadata, timeout_s=5, group="carried", is_same=True).ask
    allowed = []
    for _ in range(5):
        allowed.append(await may())
        await ask([user_message("text")], max_tokens=5)
    assert allowed == [True, True, True, True, False]
