"""A second callback as an operator may have one: it writes what LiteLLM tells it, one JSON line per row to bill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

_FILE = Path(os.environ.get("RECORDER_FILE", "events.jsonl"))


class Recorder(CustomLogger):
    """Records who pays how many tokens for which call, and everything that metadata holds."""

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self._write("success", kwargs, response_obj)

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self._write("failure", kwargs, response_obj)

    def _write(self, event: str, kwargs: Any, response_obj: Any) -> None:
        params = kwargs.get("litellm_params") or {}
        metadata = {**(params.get("litellm_metadata") or {}), **(params.get("metadata") or {})}
        usage = getattr(response_obj, "usage", None)
        messages = kwargs.get("messages") or []
        row = {
            "event": event,
            "call_id": kwargs.get("litellm_call_id"),
            "messages": len(messages) if isinstance(messages, list) else 0,
            "max_tokens": (kwargs.get("optional_params") or {}).get("max_tokens"),
            "opening": str(messages[0].get("content"))[:40] if messages and isinstance(messages, list) else "",
            "identity": {
                name: metadata.get(f"user_api_key_{name}") for name in ("hash", "user_id", "team_id", "end_user_id")
            },
            "model_group": metadata.get("model_group"),
            "tags": metadata.get("tags"),
            "metadata_keys": sorted(metadata),
            "metadata": repr(metadata),
            "prompt_tokens": getattr(usage, "prompt_tokens", None),
            "completion_tokens": getattr(usage, "completion_tokens", None),
        }
        with _FILE.open("a") as file:
            file.write(json.dumps(row) + "\n")


handler = Recorder()
