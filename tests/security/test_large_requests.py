"""Threat: a request that is too large. It costs what the window is, and long work leaves the event loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from litellm_compaction.concurrency import is_long
from litellm_compaction.proxy import wire
from litellm_compaction.tokenizers.vocabulary import Vocabulary
from tests.integration.app import in_loop
from tests.integration.bench import Bench
from tests.integration.harness import CHAT
from tests.security.office import ROUTES, ask, body_of

_WORDS = "some words of a text "
# 4 to 5 MB.
_FILL = _WORDS * 250_000
_HI = {"role": "user", "content": "What is next?"}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
_ONE_OF_MANY = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# What is sent to a window of 8,192 tokens; whether something can be made of it.
_GIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "newest message": ({"messages": [{"role": "user", "content": _FILL}]}, False),
    "many old messages": (
        {
            "messages": [
                *[{"role": r, "content": _WORDS * 2_000} for _ in range(64) for r in ("user", "assistant")],
                _HI,
            ]
        },
        True,
    ),
    "system message": ({"messages": [{"role": "system", "content": _FILL}, _HI]}, False),
    "result": ({"messages": [_HI, _CALL, {"role": "tool", "tool_call_id": "c", "content": _FILL}]}, False),
    "many tools": ({"messages": [_HI], "tools": [_ONE_OF_MANY] * 40_000}, False),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("giant", "group"), [*((giant, "local") for giant in _GIANTS), ("many old messages", "hooked")]
)
def test_what_no_window_holds_is_not_counted_to_its_end(
    office: Bench, giant: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 MB took 7 s of processor time to be refused; now as much is counted as could be tokens of the window."""
    body, can_be_made = _GIANTS[giant]
    counted, lengths = [0], Vocabulary.lengths

    def counting(vocabulary: Vocabulary, texts: Iterable[str]) -> list[int]:
        listed = list(texts)
        counted[0] += sum(map(len, listed))
        return lengths(vocabulary, listed)

    # The simulator has a vocabulary of its own, which it asks otherwise.
    monkeypatch.setattr(Vocabulary, "lengths", counting)
    watch = office.watch(group)
    answer = ask(office, "sk-alice", body_of(group, **body))
    assert counted[0] < 4_000_000
    if can_be_made:
        assert (answer.status_code, answer.headers["x-litellm-compaction"]) == (200, "compacted")
        assert len(json.dumps(watch.bodies)) < 100_000
    else:
        assert "maximum context length is 8192 tokens" in answer.text


_TINY = [{"role": ("user", "assistant")[number % 2], "content": f"go on {number}"} for number in range(1_001)]
_IN_PARTS = [{"role": "user", "content": [{"type": "text", "text": "go on"}] * 1_000}]
_MANY_CALLS = [_HI, {**_CALL, "tool_calls": _CALL["tool_calls"] * 1_000}, _HI]
_LONG_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"messages on {path}": (path, body_of("local", _TINY, path)) for path in ROUTES},
    "parts": (CHAT, body_of("local", _IN_PARTS)),
    "calls": (CHAT, body_of("local", _MANY_CALLS)),
    "a text to complete": ("/v1/completions", {"model": "local", "prompt": "go on " * 170_000}),
    "ids to complete": ("/v1/completions", {"model": "local", "prompt": [[7] * 5000]}),
}
# What walks over all of a request.
_READERS = ("decode", "decode_text", "client_texts", "is_same_request")


def _is_long(given: object) -> bool:
    if isinstance(given, dict):
        return is_long(given.get("messages"), given.get("prompt"), [given.get("prompt")])
    return is_long(getattr(given, "messages", given))


def _watched(monkeypatch: pytest.MonkeyPatch, of_size: Callable[[object], bool]) -> dict[str, set[bool]]:
    """Of each function that walks over a request: whether it has run in the event loop's thread, and in another."""
    on_loop: dict[str, set[bool]] = {}

    async def ident() -> int:
        return threading.get_ident()

    loops = in_loop(ident())

    def watch(name: str) -> None:
        run = getattr(wire, name)

        def watched(*given: Any, **named: Any) -> Any:
            if any(map(of_size, given)):
                on_loop.setdefault(name, set()).add(threading.get_ident() == loops)
            return run(*given, **named)

        monkeypatch.setattr(wire, name, watched)

    for name in _READERS:
        watch(name)
    return on_loop


@pytest.mark.parametrize("group", ["local", "hooked"])
@pytest.mark.parametrize("long", _LONG_REQUESTS)
def test_a_long_request_is_read_beside_the_event_loop(
    office: Bench, long: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading 40,000 messages took 0.7 s, and deciding about them 0.8 s, in which the proxy served nobody."""
    path, body = _LONG_REQUESTS[long]
    office.watch(group)
    on_loop = _watched(monkeypatch, _is_long)
    ask(office, "sk-alice", {**body, "model": group}, path)
    assert {"decode", "decode_text"} & on_loop.keys()
    # `client_texts` reads when it is asked.
    assert {name for name, where in on_loop.items() if True in where} <= {"decode", "client_texts"}
    # What is no chat is not looked at for one.
    assert "to complete" in long or True not in on_loop["decode"]
