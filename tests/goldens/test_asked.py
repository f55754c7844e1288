"""What servers are asked that count otherwise than we do, and pruning models; a line a request.

`GOLDENS=write pytest tests/goldens -n 0` writes the file anew; its diff belongs into the commit that changes it.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from litellm_compaction.core.go_on import Partial
from litellm_compaction.core.messages import Request
from litellm_compaction.engine import Attempts
from litellm_compaction.engine.ask import SummaryJob, summarize
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.errors import DoesNotFit, SummaryFailed
from litellm_compaction.tokens.counter import TokenCounter
from tests.builders import chat, count, parsed, prose, system, tools, user
from tests.engine.bench import Bench, FakeAsk
from tests.engine.test_additions import LONG, QUESTION, QUOTED, Scene, asked
from tests.engine.test_servers import Vocabulary
from tests.goldens.tellers import TELLS, Teller, recorded
from tests.virtual_time import run

_FILE = Path(__file__).parent / "asked.txt"


@pytest.mark.parametrize("model", ["made-up-7b", "llama-3.1-8b-instruct"])
@pytest.mark.parametrize("tells", ["agent", "values"])
@pytest.mark.parametrize("factor", [0.7, 1.5])
async def test_the_questions_are_as_recorded(model: str, tells: str, factor: float) -> None:
    """Before a request is changed or refused for our doubt alone; its answer teaches, and an alarm is told."""
    bench, window_tokens, lines = Bench(counter=TokenCounter()), 4096, list[str]()
    raw = [system(prose("rules", 2_300 if tells == "values" else 2))]
    server, told = Vocabulary(factor), TELLS[tells](Teller(f"{model} {tells} {factor}"))
    context = bench.context(target=bench.target(window_tokens, model=model), measure=server)
    for share in (0.4, 0.9, 1.3, 3.0):
        while len(str(raw)) < share * 4 * window_tokens or raw[-1]["role"] == "assistant":
            raw.append(next(told))
        request, attempts = Request(messages=parsed(raw), tools=tuple(tools(1))), Attempts(summary_calls_left=4)
        server.asked.clear()
        try:
            prepared = await bench.compactor.guard(request, replace(context, attempts=attempts))
        except DoesNotFit as error:
            lines.append(f"{server.asked}: {error.needed_tokens} are needed")
            continue
        total, asked = prepared.count, [*server.asked]
        # The last prompt is cut without a word.
        tokens = int((await server(prepared.sent(request)) or 0) * (0.4 if share > 2 else 1))
        bench.compactor.replies.learn(context, prepared, prompt_tokens=tokens, completion_tokens=1)
        bound = prepared.max_output_tokens(None)
        lines.append(f"{asked}: {prepared.action}, {total.low} to {total.high} are {tokens}, answer {bound}")
    lines.append(" ".join(bench.outcomes))
    assert lines == recorded(_FILE, f"{model} {tells} {factor}", lines)


def test_the_pauses_are_as_recorded() -> None:
    """How long a server's count is waited for, and when one that gave none, or no summary, is asked again."""

    async def measured() -> list[str]:
        clock, asked = asyncio.get_running_loop().time, list[str]()
        bench = Bench(counter=TokenCounter(), clock=clock, ask=FakeAsk(SummaryFailed("error")))

        async def never(request: Request) -> int | None:
            begun_s = clock()
            try:
                await asyncio.sleep(1000)
            finally:
                asked.append(f"{len(request.messages)} at {begun_s:.1f} for {clock() - begun_s:.1f}")
            return None

        attempts = Attempts(summary_calls_left=4)
        for turn in range(24):
            raw = [system("Be brief."), user(prose(f"turn {turn}", 1_200 + 20 * turn))]
            await bench.guard(raw, 4096, measure=never, summary_timeout_s=300, attempts=attempts)
            await asyncio.sleep(31)
        return asked

    async def summarized() -> list[str]:
        clock, asked = asyncio.get_running_loop().time, list[str]()
        ask = FakeAsk("The king was very wise and kind. " * 20)
        bench = Bench(ask=ask, clock=clock)
        for topic, pause_s in enumerate((5, 10, 5, 25, 5, 55, 5, 115, 5, 115, 5, 0)):
            before = len(ask.prompts)
            await bench.guard([user(f"About {topic}."), *chat(8, words=150)], 2048, clear_tool_results=False)
            asked += [f"{clock():.0f}"] if len(ask.prompts) > before else []
            await asyncio.sleep(pause_s)
        # Another tenant did not make it loop.
        await bench.guard(chat(8, words=150), 2048, clear_tool_results=False, scope="other")
        asked.append(f"{len(ask.prompts) - len(asked)} of another")
        return asked

    lines = [", ".join(run(measured())), ", ".join(run(summarized()))]
    assert lines == recorded(_FILE, "pauses", lines)


