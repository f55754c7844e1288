"""A streamed answer of a chat, as its chunks say it."""

from __future__ import annotations

from typing import Any


class Chunked:
    """An answer whose `chunks` are there."""

    chunks: Any

    @property
    def deltas(self) -> list[dict[str, Any]]:
        return [choice["delta"] for chunk in self.chunks for choice in chunk.get("choices") or ()]

    @property
    def raw_text(self) -> str:
        """With the notices."""
        return "".join(delta.get("content") or "" for delta in self.deltas)

    @property
    def reasoning(self) -> str:
        return "".join(delta.get("reasoning_content") or delta.get("reasoning") or "" for delta in self.deltas)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of every call, by index; fails on a call that begins twice."""
        found: dict[int, list[str]] = {}
        for call in [call for delta in self.deltas for call in delta.get("tool_calls") or ()]:
            function = call["function"]
            if function.get("name"):
                assert call["index"] not in found, "a call that begins twice"
                found[call["index"]] = [function["name"], ""]
            found[call["index"]][1] += function.get("arguments") or ""
        return [(name, arguments) for _, (name, arguments) in sorted(found.items())]

    @property
    def finish_reasons(self) -> list[str]:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices") or ()]
        return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]

    @property
    def usages(self) -> list[dict[str, Any]]:
        return [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
