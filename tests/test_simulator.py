"""The simulator that `up` and `demo` serve, and the double that adds LM Studio's protocol to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import httpx
import pytest

from litellm_compaction import simulator
from tests import lmstudio_double
from tests.builders import user
from tests.lmstudio_double import Model, Reply, numbered_words

KEY = "qwen/qwen3-8b"
HELLO = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


@contextmanager
def serving(module: ModuleType, context_length: int, *more: Any) -> Iterator[tuple[Any, httpx.Client]]:
    """A simulator of a module, with one model loaded, and a client for it."""
    made = module.Simulator([module.Model(KEY), *more])
    made.load(KEY, context_length)
    with module.serve(made) as address, httpx.Client(base_url=address.base_url, timeout=60) as client:
        yield made, client


def said(client: httpx.Client, *messages: dict[str, Any], **fields: Any) -> str:
    """The whole answer to a chat."""
    answer = client.post("/v1/chat/completions", json={"model": KEY, "messages": messages, **fields})
    assert answer.status_code == 200
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("module", [simulator, lmstudio_double], ids=["simulator", "double"])
@pytest.mark.parametrize("chunk_tokens", [1, 7])
def test_a_stream_is_the_text_in_small_pieces(module: ModuleType, chunk_tokens: int) -> None:
    """Chunks of the configured size join to exactly the text, characters of several tokens included."""
    text = "Zażółć 🎉🏳️‍🌈 gęślą — 漢字仮名 " + numbered_words(30)
    with serving(module, 8192) as (served, client):
        served.chunk_tokens, served.script = chunk_tokens, lambda call: Reply(text)
        body = {"model": KEY, "messages": [user("go")], "stream": True}
        *events, end = client.post("/v1/chat/completions", json=body).text.strip().split("\n\n")
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert (end, served.requests[-1].content) == ("data: [DONE]", text)


@pytest.mark.parametrize("module", [simulator, lmstudio_double], ids=["simulator", "double"])
def test_a_request_for_a_summary_gets_one_of_what_was_shown(module: ModuleType) -> None:
    """Behind the conversation, or with a transcript of it; a newcomer's log has no junk, and says nothing of it."""
    transcript = "You write the record.\n\nCONVERSATION TO CONDENSE:\nUSER:\nThe port is 4812.\n\nASSISTANT:\nFine."
    with serving(module, 8192) as (_, client):
        behind = said(client, user("The port is 4812."), user("You write the record of a conversation."))
        assert behind == said(client, user(transcript)) == "### What the user said\n- The port is 4812."


def test_the_simulator_drops_the_oldest_and_keeps_what_it_has_read() -> None:
    """Silently; of the next turn only the new part is computed."""
    with serving(simulator, 1000) as (served, client):
        said(client, user("You are terse."), *[user(f"Go on {turn}. " + "gamma " * 60) for turn in range(20)])
        last = served.requests[-1]
        assert (last.truncated, last.outcome, last.kept_tokens <= 875 < last.prompt_tokens) == (True, "ok", True)
        assert ("You are terse." in last.seen_text, "Go on 19." in last.seen_text) == (False, True)
        asked = user("One. " * 50)
        said(client, asked, {"role": "assistant", "content": said(client, asked)}, user("Two."))
        assert served.requests[-1].cached_tokens > served.requests[-1].computed_tokens


async def test_the_official_client_lists_measures_and_counts() -> None:
    """List, template with tools and count, by `lmstudio` from PyPI; nothing is loaded."""
    lmstudio = pytest.importorskip("lmstudio", reason="LM Studio's client is not installed")
    with serving(lmstudio_double, 6000, Model("google/gemma-3-4b")) as (served, http):
        async with lmstudio.AsyncClient(str(http.base_url).removeprefix("http://").rstrip("/")) as client:
            [model] = await client.llm.list_loaded()
            formatted = await model.apply_prompt_template(HELLO, {"toolDefinitions": [READ]})
            assert formatted.endswith("<|im_start|>assistant\n")
            assert all(part in formatted for part in ("# Tools", '"name": "read"'))
            tokens = await model.count_tokens(formatted)
        said(http, user("hello"), tools=[READ])
        assert tokens == served.requests[-1].prompt_tokens
        assert (served.sdk.faults(), [instance.id for instance in served.instances]) == ([], [KEY])
