"""The restart loop over a scripted server: one answer out of several upstream requests (promises P1, P5, P6)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.core.messages import (
    ABORT_NOTICE,
    ATTEMPTS_NOTICE,
    DONE_NOTICE,
    NEARLY_FULL_NOTICE,
    START_NOTICE,
    THOUGHTS_NOTICE,
    Message,
    without_notices,
)
from litellm_compaction.engine import Reservation
from litellm_compaction.errors import overflow_from_text
from litellm_compaction.events import CompactionEvent, ContinuationEvent
from litellm_compaction.proxy.answer.protocol import Notices, Received, UpstreamDropped, UpstreamError
from litellm_compaction.simulator import Reply, numbered_words
from litellm_compaction.simulator.rendering import count, decode, encode
from litellm_compaction.summarizer import SummaryAnswer
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.windows.windows import Target, Window
from tests.builders import prose, talk
from tests.engine.bench import settled
from tests.proxy.scripted import RESTARTED, Context, Read, Scene, Turn, chunks_of, goes_on, summarized

SHORT = [{"role": "user", "content": "Count."}]
WORDS = numbered_words(1240)  # 2,600 tokens: two streams' worth in a window of 2,048
ARGUMENTS = json.dumps({"path": "a.txt", "text": prose("argument", 300)})
LONG_ARGUMENTS = json.dumps({"path": "a.txt", "text": prose("argument", 1000)})
# Facts on LM Studio, section 0: how its versions and engines word an overflow.
OVERFLOWS = [
    (
        "Trying to keep the first 2100 tokens when context the overflows. However, the model is loaded with context "
        "length of only 2048 tokens, which is not enough."
    ),
    (
        "The number of tokens to keep from the initial prompt is greater than the context length (n_keep: 2100>= "
        "n_ctx: 2048)."
    ),
    "Cannot truncate prompt with n_keep (2100) >= n_ctx (2048)",
    (
        "Reached context length of 2048 tokens with model (arch: x) that does not currently support mid-generation "
        "context overflow."
    ),
    "Context size has been exceeded.",
    "Input does not fit in context length. The input has 2100 tokens, but the context length only supports 2048.",
    "request (2100 tokens) exceeds the available context size (2048 tokens), try increasing it",
]


@pytest.mark.parametrize("chunk_tokens", [pytest.param(1, marks=pytest.mark.slow), 3, 7, 20, 50])
async def test_text_is_carried_over(chunk_tokens: int) -> None:
    """An answer longer than the window arrives whole, as one stream, whatever the size of the chunks."""
    scene = Scene(SHORT, [Turn(reply=goes_on(WORDS))], chunk_tokens=chunk_tokens)
    read = await scene.read()
    assert read.text == WORDS
    assert read.raw_text.count(RESTARTED) == len(scene.server.opened) - 1 == 1
    assert read.shape_problems() == []
    assert read.finish_reasons == ["stop"]
    assert read.chunks[0]["id"] == "chatcmpl-1"
    assert [opened.is_continuation for opened in scene.server.opened] == [False, True]


@pytest.mark.parametrize("chunk_tokens", [1, 50])
async def test_upstream_is_stopped_before_its_window_ends(chunk_tokens: int) -> None:
    """The first stream is closed once 90 % of the window are taken, and the list of the second ends with the user."""
    scene = Scene(SHORT, [Turn(reply=goes_on(WORDS))], chunk_tokens=chunk_tokens)
    await scene.read()
    first, second = scene.server.opened
    assert 0.85 * 2048 <= first.prompt_tokens + first.completion_tokens <= 0.95 * 2048 + chunk_tokens
    assert second.messages is not None
    assert [message.role for message in second.messages][-2:] == ["assistant", "user"]
    for opened in (first, second):
        assert opened.prompt_tokens + opened.max_tokens + 64 <= 2048


async def test_a_restart_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan by which an answer is stopped is the one by which it goes on: a conversation is not looked at twice."""
    scene = Scene(SHORT, [Turn(reply=goes_on(WORDS))])
    planner, planned = scene.compactor.continuing, []
    plan = planner.plan

    async def counting(*arguments: Any, **options: Any) -> Any:
        planned.append(await plan(*arguments, **options))
        return planned[-1]

    monkeypatch.setattr(planner, "plan", counting)
    read = await scene.read()
    assert (read.text, read.raw_text.count(RESTARTED)) == (WORDS, 1)
    assert len(planned) == 1


async def test_usage_is_summed_and_comes_once() -> None:
    """The one usage has the first prompt and the tokens of all streams."""
    scene = Scene(SHORT, [Turn(reply=goes_on(WORDS))])
    read = await scene.read()
    generated = sum(opened.completion_tokens for opened in scene.server.opened)
    (usage,) = read.usages
    assert usage["prompt_tokens"] == scene.server.opened[0].prompt_tokens
    assert usage["completion_tokens"] == pytest.approx(generated, rel=0.01)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    quiet = await Scene(SHORT, [Turn(reply=goes_on(WORDS))], wants_usage=False).read()
    assert (quiet.usages, quiet.shape_problems()) == ([], [])


async def test_short_answer_passes_as_it_is() -> None:
    """An answer that fits is one upstream request and the model's words only."""
    scene = Scene(talk("short", 400), [Turn(reply=Reply("Four plain words here."))])
    read = await scene.read()
    assert (read.raw_text, read.finish_reasons, len(scene.server.opened)) == ("Four plain words here.", ["stop"], 1)
    assert scene.server.opened[0].messages is None
    assert read.shape_problems() == []


@pytest.mark.parametrize(
    ("within", "text", "reasoning"),
    [("content", RESTARTED, ""), ("reasoning", "", RESTARTED), ("off", "", "")],
)
@pytest.mark.parametrize("before", ["content", "reasoning", "off"])
async def test_notices_go_where_they_are_wanted(before: Any, within: Any, text: str, reasoning: str) -> None:
    """A restart is announced in the content, in the reasoning, or nowhere, wherever the answer's opening was."""
    read = await Scene(SHORT, [Turn(reply=goes_on(WORDS))], notices=Notices(before, within, within)).read()
    assert read.raw_text.count(RESTARTED) == (text != "")
    assert read.text == WORDS
    assert read.reasoning == reasoning


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("within", ["content", "off"])
@pytest.mark.parametrize("before", ["content", "reasoning", "off"])
async def test_pending_compaction_is_announced_before_it_is_made(before: Any, within: Any, is_json: bool) -> None:
    """The first chunk comes before the summary, if only to open the stream; a document is announced by nothing."""
    asked = asyncio.Event()

    async def ask(messages: Sequence[Message], *, max_tokens: int, **with_tools: Any) -> SummaryAnswer:
        asked.set()
        return await summarized(messages, max_tokens=max_tokens)

    reply = "{}" if is_json else "Fine."
    notices = Notices(before, within, within)
    scene = Scene(talk("before", 2500), [Turn(reply=Reply(reply))], notices=notices, ask=ask, is_json=is_json)
    chunks = chunks_of(await scene.answer())
    first = await anext(chunks)
    assert not asked.is_set()
    assert first["choices"][0]["delta"]["role"] == "assistant"
    read = Read([first, *[chunk async for chunk in chunks]])
    said = f"{START_NOTICE}\n\n{DONE_NOTICE}\n\n"
    assert read.raw_text.removesuffix(reply) == (said if before == "content" and not is_json else "")
    assert read.reasoning == (said if before == "reasoning" and not is_json else "")
    assert read.shape_problems() == []
    assert scene.listener.actions == ["compacted"]


