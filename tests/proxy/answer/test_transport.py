"""The transport below LiteLLM's client: a server is asked for what the client wants, a stream or a whole answer."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from functools import cache, partial
from typing import Any, cast

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI
from openai.types.chat import ChatCompletionMessage

from litellm_compaction.errors import DoesNotFit
from litellm_compaction.proxy.answer.transport import client_over
from litellm_compaction.proxy.wire import to_json
from tests.lmstudio_double import numbered_words
from tests.proxy.answer.wired import SHORT, USAGE, USAGE_CHUNK, Body, Wire, choice_of, chunk, sse, text_of, whole


async def test_server_that_ignores_stream_is_understood() -> None:
    """One JSON in spite of `stream: true`: a stream is made of it."""
    call = {"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    message = {"content": "I look.", "tool_calls": [call]}
    wire = Wire([lambda: whole(message, "tool_calls")])
    answer = await wire.ask(stream=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    assert [delta["tool_calls"][0]["id"] for delta in deltas if delta.get("tool_calls")] == ["a"]


@pytest.mark.parametrize("kind", ["Text/Event-Stream", "text/plain; charset=utf-8", "application/x-ndjson", ""])
async def test_an_answer_is_read_whatever_its_type_is_called(kind: str) -> None:
    """OpenAI's client does not look at it; nor is all in one piece lost."""
    for answer in (sse(chunk({"content": "Fine."}), chunk({}, "stop")), whole({"content": "Fine."})):
        answer.headers["content-type"] = kind
        assert text_of(await Wire([lambda answer=answer: answer]).ask(stream=True)) == "Fine."


async def test_server_that_refuses_stream_options_is_asked_without() -> None:
    """Asked again; the usage is then counted here."""
    refusal = httpx.Response(400, json={"error": {"message": "Unknown parameter: stream_options"}})
    answered = [chunk({"content": "Fine."}), chunk({}, "stop")]
    wire = Wire([lambda: refusal, lambda: sse(*answered, status=201)])
    answer = await wire.ask(stream=True)
    assert (text_of(answer), '"prompt_tokens"' in answer.text) == ("Fine.", True)
    assert ["stream_options" in sent for sent in wire.sent] == [True, False]


@pytest.mark.parametrize("stream", [True, False])
async def test_other_refusals_keep_their_status_and_body(stream: bool) -> None:
    """What the server says of a request that we did not cause goes on unchanged, asked once."""
    body = {"error": {"message": "the upstream model has no chat template"}}
    wire = Wire([lambda: httpx.Response(422, json=body)])
    answer = await wire.ask(stream=stream)
    assert (answer.status_code, answer.json(), len(wire.sent)) == (422, body, 1)


@pytest.mark.parametrize("options", [{"n": 2}, {"logprobs": True}])
async def test_what_cannot_be_joined_is_asked_for_as_the_client_did(options: Body) -> None:
    """Several choices and log probabilities: the server's own answer, whole."""
    wire = Wire([lambda: whole({"content": "Fine."})])
    answer = await wire.ask(**options)
    assert answer.json() == whole({"content": "Fine."}).json()
    assert "stream" not in wire.sent[0]


async def test_a_whole_answer_has_as_many_log_probabilities_as_were_asked_for() -> None:
    """Those of 2,500 tokens, and not one of a server that writes them without having been asked."""
    one = {"token": " x", "logprob": -0.123456, "bytes": [32, 120]}
    said = {"content": [{**one, "top_logprobs": [one] * 20}] * 2500}
    body = {"choices": [{"message": {"content": "x"}, "logprobs": said}]}
    for options, status in (({"logprobs": True, "top_logprobs": 20}, 201), ({"n": 2}, 502)):
        wire = Wire([lambda: httpx.Response(201, json=body)], window_tokens=8192)
        assert (await wire.ask(**options)).status_code == status


