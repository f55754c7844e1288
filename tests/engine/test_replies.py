"""Servers' numbers: one moves no count further than its interval, and that of a prompt that was cut teaches nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Literal

import pytest

from litellm_compaction.tokens.counter import TokenCounter
from tests.builders import JsonDict, assistant, calls, chat, prose, result, system, tools, user
from tests.engine.bench import Bench
from tests.engine.test_compactor_ask_server import KNOWN, Server, lm_studio

WINDOW = 32_768


def code(seed: int, lines: int) -> str:
    """So many lines, each of about 40 tokens."""
    made = random.Random(seed)
    return "".join(
        f"    def method_{made.randrange(9999)}(self, value_{made.randrange(99)}: int) -> str:\n"
        f'        return f"{{self.name}} {made.random():.4f} {{value}}"\n'
        for _ in range(lines)
    )


def written(number: int, lines: int) -> list[JsonDict]:
    """A call that writes a file, and its result."""
    arguments = json.dumps({"file_path": f"/src/part{number}.py", "content": code(number, lines)})
    return [calls(f"{number:09d}", name="Write", arguments=arguments), result(f"{number:09d}", "Written.")]


async def turn(server: Server, messages: Sequence[JsonDict], schemas: Sequence[JsonDict]) -> None:
    """One request as it is sent, and its answer."""
    prepared = await server.guard(messages, schemas, asked_tokens=8192)
    sent = messages if prepared.messages is None else [dict(message.raw) for message in prepared.messages]
    told = await server.post(sent, schemas, max_tokens=1)  # type: ignore[arg-type]
    replies = server.bench.compactor.replies
    replies.learn(server.context(), prepared, prompt_tokens=told, completion_tokens=1)
    await asyncio.gather(*replies._asking)


@pytest.mark.parametrize("usage", ["kept", "sent"])
@pytest.mark.parametrize("lines", [360, 420])
async def test_a_protocol_that_is_disbelieved_poisons_no_counts(usage: Literal["kept", "sent"], lines: int) -> None:
    """Its numbers are 1.5 % off; a call that was cut, and one that passes: nothing of ours is cut after them."""
    async with lm_studio(KNOWN, architecture="qwen3", factor=1.2, window=WINDOW) as server:
        server.simulator.sdk.tokens_factor, server.simulator.truncated_usage = 1.015, usage
        schemas, start = tools(60), [system(prose("rules", 8000)), user("Write the file.")]
        session = [*start]
        for number, size in enumerate((14, lines)):
            await turn(server, session, schemas)
            session += written(number, size)
        for number in range(3):
            await turn(server, [*session, assistant("Done."), user(f"Thanks {number}.")], schemas)
        assert not any(record.truncated for record in server.simulator.requests)
        [instance] = server.simulator.instances
        for size in (0, 100):
            fresh = [start[0], user(f"Another session. {code(7, size)}")]
            prepared = await server.guard(fresh, schemas)
            assert prepared.messages is None
            truth = server.simulator.count_chat(instance, fresh, schemas)
            assert prepared.count.low <= truth <= prepared.count.high


@pytest.mark.parametrize(
    ("tokens", "usage_tokens", "teaches"),
    [
        (9_000, WINDOW + 1_300, False),
        (9_000, WINDOW - 100, False),
        (9_000, 9_600, True),
        # Text that no server has counted may take twice our count: what fits by ours may have been cut.
        (20_000, 21_000, False),
        (20_000, 26_000, False),
        (20_000, 18_000, False),
        (14_500, 15_500, True),
    ],
)
async def test_a_number_of_what_may_have_been_cut_teaches_nothing(
    tokens: int, usage_tokens: int, teaches: bool
) -> None:
    """It may be what was left of a prompt, near the window or far below it; of one that surely fits it does."""
    engine = Bench(counter=TokenCounter())
    target = engine.target(WINDOW, model=KNOWN)
    prepared = await engine.guard(talk(tokens), WINDOW, target=target)
    assert prepared.messages is None
    context = engine.context(WINDOW, target=target)
    engine.compactor.replies.learn(context, prepared, prompt_tokens=usage_tokens, completion_tokens=5)
    again = await engine.guard(talk(tokens), WINDOW, target=target)
    assert (again.count.told is not None) is teaches


async def test_the_alarm_ends_where_a_server_counts_otherwise() -> None:
    """A server with 0.8 of our exact count raises an alarm until a prompt of another size shows the same."""
    bench = Bench(counter=TokenCounter())
    target = bench.target(1_000_000, model="llama-3.1-8b")
    for turns in (20, 40, 44, 60):
        context = bench.context(target=target)
        prepared = await bench.guard(chat(turns, words=150), target=target)
        told = round(prepared.count.own.tokens * 0.8)
        bench.compactor.replies.learn(context, prepared, prompt_tokens=told, completion_tokens=5)
    assert bench.outcomes == ["prompt_far_below_count"]
    assert prepared.count.low <= told <= prepared.count.high


def talk(tokens: int) -> list[JsonDict]:
    """A request of about so many tokens."""
    return [system("Be brief."), user(code(tokens, tokens // 45))]
