"""What a client of a compacted answer reads: notices, one well-formed stream, headers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from litellm_compaction.simulator import Fault, Reply
from tests.builders import ONE_ROUND, answered, talk, tools
from tests.integration.bench import Bench, answers

NOTICE = "⚙️ Compacting conversation history...\n\n✅ Context compacted, continuing...\n\n"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}


def test_compacted_stream_opens_with_the_notice_once(guarded: Bench) -> None:
    """The notice is the first content of a compacted stream; the stream has one of everything that comes once."""
    guarded.watch("local", answers(reply=Reply("word1 word2 word3")))
    answer = guarded.proxy.stream("local", talk("stream", ONE_ROUND))
    assert answer.status == 200
    assert answer.text == NOTICE + "word1 word2 word3"
    contents = [delta["content"] for delta in answer.deltas if delta.get("content")]
    assert "".join(contents[:2]) == NOTICE
    assert [delta["role"] for delta in answer.deltas if delta.get("role")] == ["assistant"]
    assert answer.deltas[0].get("role") == "assistant"
    assert len({chunk["id"] for chunk in answer.chunks}) == 1
    assert len({chunk["created"] for chunk in answer.chunks}) == 1
    assert {chunk["model"] for chunk in answer.chunks} == {"local"}
    assert answer.finish_reasons == ["stop"]
    assert [line for line in answer.lines if line == "data: [DONE]"] == answer.lines[-1:]
    assert answer.usages == []


def test_reused_compaction_is_not_announced(guarded: Bench) -> None:
    """A stream that reuses a compaction carries the model's words only."""
    guarded.watch("local")
    messages = talk("quiet reuse", ONE_ROUND)
    assert guarded.proxy.stream("local", messages).text == NOTICE + "Understood."
    again = guarded.proxy.stream("local", answered(messages, NOTICE + "Understood.", "Go on."))
    assert again.text == "Understood."
    assert again.headers["x-litellm-compaction"] == "reused"


@pytest.mark.parametrize(
    "extra",
    [{"response_format": SCHEMA}, {"response_format": {"type": "json_object"}}, {"n": 2}],
    ids=["schema", "json", "two_choices"],
)
def test_structured_answers_carry_no_notice(guarded: Bench, extra: dict[str, Any]) -> None:
    """JSON mode, structured output and several choices stay free of notices."""
    guarded.watch("local", answers(reply=Reply('{"a": 1}')))
    answer = guarded.proxy.stream("local", talk(f"structured {extra}", ONE_ROUND), **extra)
    assert answer.headers["x-litellm-compaction"] == "compacted"
    assert json.loads(answer.text) == {"a": 1}


def test_tool_call_after_a_notice_is_whole(guarded: Bench) -> None:
    """A compacted stream that calls a tool gives the call once and whole, with its finish reason."""
    guarded.watch("local", answers(reply=Reply("", tool_calls=[("tool_0", '{"path": "a.txt"}')])))
    answer = guarded.proxy.stream("local", talk("calling", ONE_ROUND), tools=tools(2))
    calls = [call for delta in answer.deltas for call in delta.get("tool_calls") or ()]
    assert [call["function"]["name"] for call in calls if call["function"].get("name")] == ["tool_0"]
    assert "".join(call["function"].get("arguments") or "" for call in calls) == '{"path": "a.txt"}'
    assert answer.finish_reasons == ["tool_calls"]
    assert [delta["role"] for delta in answer.deltas if delta.get("role")] == ["assistant"]


def test_reasoning_stream_keeps_its_reasoning(guarded: Bench) -> None:
    """Reasoning deltas of a compacted stream arrive complete, and the notice does not mix into them."""
    guarded.watch("local", answers(reply=Reply("Four.", reasoning="Two and two.")))
    answer = guarded.proxy.stream("local", talk("thinking", ONE_ROUND))
    assert (answer.reasoning, answer.text) == ("Two and two.", NOTICE + "Four.")


def test_notices_off(permissive: Bench) -> None:
    """With `notices: off` a compacted stream carries the model's words only, and still says so in a header."""
    permissive.watch("local")
    answer = permissive.proxy.stream("local", talk("off", ONE_ROUND))
    assert answer.headers["x-litellm-compaction"] == "compacted"
    assert (answer.text, answer.reasoning) == ("Understood.", "")


