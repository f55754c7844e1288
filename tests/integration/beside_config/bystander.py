"""A second callback with an iterator hook, as plug-ins that watch or mask streams have one; it changes nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from litellm.integrations.custom_logger import CustomLogger


class Bystander(CustomLogger):
    """Hands every chunk on."""

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        async for chunk in response:
            yield chunk


handler = Bystander()
