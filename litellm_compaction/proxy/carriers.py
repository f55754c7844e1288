"""Which carrier serves a deployment: decided here and nowhere else.

The transport where LiteLLM reaches the deployment through the OpenAI client, the hooks everywhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TypeAlias

from litellm_compaction.config import Settings
from litellm_compaction.core.continuation.request import Way
from litellm_compaction.engine import ALL_WAYS
from litellm_compaction.proxy.routing import Deployment

Carrier: TypeAlias = Literal["transport", "hooks"]
# By which ways each can have an answer gone on with: LiteLLM's hooks know chats only.
WAYS_OF: Mapping[Carrier, frozenset[Way]] = {
    "transport": frozenset(ALL_WAYS),
    "hooks": frozenset(("prefill", "turn")),
}

# Replaces LiteLLM's OpenAI client by a handler that ignores the client it is given (tried out on 1.106.2).
BYPASS_VARIABLE = "EXPERIMENTAL_OPENAI_BASE_LLM_HTTP_HANDLER"
_OPENAI_CLIENT_PROVIDERS = frozenset({"lm_studio", "openai", "custom_openai"})


def carrier_of(deployment: Deployment, settings: Settings, environ: Mapping[str, str] = os.environ) -> Carrier:
    """The carrier of a deployment's answers.

    Args:
        deployment: its provider and address decide.
        settings: `carrier: hooks` decides against the transport.
        environ: a variable of LiteLLM's makes the transport impossible.
    """
    if settings.carrier == "hooks" or is_bypassed(environ):
        return "hooks"
    reachable = deployment.provider in _OPENAI_CLIENT_PROVIDERS and deployment.target.api_base is not None
    return "transport" if reachable else "hooks"


def is_bypassed(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether LiteLLM is configured to ignore the client that carries our transport."""
    return environ.get(BYPASS_VARIABLE, "").strip().lower() in ("true", "1", "yes")
