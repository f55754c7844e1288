"""Chunks of an answer, taken as they come."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.core.cuts import settled_length
from litellm_compaction.core.messages import Request
from litellm_compaction.engine import RECALL
from litellm_compaction.proxy.answer import relay
from litellm_compaction.proxy.answer.client import SILENT, Asked, OneAnswer
from litellm_compaction.proxy.answer.legs import Leg
from litellm_compaction.proxy.answer.relay import Relay
from tests.builders import assistant, parsed
from tests.engine.test_additions import LONG, Scene
from tests.proxy.answer.wired import Body, Wire, chunk, sse, text_of


async def test_white_space_blank_by_blank_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the window's end a word is held until the next begins; what stands behind it was read with each blank."""
    looked = [0]

    def counting(text: str) -> int:
        looked[0] += len(text)
        return settled_length(text)

    monkeypatch.setattr(relay, "settled_length", counting)
    pieces = ["word " * 1_400, *[" "] * 4_000, "last"]
    wire = Wire([lambda: sse(*map(said, pieces), chunk({}, "stop"))], window_tokens=2048)
    assert text_of(await wire.ask(stream=True)) == "".join(pieces)
    assert 0 < looked[0] < 20_000


async def test_what_may_begin_a_stop_string_waits_for_more() -> None:
    """A stream that is stopped there could not take it back; what turns out to be another word is sent after all."""
    wire = Wire([lambda: sse(*map(said, ["Hello Us", "hers", " Use", " it"]), chunk({}, "stop"))])
    answer = await wire.ask(stream=True, stop=["User:"])
    bodies = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    texts = [choice["delta"].get("content") for body in bodies for choice in body["choices"]]
    assert [text for text in texts if text] == ["Hello ", "Ushers", " ", "Use it"]


def said(text: str) -> Body:
    return chunk({"content": text})


def fragment(arguments: str = "", **fields: Any) -> dict[str, Any]:
    name = {"name": fields.pop("name")} if "name" in fields else {}
    return {**fields, "function": {**name, "arguments": arguments}}


async def opened(*sent: str, **changes: Any) -> Relay:
    """Of a stream that may have calls of our tool."""
    prepared = await Scene().sent(LONG)
    asked = Asked(request=Request(messages=()), output_tokens=None, is_json=False, notices=SILENT, wants_usage=False)
    one = OneAnswer(asked)
    one.text += sent
    return Relay(Leg(**{"prepared": prepared, "max_tokens": 500, **changes}), one)


async def test_a_first_word_that_is_held_back_is_no_thought() -> None:
    """Beside other answers no text goes out that ends inside a word; the answer has begun all the same."""
    taken = await opened(thoughts_tokens=4)
    taken.has_company = True
    for delta in ({"reasoning_content": "So it is"}, {"content": "incomprehensibilities"}):
        taken.take(chunk(delta))
    assert taken.generated.tokens >= 4
    assert taken.end is None


async def test_what_is_lost_is_no_more_than_the_server_has_counted() -> None:
    """A call that was cut, of which our count is too high."""
    taken = await opened()
    taken.take(chunk({"tool_calls": [fragment('{"text": "' + "word " * 600, index=0, id="c", name="write")]}))
    taken.take({"choices": [], "usage": {"prompt_tokens": 60, "completion_tokens": 500, "total_tokens": 560}})
    taken.take(chunk({}, "length"))
    taken.closed()
    assert (taken.end, taken.cut_call_tokens > 600, taken.lost_tokens) == ("limit", True, 500)


@pytest.mark.parametrize("takes", [True, False])
async def test_thoughts_behind_the_text_go_where_they_are_read(takes: bool) -> None:
    """LiteLLM makes events of /v1/responses of them that belong to no item."""
    taken = await opened("It was so. ")
    taken.one.asked = replace(taken.one.asked, takes_late_thoughts=takes)
    assert bool(taken.take(chunk({"reasoning_content": "Go on."}))) == takes
    assert taken.generated.exact() > 0


async def test_a_server_that_counts_more_has_begun_nothing_anew() -> None:
    """A larger number than ours is one of a repeated text only where a text came again."""
    taken = await opened("The first part of an answer ")
    taken.take(said("goes on with words that nobody has read yet, and some more."))
    taken.take({"choices": [], "usage": {"prompt_tokens": 60, "completion_tokens": 100, "total_tokens": 160}})
    taken.take(chunk({}, "stop"))
    taken.closed()
    assert taken.lost_tokens == 0


