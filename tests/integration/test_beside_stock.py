"""The first rule of a guard: whoever passes through it unharmed by the stock proxy passes through unharmed here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.bench import KEY, Bench, open_bench
from tests.integration.harness import lm_studio
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
    url = server.base_url
    entries = [lm_studio("guarded", KEY, url), lm_studio("stock", KEY, url, compaction={"enabled": False})]
    with open_bench(tmp_path_factory.mktemp("beside"), [], {}, entries=entries) as opened:
        yield opened


def _frame(choice: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    choices = [] if choice is None else [{"index": 0, "finish_reason": None, **choice}]
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **fields}


def _events(*deltas: Any, reason: Any = "stop") -> list[bytes]:
    frames = [_frame({"delta": delta}) for delta in deltas]
    frames += [_frame({"delta": {}, "finish_reason": reason}), _frame(None, usage=_USAGE)]
    return [b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames] + [_DONE]


def _call(name: str = "read", arguments: Any = '{"path": "a"}', **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


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


def _asked(bench: Bench, server: RawServer, route: str, model: str, pieces: Sequence[bytes], *, stream: bool) -> Read:
    server.pieces = pieces
    server.bodies.clear()
    return ask_raw(bench.proxy, route, model, stream=stream)