THOUGHTS = numbered_words(1300)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "think"])
async def test_thinking_that_fills_the_window_is_closed(field: Any, is_whole: bool) -> None:
    """The last thoughts are quoted and the model is told to answer now; thoughts and text stay apart."""
    second = Reply("Four.") if field == "think" else Reply("Four.", reasoning="So it is four.")
    turns = [
        Turn(reply=Reply("", reasoning=THOUGHTS), reasoning_field=field),
        Turn(reply=second, reasoning_field=field),
    ]
    scene = Scene(SHORT, turns, is_whole=is_whole, settings={"reasoning_budget_ratio": 0})
    read = await scene.read()
    thoughts, end, text = read.text.rpartition("</think>")
    assert text.strip() == "Four."
    assert (end != "", read.text.count("<think>")) == (field == "think", int(field == "think"))
    seen = (thoughts or read.reasoning).removesuffix("So it is four.").removeprefix("<think>\n").strip()
    assert THOUGHTS.startswith(seen)
    assert count(seen) > 1500
    assert (read.shape_problems(), read.finish_reasons) == ([], ["stop"])
    opened = scene.server.opened[1]
    assert opened.messages is not None
    assert seen[-200:] in opened.messages[-1].text
    assert "answer now" in opened.messages[-1].text
    assert opened.continuation is not None
    assert opened.continuation.closing is not None


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("field", ["reasoning_content", "think"])
async def test_a_model_that_only_thinks_gets_one_more_window_and_not_three(field: Any, is_whole: bool) -> None:
    """Thoughts again, behind the request to answer: the answer ends with `length`, and one notice says why."""
    turns = [Turn(reply=Reply("", reasoning=numbered_words(1300 * at, 1)), reasoning_field=field) for at in (1, 3)]
    scene = Scene(SHORT, turns, is_whole=is_whole, settings={"reasoning_budget_ratio": 0})
    told: list[Any] = []
    scene.compactor = scene.compactor_told(told.append)
    read = await scene.read()
    assert len(scene.server.opened) == 2
    # What it may think more is bounded: nobody waits for a second window of thoughts.
    assert scene.server.opened[1].completion_tokens < scene.server.opened[0].completion_tokens * 0.75
    opening, closing = THOUGHTS_NOTICE.split("{used}/{window}")
    assert read.raw_text.count(opening) == read.raw_text.count(closing) == 1
    assert read.raw_text.count(ABORT_NOTICE[:20]) == 0
    assert (read.finish_reasons, read.shape_problems()) == (["length"], [])
    outcomes = [event.outcome for event in told if isinstance(event, ContinuationEvent)]
    assert outcomes == ["restarted", "unanswered"]
    assert opening not in without_notices(read.raw_text)


async def test_thinking_that_nothing_can_close_says_so() -> None:
    """No room is gained, or no restart allowed: `length`, and the notice is about thoughts."""
    for settings, content in (({"max_restarts": 0}, "Count."), ({}, prose("sacred", 1600))):
        turns = [Turn(reply=Reply("", reasoning=THOUGHTS))]
        scene = Scene([{"role": "user", "content": content}], turns, settings=settings)
        read = await scene.read()
        assert len(scene.server.opened) == 1
        assert read.raw_text.count(THOUGHTS_NOTICE.split("(")[0]) == 1
        assert read.finish_reasons == ["length"]


async def test_a_server_that_refuses_the_fields_is_asked_by_words() -> None:
    """What closes thoughts elsewhere is unknown here: the same request again without it."""
    turns = [
        Turn(reply=Reply("", reasoning=THOUGHTS)),
        Turn(refusal=UpstreamError("reasoning_effort: none is not one of low, medium, high", status=400)),
        Turn(reply=Reply("Four.")),
    ]
    scene = Scene(SHORT, turns, is_lmstudio=True)
    read = await scene.read()
    assert (read.text, read.shape_problems()) == ("Four.", [])
    asked = [opened.continuation.closing for opened in scene.server.opened if opened.continuation is not None]
    assert asked == [{"reasoning_effort": "none"}, {}]


async def test_answer_behind_thoughts_is_carried_over() -> None:
    """Where the text began before the limit, the text goes on and the thoughts are not thought again."""
    text = numbered_words(1000)
    again = goes_on(text, reasoning="I go on.")
    turns = [Turn(reply=goes_on(text, reasoning=numbered_words(200))), Turn(reply=again)]
    read = await Scene(SHORT, turns).read()
    assert read.text == text
    assert read.shape_problems() == []


@pytest.mark.parametrize("opens_again", [False, True])
async def test_inline_thoughts_behind_text_stay_one_block(opens_again: bool) -> None:
    """A `<think>` block behind an answer's beginning, cut at the limit, is one block if opened again or not."""
    text = f"I see.\n<think>\n{numbered_words(1300)}\n</think>\n\nThe answer is four."
    exact = goes_on(text)
    tag = "<think>\n" if opens_again else ""
    turns = [Turn(reply=exact), Turn(reply=lambda messages: Reply(tag + exact(messages).content))]
    read = await Scene(SHORT, turns).read()
    assert (read.text.count("<think>"), read.text.count("</think>")) == (1, 1)
    assert read.text.split() == text.split()


@pytest.mark.parametrize("window_tokens", [2048, 8192], ids=["held", "streamed"])
@pytest.mark.parametrize("chunk_tokens", [1, 20])
async def test_tool_calls_come_whole_and_once(window_tokens: int, chunk_tokens: int) -> None:
    """Parallel calls after some text: each complete, once, behind the text, `tool_calls` at the end."""
    calls = [("read", ARGUMENTS), ("write", ARGUMENTS), ("list", "{}")]
    scene = Scene(
        SHORT, [Turn(reply=Reply("I look.", tool_calls=calls))], window_tokens=window_tokens, chunk_tokens=chunk_tokens
    )
    read = await scene.read()
    assert read.calls == calls
    assert (read.raw_text, read.finish_reasons) == ("I look.", ["tool_calls"])
    assert read.shape_problems() == []
    fragments = [delta for delta in read.deltas if delta.get("tool_calls")]
    # Held ones come whole, each in an event of its own.
    whole = [call["function"]["arguments"] for delta in fragments for call in delta["tool_calls"]]
    assert (whole == [arguments for _, arguments in calls]) == (window_tokens == 2048)
    assert all(len(delta["tool_calls"]) == 1 for delta in fragments)
    texts = [index for index, delta in enumerate(read.deltas) if delta.get("content")]
    assert max(texts) < read.deltas.index(fragments[0])


