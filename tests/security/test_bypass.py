"""Threat: a request that gets round what guards it, or uses us to get round what LiteLLM guards (issue 12)."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from litellm import Router as LiteLLMRouter
from litellm.caching.caching import DualCache
from litellm.proxy._types import UserAPIKeyAuth
from litellm.proxy.hooks.parallel_request_limiter_v3 import _PROXY_MaxParallelRequestsHandler_v3
from litellm.proxy.utils import InternalUsageCache

from litellm_compaction.core.messages import user_message
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.proxy import access
from litellm_compaction.proxy.internal import summary_asker
from tests.security.hooks import Router

# LiteLLM's own, some of them while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

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
    assert await access.is_allowed(router, "pruner-large", metadata) is allowed
    ask = summary_asker(router, "pruner-large", metadata, timeout_s=5, group="pruner-large")
    monkeypatch.setattr(access, "_limiter", lambda: None)
    if allowed:
        await ask([user_message("text")], max_tokens=5)
    else:
        with pytest.raises(SummaryFailed, match="not_allowed"):
            await ask([user_message("text")], max_tokens=5)
    assert len(asked.asked) == allowed


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
    monkeypatch.setattr(access, "_limiter", lambda: limiter)
    monkeypatch.setattr(access, "_LITELLM_CHECKS", ())
    metadata = {"user_api_key_auth": UserAPIKeyAuth(api_key="sk-1", **limits)}
    router = Router()
    ask = summary_asker(router, "carried", metadata, timeout_s=5, group="carried", is_same=is_same)
    for _ in range(calls):
        await ask([user_message("text")], max_tokens=5)
    for _ in range(4 - calls):
        with pytest.raises(SummaryFailed, match="rate_limit"):
            await ask([user_message("text")], max_tokens=5)
    assert len(router.asked) == calls
