"""The protocol of LM Studio's SDKs: what the official client reads, and how harsh the double can be to others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import jinja2
import pytest
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from litellm_compaction.simulator import Gate, Model, Reply, SdkMode, Tokenizer
from tests.simulator.bench import KEY, Bench, BenchFactory, assistant, system, tool_round, user

HELLO = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
READ = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
LIMIT_S = 10


def official_client(bench: Bench) -> Any:
    """The official client, not connected yet."""
    lmstudio = pytest.importorskip("lmstudio", reason="LM Studio's client is not installed")
    return lmstudio.AsyncClient(bench.base_url.removeprefix("http://"))


@asynccontextmanager
async def official(bench: Bench) -> AsyncIterator[Any]:
    """The official client, connected."""
    async with official_client(bench) as client:
        yield client


class Raw:
    """A client that shows what really comes."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self._calls = 0

    def read(self, limit_s: float = LIMIT_S) -> Any:
        """The next message."""
        return json.loads(self.connection.recv(timeout=limit_s))

    def send(self, **message: Any) -> None:
        """Sends a message."""
        self.connection.send(json.dumps(message))

    def ask(self, endpoint: str, **parameter: Any) -> Any:
        """Calls an endpoint and returns what comes next."""
        self._calls += 1
        message = {"type": "rpcCall", "endpoint": endpoint, "callId": self._calls}
        self.send(**message, **({"parameter": parameter} if parameter else {}))
        return self.read()

    def ask_of(self, identifier: str, endpoint: str, **parameter: Any) -> Any:
        """The same for an endpoint of one instance."""
        return self.ask(endpoint, specifier={"type": "query", "query": {"identifier": identifier}}, **parameter)

    def format(self, history: Any, tools: Any = None, identifier: str = KEY) -> Any:
        """The answer to `applyPromptTemplate`."""
        opts = {} if tools is None else {"toolDefinitions": tools}
        stack = {"layers": []}
        return self.ask_of(identifier, "applyPromptTemplate", history=history, predictionConfigStack=stack, opts=opts)

    def count(self, text: str, identifier: str = KEY) -> Any:
        """The answer to `countTokens`."""
        return self.ask_of(identifier, "countTokens", inputString=text)


@contextmanager
def raw(bench: Bench, identifier: str = "guest", passkey: str = "x", *, has_key: bool = True) -> Iterator[Raw]:
    """A raw client, with its key accepted unless `has_key` is False."""
    url = bench.base_url.replace("http://", "ws://") + "/llm"
    with connect(url, open_timeout=LIMIT_S, close_timeout=1, max_size=None) as connection:
        client = Raw(connection)
        if has_key:
            client.send(authVersion=1, clientIdentifier=identifier, clientPasskey=passkey)
            assert client.read() == {"success": True}
        yield client


