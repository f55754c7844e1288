"""What becomes of an answer when the server fails: every kind of failure at every point, streaming and not.

One test runs a whole table at once. A server that hangs costs a time limit, which is a second here, so
that it is tried where nothing but the limit can end it.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from tests.builders import prose, tools
from tests.integration.bench import SUMMARY, is_summary_call
from tests.integration.forms import read, streams
from tests.integration.restart_bench import CROWDED, Restarting, Teller, calls, stream_problems, without_restarts
from tests.lmstudio_double import ChatCall, Fault, Reply
from tests.lmstudio_double.script import FaultKind

KINDS: tuple[FaultKind, ...] = ("500", "drop", "hang", "empty", "error_event", "slow")
# By models with a time limit of a second.
HANGING = ("first", "text")
PLACES = ("first", "text", "reasoning", "call", "summary", "stream 2", "stream 4")
_TEXT = "\n".join(f"{n}. {prose(f'fault {n}', 16)}" for n in range(1, 560))
_SHORT = prose("short answer", 120)
_CALLS = calls("tool_0", words=120)
_THOUGHTS = prose("fault thoughts", 120)
_END = "\nTHE END."
_CELL = re.compile(r"cell-(\w+)-(first|text|reasoning|call|summary|stream \d)")


class _Faulty:
    """A model that fails in each cell's own way; a cell is named in its conversation."""

    def __init__(self) -> None:
        self._streams: Counter[tuple[str, str]] = Counter()
        self._tellers: dict[tuple[str, str], Teller] = {}
        self._lock = threading.Lock()

    def __call__(self, call: ChatCall) -> Reply | None:
        found = _CELL.search(call.sent_text)
        if found is None:
            return None
        kind, place = found.groups()
        before = self._fault(kind, "before_first_delta")
        if is_summary_call(call.body):
            return Reply(SUMMARY, fault=before if place == "summary" else None)
        with self._lock:
            teller = self._tellers.setdefault((kind, place), Teller(_answer(place)))
            reply = teller(call)
            # A first answer that others needed the room of, before anything of it was out, is asked for again.
            self._streams[kind, place] = 1 if reply is teller.first else self._streams[kind, place] + 1
            stream = self._streams[kind, place]
        middle = self._fault(kind, "mid_text")
        if place == "first":
            return replace(reply, fault=before)
        if place in ("text", "reasoning", "call"):
            # Also where it goes on because others needed its room.
            return replace(reply, fault=middle)
        last = 2 if place == "summary" else int(place[-1])
        if stream < last:
            return reply
        return Reply(reply.content[:300] + _END, fault=before if place != "summary" and stream == last else None)

    def _fault(self, kind: str, at: Any) -> Fault:
        # Of 120 tokens of thoughts or of a call, the fiftieth is in the middle.
        after = 50 if at == "mid_text" else None
        return Fault(kind, at, after_tokens=after, message="it burns", delay_ms=300)  # type: ignore[arg-type]


def _answer(place: str) -> Reply:
    """What the model answers where nothing fails."""
    thoughts, calls_made = (_THOUGHTS if place == "reasoning" else "", _CALLS if place == "call" else ())
    return Reply(_whole(place), reasoning=thoughts, tool_calls=calls_made)


def _outcome(restarting: Restarting, kind: str, place: str, stream: bool) -> str:
    content = f"This is cell-{kind}-{place}. {prose(f'{kind} {place}', 40)}"
    # A way in which a model has begun anew is remembered: the other test's models have done nothing yet.
    how = "stream" if stream else "whole"
    model = f"hanging-{how}" if kind == "hang" else f"crowded-{place.replace(' ', '-')}-{how}"
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": content}], "stream": stream}
    if place == "call":
        body["tools"] = tools(1)
    answer = restarting.proxy.stream_body(body)
    if answer.status != 200:
        return str(answer.status)
    said = read("chat", answer.raw.decode())
    text = without_restarts(said.text)
    if any("error" in event for event in said.events):
        assert _is_part(text.split("\n\n⚙️")[0], place), text
        assert not said.ends
        return "error event"
    assert not stream or stream_problems(answer) == []
    return _ending(text, [(name, arguments) for name, arguments in said.calls.values()], said.ends[0], place)


def _ending(text: str, made: list[tuple[str, str]], reason: str, place: str) -> str:
    if place == "call":
        if made and made != _CALLS:
            return f"cut call, {reason}"
        is_whole = made == _CALLS
    else:
        is_whole = text == _whole(place) if place in ("first", "text", "reasoning") else text.endswith(_END)
    assert _is_part(text, place), text
    return "whole" if is_whole else f"ends with {reason}"


def _is_part(text: str, place: str) -> bool:
    """Whether a text is the beginning of the cell's answer: nothing lost and nothing twice."""
    return _whole(place).startswith(text.removesuffix(_END))


def _whole(place: str) -> str:
    return {"call": ""}.get(place, _SHORT if place in ("first", "text", "reasoning") else _TEXT)


def _expectations(stream: bool) -> dict[tuple[str, str], str]:
    """What design and stock LiteLLM together make of each cell."""
    # LiteLLM's own statuses for a server that answers 500, hangs up, does not answer, reports an error in HTTP 200.
    statuses = {"500": "500", "drop": "500", "hang": "408", "error_event": "500" if stream else "502"}
    # An answer without an end is taken for its end, as LiteLLM takes it, but not within a call.
    others = {"empty": "ends with stop", "slow": "whole"}
    table: dict[tuple[str, str], str] = {}
    for place in PLACES:
        for kind in KINDS:
            # A call that is held has not begun for the client, so that its failure keeps the real status.
            is_open = stream and place not in ("first", "call")
            shown = "error event" if is_open else statuses.get(kind, "")
            table[kind, place] = "whole" if place == "summary" else others.get(kind) or shown
    # A server that fails over a continuation is asked in another way, which teaches nothing about the first.
    failures: tuple[FaultKind, ...] = ("500", "drop", "error_event", *(("empty",) if stream else ()))
    # Nothing was said, unless that the answer has ended: before its first word only a whole answer's server says so.
    table |= {("empty", "call"): "502"} | ({("empty", "first"): "502"} if stream else {})
    table |= {(kind, place): "whole" for kind in failures for place in PLACES if place.startswith("stream")}
    return table


@streams
def test_every_failure_has_its_outcome(restarting: Restarting, stream: bool) -> None:
    """A failure shows as what it is, at the point where it comes; one of ours, the summary's, does not show at all."""
    simulators = [restarting.simulators[name] for name in CROWDED]
    script = _Faulty()
    for simulator in simulators:
        simulator.script = script
    cells = [(kind, place) for place in PLACES for kind in KINDS if kind != "hang" or place in HANGING]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda cell: _outcome(restarting, *cell, stream), cells))
    table = dict(zip(cells, found, strict=True))
    expected = _expectations(stream)
    assert {cell: outcome for cell, outcome in table.items() if outcome != expected[cell]} == {}
    assert not [record for each in simulators for record in each.requests if record.outcome == "running"]