@pytest.mark.parametrize("text", ["", "I write the file now. "])
async def test_cut_call_is_generated_again_after_a_compaction(text: str) -> None:
    """A call that does not fit beside the history is never begun: it comes whole from a compacted conversation."""
    whole = Reply(text, tool_calls=[("write", LONG_ARGUMENTS)])
    scene = Scene(talk("cut call", 1050), [Turn(reply=whole), Turn(reply=Reply("", tool_calls=whole.tool_calls))])
    read = await scene.read()
    first, second = scene.server.opened
    assert second.prompt_tokens < first.prompt_tokens - 300
    assert read.calls == [("write", LONG_ARGUMENTS)]
    assert (read.text, read.finish_reasons, read.shape_problems()) == (text, ["tool_calls"], [])


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(("history", "requests"), [(0, 1), (1050, 2)], ids=["nothing to compact", "a history"])
async def test_call_larger_than_the_window_ends_regularly(history: int, requests: int, is_whole: bool) -> None:
    """It is asked for again only where a compaction gives it more room than the last try; nothing of it is sent."""
    huge = json.dumps({"text": prose("huge", 4000)})
    messages = talk("huge call", history) if history else SHORT
    scene = Scene(messages, [Turn(reply=Reply("Now. ", tool_calls=[("write", huge)]))], is_whole=is_whole)
    told: list[Any] = []
    scene.compactor = scene.compactor_told(told.append)
    read = await scene.read()
    assert read.calls == []
    assert (read.finish_reasons, read.shape_problems()) == (["length"], [])
    assert "⚠️" in read.raw_text
    assert len(scene.server.opened) == requests
    prompts = [opened.prompt_tokens for opened in scene.server.opened]
    assert prompts == sorted(set(prompts), reverse=True)
    continued = [event for event in told if isinstance(event, ContinuationEvent)]
    assert [event.outcome for event in continued] == ["restarted", "aborted"][-requests:]
    # What the prompt has less: not the call, which has to be written again.
    assert sum(event.gained_tokens for event in continued[:-1]) == pytest.approx(prompts[0] - prompts[-1], abs=40)


async def test_later_call_that_is_cut_is_not_begun() -> None:
    """Of parallel calls the client gets whole ones only: it executes those, and the model asks for the rest again."""
    first = json.dumps({"text": prose("first", 3000)})
    cut = json.dumps({"text": prose("cut", 8000)})
    calls = [("write", first), ("list", ARGUMENTS), ("write", cut)]
    scene = Scene(talk("parallel", 1000), [Turn(reply=Reply("", tool_calls=calls))], window_tokens=8192)
    read = await scene.read()
    assert read.calls == calls[:2]
    assert (read.raw_text, read.finish_reasons, read.shape_problems()) == ("", ["tool_calls"], [])
    assert len(scene.server.opened) == 1


async def test_call_that_flows_and_is_cut_ends_the_answer() -> None:
    """A call begun with much room and cut all the same is not issued again: its fragments end with `length`."""
    calls = [("write", json.dumps({"text": prose("cut", 9000)}))]
    scene = Scene(SHORT, [Turn(reply=Reply("", tool_calls=calls))], window_tokens=8192)
    read = await scene.read()
    assert len(scene.server.opened) == 1
    assert [name for name, _ in read.calls] == ["write"]
    assert scene.listener.has_filled
    opening, _ = NEARLY_FULL_NOTICE.split("{used}/{window}")
    assert read.raw_text.startswith(f"\n\n{opening}")
    assert (read.finish_reasons, read.shape_problems()) == (["length"], [])


async def test_json_document_is_joined_without_notices() -> None:
    """Structured output: nothing but the document, and `stop` when it is one."""
    document = json.dumps({"rows": [f"row{number} of many" for number in range(400)]})
    scene = Scene(SHORT, [Turn(reply=goes_on(document))], is_json=True)
    read = await scene.read()
    assert len(scene.server.opened) > 1
    assert json.loads(read.raw_text) == json.loads(document)
    assert (read.finish_reasons, read.shape_problems()) == (["stop"], [])
    assert all(opened.is_continuation for opened in scene.server.opened[1:])


@pytest.mark.parametrize("reasoning", ["", THOUGHTS[:200]], ids=["blank", "thoughts"])
async def test_json_document_that_has_not_begun_is_asked_for_as_a_document(reasoning: str) -> None:
    """White space and thoughts are no part of it: the next request is no piece behind a seam, and keeps its format."""
    document = '{"rows": 3}'
    begun = Reply(f"\n\n{document}", reasoning=reasoning)
    full = Turn(reply=begun, end="error", after_tokens=1 + count(reasoning), text=OVERFLOWS[4])
    scene = Scene(talk("blank", 1000), [full, Turn(reply=Reply(document))], is_json=True, chunk_tokens=1)
    read = await scene.read()
    assert (read.raw_text.strip(), read.finish_reasons, read.shape_problems()) == (document, ["stop"], [])
    opened = scene.server.opened[1]
    assert opened.continuation is None or opened.continuation.begins_anew


async def test_json_document_that_broke_ends_as_length() -> None:
    """A joined document that does not parse is not passed off as finished."""
    document = json.dumps({"rows": [f"row{number} of many" for number in range(400)]})
    scene = Scene(SHORT, [Turn(reply=Reply(document)), Turn(reply=Reply("}}} that was all"))], is_json=True)
    read = await scene.read()
    assert "⚙️" not in read.raw_text
    assert (read.finish_reasons, read.shape_problems()) == (["length"], [])


@pytest.mark.parametrize("reported", [True, 99], ids=["exact", "one_less"])
async def test_clients_own_limit_is_not_continued(reported: bool | int) -> None:
    """`length` at the client's own max_tokens is the end, also where the server reports one token less."""
    scene = Scene(SHORT, [Turn(reply=Reply(WORDS), usage=reported)], output_tokens=100)
    read = await scene.read()
    assert WORDS.startswith(read.raw_text)
    assert count(read.raw_text) == 100
    assert (read.finish_reasons, len(scene.server.opened)) == (["length"], 1)
    assert scene.server.opened[0].max_tokens == 100
    assert not scene.listener.has_filled


async def test_clients_limit_holds_over_restarts() -> None:
    """Over all streams together no more is generated than the client asked for."""
    scene = Scene(SHORT, [Turn(reply=goes_on(WORDS))], output_tokens=2300)
    read = await scene.read()
    assert len(scene.server.opened) == 2
    assert read.finish_reasons == ["length"]
    assert WORDS.startswith(read.text)
    assert count(read.text) == pytest.approx(2300, rel=0.02)
    assert read.usages[0]["completion_tokens"] <= 2300


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 12, 40], ids=["a character", "a word", "some words"])
@pytest.mark.parametrize("end", ["limit", "overflow"])
async def test_stop_string_across_the_seam_is_seen(end: str, before: int) -> None:
    """What had come of a stop string when the stream was cut comes again, so that the server can see it whole."""
    first = Turn(reply=Reply(WORDS), end="error", after_tokens=700, text=OVERFLOWS[4])
    first = Turn(reply=Reply(WORDS)) if end == "limit" else first
    plain = Scene(SHORT, [first, Turn(reply=Reply(""))], settings={"max_restarts": 1})
    await plain.read()
    received = decode(encode(WORDS)[: plain.server.opened[0].completion_tokens])
    stop = WORDS[len(received) - before : len(received) + 9]
    exact = goes_on(WORDS)
    stopped = Turn(reply=lambda messages: Reply(exact(messages).content.partition(stop)[0]))
    scene = Scene(SHORT, [first, stopped], stops=("\n\nUser:", stop))
    read = await scene.read()
    assert len(scene.server.opened) == 2
    assert read.text == WORDS.partition(stop)[0]
    assert (read.finish_reasons, read.shape_problems()) == (["stop"], [])


