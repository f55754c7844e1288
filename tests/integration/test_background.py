"""The record of the next compaction, written while nobody waits, through a real proxy and the simulator's cache."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from litellm_compaction.core.messages import START_NOTICE
from tests.builders import answered, prose, talk, user
from tests.integration.bench import AUTH, SUMMARY, Bench, Group, Watch, answers, open_bench
from tests.integration.rows import Rows
from tests.lmstudio_double import Gate, Reply

_WINDOW = 8192
# Of 8,192: over 60 %, and under the trigger with a short turn more.
_BEFORE, _FILLED = 4200, 5200
_MORE_WORDS = 1100
_GROUPS = [Group(name, _WINDOW, slots=1) for name in ("used", "arriving")]


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bench, Rows]]:
    """A proxy that writes ahead, with keys of several people and a row for each call."""
    folder = tmp_path_factory.mktemp("idle")
    rows = Rows(folder / "rows.jsonl")
    with open_bench(
        folder,
        _GROUPS,
        {"background": "idle"},
        environ=rows.environ,
        litellm_settings={"callbacks": ["recorder.handler"]},
        general_settings=AUTH,
    ) as bench:
        yield bench, rows


def _outcomes(watch: Watch) -> list[str]:
    return [record.outcome for record in watch.summaries]


def test_the_turn_that_is_compacted_waits_for_nothing(idle: tuple[Bench, Rows]) -> None:
    """The summary was written before it; the turn between is sent as it came, and finds its conversation in the cache.

    From then on every turn begins with the same bytes.
    """
    bench, rows = idle
    key = "sk-anna.ahead"
    asked = bench.proxy.by(key)
    watch, messages = bench.watch("used"), talk("ahead", _FILLED)
    for turn in (talk("ahead", _BEFORE), messages):
        assert asked.chat("used", turn, stream=True).headers["x-litellm-compaction"] == "none"
    bench.proxy.expect_logged(r"prepared model=used ")

    between = answered(messages, "Understood.", "And then?")
    assert asked.chat("used", between, stream=True).headers["x-litellm-compaction"] == "none"
    assert watch.sent() == between
    assert watch.chats[-1].computed_tokens <= 0.05 * watch.chats[-1].prompt_tokens

    full = answered(between, "Understood.", prose("ahead", _MORE_WORDS))
    answer = asked.chat("used", full, stream=True)
    assert answer.headers["x-litellm-compaction"] == "reused"
    assert START_NOTICE not in answer.text
    assert SUMMARY in str(watch.sent()[1]["content"])
    assert watch.problems(full) == []
    first = watch.sent()
    after = answered(full, "Understood.", "Fine.")
    assert asked.chat("used", after, stream=True).headers["x-litellm-compaction"] == "reused"
    assert watch.sent()[: len(first)] == first
    assert _outcomes(watch) == ["ok"]

    # One row for each turn and one for the summary, all of the same key and people.
    found = rows.of(key, 6)
    assert len(found) == 6
    assert len({json.dumps(row["identity"]) for row in found}) == 1


def test_who_comes_has_the_engine_at_once(idle: tuple[Bench, Rows]) -> None:
    """The call in the background is closed, and its only slot free, before the request of somebody else is answered."""
    bench, _ = idle
    gate = Gate()
    watch = bench.watch("arriving", answers(Reply(SUMMARY, gate=gate)))
    for tokens in (_BEFORE, _FILLED):
        bench.proxy.by("sk-dora").chat("arriving", talk("arriving", tokens))
    assert gate.reached.wait(60)
    answer = bench.proxy.by("sk-bert").chat("arriving", [user("Hello.")])
    assert answer.json()["choices"][0]["message"]["content"] == "Understood."
    assert _outcomes(watch) == ["disconnected"]
    gate.open()
