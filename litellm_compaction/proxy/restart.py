"""The loop that carries an answer over the context limit: watch, stop, compact, continue; streaming and not.

Written once, over an abstract upstream (`exchange.py`); `upstream.py` and `hooked.py` carry it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from litellm_compaction.core.carry_over import Partial
from litellm_compaction.core.messages import ABORT_NOTICE, ATTEMPTS_NOTICE, DONE_NOTICE, START_NOTICE
from litellm_compaction.engine import Case, Compactor, Guarded, Pending, Room
from litellm_compaction.errors import CompactionError, Overflow
from litellm_compaction.proxy.exchange import Asked, Chunk, Listener, Upstream, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.failing_open import log_failed_open
from litellm_compaction.proxy.notices import SILENT
from litellm_compaction.proxy.one_answer import OneAnswer
from litellm_compaction.proxy.overflowed import taught
from litellm_compaction.proxy.relay import Progress, Relay

# Every prompt takes more of a window: the next request is compacted, whatever the estimate says.
_ANY_SHARE = 1e-6
_STILL_TOO_LARGE = "The compacted prompt still exceeds the available context size."


class Answer:
    """One client's answer, over as many upstream requests as it takes.

    Args:
        compactor: compacts and learns.
        case: of the request.
        upstream: its server.
        asked: by the client.
        prepared: what the engine found before the answer began.
        listener: is told what goes out, and when a pause may come.
        room: its place beside other answers; None where the server has been asked before anybody could wait.
        is_watched: whether the answer comes in pieces, and can be stopped.
    """

    def __init__(
        self,
        compactor: Compactor,
        case: Case,
        upstream: Upstream,
        asked: Asked,
        prepared: Guarded | Pending,
        listener: Listener,
        *,
        room: Room | None = None,
        is_watched: bool = True,
    ) -> None:
        self._compactor = compactor
        self._case = case
        self._upstream = upstream
        self._asked = asked
        self._prepared = prepared
        self._listener = listener
        self._room = room
        self._is_watched = is_watched
        self._progress = Progress()
        self._one = OneAnswer(self._progress, SILENT if asked.is_json else asked.notices)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The answer's chunks: one id, one role, one finish_reason, the usage last if it was asked for.

        Raises:
            UpstreamError: before the first chunk; or the server failed in a way that is not an overflow.
            CompactionError: it cannot be made to fit, and nothing has been sent.
        """
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            if self._room is not None:
                self._room.leave()

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        prepared = self._prepared
        if isinstance(prepared, Pending):
            if not self._asked.is_whole:
                yield self._one.notice(START_NOTICE + "\n") or self._one.opening()
            guarded = await self._compactor.finish(prepared, self._room)
            if guarded.action == "compacted" and (notice := self._one.notice(DONE_NOTICE + "\n\n")):
                yield notice
        else:
            guarded = prepared
            if guarded.action == "compacted" and (notice := self._one.notice(f"{START_NOTICE}\n{DONE_NOTICE}\n\n")):
                yield notice
        retried = False
        while True:
            self._listener.sent(self._case, guarded)
            relay = Relay(
                self._progress,
                guarded,
                self._case.settings.streaming_ratio,
                self._asked.stops,
                is_whole=self._asked.is_whole,
                said=self._asked.said,
            )
            try:
                # Closed here and not by the garbage collector: the server generates for as long as it is open.
                async with aclosing(self._stream(guarded, relay)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except UpstreamDropped:
                relay.finish()
                if relay.end == "done":
                    raise
            except UpstreamError as error:
                if not relay.has_overflowed(error):
                    raise
            self._progress.completion_tokens += relay.completion_tokens()
            self._learn(guarded, relay)
            if relay.end == "failed" and relay.error is not None:
                raise relay.error
            if relay.end == "done":
                break
            if relay.end == "overflow" and not self._progress.delivered:
                # Nothing has been shown yet: compact harder, once, and nobody notices.
                if retried:
                    raise relay.error or UpstreamError(_STILL_TOO_LARGE)
                retried = True
                guarded = await self._compactor.guard(self._asked.request, self._pressed(), self._room)
                continue
            if relay.has_whole_calls:
                for chunk in self._calling(relay):
                    yield chunk
                return
            if self._progress.restarts >= self._case.settings.max_restarts or relay.is_stuck:
                for chunk in self._closing(relay, ATTEMPTS_NOTICE):
                    yield chunk
                return
            self._progress.restarts += 1
            if notice := self._one.notice(f"\n\n{START_NOTICE}\n"):
                yield notice
            try:
                case = self._pressed() if relay.is_full else self._case
                guarded = await self._compactor.carry_over(self._asked.request, self._partial(), case, self._room)
            except CompactionError:
                used = relay.used_tokens()
                text = ABORT_NOTICE.format(used=used, window=guarded.window.tokens)
                for chunk in self._closing(relay, text):
                    yield chunk
                return
            if notice := self._one.notice(f"{DONE_NOTICE}\n\n"):
                yield notice
        for chunk in self._ending(relay):
            yield chunk

    async def _stream(self, guarded: Guarded, relay: Relay) -> AsyncGenerator[Chunk, None]:
        left = self._output_tokens_left()
        limit = guarded.max_output_tokens(left)
        if self._room is not None:
            limit = self._room.output_limit(guarded, limit, can_grow=self._is_watched)
            await self._room.take(guarded, limit, can_grow=self._is_watched)
        relay.opened(limit, left, is_shared=self._is_shared(guarded))
        opened = self._upstream.open(guarded.messages, limit, is_continuation=self._progress.restarts > 0)
        async with opened as stream:
            async for chunk in stream:
                self._one.adopt(chunk)
                deltas = relay.take(chunk)
                if self._one.goes_on_as_it_came(chunk, deltas):
                    yield chunk
                else:
                    for delta in deltas:
                        yield self._one.dressed(delta)
                self._listener.may_pause = self._listener.may_pause or relay.is_near_the_end()
                if self._room is not None and not self._room.covers(guarded, relay.generated_tokens):
                    relay.stop()
                if relay.end is not None:
                    return
        for delta in relay.flush():
            yield self._one.dressed(delta)
        relay.finish()

    def _partial(self) -> Partial:
        return Partial(text=self._progress.sent_text, reasoning=self._progress.reasoning, is_json=self._asked.is_json)

    def _pressed(self) -> Case:
        """The case with a compaction in any case: the server has shown that our estimate is no guide here."""
        settings = self._case.settings.model_copy(update={"pre_request_ratio": _ANY_SHARE, "threshold_tokens": 0})
        return replace(self._case, settings=settings)

    def _output_tokens_left(self) -> int | None:
        if self._asked.output_tokens is None:
            return None
        return max(self._asked.output_tokens - self._progress.completion_tokens, 1)

    def _learn(self, guarded: Guarded, relay: Relay) -> None:
        try:
            self._learn_from(guarded, relay)
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            # The client has its answer; a lesson that is lost must not take it away again.
            log_failed_open("learn", error)
        self._progress.prompt_tokens.append(relay.usage.prompt_tokens if relay.usage else guarded.count.tokens)
        self._progress.usages.append(relay.usage_fields)

    def _learn_from(self, guarded: Guarded, relay: Relay) -> None:
        if relay.end == "overflow":
            overflow = relay.overflow or Overflow(None, None)
            if not relay.is_crash:
                overflow = taught(overflow, guarded, is_shared=self._is_shared(guarded))
            self._compactor.learn_overflow(self._case, guarded, overflow)
        if relay.usage is not None:
            self._compactor.learn(
                self._case,
                guarded,
                prompt_tokens=relay.usage.prompt_tokens,
                completion_tokens=relay.usage.completion_tokens,
            )
            self._listener.answered(self._case, guarded, relay.usage.prompt_tokens, relay.usage.completion_tokens)

    def _is_shared(self, guarded: Guarded) -> bool:
        """Whether others may have filled the context."""
        return self._room is not None and self._room.is_shared(guarded.window)

    def _calling(self, relay: Relay) -> list[Chunk]:
        """Of several calls the last was cut: the client executes the whole ones, and the model asks again."""
        return [*(self._one.dressed(delta) for delta in relay.whole_calls()), *self._ending(relay, "tool_calls")]

    def _closing(self, relay: Relay, text: str) -> list[Chunk]:
        """No way out: everything that is held, the notice, a regular end."""
        chunks = [self._one.dressed(delta) for delta in relay.surrendered()]
        notice = self._one.notice(f"\n\n{text}")
        return [*chunks, *([notice] if notice else []), *self._ending(relay, reason="length")]

    def _ending(self, relay: Relay, reason: str | None = None) -> list[Chunk]:
        reason = reason or relay.finish_reason or "stop"
        if (
            reason == "stop"
            and self._asked.is_json
            and self._progress.restarts
            and not _is_json(self._progress.sent_text)
        ):
            reason = "length"
        if self._progress.restarts:
            self._listener.restarted(self._details())
        fields = relay.ending_fields if reason == relay.finish_reason else {}
        return self._one.ending(reason, self.usage() if self._asked.wants_usage else None, fields)

    def usage(self) -> dict[str, Any]:
        """The whole answer's usage: the first prompt, all generated tokens; what a restart cost beside that."""
        prompts, reported = self._progress.prompt_tokens, self._progress.usages
        prompt = prompts[0] if prompts else 0
        completion = self._progress.completion_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if reported:
            usage = {**reported[0], **usage, **_added_up(reported, "completion_tokens_details")}
        return {**usage, "compaction": self._details()} if self._progress.restarts else usage

    def _details(self) -> dict[str, Any]:
        return {"restarts": self._progress.restarts, "prompt_tokens": list(self._progress.prompt_tokens)}

    @property
    def restarts(self) -> int:
        """How often the answer was carried over so far."""
        return self._progress.restarts


def _added_up(usages: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[str, int]]:
    """The details of all parts' usage, as far as they are numbers; empty where the server gave none."""
    total: Counter[str] = Counter()
    for usage in usages:
        details = usage.get(name)
        if isinstance(details, Mapping):
            total.update({key: value for key, value in details.items() if isinstance(value, int)})
    return {name: dict(total)} if total else {}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