@pytest.mark.slow
async def test_what_only_looks_like_a_stop_string_arrives() -> None:
    """Every second word begins like it: nothing is lost, within a stream and at its end."""
    scene = Scene(SHORT, [Turn(reply=goes_on(WORDS))], stops=("word ", "word1300 and more"), chunk_tokens=1)
    read = await scene.read()
    assert read.text == WORDS
    assert len(scene.server.opened) > 1


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
async def test_restarts_are_bounded(max_restarts: int) -> None:
    """After the last restart the stream ends regularly with the notice, and everything generated is there."""
    words = numbered_words(6000)
    scene = Scene(SHORT, [Turn(reply=goes_on(words))], settings={"max_restarts": max_restarts})
    read = await scene.read()
    assert len(scene.server.opened) == max_restarts + 1
    text, notice, rest = read.text.partition(f"\n\n{ATTEMPTS_NOTICE}")
    assert words.startswith(text)
    assert (notice, rest, read.finish_reasons) == (f"\n\n{ATTEMPTS_NOTICE}", "", ["length"])
    assert read.shape_problems() == []


@pytest.mark.parametrize("filled", [0.72, 0.8, 0.88])
async def test_answer_that_no_compaction_helps_goes_on_to_the_end_of_the_window(filled: float) -> None:
    """One message that fills most of the window: nothing is stopped or announced for nothing, then the numbers."""
    messages = [{"role": "user", "content": prose("sacred", int(filled * 2048) - 20)}]
    scene = Scene(messages, [Turn(reply=Reply(WORDS))], settings={"answer_min_tokens": 16})
    read = await scene.read()
    (opened,) = scene.server.opened
    assert opened.completion_tokens == opened.max_tokens
    # All but the margin, here 5 % of the prompt.
    assert 1.05 * opened.prompt_tokens + opened.max_tokens >= 2048 - 2
    text, _, notice = read.raw_text.partition("\n\n")
    assert WORDS.startswith(text)
    assert count(text) >= opened.max_tokens - 2
    opening, closing = NEARLY_FULL_NOTICE.split("{used}/{window}")
    used, window = notice.removeprefix(opening).removesuffix(closing).split("/")
    assert (int(used), int(window)) == (opened.prompt_tokens + opened.completion_tokens, 2048)
    assert (read.finish_reasons, read.shape_problems()) == (["length"], [])
    expected = {"outcome": "aborted", "restarts": 0, "prompt_tokens": [opened.prompt_tokens]}
    assert (read.usages[0]["compaction"], scene.listener.details) == (expected, expected)


CLOSINGS = {
    "attempts": (SHORT, Turn(reply=goes_on(numbered_words(2400))), {"max_restarts": 1}, ATTEMPTS_NOTICE),
    "nearly full": ([{"role": "user", "content": prose("sacred", 1600)}], Turn(reply=Reply(WORDS)), {}, "nearly full"),
    "exceeded": (
        [{"role": "user", "content": prose("sacred", 1600)}],
        Turn(reply=Reply(WORDS), end="error", after_tokens=200, text=OVERFLOWS[4]),
        {},
        "Context limit exceeded",
    ),
}


@pytest.mark.parametrize("kind", ["stream", "whole", "json"])
@pytest.mark.parametrize("place", ["content", "reasoning", "off"])
@pytest.mark.parametrize("outcome", CLOSINGS)
async def test_closing_text_goes_where_nothing_can_break(outcome: str, place: Any, kind: str) -> None:
    """In the text for people, in a last thought for programs; a document and its rest stay without a word of ours.

    What it says is so: "exceeded" only where the server, or the window, says so.
    """
    messages, turn, settings, said = CLOSINGS[outcome]
    notices = Notices("off", "off", place)
    kinds = {"is_json": kind == "json", "is_whole": kind == "whole"}
    scene = Scene(messages, [turn], settings=settings, notices=notices, **kinds)
    read = await scene.read()
    text, thoughts = read.text, read.reasoning
    in_text = place == "content" and kind != "json"
    assert (said in text, said in thoughts) == (in_text, place == "reasoning")
    assert ("⚠️" in text) == in_text
    assert without_notices(thoughts) == ""
    assert numbered_words(2400).startswith(without_notices(text))
    assert (read.finish_reasons, read.shape_problems()) == (["length"], [])
    told = read.usages[0]["compaction"]
    assert told["outcome"] == ("attempts" if outcome == "attempts" else "aborted")
    assert told["restarts"] == len(scene.server.opened) - 1


async def test_answer_that_fits_behind_a_full_floor_is_untouched() -> None:
    """6,800 tokens in 8,192 and an answer of 600: past the line, inside the window, one request and no notice."""
    answer = numbered_words(300)
    messages = [{"role": "user", "content": prose("large", 6750)}]
    read = await (scene := Scene(messages, [Turn(reply=Reply(answer))], window_tokens=8192)).read()
    (opened,) = scene.server.opened
    assert opened.prompt_tokens + opened.completion_tokens > 0.9 * 8192
    assert (read.raw_text, read.finish_reasons, read.shape_problems()) == (answer, ["stop"], [])


