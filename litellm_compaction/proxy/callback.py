"""The CustomLogger that `config.yaml` names: every hook of LiteLLM that we use, and no logic.

LiteLLM calls the pre-call, iterator and header hooks only when the instance's own class body defines them
(utils.py: `vars(cls)`), so they all stand here, and this class is never subclassed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from litellm_compaction.concurrency import hold_contexts
from litellm_compaction.config import Settings
from litellm_compaction.errors import CompactionError
from litellm_compaction.events import HarmlessRecords
from litellm_compaction.proxy.client import note_credential, raw_headers
from litellm_compaction.proxy.exchange import note_of, serve
from litellm_compaction.proxy.litellm_inside import check_classes, current_router
from litellm_compaction.proxy.refusals import Refusal, log_failure, log_refused
from litellm_compaction.proxy.service import Service, load_settings, provide_environment

logger = logging.getLogger("litellm_compaction")
_harmless = HarmlessRecords()


def load_handler() -> CompactionHandler:
    """The handler with the settings of the configuration that LiteLLM is loading.

    A ConfigError (a setting is unknown or bad) or LiteLLMChanged (it would not call us) keeps LiteLLM from starting.
    """
    logger.addFilter(_harmless)
    if not logger.handlers:
        # LiteLLM configures its own loggers only; ours would have no format, and lines of compactions no place.
        output = logging.StreamHandler()
        output.setFormatter(logging.Formatter("%(asctime)s - %(name)s:%(levelname)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(output)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    check_classes(name for name in vars(CompactionHandler) if name.startswith("async_"))
    hold_contexts()
    provide_environment()
    handler = CompactionHandler(load_settings())
    handler.service.start()
    return handler


class CompactionHandler(CustomLogger):  # type: ignore[misc] # LiteLLM is not typed strictly enough to check
    """Guards LM Studio deployments of a stock LiteLLM proxy."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.service = Service(settings)

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any] | None:
        """Phase 1 and 2 before a request is routed, if its window is already certain: measured, decided or refused."""
        if self.service.live.is_asleep:
            return None
        serve(data)
        note_credential(raw_headers(data))
        try:
            await self.service.guard.before_routing(current_router(), data, call_type)
        except CompactionError as error:
            note_of(data).close()
            log_refused(str(data.get("model")), error)
            raise Refusal(error) from error
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            log_failure("pre_call", error)
        return None

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:
        """Phase 1 and 2 for the chosen deployment: its own window, its own bound on the answer."""
        if self.service.live.is_asleep:
            return None
        # LiteLLM names no kind for some calls.
        kind = str(getattr(call_type, "value", call_type) or "")
        return await self.service.guard.before_deployment(current_router(), kwargs, kind)

    def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Phase 3 if the hooks carry it, and a heartbeat while a compaction keeps any stream silent."""
        return self.service.guard.streamed(response, request_data)

    async def async_post_call_success_hook(self, data: dict[str, Any], user_api_key_dict: Any, response: Any) -> Any:
        """Learns from an answer that was not streamed, and tells if the window has ended it."""
        return await self.service.guard.whole(response, data)

    async def async_post_call_failure_hook(
        self, request_data: dict[str, Any], original_exception: Exception, *_: Any, **__: Any
    ) -> Refusal | None:
        """Learns from an overflow that came in spite of us, and words the error for clients."""
        return self.service.guard.failed(request_data, original_exception)

    async def async_post_call_response_headers_hook(
        self, data: dict[str, Any], *_: Any, **__: Any
    ) -> dict[str, str] | None:
        """Tells clients of guarded deployments about the changes to their request."""
        return self.service.guard.headers(data)
