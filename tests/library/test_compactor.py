"""The object for an agent loop, and the window that it is given."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from litellm_compaction import Compactor, SummaryFailed, WindowUnknown, compact, count_tokens, loaded_window
from tests.builders import chat
from tests.library.scripted import FakeCompletion, config
from tests.windows.fake_lmstudio import BASE, FakeLMStudio, v1_model


async def test_a_compactor_acts_above_the_trigger_alone() -> None:
    """Below it the messages come back and no model is asked; tools count; above it the result is that of `compact`."""
    completions = FakeCompletion()
    raw = chat(20)
    tokens = await count_tokens(raw, model="qwen/qwen3-8b")
    settled = config(context_window_tokens=tokens, trigger_ratio=1.0)
    compactor = Compactor(settled, completions)
    done = await compactor(raw)
    assert (done.messages, done.compacted, done.reason) == (raw, False, "below_trigger")
    assert done.tokens_before == done.tokens_after == tokens
    assert completions.asked == []
    tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    done = await compactor(raw, tools=tools)
    assert (done.compacted, len(completions.asked)) == (True, 1)
    assert done == await compact(raw, settled, FakeCompletion(), tools=tools)


async def test_a_compactor_never_raises() -> None:
    """An agent goes on with what it has, and can see why."""
    bad: list[Any] = [{"content": "no role"}]
    assert (await Compactor(config(), FakeCompletion())(bad)).reason == "error"
    compactor = Compactor(config(context_window_tokens=4096), FakeCompletion([ConnectionError("secret words")]))
    done = await compactor(chat(20))
    assert (done.messages, done.reason, type(done.error)) == (chat(20), "error", SummaryFailed)
    assert "secret" not in repr(compactor)


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
