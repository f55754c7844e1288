"""The transport below LiteLLM's client: every server is asked for a stream, every client gets what it asked for."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai._utils import _transform
from openai.types.chat import ChatCompletionMessage

from litellm_compaction.proxy.answer.transport import Clients, ListTransport
from tests.builders import prose, talk
from tests.engine.bench import usage
from tests.proxy.answer.wired import SHORT, USAGE, USAGE_CHUNK, Body, Wire, choice_of, chunk, sse, whole


async def test_whole_answer_is_asked_for_as_a_stream_and_joined() -> None:
    """One upstream request that streams; the client gets one completion with the stream's own envelope."""
    pieces = [
        chunk({"role": "assistant", "content": "One"}),
        chunk({"content": " two"}),
        chunk({}, "stop", stats={"s": 1}),
    ]
    wire = Wire([lambda: sse(*pieces, USAGE_CHUNK)])
    answer = await wire.ask()
    (sent,) = wire.sent
    assert (sent["stream"], sent["stream_options"]) == (True, {"include_usage": True})
    assert answer.headers["content-type"] == "application/json"
    assert (answer.headers["x-request-id"], "transfer-encoding" in answer.headers) == ("r1", False)
    body = answer.json()
    (choice,) = body.pop("choices")
    assert body == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 7,
        "model": "served",
        "system_fingerprint": "fp",
        "stats": {"s": 1},
        "usage": USAGE,
    }
    assert choice["message"] == {"role": "assistant", "content": "One two"}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")


@pytest.mark.parametrize("stream", [True, False])
async def test_server_that_ignores_stream_is_understood(stream: bool) -> None:
    """One JSON in spite of `stream: true`: a whole answer is given on as it came, a stream is made of it."""
    call = {"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    message = {"content": "I look.", "tool_calls": [call]}
    wire = Wire([lambda: whole(message, "tool_calls")])
    answer = await wire.ask(stream=stream)
    if not stream:
        assert answer.json() == whole(message, "tool_calls").json()
        return
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    assert [delta["tool_calls"][0]["id"] for delta in deltas if delta.get("tool_calls")] == ["a"]


async def test_server_that_refuses_stream_options_is_asked_without() -> None:
    """Asked again once, and from then on without; the usage is then counted here."""
    refusal = httpx.Response(400, json={"error": {"message": "Unknown parameter: stream_options"}})
    answered = [chunk({"content": "Fine."}), chunk({}, "stop")]
    wire = Wire([lambda: refusal, lambda: sse(*answered)])
    answer = await wire.ask()
    assert (choice_of(answer)["message"]["content"], answer.json()["usage"]["prompt_tokens"] > 0) == ("Fine.", True)
    await wire.ask()
    assert ["stream_options" in sent for sent in wire.sent] == [True, False, False]


async def test_server_that_refuses_streams_is_asked_for_whole_answers() -> None:
    """The server's own JSON reaches the client; one that wants a stream gets the refusal."""
    refusal = httpx.Response(400, json={"error": {"message": "stream is not supported by this server"}})
    wire = Wire([lambda: refusal, lambda: whole({"content": "Fine."})])
    assert choice_of(await wire.ask())["message"]["content"] == "Fine."
    assert [sent.get("stream") for sent in wire.sent] == [True, None]
    streamed = Wire([lambda: refusal])
    assert (await streamed.ask(stream=True)).status_code == 400
    assert len(streamed.sent) == 1


@pytest.mark.parametrize("words", ["stream_options", "streaming"])
async def test_a_client_whose_words_are_quoted_teaches_nothing_of_the_server(words: str) -> None:
    """An error that quotes it takes our addition out of its own request, and out of nobody else's."""
    refusal = httpx.Response(400, json={"error": {"message": f"Unexpected role '{words}'"}})
    answered = [chunk({"content": "Fine."}), chunk({}, "stop")]
    wire = Wire([lambda: refusal, lambda: refusal, lambda: sse(*answered)])
    odd = [{"role": words, "content": "hi"}, {"role": "user", "content": "hi"}]
    assert (await wire.ask(messages=odd)).status_code == 400
    assert choice_of(await wire.ask())["message"]["content"] == "Fine."
    asked = [(sent.get("stream"), "stream_options" in sent) for sent in wire.sent]
    assert (asked[0], asked[2:]) == ((True, True), [(True, True)])


async def test_a_client_that_speaks_of_streams_is_served_by_a_server_without_them() -> None:
    """Its words alone are no reason to refuse it."""
    refusal = httpx.Response(400, json={"error": {"message": "stream is not supported by this server"}})
    wire = Wire([lambda: refusal, lambda: whole({"content": "Fine."})])
    answer = await wire.ask(messages=[{"role": "user", "content": "Does this server support streaming?"}])
    assert choice_of(answer)["message"]["content"] == "Fine."


@pytest.mark.parametrize("stream", [True, False])
async def test_other_refusals_keep_their_status_and_body(stream: bool) -> None:
    """What the server says of a request that we did not cause goes on unchanged, asked once."""
    body = {"error": {"message": "the upstream model has no chat template"}}
    wire = Wire([lambda: httpx.Response(422, json=body)])
    answer = await wire.ask(stream=stream)
    assert (answer.status_code, answer.json(), len(wire.sent)) == (422, body, 1)


async def test_error_inside_the_stream_of_a_whole_answer_is_an_error() -> None:
    """Nothing has been sent yet, so the client gets no half answer."""
    answer = await Wire([lambda: sse(chunk({"content": "On"}), {"error": {"message": "out of memory"}})]).ask()
    assert (answer.status_code, answer.json()) == (500, {"error": {"message": "out of memory"}})


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"choices": []}', b'{"choices": [null]}'])
async def test_answer_that_is_none_is_given_on(body: bytes) -> None:
    """A 200 that holds no answer reaches the client as it came."""
    answer = await Wire([lambda: httpx.Response(200, content=body)]).ask()
    assert (answer.status_code, answer.content) == (200, body)


