"""Servers' numbers: they are asked for where our doubt decides, and that of a prompt that was cut teaches nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from litellm_compaction.core.messages import Message, Request, with_only_text
from litellm_compaction.engine import Attempts
from litellm_compaction.errors import DoesNotFit
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.prompt import render
from litellm_compaction.windows.windows import Target, Window, Windows
from tests.builders import JsonDict, assistant, calls, chat, parsed, prose, result, system, tools, user
from tests.engine.bench import Bench
from tests.engine.test_compactor_ask_server import KNOWN, Server, lm_studio
from tests.lmstudio_double.rendering import count

SMALL, WINDOW = 4096, 32_768


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


class Vocabulary:
    """Counts prompts by its own vocabulary; cuts what is longer than its window, as LM Studio may."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.asked: list[int] = []
        self.requests: list[Request] = []

    def tokens(self, messages: Sequence[Message]) -> int:
        return int(self.factor * (3 + sum(count(message.text) + 5 for message in messages)))

    async def __call__(self, request: Request) -> int | None:
        tokens = self.tokens(request.messages)
        self.asked.append(tokens)
        self.requests.append(request)
        return min(tokens, SMALL)


async def test_nothing_is_asked_twice() -> None:
    """Both hooks of a request, its retries, and the next request that begins alike go by what was told."""
    server, engine = Vocabulary(1.2), Bench(counter=TokenCounter())
    asked = [system(prose("rules", 1700)), user(prose("question", 1700))]
    for attempts in (one := Attempts(summary_calls_left=4), one, Attempts(summary_calls_left=4)):
        with pytest.raises(DoesNotFit):
            await engine.guard(asked, SMALL, measure=server, attempts=attempts)
    told = [request.messages for request in server.requests]
    assert len(told) == len(set(map(str, told))) <= 3


class Counting(Windows):
    """Of a server that counts a request for nothing, as llama.cpp and vLLM do."""

    def __init__(self, server: Vocabulary) -> None:
        super().__init__(cache_s=5.0)
        self.server = server

    async def tokens_of(self, target: Target, request: Request) -> int | None:
        return self.server.tokens(request.messages)


def test_a_part_of_a_call_is_shown_by_every_template() -> None:
    """Llama 3.1's leaves out what is said beside a call: by its number of nothing the whole was a third of itself."""
    talk = parsed([user("Write it."), calls("123456789", arguments=json.dumps({"content": "word " * 900}))])
    part = with_only_text(talk[1], "word word")
    for model in ("llama-3.1", "qwen3", "mistral-nemo", "gpt-oss"):
        prompt = render(family_of("", model), (talk[0], part), ())
        assert prompt is not None
        assert "word word" in prompt.text


async def test_what_costs_nothing_is_asked_about_a_compaction() -> None:
    """What is sent is counted to the token; after a restart, beside a record that is too little, a summary's prompt."""
    server = Vocabulary(1.8)
    engine = Bench(counter=TokenCounter(), windows=Counting(server))
    target = engine.target(SMALL, model="llama-3.1-8b")
    prepared = await engine.guard(chat(60, words=60), measure=server, target=target)
    assert prepared.messages is not None
    assert (prepared.count.is_told, prepared.count.tokens) == (True, server.tokens(prepared.messages))
    again = Bench(counter=TokenCounter(), windows=Counting(server), store=engine.store)
    await again.guard(chat(110, words=60), measure=server, target=target)
    assert max(map(server.tokens, again.ask.messages)) <= SMALL
    assert server.requests == []


class Reloaded(Windows):
    """Of a model that is loaded anew, with a quarter of its window, after it was looked at twice."""

    looks = 0

    async def resolve(self, target: Target, *, fresh: bool = False) -> Window:
        self.looks += 1
        window = await super().resolve(target, fresh=fresh)
        return window if self.looks <= 2 else replace(window, tokens=window.tokens // 4)


async def test_nothing_is_asked_that_does_not_surely_fit_the_window_of_now() -> None:
    """A server may cut a longer question without a word, and its number would be believed."""
    server = Vocabulary(1.2)
    engine = Bench(counter=TokenCounter(), windows=Reloaded(cache_s=5.0))
    prepared = await engine.guard(chat(100, words=60), 4 * SMALL, measure=server)
    assert prepared.window.tokens == SMALL
    assert max(server.asked) <= SMALL
