"""What becomes of a compaction whose summary does not come, comes from another model, or may not be asked for."""

from __future__ import annotations

import copy
import json

import pytest

from litellm_compaction.core.messages import chain
from litellm_compaction.engine import Attempts
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.stores import Originals
from litellm_compaction.stores.rows import MemoryRows
from tests.builders import (
    JsonDict,
    as_bytes,
    assistant,
    budget,
    calls,
    chat,
    conversation,
    parsed,
    result,
    user,
)
from tests.engine.bench import SUMMARY, Bench, FakeAsk, sent
from tests.engine.test_compactor import LONG


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (SummaryFailed("error", "503"), "error"),
        ("", "empty"),
        ("I'm sorry, but I can't do that.", "refusal"),
        ("<think>hm", "reasoning_only"),
    ],
)
async def test_without_a_summary_the_record_is_verbatim(answer: str | Exception, reason: str) -> None:
    """P5: the next rung fits and holds the user's words; the event says what went wrong."""
    bench = Bench(ask=FakeAsk(answer))
    prepared = await bench.guard(LONG)
    messages = sent(LONG, prepared)
    assert prepared.action == "compacted"
    assert "The user's own words, oldest first; where two disagree the later holds:\n- Question 0." in messages[1].text
    assert bench.outcomes == ["fallback"]
    assert (bench.last.reason, bench.last.summary_calls) == (reason, 1)


async def test_the_next_pruning_model_is_asked() -> None:
    """In the operator's order, until one gives a summary; the event names it, and why it was not the first."""
    bench = Bench()
    dead, good = FakeAsk(SummaryFailed("error")), FakeAsk()
    models = [bench.pruning_model(dead, label="dead", window=8192), bench.pruning_model(good, label="good")]
    prepared = await bench.guard(LONG, pruning_models=models)
    assert SUMMARY in sent(LONG, prepared)[1].text
    assert (bench.last.outcome, bench.last.pruning_model, bench.last.summary_calls) == ("compacted", "good", 2)
    assert bench.last.reason == "error"


async def test_a_pruning_model_of_unknown_window_is_passed_over() -> None:
    """Nobody knows how long a prompt it takes; it is not asked, and costs no attempt."""
    bench = Bench()
    unknown, good = FakeAsk(), FakeAsk()
    target = bench.target(None, model="unknown")
    models = [bench.pruning_model(unknown, label="x", window=1), bench.pruning_model(good, label="good")]
    models[0] = type(models[0])(label="unknown", target=target, ask=unknown, is_same=False)
    attempts = Attempts(summary_calls_left=1)
    await bench.guard(LONG, pruning_models=models, attempts=attempts)
    assert (len(unknown.prompts), len(good.prompts), attempts.summary_calls_left) == (0, 1, 0)
    assert (bench.last.outcome, bench.last.reason) == ("compacted", "pruning_model_no_window")


@pytest.mark.parametrize("window", [1500, 2048, 4096])
async def test_a_small_pruning_model_gets_prompts_that_it_can_read(window: int) -> None:
    """P1 for our own calls: prompt + margin + summary inside of its window, not of the served one."""
    bench = Bench()
    model = bench.pruning_model(bench.ask, window=window)
    prepared = await bench.guard(chat(100, words=300), 32_768, pruning_models=[model])
    assert prepared.action == "compacted"
    assert bench.ask.prompts or bench.last.reason == "no_room"
    for prompt, output_tokens in zip(bench.ask.prompts, bench.ask.max_tokens, strict=True):
        assert len(prompt) / 4 + 64 + output_tokens <= window


def _reads(*ports: int) -> list[JsonDict]:
    """A task and a read file for each port, the last one already talked about; equal ports are one file."""
    raw = [user("Find the ports.")]
    for number, port in enumerate(ports):
        text = f"server alpha_{port} listens on port {port}\n" + "".join(f"padding {n}\n" for n in range(240))
        call = calls(f"c{number}", name="read_file", arguments=json.dumps({"path": f"conf/{port}.ini"}))
        raw += [call, result(f"c{number}", text)]
    return [*raw, assistant("Done."), user("And?")]