async def test_compaction_before_a_whole_answer_leaves_no_trace_in_it() -> None:
    """The envelope is the server's, not that of a notice which nobody reads."""
    wire = Wire([lambda: sse(chunk({"role": "assistant", "content": "Fine."}), chunk({}, "stop"), USAGE_CHUNK)])
    answer = await wire.ask(messages=talk("whole", 2500))
    assert (choice_of(answer)["message"]["content"], answer.json()["id"]) == ("Fine.", "chatcmpl-1")
    assert (answer.json()["created"], answer.json()["model"]) == (7, "served")
    assert len(wire.sent[0]["messages"]) < len(talk("whole", 2500))


@pytest.mark.parametrize("options", [{"n": 2}, {"logprobs": True}])
async def test_what_cannot_be_joined_is_asked_for_as_the_client_did(options: Body) -> None:
    """Several choices and log probabilities: the server's own answer, whole."""
    wire = Wire([lambda: whole({"content": "Fine."})])
    answer = await wire.ask(**options)
    assert answer.json() == whole({"content": "Fine."}).json()
    assert "stream" not in wire.sent[0]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ([7] * 500, 500),
        ([[7] * 500, [7] * 20], 500),
        ([[7] * 20, [8] * 500], 500),
        ([*([7] * 480), "twenty bytes of text"], 500),
        (["a text", [7] * 500], 500),
        ([0], 1),
    ],
)
@pytest.mark.parametrize("asked", [{}, {"max_tokens": 100_000}, {"max_tokens": 5}])
async def test_prompt_of_token_ids_is_bounded(prompt: list[Any], ids: int, asked: Body) -> None:
    """Their number is their count; the longest of several decides."""
    wire = Wire([lambda: whole({"content": "Fine."})])
    await wire.complete(prompt=prompt, **asked)
    (sent,) = wire.sent
    assert sent == {"prompt": prompt, "max_tokens": min(asked.get("max_tokens", 2048), 2048 - 64 - ids)}


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [[7] * 1800, [[7], [7] * 1800], [7] * 2_000_000])
async def test_prompt_of_token_ids_that_cannot_fit_is_refused(prompt: list[Any]) -> None:
    """Nothing in it can be compacted."""
    wire = Wire([])
    answer = await wire.complete(prompt=prompt)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "maximum context length is 2048 tokens" in error["message"]
    assert wire.sent == []


