"""Hundreds of restarts of whole answers with fixed seeds, at all speeds, through the loop and the heartbeat.

The joiner alone is tried on its own in `tests/core`; here a scripted server speaks in chunks of 1 to 50
tokens, 1 to 4,000 tokens a second, in virtual time, and a client reads what comes over the wire.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from litellm_compaction.core.messages import DONE_NOTICE, START_NOTICE, Message
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.proxy.answer.sse import event_of
from litellm_compaction.proxy.presence import BEAT, beats, watched
from tests.core.restarts import GENERATORS, STYLES, continued, is_ambiguous, json_text
from tests.lmstudio_double import Reply
from tests.lmstudio_double.rendering import count
from tests.proxy.scripted import RESTARTED, SUMMARY, Read, Scene, Turn, chunks_of
from tests.virtual_time import run

# A quarter of what `deep` tries, which takes a minute of processor time.
_RESTARTS = 1_000 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 250
_WINDOW = 1024
_HEARTBEAT_S = 10.0
_TOOL_SHARE = 0.25
_THINK_SHARE = 0.25


class _AmbiguousError(Exception):
    """Another answer would give the same partial and the same continuation, so that no joiner can serve both."""


@dataclass
class _Model:
    """One answer, said again from where it was cut, in a style that is drawn anew each time."""

    rng: random.Random
    text: str
    calls: list[tuple[str, str]]
    thoughts: str
    seen: list[str]
    styles: list[str] = field(default_factory=list)

    def __call__(self, messages: Sequence[Message]) -> Reply:
        if not messages[-1].is_synthetic:
            return Reply(self.text, reasoning=self.thoughts, tool_calls=self.calls)
        partial = "".join(self.seen).replace(RESTARTED, "").removesuffix(f"\n\n{START_NOTICE}\n\n{DONE_NOTICE}\n\n")
        assert self.text.startswith(partial), "what the client has is not the beginning of the answer"
        rest, shown = self.text[len(partial) :], messages[-2].text
        assert partial.endswith(shown), "the model is shown something else than the client has"
        for style in (*self.rng.sample(STYLES, 3), "exact"):
            restart = continued(self.rng, partial, rest, style, shown=shown)
            if restart is not None and not is_ambiguous(partial, rest, restart.repeated):
                self.styles.append(style)
                return Reply(restart.continuation, reasoning="" if not self.thoughts else "On.", tool_calls=self.calls)
        raise _AmbiguousError


@dataclass
class _Drawn:
    """A scene, and what its answer has to be."""

    scene: Scene
    model: _Model
    gaps_s: list[float] = field(default_factory=list)

    async def read(self) -> Read:
        """The answer as a client reads it from the wire; notes how long it had to wait where a pause was announced."""
        read, clock = Read(), asyncio.get_running_loop().time
        last_s, may_pause = clock(), False

        async def send(message: dict[str, Any]) -> None:
            nonlocal last_s, may_pause
            # The wait in which a pause came near had begun before.
            self.gaps_s += [clock() - last_s] if may_pause else []
            last_s, may_pause = clock(), self.scene.listener.may_pause
            if message["body"] != BEAT:
                read.chunks.append(json.loads(message["body"].removeprefix(b"data: ")))
                for choice in read.chunks[-1]["choices"]:
                    self.model.seen.append(choice["delta"].get("content") or "")

        await watched(self._answered)({"type": "http", "method": "POST"}, asyncio.Event().wait, send)
        assert not any(opened.is_open for opened in self.scene.server.opened)
        await self.scene.compactor.aclose()
        return read

    async def _answered(self, _scope: Any, _receive: Any, send: Any) -> None:
        beats(lambda: self.scene.listener.may_pause, every_s=_HEARTBEAT_S)
        async with aclosing(chunks_of(await self.scene.answer())) as chunks:
            async for chunk in chunks:
                # The scripted server has no bytes that could go on as they came.
                await send({"type": "http.response.body", "body": event_of(dict(chunk)), "more_body": True})


def _drawn(seed: int) -> _Drawn:
    rng = random.Random(seed)
    is_json = rng.random() < 0.1
    model = _Model(
        rng=rng,
        text=_document(rng) if is_json else _text(rng),
        calls=[] if is_json or rng.random() > _TOOL_SHARE else _calls(rng),
        thoughts="Let me see. " * rng.randrange(2, 12) if rng.random() < _THINK_SHARE else "",
        seen=[],
    )
    summary_s = 10 ** rng.uniform(-2, 2)

    async def ask(messages: Sequence[Message], *, max_tokens: int, **with_tools: Any) -> SummaryAnswer:
        await asyncio.sleep(summary_s)
        return SummaryAnswer(text=SUMMARY)

    scene = Scene(
        [{"role": "user", "content": "Say it all."}],
        [Turn(reply=model)],
        window_tokens=_WINDOW,
        chunk_tokens=rng.randrange(1, 51),
        tokens_per_second=4_000 ** rng.random(),
        is_json=is_json,
        settings={"max_restarts": 20, "max_summary_calls": 20},
        ask=ask,
    )
    return _Drawn(scene, model)


def _text(rng: random.Random) -> str:
    """Prose, code, tables, lists and more of it, past several windows."""
    parts: list[str] = []
    while count("\n\n".join(parts)) < 3 * _WINDOW:
        parts.append(rng.choice(GENERATORS)(rng))
    return "\n\n".join(parts)


def _document(rng: random.Random) -> str:
    """A JSON document past several windows."""
    parts: list[Any] = []
    while count(json.dumps(parts)) < 3 * _WINDOW:
        text = json_text(rng)
        parts.append(json.loads(text) if text.startswith("[") else rng.randrange(10**9))
    return json.dumps(parts, ensure_ascii=False, indent=rng.choice((None, 1)))


def _calls(rng: random.Random) -> list[tuple[str, str]]:
    """One to three calls that fit into a window together."""
    return [
        (f"tool_{number}", json.dumps({"n": number, "text": "word " * rng.randrange(1, 60)}))
        for number in range(rng.randrange(1, 4))
    ]


def test_random_restarts_at_all_speeds() -> None:
    """Every answer is whole, one message, and never silent for longer than a heartbeat while it is compacted."""
    counts: Counter[str] = Counter()
    speeds: list[float] = []
    seed = 0
    while counts["restarts"] < _RESTARTS:
        drawn = _drawn(seed)
        seed += 1
        try:
            read = run(drawn.read())
        except _AmbiguousError:
            continue
        restarts = len(drawn.scene.server.opened) - 1
        counts["restarts"] += restarts
        counts.update(drawn.model.styles)
        speeds.append(drawn.scene.tokens_per_second or 0)
        about = f"seed {seed - 1}, {drawn.model.styles}"
        assert read.text == drawn.model.text, about
        assert read.shape_problems() == [], about
        assert read.calls == drawn.model.calls, about
        assert read.reasoning.startswith(drawn.model.thoughts), about
        assert read.finish_reasons == ["tool_calls" if drawn.model.calls else "stop"], about
        assert not drawn.scene.is_json or "⚙️" not in read.raw_text, about
        assert drawn.scene.listener.details["restarts"] == restarts, about
        assert max(drawn.gaps_s) <= _HEARTBEAT_S + 1e-6, about
    assert min(speeds) < 2 < 3000 < max(speeds)
    assert all(counts[style] for style in STYLES)
