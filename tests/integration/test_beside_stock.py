"""The first rule of a guard: whoever passes through it unharmed by the stock proxy passes through unharmed here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.integration.bench import Bench, open_bench
from tests.integration.raw_server import PATHS, RawServer, Read, read, serve_raw

_USAGE = {"prompt_tokens": 60, "completion_tokens": 20, "total_tokens": 80}
_DONE = b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RawServer]:
    """One window for both deployments."""
    with serve_raw(4096) as served:
        yield served


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, server: RawServer) -> Iterator[Bench]:
    """The same server behind a guarded deployment and behind one that is not."""
    once = {"num_retries": 0, "disable_cooldowns": True}
    entries = [server.entry("guarded"), server.entry("stock", enabled=False)]
    with open_bench(tmp_path_factory.mktemp("beside"), [], {}, entries=entries, router_settings=once) as opened:
        yield opened


def _frame(choice: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    choices = [] if choice is None else [{"index": 0, "finish_reason": None, **choice}]
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **fields}


def _events(*deltas: Any, reason: Any = "stop", key: str = "delta") -> list[bytes]:
    frames = [_frame({key: delta}) for delta in deltas]
    frames += [_frame({"delta": {}, "finish_reason": reason}), _frame(None, usage=_USAGE)]
    return [b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames] + [_DONE]


def _call(name: str = "read", arguments: Any = '{"path": "a"}', **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def _called(*calls: dict[str, Any]) -> list[bytes]:
    return _events(*({"tool_calls": [call]} for call in calls), reason="tool_calls")


_SAID = {"content": "One two three"}
_TEXT = "One two three"
_READ_B = '{"path": "b"}'
_TWO = (("read", '{"path": "a"}'), ("read", _READ_B))
_BYTES = b"".join(_events(_SAID))
_TABLE: dict[str, tuple[list[bytes], str | tuple[tuple[str, str], ...]]] = {
    "index is null": (_called(_call(index=None, id="a")), _TWO[:1]),
    "no index": (_called(_call(id="a"), _call(arguments=_READ_B, id="b")), _TWO),
    "another id at an index": (_called(_call(index=0, id="a"), _call(arguments=_READ_B, index=0, id="b")), _TWO),
    "no id at an index": (_called(_call(index=0), _call(arguments=_READ_B, index=0)), _TWO),
    "one id at two indices": (_called(_call(index=0, id="a"), _call(arguments=_READ_B, index=1, id="a")), _TWO),
    "arguments are an object": (_called(_call(arguments={"path": "a"}, index=0, id="a")), _TWO[:1]),
    "calls are an object": (_events({"tool_calls": _call(index=0, id="a")}, reason="tool_calls"), _TWO[:1]),
    "id is a number": (_called(_call(index=0, id=7)), _TWO[:1]),
    "calls without a reason": (_events({"tool_calls": [_call(index=0, id="a")]}, reason=None), _TWO[:1]),
    "content is parts": (_events({"content": [{"type": "text", "text": "One two"}, {"text": " three"}]}), _TEXT),
    "content is a part": (_events({"content": {"type": "text", "text": _TEXT}}), _TEXT),
    "message in place of delta": (_events(_SAID, key="message"), _TEXT),
    "text in place of delta": (_events(_TEXT, key="text"), _TEXT),
    "event in many lines": ([_BYTES.replace(b'"model"', b'\ndata: "model"')], _TEXT),
    "carriage returns": ([_BYTES.replace(b"\n", b"\r")], _TEXT),
    "both line ends, cut": ([bytes([each]) for each in _BYTES.replace(b"\n", b"\r\n")], _TEXT),
    "byte order mark": ([b"\xef\xbb\xbf", _BYTES], _TEXT),
    "single newlines": ([_BYTES.replace(b"\n\n", b"\n")], _TEXT),
    "no UTF-8": ([_BYTES.replace(b"three", b"\xff")], "One two \ufffd"),
    "an end without a mark": ([_BYTES.removesuffix(_DONE)], _TEXT),
    "a mark without an end": ([_events(_SAID)[0], _DONE], _TEXT),
}


@pytest.mark.parametrize("route", PATHS)
def test_answer_of_another_shape_is_read(bench: Bench, server: RawServer, route: str) -> None:
    """A chunk is repaired: the client has the text and the calls that the server has meant, in one request."""
    wrong = {}
    for name, (pieces, right) in _TABLE.items():
        got = _asked(bench, server, route, "guarded", pieces, stream=True)
        said = got.text if isinstance(right, str) else tuple((name, json.loads(args)) for name, args in got.calls)
        wanted = right if isinstance(right, str) else tuple((name, json.loads(args)) for name, args in right)
        if said != wanted or not got.is_whole or len(server.bodies) != 1:
            wrong[name] = got, len(server.bodies)
    assert wrong == {}


_BROKEN = {
    "nothing": [],
    "only the mark": [_DONE],
    "comments": [b": ping\n\n", _DONE],
    "no JSON": [b"data: {broken\n\n", _DONE],
    "no part of an answer": [b'data: {"choices": [7]}\n\n', _DONE],
    "no JSON in between": [*_events(_SAID)[:1], b"data: {broken\n\n", *_events()],
    "neither an end nor the mark": _events(_SAID)[:1],
    "half of a call, and the mark": [*_events({"tool_calls": [_call(arguments='{"path', index=0, id="a")]})[:1], _DONE],
    "half of a call": _events({"tool_calls": [_call(arguments='{"path', index=0, id="a")]})[:1],
}


@pytest.mark.parametrize("route", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_broken_answer_is_an_error(bench: Bench, server: RawServer, route: str, stream: bool) -> None:
    """And never an empty answer, or the first part of one as if it were whole."""
    answers = {name: _asked(bench, server, route, "guarded", pieces, stream=stream) for name, pieces in _BROKEN.items()}
    assert [name for name, got in answers.items() if got.is_whole] == []


def _asked(
    bench: Bench, server: RawServer, route: str, model: str, pieces: Sequence[bytes], *, stream: bool, **fields: Any
) -> Read:
    server.pieces, server.then = pieces, ()
    server.bodies.clear()
    return read(bench.proxy, route, model, stream=stream, **fields)
