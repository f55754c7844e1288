"""Models that read a whole prompt again after any change: their prompts change rarely and deep (issue 14, point 6)."""

from __future__ import annotations

from litellm_compaction.core.compaction import Compaction
from tests.builders import JsonDict, calls, prose, result, system, user
from tests.engine.bench import Bench

# A sliding window by its name, and a model that goes on from wherever a prompt begins to differ.
SLIDING, PLAIN = "gemma-3-12b-it", "llama-3.1-8b-instruct"
WINDOW = 8192


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


async def first_edit(model: str, raw: list[JsonDict]) -> Compaction:
    """The first compaction of a run."""
    bench = Bench()
    for end in range(4, len(raw) + 1, 2):
        target = bench.target(WINDOW, model=model)
        await bench.guard(raw[:end], WINDOW, target=target, pruning_models=[bench.pruning_model(bench.ask)])
        if bench.store.kept:
            return bench.store.kept[0][1]
    raise AssertionError("nothing was compacted")


async def test_an_edit_takes_all_that_it_can() -> None:
    """Stubs are free where everything is read again: results that would have been next are not cleared a turn later."""
    raw = agent(40, words=300, says=10)
    plain, sliding = [await first_edit(model, raw) for model in (PLAIN, SLIDING)]
    assert (plain.level, sliding.level) == ("edit", "edit")
    cleared = [[*made.form_of.values()].count("line") for made in (plain, sliding)]
    assert cleared[0] < cleared[1] == sliding.covered_messages // 2
