"""The one answer that a client reads, whatever number of upstream streams it comes from.

It has one id, one role, one finish_reason, and one usage (promise P6).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from litellm_compaction.events import AnswerOutcome
from litellm_compaction.proxy.answer.protocol import Chunk, Notices, Place, Received, added_up

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True)
class Progress:
    """An answer as far as its client has it, and its cost.

    Attributes:
        text: since the model last looked something up; what came before is `earlier_text`.
        lost_tokens: of `completion_tokens`, those that can never reach the client.
        lookups: calls of our own tool.
    """

    text: list[str] = field(default_factory=list)
    reasoning: str = ""
    completion_tokens: int = 0
    lost_tokens: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    usages: list[Mapping[str, Any]] = field(default_factory=list)
    restarts: int = 0
    lookups: int = 0
    delivered: bool = False
    earlier_text: str = ""

    @property
    def sent_text(self) -> str:
        return "".join(self.text)

    @property
    def given_tokens(self) -> int:
        """The generated tokens that the client can have."""
        return self.completion_tokens - self.lost_tokens

    @property
    def whole_text(self) -> str:
        return self.earlier_text + self.sent_text

    @property
    def is_json(self) -> bool:
        try:
            json.loads(self.whole_text)
        except ValueError:
            return False
        return True

    def part(self) -> str:
        """Returns what goes between the text so far and the rest, which begins as an answer of its own."""
        parting = "\n\n" if self.sent_text.strip() else ""
        self.earlier_text += self.sent_text + parting
        self.text.clear()
        self.reasoning = ""
        return parting

    def usage(self, outcome: AnswerOutcome, receipt: Mapping[str, str] = _NONE) -> dict[str, Any]:
        """Returns the first prompt, all generated tokens, and beside that the cost of all that came in between."""
        prompt = self.prompt_tokens[0] if self.prompt_tokens else 0
        completion = self.completion_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if self.usages:
            usage = {**self.usages[0], **usage, **added_up(self.usages)}
        details = self.details(outcome, receipt)
        return {**usage, "compaction": details} if details else usage

    def details(self, outcome: AnswerOutcome, receipt: Mapping[str, str]) -> dict[str, Any]:
        """Returns {} for an answer that has come at once, and all of whose story its headers tell.

        `receipt` is that of a record which was applied after they had gone; {} for none.
        """
        if not self.restarts and not self.lookups and not receipt and outcome == "completed":
            return {}
        found = {"lookups": self.lookups} if self.lookups else {}
        prompts = list(self.prompt_tokens)
        return {"outcome": outcome, "restarts": self.restarts, "prompt_tokens": prompts, **found, **receipt}


class OneAnswer:
    def __init__(self, progress: Progress, notices: Notices) -> None:
        self._progress = progress
        self._notices = notices
        self._base: Chunk = {}
        self._closing: Chunk = {}
        self._role_sent = False

    def adopt(self, chunk: Chunk) -> None:
        """Makes the first chunk's id, model and time those of the whole answer; it may be one that is held."""
        choices = chunk.get("choices")
        is_first, is_last = not self._base, not choices or choices[0].get("finish_reason") is not None
        if not (is_first or is_last) or chunk.get("error"):
            return
        fields = {key: chunk[key] for key in chunk if key not in ("choices", "usage")}
        if is_first:
            self._base = fields
        else:
            # Fields that a server adds to its last chunks only, such as LM Studio's `stats` and llama.cpp's `timings`.
            self._closing.update((key, fields[key]) for key in fields if key not in self._base)

    def goes_on_as_it_came(self, chunk: Chunk, deltas: Sequence[Chunk]) -> bool:
        """Returns True if `chunk` says all of `deltas` and nothing else; notes that it was sent.

        Most chunks do: reading and writing each anew would be most of our cost for a stream.
        """
        if not isinstance(chunk, Received) or len(deltas) != 1 or chunk.get("id") != self._base.get("id"):
            return False
        choices = chunk["choices"]
        if len(choices) != 1 or choices[0].get("finish_reason") is not None or chunk.get("usage"):
            return False
        own = {key: value for key, value in choices[0]["delta"].items() if value}
        has_role = own.pop("role", None) is not None
        if own != deltas[0] or has_role == self._role_sent:
            return False
        self._role_sent = True
        self._progress.delivered = True
        return True

    def dressed(self, delta: Chunk) -> Chunk:
        """`delta` as a chunk of the one answer: the first stream's id, one role."""
        delta = {key: value for key, value in delta.items() if key != "role"}
        if not self._role_sent:
            delta = {"role": "assistant", **delta}
            self._role_sent = True
        self._progress.delivered = True
        return {**self._base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    def beside(self, choices: Sequence[Chunk]) -> list[Chunk]:
        """Choices beside the answer, as they came, in a chunk of it."""
        return [{**self._base, "choices": list(choices)}] if choices else []

    def notice(self, text: str) -> Chunk | None:
        """`text` as a chunk, which delivers nothing of the answer; None if the client is not told here."""
        return self._told(self._notices.within if self._progress.delivered else self._notices.before, text)

    def closing_notice(self, text: str) -> Chunk | None:
        """`text` at the end of an answer that the window has cut, likewise."""
        return self._told(self._notices.after, text)

    def _told(self, place: Place, text: str) -> Chunk | None:
        if place == "off":
            return None
        return self._undelivered("content" if place == "content" else "reasoning_content", text)

    @property
    def is_silent(self) -> bool:
        """Returns True if its client has nothing of it, not even a notice."""
        return not self._role_sent

    def opening(self) -> Chunk:
        """The first chunk of an answer that has to wait: empty, so that the client knows that one comes."""
        return self._undelivered("content", "")

    def _undelivered(self, key: str, text: str) -> Chunk:
        if not self._base:
            self._base = {"id": f"chatcmpl-{id(self):x}", "object": "chat.completion.chunk", "created": 0, "model": ""}
        delivered = self._progress.delivered
        chunk = self.dressed({key: text})
        self._progress.delivered = delivered
        return chunk

    def ending(self, reason: str, usage: Mapping[str, Any] | None, fields: Mapping[str, Any] = _NONE) -> list[Chunk]:
        """The last chunks.

        Args:
            reason: the finish reason.
            usage: None if the client did not ask for it.
            fields: the server's other ones of its choice.
        """
        choice = {**fields, "index": 0, "delta": {}, "finish_reason": reason}
        base = {**self._base, **self._closing}
        chunks: list[Chunk] = [{**base, "choices": [choice]}]
        return chunks if usage is None else [*chunks, {**base, "choices": [], "usage": usage}]


def joined(chunks: Iterable[Chunk]) -> Chunk:
    """The chunks of an answer's legs, each call in one, as the one completion for a client that wants no stream."""
    envelope: Chunk = {}
    message: dict[str, Any] = {"role": "assistant"}
    last: dict[str, Any] = {}
    usage = None
    for chunk in chunks:
        envelope.update((key, value) for key, value in chunk.items() if key not in envelope and key != "choices")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            last |= {key: value for key, value in choice.items() if value is not None}
            for key, value in choice["delta"].items():
                goes_on = key != "role" and isinstance(value, (str, list)) and isinstance(message.get(key), type(value))
                if value is not None:
                    message[key] = message[key] + value if goes_on else value
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_whole_call(call) for call in calls]
    is_silent = calls or "function_call" in message or "refusal" in message
    message.setdefault("content", None if is_silent else "")
    choice = {**last, "index": 0, "message": message, "finish_reason": last.get("finish_reason") or "stop"}
    del choice["delta"]
    return {**envelope, "object": "chat.completion", "choices": [choice], "usage": usage}


def _whole_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", **{key: value for key, value in call.items() if key != "index" and value is not None}}
