"""What an answer looks like as JSON: chunks and whole bodies of the chat and completion endpoints.

Called by the two writers in `answers`. Shapes follow the OpenAI API as LM Studio serves it, plus what REST v0
adds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from .catalog import Instance
from .emissions import Piece, ReasoningField
from .generation import ToolCallSoFar
from .refusals import JsonObject

Dialect = Literal["chat", "v0", "text"]

_STOP_REASONS = {"stop": "eosFound", "length": "maxPredictedTokensReached", "tool_calls": "toolCalls"}


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What all JSON of one answer has in common."""

    id: str
    created_s: int
    model: str
    dialect: Dialect
    reasoning_field: ReasoningField

    def chunk(self, delta: JsonObject, finish_reason: str | None = None) -> JsonObject:
        """One streaming chunk with one choice."""
        if self.dialect == "text":
            choice: JsonObject = {"index": 0, "text": delta.get("content", "")}
        else:
            choice = {"index": 0, "delta": delta}
        return self._frame(True) | {"choices": [choice | {"logprobs": None, "finish_reason": finish_reason}]}

    def usage_chunk(self, usage: JsonObject) -> JsonObject:
        """The chunk after the last choice that `stream_options.include_usage` asks for."""
        return self._frame(True) | {"choices": [], "usage": usage}

    def delta(self, piece: Piece) -> JsonObject:
        """The delta of one piece; a tool call begins with id and name, and goes on with both null."""
        if piece.kind == "content":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return {self.reasoning_field: piece.text}
        function: JsonObject = {"name": piece.text, "arguments": ""}
        if piece.kind == "tool_arguments":
            function = {"name": None, "arguments": piece.text}
        call_id = piece.call_id if piece.kind == "tool_start" else None
        call = {"index": piece.call_index, "id": call_id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def whole(
        self,
        content: str,
        reasoning: str,
        calls: list[ToolCallSoFar],
        finish_reason: str | None,
        usage: JsonObject,
    ) -> JsonObject:
        """The body of a response that is not streamed."""
        choice: JsonObject = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.dialect == "text":
            choice["text"] = content
        else:
            message: JsonObject = {"role": "assistant", "content": content}
            if reasoning:
                message[self.reasoning_field] = reasoning
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
            choice["message"] = message
        return self._frame(False) | {"choices": [choice], "usage": usage}

    def _frame(self, streaming: bool) -> JsonObject:
        kind = "text_completion" if self.dialect == "text" else "chat.completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if streaming and self.dialect != "text" else kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.model,
        }


def usage(prompt_tokens: int, completion_tokens: int, reasoning_tokens: int | None) -> JsonObject:
    """The usage; never with cached tokens (bt#778, bt#2390), reasoning tokens since 0.4.22 (bt#2335)."""
    counts: JsonObject = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts


def v0_extras(
    instance: Instance,
    finish_reason: str | None,
    completion_tokens: int,
    first_delta_s: float,
    generation_s: float,
) -> JsonObject:
    """What REST v0 adds to an answer; durations in seconds."""
    model = instance.model
    engine = "mlx-llm" if model.format == "mlx" else "llama.cpp"
    return {
        "stats": {
            "tokens_per_second": completion_tokens / generation_s if generation_s > 0 else 0.0,
            "time_to_first_token": first_delta_s,
            "generation_time": generation_s,
            "stop_reason": _STOP_REASONS.get(finish_reason or "", "failed"),
        },
        "model_info": {
            "arch": model.architecture,
            "quant": model.quantization,
            "format": model.format,
            "context_length": instance.context_length,
        },
        "runtime": {"name": f"{engine}-simulator", "version": "1.0.0", "supported_formats": [model.format]},
    }


def now_s() -> int:
    """The time for `created`, in Unix seconds."""
    return int(time.time())
