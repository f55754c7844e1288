"""The windows that we know, shown where clients look for them: `max_input_tokens` in the proxy's `/model/info`.

Clients steer their own compaction by that number; LM Studio's OpenAI endpoint does not tell it
(lmstudio-bug-tracker 2139).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from litellm_compaction.proxy.routing import Deployment
from litellm_compaction.windows.windows import Window

_KEY = "max_input_tokens"


class Publisher:
    """Writes windows into the router's own list, from which LiteLLM answers `/model/info`."""

    def __init__(self) -> None:
        self._written: dict[str, int] = {}

    def publish(self, router: Any, deployment: Deployment, window: Window) -> None:
        """Shows a deployment's window, unless it has many; never in place of a number that the operator wrote.

        With `enable_pre_call_checks` LiteLLM would refuse by that number what we are about to compact, so
        nothing is shown then. What an overflow has taught may be one tenant's only, and is not shown.
        """
        window_tokens = window.tokens
        if window.source == "learned":
            return
        known = self._written.get(deployment.id)
        if deployment.is_wildcard or known == window_tokens or getattr(router, "enable_pre_call_checks", True):
            return
        for entry in getattr(router, "model_list", None) or ():
            info = entry.get("model_info") if isinstance(entry, MutableMapping) else None
            if not isinstance(info, MutableMapping) or info.get("id") != deployment.id:
                continue
            if info.get(_KEY) in (None, known):
                info[_KEY] = window_tokens
                self._written[deployment.id] = window_tokens
            return

    def as_written(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """A deployment's `model_info` as its operator wrote it: our own number would come back to us as theirs."""
        own = self._written.get(str(info.get("id")))
        if own is None or info.get(_KEY) != own:
            return info
        return {key: value for key, value in info.items() if key != _KEY}
