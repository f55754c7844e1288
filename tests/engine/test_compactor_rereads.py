"""Models that read a whole prompt again after any change: their prompts change rarely and deep (issue 14, point 6)."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from litellm_compaction.core.compaction import Compaction
from tests.builders import JsonDict, as_bytes, calls, chat, count, prose, result, system, user
from tests.engine.bench import Bench, sent, settled

# A sliding window by its name, and a model that goes on from wherever a prompt begins to differ.
SLIDING, PLAIN = "gemma-3-12b-it", "llama-3.1-8b-instruct"
WINDOW = 8192


class Run(NamedTuple):
    """What an agent's run has cost a server that cannot go back, and what was made.

    Attributes:
        work_tokens: prompts that were read, of turns and of summaries, and fifteen for each token that was written.
        changes: how often a prompt did not go on from the one before it.
    """

    work_tokens: int
    changes: int
    kept: list[Compaction]


def agent(rounds: int, *, words: int, says: int, prefix: str = "You are helpful.") -> list[JsonDict]:
    raw = [system(prefix), user("Find out why the build is slow.")]
    for number in range(rounds):
        raw += [
            calls(
                f"c{number}", content=prose(f"said {number}", says), arguments=f'{{"cmd": "make part{number % 50}"}}'
            ),
            result(f"c{number}", prose(f"result {number}", words)),
        ]
    return raw


async def run_of(model: str, raw: list[JsonDict]) -> Run:
    """Plays a run against a scripted server that keeps what it read last, and only goes on behind all of it.

    Args:
        model: its name.
        raw: the run.
    """
    bench = Bench()
    target = bench.target(WINDOW, model=model)
    pruning = bench.pruning_model(bench.ask)
    held: list[str] = []
    read = changes = 0

    def read_now(fresh: list[str]) -> tuple[int, bool]:
        nonlocal held
        is_continued = fresh[: len(held)] == held
        found = len(held) if is_continued else 0
        held = fresh
        return sum(map(count, fresh[:found])), is_continued

    for end in range(4, len(raw) + 1, 2):
        asked = len(bench.ask.prompts)
        context = bench.context(WINDOW, target=target, pruning_models=[pruning])
        prepared = await bench.compactor.guard(bench.request(raw[:end]), context)
        for messages in bench.ask.messages[asked:]:
            fresh = as_bytes(messages)
            read += sum(map(count, fresh)) - read_now(fresh)[0]
        prompt = as_bytes(sent(raw[:end], prepared))
        room = bench.compactor.room(context)
        await room.acquire(prepared, prepared.max_output_tokens(None), is_watched=True)
        cached, is_continued = read_now(prompt)
        read += sum(map(count, prompt)) - cached
        changes += not is_continued
        bench.compactor.replies.learn(
            context,
            prepared,
            prompt_tokens=prepared.count.tokens,
            completion_tokens=5,
        )
        room.release()
    return Run(read + 15 * sum(bench.ask.max_tokens), changes, [compaction for _, compaction in bench.store.kept])


@pytest.mark.parametrize(
    ("words", "says"),
    [pytest.param(150, 10, marks=pytest.mark.slow), (60, 60), pytest.param(400, 10, marks=pytest.mark.slow)],
)
async def test_a_model_that_rereads_everything_reads_less(words: int, says: int) -> None:
    """Its prompts change no more often, and to less, which is all read again: two thirds to nine tenths of the work."""
    raw = agent(100, words=words, says=says)
    plain, sliding = await run_of(PLAIN, raw), await run_of(SLIDING, raw)
    assert sliding.changes <= plain.changes
    assert sliding.work_tokens < 0.9 * plain.work_tokens


async def test_an_edit_takes_all_that_it_can() -> None:
    """Stubs are free where everything is read again: results that would have been next are not cleared a turn later."""
    raw = agent(40, words=300, says=10)
    plain, sliding = [(await run_of(model, raw)).kept[0] for model in (PLAIN, SLIDING)]
    assert (plain.level, sliding.level) == ("edit", "edit")
    assert len(plain.stubbed) < len(sliding.stubbed) == sliding.covered_messages // 2


async def test_nothing_is_written_ahead_behind_a_conversation_that_goes_on() -> None:
    """The server could not go back from the instruction to the conversation, and would read all of the next turn."""
    plain, sliding = [await _written_ahead(model) for model in (PLAIN, SLIDING)]
    assert (plain, sliding) == (1, 0)


async def _written_ahead(model: str) -> int:
    bench = Bench()
    raw = chat(30, words=72)
    context = bench.context(
        WINDOW,
        target=bench.target(WINDOW, model=model),
        background="idle",
        may_write_ahead=_allowed,
    )
    prepared = await bench.compactor.guard(bench.request(raw), context)
    bench.compactor.background.answered(
        bench.request(raw), context, prepared, answer="Fine.", used_tokens=prepared.count.tokens
    )
    await settled(400)
    await bench.compactor.background.aclose()
    return len(bench.ask.prompts)


async def _allowed() -> bool:
    return True
