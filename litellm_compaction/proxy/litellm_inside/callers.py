"""Says what the caller of a request may do; a call of ours through the router skips the proxy's own checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litellm_compaction.proxy.litellm_inside.seam import Seam

# The answers of LiteLLM's own checks for a call on a caller's behalf.
_ALLOWS = ("allowed", True)
# In the names of LiteLLM's fields for what a caller may spend.
_LIMITS = ("limit", "budget")


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


def has_limits(metadata: Mapping[str, Any]) -> bool:
    """True if any limit or budget is set for the caller, whatever LiteLLM calls it, also in its own or team's metadata.

    What is left of it only LiteLLM's checks before a request of a client know.
    """
    auth = _auth(metadata)
    # Of a model of pydantic; another object's fields are its own.
    fields = {} if auth is None else dict(auth) if hasattr(auth, "model_fields_set") else vars(auth)
    holders = [fields, *(fields.get(name) or {} for name in ("metadata", "team_metadata"))]
    return any(
        value is not None and value is not False and value not in ({}, [])  # a limit of 0 is one
        for holder in holders
        for name, value in holder.items()
        if any(word in name for word in _LIMITS)
    )


def _auth(metadata: Mapping[str, Any]) -> Any:
    """LiteLLM's own object of the caller; None outside a proxy."""
    found = metadata.get("user_api_key_auth")
    return Seam.CALLER.needed()(**found) if isinstance(found, Mapping) else found


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
