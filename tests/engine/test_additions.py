"""What is added to a compacted request: a tool and what it has found, excerpts before a person's newest words, or pins.

Pinned messages stay verbatim, whichever compaction comes; within a tenth of the window.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from litellm_compaction.core.go_on import Partial
from litellm_compaction.core.messages import Message, ToolCall
from litellm_compaction.engine import ALL_WAYS, MOST_LOOKUPS, RECALL, PreparedRequest, additions
from litellm_compaction.errors import BadWish, SummaryFailed
from litellm_compaction.recall import BEGIN
from litellm_compaction.stores import Originals
from litellm_compaction.stores.sqlite import MemoryRows
from tests.builders import JsonDict, assistant, chat, request_of, user
from tests.engine.bench import Bench, FakeAsk, sent
from tests.engine.test_records import said

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
    """A conversation of which the model has lost a fact; `secret` is the master key."""

    def __init__(self) -> None:
        self.secret: str | None = "sk-master"
        rows = MemoryRows(ttl_s=100, max_bytes=10_000_000)
        self.originals = Originals(rows, secret=lambda: self.secret)
        self.bench = Bench(originals=self.originals)

    async def sent(self, raw: list[JsonDict], **changes: Any) -> PreparedRequest:
        options: dict[str, Any] = {"tools": [TOOL], "keep_originals": "compacted", "carries_calls": True}
        return await self.bench.guard(raw, **{**options, **changes})

    async def look_up(self, prepared: PreparedRequest, *queries: str, left: int = MOST_LOOKUPS, said: str = "") -> None:
        calls = [ToolCall(id="c", name=RECALL, arguments=query) for query in queries]
        await self.bench.compactor.recaller.look_up(prepared, said, calls, left)


def shown(prepared: PreparedRequest) -> list[str]:
    assert prepared.messages is not None
    return [message.text for message in prepared.messages]


def names(prepared: PreparedRequest) -> list[str] | None:
    return None if prepared.tools is None else [tool["function"]["name"] for tool in prepared.tools]  # type: ignore[index, call-overload, misc]


OFF: list[dict[str, Any]] = [{"recall": "off"}, {"keep_originals": "off"}, {"is_client_summary": True}]
OLDER = {"name": "older", "parameters": {}}
OWN = {"type": "function", "function": {"name": RECALL}}


@pytest.mark.parametrize(
    "changes", [*OFF, {"carries_calls": False}, *({"tools": tools} for tools in ([], [TOOL, OWN], [OLDER], ["none"]))]
)
async def test_others_have_no_tool(changes: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(("times", "found"), [(2000, FACT), (3000, "There is no room")])
async def test_an_answer_that_goes_on_looks_up_as_well(times: int, found: str) -> None:
    """Behind the client's last message, where the answer so far is shown, or its end; our tool counts in each way."""
    scene, request = Scene(), request_of(*LONG, tools=[TOOL])
    engine, target = scene.bench.compactor, scene.bench.target(8192, is_lmstudio=True)
    context = scene.bench.context(target=target, keep_originals="compacted", carries_calls=True)
    plan = await engine.go_on(request, Partial(text="It is " * times), context, ways=ALL_WAYS)
    plan = (await engine.continued(plan)).continuation.plan or plan
    prepared = await engine.continued(plan, ways={"turn"})
    counted = await engine.measurer.count_request(prepared.measured, prepared.sent(request))
    assert prepared.count.tokens == counted.tokens
    await scene.look_up(prepared, '{"query": "bird"}', said="It is " * times)
    *_, said_before, told = shown(await scene.sent(LONG))
    assert (said_before.endswith("It is It is "), found in told) == (True, True)


# ------------------------------------------------------------------ excerpts

QUOTED = [*LONG[:12], assistant(f"{noise(27)} and {FACT} and {noise(33)}"), *LONG[13:], assistant("Well.")]
QUESTION = "And that bird?"


async def asked(
    raw: list[JsonDict], bench: Bench | None = None, *, tools: Sequence[JsonDict] = (), **changes: Any
) -> PreparedRequest:
    bench = bench or Bench(ask=FakeAsk(SummaryFailed("error")))
    return await bench.guard(raw, tools=tools, **{"keep_originals": "compacted", **changes})


def last(prepared: PreparedRequest) -> Message:
    assert prepared.messages is not None
    return prepared.messages[-1]


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        *(([*QUOTED, user(QUESTION)], changes) for changes in (*OFF, {"recall": "tool"}, {"tools": [TOOL]})),
        ([*QUOTED, user(QUESTION)], {"goes_on": True}),
        ([*QUOTED, user(QUESTION), assistant("It is")], {}),
        ([*QUOTED, user(f"<system-reminder>{QUESTION}</system-reminder>")], {}),
        ([*QUOTED, user("Go on with the parser, please.")], {}),
        ([*QUOTED, user(QUESTION), {"role": "tool", "tool_call_id": "c", "content": "A bird answers."}], {}),
    ],
)
async def test_others_get_no_excerpts(raw: list[JsonDict], changes: dict[str, Any]) -> None:
    """Agents, machines' words, requests of ours or of a client's own, and what nothing was said about."""
    prepared = await asked(raw, **changes)
    assert prepared.action == "compacted"
    assert prepared.excerpts == 0
    assert not any(BEGIN in message.text for message in prepared.messages or ())