def folded(body: bytes, encoding: str = "gzip", content_type: str = "application/json") -> httpx.Response:
    """A body that says how it is compressed."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 64 * 1024):
            yield body[start : start + 64 * 1024]

    return httpx.Response(200, headers={"content-encoding": encoding, "content-type": content_type}, content=pieces())


ANSWER = json.dumps({"choices": [{"message": {"content": "One"}}], "usage": USAGE}).encode()


@cache
def bomb_bytes() -> bytes:
    """A hundred million spaces, folded."""
    return gzip.compress(b" " * 100_000_000)


BOMBS = {
    "whole": lambda: folded(bomb_bytes()),
    "stream": lambda: folded(bomb_bytes(), content_type="text/event-stream"),
    "twice": lambda: folded(gzip.compress(bomb_bytes()), "gzip, gzip"),
    "br": lambda: folded(bomb_bytes(), "br"),
    "no gzip": lambda: folded(ANSWER),
    "no gzip, stream": lambda: folded(ANSWER, content_type="text/event-stream"),
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("bomb", BOMBS)
async def test_answer_that_unfolds_without_end_is_not_read(bomb: str, stream: bool) -> None:
    """200 kB that become 200 MB cost 27.8 s of processor time; now no more than the answer may have is unfolded."""
    wire = Wire([BOMBS[bomb]])
    bomb_bytes()  # so that folding is no part of what is measured
    tracemalloc.start()
    try:
        answer = await wire.ask(**({"stream": True} if stream else {}))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code == 502
    assert "The model's server cannot be understood" in answer.json()["error"]["message"]
    assert most_bytes < 80 * 2**20
    assert len(wire.sent) == 1


async def test_compressed_answer_is_read() -> None:
    """As the server was told that it may."""
    wire = Wire([lambda: folded(gzip.compress(ANSWER))])
    assert choice_of(await wire.ask())["message"]["content"] == "One"
    assert wire.headers[-1]["accept-encoding"] == "gzip, deflate"


_LONG = {"message": "broken " * 300_000, "type": "server_error"}
_OVERFLOW = f"Context size has been exceeded. {_LONG['message']}"
# (what the client asks for beside its messages, what its server says).
_LONG_ERRORS: dict[str, tuple[Body, Callable[[], httpx.Response]]] = {
    "an error": ({}, lambda: httpx.Response(500, json={"error": _LONG})),
    "an error of a stream": ({"stream": True}, lambda: httpx.Response(400, json={"error": _LONG})),
    "a first event": ({"stream": True}, lambda: sse({"error": _LONG})),
    "an overflow as an event": ({"stream": True}, lambda: sse({"error": {**_LONG, "message": _OVERFLOW}})),
    "no answer inside a 200": ({}, lambda: httpx.Response(200, json={"error": _LONG})),
    "an error, several answers": ({"n": 2}, lambda: httpx.Response(500, json={"error": _LONG})),
    "an error of a stream of several": ({"n": 2, "stream": True}, lambda: httpx.Response(500, json={"error": _LONG})),
    "no answer inside a 200, several": ({"n": 2}, lambda: httpx.Response(200, json={"error": _LONG})),
    "an event of several answers": ({"n": 2, "stream": True}, lambda: sse({"error": _LONG}, done=False)),
    "packed, several answers": ({"n": 2}, lambda: folded(gzip.compress(json.dumps({"error": _LONG}).encode()))),
}


@pytest.mark.parametrize("error", _LONG_ERRORS)
async def test_no_way_gives_litellm_a_long_error(error: str) -> None:
    """It looks through an error's text some ten times on the event loop, 10 s for a megabyte."""
    body, answer = _LONG_ERRORS[error]
    told = await Wire([answer]).ask(**body)
    assert 0 < len(told.content) < 33 * 1024
    assert "broken" in told.text


async def test_an_error_behind_a_word_is_litellms_own_and_short() -> None:
    """LiteLLM puts it into the stream."""
    with pytest.raises(APIStatusError) as raised:
        await Wire([lambda: sse(chunk({"content": "So"}), {"error": _LONG})]).ask(stream=True)
    assert (raised.value.status_code, len(raised.value.message)) == (500, 500)


