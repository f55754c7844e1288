"""Chunks as server-sent events: what the transport reads from LM Studio and writes to LiteLLM's OpenAI client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
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
    try:
        async for line in _lines(response):
            if not line.startswith(_FIELD):
                continue
            data = line[len(_FIELD) :].strip()
            if data == b"[DONE]":
                return
            if chunk := json_object(data):
                yield Received(chunk, line)
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
        body = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a response, without their ends.

    Split as bytes: `Response.aiter_lines` also splits at U+2028, U+0085 and the like, which JSON strings may hold as
    they are, and the two halves of such a chunk would be lost.
    """
    begun: list[bytes] = []
    async for data in response.aiter_bytes():
        *ended, rest = data.split(b"\n")
        for line in ended:
            yield b"".join((*begun, line)).rstrip(b"\r")
            begun.clear()
        if rest:
            begun.append(rest)
    if begun:
        yield b"".join(begun)
