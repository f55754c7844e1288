"""Serves one inference request in every way that is known of LM Studio.

It takes its place in an instance (a slot, a share of the pool, a KV slot); a prompt that does not fit the window meets
one of LM Studio's reactions.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from litellm_compaction.simulator import inference as simulated
from litellm_compaction.simulator.inference import Envelope, Piece, event
from litellm_compaction.simulator.messages import (
    ChatRequest,
    JsonObject,
    Refusal,
    error_body,
    parse_chat,
    parse_completion,
)
from litellm_compaction.simulator.rendering import Prompt, Segment, answer_segments, count, render_chat, render_text
from litellm_compaction.simulator.simulator import RequestRecord

from .catalog import Flight, FlightFailed, Instance
from .generation import Ending, Generation, visible_reply
from .messages import MODEL_UNLOADED, POOL_EXCEEDED, does_not_fit, event_body, ids_of, n_keep_too_long
from .rendering import keep_tokens, truncate_middle
from .script import Fault, Reply
from .simulator import Simulator


class Seat:
    """The place of one request, after it has waited for one in the instance's queue."""

    def __init__(self, instance: Instance, client_left: asyncio.Event) -> None:
        self.instance = instance
        self.flight = Flight(used_tokens=0, client_left=client_left)
        self._segments: tuple[Segment, ...] = ()
        self._is_left = False
        instance.flights.append(self.flight)

    def start(self, segments: tuple[Segment, ...], raw_tokens: int, used_tokens: int) -> int:
        """Begin computing a prompt; returns the number of its tokens (unscaled) that the cache already holds."""
        self.flight.used_tokens = used_tokens
        self._segments = segments
        return self.instance.take(segments, raw_tokens)

    def leave(self, answer: tuple[str, str, Sequence[tuple[str, str]]]) -> None:
        """Give the place back; the slot then holds the prompt and `answer` (reasoning, content, calls).

        A client that leaves during prompt processing frees the place only after that, as in LM Studio (bt#1143).
        """
        if self._is_left:
            return
        self._is_left = True
        self._segments += answer_segments(*answer) if self._segments else ()
        loop = asyncio.get_running_loop()
        if loop.time() < self.flight.prefill_ends_s:
            loop.call_at(self.flight.prefill_ends_s, self._free)
        else:
            self._free()

    def _free(self) -> None:
        if self._segments:
            self.instance.give_back(self._segments)
        if self.flight in self.instance.flights:
            self.instance.flights.remove(self.flight)
        self.instance.queue.release()


def meet_window(
    prompt: Prompt, simulator: Simulator, instance: Instance, record: RequestRecord
) -> tuple[Prompt, Ending | None]:
    """Returns the rest of a prompt in the window, and the ending if there is no answer; notes a truncation in `record`.

    A prompt as long as the window overflows too, since no token of an answer would fit. HTTP 400 is a Refusal.
    """
    sent_tokens, window_tokens = record.prompt_tokens, instance.context_length
    if sent_tokens < window_tokens:
        return prompt, None
    if simulator.overflow == "truncate_middle":
        kept = _truncate(prompt, instance)
        record.truncated = True
        record.kept_tokens = instance.model.count(kept)
        return kept, None
    record.kept_tokens = 0
    message = does_not_fit(sent_tokens, window_tokens)
    if simulator.overflow == "error_400_object":
        raise Refusal(400, error_body(message), outcome="overflow")
    if simulator.overflow == "empty":
        return prompt, Ending("empty", "overflow")
    return prompt, Ending("error", "overflow", message=message)


def _truncate(prompt: Prompt, instance: Instance) -> Prompt:
    factor, window_tokens = instance.model.tokens_factor, instance.context_length
    keep = keep_tokens(prompt, factor)
    if keep >= window_tokens:
        raise n_keep_too_long(keep, window_tokens)
    return truncate_middle(prompt, window_tokens, factor)


# Above this size tokenizing a new prompt takes tens of milliseconds, so it leaves the event loop (20 MB/s).
_THREAD_ABOVE_CHARS = 200_000


