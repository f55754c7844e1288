"""The first rule of a guard: whoever passes through it unharmed by the stock proxy passes through unharmed here."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from litellm import Router

from tests.integration.bench import Bench, open_bench
from tests.integration.raw_server import RAW_ROUTES, RawServer, Read, ask_raw, serve_raw

_SOME = settings(max_examples=max(12, settings().max_examples // 4))
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
_LIMITED = json.dumps(
    {**_frame(None, usage=_USAGE), "choices": [{"index": 0, "message": _SAID, "finish_reason": "length"}]}
).encode()
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
    "a thought among the parts": (_events({"content": [{"type": "thinking", "thinking": []}, {"text": _TEXT}]}), _TEXT),
    "an error that is none": ([each.replace(b"{", b'{"error": "", ', 1) for each in _events(_SAID)], _TEXT),
    "content is a part": (_events({"content": {"type": "text", "text": _TEXT}}), _TEXT),
    "message in place of delta": (_events(_SAID, key="message"), _TEXT),
    "text in place of delta": (_events(_TEXT, key="text"), _TEXT),
    "carriage returns": ([_BYTES.replace(b"\n", b"\r")], _TEXT),
    "both line ends, cut": ([bytes([each]) for each in _BYTES.replace(b"\n", b"\r\n")], _TEXT),
    "byte order mark": ([b"\xef\xbb\xbf", _BYTES], _TEXT),
    "single newlines": ([_BYTES.replace(b"\n\n", b"\n")], _TEXT),
    "no UTF-8": ([_BYTES.replace(b"three", b"\xff")], "One two \ufffd"),
    "an end without a mark": ([_BYTES.removesuffix(_DONE)], _TEXT),
    "a mark without an end": ([_events(_SAID)[0], _DONE], _TEXT),
}


@pytest.mark.parametrize("route", RAW_ROUTES)
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


@pytest.mark.parametrize("route", RAW_ROUTES)
@pytest.mark.parametrize("stream", [True, False])
def test_broken_answer_is_an_error(bench: Bench, server: RawServer, route: str, stream: bool) -> None:
    """And never an empty answer, or the first part of one as if it were whole."""
    answers = {name: _asked(bench, server, route, "guarded", pieces, stream=stream) for name, pieces in _BROKEN.items()}
    assert [name for name, got in answers.items() if got.is_whole] == []


@pytest.mark.parametrize("route", RAW_ROUTES)
def test_limit_of_the_server_is_no_end_of_the_window(bench: Bench, server: RawServer, route: str) -> None:
    """LM Studio's "Limit Response Length": one request, its text and its reason, and no notice."""
    for stream in (True, False):
        theirs, ours = _both(bench, server, route, _events(_SAID, reason="length"), None if stream else _LIMITED)
        assert (ours, len(server.bodies)) == (theirs, 1)


def _both(
    bench: Bench, server: RawServer, route: str, pieces: Sequence[bytes], whole: bytes | None
) -> tuple[Read, Read]:
    """What two clients read, one of a stream if there is no whole answer: without us, and with us."""
    server.whole = whole
    try:
        stock = _asked(bench, server, route, "stock", pieces, stream=whole is None)
        return stock, _asked(bench, server, route, "guarded", pieces, stream=whole is None)
    finally:
        server.whole = None


