"""Real clients read a restarted answer as one message, on every route, also behind another callback's iterator hook.

They are programs: byte for byte what the model wrote, and of the restarts nothing.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.builders import prose, tools
from tests.integration.restart_bench import TEXTS, Restarting, Teller, asked, calls, shared
from tests.lmstudio_double import Reply

WANTED = calls("tool_0", words=40)
THOUGHTS = prose("client thoughts", 120)


@pytest.fixture(scope="module")
def restarting(request: pytest.FixtureRequest) -> Restarting:
    """With another callback before it, where a test says so."""
    return shared(request, "auto", behind_another=getattr(request, "param", False))


def _talks(restarting: Restarting, *, thinks: bool = False) -> Any:
    thoughts = THOUGHTS if thinks else ""
    return restarting.watch(
        "local",
        Teller(
            Reply(TEXTS["prose"], reasoning=thoughts, tool_calls=WANTED),
            second_thoughts="I go on." if thinks else "",
        ),
    )


def _options(restarting: Restarting) -> dict[str, Any]:
    return {"base_url": f"{restarting.proxy.base_url}/v1", "api_key": restarting.proxy.key, "max_retries": 0}


def _made(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("restarting", [False, True], ids=["alone", "behind another"], indirect=True)
def test_openai_chat_helper(restarting: Restarting) -> None:
    """The accumulating helper of the official client ends with one message: text, then the call."""
    watch = _talks(restarting)
    with (
        openai.OpenAI(**_options(restarting)) as client,
        client.chat.completions.stream(model="local", messages=asked("helper"), tools=tools(1)) as stream,  # type: ignore[arg-type]
    ):
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert (choice.message.content or "") == TEXTS["prose"]
    assert (_made(choice.message), choice.finish_reason) == (WANTED, "tool_calls")
    assert len(watch.chats) > 1


def test_anthropic_messages(restarting: Restarting) -> None:
    """The messages API through Anthropic's client: thinking, text and tool use with their blocks in order."""
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")
    _talks(restarting, thinks=True)
    schema = tools(1)[0]["function"]
    system, user = asked("anthropic")
    client = anthropic.Anthropic(base_url=restarting.proxy.base_url, api_key=restarting.proxy.key, max_retries=0)
    with (
        client,
        client.messages.stream(
            model="local",
            max_tokens=8000,
            system=system["content"],
            messages=[user],
            tools=[{"name": schema["name"], "description": "d", "input_schema": schema["parameters"]}],
        ) as stream,
    ):
        message = stream.get_final_message()
    text = "".join(block.text for block in message.content if block.type == "text")
    thoughts = "".join(block.thinking for block in message.content if block.type == "thinking")
    assert text == TEXTS["prose"]
    assert thoughts.startswith(THOUGHTS)
    uses = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    assert uses == [(name, json.loads(arguments)) for name, arguments in WANTED]
    assert message.stop_reason == "tool_use"
    kinds = [block.type for block in message.content]
    assert (kinds[0], kinds[-1]) == ("thinking", "tool_use")