_NONE = [whole({"content": "The patient is ill. " * 9}).content[:150]]
_NONE += [json.dumps(each).encode() for each in ({"id": "c", "choices": [], "answer": "ill"}, {"choices": [7]}, "ill")]


@pytest.mark.parametrize("options", [{}, {"n": 2}], ids=["carried", "passed on"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_a_choice_is_none(options: Body, stream: bool) -> None:
    """In either form, whoever reads it: LiteLLM would take it for an empty answer. What it says is in no error."""
    wholes = [lambda said=said: httpx.Response(200, content=said) for said in (*_NONE, b"null")]
    page = httpx.Response(200, content=b"<p>ill</p>")
    for answered in [sse, lambda: sse({"answer": "ill" * 20_000}), lambda: page] if stream else wholes:
        answer = await Wire([answered]).ask(stream=stream, **options)
        assert (answer.status_code, "understood" in answer.text, "ill" in answer.text) == (502, True, False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["stop", None])
async def test_an_answer_that_says_nothing_has_an_end_or_is_none(reason: Any, stream: bool) -> None:
    """One rule for both forms: nothing may have been said, if the server says that this is all."""
    wire = Wire([lambda: sse(chunk({}, reason)) if stream else whole({"content": ""}, reason)])
    assert (await wire.ask(stream=stream)).status_code == (200 if reason else 502)


@pytest.mark.parametrize(("words", "details"), [(9, {"reasoning_tokens": 1}), (1100, None)])
async def test_details_of_the_usage_are_those_of_one_leg(words: int, details: Body | None) -> None:
    """A leg that is stopped reports none, and the others' alone would be told as those of the answer."""
    first = [chunk({"content": numbered_words(words)}), chunk({}, "stop"), USAGE_CHUNK]
    wire = Wire([lambda: sse(*first), lambda: sse(chunk({"content": " last."}, "stop"), USAGE_CHUNK)])
    answer = await wire.ask(stream=True)
    told = [json.loads(line[6:])["usage"] for line in answer.text.splitlines() if '"usage":' in line][-1]
    assert (told.get("completion_tokens_details"), len(wire.sent)) == (details, 2 if words > 1000 else 1)


EVERY_KIND: list[Body] = [
    {"role": "system", "content": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]},
    {"role": "tool", "tool_call_id": "c", "content": ""},
    {"role": "odd", "content": 7, "more": [None, 1.5, True, {"deep": {"deeper": []}}]},
    {"content": "no role"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}, {"odd": 1}]


class _Reading(httpx.MockTransport):
    """Any transport that is given a body beside the request's bytes."""

    body: Body


@pytest.mark.parametrize(
    "body",
    [
        {"messages": EVERY_KIND},
        {"messages": EVERY_KIND, "tools": TOOLS, "temperature": 0.5, "stop": ["x"]},
        {"messages": EVERY_KIND, "extra_body": {"ttl": 60}},
        {"messages": EVERY_KIND, "tools": TOOLS, "extra_body": {"messages": SHORT}},
        {"messages": (message for message in EVERY_KIND)},
        {"messages": [*EVERY_KIND, ChatCompletionMessage(role="assistant", content="An object.")]},
    ],
)
async def test_litellms_client_sends_what_openais_does_without_a_look_at_each_value(body: Body) -> None:
    """The same JSON leaves, whatever is in it."""
    left: list[Body] = []

    async def serve(request: httpx.Request) -> httpx.Response:
        left.append(json.loads(request.content if client is theirs else to_json(transport.body)))
        assert request.headers["authorization"] == "Bearer k"
        return whole({"content": "One"})

    transport: Any = _Reading(serve)
    given = {**body, "messages": list(body["messages"])}
    ours, trying = (client_over(transport, api_base="http://served/v1", api_key="k") for _ in range(2))
    trying.max_retries = 1
    theirs = AsyncOpenAI(api_key="k", base_url="http://served/v1", http_client=httpx.AsyncClient(transport=transport))
    for client in (ours, trying, theirs):
        answer = await client.chat.completions.with_raw_response.create(model="m", timeout=5, **given)
        assert answer.parse().choices[0].message.content == "One"
        await client.close()
    assert left[0] == left[1] == left[2]


async def test_a_fault_of_ours_behind_a_request_that_is_too_long_sends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It fails closed, and the log says where (P8)."""
    wire = Wire([lambda: whole({"content": "Never."})])
    transport, scene = await wire.transport()
    scene.context.attempts.too_long = partial(DoesNotFit, "Too long.", shares=(), window_tokens=1, needed_tokens=2)
    transport.prepared = cast(Any, None)
    request = httpx.Request("POST", "http://served/v1/chat/completions", json={"messages": SHORT})
    answer = await transport.handle_async_request(request)
    assert (answer.status_code, answer.json()["error"]["message"], wire.sent) == (400, "Too long.", [])
    assert "failed_closed hook=transport error=" in caplog.text


async def test_a_whole_answer_stays_a_whole_answer() -> None:
    """No stream is opened for it, and what OpenAI's clients can read reaches them as it came, all of it."""
    for extra in ({}, {"audio": {"id": "a"}}, {"score": float("nan")}, {"refusal": "I cannot."}, {"annotations": [1]}):
        body = {"choices": [{"index": 0, "message": {"content": "One", **extra}}, {"index": 1, "message": {}}]}
        wire = Wire([lambda body=body: httpx.Response(200, content=json.dumps(body))])
        assert (await wire.ask()).text == json.dumps(body)
        assert ["stream" in sent for sent in wire.sent] == [False]
    wire = Wire([lambda: sse(chunk({"content": "One"}, "stop"))])
    answer = await wire.ask()
    assert (answer.status_code, "One" in answer.text, len(wire.sent)) == (502, False, 1)


async def test_the_legs_of_a_whole_answer_are_one() -> None:
    """One that ends at the bound goes on: texts, thoughts and lists behind each other, the last leg's calls and end."""
    first = {"content": numbered_words(900), "reasoning_content": "Let me", "annotations": [{"at": 1}]}
    call = {"id": "a", "function": {"name": "read", "arguments": "{}"}}
    other = {**call, "id": "b", "function": {"name": "list", "arguments": "{}"}}
    last = {
        "content": "word900 word901.",
        "reasoning_content": " see.",
        "annotations": [{"at": 2}],
        "tool_calls": [call, other],
    }
    wire = Wire(
        [
            # The last word is held, and written again.
            lambda: whole(first, "length", completion_tokens=wire.sent[-1]["max_tokens"]),
            lambda: whole(last, "tool_calls"),
        ]
    )
    answer = await wire.ask()
    choice = choice_of(answer)
    assert choice["message"] == {
        "role": "assistant",
        "content": f"{numbered_words(901)}.",
        "reasoning_content": "Let me see.",
        "annotations": [{"at": 1}, {"at": 2}],
        "tool_calls": [{"type": "function", **call}, {"type": "function", **other}],
    }
    assert (choice["finish_reason"], len(wire.sent)) == ("tool_calls", 2)
    assert answer.json().items() >= {"id": "c", "object": "chat.completion", "created": 7, "model": "served"}.items()
    assert not any("stream" in sent for sent in wire.sent)
    assert 11 + wire.sent[0]["max_tokens"] <= 2048


@pytest.mark.parametrize("stream", [True, False])
async def test_refusals_and_older_calls_arrive(stream: bool) -> None:
    """A delta that is neither text nor a tool call goes on, to either kind of client."""
    called = {"name": "read", "arguments": '{"a":1}'}
    for delta, end in (({"refusal": "I cannot."}, "stop"), ({"function_call": called}, "function_call")):
        answered = sse(chunk(delta), chunk({}, end), USAGE_CHUNK) if stream else whole({"content": None, **delta}, end)
        answer = await Wire([lambda answered=answered: answered]).ask(stream=stream)
        assert json.dumps(delta)[1:-1].replace(" ", "") in answer.text.replace(" ", "")
