"""The protocol of LM Studio's SDKs: what the official client reads, and how harsh the double can be to others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.lmstudio_double import Model
from tests.simulator.bench import KEY, Bench, BenchFactory, user

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


class Raw:
    """A client that shows what really comes."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self._calls = 0

    def read(self) -> Any:
        """The next message."""
        return json.loads(self.connection.recv(timeout=LIMIT_S))

    def send(self, **message: Any) -> None:
        """Sends a message."""
        self.connection.send(json.dumps(message))

    def ask(self, endpoint: str, **parameter: Any) -> Any:
        """Calls an endpoint and returns what comes next."""
        self._calls += 1
        message = {"type": "rpcCall", "endpoint": endpoint, "callId": self._calls}
        self.send(**message, **({"parameter": parameter} if parameter else {}))
        return self.read()

    def format(self, history: Any, tools: Any = None) -> Any:
        """The answer to `applyPromptTemplate`."""
        opts = {} if tools is None else {"toolDefinitions": tools}
        specifier = {"type": "query", "query": {"identifier": KEY}}
        stack = {"layers": []}
        return self.ask(
            "applyPromptTemplate", specifier=specifier, history=history, predictionConfigStack=stack, opts=opts
        )


@contextmanager
def raw(bench: Bench, identifier: str = "guest") -> Iterator[Raw]:
    """A raw client, with its key accepted."""
    url = bench.base_url.replace("http://", "ws://") + "/llm"
    with connect(url, open_timeout=LIMIT_S, close_timeout=1, max_size=None) as connection:
        client = Raw(connection)
        client.send(authVersion=1, clientIdentifier=identifier, clientPasskey="x")
        assert client.read() == {"success": True}
        yield client


async def test_the_official_client_lists_measures_and_counts(bench: BenchFactory) -> None:
    """List, context length, template with tools, count and tokens, by `lmstudio` from PyPI; nothing is loaded."""
    lmstudio = pytest.importorskip("lmstudio", reason="LM Studio's client is not installed")
    served = bench(6000, models=[Model(KEY), Model("google/gemma-3-4b")])
    async with lmstudio.AsyncClient(served.base_url.removeprefix("http://")) as client:
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
