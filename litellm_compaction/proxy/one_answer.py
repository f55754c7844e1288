"""The one answer as the client reads it: one id, one role, one finish_reason, whatever stream a delta came from.

Used by the restart loop for everything that it sends (promise P6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from litellm_compaction.proxy.exchange import Chunk, Received
from litellm_compaction.proxy.notices import Notices
from litellm_compaction.proxy.relay import Progress


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
        self._role_sent = False

    def adopt(self, chunk: Chunk) -> None:
        """Makes the first chunk's id, model and time those of the whole answer; it may be one that is held."""
        if not self._base and chunk.get("error") is None:
            self._base = {key: chunk[key] for key in chunk if key not in ("choices", "usage")}

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

    def ending(self, reason: str, usage: Mapping[str, Any] | None) -> list[Chunk]:
        """The last chunks: why the answer ended, and its usage if it was asked for."""
        chunks: list[Chunk] = [{**self._base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}]
        return chunks if usage is None else [*chunks, {**self._base, "choices": [], "usage": usage}]
