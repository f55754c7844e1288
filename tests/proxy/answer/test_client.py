"""Who is told of a compaction, and where."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.proxy.answer.client import SILENT, Notices, notices_for

CHROME = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 Safari/537.36"
IN_TEXT = Notices("content", "content", "content")
THOUGHT = Notices("reasoning", "off", "reasoning")


def _body(
    route: str = "/v1/chat/completions", headers: Any = None, *, key: Any = None, team: Any = None, **extra: Any
) -> dict[str, Any]:
    metadata = {
        "user_api_key": "hash",
        "user_api_key_request_route": route,
        "user_api_key_metadata": {} if key is None else {"compaction": key},
        "user_api_key_team_metadata": {} if team is None else {"compaction": team},
    }
    return {"stream": True, "metadata": metadata, "proxy_server_request": {"headers": headers or {}}, **extra}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (_body(), THOUGHT),
        (_body("/openai/deployments/local/chat/completions"), THOUGHT),
        (_body(stream=False), THOUGHT),
        (_body(headers={"user-agent": CHROME}, stream=False), THOUGHT),
        # Thoughts would be the first block of it, where programs look for the text.
        (_body("/v1/messages", stream=False), SILENT),
        (_body("/v1/messages"), THOUGHT),
        (_body("/v1/responses"), SILENT),
        (_body(merge_reasoning_content_in_choices=True), SILENT),
        (_body(headers={"user-agent": CHROME}), IN_TEXT),
        (_body(headers={"user-agent": f"{CHROME} Code/1.107.0 Electron/39.2.0"}), THOUGHT),
        (_body(headers={"user-agent": "OpenAI/Python 3.3.0", "X-OpenWebUI-Chat-Id": "c1"}), IN_TEXT),
        (_body("/v1/responses", headers={"x-openwebui-user-id": "1"}), IN_TEXT),
        (_body(key={"notices": "content"}), IN_TEXT),
        (_body(key={"notices": "off"}, team={"notices": "content"}), SILENT),
        (_body(key={"notices": "loud"}, team={"notices": "content"}), IN_TEXT),
        ({"litellm_metadata": _body("/v1/messages")["metadata"], "stream": True}, THOUGHT),
        ({"proxy_server_request": {"headers": None}, "metadata": None}, SILENT),
    ],
)
def test_auto_goes_by_client_owner_and_route(body: dict[str, Any], expected: Notices) -> None:
    """People read of it in the text; programs in a thought before the answer, where the route has thoughts."""
    assert notices_for("auto", body) == expected
