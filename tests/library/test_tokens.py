"""Sizes of anything that a caller may hold, estimated or counted, and the window that is loaded."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction import (
    WindowUnknown,
    estimate_messages_tokens,
    estimate_tokens,
    loaded_window,
    should_compact,
)
from tests.builders import assistant, calls, image, system, user
from tests.library.scripted import config
from tests.windows.fake_lmstudio import BASE, FakeLMStudio, v1_model


def test_tool_parts_count_by_their_texts() -> None:
    """As Vercel's AI SDK writes calls and results; a picture still costs what a large one does."""
    call = {"type": "tool-call", "toolCallId": "a", "toolName": "read", "args": {"path": "a.py"}}
    result = {"type": "tool-result", "toolCallId": "a", "result": "line " * 100}
    assert estimate_messages_tokens([{"role": "assistant", "content": [call]}]) < 40
    assert 125 <= estimate_messages_tokens([{"role": "user", "content": [result]}]) < 160
    assert estimate_messages_tokens([{"role": "user", "content": [{"type": "image_url"}]}]) >= 1200


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        (v1_model(a=4096), 4096),
        (v1_model(), "load it"),
        (v1_model("another", a=4096), "correct `model`"),
        (None, "correct `api_base`"),
    ],
)
async def test_the_window_that_is_loaded(listed: dict[str, object] | None, told: int | str) -> None:
    """The number of LM Studio's own API; else an error that says what to change, without the key."""
    server = FakeLMStudio(down=httpx.ConnectError("refused") if listed is None else None)
    if listed is not None:
        server.list_v1(listed)
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.handle)) as http:
        if isinstance(told, int):
            assert await loaded_window("qwen/qwen3-8b", api_base=BASE, http=http) == told
            return
        with pytest.raises(WindowUnknown, match="qwen/qwen3-8b") as failed:
            await loaded_window("qwen/qwen3-8b", api_base=BASE, api_key="sk-secret", http=http)
    assert told in str(failed.value)
    assert "sk-secret" not in str(failed.value)


async def test_a_client_of_our_own_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that asks before each step would run out of sockets; a client that it gave stays open."""
    server = FakeLMStudio()
    server.list_v1(v1_model(a=4096))
    made: list[httpx.AsyncClient] = []

    class Client(httpx.AsyncClient):
        def __init__(self, **options: object) -> None:
            super().__init__(transport=httpx.MockTransport(server.handle))
            made.append(self)

    monkeypatch.setattr(httpx, "AsyncClient", Client)
    assert await loaded_window("qwen/qwen3-8b", api_base=BASE) == 4096
    async with Client() as given:
        await loaded_window("qwen/qwen3-8b", api_base=BASE, http=given)
        assert [client.is_closed for client in made] == [True, False]


@given(st.text(max_size=50))
def test_a_token_is_four_characters(text: str) -> None:
    """Rounded up."""
    assert 4 * (estimate_tokens(text) - 1) < max(len(text), 1) <= 4 * max(estimate_tokens(text), 1)


def test_messages_are_estimated_by_what_they_say() -> None:
    """Role, text, reasoning, names and arguments of calls; a fixed size for what is not text."""
    assert estimate_messages_tokens([]) == 0
    assert estimate_messages_tokens([user("a" * 401), system("b" * 4)]) == 102 + 3
    assert estimate_messages_tokens([calls("1", name="run", arguments="12345")]) == 5
    assert estimate_messages_tokens([{**assistant("a" * 4), "reasoning_content": "b" * 4}]) == 5
    assert estimate_messages_tokens([{"role": "user", "content": [image()]}]) == 1200 + 1


@pytest.mark.parametrize(("tokens", "expected"), [(None, True), (13_107, False), (13_108, True), (0, False)])
def test_the_trigger(tokens: int | None, expected: bool) -> None:
    """80 % of the window, by the estimate or by the number that the caller knows."""
    assert should_compact([user("a" * 4 * 13_108)], config(), tokens=tokens) is expected
