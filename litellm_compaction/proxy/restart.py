"""The loop that carries an answer over the context limit: watch, stop, compact, continue; streaming and not.

Written once, over an abstract upstream: chunks of JSON in, chunks of JSON out (OpenAI's `chat.completion.chunk`).
`upstream.py` and `iterator.py` carry it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from litellm_compaction.core.carry_over import Partial
from litellm_compaction.core.continuation import Joiner, settled_length
from litellm_compaction.core.messages import ABORT_NOTICE, ATTEMPTS_NOTICE, DONE_NOTICE, START_NOTICE, Message, Request
from litellm_compaction.engine import Case, Compactor, Guarded, Pending, Room
from litellm_compaction.errors import CompactionError, Overflow, overflow_from_text
from litellm_compaction.models.generated import GeneratedTokens
from litellm_compaction.proxy.failing_open import log_failed_open
from litellm_compaction.proxy.wire import Usage, usage_of

Chunk: TypeAlias = dict[str, Any]
End: TypeAlias = Literal["done", "limit", "overflow", "failed"]

# From here on nothing is sent that could not be taken back: text ends at a word, tool calls are complete.
_DANGER_RATIO = 0.80
_DANGER_OUTPUT_RATIO = 0.60
_CALL_ROOM_TOKENS = 4096
# A prompt this close to the window explains an answer that breaks off without a word.
_NEAR_FULL_RATIO = 0.80
_FULL_RATIO = 0.98
# What is believed of a window after an overflow that named no number.
_SHRINK_RATIO = 0.80
# Every prompt takes more of a window: the next request is compacted, whatever the estimate says.
_ANY_SHARE = 1e-6
_STILL_TOO_LARGE = "The compacted prompt still exceeds the available context size."
_REASONING_FIELDS = ("reasoning_content", "reasoning")
_KEPT_REASONING_CHARS = 40_000


class UpstreamError(Exception):
    """The server refused a request before its first chunk, or reported an error inside the stream.

    Attributes:
        text: the body, for recognizing an overflow; never logged.
        response: the carrier's own error object, to be passed on unchanged.
    """

    def __init__(self, text: str, response: Any = None) -> None:
        super().__init__("the upstream server reported an error")
        self.text = text
        self.response = response


class UpstreamDropped(UpstreamError):
    """The connection broke; the carrier's own exception is the cause."""


class Upstream(Protocol):
    """The server of one deployment, asked for one client request."""

    def open(
        self, messages: Sequence[Message] | None, max_tokens: int, *, is_continuation: bool
    ) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        """The chunks of an answer; leaving the context aborts it.

        Args:
            messages: what to send; None for the client's own list.
            max_tokens: bound on the answer.
            is_continuation: the answer goes on; what shapes a whole document is left out.

        Raises:
            UpstreamError: refused.
        """


class Listener(Protocol):
    """Who has to know how an answer goes on."""

    may_pause: bool

    def sent(self, case: Case, guarded: Guarded) -> None:
        """Something goes out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the client asked for, as far as the loop has to know.

    Attributes:
        request: the conversation, as the client sent it.
        output_tokens: its limit for the answer, None for none.
        is_json: structured output: no notices, one document.
        has_notices: where notices go.
        wants_usage: whether the stream must end with a usage chunk.
    """

    request: Request
    output_tokens: int | None
    is_json: bool
    notices: Literal["content", "reasoning", "off"]
    wants_usage: bool


