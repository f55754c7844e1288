"""What a real llama.cpp says when our own question is put to it: the number that its chat completions have."""

from __future__ import annotations

from typing import Any

import httpx

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.models.window import Target, Windows
from tests.real_engine.bench import Bench

_LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_SYSTEM = {"role": "system", "content": "Answer in one word. Größe, 日本語, 👩‍👩‍👧."}
_USER = {"role": "user", "content": 'def f(x):\n\treturn {"a": [x, 1.5e-3]}  # <|im_end|> of a text\n\n\n'}
_ROUND = [
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"path": "/srv/a b"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "part-00017.parquet 9f86d081884c7d659a2feaa0c55ad015"},
]
_REQUESTS: list[tuple[list[dict[str, Any]], tuple[Any, ...]]] = [
    ([_USER], ()),
    ([_SYSTEM, _USER], ()),
    ([_SYSTEM, _USER], (_LOOK,)),
    ([_SYSTEM, _USER, *_ROUND], (_LOOK,)),
]


async def test_llama_cpps_tokenizer_says_what_its_answers_report(bench: Bench) -> None:
    """By /apply-template and /tokenize, without a token generated: with tools, calls and results, any text."""
    base_url = bench.engines["talk"].base_url
    target = Target(
        key="k",
        model="smollm2",
        api_base=f"{base_url}/v1",
        api_key=None,
        context_length=None,
        is_lmstudio=False,
        apis=("llama.cpp",),
    )
    windows = Windows(cache_s=600)
    told: list[int | None] = []
    reported: list[int] = []
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as engine:
        assert (await windows.resolve(target)).tokens == bench.engines["talk"].window_tokens
        for messages, tools in _REQUESTS:
            told.append(
                await windows.tokens_of(target, Request(messages=tuple(map(parse_message, messages)), tools=tools))
            )
            asked = {"messages": messages, "max_tokens": 1, **({"tools": list(tools)} if tools else {})}
            answer = await engine.post("/v1/chat/completions", json=asked)
            reported.append(answer.json()["usage"]["prompt_tokens"])
        await windows.aclose()
    assert told == reported