async def test_a_stub_says_what_stood_in_its_result() -> None:
    """Beside its call, and not in the record too; the prompt is as small as planned, and the next turn's the same."""
    raw = _reads(*range(8001, 8013))
    bench = Bench()
    prepared = await bench.guard(raw, 8192)
    messages = sent(raw, prepared)
    (kept,) = [compaction for _, compaction in bench.store.kept]
    assert len(kept.stubbed) > 3
    assert [each.position for each in kept.stub_contents] == list(kept.stubbed)
    for at, text, handle in kept.stub_contents:
        assert handle == ""
        name = json.loads(messages[at - 1].calls[0].arguments)["path"].removeprefix("conf/").removesuffix(".ini")
        assert f"- server alpha_{name} listens on port {name}" in text
        assert text in messages[at].text
        assert f"alpha_{name}" not in kept.ledger
    assert prepared.count.tokens <= budget(8192, conversation(parsed(raw))).target_tokens(10**6)
    later = [*raw, assistant("ok"), user("more")]
    again = await bench.guard(later, 8192)
    assert again.action == "reused"
    assert as_bytes(sent(later, again))[: len(messages)] == as_bytes(messages)


def _originals() -> tuple[Originals, MemoryRows]:
    rows = MemoryRows(ttl_s=100, max_bytes=10_000_000)
    return Originals(rows, ttl_s=100, secret=lambda: "sk-master"), rows


@pytest.mark.parametrize(
    ("keeps", "resolves", "shows"), [("compacted", True, True), ("off", True, False), ("compacted", False, False)]
)
async def test_stubs_show_the_handles_of_what_is_kept(keeps: str, resolves: bool, shows: bool) -> None:
    """If originals are kept and the model can look them up; the newest ones, and the prompt is no larger for it."""
    originals, _ = _originals()
    raw = _reads(*range(8001, 8013))
    bench = Bench(originals=originals)
    tool = {"type": "function", "function": {"name": "read_file"}}
    prepared = await bench.guard(raw, 8192, keep_originals=keeps, carries_calls=resolves, tools=[tool])
    (kept,) = [compaction for _, compaction in bench.store.kept]
    hashes = chain(parsed(raw))
    shown = {each.position: each.handle for each in kept.stub_contents if each.handle}
    assert bool(shown) == shows
    assert shown == {at: hashes[at + 1][:12] for at in kept.stubbed[len(kept.stubbed) - len(shown) :]}
    messages = sent(raw, prepared)
    assert all(f" or recall {handle} if it is needed." in messages[at].text for at, handle in shown.items())
    assert prepared.count.tokens - prepared.count.tools_tokens <= budget(8192, conversation(parsed(raw))).target_tokens(
        10**6
    )
    await originals.settle()


async def test_covered_messages_are_kept() -> None:
    """Those that the record replaces, and no others; a turn that reuses the record keeps nothing more."""
    originals, rows = _originals()
    bench = Bench(originals=originals)
    prepared = await bench.guard(LONG, keep_originals="compacted")
    await originals.settle()
    assert prepared.action == "compacted"
    stretches = await originals.scan()
    covered = bench.last.covered_messages
    hashes = chain(parsed(LONG))
    assert [entry for each in stretches for entry in each.hashes[1:]] == list(hashes[1 : covered + 1])
    assert {each.scope for each in stretches} == {"team"}
    before = await rows.scan()
    later = [*LONG, assistant("ok"), user("more")]
    assert (await bench.guard(later, keep_originals="compacted")).action == "reused"
    await originals.settle()
    assert {row.key: row.body for row in await rows.scan()} == {row.key: row.body for row in before}


async def test_a_client_request_has_one_budget_of_summaries() -> None:
    """P5: over pruning models, phases, retries and fallbacks; with none left, the verbatim record has to do."""
    bench = Bench(ask=FakeAsk(SummaryFailed("error")))
    attempts = Attempts(summary_calls_left=3)
    models = [bench.pruning_model(bench.ask, label=f"m{n}") for n in range(2)]
    for turn in range(4):
        raw = copy.deepcopy(LONG)
        raw[1]["content"] += f" variant {turn}"
        sent(raw, await bench.guard(raw, pruning_models=models, attempts=attempts))
    assert len(bench.ask.prompts) == 3
    assert attempts.summary_calls_left == 0
    assert [event.reason for event in bench.events] == ["error", "error", "attempts", "attempts"]  # type: ignore[union-attr]


async def test_zero_summary_calls_compact_without_a_model() -> None:
    """`max_summary_calls: 0` is a way to run."""
    bench = Bench()
    sent(LONG, await bench.guard(LONG, max_summary_calls=0))
    assert (bench.ask.prompts, bench.outcomes) == ([], ["fallback"])
