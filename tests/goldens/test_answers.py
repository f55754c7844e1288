"""What a server is asked on behalf of an answer, how its answers are bounded, and what is told of that; a line a case.

`GOLDENS=write pytest tests/goldens -n 0` writes the file anew; its diff belongs into the commit that changes it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from litellm_compaction.core.messages import user_message
from litellm_compaction.events import USED_AHEAD, USED_EARLY
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer import sse
from litellm_compaction.proxy.answer.client import SILENT, Asked, OneAnswer
from litellm_compaction.proxy.answer.legs import Leg
from litellm_compaction.proxy.answer.relay import Relay
from litellm_compaction.proxy.answer.sse import UpstreamError
from litellm_compaction.proxy.observers import Metrics
from tests.builders import prose
from tests.goldens.tellers import recorded
from tests.lmstudio_double import Reply, numbered_words
from tests.proxy.answer.test_loop import _sharing as sharing
from tests.proxy.scripted import Context, Read, Scene, Turn, goes_on
from tests.proxy.test_observers import ALARM, Library
from tests.proxy.test_presence import heard
from tests.test_events import CUT, event
from tests.virtual_time import run

_FILE = Path(__file__).parent / "answers.txt"
_TEXT, _CALL = numbered_words(1600), json.dumps({"text": prose("argument", 900)})
_PIECES = ("reasoning_content", "content", "tool_calls")
_FULL = Turn(reply=Reply(_TEXT), after_tokens=1200, end="error", text="Context size has been exceeded.")
_THOUGHTS = [Turn(reply=Reply("", reasoning=_TEXT))]
_TURNS = {
    "text": [Turn(reply=goes_on(_TEXT))],
    "thoughts": [replace(_THOUGHTS[0], reasoning_field="think")],
    "call": [Turn(reply=Reply("I write.", tool_calls=[("list", "{}"), ("write", _CALL)]))],
    "full": [_FULL, Turn(reply=goes_on(_TEXT))],
}
# The words of a prompt, its window, and what else there is.
_SCENES: list[tuple[int, int, dict[str, Any]]] = [
    *((4, 2048, {"output_tokens": limit}) for limit in (None, 700, 2300)),
    *((1000, 2048, {"is_whole": is_whole}) for is_whole in (False, True)),
    (1600, 2048, {"settings": {"max_restarts": 1}}),
    (600, 8192, {"output_tokens": 1500}),
]
_THINKING: list[tuple[int, int, dict[str, Any]]] = [
    *((4, 4096, {"thoughts_tokens": tokens}) for tokens in (500, 3000, math.inf)),
    (4, 4096, {"settings": {"reasoning_budget_ratio": 0}, "thoughts_tokens": 500}),
    *((4, 4096, {"settings": settings}) for settings in ({"reasoning_budget_ratio": 0.1}, {"max_restarts": 0})),
]


@pytest.mark.parametrize("kind", [*_TURNS, "thinking"])
async def test_the_legs_are_as_recorded(kind: str) -> None:
    """Their prompts, bounds and words; the end, in how many pieces of which kind it comes, and what its usage says."""
    lines = []
    for prompt, window_tokens, more in _THINKING if kind == "thinking" else _SCENES:
        messages = [{"role": "user", "content": prose("asked", prompt)}]
        scene = Scene(messages, _TURNS.get(kind, _THOUGHTS), window_tokens=window_tokens, chunk_tokens=1, **more)
        read = await scene.read()
        assert all(leg.prompt_tokens + leg.max_tokens <= window_tokens for leg in scene.server.opened)
        # What gains no room does not happen (P5).
        for before, leg in itertools.pairwise(scene.server.opened if kind == "text" else ()):
            assert before.prompt_tokens + before.completion_tokens - leg.prompt_tokens >= window_tokens // 10
            assert leg.prompt_tokens <= 0.9 * window_tokens - 64
        text, *notices = read.text.split("\n\n\u26a0")
        text = text.partition("\n</think>")[0].removeprefix("<think>\n")
        assert _TEXT.startswith(text) or text in ("I write.", "".join(notices))
        assert kind != "call" or read.calls[0] == ("list", "{}")
        [usage], [end], problems = read.usages, read.finish_reasons, read.shape_problems()
        details = usage.get("compaction", {})
        assert (details, problems) == (scene.listener.details, [])
        legs = (f"{leg.prompt_tokens} + {leg.completion_tokens} of {leg.max_tokens}" for leg in scene.server.opened)
        pieces = Counter(key for delta in read.deltas for key in _PIECES if delta.get(key))
        told = f"{details.get('outcome', 'in one')} {re.findall('[0-9]+/[0-9]+', ' '.join(notices))}"
        lines.append(f"{', '.join(legs)}; {end}, {told}, {usage['completion_tokens']} in {[*pieces.values()]}")
    assert lines == recorded(_FILE, kind, lines)


# What answers beside each other say, how many they are, whether whole, and the seconds from one to the next.
_BESIDE = [
    *(("text", count, is_whole, 3) for count in (2, 4) for is_whole in (False, True)),
    *((kind, 2, False, 3) for kind in ("long", "json", "call", "thoughts")),
    *((kind, 4, False, 0) for kind in ("short", "call")),
    *((kind, 4, False, 3) for kind in ("long", "thoughts")),
    ("long", 4, True, 0),
]


def _beside(kind: str, name: str) -> Any:
    words = " ".join(f"{name}{at}" for at in range({"long": 1400, "short": 40}.get(kind, 400)))
    rest = {
        "json": Reply(json.dumps(words[:1500].split())),
        "call": Reply("I write.", tool_calls=[("write", json.dumps({"text": words[:2000]}))]),
        "thoughts": Reply("Four.", reasoning=words[:1000]),
    }
    return rest.get(kind, goes_on(words))


def test_the_answers_beside_each_other_are_as_recorded() -> None:
    """Their bounds, when each leg begins and ends, and their pieces; all are whole, and never more than the window."""

    async def played(kind: str, count: int, is_whole: bool, pause_s: float) -> str:
        context, made = Context(4096), {"is_whole": is_whole, "is_json": kind == "json", "tokens_per_second": 100}
        replies = [_beside(kind, name) for name in "abcdefg"[:count]]
        scenes = sharing(context, replies, **made)
        scenes[0].compactor.admission.stopping_s = 1.0

        async def read(number: int, scene: Scene) -> Read:
            await asyncio.sleep(pause_s * number)
            return await scene.read(room=scenes[0].compactor.room(scene.context))

        reads = await asyncio.gather(*(read(number, scene) for number, scene in enumerate(scenes)))
        await scenes[0].compactor.aclose()
        assert context.most_tokens <= 4096
        for each, reply in zip(reads, replies, strict=True):
            said = reply if isinstance(reply, Reply) else reply([user_message("")])
            assert (each.text, each.calls) == (said.content, [*said.tool_calls])
            assert (each.finish_reasons, each.shape_problems()) == (["tool_calls" if said.tool_calls else "stop"], [])
            assert kind == "long" or each.raw_text == said.content
        bounds = [[leg.max_tokens for leg in scene.server.opened] for scene in scenes]
        times = [[round(each, 1) for each in at_s] for at_s in (context.opened_s, context.closed_s)]
        pieces = [
            f"{len(each.chunks)}{' told' * scene.listener.may_pause}" for each, scene in zip(reads, scenes, strict=True)
        ]
        return f"{kind}{' whole' * is_whole}: {bounds} from {times[0]} to {times[1]}; {', '.join(pieces)}"

    lines = [run(played(*case)) for case in _BESIDE]
    assert lines == recorded(_FILE, "beside", lines)


async def test_the_lines_of_a_leg_are_as_recorded() -> None:
    """From which token on text is held, a call is, a prompt looks full, and one without an answer is; and the last."""
    scene = Scene([{"role": "user", "content": prose("asked", 600)}], [Turn()], window_tokens=8192)
    prepared = await scene.prepared()

    def relay(max_tokens: int = 6000, prompt_tokens: int = 0, **fields: int) -> Relay:
        notices = {"notices": SILENT, "wants_usage": False, "is_json": False}
        asked = Asked(request=scene.request, output_tokens=None, **notices)
        made = Relay(Leg(prepared=prepared, max_tokens=max_tokens, **fields), OneAnswer(asked))
        made.take({"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 0}})
        return made

    def is_overflow(prompt_tokens: int) -> bool:
        made = relay(prompt_tokens=prompt_tokens)
        made.closed()
        return made.end == "overflow"

    taken, words = relay(), 0
    while taken.end in (None, "limit"):
        words += 100
        taken.take({"choices": [{"delta": {"reasoning": "word " * 100}}]})
    ended = taken.ending.error and taken.ending.error.text
    lines = [
        f"{[round(relay(tokens).leg.danger_tokens) for tokens in (500, 6000, 9000)]} held",
        f"{round(relay(500, asked_tokens=500).leg.danger_tokens)} of the client's",
        f"calls below {bisect_left(range(9000), True, key=lambda tokens: not relay(tokens).would_hold_calls)}",
        f"full at {bisect_left(range(8192), True, key=lambda tokens: relay(prompt_tokens=tokens).looks_full())}",
        f"empty at {bisect_left(range(8192), True, key=is_overflow)}",
        f"after {words} words, of which {len(taken.one.reasoning)} characters stay: {ended}",
    ]
    assert lines == recorded(_FILE, "lines", lines)


async def test_the_bounds_are_as_recorded() -> None:
    """How much of an answer is read, alone and ahead of its reader; of an error the beginning; which ones may pass."""

    async def said(content: bytes, read: Any, status: int = 200) -> str:
        async def pieces() -> AsyncIterator[bytes]:
            yield content

        try:
            return f"{len((await read(httpx.Response(status, content=pieces()))).content)}"
        except UpstreamError as error:
            return error.text.partition(": ")[2]

    lines = []
    for bounds in map(sse.bounds_of, (1, 1000)):
        lines.append(await said(b" " * 9_000_000, partial(sse.read_whole, most_bytes=bounds[0])))
        lines.append(
            await said(b": ping\n\n" * 3_000_000, lambda each, bounds=bounds: anext(sse.read_events(each, bounds)))
        )
    for logprobs in (0, 1):
        read = partial(sse.read_whole, most_bytes=10**6, logprobs=logprobs)
        marks = [400_000, 400_001, 400_016, 400_017]
        lines.append(f"{[await said(b',' * number, read) for number in marks]} for {logprobs}")
    error = "é" * 40_000
    lengths = [len(str(made(error))) for made in (sse.short_error, lambda text: sse.error_text({"error": text}))]
    lines.append(f"{await said(error.encode(), partial(sse.read_whole, most_bytes=9), 500)}, {lengths} of an error")
    statuses = (None, 407, 408, 409, 424, 425, 426, 428, 429, 430, 499, 500, 501, 502)
    lines.append(f"{[each for each in statuses if UpstreamError('', status=each).may_pass]} may pass")
    assert lines == recorded(_FILE, "bounds", lines)


def test_the_beats_are_as_recorded() -> None:
    """Each five seconds of silence, while a compaction is made; what comes in time is followed by none."""

    pieces = [(pause_s, b"word\n\n") for pause_s in (0, 3, 3, 12, 4.9, 5.1)]
    lines = [", ".join(f"{said} {at_s:g}" for said, at_s in heard(pieces, may_pause)) for may_pause in (False, True)]
    assert lines == recorded(_FILE, "beats", lines)


_USED = [event("reused", summary_calls=0, reason=reason) for reason in (USED_AHEAD, USED_EARLY)]
_EVENTS = (event(), *_USED, event("refused", summary_calls=0), event("prepared"), ALARM, CUT)
_TINY, _LONG = {"chat_template_kwargs": {"a": "x" * 53}}, {"chat_template_kwargs": {"a": "x" * 54}}
_BODIES: list[dict[str, Any]] = [
    {"max_tokens": 0, "n_predict": -1, **_TINY},
    {"max_completion_tokens": 1, **_LONG},
    {"logprobs": True, "top_logprobs": 19},
    {"logprobs": True, "top_logprobs": 21},
    {"logprobs": True},
    {"logprobs": 4, "prompt": ["a", "b"], "n": 2},
    {"prompt": [1, 2, 3], "n": 1},
    {"prompt": [[1, 2], "né", 3], "n_cmpl": "3", "n": 2},
    {"prompt": "text", "extra_body": {"best_of": 4}},
    {"prompt": [], "n": 2.0},
    *({"n": odd} for odd in (True, -5, 0, "many", "9" * 19, math.inf, [2])),
    {"stop": ["a", "", "b", 3]},
    {"stop": ["a", "b", "c", "d"], "response_format": {"type": "text"}},
    {"stop": "a", "grammar": "root"},
    {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "reasoning_effort": "high"},
    {"reasoning": {"max_tokens": 2000, "effort": "high"}},
    {"reasoning": {"effort": "xhigh"}},
    {"reasoning_effort": {"effort": "max"}},
    {"reasoning_effort": ["high"]},
    {"thinking_budget_tokens": 512.0},
    {"reasoning_budget_tokens": -1},
    {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}},
    {"generationConfig": {"thinkingConfig": 7}, "thinking": "much", "reasoning": None},
    {"thinking": {"budget_tokens": True}, "reasoning": {"max_tokens": "2000"}},
    {"tools": [{"name": "new"}], "functions": [{"name": "old", "of": "x" * 80}]},
    {"functions": [{"name": "old"}]},
    {"tools": {"of": "tomorrow", "words": "x" * 80}},
]


def test_the_bodies_are_as_recorded() -> None:
    """A client's bounds on an answer and its thoughts, how many answers and log probabilities, stops, and prompts."""
    facts: dict[str, Callable[[Any], Any]] = {
        "tokens": wire.asked_output_tokens,
        "thoughts": wire.asked_thoughts_tokens,
        "log probabilities": wire.asked_logprobs,
        "answers": wire.asked_answers,
        "tools": lambda body: (request := wire.decode({"messages": ["Hi."], **body})) and request.tools,
        "extras": lambda body: [*wire.extras_of(body)],
        "stops": lambda body: wire.begun(body, "", "end").get("stop", "none"),
        "prompt": lambda body: (text := wire.decode_text(body)) and (len(text.messages), text.token_ids),
    }
    read = {name: [fact(body) for body in ({}, *_BODIES)] for name, fact in facts.items()}
    lines = [f"{name}: {[each for each in values if each != none]}" for name, (none, *values) in read.items()]
    assert lines == recorded(_FILE, "bodies", lines)


def test_the_metrics_are_as_recorded() -> None:
    """Their names, labels and buckets, by which dashboards are made, and what each event adds to them."""
    library = Library()
    metrics, lines = Metrics(lambda: library), list[str]()
    for each in _EVENTS:
        before = library.shown()
        metrics.observe(each)
        added = {name: n - before.get(name, 0) for name, n in library.shown().items() if n != before.get(name, 0)}
        lines.append(", ".join(f"{name} + {n:g}" for name, n in added.items()))
    for family in library.REGISTRY.collect():
        bounds = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
        lines += [f"{family.name}: {', '.join(bounds[: bounds.index('+Inf')])}"] if bounds else []
    assert lines == recorded(_FILE, "metrics", lines)