async def test_shown_text_that_a_server_sends_back_ends_nothing() -> None:
    """With the prompt it may pass the line of a stop, and nothing of it has been generated."""
    taken = await opened(text := " ".join(map(str, range(9000))))
    prepared = taken.leg.prepared
    way = replace(prepared.continuation, way="prefill")
    prepared = replace(prepared, messages=parsed([assistant(text)]), continuation=way)
    taken = Relay(replace(taken.leg, prepared=prepared), taken.one)
    assert (taken.take(said(text)), taken.generated.tokens > 8192, taken.end) == ([], True, None)
    assert (taken.take(said(" and on")), taken.generated.tokens < 9) == ([{"content": " and on"}], True)


@pytest.mark.parametrize("error", [None, "", {}, False])
async def test_error_that_says_nothing_is_none(error: object) -> None:
    """Some servers write the field into each chunk."""
    taken = await opened()
    assert taken.take({**said("Hello"), "error": error}) == [{"content": "Hello"}]
    assert taken.take({"error": error}) == []
    assert taken.end is None


async def test_thought_keeps_each_name_of_its_field() -> None:
    """vLLM writes both, and clients read one or the other; it is counted once."""
    taken = await opened()
    thought = {"reasoning_content": "Hm, so.", "reasoning": "Hm, so."}
    assert taken.take(chunk(thought)) == [thought]
    once = await opened()
    once.take(chunk({"reasoning": "Hm, so."}))
    assert taken.tokens == once.tokens


@pytest.mark.parametrize(("completion_tokens", "end"), [(100, "done"), (498, "done"), (499, "limit"), (None, "done")])
async def test_length_below_every_limit_of_ours_is_the_servers_own(completion_tokens: int | None, end: str) -> None:
    """It would end the next request as well; LM Studio reports one token less than the limit."""
    taken = await opened()
    taken.take(said("Three short words."))
    usage = {"prompt_tokens": 60, "completion_tokens": completion_tokens, "total_tokens": 600}
    taken.take({"choices": [], "usage": usage if completion_tokens else None})
    taken.take(chunk({}, "length"))
    taken.closed()
    assert taken.end == end


OURS = ("recall", '{"query": "bird"}')


@pytest.mark.parametrize(
    ("fragments", "clients"),
    [
        ([fragment(index=0, id="c"), fragment(index=0, name=RECALL), fragment(OURS[1], index=0)], []),
        ([fragment(OURS[1], index=0), fragment(index=0, name=RECALL)], []),
        ([fragment(OURS[1], name=RECALL)], []),
        ([fragment(OURS[1], name=RECALL, index=None), fragment("{}", name="read", index=None)], ["read"]),
        ([fragment(OURS[1], name=RECALL, index=0), fragment(index=1), fragment("{}", index=1, name="read")], ["read"]),
        ([fragment(index=0), fragment("{}", index=0, name="read"), fragment(OURS[1], index=1, name=RECALL)], ["read"]),
    ],
)
async def test_our_call_is_held_however_it_comes(fragments: list[dict[str, Any]], clients: list[str]) -> None:
    """Its name in a later chunk, without an id, without an index: the client sees no piece of it."""
    taken = await opened()
    sent = [delta for each in fragments for delta in taken.take(chunk({"tool_calls": [each]}))]
    sent += [*taken.take(chunk({}, "tool_calls")), *taken.closed()]
    calls = [call for delta in sent for call in delta["tool_calls"]]
    assert [call["function"]["name"] for call in calls] == clients
    assert all(call.get("index") in (0, None) for call in calls)
    assert [(call.name, call.arguments) for call in taken.recalls] == [OURS]
    assert bool(taken.calls.of("clients")) == bool(clients)


@pytest.mark.parametrize(("reason", "kept", "ids"), [("length", "whole", [0, 1]), ("tool_calls", "all", [0, 1, 2])])
async def test_each_call_comes_in_an_event_of_its_own(reason: str, kept: Any, ids: list[int]) -> None:
    """LlamaIndex reads the first call of an event and no other (llms-openai, `update_tool_calls`)."""
    taken = await opened()
    for index in range(3):
        # Of the last a part.
        arguments = "{}" if index in ids else "{"
        assert taken.take(chunk({"tool_calls": [fragment(arguments, index=index, id=f"c{index}", name="read")]})) == []
    assert taken.take(chunk({}, reason)) == []
    sent = taken.surrendered(kept)
    assert [[call["id"] for call in delta["tool_calls"]] for delta in sent] == [[f"c{index}"] for index in ids]
