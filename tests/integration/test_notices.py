"""What programs and people read of a compaction, on every route, and that a stream which waits is never silent."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from litellm_compaction.core.messages import ATTEMPTS_NOTICE, DONE_NOTICE, START_NOTICE
from litellm_compaction.simulator import Gate, Reply
from tests.builders import prose, talk
from tests.integration.bench import SUMMARY, is_summary_call
from tests.integration.restart_bench import TEXTS, Restarting, Teller, asked, shared

TOLD = f"{START_NOTICE}\n\n{DONE_NOTICE}\n\n"
PROGRAM = {"user-agent": "OpenAI/Python 3.3.0"}
OPEN_WEBUI = {"user-agent": "Python/3.11 aiohttp/3.14.5", "x-openwebui-chat-id": "c1"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_numbers = itertools.count()


class Route(NamedTuple):
    """A path, how a conversation is asked for there, and what asks for structured output."""

    path: str
    key: str
    structured: dict[str, Any]


ROUTES = {
    "chat": Route("/v1/chat/completions", "messages", {"response_format": {"type": "json_object"}}),
    "messages": Route(
        "/v1/messages", "messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    ),
    "responses": Route(
        "/v1/responses", "input", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
    ),
    "completions": Route("/v1/completions", "prompt", {}),
}


@pytest.fixture(scope="module")
def carried(request: pytest.FixtureRequest) -> Restarting:
    """The transport, which speaks on every route."""
    return shared(request, "auto")


@pytest.fixture(scope="module")
def hooked(request: pytest.FixtureRequest) -> Restarting:
    """LiteLLM's hooks, which speak in chat completions only."""
    return shared(request, "hooks")