def history(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's messages as an SDK's history, for those that can be said exactly."""
    said: list[dict[str, Any]] = []
    for message in messages:
        parts: list[dict[str, Any]] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        if message["role"] == "tool":
            result = {"type": "toolCallResult", "content": message["content"], "toolCallId": message["tool_call_id"]}
            parts = [result]
        for call in message.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            request = {"type": "function", "id": call["id"], "name": call["function"]["name"], "arguments": arguments}
            parts.append({"type": "toolCallRequest", "toolCallRequest": request})
        said.append({"role": message["role"], "content": parts})
    return {"messages": said}


CONVERSATIONS = {
    "hello": [user("hello")],
    "system": [system("Be terse."), user("hello")],
    "tools": [system("Be terse."), user("Read a.py."), *tool_round(), assistant("It prints."), user("你好, thanks.")],
    "open round": [user("Read a.py and b.py."), *tool_round(), *tool_round("987654321")],
    "two results": [
        user("Read both."),
        {
            "role": "assistant",
            "content": "Both at once.",
            "tool_calls": [
                {"id": number * 9, "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
                for number in "12"
            ],
        },
        {"role": "tool", "tool_call_id": "1" * 9, "content": "one"},
        {"role": "tool", "tool_call_id": "2" * 9, "content": "two\n"},
    ],
    "begun": [user("Count to ten."), assistant("One, two,")],
    "thoughts": [user("a"), assistant("<think>\nhm\n</think>\n\nA."), user("b")],
}

TOKENIZERS = {
    "own": None,
    "foreign": Tokenizer(factor=1.37, wide_factor=1.75, message_tokens=5, prompt_tokens=30),
    "edited": Tokenizer(added_system="You are helpful.", ignores_tools=True),
    "added": Tokenizer(added_system="Today is Tuesday.\nBe brief."),
}


async def test_the_official_client_lists_measures_and_counts(bench: BenchFactory) -> None:
    """List, context length, template with tools, count and tokens, by `lmstudio` from PyPI; nothing is loaded."""
    served = bench(6000, models=[Model(KEY), Model("google/gemma-3-4b")])
    async with official(served) as client:
        [model] = await client.llm.list_loaded()
        assert model.identifier == KEY
        assert await model.get_context_length() == 6000
        info = await model.get_info()
        assert (info.model_key, info.context_length, info.max_context_length) == (KEY, 6000, 131_072)
        assert (await model.get_load_config()).context_length == 6000
        formatted = await model.apply_prompt_template(HELLO, {"toolDefinitions": [READ]})
        assert "# Tools" in formatted
        assert '"name": "read"' in formatted
        assert formatted.endswith("<|im_start|>assistant\n")
        tokens = await model.count_tokens(formatted)
        assert len(await model.tokenize(formatted)) == tokens
    served.chat(user("hello"), tools=[READ])
    assert tokens == served.last.prompt_tokens
    sdk = served.simulator.sdk
    assert sdk.faults() == []
    assert set(sdk.endpoints()) == {
        "listLoaded",
        "getModelInfo",
        "getLoadConfig",
        "applyPromptTemplate",
        "countTokens",
        "tokenize",
    }
    assert [instance.id for instance in served.simulator.instances] == [KEY]


async def test_who_generates_or_loads_through_the_official_client_is_found_out(bench: BenchFactory) -> None:
    """A channel is never opened by a client that only counts, so that one is a fault of whoever does."""
    served = bench()
    async with official(served) as client:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.llm.model(KEY), 0.3)
    assert [(call.kind, call.endpoint) for call in served.simulator.sdk.faults()] == [("channelCreate", "getOrLoad")]


async def test_the_official_client_says_that_a_key_is_refused(bench: BenchFactory) -> None:
    """A guest gets no calls where a token is needed, and the client raises.

    The reason is text (WsAuthenticationResult.ts); lmstudio 1.5.0 looks for an object in it, and fails over that.
    """
    served = bench(api_token="sk-lm-abcdefgh:12345678901234567890")
    client = official_client(served)
    with pytest.raises(Exception, match=r"[Aa]uthentication|dictionary update"):
        await client.__aenter__()
    await client.aclose()
    assert served.simulator.sdk.endpoints() == []
    assert served.simulator.sdk.open_sockets() == []


def test_a_token_is_an_identifier_and_a_passkey(bench: BenchFactory) -> None:
    """`sk-lm-ID:KEY` is taken apart; another passkey is refused and the socket closed."""
    served = bench(api_token="sk-lm-abcdefgh:12345678901234567890")
    with raw(served, "abcdefgh", "12345678901234567890") as client:
        assert client.ask("listLoaded")["result"][0]["identifier"] == KEY
    with raw(served, has_key=False) as client:
        client.send(authVersion=1, clientIdentifier="abcdefgh", clientPasskey="other")
        assert client.read() == {"success": False, "error": "Invalid API token"}
        with pytest.raises(ConnectionClosed):
            client.read()


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [READ]], ids=["plain", "tools"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_counts_are_those_of_usage(bench: BenchFactory, name: str, tools: Any, tokenizer: str) -> None:
    """The template's text, counted, is `prompt_tokens` of the same conversation over HTTP."""
    served = bench(models=[Model(KEY, tokenizer=TOKENIZERS[tokenizer])])
    messages = CONVERSATIONS[name]
    with raw(served) as client:
        formatted = client.format(history(messages), tools)["result"]["formatted"]
        counted = client.count(formatted)["result"]["tokenCount"]
    served.chat(*messages, **({"tools": tools} if tools else {}))
    assert counted == served.last.prompt_tokens


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [READ]], ids=["plain", "tools"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_template_in_effect_renders_the_same_text(
    bench: BenchFactory, name: str, tools: Any, tokenizer: str
) -> None:
    """`getBasePredictionConfig` has the Jinja template that makes just what `applyPromptTemplate` gives."""
    served = bench(models=[Model(KEY, tokenizer=TOKENIZERS[tokenizer])])
    messages = CONVERSATIONS[name]
    with raw(served) as client:
        formatted = client.format(history(messages), tools)["result"]["formatted"]
        fields = client.ask_of(KEY, "getBasePredictionConfig")["result"]["fields"]
    config = {field["key"]: field["value"] for field in fields}
    assert config["llm.prediction.contextOverflowPolicy"] == "truncateMiddle"
    source = config["llm.prediction.promptTemplate"]["jinjaPromptTemplate"]["template"]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # noqa: S701 - a prompt, no page
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    rendered = environment.from_string(source).render(messages=messages, tools=tools, add_generation_prompt=True)
    assert rendered == formatted


def test_a_picture_is_in_no_text(bench: BenchFactory) -> None:
    """A file in the history leaves nothing in the prompt's text: what a picture costs is not told here."""
    part = {"type": "file", "name": "a.png", "identifier": "1", "sizeBytes": 9, "fileType": "image"}
    said = {"role": "user", "content": [{"type": "text", "text": "hello"}, part]}
    with raw(bench()) as client:
        assert client.format({"messages": [said]})["result"] == client.format(HELLO)["result"]


def test_tools_lose_what_the_protocol_does_not_know(bench: BenchFactory) -> None:
    """`strict` and other unknown fields are dropped in silence, as zod does."""
    function = READ["function"] | {"strict": True}
    with raw(bench()) as client:
        assert client.format(HELLO, [READ | {"function": function}])["result"] == client.format(HELLO, [READ])["result"]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([{"role": "developer", "content": [{"type": "text", "text": "x"}]}], None),
        ([{"role": "user", "content": "x"}], None),
        ([{"role": "tool", "content": [{"type": "text", "text": "x"}]}], None),
        (HELLO["messages"], [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
        (
            [
                {
                    "role": "assistant",
                    "content": [
                        {
                            "type": "toolCallRequest",
                            "toolCallRequest": {"type": "function", "name": "f", "arguments": "{}"},
                        }
                    ],
                }
            ],
            None,
        ),
    ],
    ids=["developer", "text", "results", "properties", "arguments"],
)
def test_what_it_cannot_read_is_warned_of_and_never_answered(bench: BenchFactory, messages: Any, tools: Any) -> None:
    """A parameter of another shape gets a warning without the call's id: who waits for the id waits for ever."""
    served = bench()
    with raw(served) as client:
        warning = client.format({"messages": messages}, tools)
        assert (warning["type"], warning["kind"]) == ("communicationWarning", "rpcParameterTypeError")
        assert "callId" not in warning
        assert client.ask("listLoaded")["type"] == "rpcResult"
    assert served.simulator.sdk.calls[0].outcome == "warning"


def test_five_warnings_are_all(bench: BenchFactory) -> None:
    """From the sixth on a connection is not even warned."""
    with raw(bench()) as client:
        assert [client.ask("nope")["kind"] for _ in range(5)] == ["rpcEndpointUnknown"] * 5
        client.send(type="rpcCall", endpoint="nope", callId=6)
        client.send(type="keepAlive")
        assert client.read() == {"type": "keepAliveAck"}


def test_what_is_no_message_is_passed_over(bench: BenchFactory) -> None:
    """No JSON, no object, no type: nothing comes."""
    with raw(bench()) as client:
        for text in ("{", "[]", "{}", '{"type": 7}'):
            client.connection.send(text)
        client.send(type="keepAlive")
        assert client.read() == {"type": "keepAliveAck"}


def test_a_model_that_is_not_loaded_is_an_error_and_stays_unloaded(bench: BenchFactory) -> None:
    """An identifier must be exact; asking loads nothing."""
    served = bench(models=[Model(KEY), Model("google/gemma-3-4b")])
    with raw(served) as client:
        for identifier in ("google/gemma-3-4b", "qwen3-8b"):
            assert client.count("x", identifier)["error"]["title"] == "No model found that fits the query"
        assert "result" not in client.ask_of("qwen3-8b", "getModelInfo", throwIfNotFound=False)
        assert "error" in client.ask_of("qwen3-8b", "getModelInfo", throwIfNotFound=True)
    assert [instance.id for instance in served.simulator.instances] == [KEY]


def test_two_instances_are_told_apart(bench: BenchFactory) -> None:
    """Each has its identifier, its reference and its window."""
    served = bench(8192)
    served.simulator.load(KEY, 4096)
    with raw(served) as client:
        first, second = client.ask("listLoaded")["result"]
        assert [(one["identifier"], one["contextLength"]) for one in (first, second)] == [
            (KEY, 8192),
            (f"{KEY}:2", 4096),
        ]
        reference = {"type": "instanceReference", "instanceReference": second["instanceReference"]}
        found = client.ask("getModelInfo", specifier=reference, throwIfNotFound=True)["result"]
        assert found["identifier"] == f"{KEY}:2"


def test_a_strict_template_raises(bench: BenchFactory) -> None:
    """What the template refuses over HTTP with a 400 is an `rpcError` here."""
    with raw(bench(strict_template="mistral")) as client:
        answer = client.format(history([user("a"), user("b")]))
        assert "Error rendering prompt with jinja template" in answer["error"]["title"]


def test_the_state_is_that_of_the_instance(bench: BenchFactory) -> None:
    """Idle, generating for somebody, and asked in LM Studio's own window."""
    gate = Gate()
    served = bench(script=lambda call: Reply("one two three", gate=gate))
    with raw(served) as client:

        def state() -> Any:
            return client.ask_of(KEY, "getInstanceProcessingState", throwIfNotFound=True)["result"]

        assert state() == {"status": "idle", "queued": 0}
        asking = threading.Thread(target=lambda: served.chat(user("hi")))
        asking.start()
        assert gate.reached.wait(LIMIT_S)
        assert state() == {"status": "generating", "queued": 1}
        gate.open()
        asking.join(LIMIT_S)
        served.simulator.instances[0].chats_in_app = 1
        assert state() == {"status": "generating", "queued": 1}


def test_servers_without_the_protocol_refuse_the_upgrade(bench: BenchFactory) -> None:
    """Other servers, other paths, and a plain GET: HTTP 200 with an error body."""
    served = bench()
    assert "error" in served.get("/llm")
    with pytest.raises(InvalidStatus) as refused:
        connect(served.base_url.replace("http", "ws") + "/nope")
    assert refused.value.response.status_code == 200
    with pytest.raises(InvalidStatus), raw(bench(api="llama.cpp")):
        pass


REFUSED = {"no_upgrade": 404, "error_200": 200}


@pytest.mark.parametrize(("mode", "status"), REFUSED.items())
def test_no_socket_is_had(bench: BenchFactory, mode: SdkMode, status: int) -> None:
    """The upgrade is answered as by a proxy that passes none, or as an unknown path."""
    served = bench()
    served.simulator.sdk.mode = mode
    with pytest.raises(InvalidStatus) as refused, raw(served):
        pass
    assert refused.value.response.status_code == status
    assert served.simulator.sdk.sockets[0].is_accepted is False


def test_a_key_is_refused_whichever_it_is(bench: BenchFactory) -> None:
    """For clients whose right key has been taken from them."""
    served = bench()
    served.simulator.sdk.mode = "refused_key"
    with raw(served, has_key=False) as client:
        client.send(authVersion=1, clientIdentifier="guest", clientPasskey="x")
        assert client.read()["success"] is False
        with pytest.raises(ConnectionClosed):
            client.read()


def test_nothing_comes(bench: BenchFactory) -> None:
    """No handshake; a handshake and no word; a key that is taken and no answer."""
    served = bench()
    served.simulator.sdk.mode = "no_handshake"
    with pytest.raises((TimeoutError, InvalidMessage)):
        connect(served.base_url.replace("http", "ws") + "/llm", open_timeout=0.2)
    served.simulator.sdk.mode = "mute"
    with raw(served, has_key=False) as client:
        client.send(authVersion=1, clientIdentifier="guest", clientPasskey="x")
        with pytest.raises(TimeoutError):
            client.read(0.2)
    served.simulator.sdk.mode = "silent"
    with raw(served) as client:
        client.send(type="rpcCall", endpoint="listLoaded", callId=1)
        with pytest.raises(TimeoutError):
            client.read(0.2)
        assert served.simulator.sdk.calls[-1].outcome == "none"


def test_answers_come_late(bench: BenchFactory) -> None:
    """`late` holds each answer for as long as it says, and each for itself."""
    served = bench()
    served.simulator.sdk.mode = "late"
    served.simulator.sdk.late_s = 1
    with raw(served) as client:
        for number in (1, 2, 3):
            client.send(type="rpcCall", endpoint="listLoaded", callId=number)
        assert {client.read()["callId"] for _ in range(3)} == {1, 2, 3}
    calls = served.simulator.sdk.calls[-3:]
    assert all((call.answered_s or 0) - call.asked_s >= 1 for call in calls)
    assert max(call.asked_s for call in calls) < min(call.answered_s or 0 for call in calls)


def test_the_connection_is_cut_in_mid_call(bench: BenchFactory) -> None:
    """The call has come, the answer never does."""
    served = bench()
    served.simulator.sdk.mode = "closes"
    with raw(served) as client, pytest.raises(ConnectionClosed):
        client.ask("listLoaded")
    assert served.simulator.sdk.endpoints() == ["listLoaded"]
    served.simulator.wait_until(lambda: served.simulator.sdk.open_sockets() == [])


def test_answers_are_nonsense(bench: BenchFactory) -> None:
    """No JSON, JSON of another shape, and far more of it than anybody asked for."""
    served = bench()
    with raw(served) as client:
        served.simulator.sdk.mode = "garbage"
        with pytest.raises(json.JSONDecodeError):
            client.count("x")
        served.simulator.sdk.mode = "wrong_shape"
        assert isinstance(client.count("x")["result"], list)
        served.simulator.sdk.mode = "huge"
        client.send(type="rpcCall", endpoint="listLoaded", callId=7)
        assert len(client.connection.recv(timeout=LIMIT_S)) > 32 << 20


def test_an_older_server_knows_fewer_endpoints(bench: BenchFactory) -> None:
    """Those of `unknown` alone, or all."""
    served = bench()
    served.simulator.sdk.mode = "unknown"
    served.simulator.sdk.unknown = frozenset({"applyPromptTemplate"})
    with raw(served) as client:
        assert client.format(HELLO)["kind"] == "rpcEndpointUnknown"
        assert client.count("x")["result"] == {"tokenCount": 1}
        served.simulator.sdk.unknown = frozenset()
        assert client.count("x")["kind"] == "rpcEndpointUnknown"


def test_the_model_goes_between_two_calls(bench: BenchFactory) -> None:
    """Its template is given, its tokenizer is gone."""
    served = bench()
    served.simulator.sdk.mode = "unloads"
    with raw(served) as client:
        formatted = client.format(HELLO)["result"]["formatted"]
        assert client.count(formatted)["error"]["title"] == "No model found that fits the query"


def test_who_is_busy_counts_later(bench: BenchFactory) -> None:
    """Template and tokenizer wait until nothing is generated; the list does not."""
    served = bench()
    served.simulator.sdk.mode = "busy"
    instance = served.simulator.instances[0]
    instance.chats_in_app = 1
    with raw(served) as client:
        specifier = {"type": "query", "query": {"identifier": KEY}}
        parameter = {"specifier": specifier, "inputString": "x"}
        client.send(type="rpcCall", endpoint="countTokens", callId=9, parameter=parameter)
        assert client.ask("listLoaded")["callId"] == 1
        instance.chats_in_app = 0
        assert client.read() == {"type": "rpcResult", "callId": 9, "result": {"tokenCount": 1}}


@pytest.mark.parametrize(("factor", "extra", "expected"), [(1.15, 0, 12), (1.0, 1, 11), (1.0, 0, 10)])
def test_counts_can_differ_from_usage(bench: BenchFactory, factor: float, extra: int, expected: int) -> None:
    """1.15 times, or one more (a second BOS), for clients that compare."""
    served = bench()
    served.simulator.sdk.tokens_factor, served.simulator.sdk.extra_tokens = factor, extra
    with raw(served) as client:
        assert client.count(" word" * 10)["result"]["tokenCount"] == expected


def test_each_call_is_recorded_with_its_time_and_its_socket(bench: BenchFactory) -> None:
    """What was asked, when, by whom, and that the socket was closed; and what comes before it is asked is nothing."""
    served = bench()
    sdk = served.simulator.sdk
    served.chat(user("hi"))
    httpx.get(f"{served.base_url}/lmstudio-greeting")
    assert (sdk.sockets, sdk.calls) == ([], [])
    before_s = time.monotonic()
    with raw(served, "guest:me") as client:
        client.count("x")
        assert [socket.client_identifier for socket in sdk.open_sockets()] == ["guest:me"]
    [call] = sdk.calls
    assert before_s < call.asked_s <= (call.answered_s or 0) <= time.monotonic()
    assert (call.endpoint, call.outcome, call.socket.namespace) == ("countTokens", "result", "llm")
    assert sdk.parameters("countTokens")[0]["inputString"] == "x"
    served.simulator.wait_until(lambda: sdk.open_sockets() == [])