@pytest.mark.parametrize(
    ("options", "answers"),
    [
        ({"n": 3}, 3),
        ({"n": "3"}, 3),
        ({"n": 3.0}, 3),
        ({"n_cmpl": 4}, 4),
        ({"n": 2, "best_of": 5}, 5),
        ({"n": True, "best_of": None}, 1),
        ({"n": -2}, 1),
        ({"n": [3]}, 1),
        ({"n": 0.5}, 1),
    ],
)
async def test_each_of_several_answers_gets_its_part_of_a_shared_window(options: Body, answers: int) -> None:
    """A server writes them at once into one context, whatever it takes for their number."""
    wire = Wire([lambda: whole({"content": "Fine."})], settings={"admission": "pool"})
    await wire.ask(**options, logprobs=True)
    alone = Wire([lambda: whole({"content": "Fine."})], settings={"admission": "pool"})
    await alone.ask(logprobs=True)
    assert wire.sent[0]["max_tokens"] == pytest.approx(alone.sent[0]["max_tokens"] / answers, abs=1)


def from_network(content: bytes, status: int = 200) -> httpx.Response:
    """A body that has not been read."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 50):
            yield content[start : start + 50]

    return httpx.Response(status, headers={"content-type": "application/json"}, content=pieces())


@pytest.mark.parametrize("field_name", ["n", "n_cmpl", "best_of"])
async def test_the_one_answer_that_lm_studio_writes_has_all_the_room(field_name: str) -> None:
    """Its documented parameters have no such field."""
    bounds: list[int] = []
    for asked in ({}, {field_name: 4}):
        wire = Wire([lambda: whole({"content": "Fine."})], settings={"admission": "pool"}, is_lmstudio=True)
        await wire.ask(logprobs=True, **asked)
        bounds.append(wire.sent[0]["max_tokens"])
    assert bounds[0] == bounds[1]


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
    "long": lambda: httpx.Response(200, content=b" " * 30_000_000),
    "structure": lambda: httpx.Response(200, content=b'{"choices":[' + b"{}," * 1_000_000 + b"{}]}"),
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


async def test_long_error_is_told_from_its_beginning() -> None:
    """Some servers quote the whole request."""
    wire = Wire([lambda: httpx.Response(500, content=b"broken " * 1_000_000)])
    answer = await wire.ask()
    assert (answer.status_code, len(answer.content)) == (500, 32 * 1024)


_LONG = {"message": "broken " * 300_000, "type": "server_error"}
# (what the client asks for beside its messages, what its server says).
_LONG_ERRORS: dict[str, tuple[Body, Callable[[], httpx.Response]]] = {
    "an error": ({}, lambda: httpx.Response(500, json={"error": _LONG})),
    "an error of a stream": ({"stream": True}, lambda: httpx.Response(400, json={"error": _LONG})),
    "a first event": ({"stream": True}, lambda: sse({"error": _LONG})),
    "a later event": ({}, lambda: sse(chunk({"content": "On"}), {"error": _LONG})),
    "an overflow as an event": (
        {"stream": True},
        lambda: sse({"error": {"message": "Context size has been exceeded. " + "broken " * 300_000}}),
    ),
    "no answer inside a 200": ({}, lambda: httpx.Response(200, json={"error": _LONG})),
    "an error, several answers": ({"n": 2}, lambda: httpx.Response(500, json={"error": _LONG})),
    "an error of a stream of several": ({"n": 2, "stream": True}, lambda: httpx.Response(500, json={"error": _LONG})),
    "no answer inside a 200, several": ({"n": 2}, lambda: httpx.Response(200, json={"error": _LONG})),
    "an event of several answers": ({"n": 2, "stream": True}, lambda: sse({"error": _LONG}, done=False)),
    "packed, several answers": (
        {"n": 2},
        lambda: folded(gzip.compress(json.dumps({"error": _LONG}).encode())),
    ),
}


@pytest.mark.parametrize("error", _LONG_ERRORS)
async def test_no_way_gives_litellm_a_long_error(error: str) -> None:
    """It looks through an error's text some ten times on the event loop, 10 s for a megabyte."""
    body, answer = _LONG_ERRORS[error]
    told = await Wire([answer]).ask(**body)
    assert 0 < len(told.content) < 33 * 1024
    assert "broken" in told.text


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("is_known", [True, False])
async def test_no_text_completion_gives_litellm_a_long_error(is_known: bool, status: int) -> None:
    """Of a prompt in no known shape, too, whose answer goes on as it came."""
    told = await Wire([lambda: httpx.Response(status, json={"error": _LONG})]).complete(prompt="x" if is_known else {})
    assert (told.status_code, len(told.content)) == (status, 32 * 1024)


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"logprobs": True, "stream": True}])
async def test_whatever_is_passed_on_is_told(body: Body) -> None:
    """Headers, page and metrics are made of it: a request that cannot be continued is shown like any other."""
    wire = Wire([lambda: sse(chunk({"content": "One."}), chunk({}, "stop"), USAGE_CHUNK)])
    await wire.ask(**body)
    assert wire.scene is not None
    assert wire.scene.listener.actions == ["none"]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_several_answers_are_bounded_like_one(stream: bool) -> None:
    """They are passed on without being read as an answer, and so had no end."""
    endless = [chunk({"content": "word " * 9000})] * 1500
    wire = Wire([lambda: sse(*endless) if stream else whole({"content": "word " * 8_000_000})])
    if stream:
        with pytest.raises(httpx.RemoteProtocolError, match="more than"):
            await wire.ask(n=2, stream=True)
    else:
        assert (await wire.ask(n=2)).status_code == 502


