"""Chunks as server-sent events: what the transport reads from LM Studio and writes to LiteLLM's OpenAI client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import httpx

from litellm_compaction.proxy.exchange import Chunk, Received, UpstreamDropped

DONE = b"data: [DONE]\n\n"
_FIELD = b"data:"


async def read_events(response: httpx.Response) -> AsyncIterator[Chunk]:
    """The JSON objects of an event stream; what is not one is passed over.

    Raises:
        UpstreamDropped: the connection broke.
    """
    lines = _Lines()
    try:
        async for data in response.aiter_bytes():
            for chunk in _chunks(lines.feed(data)):
                if chunk is None:
                    return
                yield chunk
        for chunk in filter(None, _chunks(lines.feed(b"\n"))):
            yield chunk
    except httpx.TransportError as error:
        raise UpstreamDropped("", None) from error


def event_of(chunk: Chunk) -> bytes:
    """A chunk as an event: the bytes in which it came, where it goes on as it came."""
    if isinstance(chunk, Received):
        origin: bytes = chunk.origin
        return origin + b"\n\n"
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def json_object(content: bytes) -> dict[str, Any]:
    """The JSON object in `content`; empty when it is something else."""
    try:
        # Decoded here: `json` guesses the encoding of bytes first, which takes as long as reading a chunk.
        body = json.loads(content.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _chunks(lines: Iterable[bytes]) -> Iterator[Received | None]:
    """The chunks in `lines`; None for the end of the stream."""
    for line in lines:
        if not line.startswith(_FIELD):
            continue
        data = line[len(_FIELD) :].strip()
        if data == b"[DONE]":
            yield None
        elif chunk := json_object(data):
            yield Received(chunk, line)


class _Lines:
    """Splits what comes from the network into lines, without their ends.

    As bytes: `Response.aiter_lines` also splits at U+2028, U+0085 and the like, which JSON strings may hold as they
    are, and the two halves of such a chunk would be lost. All lines of one read at once: a step of an asynchronous
    generator for each costs more than the split.
    """

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in `data`."""
        ended = data.split(b"\n")
        rest = ended.pop()
        if ended and self._begun:
            ended[0] = b"".join((*self._begun, ended[0]))
            self._begun.clear()
        if rest:
            self._begun.append(rest)
        return [line.rstrip(b"\r") for line in ended]
