"""Event streams, taken apart and put together."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.errors import overflow_from_text
from litellm_compaction.proxy.answer.sse import (
    Received,
    UpstreamDropped,
    UpstreamError,
    bounds_of,
    event_of,
    json_object,
    read_events,
)

_BOUNDS = bounds_of(1000)
# What `str.splitlines` takes for the end of a line, and JSON strings may hold as it is.
_SEPARATORS = "\u2028\u2029\x85\x1c\x0b\x0c"


def _response(pieces: list[bytes], error: Exception | None = None) -> httpx.Response:
    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        if error is not None:
            raise error

    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=body())


async def _read(pieces: list[bytes], bounds: tuple[int, int] = _BOUNDS) -> list[dict[str, object]]:
    return [chunk async for batch in read_events(_response(pieces), bounds) for chunk in batch]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.just(_SEPARATORS), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from(["\n", "\r\n"]),
)
async def test_every_chunk_arrives_however_it_is_cut(texts: list[str], size: int, end: str) -> None:
    """Whatever a text holds and wherever the network cuts the bytes: every chunk arrives, once, in order."""
    chunks = [{"text": text} for text in texts]
    whole = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}{end}{end}" for chunk in chunks).encode()
    whole = whole.replace(b"\x1c", b"\\u001c") + f"data: [DONE]{end}{end}".encode()
    assert await _read([whole[i : i + size] for i in range(0, len(whole), size)]) == chunks


@given(st.integers(1, 40), st.sampled_from(["\n", "\r\n", "\r"]), st.booleans())
async def test_each_line_is_an_event(size: int, end: str, has_mark: bool) -> None:
    """Whatever ends it, behind a byte order mark too; comments, names and empty data say nothing, nor does the end."""
    lines = ['data: {"a": 1}', "", 'data: {"b": 2}', ": ping", "event: x", "data:", 'data: {"c": 3}', "data: [DONE]"]
    lines += ['data: {"late": 1}', ""]
    whole = ("\ufeff" * has_mark + end.join(lines) + end).encode()
    assert await _read([whole[i : i + size] for i in range(0, len(whole), size)]) == [{"a": 1}, {"b": 2}, {"c": 3}]


@given(st.integers(1, 40), st.sampled_from(["\n", "\r\n", "\r"]), st.sampled_from([2, 1, 0]))
async def test_an_event_in_several_lines_is_one(size: int, end: str, ends: int) -> None:
    """The standard joins the data of its lines; the stream may end without a blank line, or its own end behind it."""
    lines = ['data: {"a": 1}', 'data: {"b":', ": ping", "data: 2", "data:}", "", 'data: {"c":', 'data:"é"}']
    whole = end.join([*lines, *["", "data: [DONE]"][2 - ends :]]).encode()
    stream = read_events(_response([whole[i : i + size] for i in range(0, len(whole), size)]), _BOUNDS)
    chunks: list[Any] = []
    with nullcontext() if ends else pytest.raises(UpstreamDropped):
        async for batch in stream:
            chunks += batch
    assert chunks == [{"a": 1}, {"b": 2}, {"c": "é"}]


@pytest.mark.parametrize(
    "piece", [b"{broken", b'{"a":\ndata: 1', b"[1]", b"7", b'{"choices": [7]}', b'{"choices": true}']
)
async def test_piece_that_says_nothing_is_an_error(piece: bytes) -> None:
    """It may have been a word of the answer."""
    with pytest.raises(UpstreamError) as caught:
        await _read([b'data: {"choices": []}\n\n', b"data: " + piece + b"\n\n", b"data: [DONE]\n\n"])
    assert caught.value.text == "The model's server cannot be understood: a piece of its answer is no part of one."


@pytest.mark.parametrize("error", [None, httpx.ReadError("gone")])
async def test_a_stream_without_its_own_end_is_broken(error: Exception | None) -> None:
    """Even if the connection was closed as it should be; what came before has been given."""
    events = read_events(_response([b'data: {"a": 1}\n\n'], error), _BOUNDS)
    assert await anext(events) == [{"a": 1}]
    with pytest.raises(UpstreamDropped):
        await anext(events)


def test_chunk_goes_on_in_its_own_bytes() -> None:
    """A received chunk is written as it came, any other one as JSON in ASCII: lone surrogates have no UTF-8."""
    assert event_of(Received({"a": 1})) == b'data: {"a":1}\n\n'
    assert event_of({"a": "\ud800"}) == b'data: {"a":"\\ud800"}\n\n'


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b"data: " + b"x" * 60, b"x" * 60], "a piece of its answer has more than 100 bytes"),
        ([b'data: {"a":\n'] * 20, "a piece of its answer has more than 100 bytes"),
        ([b'data: {"a": [' + b"[]," * 300_000 + b"[]]}\n\n"], "too many values"),
    ],
    ids=["line without an end", "event without an end", "nothing but structure"],
)
async def test_server_that_sends_without_end_is_not_read_to_its_end(pieces: list[bytes], words: str) -> None:
    """What was asked for bounds what is read, and the client is told whose fault it is."""
    bounds = (100, 1000) if len(b"".join(pieces)) < 10_000 else _BOUNDS
    with pytest.raises(UpstreamError, match="server") as caught:
        await _read(pieces, bounds)
    assert words in caught.value.text
    assert caught.value.response.status_code == 502
    assert overflow_from_text(caught.value.text) is None


async def test_what_came_before_a_piece_that_cannot_be_read_reaches_the_client() -> None:
    """Though both come in one read."""
    said = [f'data: {{"choices": [{{"delta": {{"content": "{word}"}}}}]}}\n\n' for word in ("So", "far")]
    hostile = 'data: {"a": [' + "[]," * 300_000 + "[]]}\n\n"
    stream = read_events(_response(["".join((*said, hostile)).encode()]), _BOUNDS)
    batch = await anext(stream)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in batch] == ["So", "far"]
    with pytest.raises(UpstreamError) as caught:
        await anext(stream)
    assert "too many values" in caught.value.text


def test_deeply_nested_json_is_not_an_object() -> None:
    """JSON made to exhaust the stack is passed over like any other nonsense."""
    assert json_object(b"[" * 200_000) == {}
