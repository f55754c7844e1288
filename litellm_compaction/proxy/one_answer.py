"""The one answer as the client reads it: one id, one role, one finish_reason, whatever stream a delta came from.

Used by the restart loop for everything that it sends (promise P6), and by the carriers where a client wants the answer
in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from litellm_compaction.proxy.exchange import Chunk, Received
from litellm_compaction.proxy.notices import Notices
from litellm_compaction.proxy.relay import Progress, append_calls

_NONE: Mapping[str, Any] = MappingProxyType({})


class OneAnswer:
    """Makes chunks of one answer out of deltas and notices.

    Args:
        progress: notes what has been delivered.
        notices: where they go.
    """

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
        if not (is_first or is_last) or chunk.get("error") is not None:
            return
        fields = {key: chunk[key] for key in chunk if key not in ("choices", "usage")}
        if is_first:
            self._base = fields
        else:
            # What a server adds to its last chunks only, such as LM Studio's `stats` and llama.cpp's `timings`.
            self._closing.update((key, fields[key]) for key in fields if key not in self._base)

    def goes_on_as_it_came(self, chunk: Chunk, deltas: Sequence[Chunk]) -> bool:
        """Whether `chunk` says what has to be said, and nothing else; notes that it was sent.

        Most chunks do: reading and writing each anew would be most of what we cost a stream.
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

    def notice(self, text: str) -> Chunk | None:
        """`text` as a chunk, which delivers nothing of the answer; None where the client is not told here."""
        place = self._notices.within if self._progress.delivered else self._notices.before
        return (
            None
            if place == "off"
            else self._undelivered("content" if place == "content" else "reasoning_content", text)
        )

    def opening(self) -> Chunk:
        """The first chunk of an answer that has to wait: it says nothing, and the client knows that one comes."""
        return self._undelivered("content", "")

    def _undelivered(self, key: str, text: str) -> Chunk:
        if not self._base:
            self._base = {"id": f"chatcmpl-{id(self):x}", "object": "chat.completion.chunk", "created": 0, "model": ""}
        delivered = self._progress.delivered
        chunk = self.dressed({key: text})
        self._progress.delivered = delivered
        return chunk

    def ending(self, reason: str, usage: Mapping[str, Any] | None, fields: Mapping[str, Any] = _NONE) -> list[Chunk]:
        """The last chunks: why the answer ended, and its usage if it was asked for.

        Args:
            reason: the finish reason.
            usage: None where nobody wants it.
            fields: what else the server said of its choice.
        """
        choice = {**fields, "index": 0, "delta": {}, "finish_reason": reason}
        base = {**self._base, **self._closing}
        chunks: list[Chunk] = [{**base, "choices": [choice]}]
        return chunks if usage is None else [*chunks, {**base, "choices": [], "usage": usage}]


def joined(chunks: Iterable[Chunk]) -> Chunk:
    """The pieces of an answer as the one completion that a client gets who did not ask for a stream."""
    envelope: Chunk = {}
    message: dict[str, Any] = {"role": "assistant"}
    texts: dict[str, list[str]] = {}
    calls: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    usage = None
    for chunk in chunks:
        envelope.update((key, value) for key, value in chunk.items() if key not in envelope and key != "choices")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            last = {**last, **{key: value for key, value in choice.items() if value is not None}}
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    append_calls(calls, value)
                elif key == "function_call" and isinstance(value, dict):
                    message[key] = _added_call(message.get(key, {}), value)
                elif isinstance(value, str) and key != "role":
                    texts.setdefault(key, []).append(value)
                elif isinstance(value, list) and isinstance(message.get(key, []), list):
                    message[key] = [*message.get(key, ()), *value]
                elif value is not None and key != "role":
                    message[key] = value
    message.update((key, "".join(pieces)) for key, pieces in texts.items())
    if calls:
        message["tool_calls"] = [_whole_call(call) for call in calls]
    is_silent = calls or "function_call" in message or "refusal" in message
    message.setdefault("content", None if is_silent else "")
    choice = {**last, "index": 0, "message": message, "finish_reason": last.get("finish_reason") or "stop"}
    del choice["delta"]
    return {**envelope, "object": "chat.completion", "choices": [choice], "usage": usage}


def _added_call(known: Mapping[str, Any], fragment: Mapping[str, Any]) -> dict[str, Any]:
    arguments = (known.get("arguments") or "") + (fragment.get("arguments") or "")
    return {"name": known.get("name") or fragment.get("name"), "arguments": arguments}


def _whole_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", **{key: value for key, value in call.items() if key != "index" and value is not None}}
