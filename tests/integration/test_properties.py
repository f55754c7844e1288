"""Two properties of a proxy before its servers: whatever the conversation or the body is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import agent_conversations, raw_conversations, talk
from tests.integration.bench import Bench, Group, answers, open_bench
from tests.integration.harness import CHAT
from tests.lmstudio_double import Reply

_FACTORS = (0.7, 1.0, 1.4, 2.0)
_GUARDED = [
    Group(f"any-{window}-{factor}-{speaks}", window, factor=factor, speaks=speaks)
    for window in (4096, 8192)
    for factor in _FACTORS
    for speaks in (True, False)
]
_HELD = Group("held", 4096)
# Each example is a request or more.
_SOME = settings(max_examples=max(8, settings().max_examples // 5))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Servers that count otherwise than we do, with and without LM Studio's own protocol."""
    folder = tmp_path_factory.mktemp("properties")
    with open_bench(folder, [*_GUARDED, _HELD], {}) as opened:
        yield opened


def _without_pictures(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a model that reads text only has them: it refuses others, where its stand-in charges as any other's."""
    texts = [
        {**each, "content": [part for part in each["content"] if part["type"] == "text"]}
        if isinstance(each.get("content"), list)
        else each
        for each in messages
    ]
    return [each for each in texts if each["content"] != []]


@_SOME
@given(
    messages=(raw_conversations(repeats=200) | agent_conversations()).map(_without_pictures),
    group=st.sampled_from(_GUARDED),
    stream=st.booleans(),
)
def test_any_conversation_fits_and_keeps_what_is_protected(
    bench: Bench, messages: list[dict[str, Any]], group: Group, stream: bool
) -> None:
    """P1, P2, P3 at the server, at any window, whatever its tokenizer counts; what cannot fit is refused unsent."""
    watch = bench.watch(group.name)
    body = {"model": group.name, "messages": messages, "stream": stream}
    answer = bench.proxy.post_bytes(json.dumps(body).encode())
    assert bench.findings() == []
    if answer.status_code != 200:
        assert answer.status_code == 400, answer.text
        said = answer.json()["error"]["message"]
        # Half a character is no text, by LiteLLM.
        assert "maximum context length" in said or "low surrogate" in said
        assert watch.chats == []
    elif answer.headers["x-litellm-compaction"] in ("compacted", "reused"):
        assert watch.problems(messages) == []


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 1 << 40),
    st.sampled_from(["", "off", "none", "lm_studio/x", "http://127.0.0.1:9/v1", "auto"]),
    st.sampled_from([[], {}, {"compaction": "off"}, {"enabled": False}, [{"type": "text", "text": "x"}]]),
)
# Fields that LiteLLM, its router or a hook might read.
_FIELDS = (
    *("max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "metadata", "litellm_metadata", "user"),
    *("client", "api_base", "base_url", "custom_llm_provider", "model_info", "mock_response", "mock_timeout"),
    *("fallbacks", "context_window_fallbacks", "num_retries", "timeout", "extra_body", "extra_headers", "headers"),
    *("caching", "cache", "tags", "no-log", "litellm_call_id", "litellm_logging_obj", "litellm_params", "guardrails"),
    *("prompt_id", "preset_cache_key", "use_chat_completions_api", "compaction", "context_management", "truncation"),
    *("temperature", "logit_bias", "tool_choice", "tools", "functions", "response_format", "modalities", "prediction"),
)


@_SOME
@given(fields=st.dictionaries(st.sampled_from(_FIELDS), _VALUES, min_size=1, max_size=4))
def test_no_field_of_a_request_opens_the_guard(bench: Bench, fields: dict[str, Any]) -> None:
    """Whatever a client adds, nothing over the window leaves, and a request that is served was guarded."""
    watch = bench.watch(_HELD.name, answers(reply=Reply("Understood.")))
    body = {"model": _HELD.name, "messages": talk("fields", 6000), **fields}
    answer = bench.proxy.post_bytes(json.dumps(body).encode(), CHAT)
    assert bench.findings() == []
    if answer.status_code == 200 and watch.chats:
        assert answer.headers.get("x-litellm-compaction") in ("compacted", "reused"), answer.text[:300]
