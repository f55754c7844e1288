"""A compacted request's tool, and what it has found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from litellm_compaction.core.messages import ToolCall
from litellm_compaction.engine import MOST_LOOKUPS, RECALL, PreparedRequest, additions
from litellm_compaction.stores import Originals
from litellm_compaction.stores.sqlite import MemoryRows
from tests.builders import JsonDict, assistant, chat
from tests.engine.bench import Bench

TOOL: JsonDict = {"type": "function", "function": {"name": "read_file", "parameters": {}}}
FACT = "that bird answers to norahegral"
# Each answer has so many things to keep that a record keeps few of them.
_KINDS = ("or", "ib", "un", "ek")


def noise(at: int) -> str:
    named = [f"{kind}{number}" for number in range(at, at + 6) for kind in _KINDS]
    return " and ".join(f"one {name} answers to {name[::-1]}" for name in named)


LONG = [
    assistant(f"{each['content'][:60]} {noise(6 * at)}") if each["role"] == "assistant" else each
    for at, each in enumerate(chat(60, words=40))
]
LONG[12] = assistant(f"{LONG[12]['content']} and {FACT} and {LONG[12]['content']}")


class Scene:
    """A conversation of which the model has lost a fact.

    Attributes:
        secret: the master key.
    """

    def __init__(self) -> None:
        self.secret: str | None = "sk-master"
        rows = MemoryRows(ttl_s=100, max_bytes=10_000_000)
        self.originals = Originals(rows, ttl_s=100, secret=lambda: self.secret)
        self.bench = Bench(originals=self.originals)

    async def sent(self, raw: list[JsonDict], **changes: Any) -> PreparedRequest:
        options: dict[str, Any] = {"tools": [TOOL], "keep_originals": "compacted", "carries_calls": True}
        return await self.bench.guard(raw, **{**options, **changes})

    async def look_up(
        self,
        prepared: PreparedRequest,
        *queries: str,
        left: int = MOST_LOOKUPS,
    ) -> None:
        calls = [ToolCall(id="c", name=RECALL, arguments=query) for query in queries]
        await self.bench.compactor.recaller.look_up(prepared, "", calls, left)


def shown(prepared: PreparedRequest) -> list[str]:
    assert prepared.messages is not None
    return [message.text for message in prepared.messages]


def names(prepared: PreparedRequest) -> list[str] | None:
    return None if prepared.tools is None else [tool["function"]["name"] for tool in prepared.tools]  # type: ignore[index, call-overload, misc]


@pytest.mark.parametrize(
    "changes",
    [
        {"recall": "off"},
        {"keep_originals": "off"},
        {"carries_calls": False},
        {"is_client_summary": True},
        {"tools": []},
        {"tools": [TOOL, {"type": "function", "function": {"name": RECALL}}]},
        {"tools": [{"name": "older", "parameters": {}}]},
        {"tools": ["none"]},
    ],
)
async def test_others_do_not(changes: dict[str, Any]) -> None:
    """If nothing is kept, if a call could reach the client, or if the client has such a tool itself."""
    prepared = await Scene().sent(LONG, **changes)
    assert (prepared.action, prepared.tools) == ("compacted", None)


@pytest.mark.parametrize(
    ("arguments", "query"),
    [
        ('{"query": "bird"}', "bird"),
        ('{"text": "bird"}', "bird"),
        ('"bird"', "bird"),
        ("bird", "bird"),
        ("[" * 100_000, None),
        ("{}", None),
        ('{"query": 7}', None),
        ("", None),
    ],
)
async def test_any_arguments_are_answered(arguments: str, query: str | None) -> None:
    """And go on as JSON, which servers read again."""
    scene = Scene()
    prepared = await scene.sent(LONG)
    await scene.look_up(prepared, arguments)
    again = await scene.sent(LONG)
    assert again.messages is not None
    [call] = again.messages[-2].calls
    assert isinstance(json.loads(call.arguments), dict)
    assert (FACT in again.messages[-1].text) == (query is not None)


async def test_more_calls_than_are_left_are_told_so() -> None:
    """Each call has its result, under an id of ours: the model's may be the same, or none that a template takes."""
    scene = Scene()
    prepared = await scene.sent(LONG)
    await scene.look_up(prepared, '{"query": "bird"}', '{"query": "parser"}', left=1)
    again = await scene.sent(LONG)
    assert again.messages is not None
    ids = [call.id for call in again.messages[-3].calls]
    assert [message.call_id for message in again.messages[-2:]] == ids
    assert [len(each) for each in {*ids}] == [9, 9]
    assert FACT in again.messages[-2].text
    assert "No more look-ups" in again.messages[-1].text


async def test_the_request_itself_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another master key nothing that was kept can be read; a search that fails costs no answer."""
    scene = Scene()
    prepared = await scene.sent(LONG)
    scene.secret = "sk-another"
    await scene.look_up(prepared, '{"query": "bird"}', '{"query": "zebra"}')
    *_, found, nothing = shown(await scene.sent(LONG))
    assert FACT in found
    assert nothing.startswith("Nothing was found in the earlier conversation, as far as it is kept, for: zebra")
    monkeypatch.setattr(additions, "search", None)
    await scene.look_up(prepared, '{"query": "bird"}')
    assert "cannot be searched" in shown(await scene.sent(LONG))[-1]