@pytest.mark.parametrize("floor", [0.35, 0.5, 0.6, 0.65])
@pytest.mark.parametrize("window_tokens", [2048, pytest.param(8192, marks=pytest.mark.slow)])
async def test_every_restart_gains_an_output_buffer(floor: float, window_tokens: int) -> None:
    """The higher the floor, the less of the answer stays verbatim; what gains nothing does not happen."""
    messages = [{"role": "user", "content": prose("floor", int(floor * window_tokens))}]
    words = numbered_words(3 * window_tokens)
    scene = Scene(messages, [Turn(reply=goes_on(words))], window_tokens=window_tokens)
    read = await scene.read()
    first, *others = scene.server.opened
    buffer_tokens = min(1000, window_tokens // 10)
    before = first
    for opened in others:
        assert before.prompt_tokens + before.completion_tokens - opened.prompt_tokens >= buffer_tokens
        assert window_tokens - opened.prompt_tokens >= buffer_tokens
        before = opened
    assert read.raw_text.count(DONE_NOTICE) == read.raw_text.count(START_NOTICE) == len(others)
    assert read.usages[0].get("compaction", {"restarts": 0})["restarts"] == len(others)  # type: ignore[call-overload]
    text = read.text.partition("\n\n⚠️")[0]
    assert words.startswith(text)
    assert (read.finish_reasons, read.shape_problems()) == (["length"], [])


@pytest.mark.parametrize("text", OVERFLOWS)
@pytest.mark.parametrize("face", ["refused", "event"])
async def test_overflow_before_the_answer_is_compacted_away(text: str, face: str) -> None:
    """An overflow that comes in spite of us is answered by a harder compaction that nobody notices."""
    bad = Turn(refusal=UpstreamError(text, object())) if face == "refused" else Turn(end="error", text=text)
    scene = Scene(talk("invisible", 1000), [bad, Turn(reply=Reply("Fine."))])
    read = await scene.read()
    first, second = scene.server.opened
    assert second.prompt_tokens < 0.75 * first.prompt_tokens
    assert not second.is_continuation
    assert (read.raw_text, read.finish_reasons, read.shape_problems()) == ("Fine.", ["stop"], [])


async def test_empty_stream_at_a_full_window_is_an_overflow() -> None:
    """No delta and a usage that fills the window (bug tracker 2339) is compacted away; twice, it is an error."""
    scene = Scene(talk("empty", 1000), [Turn(end="empty", prompt_tokens=2048), Turn(reply=Reply("Fine."))])
    read = await scene.read()
    assert (read.raw_text, read.finish_reasons, len(scene.server.opened)) == ("Fine.", ["stop"], 2)
    with pytest.raises(UpstreamError) as raised:
        await Scene(talk("empty", 1000), [Turn(end="empty", prompt_tokens=2048)]).read()
    assert overflow_from_text(raised.value.text) is not None


@pytest.mark.parametrize("face", ["refused", "event"])
async def test_crash_near_a_full_window_is_an_overflow(face: str) -> None:
    """What an overflow makes of the engine in some versions is compacted away too; it teaches nothing of the window."""
    text = "The model has crashed without additional information. (Exit code: 18446744072635810000)"
    bad = Turn(refusal=UpstreamError(text, object())) if face == "refused" else Turn(end="error", text=text)
    ratios = {"pre_request_ratio": 0.95, "streaming_ratio": 0.97}
    scene = Scene(talk("full", 1760, words=20), [bad, Turn(reply=Reply("Fine."))], settings=ratios)
    read = await scene.read()
    first, second = scene.server.opened
    assert first.prompt_tokens >= 0.8 * scene.window_tokens
    assert second.prompt_tokens < 0.75 * first.prompt_tokens
    assert (read.raw_text, read.finish_reasons, read.shape_problems()) == ("Fine.", ["stop"], [])
    window = await scene.compactor.windows.resolve(scene.context.target)
    assert window.tokens == scene.window_tokens


@pytest.mark.parametrize("text", ["generation failed", "The model has crashed."])
async def test_crash_far_from_the_window_passes_unchanged(text: str) -> None:
    """A server in trouble is not mended by a compaction."""
    scene = Scene(SHORT, [Turn(refusal=UpstreamError(text, object()))])
    with pytest.raises(UpstreamError, match="the upstream server reported an error") as raised:
        await scene.read()
    assert (raised.value.text, len(scene.server.opened)) == (text, 1)


async def test_prompt_named_by_an_overflow_teaches_the_count() -> None:
    """A server that counts far more than we do says so once; the next request is compacted before it is sent."""
    counted = "request (1900 tokens) exceeds the available context size (2048 tokens)"
    scene = Scene(talk("taught", 1000), [Turn(refusal=UpstreamError(counted, object())), Turn(reply=Reply("Fine."))])
    before = (await scene.compactor.prepare(scene.request, scene.context)).count.tokens  # type: ignore[union-attr]
    await scene.read()
    family = family_of("", "gpt-4o")
    after = (await scene.counter.count("k", family, scene.request)).tokens
    assert after >= 1900 > 1.4 * before


async def test_empty_stream_far_from_the_window_is_an_empty_answer() -> None:
    """A model that says nothing is not taken for an overflow."""
    scene = Scene(SHORT, [Turn(reply=Reply(""))])
    read = await scene.read()
    assert (read.raw_text, read.finish_reasons, len(scene.server.opened)) == ("", ["stop"], 1)


@pytest.mark.parametrize("text", OVERFLOWS)
@pytest.mark.parametrize("face", ["refused", "event"])
async def test_overflow_that_stays_is_an_error_that_says_so(text: str, face: str) -> None:
    """Compacted harder once and no more; then the error can be recognized as an overflow."""
    bad = Turn(refusal=UpstreamError(text, object())) if face == "refused" else Turn(end="error", text=text)
    scene = Scene(talk("stays", 1000), [bad])
    with pytest.raises(UpstreamError) as raised:
        await scene.read()
    assert overflow_from_text(raised.value.text) is not None
    assert len(scene.server.opened) == 2


@pytest.mark.parametrize("text", OVERFLOWS)
async def test_overflow_in_the_middle_is_carried_over(text: str) -> None:
    """An overflow error after the first words restarts the answer; no word is lost, none comes twice."""
    answer = goes_on(numbered_words(300))
    turns = [Turn(reply=answer, end="error", after_tokens=400, text=text), Turn(reply=answer)]
    scene = Scene(talk("middle", 900), turns)
    read = await scene.read()
    assert read.text == numbered_words(300)
    assert (read.finish_reasons, read.shape_problems(), len(scene.server.opened)) == (["stop"], [], 2)


async def test_stream_that_breaks_off_near_the_window_is_carried_over() -> None:
    """A connection that breaks with the window nearly full ended because of it."""
    answer = goes_on(WORDS)
    scene = Scene(SHORT, [Turn(reply=answer, end="drop", after_tokens=1750), Turn(reply=answer)])
    read = await scene.read()
    assert read.text == WORDS
    assert read.shape_problems() == []


@pytest.mark.parametrize("after_tokens", [0, 300])
async def test_stream_that_breaks_off_far_from_the_window_is_an_error(after_tokens: int) -> None:
    """A connection that breaks elsewhere is the client's to know, unchanged, without a retry."""
    scene = Scene(SHORT, [Turn(reply=Reply(WORDS), end="drop", after_tokens=after_tokens)])
    with pytest.raises(UpstreamDropped) as raised:
        await scene.read()
    assert isinstance(raised.value.__cause__, ConnectionResetError)
    assert len(scene.server.opened) == 1


@pytest.mark.parametrize("after_tokens", [0, 300, 1750])
async def test_other_errors_pass_unchanged(after_tokens: int) -> None:
    """What is not an overflow is neither retried nor reworded, wherever it comes."""
    scene = Scene(SHORT, [Turn(reply=Reply(WORDS), end="error", after_tokens=after_tokens, text="out of memory")])
    with pytest.raises(UpstreamError) as raised:
        await scene.read()
    assert raised.value.response == {"error": {"message": "out of memory"}, "message": "out of memory"}
    assert len(scene.server.opened) == 1


@pytest.mark.slow
@pytest.mark.parametrize("turn", [1, 2, 3])
async def test_refusal_of_a_continuation_passes(turn: int) -> None:
    """A server that refuses the second or a later request for another reason ends the answer with that error."""
    refusal = UpstreamError('{"error": "model unloaded"}', "its response")
    answer = Turn(reply=goes_on(numbered_words(3000)))
    scene = Scene(SHORT, [*[answer] * turn, Turn(refusal=refusal)])
    with pytest.raises(UpstreamError) as raised:
        await scene.read()
    assert raised.value is refusal
    assert len(scene.server.opened) == turn + 1


async def test_failed_summary_does_not_stop_the_answer() -> None:
    """Without a summary the answer goes on over the record that needs no model."""

    async def fail(messages: Sequence[Message], *, max_tokens: int, **with_tools: Any) -> SummaryAnswer:
        raise ConnectionError

    async def ask(messages: Sequence[Message], *, max_tokens: int, **with_tools: Any) -> SummaryAnswer:
        from litellm_compaction.errors import SummaryFailed

        try:
            return await fail(messages, max_tokens=max_tokens)
        except ConnectionError as error:
            raise SummaryFailed("error") from error

    read = await Scene(talk("failing", 900), [Turn(reply=goes_on(WORDS))], ask=ask).read()
    assert (read.text, read.finish_reasons) == (WORDS, ["stop"])


@pytest.mark.parametrize("taken", [1, 5, "start", "done", "second"])
async def test_client_that_leaves_between_chunks_closes_the_upstream(taken: int | str) -> None:
    """Closing the answer at any chunk, a notice included, leaves nothing open upstream."""
    scene = Scene(SHORT, [Turn(reply=goes_on(WORDS))])
    chunks = chunks_of(await scene.answer())
    marks = {"start": START_NOTICE, "done": DONE_NOTICE, "second": "restarted"}
    seen = 0
    async for chunk in chunks:
        seen += 1
        text = "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
        is_second = len(scene.server.opened) == 2
        if seen == taken or marks.get(str(taken), "\0") in text or (taken == "second" and is_second):
            break
    assert any(opened.is_open for opened in scene.server.opened) == (taken in (1, 5, "second"))
    await chunks.aclose()
    assert not any(opened.is_open for opened in scene.server.opened)


@pytest.mark.parametrize("place", ["opening", "stream", "summary", "second opening", "second stream"])
async def test_cancelled_wait_closes_the_upstream(place: str) -> None:
    """A client that leaves while we wait ends what we wait for: the server's next byte, or the summary."""
    hang = asyncio.Event()
    ended = asyncio.Event()

    async def ask(messages: Sequence[Message], *, max_tokens: int, **with_tools: Any) -> SummaryAnswer:
        if place != "summary":
            return await summarized(messages, max_tokens=max_tokens)
        hang.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    answer = goes_on(WORDS)
    waiting = Turn(reply=answer, end="hang", after_tokens=0 if "opening" in place else 30)
    turns = [Turn(reply=answer), waiting] if place.startswith("second") else [waiting]
    scene = Scene(SHORT, [Turn(reply=answer)] if place == "summary" else turns, ask=ask)
    reading = asyncio.ensure_future(scene.read())
    waits = hang if place == "summary" else scene.server.hanging
    await asyncio.wait_for(waits.wait(), 60)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not any(opened.is_open for opened in scene.server.opened)
    if place == "summary":
        await asyncio.wait_for(ended.wait(), 60)
    assert len(scene.server.opened) == (2 if place.startswith("second") else 1)


async def test_heartbeat_may_start_before_the_pause() -> None:
    """The listener hears that a pause may come before the compaction begins."""
    scene = Scene(SHORT, [Turn(reply=goes_on(WORDS))])
    paused_at = None
    async for chunk in chunks_of(await scene.answer()):
        if scene.listener.may_pause and paused_at is None:
            paused_at = len(scene.server.opened)
        if any(START_NOTICE in choice["delta"].get("content", "") for choice in chunk["choices"]):
            break
    assert paused_at == 1


@pytest.mark.parametrize("together", [2, 5, 1000])
@pytest.mark.parametrize("kind", ["words", "calls", "thoughts", "json", "whole", "error", "drop", "long prompt"])
async def test_chunks_that_come_together_go_out_as_if_they_had_come_one_by_one(kind: str, together: int) -> None:
    """A fast server's read holds hundreds of chunks: the answer is the same, restarts and what is held included."""
    replies: dict[str, Reply | Callable[[Sequence[Message]], Reply]] = {
        "calls": Reply("Let me see.", tool_calls=[("look", json.dumps({"at": WORDS[:3000]})), ("look", "{}")]),
        "thoughts": Reply(WORDS[:300], reasoning=WORDS),
        "json": Reply(json.dumps({"words": WORDS[:900].split()})),
    }
    turn = Turn(reply=replies.get(kind, goes_on(WORDS)), reasoning_field="think")
    if kind in ("error", "drop"):
        turn = replace(turn, end="error" if kind == "error" else "drop", after_tokens=100)
    read: list[list[tuple[Any, Any]]] = []
    for size in (1, together):
        messages = talk("before", 2500) if kind == "long prompt" else SHORT
        scene = Scene(messages, [turn], is_json=kind == "json", is_whole=kind == "whole", chunk_tokens=3)
        scene.server.together = size
        chunks: list[tuple[Any, Any]] = []
        with contextlib.suppress(UpstreamError):
            async for chunk in chunks_of(await scene.answer()):
                chunks.append((chunk["choices"], chunk.get("usage")))  # noqa: PERF401 - also what came before an error
        read.append(chunks)
    assert read[0] == read[1]
    assert len(read[0]) >= 5


def _beside_others(scene: Scene, parallel: int = 4) -> Scene:
    """The same server, as one that serves several answers from one context."""
    windows = scene.compactor.windows
    resolve = windows.resolve

    async def shared(target: Target, *, fresh: bool = False) -> Window:
        return replace(await resolve(target, fresh=fresh), parallel=parallel)

    windows.resolve = shared  # type: ignore[method-assign]
    return scene


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("window_tokens", [2048, 8192])
async def test_answer_alone_in_a_shared_context_may_have_all_of_it(is_whole: bool, window_tokens: int) -> None:
    """One request with the whole rest of the window, streamed or not, whatever the server could serve beside it."""
    calls = [("write", json.dumps({"text": prose("arguments", window_tokens // 4)}))]
    for reply in (Reply(numbered_words(window_tokens // 6)), Reply("", tool_calls=calls)):
        messages = talk("alone", int(0.3 * window_tokens))
        scene = _beside_others(Scene(messages, [Turn(reply=reply)], window_tokens=window_tokens, is_whole=is_whole))
        read = await scene.read(room=scene.compactor.room(scene.context))
        (opened,) = scene.server.opened
        assert opened.max_tokens > 0.55 * window_tokens
        assert (read.raw_text, read.calls) == (reply.content, reply.tool_calls or [])
        assert ("compaction" in read.usages[0], scene.listener.details) == (False, {})


@pytest.mark.parametrize("kind", ["text", "call", "json"])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_answer_that_stops_for_others_is_whole_and_no_restart(kind: str, is_whole: bool) -> None:
    """Its share reached, it waits for its turn and goes on: nothing lost, nothing compacted, nothing announced."""
    words = numbered_words(500)
    calls = [("write", json.dumps({"text": prose("arguments", 900)}))]
    document = json.dumps({"rows": [f"row{number} of many" for number in range(220)]})
    text = {"text": words, "call": "", "json": document}[kind]
    reply: Any = Reply("", tool_calls=calls) if kind == "call" else goes_on(text)
    scene = _beside_others(
        Scene(SHORT, [Turn(reply=reply)], window_tokens=4096, is_whole=is_whole, is_json=kind == "json")
    )
    beside = scene.compactor.room(scene.context)
    # Others hold what the answer would need, and cannot be stopped either.
    other = await Scene([{"role": "user", "content": prose("other", 2500)}], [Turn()], window_tokens=4096).prepared()
    other = replace(other, window=replace(other.window, parallel=4))
    await beside.acquire(other, 300, is_watched=True)
    reading = asyncio.ensure_future(scene.read(room=scene.compactor.room(scene.context)))
    await asyncio.wait_for(scene.server.closed.wait(), 20)
    assert not reading.done()
    beside.release()
    read = await reading
    assert (read.raw_text, read.calls) == (text, calls if kind == "call" else [])
    assert (read.finish_reasons, read.shape_problems()) == (["tool_calls" if kind == "call" else "stop"], [])
    assert ("compaction" in read.usages[0], scene.listener.details) == (False, {})
    assert len(scene.server.opened) == 2


async def test_an_answer_alone_in_a_shared_context_goes_on_as_it_came() -> None:
    """Nobody can end it, so that no word is held: rewriting what the server sends doubled what a stream costs."""
    reply = Reply(numbered_words(80))
    scene = _beside_others(Scene(SHORT, [Turn(reply=reply)], window_tokens=131_072, chunk_tokens=1))
    chunks = [chunk async for chunk in chunks_of(await scene.answer(scene.compactor.room(scene.context)))]
    sent = scene.server.opened[0].completion_tokens
    assert sum(isinstance(chunk, Received) for chunk in chunks) == sent
    assert Read(chunks).text == reply.content


async def test_a_stop_for_others_waits_for_the_end_of_a_word() -> None:
    """What was sent while nobody else was there may end inside one."""
    words, context = numbered_words(600), Context(4096)
    first, second = _sharing(context, [goes_on(words), Reply("Hello.")], chunk_tokens=1)
    chunks = chunks_of(await first.answer(room=first.compactor.room(first.context)))
    read = Read()
    while len(read.chunks) < 20 or words[len(read.text) :].startswith(" ") or read.text.endswith(" "):
        read.chunks.append(await anext(chunks))
    reading = asyncio.ensure_future(second.read(room=first.compactor.room(second.context)))
    await settled()
    read.chunks += [chunk async for chunk in chunks]
    assert ((await reading).text, read.text, first.listener.details) == ("Hello.", words, {})
    continued = first.server.opened[1].messages or ()
    partial = next(message.text for message in reversed(continued) if message.role == "assistant")
    assert partial.endswith(" ") or words[len(partial) :].startswith(" ")


def _sharing(context: Context, replies: Sequence[Any], **scene: Any) -> list[Scene]:
    """Requests to one server that fills one context with all of their answers."""
    scenes = []
    for number, reply in enumerate(replies):
        made = Scene(talk(f"beside {number}", 300), [Turn(reply=reply)], window_tokens=context.window_tokens, **scene)
        scenes.append(_beside_others(made))
        made.server.context = context
        made.compactor = scenes[0].compactor
    scenes[0].compactor._admission.stopping_s = 0.0
    return scenes


async def _all_read(scenes: Sequence[Scene]) -> list[Read]:
    room = scenes[0].compactor.room
    return await asyncio.gather(*(scene.read(room=room(scene.context)) for scene in scenes))


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("words", [120, 350, 900])
@pytest.mark.parametrize("count", [2, 4, 7])
async def test_answers_beside_each_other_never_come_to_more_than_the_window(
    count: int, words: int, is_whole: bool
) -> None:
    """Even where a server has generated all that it may before anybody reads a word; all whole, none compacted."""
    texts = [" ".join(f"{name}{number}" for number in range(words // 3)) for name in "abcdefg"[:count]]
    context = Context(4096)
    scenes = _sharing(context, [goes_on(text) for text in texts], is_whole=is_whole)
    reads = await _all_read(scenes)
    assert [(read.raw_text, read.finish_reasons, read.shape_problems()) for read in reads] == [
        (text, ["stop"], []) for text in texts
    ]
    assert [scene.listener.details for scene in scenes] == [{}] * count
    assert context.most_tokens <= 4096
    # The first came alone, and had to stop unless it was over soon.
    assert len(scenes[0].server.opened) > 1 or words == 120


async def test_a_call_beside_a_text_comes_whole() -> None:
    """It is not stopped for the text; where its share is too small it is asked for again, and nobody gets a half."""
    calls = [("write", json.dumps({"text": prose("arguments", 1500)}))]
    words = numbered_words(700)
    for replies in ([goes_on(words), Reply("", tool_calls=calls)], [Reply("", tool_calls=calls), goes_on(words)]):
        context = Context(4096)
        reads = await _all_read(_sharing(context, replies))
        assert sorted((read.text, read.calls) for read in reads) == [("", calls), (words, [])]
        assert context.most_tokens <= 4096


async def test_an_answer_that_has_begun_is_stopped_for_one_that_comes() -> None:
    """Once, and goes on beside it; the newcomer is not let in before the server has noticed the stop."""
    words, context = numbered_words(600), Context(4096)
    first, second = _sharing(context, [goes_on(words), Reply("Hello.")])
    first.compactor._admission.stopping_s = 0.05
    chunks = chunks_of(await first.answer(room=first.compactor.room(first.context)))
    read = Read([await anext(chunks) for _ in range(20)])
    reading = asyncio.ensure_future(second.read(room=first.compactor.room(second.context)))
    await settled()
    assert second.server.opened == []
    read.chunks += [chunk async for chunk in chunks]
    assert (await reading).text == "Hello."
    assert (read.text, read.shape_problems(), first.listener.details) == (words, [], {})
    assert [opened.is_continuation for opened in first.server.opened] == [False, True]
    assert context.most_tokens <= 4096
    assert context.opened_s[1] - context.closed_s[0] >= 0.05


@pytest.mark.parametrize("kind", ["json", "call"])
async def test_what_cannot_be_cut_runs_to_its_end(kind: str) -> None:
    """A document or a call that has begun is not stopped; who comes then waits for its end."""
    document = json.dumps({"rows": [f"row{number} of many" for number in range(220)]})
    calls = [("write", json.dumps({"text": prose("arguments", 900)}))]
    reply = Reply(document) if kind == "json" else Reply("", tool_calls=calls)
    context = Context(4096)
    first, second = _sharing(context, [reply, Reply("Hello.")], is_json=kind == "json", chunk_tokens=64)
    chunks = chunks_of(await first.answer(room=first.compactor.room(first.context)))
    if kind == "json":
        read = Read([await anext(chunks) for _ in range(3)])
        reading = asyncio.ensure_future(second.read(room=first.compactor.room(second.context)))
        await settled()
    else:
        reading = asyncio.ensure_future(_later(first, second))
        read = Read()
    read.chunks += [chunk async for chunk in chunks]
    assert (read.raw_text, read.calls) == ((document, []) if kind == "json" else ("", calls))
    assert (await reading).raw_text == "Hello."
    assert len(first.server.opened) == 1
    assert context.most_tokens <= 4096


async def _later(first: Scene, second: Scene) -> Read:
    """The second request's answer, asked for when the first one's server has written a part of its own."""
    await first.server.begun.wait()
    return await second.read(room=first.compactor.room(second.context))


@pytest.mark.parametrize("leaves", ["while it waits", "in the middle"])
async def test_a_client_that_leaves_beside_others_lets_them_go_on(leaves: str) -> None:
    """Its room is given to the next one when the server has noticed; nobody waits for ever."""
    words, context = numbered_words(700), Context(4096)
    first, second, third = _sharing(context, [goes_on(words), goes_on(words), Reply("Hello.")])
    chunks = chunks_of(await first.answer(room=first.compactor.room(first.context)))
    read = Read([await anext(chunks) for _ in range(5)])
    leaving = asyncio.ensure_future(second.read(room=first.compactor.room(second.context)))
    await settled()
    if leaves == "in the middle":
        read.chunks += [await anext(chunks) for _ in range(5)]
        await asyncio.wait_for(second.server.begun.wait(), 60)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    reading = asyncio.ensure_future(third.read(room=first.compactor.room(third.context)))
    read.chunks += [chunk async for chunk in chunks]
    assert (await asyncio.wait_for(reading, 60)).text == "Hello."
    assert (read.text, read.shape_problems()) == (words, [])
    assert context.most_tokens <= 4096
    await settled()
    assert not first.compactor._admission._pools


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("after_tokens", [40, 150])
async def test_overflow_far_below_the_window_shows_that_answers_share_it(is_whole: bool, after_tokens: int) -> None:
    """Four answers end together, at a third of a window that nobody calls shared: each goes on, and is whole.

    From then on they are fitted beside each other. Nothing was compacted, and nobody hears that it was.
    """
    words = numbered_words(400)
    full = Turn(reply=Reply(words), end="error", after_tokens=after_tokens, text="Context size has been exceeded.")
    turns = [full, Turn(reply=goes_on(words))]
    scenes = [Scene(talk("pool", 600), turns, window_tokens=4096, is_whole=is_whole) for _ in range(4)]
    first = scenes[0]
    for scene in scenes:
        scene.compactor = first.compactor
    reads = await asyncio.gather(*(scene.read(room=first.compactor.room(scene.context)) for scene in scenes))
    for scene, read in zip(scenes, reads, strict=True):
        assert (read.raw_text, read.finish_reasons, read.shape_problems()) == (words, ["stop"], [])
        assert ("compaction" in read.usages[0], scene.listener.details) == (False, {})
    window = await first.compactor.windows.resolve(first.context.target)
    assert (window.tokens, window.parallel) == (4096, 4)


@pytest.mark.parametrize(
    ("bad", "refusal"),
    [
        (Turn(refusal=UpstreamError(OVERFLOWS[4], object(), status=400)), "http_400"),
        (Turn(end="error", text=OVERFLOWS[4]), "error_event"),
        (Turn(end="empty", prompt_tokens=2048), "empty_stream"),
        (Turn(reply=goes_on(WORDS), end="error", after_tokens=300, text=OVERFLOWS[4]), "error_event"),
    ],
    ids=["refused", "event", "empty", "in the middle"],
)
async def test_compaction_after_an_overflow_says_why(bad: Turn, refusal: str) -> None:
    """By our count there was room: the event has the server's word, so that the reader of a log need not wonder."""
    scene = Scene(talk("why", 1000), [bad, Turn(reply=goes_on(WORDS) if bad.after_tokens else Reply("Fine."))])
    told: list[Any] = []
    scene.compactor = scene.compactor_told(told.append)
    await scene.read()
    compacted = next(event for event in told if isinstance(event, CompactionEvent))
    assert (compacted.reason, compacted.refusal) == ("overflow", refusal)


@pytest.mark.parametrize("outcome", ["restarted", "attempts", "aborted"])
async def test_what_becomes_of_an_answer_at_the_limit_is_told(outcome: str) -> None:
    """Each restart and each end in numbers: the attempt, the tokens before and after, the room gained."""
    content = prose("sacred", 1600) if outcome == "aborted" else "Count."
    most = 1 if outcome == "attempts" else 3
    turns = [Turn(reply=goes_on(numbered_words(2400) if outcome == "attempts" else WORDS))]
    scene = Scene([{"role": "user", "content": content}], turns, settings={"max_restarts": most})
    told: list[Any] = []
    scene.compactor = scene.compactor_told(told.append)
    await scene.read()
    continued = [event for event in told if isinstance(event, ContinuationEvent)]
    last = continued[-1]
    assert (last.outcome, last.attempts, last.window_tokens) == (outcome, most, 2048)
    assert last.attempt == {"restarted": 1, "attempts": 1, "aborted": 0}[outcome]
    assert last.gained_tokens >= (204 if outcome == "restarted" else 0)
    assert last.tokens_before > 0.85 * 2048
    if outcome == "restarted":
        assert last.tokens_after == pytest.approx(scene.server.opened[1].prompt_tokens, abs=40)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("kind", ["short", "long", "call"])
async def test_answered_request_is_never_told_as_refused(kind: str, is_whole: bool) -> None:
    """A prompt above the line, which nothing can shrink: asking whether a stop would gain anything leaves no event."""
    calls = [("write", json.dumps({"text": prose("arguments", 900)}))] if kind == "call" else []
    reply = Reply("" if calls else numbered_words(20 if kind == "short" else 900), tool_calls=calls)
    messages = [{"role": "user", "content": prose("floor", 7030)}]
    scene = Scene(messages, [Turn(reply=reply)], window_tokens=8192, chunk_tokens=1, is_whole=is_whole)
    told: list[Any] = []
    scene.compactor = scene.compactor_told(told.append)
    read = await scene.read()
    assert read.finish_reasons == ["stop" if kind == "short" else "length"]
    assert [event for event in told if not isinstance(event, ContinuationEvent)] == []


async def _filled(scene: Scene) -> Reservation:
    """The place of another answer that cannot be stopped and has all of the context."""
    other = Scene([{"role": "user", "content": prose("other", 2500)}], [], window_tokens=scene.window_tokens)
    prepared = await other.prepared()
    room = scene.compactor.room(scene.context)
    await room.acquire(replace(prepared, window=replace(prepared.window, parallel=4)), 300, is_watched=False)
    return room


@pytest.mark.parametrize("is_whole", [True, False])
async def test_request_that_waited_fits_the_window_of_its_turn(is_whole: bool) -> None:
    """The model has been loaded with a smaller one meanwhile: it is compacted for that, and nothing is cut."""
    words, loaded = numbered_words(100), [4096]
    turns = [Turn(reply=Reply(words))]
    scene = _beside_others(Scene(talk("reloaded", 2200), turns, window_tokens=4096, is_whole=is_whole))
    windows = scene.compactor.windows
    resolve = windows.resolve

    async def reloaded(target: Target, *, fresh: bool = False) -> Window:
        return replace(await resolve(target, fresh=fresh), tokens=loaded[0])

    windows.resolve = reloaded  # type: ignore[method-assign]
    beside = await _filled(scene)
    reading = asyncio.ensure_future(scene.read(room=scene.compactor.room(scene.context)))
    await settled()
    assert scene.server.opened == []
    loaded[0] = 2048
    beside.release()
    read = await asyncio.wait_for(reading, 60)
    (opened,) = scene.server.opened
    assert opened.prompt_tokens + opened.max_tokens <= 2048
    assert (read.text.endswith(words), read.finish_reasons) == (True, ["stop"])


async def test_answer_that_finds_no_room_to_go_on_ends_regularly() -> None:
    """Its client has what was written, and reads that this is not all."""
    text = numbered_words(900)
    settings = {"admission_timeout_s": 0.05}
    scene = _beside_others(Scene(SHORT, [Turn(reply=goes_on(text))], window_tokens=4096, settings=settings))
    await _filled(scene)
    read = await scene.read(room=scene.compactor.room(scene.context))
    assert (read.finish_reasons, read.shape_problems()) == (["length"], [])
    said, abort, _ = read.text.partition("\n\n⚠️")
    assert text.startswith(said.rstrip())
    assert len(said) > 1000
    assert abort
