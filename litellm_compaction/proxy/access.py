"""Whether a client may use the pruning model that the operator configured.

A call through the router skips the proxy's own check, so a configured summariser would be open to keys that may
not use it (facts on LiteLLM, section 5). Private API: feature-tested; where it is missing, the operator's choice
of the model counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def may_use(router: Any, model: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the key behind `metadata` may call `model`.

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
