"""What a server's chunk says, whatever its shape."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.proxy.answer.calls import Calls
from litellm_compaction.proxy.answer.sse import as_chunk

_READ = {"name": "read", "arguments": '{"a": 1}'}
_TEXT = {"delta": {"content": "one two"}, "finish_reason": None}


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"content": "one two"}, "finish_reason": None},
        {"delta": {"content": [{"type": "text", "text": "one"}, " two"]}},
        {"delta": {"content": {"text": "one two"}}, "finish_reason": ""},
        {"delta": {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "one two"]}},
        {"delta": "one two", "finish_reason": False},
        {"delta": None, "message": {"content": "one two"}},
        {"text": "one two"},
    ],
)
def test_text_is_read(choice: dict[str, Any]) -> None:
    """In parts, in a message, or in the field of a text completion."""
    event = {"id": "c", "choices": [choice]}
    assert as_chunk(event) == {"id": "c", "choices": [_TEXT]}
    assert (as_chunk(event) is event) == (choice == _TEXT)


@pytest.mark.parametrize(
    "calls",
    [
        [{"id": "c", "function": _READ}],
        {"id": "c", "function": _READ},
        [{"id": "c", "index": {}, "function": {**_READ, "arguments": {"a": 1}}}],
        [{"id": "c", "function": _READ}, None],
    ],
)
def test_call_is_read(calls: object) -> None:
    """Its arguments as an object, its index as anything, itself without a list around it."""
    read = as_chunk({"choices": {"delta": {"tool_calls": calls}}})
    assert read is not None
    (call,) = read["choices"][0]["delta"]["tool_calls"]
    assert {key: call.get(key) for key in ("id", "index", "function")} == {"id": "c", "index": None, "function": _READ}


@pytest.mark.parametrize("choices", [True, 7, "text", [None], [[]]])
def test_what_says_nothing_is_no_chunk(choices: object) -> None:
    """None of these ends an answer with an error of Python's own, and a traceback in the log."""
    assert as_chunk({"choices": choices}) is None


def test_parts_without_text_stay_as_they_are() -> None:
    """A picture is for the client to read."""
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    assert as_chunk({"choices": [{"delta": {"content": picture}}]})["choices"][0]["delta"] == {"content": picture}  # type: ignore[index]


def _of(arguments: str, name: str | None = None, **fields: Any) -> dict[str, Any]:
    return {**fields, "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    "fragments",
    [
        [_of("{", "a", index=0, id="x"), _of("}", index=0), _of("{", "b", index=1, id="y"), _of("}", index=1)],
        [_of("{", "a", index=0, id="x"), _of("{", "b", index=1, id="y"), _of("}", id="x"), _of("}", id="y")],
        [_of("{}", "a", index=0, id="x"), _of("{", "b", index=0, id="y"), _of("}", index=0)],
        [_of("{}", "a", index=0, id="x"), _of("{}", "b", index=1, id="x")],
        [_of("{", "a", index=0, id="x"), _of("}", index=0, id="new"), _of("{}", "b", index=1, id="y")],
        [_of("{", "a", index=3), _of("}", index=3), _of("{}", "b", index=3)],
        [_of("{", "a", id="x"), _of("}"), _of("{}", "b", id="y")],
        [_of("{", "a"), _of("}"), _of("{}", "b")],
        [_of("{", index=0, id="x"), _of("}", "a", index=0), _of("{}", "b", index=1)],
    ],
)
def test_fragments_are_put_together_by_id_then_by_index(fragments: list[dict[str, Any]]) -> None:
    """However a server numbers two calls, they are two; an id of ours is as long as Mistral's templates ask for."""
    calls = Calls()
    for fragment in fragments:
        calls.take([fragment], may_begin=False)
    held = calls.given_up("all")
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in held] == [("a", "{}"), ("b", "{}")]
    assert len({call["index"] for call in held}) == 2
    assert {len(call["id"]) for call in held} <= {1, 9}