def test_notices_as_reasoning(patient: Bench) -> None:
    """With `notices: reasoning` the notice is the first reasoning delta and the content stays clean."""
    patient.watch("local")
    answer = patient.proxy.stream("local", talk("as reasoning", ONE_ROUND))
    assert (answer.text, answer.reasoning) == ("Understood.", NOTICE)
    assert [delta["role"] for delta in answer.deltas if delta.get("role")] == ["assistant"]


@pytest.mark.parametrize("stream", [False, True])
def test_headers_say_what_was_done(guarded: Bench, stream: bool) -> None:
    """Headers tell none, compacted, then reused, with tokens before and after, the window and the round."""
    watch = guarded.watch("local")
    messages = talk(f"headers {stream}", ONE_ROUND)
    seen = []
    for sent in (messages[:3], messages, messages):
        body = {"model": "local", "messages": sent, "stream": stream}
        headers = guarded.proxy.post(body).headers
        prefix = "x-litellm-compaction"
        seen.append((headers[prefix], headers[f"{prefix}-round"]))
        before, after = int(headers[f"{prefix}-tokens-before"]), int(headers[f"{prefix}-tokens-after"])
        assert headers[f"{prefix}-window"] == "8192"
        assert (after < before) == (headers[prefix] != "none")
        if stream and headers[prefix] == "compacted":
            # The headers go out before the summary is written: an upper bound.
            assert watch.chats[-1].prompt_tokens <= after
        else:
            assert after == pytest.approx(watch.chats[-1].prompt_tokens, rel=0.3, abs=30)
    assert seen == [("none", "0"), ("compacted", "1"), ("reused", "1")]


def test_unguarded_answers_carry_no_header(guarded: Bench) -> None:
    """Deployments that are left alone do not even get a header."""
    for group in ("plain", "off", "observed"):
        answer = guarded.proxy.chat(group, talk("bare", 500))
        assert [name for name in answer.headers if "x-litellm-compaction" in name] == []


def test_openai_client_reads_a_compacted_stream(guarded: Bench) -> None:
    """The official client is a program: its text is the model's, byte for byte, and the notice a thought before it."""
    guarded.watch("local", answers(reply=Reply("word1 word2")))
    with openai.OpenAI(base_url=f"{guarded.proxy.base_url}/v1", api_key=guarded.proxy.key, max_retries=0) as client:
        text, reasons, thoughts = "", [], ""
        with client.chat.completions.create(model="local", messages=talk("sync", ONE_ROUND), stream=True) as stream:  # type: ignore[arg-type]
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                thoughts += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
                reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        whole = client.chat.completions.create(model="local", messages=talk("sync", ONE_ROUND))  # type: ignore[arg-type]
    assert (text, thoughts, reasons) == ("word1 word2", NOTICE, ["stop"])
    assert whole.choices[0].message.content == "word1 word2"


async def test_async_openai_client_reads_a_compacted_stream(guarded: Bench) -> None:
    """The asynchronous client too, with the usage that it asks for; and an error as its own class."""
    guarded.watch("local", answers(reply=Reply("word1 word2")))
    base_url = f"{guarded.proxy.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=guarded.proxy.key, max_retries=0) as client:
        text, usages = "", []
        stream = await client.chat.completions.create(
            model="local",
            messages=talk("async", ONE_ROUND),  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
        async with stream:
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usages += [chunk.usage] if chunk.usage else []
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
            await client.chat.completions.create(
                model="local",
                messages=[{"role": "user", "content": "word " * 9000}],
                stream=True,
            )
    assert text == "word1 word2"
    assert len(usages) == 1


def test_error_inside_a_compacted_stream_reaches_the_client(guarded: Bench) -> None:
    """A stream that breaks in the middle ends with an error event, not with a regular end."""
    broken = Reply("word " * 40, fault=Fault("error_event", "mid_text", message="generation failed"))
    guarded.watch("local", answers(reply=broken))
    answer = guarded.proxy.stream("local", talk("broken", ONE_ROUND))
    assert answer.finish_reasons == []
    assert [chunk for chunk in answer.chunks if "error" in chunk]