async def test_the_replies_are_as_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """What is learned of a server's number, and what is told to the operator: a cut prompt, an odd count."""
    lines = []
    for words, completion_tokens in ((100, 1), (250, 1), (1800, 0)):
        told = []
        for tokens in (4097, 4015, 4014, 3000, 106, 105, 104, 96, 95, 94, 60, 20):
            caplog.clear()
            bench = Bench(counter=TokenCounter())
            context = bench.context(target=bench.target(4096, model="llama-3.1-8b-instruct"))
            request = bench.request([user("word " * words)])
            prepared = bench.compactor.measurer.unchanged(await bench.compactor.measurer.measure(request, context))
            number = tokens if tokens > 1000 else round(prepared.count.own.tokens * tokens / 100)
            given = {"prompt_tokens": number, "completion_tokens": completion_tokens}
            bench.compactor.replies.learn(context, prepared, **given)
            again = await bench.compactor.measurer.measure(request, context)
            warned = (record.getMessage().split(";")[-1] for record in caplog.records)
            told.append(
                " ".join([f"{tokens}", *bench.outcomes, *warned, *["learned"] * (again.count.told is not None)])
            )
        lines.append(f"{words} words, answer {completion_tokens}: {', '.join(told)}")
    assert lines == recorded(_FILE, "replies", lines)


async def test_the_summaries_are_as_recorded() -> None:
    """In how many parts they are asked for, with how long prompts, and how long they are or why there is none."""
    said = "\n".join(f"- {prose(f'point {at}', 12)}" for at in range(90))
    answers = (said, said.replace("\n", " "), SummaryAnswer(text=said[:700], finish_reason="length"), "A short one.")
    lines = []
    for limit, (summary_tokens, earlier), at in itertools.product(
        (700, 1200, 2500), ((40, ""), (200, prose("the record", 150)), (800, "")), range(4)
    ):
        told = TELLS["agent"](Teller(f"{limit}"))
        job = SummaryJob(
            messages=parsed(list(itertools.islice(told, 1, 30))),
            earlier=earlier,
            request="Go on.",
            summary_tokens=summary_tokens,
            prompt_limit_tokens=limit,
            is_brief=at % 2 == 0,
        )
        ask = FakeAsk(answers[at])
        try:
            result = f"{count(await summarize(job, ask, count))} tokens"
        except SummaryFailed as error:
            result = error.reason
        if at in (0, summary_tokens // 200 % 4):
            lines.append(f"{limit} for {summary_tokens}: {[count(prompt) for prompt in ask.prompts]}, {result}")
    assert lines == recorded(_FILE, "summaries", lines)


async def test_the_look_ups_are_as_recorded() -> None:
    """How many are answered, what is shown for them, how many stay at one place; and excerpts beside a question."""
    scene, lines = Scene(), []
    prepared = await scene.sent(LONG[:31], window=4096)
    for at in range(5):
        words = " x" * 700 if at == 4 else " ib20 un40 ek60 or80 ib100 un120"
        await scene.look_up(prepared, *[f'{{"query": "or{at}{words}"}}'] * (4 if at == 3 else 1))
    messages = (await scene.sent(LONG[:31], window=4096)).messages or ()
    shown = [count(message.text) for message in messages if message.role == "tool"]
    lines.append(f"{shown} for {[len(call.arguments) for message in messages for call in message.calls]}")
    questions = (user(QUESTION + " and" * words) for words in (0, 2300, 2390))
    bench = Bench(ask=FakeAsk(SummaryFailed("error")))
    lines.append(f"beside: {[(await asked([*QUOTED, each], bench)).excerpt_tokens for each in questions]}")
    assert lines == recorded(_FILE, "look-ups", lines)


async def test_the_continuations_are_as_recorded() -> None:
    """How much of an answer stays where it goes on: its length, its window, and the room for its rest."""
    lines = []
    for window_tokens, room_tokens in itertools.product((2048, 8192), (0, 400)):
        told = []
        for words in (50, 700, 1_200, 6_000):
            bench, partial = Bench(), Partial(text=prose("the answer", words))
            request = bench.request([system("Be brief."), user(prose("the question", 300))])
            context = bench.context(window_tokens)
            try:
                plan = await bench.compactor.go_on(request, partial, context, room_tokens=room_tokens)
                told.append(f"{[len(message.text) for message in plan.messages[2:]]} {type(plan.prepared).__name__}")
            except DoesNotFit as error:
                told.append(f"{error.needed_tokens} are needed")
        lines.append(f"{window_tokens}, {room_tokens} free: {', '.join(told)}")
    assert lines == recorded(_FILE, "continuations", lines)