async def test_answer_that_does_not_end_is_ended() -> None:
    """A server that knows no limit: after four windows it is not listened to any more."""
    wire = Wire([lambda: sse(*[chunk({"content": "word " * 50})] * 500)], window_tokens=2048)
    answer = await wire.ask()
    assert answer.status_code >= 500
    assert "does not end" in answer.text


EVERY_KIND: list[Body] = [
    {"role": "system", "content": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]},
    {"role": "tool", "tool_call_id": "c", "content": ""},
    {"role": "odd", "content": 7, "more": [None, 1.5, True, {"deep": {"deeper": []}}]},
    {"content": "no role"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}, {"odd": 1}]


class _Reading(httpx.MockTransport, ListTransport):
    """Any transport that is given lists beside the body's bytes."""


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
        left.append({**json.loads(request.content), **(transport.lists if not left else {})})
        return whole({"content": "One"})

    transport = _Reading(serve)
    given = {**body, "messages": list(body["messages"])}
    ours = Clients().over(transport, api_base="http://served/v1", api_key="k")
    theirs = AsyncOpenAI(api_key="k", base_url="http://served/v1", http_client=httpx.AsyncClient(transport=transport))
    for client in (ours, theirs):
        answer = await client.chat.completions.with_raw_response.create(model="m", timeout=5, **given)
        assert answer.parse().choices[0].message.content == "One"
        await client.close()
    assert left[0] == left[1]