def _body(name: str, messages: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    route = ROUTES[name]
    content: Any = "\n\n".join(message["content"] for message in messages) if route.key == "prompt" else messages
    limit = {"max_tokens": 400} if name == "messages" else {}
    return {"model": "middle", route.key: content, "stream": True, **limit, **extra}


def _read(name: str, lines: list[str]) -> tuple[str, str]:
    """Text and thoughts of a stream."""
    text, thoughts = "", ""
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if name == "chat":
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                thoughts += choice["delta"].get("reasoning_content") or ""
        elif name == "messages":
            delta = event.get("delta") or {}
            text += delta.get("text") or ""
            thoughts += delta.get("thinking") or ""
        elif name == "responses":
            text += event["delta"] if event["type"] == "response.output_text.delta" else ""
            thoughts += event["delta"] if event["type"].startswith("response.reasoning") and "delta" in event else ""
        else:
            text += "".join(choice.get("text") or "" for choice in event["choices"])
    return text, thoughts


def _long(name: str) -> list[dict[str, Any]]:
    """A conversation that has to be compacted, anew each time."""
    return talk(f"notices {name} {next(_numbers)}", 3600)


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
def test_programs_get_what_the_model_wrote(carried: Restarting, name: str) -> None:
    """A compaction before the answer is a thought, on responses nothing; the text is the model's, byte for byte."""
    carried.watch("middle", Teller(Reply('[{"a": 1}]')))
    answer = carried.proxy.stream_body(_body(name, _long(name)), ROUTES[name].path, **PROGRAM)
    expected = "" if name == "responses" else TOLD
    assert _read(name, answer.lines) == ('[{"a": 1}]', expected)
    if name == "messages":
        kinds = [event["content_block"]["type"] for event in answer.chunks if event["type"] == "content_block_start"]
        assert [kind for kind in kinds if kind != "text"] == ["thinking"]
        assert kinds[-1] == "text"


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
def test_people_read_the_notices(carried: Restarting, name: str) -> None:
    """Open WebUI says who it is by headers of its own: the notice is the first text of the answer."""
    carried.watch("middle", Teller(Reply("Fine.")))
    answer = carried.proxy.stream_body(_body(name, _long(name)), ROUTES[name].path, **OPEN_WEBUI)
    assert _read(name, answer.lines) == (f"{TOLD}Fine.", "")


@pytest.mark.parametrize("name", list(ROUTES))
def test_restart_is_told_nowhere_inside_a_programs_answer(carried: Restarting, name: str) -> None:
    """The seam may lie in a code block or in JSON."""
    watch = carried.watch("local", Teller(Reply(TEXTS["prose"])))
    body = {**_body(name, asked(f"inside {name}")), "model": "local"}
    if name == "messages":
        body["max_tokens"] = 8000
        system, *rest = body["messages"]
        body |= {"system": system["content"], "messages": rest}
    if name == "completions":
        body["prompt"] = asked(f"inside {name}")[1]["content"]
    answer = carried.proxy.stream_body(body, ROUTES[name].path, **PROGRAM)
    assert _read(name, answer.lines) == (TEXTS["prose"], "")
    assert len(watch.chats) > 1


_ENDLESS = "\n".join(f"{n}: {prose(f'endless {n}', 12)}" for n in range(900))


def _endless(carried: Restarting, name: str, *, stream: bool) -> dict[str, Any]:
    """A request whose answer no window of its model holds, however often it is restarted."""
    carried.watch("local", Teller(Reply(_ENDLESS)))
    body = {**_body(name, asked(f"endless {name} {stream}")), "model": "local", "stream": stream}
    if name == "messages":
        system, *rest = body["messages"]
        body |= {"system": system["content"], "messages": rest, "max_tokens": 20_000}
    if name == "completions":
        body["prompt"] = asked(f"endless {name} {stream}")[1]["content"]
    if stream and name in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    return body


def _compaction_of(name: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the one usage of a stream says of compactions."""
    usages = [
        usage
        for event in events
        for usage in (event.get("usage"), (event.get("response") or {}).get("usage"))
        if usage and (name != "messages" or event.get("type") == "message_delta")
    ]
    found: dict[str, Any]
    (found,) = [usage["compaction"] for usage in usages if "compaction" in usage]
    return found


@pytest.mark.parametrize("name", list(ROUTES))
def test_cut_answer_says_so_at_its_end(carried: Restarting, name: str) -> None:
    """A program reads it in a last thought, where its form has thoughts, and in the usage; the text is the model's."""
    answer = carried.proxy.stream_body(_endless(carried, name, stream=True), ROUTES[name].path, **PROGRAM)
    text, thoughts = _read(name, answer.lines)
    assert _ENDLESS.startswith(text)
    assert len(text) > 8000
    assert thoughts.strip() == (ATTEMPTS_NOTICE if name in ("chat", "messages") else "")
    told = _compaction_of(name, answer.chunks)
    assert (told["outcome"], told["restarts"], len(told["prompt_tokens"])) == ("attempts", 3, 4)


@pytest.mark.parametrize("name", list(ROUTES))
def test_cut_answer_that_is_not_streamed_says_so(carried: Restarting, name: str) -> None:
    """In its usage, on chat in a thought, too; its text is the model's, and the first thing that a program finds."""
    answer = carried.proxy.post(_endless(carried, name, stream=False), ROUTES[name].path, headers=PROGRAM).json()
    if name == "chat":
        message = answer["choices"][0]["message"]
        text, thoughts, end = message["content"], message["reasoning_content"], answer["choices"][0]["finish_reason"]
        assert (thoughts.strip(), end) == (ATTEMPTS_NOTICE, "length")
    elif name == "messages":
        text, end = answer["content"][0]["text"], answer["stop_reason"]
        assert (len(answer["content"]), end) == (1, "model_context_window_exceeded")
    elif name == "responses":
        text = answer["output"][0]["content"][0]["text"]
        assert len(answer["output"]) == 1
    else:
        text = answer["choices"][0]["text"]
    assert _ENDLESS.startswith(text)
    assert len(text) > 8000
    told = answer["usage"]["compaction"]
    assert (told["outcome"], told["restarts"], len(told["prompt_tokens"])) == ("attempts", 3, 4)


@pytest.mark.parametrize("stream", [True, False])
def test_by_hooks_a_cut_answer_says_so(hooked: Restarting, stream: bool) -> None:
    """LiteLLM's hooks carry chat completions only; there the same is said."""
    body = _endless(hooked, "chat", stream=stream)
    if stream:
        answer = hooked.proxy.stream_body(body, **PROGRAM)
        text, thoughts = _read("chat", answer.lines)
        told = _compaction_of("chat", answer.chunks)
    else:
        whole = hooked.proxy.post(body, headers=PROGRAM).json()
        message, told = whole["choices"][0]["message"], whole["usage"]["compaction"]
        text, thoughts = message["content"], message["reasoning_content"]
    assert _ENDLESS.startswith(text)
    assert len(text) > 8000
    assert (thoughts.strip(), told["outcome"], told["restarts"]) == (ATTEMPTS_NOTICE, "attempts", 3)


@pytest.mark.parametrize("kind", ["program", "structured"])
@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
def test_stream_that_waits_opens_at_once_and_beats(carried: Restarting, name: str, kind: str) -> None:
    """While the summary is written a client hears of the answer, and then again and again, whatever it is told.

    Nobody has asked the model for an answer by then: what is heard is no part of one. The request may be tried again,
    as LiteLLM does by default: its router then keeps what opens a stream until some of the answer has come.
    """
    gate = Gate()
    watch = carried.watch("middle", Teller(Reply('{"a": 1}'), summary=Reply(SUMMARY, gate=gate)))
    extra = ROUTES[name].structured if kind == "structured" else {}
    body = _body(name, _long(f"beat {kind} {name}"), num_retries=2, **extra)
    headers = {**carried.proxy.headers, **PROGRAM}
    with carried.proxy.client.stream("POST", ROUTES[name].path, json=body, headers=headers) as answer:
        lines = (line for line in answer.iter_lines() if line)
        try:
            early = [next(lines)]
            assert gate.reached.wait(60)
            early += [next(lines) for _ in range(_EARLY_LINES)]
            assert [record.outcome for record in watch.records if is_summary_call(record.body)] == ["running"]
            assert watch.chats == []
        finally:
            gate.open()
        seen = [*early, *lines]
    assert _read(name, seen) == ('{"a": 1}', TOLD if kind == "program" and name != "responses" else "")


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
def test_by_hooks_litellm_opens_the_stream(hooked: Restarting, name: str) -> None:
    """LiteLLM waits for our hooks before it makes a response; what it sends meanwhile is the operator's choice."""
    gate = Gate()
    watch = hooked.watch("kept-alive", Teller(Reply("Fine."), summary=Reply(SUMMARY, gate=gate)))
    body = {**_body(name, _long(f"kept alive {name}")), "model": "kept-alive"}
    headers = {**hooked.proxy.headers, **PROGRAM}
    with hooked.proxy.client.stream("POST", ROUTES[name].path, json=body, headers=headers) as answer:
        lines = (line for line in answer.iter_lines() if line)
        try:
            assert next(lines) == ": ping"
            assert gate.reached.wait(60)
            assert next(lines) == ": ping"
            assert [record.outcome for record in watch.records if is_summary_call(record.body)] == ["running"]
            assert watch.chats == []
        finally:
            gate.open()
        assert _read(name, list(lines))[0] == "Fine."


# Enough that some of them are beats: what opens an answer is at most four events of two lines.
_EARLY_LINES = 14


def test_langchain_parses_streamed_json(carried: Restarting) -> None:
    """JSON that was asked for in words stays JSON behind a compaction."""
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    parsers = pytest.importorskip("langchain_core.output_parsers")
    carried.watch("middle", Teller(Reply('{"town": "Kiel", "streets": [1, 2, 3]}')))
    model = langchain.ChatOpenAI(
        model="middle",
        base_url=f"{carried.proxy.base_url}/v1",
        api_key=carried.proxy.key,
        streaming=True,
        max_retries=0,
    )
    messages = [(message["role"], message["content"]) for message in _long("parser")]
    parsed: Iterator[Any] = (model | parsers.JsonOutputParser()).stream(messages)
    assert list(parsed)[-1] == {"town": "Kiel", "streets": [1, 2, 3]}


def test_anthropic_client_finds_a_restarted_answer_in_its_first_block(carried: Restarting) -> None:
    """Programs read `content[0].text`: a restart makes no second block."""
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")
    watch = carried.watch("local", Teller(Reply(TEXTS["prose"])))
    system, user = asked("first block")
    client = anthropic.Anthropic(base_url=carried.proxy.base_url, api_key=carried.proxy.key, max_retries=0)
    with (
        client,
        client.messages.stream(model="local", max_tokens=8000, system=system["content"], messages=[user]) as stream,
    ):
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == TEXTS["prose"]
    assert len(watch.chats) > 1


def test_returned_thoughts_do_not_reach_the_model(carried: Restarting) -> None:
    """A client that sends thoughts back sends our notice with them; the model reads its own."""
    watch = carried.watch("middle", Teller(Reply("Fine.")))
    messages = [
        {"role": "user", "content": "One."},
        {"role": "assistant", "content": "Two.", "reasoning_content": f"{TOLD}Well, two."},
        {"role": "user", "content": "Three?"},
    ]
    carried.proxy.chat("middle", messages)
    assert watch.sent()[1] == {"role": "assistant", "content": "Two.", "reasoning_content": "Well, two."}
