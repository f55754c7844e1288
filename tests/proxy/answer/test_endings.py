"""What an attempt that failed before its answer could be read teaches about the window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from litellm.types.utils import Usage

from litellm_compaction.engine import Attempts
from litellm_compaction.errors import Overflow
from litellm_compaction.proxy.answer.endings import (
    MAX_CUTS,
    End,
    Ended,
    Restart,
    State,
    Step,
    next_leg,
    restart_of,
    unread_overflow,
)
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
FRESH = State(ways=frozenset(), restarts_left=3)


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (Ended("done"), "deliver"),
        (Ended("failed"), "fail"),
        (Ended("failed", is_way_refused=True), "other_way"),
        (Ended("overflow"), "go_on"),
        (Ended("overflow", is_delivered=False), "harder"),
        (Ended("overflow", has_whole_calls=True), "calls"),
        (Ended("limit"), "go_on"),
        (Ended("limit", has_whole_calls=True), "calls"),
        (Ended("overthought", is_delivered=False), "go_on"),
        (Ended("called_back", is_delivered=False), "anew"),
        (Ended("called_back"), "go_on"),
        (Ended("spent", is_delivered=False), "anew"),
        (Ended("spent", has_whole_calls=True), "calls"),
        (Ended("done", only_recalls=True), "look_up"),
        (Ended("done", only_recalls=True, is_used_up=True), "used_up"),
        (Ended("limit", is_used_up=True), "used_up"),
        (Ended("done", is_used_up=True), "deliver"),
        (Ended("limit", is_used_up=True, has_whole_calls=True), "calls"),
    ],
)
def test_each_end_has_one_step(found: Ended, step: Step) -> None:
    assert next_leg(found, FRESH) == step


def test_what_an_answer_has_used_up_is_not_done_again() -> None:
    """It is compacted harder once, and a model that calls for more than it may look up has ended its answer."""
    assert next_leg(Ended("overflow", is_delivered=False), replace(FRESH, has_retried=True)) == "fail"
    assert next_leg(Ended("done", only_recalls=True), replace(FRESH, may_look_up=False)) == "deliver"


@pytest.mark.parametrize("end", CUT)
@pytest.mark.parametrize("has_whole_calls", [False, True])
def test_what_a_client_has_is_never_asked_for_again(end: End, has_whole_calls: bool) -> None:
    """Neither compacted harder nor repeated: it would read the beginning twice."""
    assert next_leg(Ended(end, has_whole_calls=has_whole_calls), FRESH) == ("calls" if has_whole_calls else "go_on")


@pytest.mark.parametrize("end", ENDS)
def test_a_refused_way_gives_way_to_another(end: End) -> None:
    assert next_leg(Ended(end, is_way_refused=True), FRESH) == "other_way"


@pytest.mark.parametrize(
    ("found", "changes", "restart"),
    [
        (Ended("limit"), {}, "compacted"),
        (Ended("limit", is_full=True), {}, "pressed"),
        (Ended("overthought", is_full=True), {}, "relaxed"),
        (Ended("spent"), {}, "resumed"),
        (Ended("spent"), {"restarts_left": 0}, "resumed"),
        (Ended("spent"), {"cuts": MAX_CUTS}, "compacted"),
        (Ended("spent"), {"cuts": MAX_CUTS, "restarts_left": 0}, None),
        (Ended("called_back", is_stuck=True), {}, None),
        (Ended("limit"), {"restarts_left": 0}, None),
        (Ended("limit"), {"has_gained": False}, None),
        (Ended("limit", is_thoughts=True), {}, "compacted"),
        (Ended("limit", is_thoughts=True), {"is_closing": True}, None),
        (Ended("overthought", is_thoughts=True), {"is_closing": True}, None),
    ],
)
def test_a_stop_has_to_lead_on(found: Ended, changes: dict[str, Any], restart: Restart | None) -> None:
    """For others as it is, but not without end; thoughts are closed once, and a compaction has to gain room."""
    assert restart_of(found, replace(FRESH, **changes)) == restart
