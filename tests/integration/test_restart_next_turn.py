"""The turn after an answer that was carried over the limit: its record is found again, and costs no model call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.builders import prose, tools
from tests.integration.restart_bench import LONG, Carrier, Restarting, Teller, asked, calls, shared
from tests.lmstudio_double import Reply

# Past one window of 4,096 tokens, and behind the cut short enough to fit beside the record.
_TEXT = LONG[: LONG.index("\n212.")]
_WANTED = calls("tool_0", words=40)


@pytest.fixture(scope="module")
def restarting(request: pytest.FixtureRequest, carrier: Carrier) -> Restarting:
    """The server has counted such texts before."""
    opened = shared(request, carrier)
    opened.watch("middle", Teller(Reply("So it does.")))
    for tokens in range(100, 1300, 100):
        assert opened.proxy.chat("middle", asked("what words cost", tokens)).status_code == 200
    return opened


@pytest.mark.parametrize(("stream", "made"), [(True, _WANTED), (False, [])], ids=["stream and call", "whole and text"])
def test_the_next_turn_begins_with_the_same_bytes(
    restarting: Restarting, stream: bool, made: list[tuple[str, str]]
) -> None:
    """What the client sends back, notices included, is found under the record: the prompt cache stays warm."""
    first = asked(f"next turn {stream} {len(made)}")
    watch = restarting.watch("middle", Teller(Reply(_TEXT, tool_calls=made)))
    options = {"tools": tools(1)}
    message = _streamed(restarting, first, options) if stream else _whole(restarting, first, options)
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())] == made
    assert len(watch.chats) == 2
    assert len(watch.summaries) == 1
    system, record, part, *_ = watch.sent()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "Done."} for call in message.get("tool_calls", ())
    ]
    second = [*first, message, *(results or [{"role": "user", "content": f"Go on. {prose('next', 20)}"}])]
    watch = restarting.watch("middle", Teller(Reply("It goes on.")))
    again = restarting.proxy.chat("middle", second, **options)
    assert again.json()["choices"][0]["message"]["content"] == "It goes on."
    assert watch.summaries == []
    sent = watch.sent()
    assert sent[:2] == [system, record]
    assert sent[2]["content"].startswith(part["content"].rstrip())
    assert _TEXT.endswith(sent[2]["content"])
    assert sent[2].get("tool_calls") == message.get("tool_calls")
    assert sent[3:] == second[3:]


def _streamed(restarting: Restarting, messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """The answer as a client that accumulates the stream sends it back."""
    answer = restarting.proxy.stream("middle", messages, **options)
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    fragments = [call for delta in answer.deltas for call in delta.get("tool_calls") or ()]
    ids = [call["id"] for call in fragments if call.get("id")]
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(ids, answer.calls, strict=True)
    ]
    return {**message, "tool_calls": made} if made else message


def _whole(restarting: Restarting, messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    message = restarting.proxy.chat("middle", messages, **options).json()["choices"][0]["message"]
    kept = {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}
    sent: dict[str, Any] = json.loads(json.dumps(kept))
    return sent
