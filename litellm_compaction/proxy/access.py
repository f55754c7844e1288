"""What LiteLLM's own access rules say: may a key use the pruning model, which credentials has a deployment.

Internal API of LiteLLM, feature-tested; where it is missing, the operator's configuration counts as it stands.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def may_use(router: Any, model: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the key behind `metadata` may call `model`.

    A call through the router skips the proxy's own check, so a configured summariser would be open to keys that
    may not use it (LiteLLM re-checks for its own summaries, context_management/editors/compact.py).

    Args:
        router: LiteLLM's router.
        model: a `model_name`.
        metadata: of the client's request.
    """
    auth = metadata.get("user_api_key_auth")
    allowed = getattr(auth, "models", None)
    if not isinstance(allowed, list):
        return True
    try:
        from litellm.proxy.auth.auth_checks import can_object_call_model
    except ImportError:
        return not allowed or model in allowed
    try:
        can_object_call_model(
            model=model,
            llm_router=router,
            models=allowed,
            team_model_aliases=getattr(auth, "team_model_aliases", None),
            team_id=getattr(auth, "team_id", None),
            object_type="key",
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
