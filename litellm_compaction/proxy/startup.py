"""What is done once, when LiteLLM loads the callback. An error raised here stops the proxy's start."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from collections.abc import Mapping
from typing import Any, Literal

import litellm

from litellm_compaction.config import Settings, settings_from
from litellm_compaction.engine import shares_context
from litellm_compaction.master_key import ensure_master_key
from litellm_compaction.proxy.config_check import SECTION, check_config
from litellm_compaction.proxy.routing import BYPASS_VARIABLE, as_entry, is_bypassed
from litellm_compaction.windows.lmstudio import DEFAULT_API_BASE

logger = logging.getLogger("litellm_compaction")


def load_settings() -> Settings:
    """The operator's settings, checked together with every deployment's own.

    Raises:
        ConfigError: the first thing in the config file with which the proxy must not start (`config_check.py`).
    """
    config = {"callback_settings": litellm.callback_settings, **_config()}
    for finding in check_config(config, os.environ):
        if finding.error is not None:
            raise finding.error
    return settings_from(as_entry(config["callback_settings"]).get(SECTION)).with_store(os.environ)


def spare_collections() -> None:
    """Has Python's garbage collector pass over what the process has loaded so far.

    LiteLLM and its imports are more than a million objects. A full collection looks at all of them, which stops
    everything for 500 to 700 ms whenever a request makes as many objects as a quarter of these (measured 2026-11-22
    with 40,000 messages). Objects that are passed over are still freed with their last reference.

    Called when the router is there, and again when models are prepared: the routes that FastAPI makes meanwhile, a
    listing and vocabularies were 225,000 more, which took 80 ms each time (2026-11-23).
    """
    gc.collect()
    gc.freeze()


def warn_of_bypass(settings: Settings) -> None:
    """Logs that the better carrier cannot be used, if LiteLLM is configured to bypass it."""
    if settings.carrier == "auto" and is_bypassed():
        logger.warning("carrier=hooks because %s is set: LiteLLM ignores the client that it is given", BYPASS_VARIABLE)


def warn_of_workers(model: str, admission: Literal["auto", "pool", "off"], parallel: int) -> None:
    """Logs that each of several workers without a common store reserves room in a shared context by itself."""
    # uvicorn starts workers as children of multiprocessing's only if there is more than one.
    if multiprocessing.parent_process() is not None and shares_context(admission, parallel):
        logger.warning("admission model=%s only within each worker: requests to it share one context", model)


def provide_master_key() -> None:
    """Makes a key if none is set, so that plain `litellm --config config.yaml` starts, and starts locked.

    LiteLLM refuses to start without a key. It reads `LITELLM_MASTER_KEY` after the callbacks are loaded, if
    `general_settings` is there and has no `master_key` of its own (proxy_server.py, 1.100.5 to 1.109.1).
    """
    general = _config().get("general_settings")
    if not isinstance(general, Mapping) or not general or "master_key" in general:
        return
    if not general.get("dangerously_permit_weak_or_unset_master_key"):
        made = ensure_master_key(os.environ)
        if made.path is not None:
            logger.warning("master_key file=%s clients must send the key in it; or set LITELLM_MASTER_KEY", made.path)


def provide_api_base() -> None:
    """Points `lm_studio/` deployments without an address at LM Studio's own port on this machine.

    LiteLLM would leave the OpenAI client at its default, and send conversations to that company's servers.
    """
    os.environ.setdefault("LM_STUDIO_API_BASE", DEFAULT_API_BASE)


def _config() -> Mapping[str, Any]:
    """The configuration that is being loaded; empty outside the proxy."""
    try:
        from litellm.proxy.proxy_server import proxy_config

        state = proxy_config.get_config_state()
    except (ImportError, AttributeError):
        return {}
    return state if isinstance(state, Mapping) else {}