@st.composite
def _answers(draw: st.DrawFn) -> tuple[bytes, int, bytes]:
    """An answer as a server may write it, well or ill: a stream, the size of its pieces, and the same whole."""
    pick = lambda *kinds: draw(st.sampled_from(kinds))  # noqa: E731
    texts = draw(st.lists(st.text("ab \u00e9\n", min_size=1, max_size=8), max_size=3))
    calls = [
        _call(arguments=json.dumps({"path": path}), index=place, id=f"c{place}")
        for place, path in enumerate(draw(st.lists(st.sampled_from("ab"), max_size=2)))
    ]
    reason = pick("tool_calls", "stop", "length", "eos", None, None) if calls else pick("stop", "length", "eos", None)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts), "tool_calls": calls or None}
    whole = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "usage": _USAGE}
    whole["choices"] = [{"index": 0, "message": message, "finish_reason": reason or "stop"}]
    if pick(True, False):
        as_list = pick(True, False)
        texts = [[{"type": "text", "text": text}] if as_list else {"text": text} for text in texts]
    for call in calls:
        odd = pick("right", "right", "null", "none", "same", "object", "no id")
        if odd == "null":
            call["index"] = None
        elif odd == "none":
            del call["index"]
        elif odd == "same":
            call["index"] = 0
        elif odd == "object":
            call["function"] = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
        elif odd == "no id":
            del call["id"]
    deltas = [*({"content": text} for text in texts), *({"tool_calls": [call]} for call in calls)]
    events = _events(*deltas, reason=reason)
    for odd in (b": ping\n\n", b"data: null\n\n", b"data: {}\n\n", b"data: {broken\n\n", b'data: {"choices": []}\n\n'):
        if draw(st.integers(0, 7)) == 0:
            events.insert(draw(st.integers(0, len(events) - 1)), odd)
    sent = b"".join(events[: len(events) - draw(st.sampled_from([0, 0, 0, 1, 2, 3]))])
    # The stock proxy does not see that a first piece is broken if a byte order mark stands before it.
    mark = pick(b"", b"", b"\xef\xbb\xbf") if b"{broken" not in sent else b""
    sent = mark + sent.replace(b"\n", pick(b"\n", b"\r\n", b"\r"))
    return sent, draw(st.integers(1, 80)), json.dumps(whole).encode()


@_SOME
@given(answer=_answers(), route=st.sampled_from(RAW_ROUTES), stream=st.booleans())
def test_client_reads_what_it_would_read_without_us(
    bench: Bench, server: RawServer, answer: tuple[bytes, int, bytes], route: str, stream: bool
) -> None:
    """Or better, and never less: an answer that is whole without us is whole, with all its text and calls."""
    sent, size, whole = answer
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    theirs, ours = _both(bench, server, route, pieces, None if stream else whole)
    # Behind a byte order mark they do not read the first piece.
    assert theirs.text in ours.text
    # A stream with neither an end nor the mark is broken, and the stock proxy does not say so.
    is_broken = stream and b"[DONE]" not in sent and b'"finish_reason": "' not in sent
    if theirs.is_whole and (theirs.text or theirs.calls) and not is_broken:
        assert ours.is_whole
        assert len(ours.calls) >= len(theirs.calls)
        assert theirs.reason in (ours.reason, "stop", "end_turn")
        assert theirs.calls == ours.calls or all(_is_json(arguments) for _, arguments in ours.calls)


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


_GOES_ON = "enable_mid_stream_fallback_continuation"


@pytest.mark.skipif(_GOES_ON not in inspect.signature(Router).parameters, reason="a newer LiteLLM has it")
def test_litellms_fallback_goes_on_with_a_stream_that_breaks(tmp_path: Path, server: RawServer) -> None:
    """Behind our last chunk, by a deployment that is guarded as well."""
    entries = [server.entry("first"), server.entry("second")]
    entries[1]["model_info"]["supports_assistant_prefill"] = True
    routing = {"num_retries": 0, "fallbacks": [{"first": ["second"]}], _GOES_ON: True}
    with open_bench(tmp_path, [], {"background": "off"}, entries=entries, router_settings=routing) as bench:
        then = [_events({"content": " four."})]
        got = _asked(bench, server, "chat", "first", _events(_SAID)[:1], stream=True, then=then)
        assert (got.text, got.is_whole) == ("One two three four.", True)
        assert all("max_tokens" in body for body in server.bodies)
        assert server.bodies[-1]["messages"][-1]["content"] == _TEXT


def _asked(
    bench: Bench,
    server: RawServer,
    route: str,
    model: str,
    pieces: Sequence[bytes],
    *,
    stream: bool,
    then: Sequence[Sequence[bytes]] = (),
) -> Read:
    server.pieces, server.then = pieces, then
    server.bodies.clear()
    return ask_raw(bench.proxy, route, model, stream=stream)
