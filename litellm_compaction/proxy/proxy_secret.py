"""The secret that all workers of a proxy have, for what each of them must be able to open or to name alike."""

from __future__ import annotations

import sys

_PROXY_MODULE = "litellm.proxy.proxy_server"


def proxy_secret() -> str | None:
    """The proxy's master key; None before the configuration is loaded, and where there is none."""
    key = getattr(sys.modules.get(_PROXY_MODULE), "master_key", None)
    return key if isinstance(key, str) and key else None
