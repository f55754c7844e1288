"""The restart loop over a scripted server: one answer out of several upstream requests (promises P1, P5, P6)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.core.messages import (
    ATTEMPTS_NOTICE,
    DONE_NOTICE,
    NEARLY_FULL_NOTICE,
    START_NOTICE,
    Message,
    without_notices,
)
from litellm_compaction.engine import Reservation
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.errors import overflow_from_text
from litellm_compaction.events import CompactionEvent, ContinuationEvent
from litellm_compaction.proxy.answer.client import Notices
from litellm_compaction.proxy.answer.sse import Received, UpstreamError
from litellm_compaction.windows.windows import Target, Window
from tests.builders import prose, talk, tools
from tests.lmstudio_double import Reply, numbered_words
from tests.lmstudio_double.rendering import count, decode, encode
from tests.proxy.scripted import Context, Read, Scene, Turn, chunks_of, goes_on, summarized
from tests.virtual_time import run, settled

SHORT = [{"role": "user", "content": "Count."}]
WORDS = numbered_words(1240)  # 2,600 tokens: two streams' worth in a window of 2,048
ARGUMENTS = json.dumps({"path": "a.txt", "text": prose("argument", 300)})
# With numbers and without; every server's words: `tests/recorded_overflows.toml`.
OVERFLOWS = ["Cannot truncate prompt with n_keep (2100) >= n_ctx (2048)", "Context size has been exceeded."]


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
    asked = [opened.goes_on.continuation.closing for opened in scene.server.opened if opened.goes_on is not None]
    assert asked == [{"reasoning_effort": "none"}, {}]


@pytest.mark.parametrize("said", ["", prose("said", 40)])
def test_the_client_of_a_held_call_is_told_that_an_answer_comes(said: str) -> None:
    """By an empty chunk, if it has nothing yet and that lasts; a heartbeat says so from then on."""
    turn = Turn(reply=Reply(said, tool_calls=[("write", json.dumps({"text": prose("held", 900)}))]))
    scene = Scene([{"role": "user", "content": prose("p", 5000)}], [turn], window_tokens=8192, tokens_per_second=15)
    scene.request = replace(scene.request, tools=tuple(tools(1)))

    async def first() -> Any:
        async with aclosing(chunks_of(await scene.answer())) as chunks:
            return await anext(chunks)

    assert run(first())["choices"][0]["delta"]["content"] == "" or said
    assert scene.listener.may_pause


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


@pytest.mark.parametrize("reasoning", ["", THOUGHTS[:200]], ids=["blank", "thoughts"])
async def test_json_document_that_has_not_begun_is_asked_for_as_a_document(reasoning: str) -> None:
    """White space and thoughts are no part of it: the next request is no piece behind a seam, and keeps its format."""
    document = '{"rows": 3}'
    begun = Reply(f"\n\n{document}", reasoning=reasoning)
    full = Turn(reply=begun, end="error", after_tokens=1 + count(reasoning), text=OVERFLOWS[1])
    scene = Scene(talk("blank", 1000), [full, Turn(reply=Reply(document))], is_json=True, chunk_tokens=1)
    read = await scene.read()
    assert (read.raw_text.strip(), read.finish_reasons, read.shape_problems()) == (document, ["stop"], [])
    opened = scene.server.opened[1]
    assert opened.goes_on is None or opened.goes_on.continuation.closing is not None


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 12, 40], ids=["a character", "a word", "some words"])
@pytest.mark.parametrize("end", ["limit", "overflow"])
async def test_stop_string_across_the_seam_is_seen(end: str, before: int) -> None:
    """What had come of a stop string when the stream was cut comes again, so that the server can see it whole."""
    first = Turn(reply=Reply(WORDS), end="error", after_tokens=700, text=OVERFLOWS[1])
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


SACRED = [{"role": "user", "content": prose("sacred", 1600)}]
CLOSINGS = {
    "attempts": (SHORT, Turn(reply=goes_on(numbered_words(2400))), {"max_restarts": 1}, ATTEMPTS_NOTICE),
    "nearly full": (SACRED, Turn(reply=Reply(WORDS)), {}, "nearly full"),
    "exceeded": (SACRED, Turn(reply=Reply(WORDS), end="error", text=OVERFLOWS[1], after_tokens=200), {}, "exceeded ("),
}


@pytest.mark.parametrize("place", ["content", "reasoning", "off"])
@pytest.mark.parametrize(
    ("outcome", "kind"),
    # Of a whole answer that overflows the server gives nothing.
    [(outcome, kind) for outcome in CLOSINGS for kind in ("stream", "json", "whole")][:-1],
)
async def test_closing_text_goes_where_nothing_can_break(outcome: str, place: Any, kind: str) -> None:
    """In the text for people, in a last thought for programs; whole answers and documents have no word of ours.

    What it says is so: "exceeded" only where the server, or the window, says so.
    """
    messages, turn, settings, said = CLOSINGS[outcome]
    notices = Notices("off", "off", place)
    kinds = {"is_json": kind == "json", "is_whole": kind == "whole"}
    scene = Scene(messages, [turn], settings=settings, notices=notices, **kinds)
    read = await scene.read()
    text, thoughts = read.text, read.reasoning
    in_text = place == "content" and kind == "stream"
    assert (said in text, said in thoughts) == (in_text, place == "reasoning")
    assert ("⚠️" in text) == in_text
    assert without_notices(thoughts) == ""
    assert numbered_words(2400).startswith(without_notices(text))
    assert (read.finish_reasons, read.shape_problems()) == (["length"], [])
    told = read.usages[0]["compaction"]
    assert told["outcome"] == ("attempts" if outcome == "attempts" else "aborted")
    assert told["restarts"] == len(scene.server.opened) - 1


_CRASHED = "The model has crashed without additional information. (Exit code: 18446744072635810000)"


def _fails(text: str, face: str) -> Turn:
    """A server that says so instead of an answer, or as its first event."""
    return Turn(refusal=UpstreamError(text, object())) if face == "refused" else Turn(end="error", text=text)


@pytest.mark.parametrize("face", ["refused", "event"])
@pytest.mark.parametrize("text", [*OVERFLOWS, _CRASHED])
async def test_overflow_before_the_answer_is_compacted_away_once(text: str, face: str) -> None:
    """However it is worded, a crash near a full window included: nobody notices a harder compaction, tried once."""
    ratios = {"pre_request_ratio": 0.95, "streaming_ratio": 0.97}
    messages = talk("full", 1760, words=20)
    scene = Scene(messages, [_fails(text, face), Turn(reply=Reply("Fine."))], settings=ratios)
    read = await scene.read()
    first, second = scene.server.opened
    assert second.prompt_tokens < 0.75 * first.prompt_tokens
    assert not second.is_continuation
    assert (read.raw_text, read.finish_reasons, read.shape_problems()) == ("Fine.", ["stop"], [])
    window = await scene.compactor.windows.resolve(scene.context.target)
    assert (window.tokens == scene.window_tokens) or text != _CRASHED, "a crash teaches nothing of the window"
    scene = Scene(messages, [_fails(text, face)], settings=ratios)
    with pytest.raises(UpstreamError) as raised:
        await scene.read()
    assert (overflow_from_text(raised.value.text) is not None) == (text != _CRASHED)
    assert len(scene.server.opened) == 2


async def test_empty_stream_is_an_overflow_at_a_full_window_only() -> None:
    """No delta and a usage that fills the window is compacted away, and twice it is an error; else nothing was said."""
    full = Turn(end="empty", prompt_tokens=2048)
    scene = Scene(talk("empty", 1000), [full, Turn(reply=Reply("Fine."))])
    read = await scene.read()
    assert (read.raw_text, read.finish_reasons, len(scene.server.opened)) == ("Fine.", ["stop"], 2)
    with pytest.raises(UpstreamError) as raised:
        await Scene(talk("empty", 1000), [full]).read()
    assert overflow_from_text(raised.value.text) is not None
    scene = Scene(SHORT, [Turn(reply=Reply(""))])
    read = await scene.read()
    assert (read.raw_text, read.finish_reasons, len(scene.server.opened)) == ("", ["stop"], 1)


@pytest.mark.parametrize(
    ("end", "after_tokens", "text"),
    [*(("error", 400, text) for text in OVERFLOWS), ("drop", 1750, "")],
)
async def test_end_of_the_window_in_the_middle_is_carried_over(end: Any, after_tokens: int, text: str) -> None:
    """An overflow after the first words, or a connection that breaks near the end: no word lost, none twice."""
    words = WORDS if end == "drop" else numbered_words(300)
    full = Turn(reply=goes_on(words), end=end, after_tokens=after_tokens, text=text)
    scene = Scene(SHORT if end == "drop" else talk("middle", 900), [full, Turn(reply=goes_on(words))])
    told: list[Any] = []
    scene.compactor = scene.compactor_told(told.append)
    read = await scene.read()
    assert (read.text, read.finish_reasons, read.shape_problems()) == (words, ["stop"], [])
    # By our count there was room: the event has the server's word, so that the reader of a log need not wonder.
    compacted = next(event for event in told if isinstance(event, CompactionEvent))
    assert end == "drop" or compacted.refusal == "error_event"
    assert len(scene.server.opened) == 2 or end == "drop"


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


async def test_a_whole_answer_that_nobody_reads_is_ended_and_holds_its_room_for_a_while() -> None:
    """Its request is cancelled; a server that does not notice writes it to its bound."""
    turn = Turn(reply=Reply(WORDS), end="hang", after_tokens=30)
    scene = _beside_others(Scene(SHORT, [turn], is_whole=True, output_tokens=4))
    reading = asyncio.ensure_future(scene.read(room=scene.compactor.room(scene.context)))
    await asyncio.wait_for(scene.server.hanging.wait(), 60)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not any(opened.is_open for opened in scene.server.opened)
    (pool,) = scene.compactor.admission.pools.values()
    assert pool.used_tokens > 0


@pytest.mark.parametrize("kind", ["words", "calls", "thoughts", "json", "error", "drop", "long prompt"])
async def test_chunks_that_come_together_go_out_as_if_they_had_come_one_by_one(kind: str) -> None:
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
    for size in (1, 3, 1000):
        messages = talk("before", 2500) if kind == "long prompt" else SHORT
        scene = Scene(messages, [turn], is_json=kind == "json", chunk_tokens=3)
        scene.server.together = size
        chunks: list[tuple[Any, Any]] = []
        with contextlib.suppress(UpstreamError):
            async for chunk in chunks_of(await scene.answer()):
                chunks.append((chunk["choices"], chunk.get("usage")))  # noqa: PERF401 - also what came before an error
        read.append(chunks)
    assert read[0] == read[1] == read[2]
    assert len(read[0]) >= 5


def _beside_others(scene: Scene, loaded: dict[str, int] | None = None) -> Scene:
    """The same server, as one that serves several answers from one context, `loaded` otherwise by then."""
    windows = scene.compactor.windows
    resolve = windows.resolve

    async def shared(target: Target, *, fresh: bool = False) -> Window:
        return replace(await resolve(target, fresh=fresh), parallel=4, **loaded or {})

    windows.resolve = shared  # type: ignore[method-assign]
    return scene


async def test_an_answer_alone_in_a_shared_context_goes_on_as_it_came() -> None:
    """Nobody can end it, so that no word is held: rewriting what the server sends doubled what a stream costs."""
    reply = Reply(numbered_words(80))
    scene = _beside_others(Scene(SHORT, [Turn(reply=reply)], window_tokens=131_072, chunk_tokens=1))
    chunks = [chunk async for chunk in chunks_of(await scene.answer(scene.compactor.room(scene.context)))]
    sent = scene.server.opened[0].completion_tokens
    assert sum(isinstance(chunk, Received) for chunk in chunks) == sent
    assert Read(chunks).text == reply.content


def _sharing(context: Context, replies: Sequence[Any], **scene: Any) -> list[Scene]:
    """Requests to one server that fills one context with all of their answers."""
    scenes = []
    for number, reply in enumerate(replies):
        made = Scene(talk(f"beside {number}", 300), [Turn(reply=reply)], window_tokens=context.window_tokens, **scene)
        scenes.append(_beside_others(made))
        made.server.context = context
        made.compactor = scenes[0].compactor
    scenes[0].compactor.admission.stopping_s = 0.0
    return scenes


@pytest.mark.parametrize("chunk_tokens", [1, 7])
async def test_an_answer_that_has_begun_is_stopped_for_one_that_comes(chunk_tokens: int) -> None:
    """Once, at the end of a word, and goes on beside it; the newcomer comes when the server has noticed the stop."""
    words, context = numbered_words(600), Context(4096)
    first, second = _sharing(context, [goes_on(words), Reply("Hello.")], chunk_tokens=chunk_tokens)
    first.compactor.admission.stopping_s = 0.05
    chunks = chunks_of(await first.answer(room=first.compactor.room(first.context)))
    read = Read()
    while len(read.chunks) < 20 or words[len(read.text) :].startswith(" ") or read.text.endswith(" "):
        read.chunks.append(await anext(chunks))
    reading = asyncio.ensure_future(second.read(room=first.compactor.room(second.context)))
    await settled()
    assert second.server.opened == []
    read.chunks += [chunk async for chunk in chunks]
    assert (await reading).text == "Hello."
    assert (read.text, read.shape_problems(), first.listener.details) == (words, [], {})
    assert [opened.is_continuation for opened in first.server.opened] == [False, True]
    assert context.most_tokens <= 4096
    assert context.opened_s[1] - context.closed_s[0] >= 0.05
    continued = first.server.opened[1].messages or ()
    partial = next(message.text for message in reversed(continued) if message.role == "assistant")
    assert partial.endswith(" ") or words[len(partial) :].startswith(" ")


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
    assert not first.compactor.admission.pools


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
    measured = replace(prepared.measured, window=replace(prepared.window, parallel=4))
    await room.acquire(replace(prepared, measured=measured), 300, is_watched=False)
    return room


@pytest.mark.parametrize("is_whole", [True, False])
async def test_request_that_waited_fits_the_window_of_its_turn(is_whole: bool) -> None:
    """The model has been loaded with a smaller one meanwhile: it is compacted for that, and nothing is cut."""
    words, loaded = numbered_words(100), {"tokens": 4096}
    turns = [Turn(reply=Reply(words))]
    scene = _beside_others(Scene(talk("reloaded", 2200), turns, window_tokens=4096, is_whole=is_whole), loaded)
    beside = await _filled(scene)
    reading = asyncio.ensure_future(scene.read(room=scene.compactor.room(scene.context)))
    await settled()
    assert scene.server.opened == []
    loaded["tokens"] = 2048
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
    # Held as long as this name is: room that nothing refers to is given back.
    beside = await _filled(scene)
    read = await scene.read(room=scene.compactor.room(scene.context))
    beside.release()
    assert (read.finish_reasons, read.shape_problems()) == (["length"], [])
    said, abort, _ = read.text.partition("\n\n⚠️")
    assert text.startswith(said.rstrip())
    assert len(said) > 1000
    assert abort
