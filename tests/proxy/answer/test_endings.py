"""What an attempt that failed before its answer could be read teaches about the window."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest
from litellm.types.utils import Usage

from litellm_compaction.engine import Attempts
from litellm_compaction.errors import Overflow
from litellm_compaction.proxy.answer.endings import End, Ended, Step, next_step, unread_overflow
from litellm_compaction.proxy.exchange import ClientRequest, Exchange
from tests.builders import prose
from tests.proxy.scripted import Scene

ENDED_EARLY = "APIConnectionError: Stream ended before a finish_reason was received"
NAMED = "The input has 2500 tokens, but the context length only supports 2048 tokens."
UNNAMED = "Context size has been exceeded."


async def _call(tokens: int, *, is_chat: bool = True, **settings: Any) -> Exchange:
    scene = Scene([{"role": "user", "content": prose("unread", tokens)}], [], settings=settings)
    prepared = await scene.compactor.guard(scene.request, scene.context)
    client = ClientRequest(received=scene.request, original=scene.request, group="any", is_chat=is_chat)
    call = Exchange(client, Attempts(summary_calls_left=1))
    call.attempt.context, call.attempt.prepared = scene.context, prepared
    call.room = scene.compactor.room(scene.context)
    return call


@pytest.mark.parametrize(
    ("message", "revealed"),
    [
        (NAMED, Overflow(2500, 2048)),
        (UNNAMED, Overflow(None, 1638)),
        (ENDED_EARLY, Overflow(None, 1638)),
        ("it burns", None),
    ],
)
async def test_nearly_full_window_explains_what_names_no_number(message: str, revealed: Overflow | None) -> None:
    """An overflow without numbers, and an answer without a word: the window is smaller than it was believed to be."""
    assert unread_overflow(await _call(1580), message, {}) == revealed


async def test_silence_teaches_nothing_far_from_the_limit() -> None:
    """The server has another reason."""
    call = await _call(300)
    assert unread_overflow(call, ENDED_EARLY, {}) is None
    assert unread_overflow(call, UNNAMED, {}) == Overflow(None, 1638)


@pytest.mark.parametrize(("tokens", "revealed"), [(2100, Overflow(2100, 1638)), (900, None)])
async def test_count_of_the_server_decides(tokens: int, revealed: Overflow | None) -> None:
    """Where it has reported one before it fell silent, ours does not count."""
    details = {"combined_usage_object": Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens)}
    for own in (300, 1580):
        assert unread_overflow(await _call(own), ENDED_EARLY, details) == revealed


async def test_others_may_have_filled_a_shared_context() -> None:
    """Then an overflow says nothing about the window."""
    assert unread_overflow(await _call(1580, admission="pool"), UNNAMED, {}) == Overflow(None, None)


async def test_what_the_loop_has_read_it_learns_itself() -> None:
    """The same of what the transport carries: here only what the server says in numbers counts."""
    read, continued = await _call(1580), await _call(1580)
    read.is_read, continued.attempt.is_carried = True, True
    for call in (read, continued):
        assert unread_overflow(call, ENDED_EARLY, {}) is None
        assert unread_overflow(call, UNNAMED, {}) == Overflow(None, None)
        assert unread_overflow(call, NAMED, {}) == Overflow(2500, 2048)


ENDS = get_args(End)
CUT = ("limit", "overthought", "spent", "called_back", "overflow")


def ended(end: End, **facts: bool) -> Ended:
    known = {"is_way_refused": False, "is_delivered": True, "gives_way": False, "has_whole_calls": False}
    return Ended(end=end, **{**known, **facts})


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (ended("done"), "deliver"),
        (ended("failed"), "fail"),
        (ended("failed", is_way_refused=True), "other_way"),
        (ended("overflow"), "go_on"),
        (ended("overflow", is_delivered=False), "harder"),
        (ended("overflow", has_whole_calls=True), "calls"),
        (ended("limit"), "go_on"),
        (ended("limit", has_whole_calls=True), "calls"),
        (ended("overthought", is_delivered=False), "go_on"),
        (ended("called_back", gives_way=True, is_delivered=False), "anew"),
        (ended("called_back", gives_way=True), "go_on"),
        (ended("spent", gives_way=True, is_delivered=False), "anew"),
        (ended("spent", gives_way=True, has_whole_calls=True), "calls"),
        (ended("done", only_recalls=True), "look_up"),
        (ended("done", only_recalls=True, is_used_up=True), "used_up"),
        (ended("limit", is_used_up=True), "used_up"),
        (ended("done", is_used_up=True), "deliver"),
        (ended("limit", is_used_up=True, has_whole_calls=True), "calls"),
    ],
)
def test_each_end_has_one_step(found: Ended, step: Step) -> None:
    assert next_step(found) == step


@pytest.mark.parametrize("end", CUT)
@pytest.mark.parametrize(("gives_way", "has_whole_calls"), [*product((False, True), repeat=2)])
def test_what_a_client_has_is_never_asked_for_again(end: End, gives_way: bool, has_whole_calls: bool) -> None:
    """Neither compacted harder nor repeated: it would read the beginning twice."""
    step = next_step(ended(end, gives_way=gives_way, has_whole_calls=has_whole_calls))
    assert step == ("calls" if has_whole_calls else "go_on")


@pytest.mark.parametrize("end", ENDS)
def test_a_refused_way_gives_way_to_another(end: End) -> None:
    assert next_step(ended(end, is_way_refused=True)) == "other_way"
