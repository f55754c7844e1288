"""What LiteLLM's own access rules say: may a key use the pruning model, which credentials has a deployment.

Internal API of LiteLLM, feature-tested; where it is missing, the lists of models that the key itself carries count.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

_PROXY = "litellm.proxy.proxy_server"
# LiteLLM's own checks for a call on a caller's behalf, which skips the proxy's authentication: where they stand, what
# they are called, and what they say where they allow it (1.109.1; 1.106.2, where each gives a boolean).
_LITELLM_CHECKS = (
    (
        "litellm.llms.anthropic.messages.caller_model_checks",
        ("caller_can_call_model", "caller_within_model_budget"),
        "allowed",
    ),
    (
        "litellm.llms.anthropic.pass_through.context_management.editors.compact",
        ("_check_summary_model_access", "_check_summary_model_budget"),
        True,
    ),
)


def may_use(router: Any, model: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the lists of models that a key and its team carry allow `model`; no look into a database.

    A call through the router skips the proxy's own check, so a configured summariser would be open to keys that
    may not use it (LiteLLM re-checks for its own summaries, context_management/editors/compact.py).

    Args:
        router: LiteLLM's router.
        model: a `model_name`.
        metadata: of the client's request.
    """
    auth = _auth(metadata)
    return _is_listed(router, model, auth, "models", "key") and _is_listed(router, model, auth, "team_models", "team")


async def is_allowed(router: Any, model: str, metadata: Mapping[str, Any]) -> bool:
    """Whether LiteLLM would let the key behind `metadata` call `model`: lists of key, team, user, project and member,
    and the budgets for that model.

    Args:
        router: LiteLLM's router.
        model: a `model_name`.
        metadata: of the client's request.
    """
    auth = _auth(metadata)
    if auth is None:
        return True
    if not may_use(router, model, metadata):
        return False
    for module_name, names, allowed in _LITELLM_CHECKS if _PROXY in sys.modules else ():
        try:
            module = import_module(module_name)
            can_call, is_within_budget = (getattr(module, name) for name in names)
        except (ImportError, AttributeError):
            continue
        # By position: the first three mean the same in all versions.
        return bool(await can_call(auth, model, router) == allowed and await is_within_budget(auth, model) == allowed)
    return True


async def takes_place(model: str, metadata: Mapping[str, Any]) -> bool:
    """Whether a further call of `model` is within the caller's requests and tokens per minute; counts it as a request.

    LiteLLM counts the tokens of such a call itself, when it has ended, and its own checks count no request: a key for
    two requests a minute would make many. The slots of parallel calls are left out: this one runs inside an admitted
    request.

    Args:
        model: a `model_name`.
        metadata: of the client's request.
    """
    auth = _auth(metadata)
    limiter = _limiter()
    check = getattr(limiter, "should_rate_limit", None)
    if (
        auth is None
        or check is None
        or not {"read_only", "skip_tpm_check"} <= inspect.signature(check).parameters.keys()
    ):
        return True
    descriptors = _descriptors(limiter, auth, model)
    if not descriptors:
        return True
    for options in ({"read_only": True}, {"read_only": False, "skip_tpm_check": True}):
        answer = await check(descriptors=descriptors, **options)
        if isinstance(answer, Mapping) and answer.get("overall_code") == "OVER_LIMIT":
            return False
    return True


def _auth(metadata: Mapping[str, Any]) -> Any:
    """Whose call it is, as LiteLLM's own object; None outside a proxy."""
    found = metadata.get("user_api_key_auth")
    if not isinstance(found, Mapping):
        return found
    from litellm.proxy._types import UserAPIKeyAuth

    return UserAPIKeyAuth(**found)


def _limiter() -> Any:
    # Not imported: outside a proxy there is none, and importing it takes seconds.
    found = getattr(sys.modules.get(_PROXY), "proxy_logging_obj", None)
    find = getattr(found, "get_proxy_hook", None)
    return find("parallel_request_limiter") if find is not None else None


def _descriptors(limiter: Any, auth: Any, model: str) -> list[Any]:
    """What is limited for a caller, as LiteLLM's limiter describes it before a request; empty where it does not say."""
    own = getattr(auth, "metadata", None) or {}
    try:
        found = limiter.create_rate_limit_descriptors(
            user_api_key_dict=auth,
            data={"model": model},
            rpm_limit_type=own.get("rpm_limit_type"),
            tpm_limit_type=own.get("tpm_limit_type"),
            model_has_failures=False,
        )
        for scope in ("team", "project"):
            add = getattr(limiter, f"_add_{scope}_model_rate_limit_descriptor_from_metadata")
            add(user_api_key_dict=auth, requested_model=model, descriptors=found)
        found = [*found, *limiter.create_organization_rate_limit_descriptor(auth, model)]
    except (AttributeError, TypeError):
        return []
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
    try:
        from litellm.proxy.auth.auth_checks import can_object_call_model
    except ImportError:
        return model in allowed
    try:
        can_object_call_model(
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


def with_credentials(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of a deployment with those that `litellm_credential_name` stands for.

    LiteLLM fills them in only after the deployment hook.
    """
    name = params.get("litellm_credential_name")
    if not isinstance(name, str):
        return params
    try:
        from litellm.litellm_core_utils.credential_accessor import CredentialAccessor

        values = CredentialAccessor.get_credential_values(name)
    except (ImportError, AttributeError):
        return params
    return {**values, **{key: value for key, value in params.items() if value is not None}}


def ssl_verification() -> bool | str:
    """Whether, or by which bundle of certificates, LiteLLM verifies servers (`litellm_settings.ssl_verify`)."""
    import litellm

    value = os.environ.get("SSL_VERIFY", getattr(litellm, "ssl_verify", True))
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    return value if isinstance(value, (bool, str)) else True
