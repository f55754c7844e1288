"""By which way an answer goes on: what servers of a kind can do, what each has shown, what a request allows."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.core.go_on import Partial, Way
from litellm_compaction.core.messages import Request
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.engine.servers import ALL_WAYS, KnownWays
from litellm_compaction.windows.windows import Target
from tests.builders import JsonDict, assistant, parsed, system, user
from tests.engine.bench import Bench
from tests.virtual_time import Clock

DAY_S = 24 * 3600.0
BEGUN = "\n".join(f"Line {number} of the answer tells something about rivers." for number in range(260)) + "\nThe "


def target(name: str = "m", **changes: Any) -> Target:
    known: dict[str, Any] = {"key": name, "model": name, "api_base": "http://here:1/v1", "api_key": None}
    return Target(**{**known, "context_length": None, **changes})


def test_a_way_that_fails_is_left_for_a_day() -> None:
    """At once where it never led on, after two in a row where it had; an update of the server may change that."""
    clock = Clock(1e9)
    known_ways = KnownWays(clock)
    one = target()
    known_ways.learn(one, "m", "raw", "refused")
    assert known_ways.ways(one, "api/v1") == ("prefill", "turn")
    known_ways.learn(one, "m", "prefill", "went_on")
    known_ways.learn(one, "m", "prefill", "began_anew")
    assert known_ways.ways(one, "api/v1") == ("prefill", "turn")
    known_ways.learn(one, "m", "prefill", "began_anew")
    assert known_ways.ways(one, "api/v1") == ("turn",)
    assert known_ways.ways(target("another"), "api/v1") == ALL_WAYS
    clock.now_s += DAY_S + 1
    assert known_ways.ways(one, "api/v1") == ALL_WAYS


ALL: frozenset[Way] = frozenset(ALL_WAYS)
ASKED = [system("You write."), user("Write about rivers.")]


async def continued(
    raw: list[JsonDict] = ASKED, *, tools: tuple[JsonDict, ...] = (), ways: frozenset[Way] = ALL, **partial: Any
) -> PreparedRequest:
    """What is sent to an LM Studio with a model of known template and 4,096 tokens."""
    bench = Bench()
    context = bench.context(target=bench.target(4096, model="qwen2.5-7b-instruct", is_lmstudio=True))
    request = Request(messages=parsed(raw), tools=tools)
    begun = Partial(**{"text": BEGUN, **partial})
    return await bench.compactor.continued(await bench.compactor.go_on(request, begun, context, ways=ways))


async def test_the_prompt_ends_inside_the_answer() -> None:
    """Best of all: rendered here, up to the last character but for the white space before the next word."""
    prepared = await continued()
    assert prepared.continuation.way == "raw"
    assert prepared.continuation.prompt is not None
    assert prepared.messages is not None
    assert BEGUN.rstrip().endswith(prepared.shown)
    assert prepared.continuation.prompt.text.endswith(f"<|im_start|>assistant\n{prepared.shown}")
    assert prepared.messages[-1].role == "assistant"
    assert "Write about rivers." in prepared.continuation.prompt.text
    assert prepared.action == "compacted"


async def test_a_request_may_exclude_a_way() -> None:
    """Tools and structured output need the server's own parsing; thoughts and a client's own prefill need asking."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert (await continued(tools=(tool,))).continuation.way == "prefill"
    assert (await continued(is_json=True)).continuation.way == "prefill"
    assert (await continued([*ASKED[:1], user("Say <|im_end|> twice.")])).continuation.way == "prefill"
    assert (await continued(ways=frozenset(("prefill", "turn")))).continuation.way == "prefill"
    asked = [
        await continued([*ASKED, assistant("Rivers")]),
        await continued(text="<think>\nRivers are"),
        await continued(text="", reasoning="Rivers are"),
        await continued(ways=frozenset(("turn",))),
        await continued([user("Say <|im_end|> twice.")], ways=frozenset(("raw", "turn"))),
    ]
    assert [(each.continuation.way, each.shown) for each in asked] == [("turn", "")] * 5
    assert all(each.messages is not None and each.messages[-1].role == "user" for each in asked)


@pytest.mark.parametrize("text", ["", " \n", "<think>"])
@pytest.mark.parametrize("is_long", [False, True])
async def test_thoughts_stay_whole_where_they_leave_room(text: str, is_long: bool) -> None:
    """In whichever field they came; else their end stays, and no compaction is made for them."""
    bench, thoughts = Bench(), BEGUN.removesuffix("\nThe ") if is_long else BEGUN[:4_000]
    partial = Partial(text=text, reasoning=thoughts, closes=True)
    if text.strip():
        partial = Partial(text=text + thoughts, closes=True)
    context = bench.context(target=bench.target(4096, is_lmstudio=True))
    plan = await bench.compactor.go_on(Request(messages=parsed(ASKED)), partial, context, ways=("raw",))
    assert plan.ways == ("raw",)
    assert isinstance(plan.prepared, PreparedRequest)
    shown = plan.messages[-1].text
    assert (shown == thoughts) != is_long
    assert thoughts.endswith(shown)
    assert len(shown) > 400
