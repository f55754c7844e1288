"""Says what the caller of a request may do: models, budgets, and limits for a minute.

A call of ours through the router skips the proxy's own checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litellm_compaction.proxy.litellm_inside.seam import Seam

# Budgets in LiteLLM's object of a caller (auth_checks.py, 1.106.2 and 1.109.1): the limit, the sum spent when it was
# read, and the kind and id under which the proxy counts the spending.
_BUDGETS = (
    ("max_budget", "spend", "key", "token"),
    ("team_max_budget", "team_spend", "team", "team_id"),
    ("user_max_budget", "user_spend", "user", "user_id"),
)
_OTHER_BUDGETS = ("budget_limits", "organization_max_budget", "end_user_max_budget")
# The answers of LiteLLM's own checks for a call on a caller's behalf.
_ALLOWS = ("allowed", True)


def may_use(router: Any, model: str, metadata: Mapping[str, Any]) -> bool:
    """True if the lists of models that a key and its team carry allow `model_name` `model`; no look into a database.

    A call through the router skips the proxy's own check, so a configured pruning model would be open to keys that may
    not use it (LiteLLM re-checks for its own summaries, context_management/editors/compact.py).
    """
    auth = _auth(metadata)
    return _is_listed(router, model, auth, "models", "key") and _is_listed(router, model, auth, "team_models", "team")


async def is_allowed(router: Any, model: str, metadata: Mapping[str, Any]) -> bool:
    """True if LiteLLM would let the key of `metadata` call a `model_name`.

    By the lists of key, team, user, project and member, and the budgets for that model.
    """
    auth = _auth(metadata)
    if auth is None:
        return True
    if not may_use(router, model, metadata):
        return False
    can_call, is_within_budget = Seam.ACCESS.get(), Seam.BUDGET.get()
    # By position: the first three mean the same in all versions.
    if can_call is not None and await can_call(auth, model, router) not in _ALLOWS:
        return False
    return is_within_budget is None or await is_within_budget(auth, model) in _ALLOWS


async def takes_place(model: str, metadata: Mapping[str, Any]) -> bool:
    """True if a further call of a `model_name` is within the caller's minute; counts it as a request.

    LiteLLM counts the tokens of such a call itself, when it has ended, and its own checks count no request: a key for
    two requests a minute would make many. Slots of parallel calls are left out: this one runs in an admitted request.
    """
    check, descriptors = _rate_limits(model, metadata)
    for options in ({"read_only": True}, {"read_only": False, "skip_tpm_check": True}) if descriptors else ():
        answer = await check(descriptors=descriptors, **options)
        if isinstance(answer, Mapping) and answer.get("overall_code") == "OVER_LIMIT":
            return False
    return True


async def has_spare_places(model: str, metadata: Mapping[str, Any]) -> bool:
    """True if the caller has used at most half of each of its limits for a minute; counts nothing."""
    check, descriptors = _rate_limits(model, metadata)
    if not descriptors:
        return True
    answer = await check(descriptors=descriptors, read_only=True)
    statuses = answer.get("statuses") if isinstance(answer, Mapping) else None
    return all(2 * each["limit_remaining"] >= each["current_limit"] for each in statuses or ())


async def is_within_budgets(metadata: Mapping[str, Any]) -> bool:
    """True if the budgets of key, team and user are not spent, and LiteLLM's object of the caller names no others.

    LiteLLM looks at them before each request of a client, and at more that only its database knows (members of teams,
    projects). For a budget without a sum spent, the answer is no.
    """
    auth = _auth(metadata)
    if auth is None:
        return True
    if any(getattr(auth, name, None) for name in _OTHER_BUDGETS):
        return False
    current = Seam.SPENT.get()
    for limit_name, spend_name, kind, id_name in _BUDGETS:
        limit, spent = getattr(auth, limit_name, None), getattr(auth, spend_name, None) or 0.0
        if limit is None:
            continue
        if current is not None:
            key = f"spend:{kind}:{getattr(auth, id_name, None)}"
            spent = await current(counter_key=key, fallback_spend=spent, max_budget=limit)
        if spent >= limit:
            return False
    return True


def _rate_limits(model: str, metadata: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The check of a caller's limits for a minute, and these limits; none if LiteLLM has none, or others."""
    auth, limiter = _auth(metadata), _limiter()
    check = Seam.LIMIT.of(limiter)
    return check, _descriptors(limiter, auth, model) if auth is not None and check is not None else []


def _auth(metadata: Mapping[str, Any]) -> Any:
    """LiteLLM's own object of the caller; None outside a proxy."""
    found = metadata.get("user_api_key_auth")
    return Seam.CALLER.needed()(**found) if isinstance(found, Mapping) else found


def _limiter() -> Any:
    find = Seam.LIMITER.get()
    return find("parallel_request_limiter") if find is not None else None


def _descriptors(limiter: Any, auth: Any, model: str) -> list[Any]:
    """A caller's limits, as LiteLLM's limiter describes them before a request; empty if it does not."""
    describe, for_organization = Seam.LIMITS.of(limiter), Seam.ORGANIZATION_LIMITS.of(limiter)
    others = [seam.of(limiter) for seam in (Seam.TEAM_LIMITS, Seam.PROJECT_LIMITS)]
    if None in (describe, for_organization, *others):
        return []
    own = getattr(auth, "metadata", None) or {}
    found = describe(
        user_api_key_dict=auth,
        data={"model": model},
        rpm_limit_type=own.get("rpm_limit_type"),
        tpm_limit_type=own.get("tpm_limit_type"),
        model_has_failures=False,
    )
    for add in others:
        add(user_api_key_dict=auth, requested_model=model, descriptors=found)
    found = [*found, *for_organization(auth, model)]
    return [
        {**each, "rate_limit": {**each["rate_limit"], "max_parallel_requests": None}}
        if each.get("rate_limit")
        else each
        for each in found
    ]


def _is_listed(router: Any, model: str, auth: Any, attribute: str, scope: str) -> bool:
    allowed = getattr(auth, attribute, None)
    if not isinstance(allowed, list) or not allowed:
        return True
    if (check := Seam.LISTED.get()) is None:
        return model in allowed
    try:
        check(
            model=model,
            llm_router=router,
            models=allowed,
            team_model_aliases=getattr(auth, "team_model_aliases", None),
            team_id=getattr(auth, "team_id", None),
            object_type=scope,
        )
    except Exception:  # noqa: BLE001 - refused: ProxyException, whose place moved between versions
        return False
    return True