@dataclass(kw_only=True)
class Inference(simulated.Inference):
    simulator: Simulator
    _generation: Generation | None = field(default=None, init=False)
    _thoughts: str = field(default="", init=False)
    _ids: tuple[int, ...] = field(default=(), init=False)

    async def serve(self) -> None:
        try:
            request = self._parsed()
            self.record.streamed = request.stream
            instance = await self.simulator.resolve(request.model)
            prompt = await self._render(request, instance)
            instance.waiting += 1
            try:
                await instance.queue.acquire()
            finally:
                instance.waiting -= 1
            seat = Seat(instance, self.connection.client_left)
            try:
                if instance not in self.simulator.instances:
                    raise Refusal(400, {"error": MODEL_UNLOADED})
                await self._serve_in_seat(request, seat, prompt)
            finally:
                self._note_generated()
                seat.leave(self._answer())
        except Refusal as refusal:
            await self._refuse(refusal)
        except FlightFailed as failure:
            await self._refuse(Refusal(400, {"error": failure.message}, outcome=failure.outcome))

    def _parsed(self) -> ChatRequest:
        if not self.is_text:
            return parse_chat(self.body)
        self._ids = ids_of(self.body.get("prompt")) if self.simulator.api == "llama.cpp" else ()
        return parse_completion({**self.body, "prompt": ""} if self._ids else self.body)

    async def _render(self, request: ChatRequest, instance: Instance) -> Prompt:
        model, record = instance.model, self.record
        record.model, record.instance_id = model.key, instance.id
        record.context_length = instance.context_length
        if self.is_text:
            prompt = render_text(request.messages[0].text, self._ids)
        else:
            prompt = render_chat(request.messages, request.tools)
        if sum(len(segment.text) for segment in prompt.segments()) > _THREAD_ABOVE_CHARS:
            await asyncio.to_thread(prompt.count_tokens)
        record.prompt_tokens = record.kept_tokens = model.count(prompt)
        return prompt

    async def _serve_in_seat(self, request: ChatRequest, seat: Seat, prompt: Prompt) -> None:
        instance, record = seat.instance, self.record
        kept, preset = meet_window(prompt, self.simulator, instance, record)
        reply, fault = Reply(), None
        if preset is None:
            self._note_texts(request, prompt, kept)
            found = self._reply(request, instance)
            reply = found if isinstance(found, Reply) else Reply(found.content)
            fault = reply.fault
            self._account_prompt(seat, kept)
            if await self._answered_at_once(reply, fault, seat):
                return
        self._generation = Generation(
            simulator=self.simulator,
            record=record,
            reply=visible_reply(reply, request.stop),
            fault=fault,
            preset=preset,
            instance=instance,
            flight=seat.flight,
            max_tokens=request.max_tokens,
        )
        kind = "cmpl-" if self.is_text else "chatcmpl-"
        envelope = Envelope(id=self.simulator.new_id(kind), model=instance.id, is_text=self.is_text)
        serve = self._stream if request.stream else self._send
        await serve(request, seat, self._generation, envelope)

    async def _stream(self, request: ChatRequest, seat: Seat, generation: Generation, envelope: Envelope) -> None:
        self.record.status = 200
        await self.connection.start_stream()
        opening, echo = {"role": "assistant"}, self._echo(request)
        async with aclosing(generation.run()) as items:
            async for item in items:
                if isinstance(item, Ending):
                    self._release(seat, item)
                    await self._end_stream(item, envelope, opening, request.include_usage)
                    continue
                self._note(item)
                if opening and echo:
                    await self.connection.send_bytes(event(envelope.chunk({**opening, "content": echo})))
                    opening = {}
                await self.connection.send_bytes(event(envelope.chunk(opening | envelope.delta(item))))
                opening = {}

    async def _end_stream(self, ending: Ending, envelope: Envelope, opening: JsonObject, include_usage: bool) -> None:
        if ending.kind == "drop":
            await self._drop()
            return
        if ending.kind == "error":
            await self.connection.send_bytes(event(event_body(ending.message), "error"))
            await self.connection.end_stream()
            return
        tail = b""
        if ending.kind == "finish":
            tail += event(envelope.chunk({**opening, "content": ""} if opening else {}, ending.finish_reason))
        if include_usage:
            tail += event(envelope.body("chat.completion.chunk", choices=[], usage=self._usage()))
        await self.connection.send_bytes(tail + event(b"[DONE]"))
        await self.connection.end_stream()

    async def _send(self, request: ChatRequest, seat: Seat, generation: Generation, envelope: Envelope) -> None:
        async with aclosing(generation.run()) as items:
            async for item in items:
                if not isinstance(item, Ending):
                    self._note(item)
                    continue
                self.record.status = item.status
                self._release(seat, item)
                if item.kind == "drop":
                    await self._drop()
                elif item.kind == "error":
                    body = event_body(item.message) if item.status == 200 else {"error": item.message}
                    await self.connection.send_json(item.status, body)
                else:
                    reason = "stop" if item.kind == "empty" else item.finish_reason
                    message = self._whole(generation.reply, self._echo(request), envelope)
                    await self.connection.send_json(200, envelope.whole(message, reason, self._usage()))

    def _whole(self, reply: Reply, echo: str, envelope: Envelope) -> JsonObject:
        """The message, with the calls that are complete; no token of the `echo` is generated, so none is counted."""
        said = self._message()
        made = zip(said["tool_calls"], reply.tool_calls, strict=False)
        whole = [call for call, (_, arguments) in made if call["function"]["arguments"] == arguments]
        thoughts = {envelope.reasoning_field: self._thoughts} if self._thoughts else {}
        return {**said, "content": echo + said["content"], **thoughts, "tool_calls": whole}

    def _note(self, piece: Piece) -> None:
        super()._note(piece)
        self._thoughts += piece.text if piece.kind == "reasoning" else ""

    def _usage(self) -> JsonObject:
        """LM Studio's has reasoning tokens since 0.4.22 (bt#2335)."""
        record, generation = self.record, self._generation
        usage = super()._usage()
        if self.simulator.truncated_usage == "kept" and record.truncated:
            usage["prompt_tokens"] = record.kept_tokens
            usage["total_tokens"] = record.kept_tokens + record.completion_tokens
        if generation is not None and generation.reply.reasoning and self.simulator.api == "v1":
            thoughts = math.ceil(count(generation.reply.reasoning) * generation.instance.model.tokens_factor)
            usage["completion_tokens_details"] = {"reasoning_tokens": min(thoughts, record.completion_tokens)}
        return usage

    async def _drop(self) -> None:
        """Closes the connection as it is, with the bytes that were sent before."""
        self.connection.close()
        # The server learns of it in the next turn of the loop and then asks for no response any more.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _account_prompt(self, seat: Seat, kept: Prompt) -> None:
        record, raw_tokens = self.record, kept.count_tokens()
        cached_tokens = seat.start(kept.segments(), raw_tokens, record.kept_tokens)
        record.cached_tokens = record.kept_tokens * cached_tokens // max(1, raw_tokens)
        record.computed_tokens = record.kept_tokens - record.cached_tokens
        if self.simulator.is_pool_full(seat.instance):
            seat.instance.fail_all(POOL_EXCEEDED, "pool_overflow")

    async def _answered_at_once(self, reply: Reply, fault: Fault | None, seat: Seat) -> bool:
        """Returns True if the answer was a plain response or a dropped connection instead of a generation."""
        if reply.status is not None:
            raise Refusal(reply.status, {"error": reply.content}, outcome="error")
        if fault is None or fault.at != "before_first_delta" or fault.kind not in ("500", "drop"):
            return False
        if fault.kind == "500":
            raise Refusal(fault.status, {"error": fault.message}, outcome="fault")
        self._release(seat, Ending("drop", "fault"))
        await self._drop()
        return True

    def _echo(self, request: ChatRequest) -> str:
        last = request.messages[-1]
        is_prefill = not self.is_text and last.role == "assistant" and not last.tool_calls
        return last.text if is_prefill else ""

    def _release(self, seat: Seat, ending: Ending) -> None:
        self._note_generated()
        self.record.finish_reason = ending.finish_reason
        self.record.error = ending.message
        seat.leave(self._answer())
        self.simulator.finish(self.record, ending.outcome)

    def _note_generated(self) -> None:
        if self._generation is not None:
            self.record.completion_tokens = self._generation.completion_tokens()

    def _answer(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self._thoughts, self.record.content, [(name, arguments) for _, name, arguments in self.calls]

    async def _refuse(self, refusal: Refusal) -> None:
        self.record.status = refusal.status
        self.record.error = self.record.error or str(refusal)
        self.simulator.finish(self.record, refusal.outcome)
        await self.connection.send_json(refusal.status, refusal.body)