async def test_nobody_elses_words_are_quoted() -> None:
    """Another tenant's conversation, the same but for the fact, does not get it."""
    bench = Bench(ask=FakeAsk(SummaryFailed("error")))
    assert FACT in last(await asked([*QUOTED, user(QUESTION)], bench)).text
    others = [{**each, "content": str(each["content"]).replace(FACT, "")} for each in QUOTED]
    for scope in ("team", "others"):
        prepared = await asked([*others, user(QUESTION)], bench, scope=scope)
        assert prepared.action == "compacted"
        assert not any(FACT in message.text for message in prepared.messages or ())


# ------------------------------------------------------------------ pins

RULE = "Whatever happens, the port of the walrus stays 9143."
WINDOW = 8192


def ruled(tokens: int) -> list[JsonDict]:
    """A conversation near whose beginning the person sets a rule among other words."""
    first, *rest = said(tokens)
    return [
        first,
        user("Begin."),
        assistant("Yes."),
        user(f"{'Before it. ' * 20}{RULE} {'After it. ' * 20}"),
        *rest[1:],
    ]


def verbatim(raw: list[JsonDict], messages: Any) -> bool:
    return any(str(raw[3]["content"]) in message.text for message in messages)


async def grown(bench: Bench, raw: list[JsonDict], **context: Any) -> list[JsonDict]:
    """The conversation when it has been compacted twice more; every request is checked."""
    rounds = 0
    while rounds < 2:
        raw = [*raw, assistant("word " * 200), user("Go on.")]
        prepared = await bench.guard(raw, WINDOW, **context)
        assert verbatim(raw, sent(raw, prepared))
        rounds += prepared.action == "compacted"
    return raw


@pytest.mark.parametrize("strategy", ["summary", "prune", "handoff"])
async def test_a_pinned_message_stays_in_every_later_compaction(strategy: str) -> None:
    """Once it is pinned, also in requests without the list; without a pin it would not."""
    raw = ruled(6700)
    bench = Bench()
    assert not verbatim(raw, sent(raw, await bench.guard(raw, WINDOW, strategy=strategy, keep_recent_messages=1)))
    bench = Bench()
    pins = (" ".join(RULE.split()[:8]),)
    messages = sent(raw, await bench.guard(raw, WINDOW, strategy=strategy, pins=pins))
    assert verbatim(raw, messages)
    await grown(bench, raw, strategy=strategy)


async def test_the_last_list_holds() -> None:
    """An empty one takes all pins away; other conversations and tenants never had them."""
    raw = ruled(6700)
    bench = Bench()
    assert verbatim(raw, sent(raw, await bench.guard(raw, WINDOW, pins=(RULE,))))
    assert not verbatim(raw, sent(raw, await bench.guard(raw, WINDOW, scope="others")))
    other = [raw[0], user("Another."), *raw[2:]]
    assert not verbatim(other, sent(other, await bench.guard(other, WINDOW)))
    await bench.guard(raw, WINDOW, pins=())
    assert not [row for row in await bench.store.rows.scan() if row.key.startswith("f:pins:") and row.body]
    action = "reused"
    while action != "compacted":
        raw = [*raw, assistant("word " * 200), user("Go on.")]
        prepared = await bench.guard(raw, WINDOW)
        action = prepared.action
    assert not verbatim(raw, sent(raw, prepared))


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        (("No such words.",), "Pin 1 is in no message"),
        ((RULE, "No more such."), "Pin 2 is in no message"),
        (("answer 5 answer 5",), "Pin 1 is in no message"),
    ],
)
async def test_a_pin_names_words_of_the_persons(pins: tuple[str, ...], says: str) -> None:
    """Not the model's, and nobody's; the refusal does not quote it."""
    with pytest.raises(BadWish, match=says) as raised:
        await Bench().guard(ruled(6700), WINDOW, pins=pins)
    assert pins[-1] not in str(raised.value)


async def test_pins_take_a_tenth_of_the_window() -> None:
    """More is refused; in a window that has shrunk they stay as far as they fit."""
    bench, raw = Bench(), ruled(6700)
    with pytest.raises(BadWish, match=r"at most 102 can stay pinned"):
        await bench.guard(raw, 1024, pins=(RULE,))
    assert verbatim(raw, sent(raw, await bench.guard(raw, WINDOW, pins=(RULE,))))
    assert not verbatim(raw, sent(raw, await bench.guard(raw, 1024)))
