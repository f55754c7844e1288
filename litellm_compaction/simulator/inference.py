"""Serves one inference request of a simulated server, from its body to its last byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from .answer import Connection, Envelope, Piece, event, pieces, reply_tokens, visible_reply
from .catalog import Instance
from .messages import ChatRequest, JsonObject, Refusal, parse_chat, parse_completion
from .rendering import Prompt, answer_segments, render_chat, render_text, with_newest
from .script import ChatCall, Reply, RequestRecord, default_reply
from .simulator import Simulator


@dataclass(kw_only=True)
class Inference:
    simulator: Simulator
    connection: Connection
    record: RequestRecord
    body: JsonObject
    is_text: bool
    calls: list[list[str]] = field(default_factory=list, init=False)

    async def serve(self) -> None:
        record = self.record
        try:
            request = parse_completion(self.body) if self.is_text else parse_chat(self.body)
            record.streamed = request.stream
            instance = await self.simulator.resolve(request.model)
            prompt = self._prompt(request, instance)
            reply = self._reply(request, instance)
        except Refusal as refusal:
            record.status, record.error = refusal.status, str(refusal)
            self.simulator.finish(record, refusal.outcome)
            await self.connection.send_json(refusal.status, refusal.body)
            return
        record.status = 200
        try:
            await self._answer(request, instance, visible_reply(reply, request.stop))
        finally:
            said = [(name, arguments) for _, name, arguments in self.calls]
            instance.give_back((*prompt.segments(), *answer_segments("", record.content, said)))

    def _prompt(self, request: ChatRequest, instance: Instance) -> Prompt:
        """The rest of the prompt in the window: one that is as long overflows, too, as no token of an answer fits."""
        record = self.record
        record.model, record.instance_id = instance.model.key, instance.id
        record.context_length = instance.context_length
        whole = render_text(request.messages[0].text) if self.is_text else render_chat(request.messages, request.tools)
        kept = whole
        record.prompt_tokens = record.kept_tokens = whole.count_tokens()
        if record.prompt_tokens >= instance.context_length:
            kept = with_newest(whole, instance.context_length)
            record.truncated, record.kept_tokens = True, kept.count_tokens()
        self._note_texts(request, whole, kept)
        record.cached_tokens = instance.take(kept.segments(), record.kept_tokens)
        record.computed_tokens = record.kept_tokens - record.cached_tokens
        return kept

    def _note_texts(self, request: ChatRequest, whole: Prompt, kept: Prompt) -> None:
        # A final assistant message is part of the opening, not of a block.
        last = request.messages[-1]
        begun = last.text if last.role == "assistant" else ""
        self.record.seen_text = "\n".join(filter(None, (kept.text(), begun)))
        self.record.sent_text = "\n".join(filter(None, (whole.text(), begun)))

    def _reply(self, request: ChatRequest, instance: Instance) -> Reply:
        record, script = self.record, self.simulator.script
        call = ChatCall(
            body=self.body,
            messages=[] if self.is_text else list(self.body["messages"]),
            model=request.model,
            instance_id=instance.id,
            prompt_text=record.seen_text,
            sent_text=record.sent_text,
            prompt_tokens=record.prompt_tokens,
            context_length=instance.context_length,
            truncated=record.truncated,
            index=self.simulator.take_call_index(),
            stream=request.stream,
        )
        try:
            return (script(call) if script is not None else None) or default_reply(call)
        except Exception as error:
            raise Refusal(500, {"error": f"the script failed: {error!r}"}) from error

    async def _answer(self, request: ChatRequest, instance: Instance, reply: Reply) -> None:
        record, prefix = self.record, "cmpl-" if self.is_text else "chatcmpl-"
        envelope = Envelope(id=self.simulator.new_id(prefix), model=instance.id, is_text=self.is_text)
        room_tokens = instance.context_length - record.kept_tokens
        most = room_tokens if request.max_tokens is None else min(request.max_tokens, room_tokens)
        record.finish_reason = reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")
        if reply_tokens(reply) > most:
            record.finish_reason = "length"
        if request.stream:
            await self.connection.start_stream()
        delta: JsonObject = {"role": "assistant"}
        for piece in self._pieces(reply, max(0, most)):
            await asyncio.sleep(0)
            self._note(piece)
            if request.stream and piece.kind != "hidden":
                await self.connection.send_bytes(event(envelope.chunk(delta | envelope.delta(piece))))
                delta = {}
        self.simulator.finish(record, "ok")
        usage = self._usage()
        if not request.stream:
            await self.connection.send_json(200, envelope.whole(self._message(), record.finish_reason, usage))
            return
        tail = event(envelope.chunk(delta | ({"content": ""} if delta else {}), record.finish_reason))
        if request.include_usage:
            tail += event(envelope.body("chat.completion.chunk", choices=[], usage=usage))
        await self.connection.send_bytes(tail + event(b"[DONE]"))
        await self.connection.end_stream()

    def _pieces(self, reply: Reply, limit: int) -> Iterator[Piece]:
        return pieces(reply, self.simulator.chunk_tokens, limit, self.simulator.new_id)

    def _note(self, piece: Piece) -> None:
        record = self.record
        if record.first_delta_s is None:
            record.first_delta_s = time.monotonic()
            self.simulator.notify()
        record.completion_tokens += piece.tokens
        if piece.kind == "content":
            record.content += piece.text
        elif piece.kind == "tool_start":
            self.calls.append([piece.call_id, piece.text, ""])
        elif piece.kind == "tool_arguments":
            self.calls[piece.call_index][2] += piece.text

    def _message(self) -> JsonObject:
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in self.calls
        ]
        return {"role": "assistant", "content": self.record.content, "tool_calls": calls}

    def _usage(self) -> JsonObject:
        """LM Studio's, which never tells cached tokens (bt#778, bt#2390)."""
        prompt, completion = self.record.prompt_tokens, self.record.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
