"""`tool_schemas: slim` through a real proxy: what the server gets, on every route."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from litellm_compaction.core.tool_schemas import slimmed
from tests.builders import talk, tools
from tests.integration.bench import Bench, Group, open_bench
from tests.integration.forms import ask

SCHEMAS = tools(6, words=300)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A guarded deployment."""
    groups = [Group("slim")]
    folder = tmp_path_factory.mktemp("slim")
    with open_bench(folder, groups, {"tool_schemas": "slim"}) as opened:
        yield opened


@pytest.mark.parametrize("stream", [False, True])
def test_the_server_gets_slim_tools(bench: Bench, stream: bool) -> None:
    """The same bytes in each turn; the header and one line of the log say what it saved, and the count knows it."""
    expected, saved = slimmed(SCHEMAS)
    watch = bench.watch("slim")
    messages = talk(f"slim tools {stream}", 1500)
    ask = bench.proxy.stream if stream else bench.proxy.chat
    for _ in range(2):
        answer = ask("slim", messages, tools=SCHEMAS)
        assert answer.headers["x-litellm-compaction-tools-saved"] == f"{saved} characters"
    assert [body["tools"] for body in watch.bodies] == [list(expected)] * 2
    counted = int(answer.headers["x-litellm-compaction-tokens-after"])
    assert counted == pytest.approx(watch.chats[-1].prompt_tokens, rel=0.1)
    assert len(bench.proxy.logged("tool_schemas_slimmed")) == 1


def test_messages_and_responses_are_slimmed_as_well(bench: Bench) -> None:
    """Their tools come in other shapes, and reach the server as a chat's."""
    functions = [each["function"] for each in SCHEMAS]
    as_messages = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in functions
    ]
    as_responses = [{"type": "function", **each} for each in functions]
    said = [{"role": "user", "content": "Read the file."}]
    for route, schemas in (("messages", as_messages), ("responses", as_responses)):
        watch = bench.watch("slim")
        assert ask(bench, route, "slim", said, tools=schemas).status == 200
        [sent] = watch.bodies
        described = [tool["function"]["description"] for tool in sent["tools"]]
        assert described == [tool["function"]["description"] for tool in slimmed(SCHEMAS).tools], route  # type: ignore[index, call-overload]