async def test_long_list_costs_litellms_client_no_more_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message took 0.3 ms on the event loop: of 40,000, everybody waited for 12 s."""
    looks = [0]
    look = _transform._async_transform_recursive

    async def counting(*given: Any, **named: Any) -> Any:
        looks[0] += 1
        return await look(*given, **named)

    monkeypatch.setattr(_transform, "_async_transform_recursive", counting)
    client = Clients().over(_Reading(lambda _: whole({"content": "One"})), api_base="http://s/v1", api_key="k")
    counts = []
    for number in (1, 500):
        looks[0] = 0
        await client.chat.completions.with_raw_response.create(model="m", messages=SHORT * number, tools=TOOLS * number)  # type: ignore[arg-type]
        counts.append(looks[0])
    await client.close()
    assert counts[0] == counts[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [None, -1, 50, 10**9])
async def test_text_completion_of_a_server_that_knows_them_is_bounded(asked: int | None, stream: bool) -> None:
    """What no chat is made of goes out as it came, but for its bound; the answer comes back as the server gave it."""
    answer = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": " two", "logprobs": None}]}
    wire = Wire([lambda: sse(answer) if stream else httpx.Response(200, json=answer)])
    body = {"prompt": "One", "stream": stream, **({} if asked is None else {"max_tokens": asked})}
    got = await wire.complete(**body)
    (sent,) = wire.sent
    assert (sent["max_tokens"] == 50) == (asked == 50)
    assert 0 < sent.pop("max_tokens") < 2048
    body.pop("max_tokens", None)
    assert sent == body
    assert got.status_code == 200
    assert " two" in got.text


async def test_text_completion_that_cannot_fit_is_refused_before_it_is_sent() -> None:
    """The longest of several texts counts: the server answers each by itself."""
    wire = Wire([lambda: httpx.Response(200, json={})])
    many = [prose(f"text {number}", 400) for number in range(8)]
    assert (await wire.complete(prompt=many)).status_code == 200
    assert wire.sent[0]["prompt"] == many
    assert wire.sent[0]["max_tokens"] <= 2048 - 400
    assert (await wire.complete(prompt=[*many, prose("too long", 3000)])).status_code == 400
    assert len(wire.sent) == 1


@pytest.mark.parametrize("prompt", [{"prompt_string": "x"}, [], [[]], [1, None], [True], [[1], {}]])
async def test_prompt_of_no_known_shape_passes_as_it_is(prompt: Any) -> None:
    """Nobody here can count it; its server refuses what does not fit."""
    wire = Wire([lambda: httpx.Response(200, json={})])
    await wire.complete(prompt=prompt)
    assert wire.sent == [{"prompt": prompt}]


async def test_answer_that_is_passed_holds_its_room_until_it_is_read() -> None:
    """Several choices are not joined, and take part in what a shared context is filled with all the same."""
    wire = Wire([lambda: sse(chunk({"content": "Two."}, "stop"))], settings={"admission": "pool"})
    transport, scene = await wire.transport(messages=SHORT)
    request = httpx.Request("POST", "http://served/v1/chat/completions", json={"messages": SHORT, "n": 2})
    response = await transport.handle_async_request(request)
    (used,) = (usage(scene.compactor._admission, pool) for pool in scene.compactor._admission._pools)
    assert used.used_tokens > wire.sent[0]["max_tokens"]
    assert b"Two." in await response.aread()
    assert not scene.compactor._admission._pools


async def test_clients_of_one_server_share_no_call() -> None:
    """Each carries its own requests, also at the same time, and none sends a cookie that another was given."""
    clients, seen = Clients(), []

    def serving(name: str) -> Callable[[httpx.Request], httpx.Response]:
        def serve(request: httpx.Request) -> httpx.Response:
            seen.append((name, request.headers.get("cookie")))
            answer = whole({"content": name})
            answer.headers["set-cookie"] = f"session={name}"
            return answer

        return serve

    made = [clients.over(_Reading(serving(name)), api_base="http://s/v1", api_key="k") for name in "ab"]
    for client in made:
        client.max_retries = 0
    given = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
    for _ in range(2):
        answers = await asyncio.gather(*(client.chat.completions.create(**given) for client in made))
        assert [answer.choices[0].message.content for answer in answers] == ["a", "b"]
    assert seen == [("a", None), ("b", None)] * 2