@dataclass(slots=True)
class _Progress:
    """What the client has of the answer, and what it has cost."""

    text: list[str] = field(default_factory=list)
    reasoning: str = ""
    completion_tokens: int = 0
    prompt_tokens: int | None = None
    restarts: int = 0
    delivered: bool = False

    @property
    def sent_text(self) -> str:
        return "".join(self.text)


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
        self._progress = _Progress()
        self._base: Chunk = {}
        self._role_sent = False

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
            if notice := self._notice(START_NOTICE + "\n"):
                yield notice
            if self._room is not None:
                await self._room.take_for_summary(prepared.work.window, prepared.work.count.tokens)
            guarded = await self._compactor.finish(prepared)
            if guarded.action == "compacted" and (notice := self._notice(DONE_NOTICE + "\n\n")):
                yield notice
        else:
            guarded = prepared
            if guarded.action == "compacted" and (notice := self._notice(f"{START_NOTICE}\n{DONE_NOTICE}\n\n")):
                yield notice
        retried = False
        while True:
            self._listener.sent(self._case, guarded)
            relay = _Relay(self._asked, self._progress, guarded, self._case.settings.streaming_ratio)
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
                overflow = overflow_from_text(error.text)
                if overflow is None:
                    raise
                relay.end, relay.overflow = "overflow", overflow
                relay.error = error
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
                guarded = await self._compactor.guard(self._asked.request, self._pressed())
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
            if notice := self._notice(f"\n\n{START_NOTICE}\n"):
                yield notice
            try:
                if self._room is not None:
                    await self._room.take_for_summary(guarded.window, relay.used_tokens())
                case = self._pressed() if relay.is_full else self._case
                guarded = await self._compactor.carry_over(self._asked.request, self._partial(), case)
            except CompactionError:
                used = relay.used_tokens()
                text = ABORT_NOTICE.format(used=used, window=guarded.window.tokens)
                for chunk in self._closing(relay, text):
                    yield chunk
                return
            if notice := self._notice(f"{DONE_NOTICE}\n\n"):
                yield notice
        for chunk in self._ending(relay):
            yield chunk

    async def _stream(self, guarded: Guarded, relay: _Relay) -> AsyncGenerator[Chunk, None]:
        left = self._output_tokens_left()
        limit = guarded.max_output_tokens(left)
        if self._room is not None:
            limit = self._room.output_limit(guarded, limit, can_grow=self._is_watched)
            await self._room.take(guarded, limit, can_grow=self._is_watched)
            relay.is_shared = self._room.is_shared(guarded.window)
        relay.limit_tokens, relay.asked_tokens = limit, left
        opened = self._upstream.open(guarded.messages, limit, is_continuation=self._progress.restarts > 0)
        async with opened as stream:
            async for chunk in stream:
                self._adopt(chunk)
                for delta in relay.take(chunk):
                    yield self._dressed(delta)
                self._listener.may_pause = self._listener.may_pause or relay.is_near_the_end()
                if self._room is not None and not self._room.covers(guarded, relay.generated_tokens):
                    relay.stop()
                if relay.end is not None:
                    return
        for delta in relay.flush():
            yield self._dressed(delta)
        relay.finish()

    def _adopt(self, chunk: Chunk) -> None:
        """Makes the first chunk's id, model and time those of the whole answer; it may be one that is held."""
        if not self._base and chunk.get("error") is None:
            self._base = {key: chunk[key] for key in chunk if key not in ("choices", "usage")}

    def _dressed(self, delta: Chunk) -> Chunk:
        """`delta` as a chunk of the one answer: the first stream's id, one role."""
        delta = {key: value for key, value in delta.items() if key != "role"}
        if not self._role_sent:
            delta = {"role": "assistant", **delta}
            self._role_sent = True
        self._progress.delivered = True
        return {**self._base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    def _notice(self, text: str) -> Chunk | None:
        place = self._asked.notices
        if place == "off" or self._asked.is_json:
            return None
        if not self._base:
            self._base = {"id": f"chatcmpl-{id(self):x}", "object": "chat.completion.chunk", "created": 0, "model": ""}
        delivered = self._progress.delivered
        chunk = self._dressed({"content" if place == "content" else "reasoning_content": text})
        self._progress.delivered = delivered
        return chunk

    def _partial(self) -> Partial:
        return Partial(text=self._progress.sent_text, reasoning=self._progress.reasoning, is_json=self._asked.is_json)

    def _pressed(self) -> Case:
        """The case with a compaction in any case: the server has shown that our estimate is no guide here."""
        settings = self._case.settings.model_copy(update={"pre_request_ratio": _ANY_SHARE})
        return replace(self._case, settings=settings)

    def _output_tokens_left(self) -> int | None:
        if self._asked.output_tokens is None:
            return None
        return max(self._asked.output_tokens - self._progress.completion_tokens, 1)

    def _learn(self, guarded: Guarded, relay: _Relay) -> None:
        try:
            self._learn_from(guarded, relay)
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            # The client has its answer; a lesson that is lost must not take it away again.
            log_failed_open("learn", error)
        if self._progress.prompt_tokens is None:
            self._progress.prompt_tokens = relay.usage.prompt_tokens if relay.usage else guarded.count.tokens

    def _learn_from(self, guarded: Guarded, relay: _Relay) -> None:
        if relay.end == "overflow":
            named = relay.overflow.window_tokens if relay.overflow else None
            if named is None and not (self._room is not None and self._room.is_shared(guarded.window)):
                # Where others share the context, they may have filled it.
                named = int(_SHRINK_RATIO * guarded.window.tokens)
            self._compactor.learn_window(self._case, named)
        if relay.usage is not None:
            self._compactor.learn(
                self._case,
                guarded,
                prompt_tokens=relay.usage.prompt_tokens,
                completion_tokens=relay.usage.completion_tokens,
            )

    def _calling(self, relay: _Relay) -> list[Chunk]:
        """Of several calls the last was cut: the client executes the whole ones, and the model asks again."""
        return [*(self._dressed(delta) for delta in relay.whole_calls()), *self._ending(relay, "tool_calls")]

    def _closing(self, relay: _Relay, text: str) -> list[Chunk]:
        """No way out: everything that is held, the notice, a regular end."""
        chunks = [self._dressed(delta) for delta in relay.surrendered()]
        notice = self._notice(f"\n\n{text}")
        return [*chunks, *([notice] if notice else []), *self._ending(relay, reason="length")]

    def _ending(self, relay: _Relay, reason: str | None = None) -> list[Chunk]:
        reason = reason or relay.finish_reason or "stop"
        if (
            reason == "stop"
            and self._asked.is_json
            and self._progress.restarts
            and not _is_json(self._progress.sent_text)
        ):
            reason = "length"
        chunks: list[Chunk] = [{**self._base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}]
        if self._asked.wants_usage:
            chunks.append({**self._base, "choices": [], "usage": self.usage()})
        return chunks

    def usage(self) -> dict[str, Any]:
        """The whole answer's usage: the first prompt, all generated tokens."""
        prompt = self._progress.prompt_tokens or 0
        completion = self._progress.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @property
    def restarts(self) -> int:
        """How often the answer was carried over so far."""
        return self._progress.restarts


class _Relay:
    """One upstream stream on its way to the client: what may be sent now, what is held, when to stop."""

    def __init__(self, asked: Asked, progress: _Progress, guarded: Guarded, streaming_ratio: float) -> None:
        self._progress = progress
        self._window_tokens = guarded.window.tokens
        self._prompt_tokens = guarded.count.tokens
        self._stop_tokens = int(streaming_ratio * guarded.window.tokens)
        self._generated = GeneratedTokens(guarded.count_text)
        self._joiner = Joiner(progress.sent_text) if progress.restarts and progress.text else None
        self._tail = ""
        self._calls: list[dict[str, Any]] = []
        self._flowing: set[int] = set()
        self._call_open = False
        self._received = 0
        # Others can end the stream at any moment: it must never leave half a word.
        self.is_shared = False
        self.limit_tokens = 0
        self.asked_tokens: int | None = None
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.end: End | None = None
        self.overflow: Overflow | None = None
        self.error: UpstreamError | None = None

    def take(self, chunk: Chunk) -> list[Chunk]:
        """The deltas to send for `chunk`; sets `end` when the stream has to be stopped."""
        if chunk.get("error") is not None:
            self._fail(chunk)
            return []
        self.usage = usage_of(chunk) or self.usage
        choice = next(iter(chunk.get("choices") or ()), None)
        if not isinstance(choice, Mapping):
            return []
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta")
        if not isinstance(delta, Mapping):
            return []
        deltas = [*self._reasoning(delta), *self._text(delta), *self._tool_calls(delta)]
        if self.used_tokens() >= self._stop_tokens and not self._call_open and self.finish_reason is None:
            self.end = "limit"
        return deltas

    def flush(self) -> list[Chunk]:
        """What was held, at the stream's regular end."""
        if self._breaks_off():
            return []
        return self.surrendered()

    def surrendered(self) -> list[Chunk]:
        """Everything that is held and whole."""
        text = self._tail + (self._joiner.finish() if self._joiner is not None else "")
        self._tail = ""
        deltas = self._sent({"content": text}) if text else []
        if self._calls and self.finish_reason in ("tool_calls", "stop", "function_call"):
            deltas.append({"tool_calls": self._calls})
        self._calls = []
        return deltas

    def whole_calls(self) -> list[Chunk]:
        """The calls that are held, but for the last, in which the stream was cut."""
        return [{"tool_calls": self._calls[:-1]}] if self._calls[:-1] else []

    def finish(self) -> None:
        """Judges a stream that ended by itself."""
        if self.end is not None:
            return
        if self._received == 0 and self._looks_full(_FULL_RATIO if self.usage else _NEAR_FULL_RATIO):
            self.end = "overflow"
        elif self._breaks_off():
            self.end = "limit"
        else:
            self.end = "done"

    def completion_tokens(self) -> int:
        """What this stream has generated: as reported, else as counted."""
        return self.usage.completion_tokens if self.usage is not None else self._generated.exact()

    @property
    def generated_tokens(self) -> int:
        """What the stream has generated, as far as we can count."""
        return self._generated.tokens

    @property
    def is_full(self) -> bool:
        """Whether the window, and not a share of it, has ended the answer."""
        return self.end == "overflow" or self._looks_full(_DANGER_RATIO)

    def stop(self) -> None:
        """Ends the stream because there is no more room beside others; a call that has begun may finish."""
        if self.end is None and not self._call_open and self.finish_reason is None:
            self.end = "limit"

    def used_tokens(self) -> int:
        """How much of the window is taken, as far as we can count."""
        return self._prompt_tokens + self._generated.tokens

    @property
    def is_stuck(self) -> bool:
        """Whether going on would give the client something twice: a call that it has already begun to receive."""
        return bool(self._flowing)

    @property
    def has_whole_calls(self) -> bool:
        """Whether the client has calls that are whole, since the one that was cut came later and is held."""
        return bool(self._flowing and self._calls)

    def _breaks_off(self) -> bool:
        """Whether the answer ended because the window did, not because the model or the client wanted it to."""
        if self.finish_reason == "length":
            generated = self.completion_tokens()
            # LM Studio 0.4.22 reports one token less than the limit (lmstudio-bug-tracker 2335).
            return (
                self.asked_tokens is None or self.limit_tokens < self.asked_tokens or generated + 1 < self.asked_tokens
            )
        return self.finish_reason is None and self._looks_full(_NEAR_FULL_RATIO)

    def _looks_full(self, ratio: float) -> bool:
        prompt = self.usage.prompt_tokens if self.usage is not None else self._prompt_tokens
        return prompt + self.completion_tokens() >= ratio * self._window_tokens

    def _fail(self, chunk: Chunk) -> None:
        text = json.dumps(chunk.get("error"), default=str)
        self.overflow = overflow_from_text(text)
        self.error = UpstreamError(text, chunk)
        self.end = "overflow" if self.overflow is not None else "failed"

    def _reasoning(self, delta: Mapping[str, Any]) -> list[Chunk]:
        for name in _REASONING_FIELDS:
            text = delta.get(name)
            if isinstance(text, str) and text:
                self._count(text)
                self._progress.reasoning = (self._progress.reasoning + text)[-_KEPT_REASONING_CHARS:]
                return [{name: text}]
        return []

    def _text(self, delta: Mapping[str, Any]) -> list[Chunk]:
        text = delta.get("content")
        if not isinstance(text, str) or not text:
            return []
        self._count(text)
        if self._joiner is not None:
            text = self._joiner.feed(text)
        text = self._tail + text
        settled = settled_length(text) if self.is_shared or self.is_near_the_end() else len(text)
        self._tail = text[settled:]
        return self._sent({"content": text[:settled]}) if settled else []

    def _tool_calls(self, delta: Mapping[str, Any]) -> list[Chunk]:
        calls = delta.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return []
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping):
                self._count(f"{function.get('name') or ''}{function.get('arguments') or ''}")
        self._call_open = True
        held = self._tail
        self._tail = ""
        deltas = self._sent({"content": held}) if held else []
        flowing = [call for call in calls if self._flows(call)]
        _append_calls(self._calls, [call for call in calls if call not in flowing])
        return [*deltas, {"tool_calls": flowing}] if flowing else deltas

    def _flows(self, call: Any) -> bool:
        """Whether a call's fragment is sent as it comes; decided once a call, and never before an earlier one."""
        index = call.get("index", 0) if isinstance(call, Mapping) else 0
        if index not in self._flowing and not self._calls and self._has_room_for_a_call():
            self._flowing.add(index)
        return index in self._flowing

    def _has_room_for_a_call(self) -> bool:
        if self.is_near_the_end():
            return False
        return self.limit_tokens - self._generated.tokens >= _CALL_ROOM_TOKENS

    def is_near_the_end(self) -> bool:
        """Whether the window may end soon; our count of what the server has generated may be off by a quarter."""
        return (
            self.finish_reason == "length"
            or self.used_tokens() >= _DANGER_RATIO * self._window_tokens
            or self._generated.tokens >= _DANGER_OUTPUT_RATIO * self.limit_tokens
        )

    def _sent(self, delta: Chunk) -> list[Chunk]:
        self._progress.text.append(delta["content"])
        return [delta]

    def _count(self, text: str) -> None:
        self._received += 1
        self._generated.add(text)


def _append_calls(held: list[dict[str, Any]], calls: Sequence[Any]) -> None:
    """Joins the fragments of tool calls by index: one complete delta a call."""
    for call in calls:
        if not isinstance(call, Mapping):
            continue
        index = call.get("index", len(held))
        known = next((each for each in held if each.get("index") == index), None)
        function = dict(call.get("function") or {})
        if known is None:
            held.append(
                {**call, "index": index, "function": {**function, "arguments": function.get("arguments") or ""}}
            )
            continue
        known["function"]["arguments"] += function.get("arguments") or ""
        for key in ("id", "type"):
            if call.get(key) and not known.get(key):
                known[key] = call[key]
        if function.get("name") and not known["function"].get("name"):
            known["function"]["name"] = function["name"]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
